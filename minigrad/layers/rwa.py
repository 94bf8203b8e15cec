"""RWA: the recurrent weighted average (Ostmeyer and Cowell 2017, "Machine Learning on Sequential Data Using a Recurrent
Weighted Average", arXiv 1703.01253), in a form that no score can overflow.

Derivation of the backward: docs/derivations/rwa.md.
"""

import math

from minigrad.backend import array_module, sigmoid
from minigrad.check import check_count
from minigrad.fast.rwa import loop_backward, loop_forward
from minigrad.initializers import generator, glorot_uniform, normal, zeros
from minigrad.layers.recurrent import Recurrent
from minigrad.memory import empty, zeros as zeros_at
from minigrad.parameter import Parameter

# ---- the equations ---------------------------------------------------------------------------------------


def rwa_step(x, h, r, l, W_u, b_u, W_g, b_g, W_a):
    """One step. The paper's equations are, with numerator n and denominator d,

        u = x W_u + b_u        g = [x, h] W_g + b_g        a = [x, h] W_a        z = u tanh(g)
        n' = n + z e^a         d' = d + e^a                h' = tanh(n' / d')

    e^a overflows. With r = n / d and l = log d they are

        p = sigma(a - l)                          the share of this step in the average, e^a / d'
        r' = r + p (z - r)
        l' = logaddexp(l, a)
        h' = tanh(r')

    x (B, d), h, r, l (B, h), l = -inf before the first step -> (h', r', l'), cache.
    """
    xp = array_module(x)
    xh = xp.concatenate([x, h], axis=1)
    u, g, a = x @ W_u + b_u, xh @ W_g + b_g, xh @ W_a
    q = xp.tanh(g)
    p, delta = sigmoid(a - l), u * q - r
    r_new = r + p * delta
    h_new = xp.tanh(r_new)
    return (h_new, r_new, xp.logaddexp(l, a)), (x, xh, u, q, p, delta, h_new)


def rwa_step_backward(dh_new, dr_new, dl_new, cache, W_u, W_g, W_a):
    """The step's gradients, line by line from the bottom up: (dx, dh, dr, dl), (dW_u, db_u, dW_g, db_g, dW_a)."""
    x, xh, u, q, p, delta, h_new = cache
    dr_new = dr_new + dh_new * (1 - h_new * h_new)
    dp, dz, dr = dr_new * delta, dr_new * p, dr_new * (1 - p)
    da = p * dl_new + p * (1 - p) * dp
    dl = (1 - p) * dl_new - p * (1 - p) * dp
    du, dg = dz * q, dz * u * (1 - q * q)
    dxh, d = dg @ W_g.T + da @ W_a.T, x.shape[1]
    weights = (x.T @ du, du.sum(axis=0), xh.T @ dg, dg.sum(axis=0), xh.T @ da)
    return (du @ W_u.T + dxh[:, :d], dxh[:, d:], dr, dl), weights


# ---- the layer -------------------------------------------------------------------------------------------


class RWA(Recurrent):
    """h_t = tanh(r_t), r_t = sum_i z_i e^{a_i} / sum_i e^{a_i} over i <= t (`rwa_step` is the cell).

    Each unit averages over its whole past, weighed by scores a of its own; only h_{t-1} makes z and a depend on it.

    s (h,) ~ N(0, 1), the learned start h_0 = tanh(s); W_u (d, h), W_g and W_a (d+h, h), rows x, then h, Glorot uniform;
    b_u and b_g (h,) zero. The scores have no bias: it would cancel.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (h, r, l)), cache; h_t, the average r_t and
    l_t = log sum_i e^{a_i}, each (B, h). No state is (tanh(s), 0, -inf), and only then has s a gradient.
    The dtype is that of x and the parameters together. Nothing is drawn: rng has no effect.

    Raises ValueError for wrong shapes, TypeError for wrong dtypes or a mix of devices.
    """

    def __init__(self, d, h, *, rng=None, dtype=None):
        check_count("RWA", "d", d)
        check_count("RWA", "h", h)
        rng = generator(rng)
        self.s = Parameter(normal(rng, (h,), dtype=dtype), "s")
        self.W_u = Parameter(glorot_uniform(rng, (d, h), dtype), "W_u")
        self.b_u = Parameter(zeros((h,), dtype), "b_u")
        self.W_g = Parameter(glorot_uniform(rng, (d + h, h), dtype), "W_g")
        self.b_g = Parameter(zeros((h,), dtype), "b_g")
        self.W_a = Parameter(glorot_uniform(rng, (d + h, h), dtype), "W_a")

    def forward(self, x, state=None, mask=None, rng=None):
        W_u, b_u, W_g, b_g, W_a = (p.value for p in self._weights())
        xp = array_module(x=x, W_u=W_u, mask=mask)
        self.check_input(x, mask, W_u.shape[0])
        h, r, l = self.split_state(state, self.state_shapes(x.shape[0]))
        h_0 = None
        if h is None:
            h = h_0 = xp.tanh(self.s.value.astype(xp.result_type(x.dtype, W_u.dtype), copy=False))
        y, state, cache = loop_forward(x, h, r, l, mask, W_u, b_u, W_g, b_g, W_a)
        return (y, state), (cache, h_0)

    def backward(self, upstream, cache):
        """Backpropagation through time (`loop_backward`): dx (B, L, d) and dstate0 = (dh, dr, dl).

        Without a given state s.grad += (1 - h_0^2) dh, summed over the batch.
        """
        loop_cache, h_0 = cache
        dy, dstate = self.check_upstream(upstream, loop_cache.y_shape, self.state_shapes(loop_cache.y_shape[0]))
        dx, dstate0, gradients = loop_backward(
            dy, *dstate, loop_cache, self.W_u.value, self.W_g.value, self.W_a.value)
        for parameter, gradient in zip(self._weights(), gradients):
            parameter.grad += gradient
        if h_0 is not None:
            self.s.grad += (1 - h_0 * h_0) * dstate0[0].sum(axis=0)
        return dx, dstate0

    def initial_state(self, batch, dtype=None):
        """The state before a sequence, written out: h = tanh(s), an average of nothing: r = 0, l = -inf."""
        s = self.s.value
        xp, shape = array_module(s), (batch, len(s))
        h, r, l = empty(shape, s.dtype, xp), zeros_at(shape, s.dtype, xp), empty(shape, s.dtype, xp)
        h[...], l[...] = xp.tanh(s), -math.inf
        return h, r, l

    def _weights(self):
        return self.W_u, self.b_u, self.W_g, self.b_g, self.W_a

    def state_shapes(self, B):
        h = len(self.s.value)
        return {"h": (B, h), "r": (B, h), "l": (B, h)}
