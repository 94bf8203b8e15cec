"""The fast time loop of LSTM and RRALSTM; their equations stand plainly in lstm.py and rra.py.

Both cells are

    i, f, o = sigma(z_i), sigma(z_f), sigma(z_o);  g = tanh(z_g);   z = x_t W + h_{t-1} U + b
    c_t = f c_{t-1} + i g
    q_t = tanh(c_t + a_t);   a_t = sum_k w_hat[k-1] h_{t-k-offset+1}        (LSTM: a_t = 0)
    h_t = o q_t

What makes it fast, and what the names of the arrays carry (docs/derivations/rra.md, section 4; docs/results/speed.md):

* time first and gates first: `gates` is (4, T, B, h), so that i, f, o, g of a step are contiguous blocks, and the four
  (h, h) blocks of U are one batched product;
* sigma(z) = (1 + tanh(z/2)) / 2: one tanh serves all four gates, with the 1/2 folded into copies of W, U, b;
* the input product and the weights' gradients are one product each, outside the loop;
* `hs` holds the past before the sequence and the sequence in one array: row P + t is h_t. So the window of step t is a
  slice, never a copy, and its weighted sum is one vector-matrix product;
* backward gathers what the window owes h_t from the later ds_t, again one vector-matrix product, where scattering each
  ds_t into K earlier states would be K additions.
"""

from typing import Any, NamedTuple

from minigrad.backend import array_module, empty, zeros
from minigrad.layers.recurrent import Packing, pack, unpack


class LoopCache(NamedTuple):
    """What backward reads. T steps, P rows of past; everything time first."""

    x1: Any         # (T, B, d+1)   x_t and a one, the bias' input
    gates: Any      # (4, T, B, h)  i, f, o, g
    hs: Any         # (P+T, B, h)   row P + t is h_t
    cs: Any         # (T+1, B, h)   row t + 1 is c_t
    q: Any          # (T, B, h)     tanh(c_t + a_t)
    packing: Packing | None

    @property
    def y_shape(self):
        """(B, L, h)."""
        T, B, h = self.q.shape
        return B, T, h


def as_blocks(weights, d_in, scale=None):
    """(d_in, 4h) as four contiguous blocks (4, d_in, h), i, f, o multiplied by `scale`."""
    h = weights.shape[1] // 4
    blocks = empty((4, d_in, h), weights.dtype, array_module(weights))
    blocks[...] = weights.reshape(d_in, 4, h).transpose(1, 0, 2)
    if scale is not None:
        blocks[:3] *= scale
    return blocks


def loop_forward(x, past, c, mask, W, U, b, w_hat=None, offset=1):
    """Run the cell over a sequence.

    x (B, L, d); past (B, P, h), oldest first, or None for zeros (P = max(1, K+offset-1)); c (B, h) or None;
    mask (B, L) or None; w_hat (K,) normalised, w_hat[0] weighing the newest state of the window, or None for K = 0.
    Returns y (B, L, h), past and c after the last real step, cache.
    """
    xp = array_module(x=x, past=past, c=c, mask=mask, W=W)
    packing = Packing.of(mask)
    dtype = xp.result_type(x.dtype, W.dtype)
    B, T, d = x.shape
    h = U.shape[0]
    K = 0 if w_hat is None else len(w_hat)
    P = max(1, K + offset - 1)

    x1 = empty((T, B, d + 1), dtype, xp)
    x1[..., :d] = pack(x, packing).transpose(1, 0, 2)
    x1[..., d] = 1
    W1 = empty((d + 1, 4 * h), dtype, xp)
    W1[:d], W1[d] = W, b
    U_half = as_blocks(U.astype(dtype, copy=False), h, 0.5)                # (4, h, h)
    gates = empty((4, T, B, h), dtype, xp)                                   # first x_t W + b, then i, f, o, g
    xp.matmul(x1.reshape(T * B, d + 1), as_blocks(W1, d + 1, 0.5), out=gates.reshape(4, T * B, h))

    hs, cs = empty((P + T, B, h), dtype, xp), empty((T + 1, B, h), dtype, xp)
    hs[:P] = 0 if past is None else past.transpose(1, 0, 2)
    cs[0] = 0 if c is None else c
    q = empty((T, B, h), dtype, xp)
    if K:
        oldest_first = xp.ascontiguousarray(w_hat[None, ::-1]).astype(dtype, copy=False)   # (1, K)
    flat_hs = hs.reshape(P + T, B * h)
    z, ig, a = (empty(shape, dtype, xp) for shape in [(4, B, h), (B, h), (1, B * h)])

    for t in range(T):
        gates_t, c_t = gates[:, t], cs[t + 1]
        xp.matmul(hs[P + t - 1], U_half, out=z)
        z += gates_t
        xp.tanh(z, out=gates_t)
        sigmoids = gates_t[:3]
        sigmoids *= 0.5
        sigmoids += 0.5
        i, f, o, g = gates_t
        xp.multiply(f, cs[t], out=c_t)
        xp.multiply(i, g, out=ig)
        c_t += ig
        if K:
            newest = P + t - offset                                          # the row of h_{t-offset}
            xp.matmul(oldest_first, flat_hs[newest - K + 1:newest + 1], out=a)
            a_t = a.reshape(B, h)
            a_t += c_t
            xp.tanh(a_t, out=q[t])
        else:
            xp.tanh(c_t, out=q[t])
        xp.multiply(o, q[t], out=hs[P + t])

    y = unpack(hs[P:].transpose(1, 0, 2), packing)
    past, c = _final_state(hs, cs, P, packing)
    return y, past, c, LoopCache(x1, gates, hs, cs, q, packing)


