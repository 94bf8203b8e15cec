"""minigrad: deep learning from scratch on NumPy and CuPy, every backward written by hand.

    from minigrad import Parameter, Layer, Sequential, gradcheck, summary
    from minigrad.layers import LSTM, RRALSTM, Linear

`minigrad.gradcheck` is the checker, a function. `python -m minigrad.gradcheck` runs it from a shell.
"""

from minigrad.gradcheck import gradcheck
from minigrad.layer import Layer, Residual, Sequential, summary
from minigrad.parameter import Parameter

__all__ = ["Layer", "Parameter", "Residual", "Sequential", "gradcheck", "summary"]
__version__ = "0.1.0"
