"""minigrad: deep learning from scratch on NumPy and CuPy, every backward written by hand.

    from minigrad import Parameter, Layer, Sequential, gradcheck
    from minigrad.layers import LSTM, RRALSTM, Linear

`minigrad.gradcheck` is the checker, a function. `python -m minigrad.gradcheck` runs it from a shell.
"""

from minigrad.gradcheck import gradcheck
from minigrad.layer import Layer, Residual, Sequential
from minigrad.parameter import Parameter

__all__ = ["Layer", "Parameter", "Residual", "Sequential", "gradcheck"]
__version__ = "0.1.0"
