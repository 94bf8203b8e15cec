"""MultiHeadAttention: softmax attention in several heads (Vaswani et al. 2017, section 3.2.2).

Derivation of the backward: docs/derivations/multi_head_attention.md.
"""

from typing import Any, NamedTuple

from minigrad.backend import array_module
from minigrad.check import check_count, check_mask, check_number, check_rank_and_width, check_shape
from minigrad.functional import softmax_attention
from minigrad.initializers import generator, glorot_uniform, zeros
from minigrad.layer import Layer
from minigrad.layers.linear import affine, affine_backward
from minigrad.parameter import Parameter


class MultiHeadAttention(Layer):
    """y = A W_o + b_o, where A concatenates the results of the heads, softmax(q_n k_n^T / sqrt(e)) v_n.

        q = query W_q + b_q      k = memory W_k + b_k      v = memory W_v + b_v      (self-attention: memory = query)

    Head n takes the columns n e ... (n+1) e - 1 of q, k, v; e = d_key / heads.

    W_q, W_k, W_v (d, d_key), W_o (d_key, d)   Glorot uniform
    b_q, b_k, b_v (d_key,), b_o (d,)           zero
    d_key       the total width of the heads, default d
    dropout     of the attention weights

    forward(query (B, L, d), memory=None or (B, M, d), causal=False, mask=None, rng=None) -> y (B, L, d), cache.
    mask: boolean, over the keys, (B, M), or (B, L) in self-attention. A query that sees no key gives b_o. In
    self-attention y at a padded row is unspecified; the values of x there, NaN included, reach no other row.
    backward(dy, cache) -> dquery, or (dquery, dmemory) when memory was given.

    With a memory of one row, no mask and no dropout on the map, the one weight is 1 whatever q and k are: y is
    (memory W_v + b_v) W_o + b_o at every position, and the gradients of query, W_q, b_q, W_k and b_k are exactly zero.
    `_OneRow` computes this case without W_q and W_k; with `one_row` set to False the general equations do.

    Raises ValueError for shapes that do not fit, for heads that do not divide d_key, and for causal with a memory;
    TypeError for wrong dtypes or a mix of devices.
    """

    def __init__(self, d, heads, d_key=None, *, dropout=0.0, rng=None, dtype=None):
        d_key = d if d_key is None else d_key
        for name, value in (("d", d), ("heads", heads), ("d_key", d_key)):
            check_count("MultiHeadAttention", name, value)
        if d_key % heads:
            raise ValueError(f"MultiHeadAttention: d_key is {d_key} and heads {heads}; expected a width that the heads "
                             "divide")
        check_number("MultiHeadAttention", "dropout", dropout, 0, 1, open_high=True)
        rng = generator(rng)
        self.W_q, self.W_k, self.W_v = (
            Parameter(glorot_uniform(rng, (d, d_key), dtype), name) for name in ("W_q", "W_k", "W_v"))
        self.W_o = Parameter(glorot_uniform(rng, (d_key, d), dtype), "W_o")
        self.b_q, self.b_k, self.b_v = (Parameter(zeros((d_key,), dtype), name) for name in ("b_q", "b_k", "b_v"))
        self.b_o = Parameter(zeros((d,), dtype), "b_o")
        self.heads, self.dropout, self.one_row = heads, float(dropout), True

    def forward(self, query, memory=None, causal=False, mask=None, rng=None):
        xp = array_module(query=query, memory=memory, mask=mask, W_q=self.W_q.value)
        self._check(query, memory, causal, mask)
        drops = rng is not None and self.dropout
        if self.one_row and memory is not None and memory.shape[1] == 1 and mask is None and not drops:
            return _OneRow.forward(self, query, memory)
        keys = query if memory is None else memory
        if mask is not None:
            keys = xp.where(mask[:, :, None], keys, 0)                       # NaN in a padded row ends here
        query = keys if memory is None else query
        q, k, v = (split_heads(affine(x, W, b), self.heads) for x, W, b in (
            (query, self.W_q, self.b_q), (keys, self.W_k, self.b_k), (keys, self.W_v, self.b_v)))
        if mask is not None:                     # k and v at padded positions are finite: b_k and b_v
            mask_of_scores = xp.broadcast_to(mask[:, None, None], (len(q), 1, q.shape[2], k.shape[2]))
        A, attention_cache = softmax_attention.forward(
            q, k, v, mask=None if mask is None else mask_of_scores, causal=causal, dropout=self.dropout, rng=rng)
        A = join_heads(A)                                                    # (B, L, d_key)
        return affine(A, self.W_o, self.b_o), _AttentionCache(query, keys, memory is None, A, attention_cache, mask)

    def backward(self, dy, cache):
        """Through W_o, the heads and the three products; in self-attention x is query, key and value: three terms."""
        check_shape("MultiHeadAttention", "dy", dy, cache.query.shape)
        if isinstance(cache, _OneRowCache):
            return _OneRow.backward(self, dy, cache)
        query, keys, self_attention, A, attention_cache, mask = cache
        dA = affine_backward(dy, A, self.W_o, self.b_o)
        dq, dk, dv = (join_heads(part) for part in softmax_attention.backward(
            split_heads(dA, self.heads), attention_cache))
        dquery = affine_backward(dq, query, self.W_q, self.b_q)
        dkeys = affine_backward(dk, keys, self.W_k, self.b_k)
        dkeys += affine_backward(dv, keys, self.W_v, self.b_v)
        if self_attention:
            dquery += dkeys
            return dquery if mask is None else array_module(dy).where(mask[:, :, None], dquery, 0)
        return dquery, dkeys if mask is None else array_module(dy).where(mask[:, :, None], dkeys, 0)

    def _check(self, query, memory, causal, mask):
        d = self.W_q.value.shape[0]
        check_rank_and_width("MultiHeadAttention", "query", query, 3, d)
        if memory is not None:
            check_rank_and_width("MultiHeadAttention", "memory", memory, 3, d)
            if len(memory) != len(query):
                raise ValueError(f"MultiHeadAttention: memory has shape {memory.shape}; expected a batch of "
                                 f"{len(query)}, as query has")
            if causal:
                raise ValueError("MultiHeadAttention: causal is True and a memory is given; expected causal with "
                                 "self-attention only: a memory has no order in common with the query")
        if mask is not None:
            check_mask("MultiHeadAttention", mask, (query if memory is None else memory).shape[:2])


