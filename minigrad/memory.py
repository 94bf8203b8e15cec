"""Memory: recycled blocks for large arrays, and operations that write into them.

The arrays of a recurrent layer are a few MB each, too large for malloc to reuse. Every forward would get new pages from
the operating system, and the first touch of each page costs a fault (about a quarter of a training step;
docs/results/speed.md). `empty` therefore reuses the memory of arrays that are gone. CuPy has its own memory pool.
"""

import math

import numpy as np

from minigrad.backend import array_module, on_host

ALIGNMENT = 64                     # bytes: one cache line, one AVX-512 register
POOLED_FROM = 1 << 16              # bytes; smaller arrays are left to malloc
POOL_LIMIT = 1 << 29               # bytes that may be idle
_idle = {}                         # size -> idle memory of that size


class _Block:
    """Owns memory for one array and returns it to the pool when that array and its views are gone.

    Other threads or a garbage collection may run between any two lines. So there is no counter and no lock, only a
    list's pop and append, which are atomic.
    """

    def __init__(self, memory):
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self):
        if _idle is None:                                        # the interpreter is shutting down
            return
        size = self.memory.nbytes
        if sum(n * len(memories) for n, memories in list(_idle.items())) + size > POOL_LIMIT:
            _idle.clear()                                        # sizes that are no longer requested
        if size <= POOL_LIMIT:
            _idle.setdefault(size, []).append(self.memory)


def _aligned(size):
    """New, aligned memory of `size` bytes."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start:start + size]


def _recycled(size):
    """Idle memory of `size` bytes, or new memory if there is none."""
    try:
        return _idle[size].pop()
    except (KeyError, IndexError):
        return _aligned(size)


def empty(shape, dtype, xp=np):
    """An uninitialised C-contiguous array, 64-byte aligned, in recycled memory if it is large."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if xp is not np:
        return xp.empty(shape, dtype)
    # Sizes are rounded up to eighths of a power of two, so that sequences of different lengths share blocks.
    grain = max(ALIGNMENT, 1 << max(0, size.bit_length() - 4))
    rounded = -(-max(size, 1) // grain) * grain
    memory = _aligned(rounded) if size < POOLED_FROM else np.asarray(_Block(_recycled(rounded)))
    return np.ndarray(shape, dtype, memory)


def release_idle_memory():
    """Return the pool's idle memory to the system."""
    _idle.clear()


def zeros(shape, dtype, xp=np):
    """As `empty`, filled with zeros."""
    array = empty(shape, dtype, xp)
    array[...] = 0
    return array


CACHE_BLOCK = 1 << 18              # bytes: several arrays of this size fit into a core's cache


def cache_blocks(array):
    """[index]: parts of an array along its first axis, small enough to stay in the cache for several operations.

    A single index, for the whole array, if it is small or on a GPU, where every operation is a launch.
    """
    if not on_host(array) or array.ndim == 0 or array.nbytes <= CACHE_BLOCK:
        return [...]
    rows = max(1, CACHE_BLOCK * len(array) // array.nbytes)
    return [slice(first, first + rows) for first in range(0, len(array), rows)]


def apply(function, a, b):
    """function(a, b), for example xp.add, in memory from `empty`; b is broadcast to the shape of a."""
    xp = array_module(a, b)
    return function(a, b, out=empty(a.shape, xp.result_type(a.dtype, b.dtype), xp))


def matmul(a, b):
    """a @ b for arrays with at least two axes, in memory from `empty`.

    If b has two axes, all rows of a are one product (`@` makes one per batch entry).
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
