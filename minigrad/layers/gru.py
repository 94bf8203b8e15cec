"""GRU: the gated recurrent unit (Cho et al. 2014), with the reset gate after the product, as in cuDNN and PyTorch.

An example of a layer that consists of its equations only: the plain loop of `Recurrent` runs them.
"""

from minigrad.backend import array_module, sigmoid
from minigrad.check import check_count
from minigrad.initializers import gate_blocks, zeros
from minigrad.layers.recurrent import Recurrent
from minigrad.parameter import Parameter


class GRU(Recurrent):
    """h_t = (1 - z_t) n_t + z_t h_{t-1} over a sequence.

    W (d, 3h), U (h, 3h), b_x (3h,), b_h (3h,), columns r | z | n; W and U are initialised by `init`
    (minigrad.initializers.GATE_BLOCKS), the biases with zero. Cho et al. apply the reset gate to h_{t-1} before its
    product and have no b_h.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (h,)), cache; state: h (B, h).
    The dtype is that of x and the parameters together. `rng` has no effect.

    Raises ValueError for wrong shapes, TypeError for wrong dtypes or a mix of devices.
    """

    weights = ("W", "U", "b_x", "b_h")

    def cell(self, x, state, W, U, b_x, b_h):
        """One step (as torch.nn.GRU; some texts write 1 - z for z):

            r, z = sigma(x W + b_x + h U + b_h)
            n = tanh(x W_n + b_xn + r (h U_n + b_hn))
            h' = (1 - z) n + z h

        x (B, d), state (h,), h (B, h) -> (h', (h',)), cache.
        """
        (h,), xp = state, array_module(x)
        x_r, x_z, x_n = xp.split(x @ W + b_x, 3, axis=1)
        h_r, h_z, h_n = xp.split(h @ U + b_h, 3, axis=1)
        r, z = sigmoid(x_r + h_r), sigmoid(x_z + h_z)
        n = xp.tanh(x_n + r * h_n)
        h_new = (1 - z) * n + z * h
        return (h_new, (h_new,)), (x, h, (r, z, n), h_n)

    def cell_backward(self, upstream, cache, W, U, b_x, b_h):
        """The step's gradients: dx, (dh,), (dW, dU, db_x, db_h). da is the gradient of a nonlinearity's argument."""
        dy, (dh_new,) = upstream
        x, h, (r, z, n), h_n = cache
        xp, dh_new = array_module(x), dh_new + dy
        da_n = dh_new * (1 - z) * (1 - n * n)
        da_z = dh_new * (h - n) * z * (1 - z)
        da_r = da_n * h_n * r * (1 - r)
        dx_W = xp.concatenate([da_r, da_z, da_n], axis=1)                    # (B, 3h), of x W + b_x
        dh_U = xp.concatenate([da_r, da_z, da_n * r], axis=1)                # (B, 3h), of h U + b_h
        dh = dh_new * z + dh_U @ U.T
        return dx_W @ W.T, (dh,), (x.T @ dx_W, h.T @ dh_U, dx_W.sum(axis=0), dh_U.sum(axis=0))

    def state_shapes(self, B):
        return {"h": (B, self.U.value.shape[0])}

    def __init__(self, d, h, *, init="orthogonal", rng=None, dtype=None):
        check_count("GRU", "d", d)
        check_count("GRU", "h", h)
        W, U = gate_blocks(init, rng, d, h, dtype, count=3)
        self.W, self.U = Parameter(W, "W"), Parameter(U, "U")
        self.b_x, self.b_h = Parameter(zeros((3 * h,), dtype), "b_x"), Parameter(zeros((3 * h,), dtype), "b_h")
