"""Loading and launching the CUDA kernels: compiled by CuPy at first use, once per device and dtype."""

import contextlib
import functools
import importlib
import os
from pathlib import Path

import numpy as np

from minigrad.backend import gpu_available

SWITCH = "MINIGRAD_KERNELS"
FOLDER = Path(__file__).parent
TYPES = {"float16": "Half", "float32": "float", "float64": "double"}         # dtype -> REAL of common.cuh
THREADS = 256                      # per block, by default; MOST_THREADS of common.cuh


class KernelError(RuntimeError):
    """A kernel cannot be compiled or launched."""


def available():
    """True if there is a GPU and the kernels are not switched off. Raises KernelError as `switched_on`."""
    return switched_on() and gpu_available()


def switched_on():
    """False with MINIGRAD_KERNELS=0. Raises KernelError if the switch is neither 0 nor 1."""
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise KernelError(f"{SWITCH} is {value!r} in the environment; expected 0 or 1")
    return value == "1"


# ---- loading ---------------------------------------------------------------------------------------------


def source(family):
    """The text of a family ("sru") that is compiled: common.cuh, then its .cu."""
    return "".join(f'#line 1 "{name}"\n{(FOLDER / name).read_text("utf-8")}' for name in ("common.cuh", f"{family}.cu"))


def options(dtype):
    """The compiler's options for arrays of a dtype. Raises KernelError if there are no kernels for it."""
    name = np.dtype(dtype).name
    if name not in TYPES:
        raise KernelError(f"arrays of {name} have no GPU kernels; expected one of {', '.join(TYPES)}, or {SWITCH}=0")
    return ("-std=c++17", f"-DREAL={TYPES[name]}")


def kernel(family, name, dtype):
    """A kernel as f(blocks, threads, *arguments), on the current device and, at each call, the current stream.

    blocks and threads are numbers or tuples; the arguments are C-contiguous arrays, ints (long long) and floats
    (double), 0 for an absent array. With no blocks nothing is launched.
    Raises KernelError, with the cause, if it cannot be compiled.
    """
    device = importlib.import_module("cupy").cuda.Device().id
    return _kernel(device, family, name, np.dtype(dtype).name)


@functools.cache
def _kernel(device, family, name, dtype):
    function = _module(device, family, dtype).get_function(name)

    def launch(blocks, threads, *arguments):
        blocks, threads = (n if isinstance(n, tuple) else (n,) for n in (blocks, threads))
        if all(blocks):
            function(blocks, threads, arguments)
    return launch


@functools.cache
def _module(device, family, dtype):
    """A compiled .cu; `device` is the current one."""
    module = importlib.import_module("cupy").RawModule(code=source(family), options=options(dtype))
    try:
        module.compile()
    except Exception as error:     # CuPy has one error class for each library that can be at fault
        raise KernelError(
            f"the GPU kernels of {family}.cu could not be compiled for {dtype} ({_cause(error)}); {SWITCH}=0 in the "
            "environment runs without them; README.md, section GPU, lists what CuPy needs to compile") from error
    return module


def _cause(error):
    """The line of a compiler's log with the error; else the first line that is not empty; else the class."""
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)


# ---- for the functions that launch -----------------------------------------------------------------------


def sum_dtype(dtype):
    """The dtype that kernels compute and sum in (Acc of common.cuh)."""
    return np.dtype("float64" if np.dtype(dtype) == np.float64 else "float32")


def blocks_for(n, threads=THREADS):
    """The number of blocks of `threads` threads for n threads."""
    return -(-n // threads)


def power_of_two(n, least=32, most=THREADS):
    """The threads of a block that serves a row of n numbers: a power of two."""
    return min(most, max(least, 1 << max(0, n - 1).bit_length()))


def given(array, dtype, xp):
    """The array as a kernel's argument, C-contiguous and of this dtype; 0 for None."""
    return 0 if array is None else xp.ascontiguousarray(array, dtype=dtype)


def device_of(array):
    """A context in which the array's device is the current one."""
    return contextlib.nullcontext() if isinstance(array, np.ndarray) else array.device


def on_its_device(function):
    """The function, with the device of its first array current; an array may be inside a tuple, a cache for example.

    Raises KernelError for arrays on several devices.
    """
    @functools.wraps(function)
    def run(*arguments, **keywords):
        parts = [a if isinstance(a, tuple) else (a,) for a in (*arguments, *keywords.values())]
        arrays = [a for part in parts for a in part if hasattr(a, "device") and not np.isscalar(a)]
        devices = {str(a.device) for a in arrays}
        if len(devices) > 1:
            raise KernelError(f"{function.__name__} got arrays on the devices {sorted(devices)}; expected them on one")
        with device_of(arrays[0]):
            return function(*arguments, **keywords)
    return run
