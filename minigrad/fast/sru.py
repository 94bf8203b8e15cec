"""The fast recurrence of SRU and SRU++ over a sequence; its equations are in minigrad/layers/sru.py.

Time first, slices first: u is (k, T, B, h), so that a slice of a step is one contiguous block, and the k products are
one batched product of (T B, w + 1) rows, the last column being a one that carries the biases. As
sigma(z) = (1 + tanh(z/2)) / 2, the 1/2 is folded into copies of the weights. Only f is needed for the next c, so only
f is computed in the loop. The element-wise work sees a step as one row of B h numbers, and is done a chunk of
steps at a time, while these are in the processor's cache. Measurements: docs/results/speed.md.
"""

from typing import Any, NamedTuple

from minigrad import kernels
from minigrad.backend import array_module
from minigrad.memory import empty, matmul, zeros

CHUNK = 16                         # steps whose element-wise work is done at once, while they are in the cache


class RecurrenceCache(NamedTuple):
    """What backward reads; everything time first."""

    n1: Any         # (T, B, w+1)    the input of W, and a column of ones
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
    if fused := kernels.of(xp):
        return fused.recurrence_forward(n, x, c, weights, scale=scale, activation=activation, m=m, lengths=lengths)
    k, dtype = W.shape[1] // h, xp.result_type(n.dtype, W.dtype)
    n1 = empty((T, B, w + 1), dtype, xp)
    n1[..., :w], n1[..., w] = n, 1
    u, cs, hs = (empty(shape, dtype, xp) for shape in [(k, T, B, h), (T + 1, B, h), (T, B, h)])
    xp.matmul(n1.reshape(T * B, w + 1), _slices(W, b_f, b_r, k, dtype), out=u.reshape(k, T * B, h))
    highway = u[3] if k == 4 else x if scale == 1 else scale * x
    cs[0] = 0 if c is None else c

    u0, f, r, c, y, x_highway = (_rows(array) for array in (u[0], u[1], u[2], cs, hs, highway))   # (T, B h)
    half_v_f, half_v_r = (_row(v / 2, B, dtype) for v in (v_f, v_r))         # (B h,)
    half = xp.full((), 0.5, dtype)                                           # faster than a Python float
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

    dh (T, B, h) zero after each sample's last real step, or None; dc (B, h) or None. All of the gates' derivatives are
    known before the loop, for every step at once; what is left in it is linear in the gradient of c:

        dc_t = e_t + v_r rho_{t+1} + a_{t+1} dc_{t+1},     a_t = f_t + v_f (c_{t-1} - u0_t) f_t (1 - f_t)

    with e_t = dh_t m r_t g'(c_t) and rho_t = du2_t = dh_t m (g(c_t) - x'_t) r_t (1 - r_t).
    """
    if fused := kernels.of(array_module(cache.u)):
        return fused.recurrence_backward(dh, dc, cache, weights, scale=scale, activation=activation)
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
    one, ones = xp.ones((), dtype), xp.ones(CHUNK, dtype)
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
        multiply(rho, e_t, rho)                                              # rho: dy m r (g - x') (1 - r)
        subtract(one, r_t, product_t)
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
    """[(steps, the same steps shifted by one)], CHUNK steps each."""
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


def time_first(x):
    """(B, L, d) -> (L, B, d), contiguous; without a copy if x is a view of a time-first array."""
    turned = x.transpose(1, 0, 2)
    if turned.flags.c_contiguous:
        return turned
    y = empty(turned.shape, x.dtype, array_module(x))
    y[...] = turned
    return y
