"""Masks as a reordering of the real steps.

A time loop with a mask at every step is slow and hard to read. Instead each sample's real steps are left-aligned, the
loop runs without a mask, and what it computes after a sample's last real step is never read.
"""

from typing import Any, NamedTuple

from minigrad.backend import array_module, on_host
from minigrad.memory import empty


class Packing(NamedTuple):
    """Where each sample's real steps are: slot t of the packed sequence is step order[b, t] of the original."""

    order: Any      # (B, L) integer; None if every sample's real steps are already on the left
    inverse: Any    # (B, L) integer: step t of the original is slot inverse[b, t]; None as for order
    lengths: Any    # (B,) integer: the number of real steps
    mask: Any       # (B, L) boolean, as given

    @classmethod
    def of(cls, mask):
        """From a mask (B, L), boolean, True at real steps; None for no mask."""
        if mask is None:
            return None
        xp, L = array_module(mask=mask), mask.shape[1]
        if on_host(mask) and not (mask[:, 1:] > mask[:, :-1]).any():         # padded on the right: nothing to move
            return cls(None, None, mask.sum(axis=1), mask)
        order = xp.argsort(xp.where(mask, 0, L) + xp.arange(L), axis=1)      # distinct keys: stable by construction
        return cls(order, xp.argsort(order, axis=1), mask.sum(axis=1), mask)


def pack(x, packing):
    """(B, L, d), real steps left-aligned, zero-padded; x itself if packing is None."""
    if packing is None:
        return x
    xp = array_module(x)
    real = xp.where(packing.mask[:, :, None], x, 0)              # NaN in a masked step ends here
    return real if packing.order is None else real[xp.arange(len(x))[:, None], packing.order]


def unpack(y, packing):
    """The inverse of `pack`: every step at its original place, zeros at masked ones."""
    if packing is None:
        return y
    xp = array_module(y)
    spread = y if packing.inverse is None else y[xp.arange(len(y))[:, None], packing.inverse]
    return xp.where(packing.mask[:, :, None], spread, 0)


def last_states(hs, P, packing):
    """A copy of the last P states (B, P, h), each sample's at its own last real step; row P + t of hs is h_t."""
    xp, T = array_module(hs), len(hs) - P
    if packing is None:
        return hs[T:].transpose(1, 0, 2).copy()
    rows = packing.lengths[:, None] + xp.arange(P)                           # (B, P)
    return hs[rows, xp.arange(hs.shape[1])[:, None]]


def states_upstream(dy, dpast, hs, P, packing):
    """dhs (P+T, B, h), a new array: dy at the steps, plus dpast at the last P states of each sample."""
    xp, T = array_module(hs=hs, dy=dy, dpast=dpast), len(hs) - P
    dhs = empty(hs.shape, hs.dtype, xp)
    dhs[:P] = 0
    dhs[P:] = 0 if dy is None else pack(dy, packing).transpose(1, 0, 2)
    if dpast is None:
        return dhs
    if packing is None:
        dhs[T:] += dpast.transpose(1, 0, 2)
    else:
        rows = packing.lengths[:, None] + xp.arange(P)                       # of a sample: distinct
        dhs[rows, xp.arange(hs.shape[1])[:, None]] += dpast
    return dhs
