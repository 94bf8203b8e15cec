"""SRU: the simple recurrent unit (Lei, Zhang, Wang, Dai and Artzi 2018, arXiv 1709.02755); SRU++ has its recurrence.

Every matrix product is outside the loop over time: the recurrence is elementwise. Derivation: docs/derivations/sru.md.
"""

import math
from typing import Any, NamedTuple

from minigrad.backend import array_module, sigmoid, uniform_like
from minigrad.check import check_choice, check_count, check_number
from minigrad.fast import sru as fast_sru
from minigrad.initializers import generator, glorot_uniform, uniform, zeros
from minigrad.layers.recurrent import Recurrent
from minigrad.memory import matmul
from minigrad.packing import Packing, pack, unpack
from minigrad.parameter import Parameter

ACTIVATIONS = ("identity", "tanh")

# ---- the equations of the recurrence, which SRU++ shares -------------------------------------------------


class SRUCellCache(NamedTuple):
    """What the step's backward reads; each (B, h)."""

    u0: Any
    c: Any
    f: Any
    r: Any
    g: Any
    highway: Any        # x'
    m: Any              # or None
    activation: str
    projected: bool     # the highway is u3


def sru_cell(u, x, c, v_f, v_r, b_f, b_r, scale=1.0, activation="identity", m=None):
    """One step, from the products u = x_t W, slices u0 | u1 | u2 (| u3):

        f = sigma(u1 + v_f c + b_f)              forget gate
        r = sigma(u2 + v_r c + b_r)              reset (highway) gate; like f it sees c_{t-1}
        c' = f c + (1 - f) u0
        h = x' + m r (g(c') - x')                x' = scale x_t for 3 slices, u3 for 4; g the identity or tanh

    u (B, k h); x, c (B, h); v_f, v_r, b_f, b_r (h,); m (B, h), the dropout mask, or None for 1 -> (h, c'), cache.
    """
    xp = array_module(u)
    u0, u1, u2, *u3 = xp.split(u, u.shape[1] // c.shape[1], axis=1)
    f, r = sigmoid(u1 + v_f * c + b_f), sigmoid(u2 + v_r * c + b_r)
    c_new = f * c + (1 - f) * u0
    g = xp.tanh(c_new) if activation == "tanh" else c_new
    highway = u3[0] if u3 else scale * x
    mr = r if m is None else m * r
    return (highway + mr * (g - highway), c_new), SRUCellCache(
        u0, c, f, r, g, highway, m, activation, bool(u3))


def sru_cell_backward(dh, dc_new, cache, v_f, v_r, scale=1.0):
    """The step's gradients, from the bottom line up: (du, dx, dc), (dv_f, dv_r, db_f, db_r).

    dx is the gradient through the highway alone (None for 4 slices, where du contains it).
    """
    u0, c, f, r, g, highway, m, activation, projected = cache
    xp = array_module(dh)
    mr = r if m is None else m * r
    dhighway = dh * (1 - mr)
    dr = dh * (g - highway) * (1 if m is None else m)
    dg = dh * mr
    dc_new = dc_new + (dg * (1 - g * g) if activation == "tanh" else dg)
    df, du0 = dc_new * (c - u0), dc_new * (1 - f)
    du1, du2 = df * f * (1 - f), dr * r * (1 - r)                            # summed over the batch, also db_f and db_r
    dc = dc_new * f + du1 * v_f + du2 * v_r
    slices = [du0, du1, du2] + ([dhighway] if projected else [])
    dx = None if projected else scale * dhighway
    sums = ((du1 * c).sum(axis=0), (du2 * c).sum(axis=0), du1.sum(axis=0), du2.sum(axis=0))
    return (xp.concatenate(slices, axis=1), dx, dc), sums


# ---- settings that SRU and SRU++ share ------------------------------------------------------------------


def recurrence_parameters(layer, d_in, h, k, highway_bias, v_range, rng, dtype):
    """W (d_in, k h), v_f and v_r, b_f, b_r, initialised: Glorot uniform, U(-v_range, v_range), 0, highway_bias."""
    check_number(layer, "highway_bias", highway_bias, -math.inf, open_low=True, open_high=True)
    check_number(layer, "v_range", v_range, 0, open_high=True)
    W = Parameter(glorot_uniform(rng, (d_in, k * h), dtype), "W")
    v_f, v_r = (Parameter(uniform(rng, (h,), -v_range, v_range, dtype), name) for name in ("v_f", "v_r"))
    b_f, b_r = (Parameter(zeros((h,), dtype), name) for name in ("b_f", "b_r"))
    b_r.value[...] = highway_bias
    return W, v_f, v_r, b_f, b_r


def highway_scale(rescale, highway_bias, k):
    """s of x' = s x: with `rescale` sqrt(1 + 2 exp(highway_bias)), which keeps the variance of h near that of x through
    a deep stack (Lei et al. 2018; docs/derivations/sru.md); else, and for a projected highway (k = 4), 1."""
    return math.sqrt(1 + 2 * math.exp(highway_bias)) if rescale and k == 3 else 1.0


def variational_mask(rng, p, shape, xp, dtype):
    """Entries 0 or 1/(1-p), one (B, h) sample for all steps (Gal and Ghahramani 2016); None in evaluation."""
    if rng is None or not p:
        return None
    return (uniform_like(rng, xp.empty(shape, dtype)) >= p) * dtype.type(1 / (1 - p))


# ---- the layer -------------------------------------------------------------------------------------------


class SRU(Recurrent):
    """c_t = f_t c_{t-1} + (1 - f_t) u0_t, h_t = x'_t + r_t (g(c_t) - x'_t) over a sequence.

    W (d, k h), columns candidate | forget | reset (| highway); v_f, v_r, b_f, b_r (h,). If d = h, k = 3 and the
    highway carries x itself; else k = 4 and it carries x W_highway.

    projection     d': W is the product W_q W_o, W_q (d, d') and W_o (d', k h) (the "SRU with matrix factorisation" that
                   Lei 2021, arXiv 2102.12459, compares SRU++ with; no layer norm)
    highway_bias   initial value of b_r
    rescale        scale x by sqrt(1 + 2 exp(highway_bias)) in the highway (k = 3 only)
    activation     g: "identity" or "tanh"
    recurrent_dropout   of r, with one mask for all steps (variational): a dropped unit passes x' through
    v_range        initial v_f, v_r ~ U(-v_range, v_range)

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (c,)), cache; state: c (B, h).
    The dtype is that of x and the parameters together.
    fast=False runs `cell` and `cell_backward` step by step; the default is the loop of minigrad/fast/sru.py.

    Raises ValueError for wrong settings or shapes, TypeError for wrong dtypes or a mix of devices.
    """

    # ---- the equations: they run with fast=False; the fast form is minigrad/fast/sru.py ------------------

    def cell(self, x, state, *weights, m=None):
        """One step: u = x W, or x W_q W_o with a projection; then `sru_cell`. m (B, h) is the dropout mask, or None.

        x (B, d), state (c,), c (B, h) -> (h, (c',)), cache.
        """
        *projection, W, v_f, v_r, b_f, b_r = weights
        n = x @ projection[0] if projection else x                           # (B, d') or (B, d)
        (h, c), cache = sru_cell(n @ W, x, *state, v_f, v_r, b_f, b_r, self.scale, self.activation, m)
        return (h, (c,)), (x, n, cache)

    def cell_backward(self, upstream, cache, *weights):
        """The step's gradients: dx, (dc,), (dW or dW_q, dW_o, dv_f, dv_r, db_f, db_r)."""
        *projection, W, v_f, v_r, _, _ = weights
        (dy, (dc,)), (x, n, cache) = upstream, cache
        (du, dhighway, dc), sums = sru_cell_backward(dy, dc, cache, v_f, v_r, self.scale)
        dn, dW = du @ W.T, n.T @ du
        dx = dn @ projection[0].T if projection else dn
        if dhighway is not None:
            dx = dx + dhighway
        return dx, (dc,), (*((x.T @ dn,) if projection else ()), dW, *sums)

    @property
    def weights(self):
        return (*(("W",) if self.projection is None else ("W_q", "W_o")), "v_f", "v_r", "b_f", "b_r")

    def state_shapes(self, B):
        return {"c": (B, len(self.v_f.value))}

    def draw(self, rng, x):
        """The mask of the recurrent dropout, in the dtype of the loop."""
        xp, v_f = array_module(x), self.v_f.value
        dtype = xp.result_type(x.dtype, v_f.dtype)
        return {"m": variational_mask(rng, self.recurrent_dropout, (len(x), len(v_f)), xp, dtype)}

    # ---- parameters, and the fast loop -------------------------------------------------------------------

    def __init__(self, d, h, projection=None, highway_bias=0.0, *, rescale=False, activation="identity",
                 recurrent_dropout=0.0, v_range=1.0, fast=True, rng=None, dtype=None):
        check_count("SRU", "d", d)
        check_count("SRU", "h", h)
        check_choice("SRU", "activation", activation, ACTIVATIONS)
        check_number("SRU", "recurrent_dropout", recurrent_dropout, 0, 1, open_high=True)
        rng, k = generator(rng), 3 if d == h else 4
        if projection is not None:
            check_count("SRU", "projection", projection)
            self.W_q = Parameter(glorot_uniform(rng, (d, projection), dtype), "W_q")
        W, self.v_f, self.v_r, self.b_f, self.b_r = recurrence_parameters(
            "SRU", projection or d, h, k, highway_bias, v_range, rng, dtype)
        if projection is None:
            self.W = W
        else:
            self.W_o, W.name = W, "W_o"
        self.scale = highway_scale(rescale, highway_bias, k)
        self.projection, self.activation, self.recurrent_dropout = projection, activation, float(recurrent_dropout)
        self.fast = fast

    def fast_forward(self, x, state, mask, weights, m=None):
        (c,), (*projection, W, v_f, v_r, b_f, b_r) = state, weights
        xp, packing = array_module(x), Packing.of(mask)
        xs = fast_sru.time_first(pack(x.astype(xp.result_type(x.dtype, W.dtype), copy=False), packing))
        ns = matmul(xs, projection[0]) if projection else xs
        hs, c, cache = fast_sru.recurrence_forward(
            ns, xs, c, (W, v_f, v_r, b_f, b_r), scale=self.scale, activation=self.activation, m=m,
            lengths=None if packing is None else packing.lengths)
        return unpack(hs.transpose(1, 0, 2), packing), (c,), (cache, xs, packing)

    def fast_backward(self, dy, dstate, cache, weights):
        """`recurrence_backward`, then through W_q and the highway."""
        (dc,), (cache, xs, packing), (*projection, W, v_f, v_r, b_f, b_r) = dstate, cache, weights
        dhs = None if dy is None else fast_sru.time_first(pack(dy, packing))
        (dn, dx, dc), gradients = fast_sru.recurrence_backward(
            dhs, dc, cache, (W, v_f, v_r, b_f, b_r), scale=self.scale, activation=self.activation)
        if projection:
            T, B, d = xs.shape
            gradients = (xs.reshape(T * B, d).T @ dn.reshape(T * B, self.projection), *gradients)
            dn = matmul(dn, projection[0].T)
        if dx is not None:
            dn += dx
        return unpack(dn.transpose(1, 0, 2), packing), (dc,), gradients
