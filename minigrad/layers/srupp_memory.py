"""What SRU++ remembers: the inputs of earlier segments; in step-by-step use the keys and values of earlier steps.

A memory holds inputs of W_q, newest last, (B, M, d), with a mask. A sample with fewer than M of them has them on the
right, next to the packed segment, so that the real steps of memory and segment are adjacent.
"""

from typing import Any, NamedTuple

from minigrad.backend import array_module, on_host
from minigrad.functional import softmax_attention
from minigrad.memory import zeros
from minigrad.packing import Packing, pack, unpack


class Memory(NamedTuple):
    """The memory before a segment, its real entries moved to the right."""

    z: Any                      # (B, M, d)
    mask: Any                   # (B, M) boolean, or None where all are known to be real
    packing: Packing | None     # of the memory read backwards

    @classmethod
    def of(cls, z, mask):
        """From a state's memory z (B, M, d) and mask (B, M)."""
        if not z.shape[1] or (on_host(mask) and mask.all()):
            return cls(z, None, None)
        packing = Packing.of(mask[:, ::-1])
        xp, M = array_module(mask), mask.shape[1]
        aligned = xp.arange(M) >= M - packing.lengths[:, None]
        return cls(pack(z[:, ::-1], packing)[:, ::-1], aligned, packing)

    def spread(self, dz):
        """The gradient dz (B, M, d) of z, in the order of the memory passed to `of`."""
        return dz if self.packing is None else unpack(dz[:, ::-1], self.packing)[:, ::-1]


def next_memory(memory, zs, packing, slots):
    """(memory (B, slots, d), its mask, what backward needs) after a segment zs (T, B, d), packed; slots=None: M + T.

    Slot j of a sample is row M + length - slots + j of [memory ; segment]; a row below 0 is an empty slot.
    """
    xp, (T, B, d), M = array_module(zs), zs.shape, memory.z.shape[1]
    slots = M + T if slots is None else slots
    if packing is None or not T:                                             # every sample takes the same rows
        kept, new = min(max(slots - T, 0), M), min(slots, T)
        z, mask = zeros((B, slots, d), zs.dtype, xp), xp.zeros((B, slots), bool)
        z[:, slots - new - kept:slots - new] = memory.z[:, M - kept:]
        z[:, slots - new:] = zs[T - new:].transpose(1, 0, 2)
        mask[:, slots - new - kept:slots - new] = True if memory.mask is None else memory.mask[:, M - kept:]
        mask[:, slots - new:] = True
        return z, mask, (slots, kept, new)
    first = M + packing.lengths[:, None] - slots                             # (B, 1), the row of slot 0
    rows = first + xp.arange(slots)                                          # (B, slots)
    both = xp.concatenate([memory.z, zs.transpose(1, 0, 2)], axis=1)
    known = xp.ones((B, M), bool) if memory.mask is None else memory.mask
    mask = (rows >= 0) & xp.take_along_axis(
        xp.concatenate([known, xp.ones((B, T), bool)], axis=1), xp.maximum(rows, 0), axis=1)
    z = xp.where(mask[:, :, None], xp.take_along_axis(both, xp.maximum(rows, 0)[:, :, None], axis=1), 0)
    return z, mask, (first, mask.copy())


def next_memory_backward(dz, taken, M, T):
    """The gradients of the given memory (B, M, d) and of the segment (B, T, d)."""
    xp, (B, _, d) = array_module(dz), dz.shape
    if len(taken) == 3:
        slots, kept, new = taken
        dboth = xp.zeros((B, M + T, d), dz.dtype)
        dboth[:, M - kept:M] = dz[:, slots - new - kept:slots - new]
        dboth[:, M + T - new:] = dz[:, slots - new:]
        return dboth[:, :M], dboth[:, M:]
    first, mask = taken
    slots = mask.shape[1]
    if not slots:
        return xp.zeros((B, M, d), dz.dtype), xp.zeros((B, T, d), dz.dtype)
    slot = xp.arange(M + T) - first                                          # (B, M+T), where each row went
    nearest = xp.clip(slot, 0, slots - 1)
    went = (slot == nearest) & xp.take_along_axis(mask, nearest, axis=1)
    dboth = xp.where(went[:, :, None], xp.take_along_axis(dz, nearest[:, :, None], axis=1), 0)
    return dboth[:, :M], dboth[:, M:]


# ---- step by step ----------------------------------------------------------------------------------------


class KeysAndValues:
    """Keys and values of the steps so far, (B, heads, n, e), in memory that grows by doubling; or a window of them.

    `append` returns a new view of n + 1 steps and leaves the old one unchanged.
    """

    def __init__(self, keys, values, mask, window=None):
        self.window, self.mask = window, mask                                # mask (B, n at the beginning) or None
        self.store, self.first, self.last, self.masked = [keys, values], 0, keys.shape[2], keys.shape[2]
        self.taken = [keys.shape[2]]                                         # shared by all views of the store

    def append(self, key, value):
        """A new view with one more key and value, (B, heads, e)."""
        after = object.__new__(KeysAndValues)
        after.__dict__.update(self.__dict__)
        capacity = self.store[0].shape[2]
        oldest = self.first if self.window is None else max(self.first, self.last + 1 - self.window)
        dtype = array_module(key).result_type(key.dtype, self.store[0].dtype)
        full = self.last == capacity or dtype != self.store[0].dtype
        if full or self.taken[0] != self.last:                               # or another view has appended here
            n = self.last - oldest
            after.store = [self._grown(array, oldest, n, dtype) for array in self.store]
            after.taken, after.last, after.first = [n], n, 0
            after.masked = max(0, self.masked - oldest)
            after.mask = self.mask[:, oldest:self.masked] if self.mask is not None and after.masked else None
        else:
            after.first = oldest
        for array, new in zip(after.store, (key, value)):
            array[:, :, after.last] = new
        after.last += 1
        after.taken[0] = after.last
        return after

    @staticmethod
    def _grown(array, oldest, n, dtype):
        B, heads, _, e = array.shape
        grown = array_module(array).empty((B, heads, max(16, 2 * n), e), dtype)
        grown[:, :, :n] = array[:, :, oldest:oldest + n]
        return grown

    def attend(self, q):
        """A (B, heads, 1, e) of the query q (B, heads, 1, e) over the steps kept."""
        keys, values = (array[:, :, self.first:self.last] for array in self.store)
        mask = None
        if self.mask is not None and self.first < self.masked:
            xp, B = array_module(q), len(q)
            mask = xp.ones((B, 1, 1, self.last - self.first), bool)
            mask[:, 0, 0, :self.masked - self.first] = self.mask[:, self.first:]
        return softmax_attention.forward(q, keys, values, mask=mask)[0]
