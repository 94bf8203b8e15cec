"""NumPy or CuPy: which one an array belongs to, moves between them, and the few things that differ.

The device of a computation is the device of its arrays: `xp = array_module(x)` is the first line of a
function that computes, and nothing else chooses. There is no global switch, so both devices work in one
process. Importing this module never imports CuPy.
"""

import functools
import importlib
import math
import sys

import numpy as np

from minigrad.tree import tree_map

DEFAULT_DTYPE = "float32"
ORIGINAL = "Original error:"       # CuPy's word, after advice, where it could not be imported
HOW_TO_MOVE = "move one of them with minigrad.backend.to_device(array, 'cpu' or 'gpu')"


class DeviceError(RuntimeError):
    """The device that was asked for is not there."""


# ---- which module an array belongs to --------------------------------------------------------------------

def _module_of(array):
    """numpy, cupy, or None for something that is not an array."""
    if isinstance(array, np.ndarray):
        return np
    if type(array).__module__.partition(".")[0] == "cupy":
        return sys.modules["cupy"]
    return None


def array_module(*arrays, **named):
    """The module (numpy or cupy) that all given arrays belong to.

    Arrays may be given by position or by name (`array_module(x=x, W=self.W.value)`: the names are used in
    the error); None is passed over, so that optional arguments can be handed on as they are.

    Raises TypeError for something that is not an array, and for a NumPy/CuPy mix.
    """
    given = arrays + tuple(named.values()) if named else arrays
    for array in given:                                          # the common case, quickly: NumPy arrays alone
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
    """True for a NumPy array: its values can be looked at without waiting for a GPU."""
    return array_module(array) is np


# ---- devices ---------------------------------------------------------------------------------------------

def gpu_problem():
    """None when a GPU can be used, else one line that says why not ("CuPy is installed" is not "a GPU is there")."""
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

    It is the first one with a word in it (CuPy frames its own with rules); where one says "Original error:", the next.
    """
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))]
    if ORIGINAL in lines[:-1]:
        return lines[lines.index(ORIGINAL) + 1]
    return lines[0] if lines else type(error).__name__


def gpu_available():
    """True when CuPy can be imported and a CUDA device answers."""
    return gpu_problem() is None


def resolve_device(device):
    """'cpu' or 'gpu' for 'cpu', 'gpu' or 'auto' (the GPU if one is there).

    Raises ValueError for another word, DeviceError for 'gpu' where there is none.
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
    """As `resolve_device`, once it is seen that a GPU not only answers but computes: kernels compile and run.

    Raises DeviceError, one line, where they do not: CUDA's compiler or headers are not found, say.
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
    """"cpu", or the card and CuPy's version: for the record of a run."""
    cupy = module_of_device(device)
    if cupy is np:
        return "cpu"
    return f"gpu: {card()['name']}, CuPy {cupy.__version__}"


def card():
    """The properties of the GPU in use, as CUDA gives them, its name as text."""
    cuda = module_of_device("gpu").cuda
    properties = cuda.runtime.getDeviceProperties(cuda.Device().id)
    name = properties["name"]
    return {**properties, "name": name.decode() if isinstance(name, bytes) else name}


def module_of_device(device):
    """numpy for 'cpu', cupy for 'gpu'; raises as `resolve_device` does."""
    return np if resolve_device(device) == "cpu" else importlib.import_module("cupy")


def to_device(tree, device):
    """A copy-if-needed of an array (or of a tuple, list or dict of arrays, a state for example) on a device.

    An array that is already there is returned as it is. Layers move with `layer.to_device(device)`.
    """
    if module_of_device(device) is np:
        return tree_map(asnumpy, tree)
    cupy = importlib.import_module("cupy")
    return tree_map(lambda array: array if _module_of(array) is cupy else cupy.asarray(array), tree)


def asnumpy(array):
    """The array on the host; a NumPy array is returned as it is."""
    return array if isinstance(array, np.ndarray) else array_module(array).asnumpy(array)


# ---- what NumPy and CuPy do differently ------------------------------------------------------------------

def _special(xp):
    return importlib.import_module("scipy.special" if xp is np else "cupyx.scipy.special")


def erf(x):
    """The error function, elementwise, in x's dtype (library code: a classic approximation caps a check at 5e-7)."""
    return _special(array_module(x)).erf(x).astype(x.dtype, copy=False)      # float16 comes back wider


def sigmoid(x):
    """1 / (1 + exp(-x)), elementwise, in x's dtype; no overflow for large |x|."""
    return _special(array_module(x)).expit(x).astype(x.dtype, copy=False)


def scatter_add(target, ids, updates):
    """target[ids[n]] += updates[n] for every n, in place; a repeated id receives every one of its updates.

    target (V, ...), ids (N,) integer, updates (N, ...). (`target[ids] += updates` would keep one of them.)
    On the CPU repeated ids are first summed by a sparse one-hot product, several times faster than add.at. A GPU adds
    them in their order too (kernels/scatter.cu); with MINIGRAD_KERNELS=0 in whatever order its threads come
    (atomicAdd): the last bits of a sum then differ from run to run.

    Raises ValueError for updates of another shape, IndexError for an id outside 0 ... V-1 (on the CPU; a GPU is
    not made to wait for the check: CuPy takes the id modulo V).
    """
    xp = array_module(target=target, ids=ids, updates=updates)
    if updates.shape != ids.shape + target.shape[1:]:
        raise ValueError(f"scatter_add: updates has shape {updates.shape}; expected {ids.shape + target.shape[1:]}, "
                         "a row of target for each id")
    from minigrad import kernels  # here, because it imports this module

    if (fused := kernels.of(xp)) and fused.scatter_add(target, ids, updates):
        return
    if xp is not np:
        xp.add.at(target, ids, updates)
        return
    from scipy.sparse import csr_array

    if ids.size == 0:
        return
    if ids.min() < 0 or ids.max() >= len(target):
        raise IndexError(f"ids run from {ids.min()} to {ids.max()}; expected 0 ... {len(target) - 1}")
    used, position = np.unique(ids, return_inverse=True)
    n = np.arange(ids.size)
    one_hot = csr_array((np.ones(ids.size, updates.dtype), (position.ravel(), n)), shape=(used.size, ids.size))
    rows = one_hot @ updates.reshape(ids.size, -1)
    target[used] += rows.reshape(used.size, *target.shape[1:])


