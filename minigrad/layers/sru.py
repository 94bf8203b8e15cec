"""SRU: the simple recurrent unit (Lei, Zhang, Wang, Dai and Artzi 2018, arXiv 1709.02755); SRU++ has its recurrence.

Every matrix product is outside the loop over time: the recurrence is elementwise. Derivation: docs/derivations/sru.md.
"""

import math
from typing import Any, NamedTuple

from minigrad.backend import DEFAULT_DTYPE, array_module, empty, matmul, sigmoid, uniform_like, zeros
from minigrad.check import check_choice, check_count, check_number
from minigrad.functional import tanh
from minigrad.initializers import generator, glorot_uniform, uniform
from minigrad.layers.recurrent import Packing, Recurrent, pack, unpack
from minigrad.parameter import Parameter

ACTIVATIONS = ("identity", "tanh")
CHUNK = 16                         # steps whose element-wise work is done at once, while they are in the cache

# ---- the equations ---------------------------------------------------------------------------------------


def sru_step(u, x, c, v_f, v_r, b_f, b_r, scale=1.0, activation="identity", m=None):
    """One step, as written, from the products u = x_t W, slices u0 | u1 | u2 (| u3):

        f = sigma(u1 + v_f c + b_f)              forget gate
        r = sigma(u2 + v_r c + b_r)              reset (highway) gate; like f it sees c_{t-1}
        c' = f c + (1 - f) u0
        h = x' + m r (g(c') - x')                x' = scale x_t for 3 slices, u3 for 4; g the identity or tanh

    u (B, k h); x, c (B, h); v_f, v_r, b_f, b_r (h,); m (B, h), the dropout mask, or None for 1 -> (h, c'), cache.
    """
    u0, u1, u2, *u3 = array_module(u).split(u, u.shape[1] // c.shape[1], axis=1)
    f, r = sigmoid(u1 + v_f * c + b_f), sigmoid(u2 + v_r * c + b_r)
    c_new = f * c + (1 - f) * u0
    g, g_cache = tanh.forward(c_new) if activation == "tanh" else (c_new, None)
    highway = u3[0] if u3 else scale * x
    mr = r if m is None else m * r
    return (highway + mr * (g - highway), c_new), (u0, c, f, r, g, g_cache, highway, m, bool(u3))


def sru_step_backward(dh, dc_new, cache, v_f, v_r, scale=1.0):
    """The step's gradients, line by line from the bottom up: (du, dx, dc), (dv_f, dv_r, db_f, db_r).

    dx is what comes through the highway alone (zero for 4 slices, where it is in du).
    """
    u0, c, f, r, g, g_cache, highway, m, projected = cache
    xp = array_module(dh)
    mr = r if m is None else m * r
    dhighway = dh * (1 - mr)
    dr = dh * (g - highway) * (1 if m is None else m)
    dg = dh * mr
    dc_new = dc_new + (dg if g_cache is None else tanh.backward(dg, g_cache))
    df, du0 = dc_new * (c - u0), dc_new * (1 - f)
    du1, du2 = df * f * (1 - f), dr * r * (1 - r)                            # also the gradients of b_f and b_r
    dc = dc_new * f + du1 * v_f + du2 * v_r
    slices = [du0, du1, du2] + ([dhighway] if projected else [])
    dx = xp.zeros_like(dhighway) if projected else scale * dhighway
    sums = ((du1 * c).sum(axis=0), (du2 * c).sum(axis=0), du1.sum(axis=0), du2.sum(axis=0))
    return (xp.concatenate(slices, axis=1), dx, dc), sums


# ---- the recurrence over a sequence ----------------------------------------------------------------------
# Time first, slices first: u is (k, T, B, h), so that a slice of a step is one contiguous block, and the k products are
# one batched product of (T B, w + 1) rows, the last column being a one that carries the biases. As
# sigma(z) = (1 + tanh(z/2)) / 2, the 1/2 is folded into copies of the weights. Only f is needed to go on in time, so
# only f is computed in the loop. The element-wise work sees a step as one row of B h numbers, and is done a chunk of
# steps at a time, while these are in the processor's cache.


class RecurrenceCache(NamedTuple):
    """What backward reads; everything time first."""

    n1: Any         # (T, B, w+1)    the rows that W maps, and a one
    u: Any          # (k, T, B, h)   u0 | f | r (| x')
    cs: Any         # (T+1, B, h)    row t is c before step t
    highway: Any    # (T, B, h)      x'
    m: Any          # (B, h) or None
    lengths: Any    # (B,) or None   real steps of each sample


def recurrence_forward(n, x, c, weights, *, scale=1.0, activation="identity", m=None, lengths=None):
    """The recurrence over n W, n (T, B, w) and W (w, k h), time first; each sample's real steps are its first ones.

    x (T, B, h), the highway's input (read for k = 3 only); c (B, h) or None for zero; weights (W, v_f, v_r, b_f, b_r).
    Returns h (T, B, h), the c after each sample's last real step (B, h), cache.
    """
    W, v_f, v_r, b_f, b_r = weights
    xp, (T, B, w), h = array_module(n), n.shape, v_f.shape[0]
    k, dtype = W.shape[1] // h, xp.result_type(n.dtype, W.dtype)
    n1 = empty((T, B, w + 1), dtype, xp)
    n1[..., :w], n1[..., w] = n, 1
    u, cs, hs = (empty(shape, dtype, xp) for shape in [(k, T, B, h), (T + 1, B, h), (T, B, h)])
    xp.matmul(n1.reshape(T * B, w + 1), _slices(W, b_f, b_r, k, dtype), out=u.reshape(k, T * B, h))
    highway = u[3] if k == 4 else x if scale == 1 else scale * x
    cs[0] = 0 if c is None else c

    u0, f, r, c, y, x_highway = (_rows(array) for array in (u[0], u[1], u[2], cs, hs, highway))   # (T, B h)
    half_v_f, half_v_r = (_row(v / 2, B, dtype) for v in (v_f, v_r))         # (B h,)
    half = xp.asarray(0.5, dtype)                                            # quicker than a Python float
    multiply, add, subtract, tanh = xp.multiply, xp.add, xp.subtract, xp.tanh
    for now, after in _chunks(T):
        c_old, c_new, r_now, y_now, highway_now = c[now], c[after], r[now], y[now], x_highway[now]
        for c_t, c_later, u0_t, f_t in zip(c_old, c_new, u0[now], f[now]):
            multiply(c_t, half_v_f, c_later)
            add(f_t, c_later, f_t)
            tanh(f_t, f_t)
            multiply(f_t, half, f_t)
            add(f_t, half, f_t)
            subtract(c_t, u0_t, c_later)                                     # c' = u0 + f (c - u0)
            multiply(c_later, f_t, c_later)
            add(c_later, u0_t, c_later)
        multiply(c_old, half_v_r, y_now)
        add(r_now, y_now, r_now)
        tanh(r_now, r_now)
        multiply(r_now, half, r_now)
        add(r_now, half, r_now)
        subtract(tanh(c_new) if activation == "tanh" else c_new, highway_now, y_now)
        multiply(y_now, r_now, y_now)
        if m is not None:
            multiply(y_now, m.reshape(-1), y_now)
        add(y_now, highway_now, y_now)
    last = cs[T] if lengths is None else cs[lengths, xp.arange(B)]
    return hs, last.copy(), RecurrenceCache(n1, u, cs, highway, m, lengths)


def recurrence_backward(dh, dc, cache, weights, *, scale=1.0, activation="identity"):
    """Backward of `recurrence_forward`: (dn, dx, dc0), (dW, dv_f, dv_r, db_f, db_r); dx is None for k = 4.

    dh (T, B, h) zero behind each sample's last real step, or None; dc (B, h) or None. All of the gates' derivatives are
    known before the loop, for every step at once; what is left in it is linear in the gradient of c:

        dc_t = e_t + v_r rho_{t+1} + a_{t+1} dc_{t+1},     a_t = f_t + v_f (c_{t-1} - u0_t) f_t (1 - f_t)

    with e_t = dh_t m r_t g'(c_t) and rho_t = du2_t = dh_t m (g(c_t) - x'_t) r_t (1 - r_t).
    """
    n1, u, cs, highway, m, lengths = cache
    W, v_f, v_r, _, _ = weights
    xp, (k, T, B, h), w, dtype = array_module(n1), u.shape, n1.shape[2] - 1, u.dtype
    du, dcs, dx = empty((k, T, B, h), dtype, xp), zeros((T + 1, B, h), dtype, xp), None
    if k == 3:
        dx = empty((T, B, h), dtype, xp)
    if dc is not None:
        dcs[T if lengths is None else lengths, slice(None) if lengths is None else xp.arange(B)] = dc
    if dh is None:
        dh = zeros((T, B, h), dtype, xp)

    u0, f, r, c, x_highway, dy, dc, du0, du1, du2, dhighway = (_rows(array) for array in (
        u[0], u[1], u[2], cs, highway, dh, dcs, du[0], du[1], du[2], du[3] if k == 4 else dx))
    v_f, v_r, m = _row(v_f, B, dtype), _row(v_r, B, dtype), None if m is None else m.reshape(-1)
    one, ones = xp.asarray(1, dtype), xp.ones(CHUNK, dtype)
    carry, dv_f, dv_r = empty((B * h,), dtype, xp), zeros((B * h,), dtype, xp), zeros((B * h,), dtype, xp)
    a, e, product = (empty((min(CHUNK, T), B * h), dtype, xp) for _ in range(3))
    multiply, add, subtract = xp.multiply, xp.add, xp.subtract
    for now, after in reversed(_chunks(T)):
        size = now.stop - now.start
        a_t, e_t, product_t = a[:size], e[:size], product[:size]
        c_old, c_new, dc_old, dc_new = c[now], c[after], dc[now], dc[after]
        dy_t, r_t, f_t, dhighway_t = dy[now], r[now], f[now], dhighway[now]
        du0_t, phi, rho = du0[now], du1[now], du2[now]
        multiply(dy_t, r_t, e_t)                                             # e: dy m r
        if m is not None:
            multiply(e_t, m, e_t)
        subtract(dy_t, e_t, dhighway_t)
        g = xp.tanh(c_new) if activation == "tanh" else c_new
        subtract(g, x_highway[now], rho)
        multiply(rho, r_t, rho)                                              # rho: dy m (g - x') r (1 - r)
        if m is None:
            multiply(rho, dhighway_t, rho)                                   # which is dy (1 - r)
        else:
            subtract(one, r_t, product_t)
            multiply(product_t, dy_t, product_t)
            multiply(product_t, m, product_t)
            multiply(rho, product_t, rho)
        add(dc_new, e_t if activation == "identity" else e_t * (1 - g * g), dc_new)
        multiply(rho, v_r, product_t)
        add(dc_old, product_t, dc_old)
        multiply(rho, c_old, product_t)
        dv_r += ones[:size] @ product_t                                      # the sum over the steps

        subtract(one, f_t, du0_t)
        subtract(c_old, u0[now], phi)                                        # phi: (c_{t-1} - u0) f (1 - f)
        multiply(phi, f_t, phi)
        multiply(phi, du0_t, phi)
        multiply(phi, v_f, a_t)
        add(a_t, f_t, a_t)
        for a_step, dc_step, dc_later in zip(a_t[::-1], dc_old[::-1], dc_new[::-1]):
            multiply(a_step, dc_later, carry)
            add(dc_step, carry, dc_step)
        multiply(du0_t, dc_new, du0_t)
        multiply(phi, dc_new, phi)
        multiply(phi, c_old, product_t)
        dv_f += ones[:size] @ product_t
    if dx is not None and scale != 1:
        dx *= scale

    rows, drows = n1.reshape(T * B, w + 1), du.reshape(k, T * B, h)
    dW1 = rows.T @ drows                                                     # (k, w+1, h)
    W = W.astype(dtype, copy=False)
    dn = matmul(drows[0], W[:, :h].T)
    for n in range(1, k):
        dn += matmul(drows[n], W[:, n * h:(n + 1) * h].T)
    dn = dn.reshape(T, B, w)
    dv_f, dv_r = (dv.reshape(B, h).sum(axis=0) for dv in (dv_f, dv_r))
    dW = dW1[:, :w].transpose(1, 0, 2).reshape(w, k * h)
    return (dn, dx, dcs[0].copy()), (dW, dv_f, dv_r, dW1[1, w], dW1[2, w])


def _rows(array):
    """(T, B, h) -> (T, B h)."""
    T, B, h = array.shape
    return array.reshape(T, B * h)


def _row(v, B, dtype):
    """(h,) -> (B h,): v for every sample, aligned as `empty` is."""
    rows = empty((B, len(v)), dtype, array_module(v))
    rows[...] = v
    return rows.reshape(B * len(v))


def _chunks(T):
    """[(steps, the same one later)], CHUNK steps each."""
    return [(slice(first, min(first + CHUNK, T)), slice(first + 1, min(first + CHUNK, T) + 1))
            for first in range(0, T, CHUNK)]


def _slices(W, b_f, b_r, k, dtype):
    """W (w, k h) and the biases as k blocks (k, w+1, h), those of f and r halved."""
    w, h = W.shape[0], b_f.shape[0]
    blocks = empty((k, w + 1, h), dtype, array_module(W))
    blocks[:, :w] = W.reshape(w, k, h).transpose(1, 0, 2)
    blocks[:, w] = 0
    blocks[1, w], blocks[2, w] = b_f, b_r
    blocks[1:3] *= 0.5
    return blocks


def recurrence_parameters(layer, d_in, h, k, highway_bias, v_range, rng, dtype):
    """W (d_in, k h), v_f, v_r, b_f, b_r at the start: Glorot uniform, U(-v_range, v_range), 0, the highway's bias."""
    check_number(layer, "highway_bias", highway_bias, -math.inf, open_low=True, open_high=True)
    check_number(layer, "v_range", v_range, 0, open_high=True)
    W = Parameter(glorot_uniform(rng, (d_in, k * h), dtype), "W")
    v_f, v_r = (Parameter(uniform(rng, (h,), -v_range, v_range, dtype), name) for name in ("v_f", "v_r"))
    b_f, b_r = (Parameter(zeros((h,), dtype or DEFAULT_DTYPE), name) for name in ("b_f", "b_r"))
    b_r.value[...] = highway_bias
    return W, v_f, v_r, b_f, b_r


def highway_scale(rescale, highway_bias, k):
    """s of x' = s x: sqrt(1 + 2 exp(b_r)) at b_r's start with `rescale` (Lei et al. 2018: keeps the variance of h near
    that of x through a deep stack; derived in docs/derivations/sru.md), else 1. With a projected highway (k = 4) there
    is none."""
    return math.sqrt(1 + 2 * math.exp(highway_bias)) if rescale and k == 3 else 1.0


def time_first(x):
    """(B, L, d) -> (L, B, d), contiguous; free where x is a layer's own time-first output."""
    turned = x.transpose(1, 0, 2)
    if turned.flags.c_contiguous:
        return turned
    y = empty(turned.shape, x.dtype, array_module(x))
    y[...] = turned
    return y


def variational_mask(rng, p, shape, like):
    """Entries 0 or 1/(1-p), one (B, h) sample for all steps (Gal and Ghahramani 2016); None in evaluation."""
    if rng is None or not p:
        return None
    xp = array_module(like)
    return (uniform_like(rng, xp.empty(shape, like.dtype)) >= p) * like.dtype.type(1 / (1 - p))


# ---- the layer -------------------------------------------------------------------------------------------


class SRU(Recurrent):
    """c_t = f_t c_{t-1} + (1 - f_t) u0_t, h_t = x'_t + r_t (g(c_t) - x'_t) over a sequence (`sru_step` is the cell).

    W (d, k h), columns candidate | forget | reset (| highway); v_f, v_r, b_f, b_r (h,). There are k = 3 slices where
    d = h, the highway carrying x itself, and k = 4 where d != h, the highway carrying x W_highway.

    projection     d': W is the product W_q W_o, W_q (d, d') and W_o (d', k h) (the "SRU with matrix factorisation" that
                   Lei 2021, arXiv 2102.12459, compares with; without layer norm)
    highway_bias   first value of b_r
    rescale        scale x by sqrt(1 + 2 exp(highway_bias)) in the highway (k = 3 only)
    activation     g: "identity" or "tanh"
    recurrent_dropout   of r, one mask for all steps (variational): a dropped unit passes x' through
    v_range        v_f, v_r start as U(-v_range, v_range)

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (c,)), cache; state: c (B, h).
    The dtype is that of x and the parameters together.

    Raises ValueError for wrong settings or shapes, TypeError for wrong dtypes or a mix of devices.
    """

    def __init__(self, d, h, projection=None, highway_bias=0.0, *, rescale=False, activation="identity",
                 recurrent_dropout=0.0, v_range=1.0, rng=None, dtype=None):
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

    def forward(self, x, state=None, mask=None, rng=None):
        first = self.W if self.projection is None else self.W_q
        xp = array_module(x=x, W=first.value, mask=mask)
        self.check_input(x, mask, first.value.shape[0])
        c, = self.split_state(state, self._state_shapes(x.shape[0]))
        packing = Packing.of(mask)
        xs = time_first(pack(x.astype(xp.result_type(x.dtype, first.value.dtype), copy=False), packing))
        ns = xs if self.projection is None else matmul(xs, self.W_q.value)
        m = variational_mask(rng, self.recurrent_dropout, (x.shape[0], len(self.v_f.value)), xs)
        hs, c, cache = recurrence_forward(
            ns, xs, c, self._weights(), scale=self.scale, activation=self.activation, m=m,
            lengths=None if packing is None else packing.lengths)
        return (unpack(hs.transpose(1, 0, 2), packing), (c,)), (cache, xs, packing)

    def backward(self, upstream, cache):
        """`recurrence_backward`, then through W_q and the highway: dx (B, L, d) and dstate0 = (dc,)."""
        cache, xs, packing = cache
        T, B, h = cache.highway.shape
        dy, (dc,) = self.check_upstream(upstream, (B, T, h), self._state_shapes(B))
        dhs = None if dy is None else time_first(pack(dy, packing))
        (dn, dx, dc), (dW, *rest) = recurrence_backward(
            dhs, dc, cache, self._weights(), scale=self.scale, activation=self.activation)
        for parameter, gradient in zip((self.v_f, self.v_r, self.b_f, self.b_r), rest):
            parameter.grad += gradient
        if self.projection is None:
            self.W.grad += dW
        else:
            self.W_o.grad += dW
            rows = xs.reshape(T * B, xs.shape[2])
            self.W_q.grad += rows.T @ dn.reshape(T * B, self.projection)
            dn = matmul(dn, self.W_q.value.T)
        if dx is not None:
            dn += dx
        return unpack(dn.transpose(1, 0, 2), packing), (dc,)

    def _weights(self):
        W = self.W if self.projection is None else self.W_o
        return tuple(parameter.value for parameter in (W, self.v_f, self.v_r, self.b_f, self.b_r))

    def _state_shapes(self, B):
        return {"c": (B, len(self.v_f.value))}
