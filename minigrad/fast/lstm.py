"""The fast time loop of LSTM and RRALSTM. Their equations: `cell` in minigrad/layers/lstm.py and rra.py.

Both cells are

    i, f, o = sigma(z_i), sigma(z_f), sigma(z_o);  g = tanh(z_g);   z = x_t W + h_{t-1} U + b
    c_t = f c_{t-1} + i g
    q_t = tanh(c_t + a_t);   a_t = sum_k w_hat[k-1] h_{t-k-offset+1}        (LSTM: a_t = 0)
    h_t = o q_t

What makes it fast, and what the arrays hold (docs/derivations/rra.md, section 4; docs/results/speed.md):

* gates and time are the first axes: `gates` is (4, T, B, h), so that i, f, o, g of a step are contiguous blocks, and
  the four (h, h) blocks of U are one batched product;
* sigma(z) = (1 + tanh(z/2)) / 2: one tanh serves all four gates, with the 1/2 folded into copies of W, U, b;
* the input product is one product, outside the loop;
* `hs` holds the past before the sequence and the sequence in one array: row P + t is h_t. So the window of step t is a
  slice, never a copy, and its weighted sum is one vector-matrix product;
* the gradients of the weights are taken a block of steps at a time, while its dz are in the processor's cache;
* backward gathers the part of dh_t that comes through the windows from the later ds_t, again one vector-matrix product;
  scattering each ds_t into K earlier states would be K additions.
"""

from typing import Any, NamedTuple

from minigrad import kernels
from minigrad.backend import array_module
from minigrad.memory import empty, zeros
from minigrad.packing import Packing, last_states, pack, states_upstream, unpack

BLOCK = 20                         # steps whose dz are collected for one product per weight


class LSTMCache(NamedTuple):
    """What backward reads. T steps, P rows of past; everything time first."""

    x1: Any         # (T, B, d+1)   [x_t, 1]
    gates: Any      # (4, T, B, h)  i, f, o, g
    hs: Any         # (P+T, B, h)   row P + t is h_t
    cs: Any         # (T+1, B, h)   row t + 1 is c_t
    q: Any          # (T, B, h)     tanh(c_t + a_t)
    packing: Packing | None


# ---- forward ---------------------------------------------------------------------------------------------


def loop_forward(x, past, c, mask, W, U, b, w_hat=None, offset=1):
    """Run the cell over a sequence.

    x (B, L, d); past (B, P, h), oldest first (P = max(1, K+offset-1)); c (B, h); mask (B, L) or None; w_hat (K,)
    normalised, w_hat[0] the weight of the newest state of the window, or None for K = 0. The weights' dtype is that of
    x and the Parameters together. Returns y (B, L, h), past and c after the last real step, cache.
    """
    xp = array_module(x=x, past=past, c=c, mask=mask, W=W)
    if fused := kernels.of(xp):
        return fused.loop_forward(x, past, c, mask, W, U, b, w_hat, offset)
    packing, dtype = Packing.of(mask), W.dtype
    (B, T, _), h, K = x.shape, U.shape[0], 0 if w_hat is None else len(w_hat)
    P = max(1, K + offset - 1)

    x1, gates = _input_product(pack(x, packing), W, b)
    U_half = _blocks(U, 0.5)                                                 # (4, h, h)
    hs, cs, q = (empty(shape, dtype, xp) for shape in [(P + T, B, h), (T + 1, B, h), (T, B, h)])
    hs[:P], cs[0] = past.transpose(1, 0, 2), c
    if K:
        oldest_first = xp.ascontiguousarray(w_hat[None, ::-1])               # (1, K)
    flat_hs = hs.reshape(P + T, B * h)
    z, ig, a = (empty(shape, dtype, xp) for shape in [(4, B, h), (B, h), (1, B * h)])

    for t in range(T):
        gates_t, c_t, q_t = gates[:, t], cs[t + 1], q[t]
        xp.matmul(hs[P + t - 1], U_half, out=z)                              # z/2 of i, f, o; z of g
        z += gates_t
        xp.tanh(z, out=gates_t)
        sigmoids = gates_t[:3]
        sigmoids *= 0.5
        sigmoids += 0.5
        i, f, o, g = gates_t
        xp.multiply(f, cs[t], out=c_t)
        xp.multiply(i, g, out=ig)
        c_t += ig
        s_t = c_t
        if K:
            newest = P + t - offset                                          # the row of h_{t-offset}
            xp.matmul(oldest_first, flat_hs[newest - K + 1:newest + 1], out=a)
            s_t = a.reshape(B, h)
            s_t += c_t
        xp.tanh(s_t, out=q_t)
        xp.multiply(o, q_t, out=hs[P + t])

    y = unpack(hs[P:].transpose(1, 0, 2), packing)
    last_c = cs[T].copy() if packing is None else cs[packing.lengths, xp.arange(B)]
    return y, last_states(hs, P, packing), last_c, LSTMCache(x1, gates, hs, cs, q, packing)