# ---- random numbers --------------------------------------------------------------------------------------

def step_generator(seed, step, device="cpu"):
    """The generator of one training step, a function of (seed, step) alone, so that a resumed run is exact."""
    sequence = np.random.SeedSequence(seed, spawn_key=(step,))
    if resolve_device(device) == "cpu":
        return np.random.default_rng(sequence)
    return DeviceGenerator(int(sequence.generate_state(1, np.uint64)[0]))


class DeviceGenerator:
    """Random numbers that are drawn on a GPU; CuPy's generator is made at the first draw, as most steps have none.

    Of CuPy's bit generators Philox has the cheapest start: no state is to be spun forward for each of its threads.
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


# ---- memory ----------------------------------------------------------------------------------------------
# The arrays of a recurrent layer are a few MB each: too large for malloc's own reuse, so that every forward
# would take fresh pages from the kernel, and each first touch of a page costs a fault (about a quarter of a
# training step; docs/results/speed.md). `empty` therefore hands out blocks that a dead array gave back.
# CuPy has such a pool of its own.

ALIGNMENT = 64                     # bytes: one cache line, one AVX-512 register
POOLED_FROM = 1 << 16              # smaller arrays are malloc's business
POOL_LIMIT = 1 << 29               # bytes that may lie idle
_idle = {}                         # size -> idle memory of that size


class _Block:
    """Owns memory for one array and gives it to the pool when that array and its views are gone.

    Threads, and a garbage collection at any line, may get in between: so there is no count to keep and no lock to
    hold, only a list's pop and append, which are atomic.
    """

    def __init__(self, memory):
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self):
        if _idle is None:                                        # the interpreter is shutting down
            return
        size = self.memory.nbytes
        if sum(n * len(memories) for n, memories in list(_idle.items())) + size > POOL_LIMIT:
            _idle.clear()                                        # sizes that nobody asks for any more
        if size <= POOL_LIMIT:
            _idle.setdefault(size, []).append(self.memory)


def _aligned(size):
    """Fresh memory of `size` bytes."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start:start + size]


def _recycled(size):
    """Memory of `size` bytes that is idle, else fresh."""
    try:
        return _idle[size].pop()
    except (KeyError, IndexError):
        return _aligned(size)


def empty(shape, dtype, xp=np):
    """An uninitialised C-contiguous array, 64-byte aligned, in recycled memory where that saves page faults."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if xp is not np:
        return xp.empty(shape, dtype)
    # Sizes are rounded up to eighths of a power of two, so that sequences of any length share blocks.
    grain = max(ALIGNMENT, 1 << max(0, size.bit_length() - 4))
    rounded = -(-max(size, 1) // grain) * grain
    memory = _aligned(rounded) if size < POOLED_FROM else np.asarray(_Block(_recycled(rounded)))
    return np.ndarray(shape, dtype, memory)


def release_idle_memory():
    """Give the pool's idle memory back to the system."""
    _idle.clear()


def zeros(shape, dtype, xp=np):
    """As `empty`, filled with zeros."""
    array = empty(shape, dtype, xp)
    array[...] = 0
    return array


CACHE_BLOCK = 1 << 18              # bytes: several arrays of this size fit into a core's cache


def cache_blocks(array):
    """[index]: parts of an array along its first axis that stay in the cache while several operations pass over each.

    One index, the whole, for a small array and on a GPU, where every operation is a launch.
    """
    if not on_host(array) or array.ndim == 0 or array.nbytes <= CACHE_BLOCK:
        return [...]
    rows = max(1, CACHE_BLOCK * len(array) // array.nbytes)
    return [slice(first, first + rows) for first in range(0, len(array), rows)]


def elementwise(name, a, b):
    """xp.<name>(a, b), "add" for example, into memory as `empty` gives it; b is broadcast to the shape of a."""
    xp = array_module(a, b)
    return getattr(xp, name)(a, b, out=empty(a.shape, xp.result_type(a.dtype, b.dtype), xp))


def matmul(a, b):
    """a @ b for arrays of at least two axes, into memory as `empty` gives it.

    With a b of two axes all of a's rows are one product (`@` makes one of each batch entry).
    """
    xp, one_product = array_module(a, b), b.ndim == 2
    front = a.shape[:-2]
    if not one_product and b.shape[:-2] != front:
        front = np.broadcast_shapes(front, b.shape[:-2])
    y = empty((*front, a.shape[-2], b.shape[-1]), xp.result_type(a.dtype, b.dtype), xp)
    if one_product:
        rows = math.prod(a.shape[:-1])
        xp.matmul(a.reshape(rows, a.shape[-1]), b, out=y.reshape(rows, b.shape[-1]))
    else:
        xp.matmul(a, b, out=y)
    return y
