"""Memory: recycled blocks for large arrays, and operations that write into them.

The arrays of a recurrent layer are a few MB each: too large for malloc's own reuse, so that every forward would take
fresh pages from the kernel, and each first touch of a page costs a fault (about a quarter of a training step;
docs/results/speed.md). `empty` therefore hands out blocks that a dead array gave back. CuPy has such a pool of its own.
"""

import math

import numpy as np

from minigrad.backend import array_module, on_host

ALIGNMENT = 64                     # bytes: one cache line, one AVX-512 register
POOLED_FROM = 1 << 16              # smaller arrays are malloc's business
POOL_LIMIT = 1 << 29               # bytes that may lie idle
_idle = {}                         # size -> idle memory of that size


class _Block:
    """Owns memory for one array and gives it to the pool when that array and its views are gone.

    Threads, and a garbage collection at any line, may get in between: so there is no count to keep and no lock to
    hold, only a list's pop and append, which are atomic.
    """

    def __init__(self, memory):
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self):
        if _idle is None:                                        # the interpreter is shutting down
            return
        size = self.memory.nbytes
        if sum(n * len(memories) for n, memories in list(_idle.items())) + size > POOL_LIMIT:
            _idle.clear()                                        # sizes that nobody asks for any more
        if size <= POOL_LIMIT:
            _idle.setdefault(size, []).append(self.memory)


def _aligned(size):
    """Fresh memory of `size` bytes."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start:start + size]


def _recycled(size):
    """Memory of `size` bytes that is idle, else fresh."""
    try:
        return _idle[size].pop()
    except (KeyError, IndexError):
        return _aligned(size)


def empty(shape, dtype, xp=np):
    """An uninitialised C-contiguous array, 64-byte aligned, in recycled memory where that saves page faults."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if xp is not np:
        return xp.empty(shape, dtype)
    # Sizes are rounded up to eighths of a power of two, so that sequences of any length share blocks.
    grain = max(ALIGNMENT, 1 << max(0, size.bit_length() - 4))
    rounded = -(-max(size, 1) // grain) * grain
    memory = _aligned(rounded) if size < POOLED_FROM else np.asarray(_Block(_recycled(rounded)))
    return np.ndarray(shape, dtype, memory)


def release_idle_memory():
    """Give the pool's idle memory back to the system."""
    _idle.clear()


def zeros(shape, dtype, xp=np):
    """As `empty`, filled with zeros."""
    array = empty(shape, dtype, xp)
    array[...] = 0
    return array


CACHE_BLOCK = 1 << 18              # bytes: several arrays of this size fit into a core's cache


def cache_blocks(array):
    """[index]: parts of an array along its first axis that stay in the cache while several operations pass over each.

    One index, the whole, for a small array and on a GPU, where every operation is a launch.
    """
    if not on_host(array) or array.ndim == 0 or array.nbytes <= CACHE_BLOCK:
        return [...]
    rows = max(1, CACHE_BLOCK * len(array) // array.nbytes)
    return [slice(first, first + rows) for first in range(0, len(array), rows)]


def apply(function, a, b):
    """function(a, b), xp.add for example, into memory as `empty` gives it; b is broadcast to the shape of a."""
    xp = array_module(a, b)
    return function(a, b, out=empty(a.shape, xp.result_type(a.dtype, b.dtype), xp))


def matmul(a, b):
    """a @ b for arrays of at least two axes, into memory as `empty` gives it.

    With a b of two axes all of a's rows are one product (`@` makes one of each batch entry).
    """
    xp, one_product = array_module(a, b), b.ndim == 2
    front = a.shape[:-2]
    if not one_product and b.shape[:-2] != front:
        front = np.broadcast_shapes(front, b.shape[:-2])
    y = empty((*front, a.shape[-2], b.shape[-1]), xp.result_type(a.dtype, b.dtype), xp)
    if one_product:
        rows = math.prod(a.shape[:-1])
        xp.matmul(a.reshape(rows, a.shape[-1]), b, out=y.reshape(rows, b.shape[-1]))
    else:
        xp.matmul(a, b, out=y)
    return y