def _blocks(weights, scale):
    """(d_in, 4h) as four contiguous blocks (4, d_in, h), those of i, f, o multiplied by `scale`."""
    d_in, h = weights.shape[0], weights.shape[1] // 4
    blocks = empty((4, d_in, h), weights.dtype, array_module(weights))
    blocks[...] = weights.reshape(d_in, 4, h).transpose(1, 0, 2)
    blocks[:3] *= scale
    return blocks


def _input_product(x, W, b):
    """x1 (T, B, d+1), [x_t, 1], and x W + b as (4, T, B, h), halved for i, f, o."""
    xp, dtype, (B, T, d), h = array_module(x), W.dtype, x.shape, W.shape[1] // 4
    x1, W1 = empty((T, B, d + 1), dtype, xp), empty((d + 1, 4 * h), dtype, xp)
    x1[..., :d], x1[..., d] = x.transpose(1, 0, 2), 1
    W1[:d], W1[d] = W, b
    gates = empty((4, T, B, h), dtype, xp)
    xp.matmul(x1.reshape(T * B, d + 1), _blocks(W1, 0.5), out=gates.reshape(4, T * B, h))
    return x1, gates


# ---- backward --------------------------------------------------------------------------------------------


def loop_backward(dy, dpast, dc, cache, W, U, w_hat=None, offset=1):
    """Backpropagation through time.

    With G_t the gradient that reaches h_t from outside, the later steps add

        dh_t = G_t + dz_{t+1} U^T + sum_k w_hat[k-1] ds_{t+k+offset-1}
        ds_t = dh_t o (1 - q_t^2);              dc_t = ds_t + f_{t+1} dc_{t+1}
        dz_i = dc g i(1-i);  dz_f = dc c_{t-1} f(1-f);  dz_o = dh q o(1-o);  dz_g = dc i (1-g^2)

    (ds_t is the gradient of c_t + a_t). Returns dx, dpast0, dc0, dW, dU, db, dw_hat (None for K = 0).
    """
    if fused := kernels.of(array_module(cache.hs)):
        return fused.loop_backward(dy, dpast, dc, cache, W, U, w_hat, offset)
    x1, gates, hs, cs, q, packing = cache
    xp, dtype, (T, B, h) = array_module(hs), hs.dtype, q.shape
    P, K, d = len(hs) - T, 0 if w_hat is None else len(w_hat), W.shape[0]

    dhs, dcs = _upstream(dy, dpast, dc, cache)                               # (P+T, B, h), (T+1 or 1, B, h)
    U_T, W_T = _transposed_blocks(U), _transposed_blocks(W)                  # (4, h, h), (4, h, d)
    dUW1, dx = zeros((4, h + d + 1, h), dtype, xp), empty((T, B, d), dtype, xp)
    dz, ds = empty((4, BLOCK, B, h), dtype, xp), empty((T + K + offset - 1, B, h), dtype, xp)
    ds[T:] = 0                                                               # there are no steps after the last
    flat_ds, flat_hs = ds.reshape(len(ds), B * h), hs.reshape(P + T, B * h)
    if K:
        newest_first = xp.ascontiguousarray(w_hat[None])                     # (1, K)
        dw_hat = zeros((K, 1), dtype, xp)                                    # oldest first, as the window's rows
    dz_U, u = empty((4, B, h), dtype, xp), empty((B, h), dtype, xp)

    def add_recurrent(t, dh):
        """dh, of h_{t-1}, += dz_t U^T, summed over the four gates."""
        xp.matmul(dz[:, t % BLOCK], U_T, out=dz_U)
        xp.add.reduce(dz_U, axis=0, out=u)
        dh += u

    dc = dcs[-1]
    for t in range(T - 1, -1, -1):
        dh = dhs[P + t]
        if t < T - 1:
            add_recurrent(t + 1, dh)
        if K:
            xp.matmul(newest_first, flat_ds[t + offset:t + offset + K], out=u.reshape(1, B * h))
            dh += u
        _cell_backward(xp, dh, dc, gates[:, t], cs[t], q[t], ds[t], dz[:, t % BLOCK])
        if K:
            newest = P + t - offset                                          # the row of h_{t-offset}
            dw_hat += flat_hs[newest - K + 1:newest + 1] @ flat_ds[t][:, None]
        if packing is not None:
            dc += dcs[t]
        if t % BLOCK == 0:
            steps = slice(t, min(t + BLOCK, T))
            _add_products(dz, x1[steps], hs[P - 1:][steps], W_T, dUW1, dx[steps])

    if T:
        add_recurrent(0, dhs[P - 1])
    if K:
        _add_window_to_past(dhs[:P], flat_ds, newest_first[0], offset)
    dpast0 = dhs[:P].transpose(1, 0, 2).copy()                               # not a view that keeps all of dhs
    dUW1 = dUW1.transpose(1, 0, 2).reshape(h + d + 1, 4 * h)
    return (unpack(dx.transpose(1, 0, 2), packing), dpast0, dc.copy(), dUW1[h:h + d], dUW1[:h], dUW1[h + d],
            dw_hat[::-1, 0] if K else None)


