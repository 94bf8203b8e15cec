"""Optimizers and gradient clipping on a GPU, one launch for all parameters of a dtype.

Counterparts: minigrad/optim.py, clipping.py.
The table of the arrays' addresses (optim.cu) is built and sent once, and again when an array is replaced.
"""

from collections import OrderedDict

import numpy as np

from minigrad.backend import array_module
from minigrad.kernels import launch
from minigrad.kernels.launch import THREADS, KernelError, device_of
from minigrad.memory import empty

COLUMNS, SLOTS, CHUNK = 7, 3, 4096                                           # as in optim.cu
MOST_TABLES = 16


def optimizer_step(name, rows, decays, l2, shrink, scalars):
    """Launch the kernel `name` over rows (theta, g, accumulator or None, ...), one per parameter; decays is True where
    weight decay applies. False, with nothing done, if the arrays of a row have different memory layouts."""
    with device_of(rows[0][0]):
        tables = _tables(rows, decays)
        if tables is None:
            return False
        for dtype, table, work in tables:
            launch.kernel("optim", name, dtype)(len(work), THREADS, table, work, l2, shrink, *scalars)
    return True


# ---- clipping --------------------------------------------------------------------------------------------

def grad_norm(gradients, norm_scale):
    """sqrt(sum of g_i^2) as clipping.grad_norm computes it: a 0-d float64 array, without synchronisation."""
    xp = array_module(*gradients)
    with device_of(gradients[0]):
        gradients = [g if _dense(g) else xp.ascontiguousarray(g) for g in gradients]     # alive until they are read
        tables = _tables([(None, g) for g in gradients])
        parts = empty((sum(len(work) for *_, work in tables),), np.dtype("float64"), xp)
        if not len(parts):
            return xp.zeros((), "float64")
        _each(tables, "largest_gradient", parts)
        scale = xp.asarray(norm_scale(xp, parts.max()))
        _each(tables, "gradient_squares", scale, parts)
        return xp.asarray(scale * xp.sqrt(parts.sum()))


def shrink_gradients(gradients, factor):
    """g <- factor g, in place; factor a 0-d float64 array."""
    for g in _over_gradients(gradients, "shrink_gradients", factor):
        g *= factor.astype(g.dtype)


def clip_gradients(gradients, max_value):
    """g <- max(-c, min(g, c)), in place; max_value: c, a number."""
    for g in _over_gradients(gradients, "clip_gradients", float(max_value)):
        array_module(g).clip(g, -max_value, max_value, out=g)


def zero_gradients(gradients):
    """g <- 0, in place."""
    for g in _over_gradients(gradients, "zero_gradients"):
        g[...] = 0


def _over_gradients(gradients, name, *arguments):
    """Launch a kernel for the gradients that are each dense in memory; the others are left to the caller."""
    dense = [(None, g) for g in gradients if _dense(g)]
    if dense:
        with device_of(dense[0][1]):
            for dtype, table, work in _tables(dense):
                launch.kernel("optim", name, dtype)(len(work), THREADS, table, work, *arguments)
    return [g for g in gradients if not _dense(g)]


def _each(tables, name, *arguments):
    """Launch a kernel that writes one number per block into parts, the last argument."""
    first = 0
    for dtype, table, work in tables:
        launch.kernel("optim", name, dtype)(len(work), THREADS, table, work, *arguments, first)
        first += len(work)


# ---- tables ----------------------------------------------------------------------------------------------

_made = OrderedDict()              # the arrays' addresses -> their tables


def _tables(rows, decays=None):
    """[(dtype, table, work)] for each dtype among the rows (theta or None, g, accumulator or None, ...); None if the
    arrays of a row have different memory layouts. Built once for arrays that keep their addresses."""
    key = decays, tuple(None if a is None else (_address(a), a.shape, a.strides, a.dtype) for row in rows for a in row)
    if key not in _made:
        _made[key] = _make_tables(rows, decays or (False,) * len(rows))
        if len(_made) > MOST_TABLES:
            _made.popitem(last=False)
    _made.move_to_end(key)
    return _made[key]


def _make_tables(rows, decays):
    arrays, by_dtype = [a for row in rows for a in row if a is not None], {}
    if len({str(a.device) for a in arrays}) > 1:
        raise KernelError("the parameters are on several devices; expected them on one")
    for row, decay in zip(rows, decays):
        g = row[1]
        if not all(_dense(a) and (a.strides, a.dtype) == (g.strides, g.dtype) for a in row if a is not None):
            return None
        addresses = [0 if a is None else _address(a) for a in row] + [0] * (2 + SLOTS - len(row))
        by_dtype.setdefault(g.dtype, []).append((*addresses, g.size, int(decay)))
    return [(dtype, *_table(entries, array_module(arrays[0]))) for dtype, entries in by_dtype.items()]


def _table(entries, xp):
    work = [(n, first) for n, (*_, size, _) in enumerate(entries) for first in range(0, size, CHUNK)]
    return xp.array(entries, "int64").reshape(-1, COLUMNS), xp.array(work, "int64").reshape(-1, 2)


def _address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _dense(array):
    """Its entries fill one contiguous piece of memory, in any order."""
    return array.flags.c_contiguous or array.flags.f_contiguous
