"""Functions without parameters, each with its forward and backward: (y, cache) and dx, as a layer's.

They are namespaces, not layers: `y, cache = softmax.forward(x)`, `dx = softmax.backward(dy, cache)`.
"""

from minigrad.backend import array_module, sigmoid


class softmax:
    """y_i = exp(x_i) / sum_j exp(x_j) along the last axis, shifted by the maximum so that nothing overflows."""

    @staticmethod
    def forward(x):
        xp = array_module(x)
        y = xp.exp(x - x.max(axis=-1, keepdims=True))
        y /= y.sum(axis=-1, keepdims=True)
        return y, (y,)

    @staticmethod
    def backward(dy, cache):
        """dx = y * (dy - sum_j y_j dy_j)."""
        y, = cache
        return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


class sum_normalize:
    """y_i = x_i / s, s = sum_j x_j, along the last axis (RRA's normalisation of W_a; undefined at s = 0)."""

    @staticmethod
    def forward(x):
        s = x.sum(axis=-1, keepdims=True)
        y = x / s
        return y, (y, s)

    @staticmethod
    def backward(dy, cache):
        """dx = (dy - sum_j y_j dy_j) / s; so sum_i x_i dx_i = 0: scaling x changes nothing."""
        y, s = cache
        return (dy - (y * dy).sum(axis=-1, keepdims=True)) / s


class tanh:
    """y = tanh(x). Backward: dx = (1 - y^2) dy."""

    @staticmethod
    def forward(x):
        y = array_module(x).tanh(x)
        return y, (y,)

    @staticmethod
    def backward(dy, cache):
        y, = cache
        return (1 - y * y) * dy


class logistic:
    """y = sigma(x) = 1 / (1 + exp(-x)). Backward: dx = y (1 - y) dy."""

    @staticmethod
    def forward(x):
        y = sigmoid(x)
        return y, (y,)

    @staticmethod
    def backward(dy, cache):
        y, = cache
        return y * (1 - y) * dy


class relu:
    """y = max(x, 0). Backward: dx = dy where x > 0, else 0 (at the kink x = 0 the subgradient 0)."""

    @staticmethod
    def forward(x):
        return array_module(x).maximum(x, 0), (x > 0,)

    @staticmethod
    def backward(dy, cache):
        positive, = cache
        return array_module(dy).where(positive, dy, 0)