def _cell_backward(xp, dh, dc, gates_t, c_before, q_t, ds_t, dz_t):
    """Through one step's equations, from the bottom up. Writes ds_t and dz_t; dc, of c_t, becomes that of c_{t-1}."""
    i, f, o, g = gates_t
    dz_i, dz_f, dz_o, dz_g = dz_t
    xp.multiply(q_t, q_t, out=ds_t)
    xp.subtract(1, ds_t, out=ds_t)
    ds_t *= o
    ds_t *= dh                                                               # ds = dh o (1 - q^2)
    dc += ds_t
    xp.multiply(gates_t, gates_t, out=dz_t)
    slopes = dz_t[:3]
    xp.subtract(gates_t[:3], slopes, out=slopes)                             # sigma' = s - s^2 of i, f, o
    xp.subtract(1, dz_g, out=dz_g)                                           # tanh'  = 1 - g^2
    dz_i *= g
    dz_f *= c_before
    dz_t[:2] *= dc
    dz_o *= q_t
    dz_o *= dh
    dz_g *= i
    dz_g *= dc
    dc *= f


def _upstream(dy, dpast, dc, cache):
    """The gradient that enters at each state from outside, time first, in new arrays.

    dhs (P+T, B, h) is `states_upstream`. dcs: without a mask (1, B, h), dc at the end; with one (T+1, B, h),
    dc at each sample's own last real step.
    """
    hs, cs, packing = cache.hs, cache.cs, cache.packing
    xp, T = array_module(hs=hs, dc=dc), len(cs) - 1
    dhs = states_upstream(dy, dpast, hs, len(hs) - T, packing)
    if packing is None:
        dcs = zeros((1, *cs.shape[1:]), cs.dtype, xp)
        dcs[0] = 0 if dc is None else dc
        return dhs, dcs
    dcs = zeros(cs.shape, cs.dtype, xp)
    if dc is not None:
        dcs[packing.lengths, xp.arange(hs.shape[1])] = dc
    return dhs, dcs


def _add_window_to_past(dhs_past, flat_ds, newest_first, offset):
    """dhs_past (P, B, h) += the gradient of the states before the sequence through the windows of the first steps.

    Row j is time j - P; the first step whose window contains it is t = j - P + offset, if there is such a step.
    """
    P, K = len(dhs_past), len(newest_first)
    for j in range(P):
        first = j - P + offset
        steps = slice(max(first, 0), max(first + K, 0))
        weights = newest_first[steps.start - first:][:steps.stop - steps.start]
        dhs_past[j] += (weights @ flat_ds[steps]).reshape(dhs_past[j].shape)


def _transposed_blocks(weights):
    """(d_in, 4h) as four contiguous blocks (4, h, d_in)."""
    d_in, h = weights.shape[0], weights.shape[1] // 4
    blocks = empty((4, h, d_in), weights.dtype, array_module(weights))
    blocks[...] = weights.reshape(d_in, 4, h).transpose(1, 2, 0)
    return blocks


def _add_products(dz, x1, hs_before, W_T, dUW1, dx):
    """A block of n <= BLOCK steps: dUW1 (4, h+d+1, h) += [h_{t-1}, x_t, 1]^T dz, and dx (n, B, d) = dz W^T."""
    xp, (n, B, d1), h = array_module(dz), x1.shape, dz.shape[-1]
    flat_dz = dz[:, :n].reshape(4, n * B, h)
    inputs = empty((n * B, dUW1.shape[1]), dz.dtype, xp)
    inputs[:, :h], inputs[:, h:] = hs_before.reshape(n * B, h), x1.reshape(n * B, d1)
    dUW1 += xp.matmul(inputs.T, flat_dz)
    xp.matmul(flat_dz, W_T).sum(axis=0, out=dx.reshape(n * B, d1 - 1))
