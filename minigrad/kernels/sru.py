"""The recurrence of SRU and SRU++ on a GPU; its counterpart: minigrad/fast/sru.py; its equations:
minigrad/layers/sru.py."""

from typing import Any, NamedTuple

from minigrad.backend import array_module
from minigrad.kernels import launch
from minigrad.kernels.launch import blocks_for, given, on_its_device, sum_dtype
from minigrad.memory import empty, matmul

THREADS = 32                       # per block: few, so that the B h threads are spread over the whole GPU


class RecurrenceCache(NamedTuple):
    """What backward reads; everything time first. The gates are recomputed."""

    n: Any          # (T, B, w)      the input of W
    u: Any          # (T, B, k h)    n W: u0 | u1 | u2 (| u3)
    cs: Any         # (T+1, B, h)    row t is c before step t
    highway: Any    # (T, B, h)      x' before it is scaled
    m: Any          # (B, h) or None
    lengths: Any    # (B,) or None   real steps of each sample


@on_its_device
def recurrence_forward(n, x, c, weights, *, scale=1.0, activation="identity", m=None, lengths=None):
    """As fast.sru.recurrence_forward; one product, then one launch."""
    W, *vectors = weights
    xp, (T, B, _), h = array_module(n), n.shape, vectors[0].shape[0]
    k, dtype = W.shape[1] // h, xp.result_type(n.dtype, W.dtype)
    n = given(n, dtype, xp)
    u = matmul(n, W.astype(dtype, copy=False))
    cs, hs = empty((T + 1, B, h), dtype, xp), empty((T, B, h), dtype, xp)
    cs[0] = 0 if c is None else c
    highway = u.reshape(T, B, k, h)[:, :, 3] if k == 4 else given(x, dtype, xp)
    launch_forward(u, 0 if k == 4 else highway, [given(v, dtype, xp) for v in vectors], given(m, dtype, xp), cs, hs,
                   scale, activation)
    last = cs[T] if lengths is None else cs[lengths, xp.arange(B)]
    return hs, last.copy(), RecurrenceCache(n, u, cs, highway, m, lengths)


@on_its_device
def recurrence_backward(dh, dc, cache, weights, *, scale=1.0, activation="identity"):
    """As fast.sru.recurrence_backward; one launch, then the two products."""
    n, u, cs, highway, m, lengths = cache
    W, *vectors = weights
    xp, (T, B, h), dtype = array_module(n), highway.shape, u.dtype
    w, k = n.shape[2], u.shape[2] // h
    du, dc0 = empty((T, B, k * h), dtype, xp), empty((B, h), dtype, xp)
    dx = None if k == 4 else empty((T, B, h), dtype, xp)
    sums = empty((4, B, h), sum_dtype(dtype), xp)                            # dv_f, dv_r, db_f, db_r of each sample
    launch_backward(u, 0 if k == 4 else highway, [given(v, dtype, xp) for v in vectors], given(m, dtype, xp), cs,
                    given(dh, dtype, xp), given(dc, dtype, xp), given(lengths, "int64", xp), du,
                    0 if dx is None else dx, dc0, sums, scale, activation)
    dW = n.reshape(T * B, w).T @ du.reshape(T * B, k * h)
    dn = matmul(du, W.astype(dtype, copy=False).T)
    return (dn, dx, dc0), (dW, *sums.sum(axis=1).astype(dtype, copy=False))


# ---- the launches alone ----------------------------------------------------------------------------------
# C-contiguous arrays of one dtype (lengths int64, sums as summed), 0 for an absent one; results are written
# into the last arrays.

def launch_forward(u, x, vectors, m, cs, hs, scale=1.0, activation="identity"):
    """One launch: cs[1:] and hs (T, B, h) from u (T, B, k h), x (T, B, h), v_f, v_r, b_f, b_r and cs[0]."""
    _launch("sru_forward", u, hs.shape, (u, x, *vectors, m, cs, hs), scale, activation)


def launch_backward(u, x, vectors, m, cs, dh, dc, lengths, du, dx, dc0, sums, scale=1.0, activation="identity"):
    """One launch: du, dx, dc0 (B, h) and the samples' sums (4, B, h) from forward's arrays, dh and dc."""
    T, B, _ = u.shape
    _launch("sru_backward", u, (T, B, dc0.shape[1]), (u, x, *vectors, m, cs, dh, dc, lengths, du, dx, dc0, sums), scale,
            activation)


def _launch(name, u, shape, arrays, scale, activation):
    T, B, h = shape
    launch.kernel("sru", name, u.dtype)(
        blocks_for(B * h, THREADS), THREADS, *arrays, float(scale), int(activation == "tanh"), T, B, h, u.shape[2] // h)
