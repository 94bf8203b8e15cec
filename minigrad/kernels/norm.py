"""Layer normalisation on a GPU; its counterpart and its equations: minigrad/layers/norm.py."""

import math

from minigrad.backend import array_module
from minigrad.kernels import launch
from minigrad.kernels.launch import blocks_for, given, on_its_device, power_of_two, sum_dtype
from minigrad.memory import empty

COLUMNS, ROWS = 32, 8              # of a block of norm_backward_sums
MOST_PARTS = 128                   # of the sum over the rows


@on_its_device
def layer_norm_forward(x, gain, bias, eps):
    """y, cache (x, mu, 1/sigma)."""
    xp, dtype, d = array_module(x), x.dtype, x.shape[-1]
    x, gain, bias = (given(array, dtype, xp) for array in (x, gain, bias))
    rows, y = math.prod(x.shape[:-1]), empty(x.shape, dtype, xp)
    mu, inverse_sigma = empty((rows,), sum_dtype(dtype), xp), empty((rows,), sum_dtype(dtype), xp)
    launch.kernel("norm", "norm_forward", dtype)(
        rows, power_of_two(d), x, gain, bias, y, mu, inverse_sigma, float(eps), d)
    return y, (x, mu, inverse_sigma)


@on_its_device
def layer_norm_backward(dy, gain, cache):
    """dx, dgain, dbias."""
    x, mu, inverse_sigma = cache
    xp, dtype, d, rows = array_module(x), x.dtype, x.shape[-1], len(mu)
    dy, gain, dx = given(dy, dtype, xp), given(gain, dtype, xp), empty(x.shape, dtype, xp)
    launch.kernel("norm", "norm_backward", dtype)(
        rows, power_of_two(d), dy, x, gain, mu, inverse_sigma, dx, d)
    parts = min(MOST_PARTS, max(1, blocks_for(rows, 8 * ROWS)))
    sums = empty((2, parts, d), sum_dtype(dtype), xp)
    launch.kernel("norm", "norm_backward_sums", dtype)(
        (blocks_for(d, COLUMNS), parts), (COLUMNS, ROWS), dy, x, mu, inverse_sigma, sums, rows, d)
    return (dx, *sums.sum(axis=1).astype(dtype, copy=False))
