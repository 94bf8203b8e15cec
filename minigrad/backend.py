"""NumPy or CuPy: which one an array belongs to, transfers between them, and the few things that differ.

The device of a computation is the device of its arrays: `xp = array_module(x)` is the first line of a
function that computes, and nothing else chooses. There is no global switch, so both devices work in one
process. Importing this module never imports CuPy.
"""

import functools
import importlib
import sys

import numpy as np

from minigrad.tree import tree_map

DEFAULT_DTYPE = "float32"
ORIGINAL = "Original error:"       # in CuPy's message after a failed import, after some advice
HOW_TO_MOVE = "move one of them with minigrad.backend.to_device(array, 'cpu' or 'gpu')"


class DeviceError(RuntimeError):
    """The requested device is not available."""


# ---- which module an array belongs to --------------------------------------------------------------------

def _module_of(array):
    """numpy, cupy, or None if it is not an array."""
    if isinstance(array, np.ndarray):
        return np
    if type(array).__module__.partition(".")[0] == "cupy":
        return sys.modules["cupy"]
    return None


def array_module(*arrays, **named):
    """The module (numpy or cupy) that all given arrays belong to.

    Arrays may be given by position or by name (`array_module(x=x, W=self.W.value)`: an error uses the names).
    None is ignored, so optional arguments can be passed directly.

    Raises TypeError if one is not an array, and for a mix of NumPy and CuPy.
    """
    given = arrays + tuple(named.values()) if named else arrays
    for array in given:                                          # the common case, quickly: only NumPy arrays
        if type(array) is not np.ndarray:
            break
    else:
        if given:
            return np
    named.update((f"argument {n}", array) for n, array in enumerate(arrays, 1))
    first, xp = None, None
    for name, array in named.items():
        if array is None:
            continue
        module = _module_of(array)
        if module is None:
            raise TypeError(f"{name} is a {type(array).__name__}; expected a NumPy or CuPy array")
        if xp is None:
            first, xp = name, module
        elif module is not xp:
            raise TypeError(f"{first} is on the {_place(xp)} and {name} on the {_place(module)}: {HOW_TO_MOVE}")
    if xp is None:
        raise TypeError("array_module got no array")
    return xp


def _place(module):
    return "CPU (NumPy)" if module is np else "GPU (CuPy)"


def on_host(array):
    """True for a NumPy array: its values can be read without waiting for a GPU."""
    return array_module(array) is np


# ---- devices ---------------------------------------------------------------------------------------------

def gpu_problem():
    """None if a GPU can be used, else one line that says why not (an installed CuPy does not imply a GPU)."""
    try:
        cupy = importlib.import_module("cupy")
    except (Exception, SystemExit) as error:  # a CuPy that does not fit its NumPy or CUDA fails in many ways
        return f"CuPy cannot be imported ({one_line(error)}); how to install it is in README.md, section GPU"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy has an error class of its own for each CUDA library
        return f"CuPy is installed but finds no usable CUDA device ({one_line(error)}); see README.md, section GPU"
    return None if count else "CuPy is installed but this machine has no CUDA device; see README.md, section GPU"


def one_line(error):
    """The line of an error's text that says what is wrong, else its class.

    This is the first line with a word in it (CuPy frames its messages with rules), or the line after "Original error:".
    """
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))]
    if ORIGINAL in lines[:-1]:
        return lines[lines.index(ORIGINAL) + 1]
    return lines[0] if lines else type(error).__name__


def gpu_available():
    """True if CuPy can be imported and a CUDA device answers."""
    return gpu_problem() is None


def resolve_device(device):
    """'cpu' or 'gpu' for 'cpu', 'gpu' or 'auto' (the GPU if there is one).

    Raises ValueError for another word, DeviceError for 'gpu' if there is none.
    """
    if device not in ("cpu", "gpu", "auto"):
        raise ValueError(f"device is {device!r}; expected 'cpu', 'gpu' or 'auto'")
    if device == "cpu":
        return "cpu"
    problem = gpu_problem()
    if device == "gpu" and problem:
        raise DeviceError(f"device 'gpu' was asked for, but {problem}")
    return "cpu" if problem else "gpu"