class _AttentionCache(NamedTuple):
    """What MultiHeadAttention.backward reads."""

    query: Any          # (B, L, d)
    keys: Any           # (B, M, d)     the memory, or the query itself
    self_attention: bool
    A: Any              # (B, L, d_key)
    attention: Any      # the cache of softmax_attention
    mask: Any           # (B, M) or None


class _OneRowCache(NamedTuple):
    """What _OneRow.backward reads."""

    query: Any          # (B, L, d)
    memory: Any         # (B, 1, d)


class _OneRow:
    """Attention over a memory of one row, whose weight is 1: y_t = (s W_v + b_v) W_o + b_o for every t, s the row."""

    @staticmethod
    def forward(layer, query, memory):
        v = affine(memory, layer.W_v, layer.b_v)                             # (B, 1, d_key)
        y = affine(v, layer.W_o, layer.b_o)
        y = y.astype(array_module(y).result_type(y.dtype, query.dtype), copy=False)
        return array_module(y).broadcast_to(y, query.shape), _OneRowCache(query, memory)

    @staticmethod
    def backward(layer, dy, cache):
        """The gradient of the one row is summed over the positions; that of the query is zero."""
        query, memory = cache
        v = affine(memory, layer.W_v, layer.b_v)
        dv = affine_backward(dy.sum(axis=1, keepdims=True), v, layer.W_o, layer.b_o)
        dquery = array_module(dy).zeros_like(query, dtype=dv.dtype)
        return dquery, affine_backward(dv, memory, layer.W_v, layer.b_v)


def split_heads(rows, heads):
    """(B, n, width) -> (B, heads, n, e), e = width / heads."""
    B, n, width = rows.shape
    return rows.reshape(B, n, heads, width // heads).transpose(0, 2, 1, 3)


def join_heads(heads):
    """(B, heads, n, e) -> (B, n, heads e), the inverse of `split_heads`."""
    B, count, n, e = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(B, n, count * e)
