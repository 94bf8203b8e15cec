"""Fused CUDA kernels: one launch where plain CuPy would need many. Nothing here is used on the CPU.

    fused = kernels.of(xp)                                   # None for NumPy, and if the kernels are switched off
    if fused:
        return fused.recurrence_forward(...)                 # what the NumPy code below this line computes

Each function of `fused` has the arguments and results of its NumPy counterpart; its cache is for its own backward only.
The CUDA sources are in this folder: common.cuh, and a .cu for each family, compiled by CuPy at first use, once per
device and dtype (and cached by CuPy in ~/.cupy for later runs). Arrays are float16, float32 or float64; all arithmetic
and sums are float32 for the first two and float64 for the last. CuPy compiles these kernels like its own, with
-ftz=true: a float32 below 1.2e-38 is zero.

    MINIGRAD_KERNELS=0           in the environment: plain CuPy instead
"""

import numpy as np

from minigrad.kernels import fused
from minigrad.kernels.launch import SWITCH, KernelError, available, switched_on

__all__ = ["SWITCH", "KernelError", "available", "of"]


def of(xp):
    """The module of fused functions for an array module; None for NumPy and if they are switched off.

    Raises KernelError when the switch is neither 0 nor 1.
    """
    return None if xp is np or not switched_on() else fused
