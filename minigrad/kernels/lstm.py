"""The time loop of LSTM and RRALSTM on a GPU, the counterpart of minigrad/fast/lstm.py. The equations are
`cell` in minigrad/layers/lstm.py and rra.py.

A step is one product, h_{t-1} U, and one launch. The gates of a sample are adjacent, (T, B, 4, h), as the products
produce them; nothing is allocated in the loop.
"""

from typing import Any, NamedTuple

from minigrad.backend import array_module
from minigrad.kernels import launch
from minigrad.kernels.launch import blocks_for, given, on_its_device, sum_dtype
from minigrad.memory import empty, matmul
from minigrad.packing import Packing, last_states, pack, states_upstream, unpack

THREADS = 128
WINDOW_BLOCKS = 64                 # per window weight, for its sum over steps, samples and units


class LSTMKernelCache(NamedTuple):
    """What backward reads. T steps, P rows of past; everything time first."""

    xs: Any         # (T, B, d)
    gates: Any      # (T, B, 4 h)   i, f, o, g
    hs: Any         # (P+T, B, h)   row P + t is h_t
    cs: Any         # (T+1, B, h)   row t + 1 is c_t
    q: Any          # (T, B, h)     tanh(c_t + a_t)
    packing: Any    # Packing or None


@on_its_device
def loop_forward(x, past, c, mask, W, U, b, w_hat=None, offset=1):
    """As fast.lstm.loop_forward."""
    xp = array_module(x=x, past=past, c=c, mask=mask, W=W)
    packing, dtype = Packing.of(mask), xp.result_type(x.dtype, W.dtype)
    (B, T, _), h, K = x.shape, U.shape[0], 0 if w_hat is None else len(w_hat)
    P = max(1, K + offset - 1)
    xs = given(pack(x, packing).transpose(1, 0, 2), dtype, xp)
    gates = matmul(xs, W.astype(dtype, copy=False))
    hs, cs, q, hU = (empty(shape, dtype, xp) for shape in [(P + T, B, h), (T + 1, B, h), (T, B, h), (B, 4 * h)])
    hs[:P], cs[0] = past.transpose(1, 0, 2), c
    c = cs[0].astype(sum_dtype(dtype))
    U, b, w_hat = (given(array, dtype, xp) for array in (U, b, w_hat))
    step, blocks = launch.kernel("lstm", "lstm_forward", dtype), blocks_for(B * h, THREADS)
    for t in range(T):
        xp.dot(hs[P + t - 1], U, out=hU)
        step(blocks, THREADS, hU, b, w_hat, gates, hs, c, cs, q, t, B, h, P, K, offset)
    y = unpack(hs[P:].transpose(1, 0, 2), packing)
    last_c = cs[T].copy() if packing is None else cs[packing.lengths, xp.arange(B)]
    return y, last_states(hs, P, packing), last_c, LSTMKernelCache(xs, gates, hs, cs, q, packing)


@on_its_device
def loop_backward(dy, dpast, dc, cache, W, U, w_hat=None, offset=1):
    """As fast.lstm.loop_backward; the products for W, U and x come after the loop, for all steps at once."""
    xs, gates, hs, cs, q, packing = cache
    xp, dtype, (T, B, h), d = array_module(hs), hs.dtype, q.shape, xs.shape[2]
    P, K = len(hs) - T, 0 if w_hat is None else len(w_hat)
    dhs = states_upstream(dy, dpast, hs, P, packing)                         # (P+T, B, h)
    dz, dzU = empty((T, B, 4 * h), dtype, xp), empty((B, h), dtype, xp)
    ds = empty((T, B, h), dtype, xp) if K else 0
    dc = xp.zeros((B, h), sum_dtype(dtype)) if dc is None else xp.array(dc, sum_dtype(dtype), order="C")
    U_T, w_hat = given(U.T, dtype, xp), given(w_hat, dtype, xp)
    lengths = 0 if packing is None else given(packing.lengths, "int64", xp)
    step, blocks = launch.kernel("lstm", "lstm_backward", dtype), blocks_for(B * h, THREADS)
    for t in range(T - 1, -1, -1):
        if t < T - 1:
            xp.dot(dz[t + 1], U_T, out=dzU)
        step(blocks, THREADS, dhs, dzU if t < T - 1 else 0, w_hat, gates, cs, q, lengths, ds, dz, dc, t, T, B, h, P, K,
             offset)
    if T:
        xp.dot(dz[0], U_T, out=dzU)
    launch.kernel("lstm", "lstm_backward_past", dtype)(
        blocks_for(P * B * h, THREADS), THREADS, dhs, dzU if T else 0, w_hat, ds, T, B, h, P, K, offset)
    dx = unpack(matmul(dz, W.astype(dtype, copy=False).T).transpose(1, 0, 2), packing)
    rows = dz.reshape(T * B, 4 * h)
    dW, dU = xs.reshape(T * B, d).T @ rows, hs[P - 1:P - 1 + T].reshape(T * B, h).T @ rows
    return (dx, dhs[:P].transpose(1, 0, 2).copy(), dc.astype(dtype, copy=False), dW, dU, rows.sum(axis=0),
            _window_weights(ds, hs, P, K, offset) if K else None)


def _window_weights(ds, hs, P, K, offset):
    """dw_hat (K,): sum_t <ds_t, h_{t-k-offset+1}> for each k."""
    xp, (T, B, h) = array_module(ds), ds.shape
    blocks = min(WINDOW_BLOCKS, max(1, blocks_for(T * B * h)))
    sums = empty((K, blocks), sum_dtype(ds.dtype), xp)
    launch.kernel("lstm", "lstm_window_weights", ds.dtype)(
        (blocks, K), launch.THREADS, ds, hs, sums, T, B, h, P, offset)
    return sums.sum(axis=1).astype(ds.dtype, copy=False)