def loop_backward(dy, dpast, dc, cache, W, U, w_hat=None, offset=1):
    """Backpropagation through time.

    With G_t the gradient that reaches h_t from outside, the later steps add

        dh_t = G_t + dz_{t+1} U^T + sum_k w_hat[k-1] ds_{t+k+offset-1}
        ds_t = dh_t o (1 - q_t^2);              dc_t = ds_t + f_{t+1} dc_{t+1}
        dz_i = dc g i(1-i);  dz_f = dc c_{t-1} f(1-f);  dz_o = dh q o(1-o);  dz_g = dc i (1-g^2)

    (ds_t is the gradient of c_t + a_t). Returns dx, dpast0, dc0, dW, dU, db, dw_hat (None for K = 0).
    """
    x1, gates, hs, cs, q, packing = cache
    xp, dtype = array_module(hs), hs.dtype
    T, B, h = q.shape
    P, d = len(hs) - T, W.shape[0]
    K = 0 if w_hat is None else len(w_hat)

    dhs, dcs = _upstream(dy, dpast, dc, cache)                               # (P+T, B, h), (B, h) or (T+1, B, h)
    U_T = empty((4, h, h), dtype, xp)
    U_T[...] = U.reshape(h, 4, h).transpose(1, 2, 0)
    dz = empty((4, T, B, h), dtype, xp)
    later = K + offset - 1                                                   # rows of zeros behind the sequence
    ds = empty((T + later, B, h), dtype, xp)
    ds[T:] = 0
    flat_ds, flat_hs = ds.reshape(T + later, B * h), hs.reshape(P + T, B * h)
    if K:
        weights = xp.ascontiguousarray(w_hat[None]).astype(dtype, copy=False)    # (1, K)
        dw_hat = zeros((K, 1), dtype, xp)                                    # oldest first, as the window's rows
    dc = dcs if packing is None else dcs[T]
    local, dz_U, u = (empty(shape, dtype, xp) for shape in [(4, B, h), (4, B, h), (B, h)])

    def add_recurrent(t, dh):
        """dh += what step t+1 owes h_t: dz_{t+1} U^T, the four gate blocks added up."""
        xp.matmul(dz[:, t + 1], U_T, out=dz_U)
        for block in dz_U:
            dh += block

    for t in range(T - 1, -1, -1):
        dh, dz_t, ds_t = dhs[P + t], dz[:, t], ds[t]
        (i, f, o, g), q_t = gates[:, t], q[t]
        if t < T - 1:
            add_recurrent(t, dh)
        if K:
            xp.matmul(weights, flat_ds[t + offset:t + offset + K], out=u.reshape(1, B * h))
            dh += u
        xp.multiply(q_t, q_t, out=u)
        xp.subtract(1, u, out=u)
        u *= o
        xp.multiply(u, dh, out=ds_t)                                         # ds = dh o (1 - q^2)
        dc += ds_t
        if K:
            newest = P + t - offset
            dw_hat += flat_hs[newest - K + 1:newest + 1] @ flat_ds[t][:, None]
        xp.multiply(gates[:3, t], gates[:3, t], out=local[:3])
        xp.subtract(gates[:3, t], local[:3], out=local[:3])                  # sigma' = s - s^2
        xp.multiply(g, g, out=local[3])
        xp.subtract(1, local[3], out=local[3])                               # tanh'  = 1 - g^2
        xp.multiply(dc, g, out=dz_t[0])
        xp.multiply(dc, cs[t], out=dz_t[1])
        xp.multiply(dh, q_t, out=dz_t[2])
        xp.multiply(dc, i, out=dz_t[3])
        dz_t *= local
        dc *= f
        if packing is not None:
            dc += dcs[t]

    if T:
        add_recurrent(-1, dhs[P - 1])
    for row in range(P if K else 0):                                         # what the window owes the given past
        first = row - P + offset                                             # ds row of the first step that saw it
        seen = slice(max(first, 0), max(first + K, 0))
        dhs[row] += (weights[0, seen.start - first:][:seen.stop - seen.start] @ flat_ds[seen]).reshape(B, h)

    flat_dz = dz.reshape(4, T * B, h)
    inputs = empty((T * B, h + d + 1), dtype, xp)                            # h_{t-1}, x_t, 1
    inputs[:, :h] = hs[P - 1:P - 1 + T].reshape(T * B, h)
    inputs[:, h:] = x1.reshape(T * B, d + 1)
    dUW1 = xp.matmul(inputs.T, flat_dz).transpose(1, 0, 2).reshape(h + d + 1, 4 * h)
    dx = flat_dz[0] @ W[:, :h].T
    for gate in range(1, 4):
        dx += flat_dz[gate] @ W[:, gate * h:(gate + 1) * h].T
    dx = unpack(dx.reshape(T, B, d).transpose(1, 0, 2), packing)
    dpast0 = xp.ascontiguousarray(dhs[:P].transpose(1, 0, 2))
    return dx, dpast0, dc, dUW1[h:h + d], dUW1[:h], dUW1[h + d], dw_hat[::-1, 0] if K else None


