"""Gradient clipping, by value and by global norm (Pascanu, Mikolov and Bengio 2013)."""

import sys

from minigrad import kernels
from minigrad.backend import array_module
from minigrad.check import check_number
from minigrad.memory import cache_blocks
from minigrad.parameter import unique_parameters

LARGEST = sys.float_info.max


def clip_grad_value(parameters, max_value):
    """g_i <- min(max(g_i, -c), c), in place, for every entry of every gradient; c = max_value.

    Changes the gradient's direction. NaN stays NaN; an infinite entry becomes +-c.
    Raises ValueError for a negative or NaN max_value.
    """
    check_number("clip_grad_value", "max_value", max_value, 0)
    gradients = [parameter.grad for parameter in unique_parameters(parameters, "clip_grad_value")]
    xp = array_module(*gradients)
    if fused := kernels.of(xp):
        fused.clip_gradients(gradients, max_value)
        return
    for g in gradients:
        xp.clip(g, -max_value, max_value, out=g)


def grad_norm(parameters):
    """N = sqrt(sum of g_i^2 over all parameters), each counted once, as a 0-d float64 array on their device.

    Computed as m sqrt(sum (g_i/m)^2) with m the largest |g_i|, in float64, so that large gradients do not overflow
    and small ones do not underflow. Inf if an entry is infinite, NaN if one is NaN.
    """
    gradients = [p.grad for p in unique_parameters(parameters, "grad_norm")]
    xp = array_module(*gradients)
    if fused := kernels.of(xp):
        return fused.grad_norm(gradients, norm_scale)
    gradients = [g[part] for g in gradients if g.size for part in cache_blocks(g)]
    if not gradients:
        return xp.zeros((), "float64")
    m = xp.stack([abs(g).max() for g in gradients]).max().astype("float64")
    scale = norm_scale(xp, m)
    squares = xp.stack([((g / scale)**2).sum(dtype="float64") for g in gradients]).sum()
    return xp.asarray(scale * xp.sqrt(squares))


def norm_scale(xp, m):
    """The divisor of the gradients before squaring: m, the largest |g_i|, if it is finite and not zero."""
    return xp.where(xp.isfinite(m) & (m > 0), m, LARGEST)        # next to an Inf, the finite ones do not overflow


def clip_grad_norm(parameters, max_norm, error_if_nonfinite=False):
    """g <- g min(1, c/N), in place, N the global norm over all parameters, c = max_norm (Pascanu et al. 2013).

    Keeps the gradient's direction. Returns N before clipping as a 0-d array on the device, without
    synchronisation. A non-finite N makes every gradient NaN, so that the fault is visible; with `error_if_nonfinite`
    it raises FloatingPointError and changes nothing. max_norm=inf only measures.
    Raises ValueError for a negative or NaN max_norm.
    """
    check_number("clip_grad_norm", "max_norm", max_norm, 0)
    parameters = unique_parameters(parameters, "clip_grad_norm")
    norm = grad_norm(parameters)
    xp = array_module(norm)
    if error_if_nonfinite and not xp.isfinite(norm):
        culprits = [p.name for p in parameters if not xp.isfinite(p.grad).all()]
        raise FloatingPointError(f"clip_grad_norm: the norm is {float(norm)}; the gradient of "
                                 f"{culprits[0] if culprits else 'all together'} is not finite")
    shrink_gradients(parameters, max_norm, norm)
    return norm


def shrink_gradients(parameters, max_norm, norm):
    """The second half of `clip_grad_norm`, for a caller that already has the norm (`grad_norm` of these parameters)."""
    xp = array_module(norm)
    exceeds = norm > max_norm
    factor = xp.where(exceeds, max_norm / xp.where(exceeds, norm, 1), 1.0)   # min(1, c/N), also for N = 0 and c = inf
    factor = xp.where(xp.isfinite(norm), factor, xp.nan)
    if fused := kernels.of(xp):
        fused.shrink_gradients([parameter.grad for parameter in parameters], factor)
        return
    for parameter in parameters:
        parameter.grad *= factor.astype(parameter.grad.dtype)
