"""minigrad: deep learning from scratch on NumPy and CuPy, every backward written by hand."""

from minigrad.layer import Layer, Residual, Sequential
from minigrad.parameter import Parameter

__all__ = ["Layer", "Parameter", "Residual", "Sequential"]
__version__ = "0.1.0"