def _final_state(hs, cs, P, packing):
    """Copies of the last P states (B, P, h) and of the cell (B, h), each sample's at its own last real step."""
    xp, T = array_module(hs), len(cs) - 1
    if packing is None:
        return hs[T:].transpose(1, 0, 2).copy(), cs[T].copy()
    sample = xp.arange(hs.shape[1])
    rows = packing.lengths[:, None] + xp.arange(P)                           # (B, P)
    return hs[rows, sample[:, None]], cs[packing.lengths, sample]


def _upstream(dy, dpast, dc, cache):
    """The gradient that enters at each state from outside, time first, in arrays of its own.

    dhs (P+T, B, h): dy, and dpast at the last P states of each sample. Without a mask the cell's is dc (B, h), at the
    end; with one it is (T+1, B, h), entering at each sample's own last real step.
    """
    hs, cs, packing = cache.hs, cache.cs, cache.packing
    xp, T, B = array_module(hs=hs, dy=dy, dpast=dpast, dc=dc), len(cs) - 1, hs.shape[1]
    P = len(hs) - T
    dhs = empty(hs.shape, hs.dtype, xp)
    dhs[:P] = 0
    dhs[P:] = 0 if dy is None else pack(dy, packing).transpose(1, 0, 2)
    if packing is None:
        if dpast is not None:
            dhs[T:] += dpast.transpose(1, 0, 2)
        dcs = zeros(cs.shape[1:], cs.dtype, xp)
        if dc is not None:
            dcs += dc
        return dhs, dcs
    sample = xp.arange(B)
    if dpast is not None:
        dhs[packing.lengths[:, None] + xp.arange(P), sample[:, None]] += dpast   # rows of a sample are distinct
    dcs = zeros(cs.shape, cs.dtype, xp)
    if dc is not None:
        dcs[packing.lengths, sample] = dc
    return dhs, dcs
