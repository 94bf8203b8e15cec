"""Losses, as namespaces of a forward and a backward: loss, cache = f.forward(...), then f.backward(dloss, cache).

The loss is a 0-d array on the device of its inputs; converting it to a float, which waits on a GPU, is up to the
caller. `backward(dloss, cache)` returns the gradient of the first input only, in its dtype: targets and masks are
constants. dloss is a number, 1.0 for the loss itself, or a 0-d array on that device.
"""

from typing import Any, NamedTuple

from minigrad.backend import array_module, on_host
from minigrad.check import check_mask, check_shape
from minigrad.memory import cache_blocks, empty


class mean_squared_error:
    """loss = 1/n sum_i (y_i - t_i)^2 over all n entries. Backward: dy = 2 (y - t) / n.

    y, target: floating-point arrays of one shape (nothing is broadcast). Raises ValueError if the shapes differ,
    TypeError for another dtype.
    """

    @staticmethod
    def forward(y, target):
        xp = array_module(y=y, target=target)
        check_shape("mean_squared_error", "y", y, y.shape)
        check_shape("mean_squared_error", "target", target, y.shape)
        if y.size == 0:
            raise ValueError(f"mean_squared_error: y has shape {y.shape}; expected at least one entry")
        difference = y - target
        return xp.asarray((difference * difference).mean()), difference

    @staticmethod
    def backward(dloss, cache):
        difference = cache
        return difference * (2.0 / difference.size) * _in_dtype(dloss, difference.dtype)


def _in_dtype(dloss, dtype):
    """A NumPy scalar or 0-d array in this dtype; a Python number, which adapts to any, unchanged."""
    return dloss.astype(dtype) if hasattr(dloss, "astype") else dloss


class _CrossEntropyCache(NamedTuple):
    exponentials: Any   # (N, V), softmax(logits) before the division
    sums: Any           # (N, 1), of the exponentials
    ids: Any            # (N,)
    weight: Any         # (N,), 1/n at real positions, 0 elsewhere
    shape: tuple        # of the logits


class softmax_cross_entropy:
    """loss = -1/n sum over the n real positions of log softmax(logits)[target].

    logits (..., V) floating point, targets (...) integer in 0 ... V-1, mask (...) boolean, True where real
    (None: everywhere). With no real position the loss is 0. A masked position has no effect, even if it
    holds NaN or a target out of range.
    Backward: dlogits = (softmax(logits) - one_hot(targets)) / n at real positions, 0 elsewhere.

    Raises TypeError for targets that are not integers, ValueError for shapes that do not match and (on the CPU)
    for a target out of range.
    """

    @staticmethod
    def forward(logits, targets, mask=None):
        xp = array_module(logits=logits, targets=targets, mask=mask)
        _check_targets(logits, targets, mask)
        V = logits.shape[-1]
        rows, ids = logits.reshape(-1, V), targets.reshape(-1)                    # (N, V), (N,)
        if mask is None:
            n = max(ids.size, 1)
        else:
            real = mask.reshape(-1)
            ids = xp.where(real, ids, 0)
            n = xp.maximum(real.sum(), 1).astype(rows.dtype)
        exponentials = empty(rows.shape, rows.dtype, xp)                         # the only array of this size
        sums, of_targets = empty((len(rows), 1), rows.dtype, xp), empty(ids.shape, rows.dtype, xp)
        for part in cache_blocks(rows):                                          # of whole rows
            z = rows[part] if mask is None else xp.where(real[part, None], rows[part], 0)
            shifted = xp.subtract(z, z.max(axis=-1, keepdims=True), out=exponentials[part])
            of_targets[part] = shifted[xp.arange(len(z)), ids[part]]
            sums[part] = xp.exp(shifted, out=shifted).sum(axis=-1, keepdims=True)
        losses = xp.log(sums[:, 0]) - of_targets                                 # (N,)
        weight = xp.ones_like(losses) / n if mask is None else real / n          # (N,)
        return xp.asarray((losses * weight).sum()), _CrossEntropyCache(exponentials, sums, ids, weight, logits.shape)

    @staticmethod
    def backward(dloss, cache):
        """softmax(logits) is exponentials / sums; the division is folded into the weight of each row."""
        exponentials, sums, ids, weight, shape = cache
        xp = array_module(exponentials)
        weight = (weight * _in_dtype(dloss, weight.dtype))[:, None]              # (N, 1)
        dlogits = empty(exponentials.shape, xp.result_type(exponentials, weight), xp)
        xp.multiply(exponentials, weight / sums, out=dlogits)
        dlogits[xp.arange(ids.size), ids] -= weight[:, 0]
        return dlogits.reshape(shape)


def _check_targets(logits, targets, mask):
    name = "softmax_cross_entropy"
    if logits.dtype.kind != "f":
        raise TypeError(f"{name}: logits has dtype {logits.dtype}; expected floating-point numbers")
    if targets.dtype.kind not in "iu":
        raise TypeError(f"{name}: targets has dtype {targets.dtype}; expected integers")
    if logits.ndim < 1 or targets.shape != logits.shape[:-1]:
        raise ValueError(f"{name}: targets has shape {targets.shape}; expected that of logits without its last "
                         f"axis, {logits.shape[:-1]}")
    if mask is not None:
        check_mask(name, mask, targets.shape)
    if on_host(targets):
        real = targets if mask is None else targets[mask]
        if real.size and (real.min() < 0 or real.max() >= logits.shape[-1]):
            raise ValueError(f"{name}: targets run from {real.min()} to {real.max()}; expected 0 ... "
                             f"{logits.shape[-1] - 1}")
