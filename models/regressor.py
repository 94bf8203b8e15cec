"""Regression from the last output of a recurrent layer: the model for the adding problem."""

from minigrad.backend import array_module
from minigrad.check import check_mask
from minigrad.layer import Layer
from minigrad.layers import Linear


class SequenceRegressor(Layer):
    """y = h_last W + b, h_last the recurrent layer's output at each sample's last real step.

    cell       any recurrent layer (LSTM, RRALSTM, a Stack) with outputs of width h
    readout    Linear(h, d_out)

    forward(x (B, L, d), mask=None, rng=None) -> (y (B, d_out), cache); backward(dy, cache) -> dx (B, L, d).
    A sample with no real step has h_last = 0. Raises ValueError for an empty sequence and as the cell
    does, TypeError for a cell that is not recurrent.
    """

    def __init__(self, cell, h, d_out=1, *, rng=None, dtype=None):
        if not getattr(cell, "recurrent", False):
            raise TypeError(f"SequenceRegressor: cell is a {type(cell).__name__}; expected a recurrent layer")
        self.cell = cell
        self.readout = Linear(h, d_out, rng=rng, dtype=dtype)

    def forward(self, x, mask=None, rng=None):
        array_module(x=x, mask=mask)
        if x.ndim == 3 and x.shape[1] == 0:
            raise ValueError(f"SequenceRegressor: x has shape {x.shape}; expected at least one step")
        (hs, _), cell_cache = self.cell.forward(x, mask=mask, rng=rng)       # (B, L, h)
        last = last_real_step(hs, mask)                                      # (B,)
        h_last = hs[array_module(hs).arange(len(hs)), last]                  # (B, h)
        y, readout_cache = self.readout.forward(h_last)
        return y, (cell_cache, readout_cache, (last, hs.shape))

    def backward(self, dy, cache):
        """dh is dy W^T at the last real step, zero at all others."""
        cell_cache, readout_cache, (last, shape) = cache
        dh_last = self.readout.backward(dy, readout_cache)                   # (B, h)
        xp = array_module(dh_last)
        dhs = xp.zeros(shape, dh_last.dtype)
        dhs[xp.arange(len(dhs)), last] = dh_last
        dx, _ = self.cell.backward((dhs, None), cell_cache)
        return dx


def last_real_step(hs, mask):
    """(B,) the index of each sample's last real step; 0 if there is none. Without a mask, L - 1."""
    xp, (B, L) = array_module(hs=hs, mask=mask), hs.shape[:2]
    if mask is None:
        return xp.full(B, L - 1)
    check_mask("SequenceRegressor", mask, (B, L))
    return xp.where(mask, xp.arange(L), 0).max(axis=1)
