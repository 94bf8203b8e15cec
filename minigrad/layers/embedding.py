"""Embedding: a learned row for each id. SinusoidalPositions and LearnedPositions: encodings of position."""

import math

import numpy as np
from scipy.sparse import csr_array

from minigrad import kernels
from minigrad.backend import array_module, on_host
from minigrad.check import check_count, check_mask, check_number, check_rank_and_width, check_shape
from minigrad.initializers import normal, uniform
from minigrad.layer import Layer
from minigrad.parameter import Parameter


class Embedding(Layer):
    """y = W[id].

    W (vocab, d)  U(-a, a), a = sigma sqrt(3): standard deviation sigma, default 1 / sqrt(d), for rows of norm about 1
    padding_id    an id whose row starts at zero and gets no gradient, so that it stays zero

    ids (...) integer -> y (..., d). mask (...) boolean: at a masked position y is 0 for any id.
    `rng` has no effect. Backward: W.grad[id] += dy, summed over repeated ids; returns None, since ids have no gradient.

    Raises TypeError for ids that are not integers, ValueError (on the CPU) for an id outside 0 ... vocab-1.
    """

    def __init__(self, vocab, d, padding_id=None, *, sigma=None, rng=None, dtype=None):
        check_count("Embedding", "vocab", vocab)
        check_count("Embedding", "d", d)
        sigma = 1 / math.sqrt(d) if sigma is None else sigma
        check_number("Embedding", "sigma", sigma, 0, open_high=True)
        a = sigma * math.sqrt(3)
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


def scatter_add(target, ids, updates):
    """target[ids[n]] += updates[n] for every n, in place, summed over repeated ids.

    target (V, ...), ids (N,) integer, updates (N, ...). (`target[ids] += updates` would keep only one update per id.)
    On the CPU repeated ids are first summed by a sparse one-hot product, several times faster than add.at. On a
    GPU they are also added in order (kernels/scatter.cu). With MINIGRAD_KERNELS=0 atomicAdd adds them in any order, and
    the last bits of a sum differ from run to run.

    Raises ValueError for updates of another shape, IndexError for an id outside 0 ... V-1 (on the CPU; on a GPU
    the check would have to wait, and CuPy takes the id modulo V).
    """
    xp = array_module(target=target, ids=ids, updates=updates)
    if updates.shape != ids.shape + target.shape[1:]:
        raise ValueError(f"scatter_add: updates has shape {updates.shape}; expected {ids.shape + target.shape[1:]}, "
                         "a row of target for each id")
    if (fused := kernels.of(xp)) and fused.scatter_add(target, ids, updates):
        return
    if xp is not np:
        xp.add.at(target, ids, updates)
        return
    if ids.size == 0:
        return
    if ids.min() < 0 or ids.max() >= len(target):
        raise IndexError(f"ids run from {ids.min()} to {ids.max()}; expected 0 ... {len(target) - 1}")
    used, position = np.unique(ids, return_inverse=True)
    n = np.arange(ids.size)
    one_hot = csr_array((np.ones(ids.size, updates.dtype), (position.ravel(), n)), shape=(used.size, ids.size))
    rows = one_hot @ updates.reshape(ids.size, -1)
    target[used] += rows.reshape(used.size, *target.shape[1:])


class SinusoidalPositions(Layer):
    """y_t = x_t + p_t, p_{t, 2i} = sin(t / 10000^(2i/d)), p_{t, 2i+1} = cos of the same (Vaswani et al. 2017, 3.5).

    x (B, L, d) -> y (B, L, d), any L. `mask` and `rng` have no effect. Backward: dx = dy.
    Raises ValueError for a wrong width, TypeError for a wrong dtype.
    """

    def __init__(self, d, *, rng=None, dtype=None):
        check_count("SinusoidalPositions", "d", d)
        self.d = d

    def positions(self, L, xp=np):
        """p (L, d), in float64."""
        angles = xp.arange(L)[:, None] / 10000.0**(xp.arange(0, self.d, 2) / self.d)      # (L, d/2 rounded up)
        return xp.stack([xp.sin(angles), xp.cos(angles)], axis=2).reshape(L, 2 * angles.shape[1])[:, :self.d]

    def forward(self, x, mask=None, rng=None):
        xp = array_module(x=x, mask=mask)
        check_rank_and_width("SinusoidalPositions", "x", x, 3, self.d)
        return x + self.positions(x.shape[1], xp).astype(x.dtype), x.shape

    def backward(self, dy, cache):
        check_shape("SinusoidalPositions", "dy", dy, cache)
        return dy


class LearnedPositions(Layer):
    """y_t = x_t + P_t. P (length, d) ~ N(0, 0.02^2), as in BERT.

    x (B, L, d) -> y (B, L, d), L at most `length`. mask (B, L): a padded position gives P no gradient. `rng` has no
    effect. Backward: dx = dy; P.grad[t] += the sum of dy_t over the batch.
    Raises ValueError for a wrong width or a sequence longer than `length`, TypeError for a wrong dtype.
    """

    def __init__(self, length, d, *, rng=None, dtype=None):
        check_count("LearnedPositions", "length", length)
        check_count("LearnedPositions", "d", d)
        self.P = Parameter(normal(rng, (length, d), 0.02, dtype), "P")

    def forward(self, x, mask=None, rng=None):
        P = self.P.value
        array_module(x=x, P=P, mask=mask)
        check_rank_and_width("LearnedPositions", "x", x, 3, P.shape[1])
        if x.shape[1] > len(P):
            raise ValueError(f"LearnedPositions: x has shape {x.shape}; expected at most {len(P)} positions")
        if mask is not None:
            check_mask("LearnedPositions", mask, x.shape[:2])
        return x + P[:x.shape[1]], (x.shape, mask)

    def backward(self, dy, cache):
        shape, mask = cache
        check_shape("LearnedPositions", "dy", dy, shape)
        real = dy if mask is None else array_module(dy).where(mask[:, :, None], dy, 0)
        self.P.grad[:shape[1]] += real.sum(axis=0)
        return dy