def require_working(device):
    """As `resolve_device`, but also checks that a GPU computes: kernels compile and run.

    Raises DeviceError, one line, if they do not, for example because CUDA's compiler or headers are missing.
    """
    device = resolve_device(device)
    if device == "gpu":
        try:
            _first_computation()
        except Exception as error:  # CuPy has an error class of its own for each library that can be at fault
            raise DeviceError(f"CuPy finds the GPU but cannot compute on it ({one_line(error)}); see README.md, "
                              "section GPU") from error
    return device


@functools.cache
def _first_computation():
    return float((module_of_device("gpu").ones((2,), DEFAULT_DTYPE) + 1).sum())


def device_name(device):
    """"cpu", or the card and CuPy's version, for a run's config.json."""
    cupy = module_of_device(device)
    if cupy is np:
        return "cpu"
    return f"gpu: {card()['name']}, CuPy {cupy.__version__}"


def card():
    """CUDA's properties of the current GPU, with its name as str."""
    cuda = module_of_device("gpu").cuda
    properties = cuda.runtime.getDeviceProperties(cuda.Device().id)
    name = properties["name"]
    return {**properties, "name": name.decode() if isinstance(name, bytes) else name}


def module_of_device(device):
    """numpy for 'cpu', cupy for 'gpu'; raises as `resolve_device` does."""
    return np if resolve_device(device) == "cpu" else importlib.import_module("cupy")


def to_device(tree, device):
    """An array, or a tuple, list or dict of arrays (a state for example), on a device; copied only if needed.

    An array that is already there is returned itself. Layers move with `layer.to_device(device)`.
    """
    if module_of_device(device) is np:
        return tree_map(asnumpy, tree)
    cupy = importlib.import_module("cupy")
    return tree_map(lambda array: array if _module_of(array) is cupy else cupy.asarray(array), tree)


def asnumpy(array):
    """The array on the host; a NumPy array is returned itself."""
    return array if isinstance(array, np.ndarray) else array_module(array).asnumpy(array)


# ---- what NumPy and CuPy do differently ------------------------------------------------------------------

def _special(xp):
    return importlib.import_module("scipy.special" if xp is np else "cupyx.scipy.special")


def erf(x):
    """The error function, elementwise, in x's dtype (from SciPy or CuPy; usual approximations err by up to 5e-7)."""
    return _special(array_module(x)).erf(x).astype(x.dtype, copy=False)      # float16 comes back wider


def sigmoid(x):
    """1 / (1 + exp(-x)), elementwise, in x's dtype; no overflow for large |x|."""
    return _special(array_module(x)).expit(x).astype(x.dtype, copy=False)


# ---- random numbers --------------------------------------------------------------------------------------

def step_generator(seed, step, device="cpu"):
    """The generator of one training step, a function of (seed, step) alone, so that a resumed run is exact."""
    sequence = np.random.SeedSequence(seed, spawn_key=(step,))
    if resolve_device(device) == "cpu":
        return np.random.default_rng(sequence)
    return DeviceGenerator(int(sequence.generate_state(1, np.uint64)[0]))


class DeviceGenerator:
    """Random numbers drawn on a GPU. CuPy's generator is made at the first draw, as most steps have none.

    Of CuPy's bit generators Philox is the cheapest to create: it needs no state per thread to be advanced.
    """

    def __init__(self, seed):
        self.seed, self._generator = seed, None

    def random(self, shape, dtype):
        if self._generator is None:
            draws = module_of_device("gpu").random
            self._generator = draws.Generator(draws.Philox4x3210(self.seed))
        return self._generator.random(shape, dtype=dtype)


def uniform_like(rng, x):
    """Uniform numbers in [0, 1), rounded to x's dtype, with x's shape and device. A host generator serves a GPU too."""
    xp = array_module(x)
    draw_dtype = np.dtype("float64" if x.dtype.itemsize >= 8 else "float32")
    return xp.asarray(rng.random(x.shape, dtype=draw_dtype)).astype(x.dtype, copy=False)
