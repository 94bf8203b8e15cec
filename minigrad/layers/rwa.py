"""RWA: the recurrent weighted average (Ostmeyer and Cowell 2017, "Machine Learning on Sequential Data Using a Recurrent
Weighted Average", arXiv 1703.01253), in a form that does not overflow.

Derivation of the backward: docs/derivations/rwa.md.
"""

import math

from minigrad.backend import array_module, sigmoid
from minigrad.check import check_count
from minigrad.fast import rwa as fast_rwa
from minigrad.initializers import generator, glorot_uniform, normal, zeros
from minigrad.layers.recurrent import Recurrent
from minigrad.parameter import Parameter


class RWA(Recurrent):
    """h_t = tanh(r_t), r_t = sum_i z_i e^{a_i} / sum_i e^{a_i} over i <= t.

    Each unit averages over its whole past, weighted by its own scores a; only h_{t-1} makes z and a depend on it.

    s (h,) ~ N(0, 1), for the learned h_0 = tanh(s); W_u (d, h), W_g and W_a (d+h, h), rows x, then h, Glorot uniform;
    b_u and b_g (h,) zero. The scores have no bias: it would cancel.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (h, r, l)), cache; h_t, the average r_t and
    l_t = log sum_i e^{a_i}, each (B, h). Without a state it starts from (tanh(s), 0, -inf), and only then does s
    get a gradient. The dtype is that of x and the parameters together. `rng` has no effect.
    fast=False runs `cell` and `cell_backward` step by step; the default is the loop of minigrad/fast/rwa.py.

    Raises ValueError for wrong shapes, TypeError for wrong dtypes or a mix of devices.
    """

    weights = ("W_u", "b_u", "W_g", "b_g", "W_a")

    # ---- the equations: they run with fast=False; the fast form is minigrad/fast/rwa.py ------------------

    def cell(self, x, state, W_u, b_u, W_g, b_g, W_a):
        """One step. The paper's equations are, with numerator n and denominator d,

            u = x W_u + b_u        g = [x, h] W_g + b_g        a = [x, h] W_a        z = u tanh(g)
            n' = n + z e^a         d' = d + e^a                h' = tanh(n' / d')

        e^a overflows. With r = n / d and l = log d they are

            p = sigma(a - l)                          the share of this step in the average, e^a / d'
            r' = r + p (z - r)
            l' = logaddexp(l, a)
            h' = tanh(r')

        x (B, d), state (h, r, l), each (B, h), l = -inf before the first step -> (h', (h', r', l')), cache.
        """
        (h, r, l), xp = state, array_module(x)
        xh = xp.concatenate([x, h], axis=1)
        u, g, a = x @ W_u + b_u, xh @ W_g + b_g, xh @ W_a
        q = xp.tanh(g)
        p, delta = sigmoid(a - l), u * q - r
        r_new = r + p * delta
        h_new = xp.tanh(r_new)
        return (h_new, (h_new, r_new, xp.logaddexp(l, a))), (x, xh, u, q, p, delta, h_new)

    def cell_backward(self, upstream, cache, W_u, b_u, W_g, b_g, W_a):
        """The step's gradients, from the bottom line up: dx, (dh, dr, dl), (dW_u, db_u, dW_g, db_g, dW_a)."""
        dy, (dh_new, dr_new, dl_new) = upstream
        x, xh, u, q, p, delta, h_new = cache
        dr_new = dr_new + (dh_new + dy) * (1 - h_new * h_new)
        dp, dz, dr = dr_new * delta, dr_new * p, dr_new * (1 - p)
        da = p * dl_new + p * (1 - p) * dp
        dl = (1 - p) * dl_new - p * (1 - p) * dp
        du, dg = dz * q, dz * u * (1 - q * q)
        dxh, d = dg @ W_g.T + da @ W_a.T, x.shape[1]
        gradients = (x.T @ du, du.sum(axis=0), xh.T @ dg, dg.sum(axis=0), xh.T @ da)
        return du @ W_u.T + dxh[:, :d], (dxh[:, d:], dr, dl), gradients

    def state_shapes(self, B):
        h = len(self.s.value)
        return {"h": (B, h), "r": (B, h), "l": (B, h)}

    def initial_state(self, batch, dtype=None):
        """The state before a sequence: h = tanh(s), and the empty average: r = 0, l = -inf."""
        s = self.s.value
        xp, dtype, shape = array_module(s), dtype or s.dtype, (batch, len(s))
        h = xp.tile(xp.tanh(s.astype(dtype, copy=False)), (batch, 1))
        return h, xp.zeros(shape, dtype), xp.full(shape, -math.inf, dtype)

    def initial_state_backward(self, dstate0):
        """ds = (1 - h_0^2) dh_0, summed over the batch."""
        dh, _, _ = dstate0
        h_0 = array_module(dh).tanh(self.s.value.astype(dh.dtype, copy=False))
        self.add_gradients(s=(1 - h_0 * h_0) * dh.sum(axis=0))

    # ---- parameters, and the fast loop -------------------------------------------------------------------

    def __init__(self, d, h, *, fast=True, rng=None, dtype=None):
        check_count("RWA", "d", d)
        check_count("RWA", "h", h)
        rng = generator(rng)
        self.s = Parameter(normal(rng, (h,), dtype=dtype), "s")
        self.W_u = Parameter(glorot_uniform(rng, (d, h), dtype), "W_u")
        self.b_u = Parameter(zeros((h,), dtype), "b_u")
        self.W_g = Parameter(glorot_uniform(rng, (d + h, h), dtype), "W_g")
        self.b_g = Parameter(zeros((h,), dtype), "b_g")
        self.W_a = Parameter(glorot_uniform(rng, (d + h, h), dtype), "W_a")
        self.fast = fast

    def fast_forward(self, x, state, mask, weights):
        return fast_rwa.loop_forward(x, *state, mask, *weights)

    def fast_backward(self, dy, dstate, cache, weights):
        W_u, _, W_g, _, W_a = weights
        return fast_rwa.loop_backward(dy, *dstate, cache, W_u, W_g, W_a)
