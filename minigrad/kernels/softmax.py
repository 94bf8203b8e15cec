"""The softmax of attention on a GPU; its counterparts and equations: minigrad/functional.py."""

import math

from minigrad.backend import array_module
from minigrad.kernels import launch
from minigrad.kernels.launch import given, on_its_device, power_of_two


@on_its_device
def masked_softmax(S, mask, rows, keys, offset, causal, window):
    """As functional.masked_softmax, in place."""
    xp, (L, M) = array_module(S, mask), S.shape[-2:]
    if mask is not None:
        if S.ndim > 4:
            mask = xp.broadcast_to(mask, S.shape)
        else:                                    # repeated axes only once, so that they are not copied
            mask = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.strides)]
        mask = xp.ascontiguousarray(mask).reshape((1,) * (4 - mask.ndim) + mask.shape if mask.ndim < 4 else
                                                  (math.prod(mask.shape[:-3]), *mask.shape[-3:]))
    H = S.shape[-3] if S.ndim > 2 else 1
    launch.kernel("softmax", "softmax_forward", S.dtype)(
        math.prod(S.shape[:-1]) if M else 0, power_of_two(M), S, 0 if mask is None else mask, *_strides(mask),
        int(causal), rows.start, keys.start, int(offset), int(window or 0), H, L, M)
    return S


def _strides(mask):
    """Of each of the four axes, in entries; 0 where it has one entry, which is broadcast."""
    if mask is None:
        return (0,) * 4
    return tuple(0 if n == 1 else math.prod(mask.shape[axis + 1:]) for axis, n in enumerate(mask.shape))


@on_its_device
def softmax_rows_backward(dP, P, drop, dA, A):
    """As functional.softmax_rows_backward, in place; <dA, A> is not needed."""
    M = P.shape[-1]
    launch.kernel("softmax", "softmax_backward", P.dtype)(
        math.prod(P.shape[:-1]) if M else 0, power_of_two(M), dP, P, given(drop, P.dtype, array_module(P)), M)
    return dP
