"""Functions without parameters. As in a layer, forward returns (y, cache) and backward dx.

They are namespaces, not layers: `y, cache = softmax.forward(x)`, `dx = softmax.backward(dy, cache)`.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from minigrad import kernels
from minigrad.backend import array_module, erf, uniform_like
from minigrad.check import check_count, check_number, check_shape
from minigrad.memory import cache_blocks, empty, matmul

GELU_CUBE = 0.044715
QUERY_BLOCK = 64                  # queries at a time, if each block of them sees only a part of the keys
GPU_QUERY_BLOCK = 1024            # the same on a GPU, where a product is a launch and small ones leave it idle


class softmax:
    """y_i = exp(x_i) / sum_j exp(x_j) along the last axis, shifted by the maximum so that nothing overflows."""

    @staticmethod
    def forward(x):
        xp = array_module(x)
        y = xp.exp(x - x.max(axis=-1, keepdims=True))
        y /= y.sum(axis=-1, keepdims=True)
        return y, y

    @staticmethod
    def backward(dy, cache):
        """dx = y * (dy - sum_j y_j dy_j)."""
        y = cache
        return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


class sum_normalize:
    """y_i = x_i / s, s = sum_j x_j, along the last axis (RRA's normalisation of its weights w; undefined at s = 0)."""

    @staticmethod
    def forward(x):
        s = x.sum(axis=-1, keepdims=True)
        y = x / s
        return y, (y, s)

    @staticmethod
    def backward(dy, cache):
        """dx = (dy - sum_j y_j dy_j) / s; so sum_i x_i dx_i = 0: scaling x changes nothing."""
        y, s = cache
        return (dy - (y * dy).sum(axis=-1, keepdims=True)) / s


class tanh:
    """y = tanh(x). Backward: dx = (1 - y^2) dy."""

    @staticmethod
    def forward(x):
        y = array_module(x).tanh(x)
        return y, y

    @staticmethod
    def backward(dy, cache):
        y = cache
        return (1 - y * y) * dy


class relu:
    """y = max(x, 0). Backward: dx = dy where x > 0, else 0 (at the kink x = 0 the subgradient 0)."""

    @staticmethod
    def forward(x):
        return array_module(x).maximum(x, 0), x > 0

    @staticmethod
    def backward(dy, cache):
        positive = cache
        return array_module(dy).where(positive, dy, 0)


class gelu:
    """y = x Phi(x), Phi(x) = (1 + erf(x / sqrt 2)) / 2 (Hendrycks and Gimpel 2016). Backward: dx = (Phi + x phi(x)) dy,
    phi(x) = exp(-x^2 / 2) / sqrt(2 pi)."""

    @staticmethod
    def forward(x):
        Phi = (erf(x * math.sqrt(0.5)) + 1) * 0.5
        return x * Phi, (x, Phi)

    @staticmethod
    def backward(dy, cache):
        x, Phi = cache
        phi = array_module(x).exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
        return (Phi + x * phi) * dy


class gelu_tanh:
    """y = x Phi, Phi = (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3): the approximation of GELU by tanh.

    It is computed as Phi = 1 / (1 + exp(-2 u)), since exp is faster than tanh. Backward: dx = (Phi + x Phi') dy,
    Phi' = 2 u' Phi (1 - Phi), u' = sqrt(2 / pi) (1 + 3 0.044715 x^2)."""

    @staticmethod
    def forward(x):
        xp, c = array_module(x), math.sqrt(2 / math.pi)
        y, inverse = empty(x.shape, x.dtype, xp), empty(x.shape, x.dtype, xp)                # inverse: 1 / Phi
        with np.errstate(over="ignore"):                                     # exp = inf gives Phi = 0, which is right
            for part in cache_blocks(x):                                     # in place: passes over memory cost most
                x_part, w = x[part], inverse[part]
                xp.multiply(x_part, x_part, out=w)
                w *= -2 * c * GELU_CUBE
                w -= 2 * c
                w *= x_part                                                  # -2 u
                xp.exp(w, out=w)
                w += 1
                xp.divide(x_part, w, out=y[part])
        return y, (x, inverse)

    @staticmethod
    def backward(dy, cache):
        x, inverse = cache
        xp, c = array_module(dy), math.sqrt(2 / math.pi)
        dx = empty(x.shape, xp.result_type(x, dy), xp)
        for part in cache_blocks(x):
            x_part, Phi, slope = x[part], 1 / inverse[part], dx[part]
            xp.multiply(x_part, x_part, out=slope)
            slope *= 6 * GELU_CUBE * c
            slope += 2 * c
            slope *= x_part
            slope *= 1 - Phi
            slope += 1                                                       # 1 + x Phi' / Phi
            slope *= Phi
            slope *= dy[part]
        return dx


class softmax_attention:
    """A = softmax(scale q k^T) v: each query's weighted mean of the values (Vaswani et al. 2017, equation 1).

        S_ij = scale <q_i, k_j>      P_ij = exp(S_ij) / sum_j' exp(S_ij')      A_i = sum_j P_ij v_j

    q (..., L, e), k (..., M, e), v (..., M, e_v) -> A (..., L, e_v); the leading axes (batch, heads) are equal.
    scale     default 1 / sqrt(e)
    mask      boolean, True where a key may be seen: (B, M) over the keys, B the first axis of q ((M,) where q is
              (L, e)), or of the rank of S, broadcast to (..., L, M)
    causal    the queries are the last L of the M positions: query i sees the keys j <= i + M - L
    window    with causal: the newest `window` of these keys only
    dropout   with an rng: each weight is dropped with this probability, the others divided by 1 - dropout

    A query that sees no key has P = 0 and A = 0, and gives no gradient. Only P is kept, not S. Keys that no query of a
    block can see (causal, window) are left out of its products, so that memory and time are linear in L with a window.
    Derivation: docs/derivations/softmax_attention.md.

    Raises ValueError for shapes that do not match, TypeError for a mask of another dtype or a mix of devices.
    """

    @staticmethod
    def forward(q, k, v, mask=None, causal=False, scale=None, *, window=None, dropout=0.0, rng=None):
        xp = array_module(q=q, k=k, v=v, mask=mask)
        _check_attention(q, k, v, causal, window, dropout)
        k, v, mask = _masked(q, k, v, mask)
        L, M, scale = q.shape[-2], k.shape[-2], 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scaled_q = q * scale
        A, P, drops = _empty_as(q, v.shape[-1], xp.result_type(q, k, v)), [], []
        for rows, keys in attention_blocks(L, M, causal, window, query_block(xp, window)):
            S = matmul(scaled_q[..., rows, :], k[..., keys, :].swapaxes(-1, -2))             # (..., rows, keys)
            seen = None if mask is None else _part(mask, rows, keys)
            P_rows, drop = masked_softmax(S, seen, rows, keys, M - L, causal, window), None
            if rng is not None and dropout:
                drop = (uniform_like(rng, P_rows) >= dropout).astype(P_rows.dtype)
                drop *= 1 / (1 - dropout)
            xp.matmul(P_rows if drop is None else P_rows * drop, v[..., keys, :], out=A[..., rows, :])
            P.append(P_rows)
            drops.append(drop)
        return A, _AttentionCache(scaled_q, k, v, A, P, drops, (causal, window, scale))

    @staticmethod
    def backward(dA, cache):
        """dv_j = sum_i P_ij dA_i;  dP_ij = <dA_i, v_j>;  dS_ij = P_ij (dP_ij - <dA_i, A_i>);
        dq_i = scale sum_j dS_ij k_j;  dk_j = scale sum_i dS_ij q_i.  Returns dq, dk, dv.

        (sum_j P_ij dP_ij = <dA_i, sum_j P_ij v_j> = <dA_i, A_i>, with dropped weights too.)
        """
        scaled_q, k, v, A, P, drops, (causal, window, scale) = cache
        xp = array_module(dA)
        check_shape("softmax_attention", "dA", dA, A.shape)
        dq, dk, dv = (_empty_as(array, array.shape[-1], A.dtype) for array in (scaled_q, k, v))
        blocks = attention_blocks(scaled_q.shape[-2], k.shape[-2], causal, window, query_block(xp, window))
        alone = blocks == [(slice(0, scaled_q.shape[-2]), slice(0, k.shape[-2]))]             # one block of everything
        if not alone:
            dk[...], dv[...] = 0, 0
        for (rows, keys), P_rows, drop in zip(blocks, P, drops):
            dA_rows = dA[..., rows, :]
            dropped = P_rows if drop is None else P_rows * drop
            _add_product(dropped.swapaxes(-1, -2), dA_rows, dv[..., keys, :], alone)
            dP = matmul(dA_rows, v[..., keys, :].swapaxes(-1, -2))
            dS = softmax_rows_backward(dP, P_rows, drop, dA_rows, A[..., rows, :])
            xp.matmul(dS, k[..., keys, :], out=dq[..., rows, :])
            _add_product(dS.swapaxes(-1, -2), scaled_q[..., rows, :], dk[..., keys, :], alone)
        dq *= scale
        return dq, dk, dv


class plain_attention:
    """softmax_attention by its equations, all scores at once: a reference to read and to test against.

    Arguments, results and gradients are those of softmax_attention.
    """

    @staticmethod
    def forward(q, k, v, mask=None, causal=False, scale=None, *, window=None, dropout=0.0, rng=None):
        xp = array_module(q=q, k=k, v=v, mask=mask)
        _check_attention(q, k, v, causal, window, dropout)
        k, v, mask = _masked(q, k, v, mask)
        L, M, scale = q.shape[-2], k.shape[-2], 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        S = scale * q @ k.swapaxes(-1, -2)                                   # (..., L, M)
        if causal:
            S = xp.where(_future(slice(0, L), slice(0, M), M - L, window, xp), -math.inf, S)
        if mask is not None:
            S = xp.where(mask, S, -math.inf)
        P = softmax_rows(S)
        drop = None
        if rng is not None and dropout:                                      # drawn as in softmax_attention
            drop = xp.zeros_like(P)
            for rows, keys in attention_blocks(L, M, causal, window, query_block(xp, window)):
                drop[..., rows, keys] = uniform_like(rng, xp.ascontiguousarray(P[..., rows, keys])) >= dropout
            drop *= 1 / (1 - dropout)
        A = (P if drop is None else P * drop) @ v
        return A, _PlainAttentionCache(q, k, v, P, drop, scale)

    @staticmethod
    def backward(dA, cache):
        """The equations of softmax_attention.backward: dq, dk, dv."""
        q, k, v, P, drop, scale = cache
        check_shape("plain_attention", "dA", dA, (*q.shape[:-1], v.shape[-1]))
        dP = dA @ v.swapaxes(-1, -2)
        dropped = P
        if drop is not None:
            dP, dropped = dP * drop, P * drop
        dS = P * (dP - (P * dP).sum(axis=-1, keepdims=True))
        return scale * dS @ k, scale * dS.swapaxes(-1, -2) @ q, dropped.swapaxes(-1, -2) @ dA


class _PlainAttentionCache(NamedTuple):
    """What plain_attention's backward reads."""

    q: Any          # (..., L, e)
    k: Any          # (..., M, e)
    v: Any          # (..., M, e_v)
    P: Any          # (..., L, M)
    drop: Any       # (..., L, M) or None
    scale: float


class _AttentionCache(NamedTuple):
    """What softmax_attention's backward reads; P and drops have one entry per block of queries."""

    scaled_q: Any   # (..., L, e)
    k: Any          # (..., M, e)
    v: Any          # (..., M, e_v)
    A: Any          # (..., L, e_v)
    P: list
    drops: list
    settings: tuple  # causal, window, scale


def masked_softmax(S, mask, rows, keys, offset, causal, window):
    """Softmax over the keys that each query sees, in place. S (..., rows, keys) is a block of the scores, `rows` and
    `keys` its slices; mask broadcasts to it, or is None; causal: query i sees the keys j <= i + offset (the newest
    `window` of them)."""
    xp = array_module(S)
    if fused := kernels.of(xp):
        return fused.masked_softmax(S, mask, rows, keys, offset, causal, window)
    if causal:
        xp.copyto(S, -math.inf, where=_future(rows, keys, offset, window, xp))
    if mask is not None:
        xp.copyto(S, -math.inf, where=~mask)
    return softmax_rows(S)


def softmax_rows_backward(dP, P, drop, dA, A):
    """dS = P (dP - <dA, A>), in place of dP, which is first multiplied by the dropout factors, if any."""
    if fused := kernels.of(array_module(dP)):
        return fused.softmax_rows_backward(dP, P, drop, dA, A)
    if drop is not None:
        dP *= drop
    # With one key the mean of dP is dP itself, so dS is exactly 0; two different sums would round differently.
    dP -= P * dP if dP.shape[-1] == 1 else row_sums(dA * A)
    dP *= P
    return dP


def softmax_rows(S):
    """Softmax along the last axis, in place; a row of only -inf becomes zeros."""
    xp = array_module(S)
    if not S.shape[-1]:
        return S
    top = S.max(axis=-1, keepdims=True)
    S -= xp.where(top == -math.inf, 0, top)
    xp.exp(S, out=S)
    total = row_sums(S)
    S *= 1 / xp.where(total == 0, 1, total)
    return S


def row_sums(x):
    """x.sum(axis=-1, keepdims=True) as a product with a vector: faster than a reduction over short rows."""
    return (x @ array_module(x).ones(x.shape[-1:], x.dtype))[..., None]


def query_block(xp, window):
    """Queries per block. On a GPU with a window: `window` of them, so that at most 2 L window scores are kept."""
    if xp is np:
        return QUERY_BLOCK
    return GPU_QUERY_BLOCK if window is None else min(max(window, QUERY_BLOCK), GPU_QUERY_BLOCK)


def attention_blocks(L, M, causal, window, block):
    """[(rows, keys)]: slices of `block` queries, and of the keys that at least one of them can see."""
    if not causal:
        return [(slice(0, L), slice(0, M))]
    blocks = []
    for first in range(0, L, block):
        last = min(first + block, L)
        oldest = 0 if window is None else max(0, first + M - L - window + 1)
        blocks.append((slice(first, last), slice(oldest, last + M - L)))
    return blocks


def _empty_as(array, width, dtype):
    """Uninitialised (..., width), with the axes in the same memory order as array's: adjacent heads stay so."""
    order = sorted(range(array.ndim - 1), key=lambda axis: -array.strides[axis])
    in_memory = empty([*(array.shape[axis] for axis in order), width], dtype, array_module(array))
    return in_memory.transpose(*(order.index(axis) for axis in range(array.ndim - 1)), array.ndim - 1)


def _add_product(a, b, total, alone):
    """total += a b, or total = a b if it is the only term."""
    if alone:
        array_module(total).matmul(a, b, out=total)
    else:
        total += matmul(a, b)


def _future(rows, keys, offset, window, xp):
    """(rows, keys) boolean: True for keys later than the query, and for those older than its window."""
    newest = xp.arange(rows.start, rows.stop)[:, None] + offset              # the newest key that each query sees
    key = xp.arange(keys.start, keys.stop)
    return key > newest if window is None else (key > newest) | (key <= newest - window)


def _part(mask, rows, keys):
    """The part of a mask (..., L or 1, M or 1) that belongs to a block."""
    every = slice(None)
    return mask[..., rows if mask.shape[-2] > 1 else every, keys if mask.shape[-1] > 1 else every]


def _masked(q, k, v, mask):
    """k and v, zero at the keys that a mask over the keys hides, so that NaN ends there; the mask with the rank of S.

    Raises if the mask does not match.
    """
    if mask is None:
        return k, v, None
    scores, keys = (*q.shape[:-1], k.shape[-2]), (*q.shape[:-2][:1], k.shape[-2])
    if mask.dtype != bool:
        raise TypeError(f"softmax_attention: mask has dtype {mask.dtype}; expected bool, True where a key may be seen")
    if mask.shape == keys and mask.ndim < len(scores):
        mask = mask.reshape(*keys[:-1], *(1,) * (len(scores) - len(keys)), keys[-1])
    elif mask.ndim != len(scores) or any(n not in (1, size) for n, size in zip(mask.shape, scores)):
        raise ValueError(f"softmax_attention: mask has shape {mask.shape}; expected {keys}, over the keys, or one that "
                         f"broadcasts to {scores}")
    if mask.shape[-2] == 1:
        k, v = (array_module(k).where(mask.swapaxes(-1, -2), array, 0) for array in (k, v))
    return k, v, mask


def _check_attention(q, k, v, causal, window, dropout):
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.kind != "f":
            raise TypeError(f"softmax_attention: {name} has dtype {array.dtype}; expected floating-point numbers")
    if q.ndim < 2 or k.shape != (*q.shape[:-2], *k.shape[-2:]) or k.shape[-1:] != q.shape[-1:]:
        raise ValueError(f"softmax_attention: q has shape {q.shape} and k {k.shape}; expected (..., L, e) and "
                         "(..., M, e)")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"softmax_attention: k has shape {k.shape} and v {v.shape}; expected a value for each key")
    if causal and k.shape[-2] < q.shape[-2]:
        raise ValueError(f"softmax_attention: causal with {q.shape[-2]} queries and {k.shape[-2]} keys; expected the "
                         "queries to be the last of the keys' positions")
    check_number("softmax_attention", "dropout", dropout, 0, 1, open_high=True)
    if window is not None:
        check_count("softmax_attention", "window", window)
        if not causal:
            raise ValueError("softmax_attention: window is given and causal is False; expected causal=True with it")
