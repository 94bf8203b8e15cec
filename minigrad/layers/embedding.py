"""Embedding: a learned row for each id."""

import math

from minigrad.backend import array_module, on_host, scatter_add
from minigrad.check import check_count, check_mask, check_shape
from minigrad.initializers import uniform
from minigrad.layer import Layer
from minigrad.parameter import Parameter


class Embedding(Layer):
    """y = W[id].

    W (vocab, d)  U(-sqrt(3/d), sqrt(3/d)): variance 1/d, a row has a norm of about 1
    padding_id    an id whose row is zero at the start and whose gradient is always zero, so that it stays so

    ids (...) integer -> y (..., d). mask (...) boolean: at a masked position y is 0, whatever id stands there.
    `rng` has no effect. Backward: W.grad[id] += dy, a repeated id receiving every one of its dy; returns None, for ids
    have no gradient.

    Raises TypeError for ids that are not integers, ValueError (on the CPU) for an id outside 0 ... vocab-1.
    """

    def __init__(self, vocab, d, padding_id=None, *, rng=None, dtype=None):
        check_count("Embedding", "vocab", vocab)
        check_count("Embedding", "d", d)
        a = math.sqrt(3 / d)
        self.W = Parameter(uniform(rng, (vocab, d), -a, a, dtype), "W")
        self.padding_id = padding_id
        if padding_id is not None:
            check_count("Embedding", "padding_id", padding_id, least=0)
            if padding_id >= vocab:
                raise ValueError(f"Embedding: padding_id is {padding_id}; expected an id below vocab, {vocab}")
            self.W.value[padding_id] = 0

    def forward(self, ids, mask=None, rng=None):
        W = self.W.value
        xp = array_module(ids=ids, W=W, mask=mask)
        if ids.dtype.kind not in "iu":
            raise TypeError(f"Embedding: ids has dtype {ids.dtype}; expected integers")
        if mask is not None:
            check_mask("Embedding", mask, ids.shape)
            ids = xp.where(mask, ids, 0)
        if on_host(ids) and ids.size and (ids.min() < 0 or ids.max() >= len(W)):
            raise ValueError(f"Embedding: ids run from {ids.min()} to {ids.max()}; expected 0 ... {len(W) - 1}")
        y = W[ids]
        if mask is not None:
            y = xp.where(mask[..., None], y, 0)
        return y, (ids, mask)

    def backward(self, dy, cache):
        ids, mask = cache
        xp, d = array_module(dy), self.W.value.shape[1]
        check_shape("Embedding", "dy", dy, (*ids.shape, d))
        if self.padding_id is not None:
            real = ids != self.padding_id
            mask = real if mask is None else mask & real
        if mask is not None:
            dy = xp.where(mask[..., None], dy, 0)
        scatter_add(self.W.grad, ids.reshape(-1), dy.reshape(-1, d))
