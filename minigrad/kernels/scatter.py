"""The gradient of an embedding on a GPU; its counterpart: scatter_add in minigrad/layers/embedding.py."""

import math

from minigrad.backend import array_module
from minigrad.kernels import launch
from minigrad.kernels.launch import blocks_for, given, on_its_device

COLUMNS, ROWS = 32, 8              # of a block


@on_its_device
def scatter_add(target, ids, updates):
    """As layers.embedding.scatter_add, each sum in the order of the updates; an id outside 0 ... V-1 is taken modulo
    V, as by CuPy's indexing. False, with nothing done, for a dtype without kernels or a target not C-contiguous.
    """
    xp, N, d = array_module(target, ids, updates), ids.size, math.prod(target.shape[1:])
    if target.dtype.name not in launch.TYPES or not target.flags.c_contiguous:
        return False
    if N and target.size:
        ids = ids.reshape(-1).astype("int64") % len(target)
        order = xp.argsort(ids, kind="stable")
        launch.kernel("scatter", "scatter_add", target.dtype)(
            (blocks_for(N, ROWS), blocks_for(d, COLUMNS)), (COLUMNS, ROWS), ids[order], given(order, "int64", xp),
            given(updates, target.dtype, xp), target, N, d)
    return True
