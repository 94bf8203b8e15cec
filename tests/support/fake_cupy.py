"""A strict stand-in for CuPy: arrays that live on a device which cannot be looked into by accident.

`install(monkeypatch)` puts it in the place of `cupy`, with one device. What it computes is NumPy's; what it allows is
less than CuPy does:

* an array never becomes a NumPy array, nor meets one, but through asnumpy, get, asarray and array;
* every move between host and device, and every wait for a value, is written down (`events`), and raises within
  `no_transfers()`: float(a), bool(a), a[mask] and nonzero (their sizes must be known), a number or list made an array;
* only names and parameters that CuPy has (fake_cupy_names.txt) are offered; one that CuPy has and this file does not
  model is an error that says so.

What would be launched on a GPU can be counted (`launches()`): each operation that is not a view counts once, though
CuPy makes some, a product or `mean`, of several kernels.

What waits and what is copied was read in CuPy's source (_core/_routines_indexing.pyx, _core/_kernel.pyx).
"""

import contextlib
import sys
import time
import types

import numpy as np
import scipy.special
from fake_cupy_names import recorded, signature

VERSION, NAMES = recorded()
SCALARS = bool | int | float | complex | np.generic
DTYPES = "?bBhHiIlLqQefdFD"
SCATTERED = ("add", "maximum", "minimum")                # ufuncs that have `at`
SCATTER_DTYPES = "iILQefd"                               # of which atomicAdd is there

# ---- what moved ------------------------------------------------------------------------------------------

events = []                     # (kind, what): kind is "to_device", "to_host" or "wait"
_forbidden = []
REMEDIES = {                    # what is wrong with each kind where nothing may move, and what to do
    "to_device": "this moves numbers to the GPU; make them there (xp.arange, xp.zeros), or once, with the layer",
    "to_host": "this moves an array to the CPU; compute with it where it is",
    "wait": "the CPU waits for the GPU to know it; keep it an array, and choose by xp.where or a product with a mask"}

CALL_XP = "xp = array_module(x), then xp"


class TransferError(AssertionError):
    """Something moved between host and device, or waited, where nothing may."""


class UndefinedError(AssertionError):
    """CuPy's result would depend on which thread comes first."""


class NotModelled(NotImplementedError):
    """CuPy has this, the stand-in has not: add it to tests/fake_cupy.py."""


def _note(kind, what):
    if _forbidden:
        raise TransferError(f"{what}: {REMEDIES[kind]}")
    events.append((kind, what))


@contextlib.contextmanager
def no_transfers():
    """Within it every move and every wait raises TransferError."""
    _forbidden.append(True)
    try:
        yield
    finally:
        _forbidden.pop()


@contextlib.contextmanager
def transfers():
    """A list that holds, at the end, what moved within: [(kind, what)]."""
    first, found = len(events), []
    try:
        yield found
    finally:
        found.extend(events[first:])


# ---- what is launched ------------------------------------------------------------------------------------

_counting = []                  # the lists that `launches` has open


def launched(name):
    """Note that a GPU would have been given this to do; a kernel that takes a compiled one's place says so too."""
    for names in _counting:
        names.append(name)


@contextlib.contextmanager
def launches():
    """A list of the names of all that is launched within."""
    names = []
    _counting.append(names)
    try:
        yield names
    finally:
        _counting.pop()


def _computed(name, result, operand=None):
    """The result, its launch noted unless it is empty or a view of the operand."""
    first = result[0] if isinstance(result, tuple | list) and result else result
    is_view = isinstance(operand, np.ndarray) and isinstance(first, np.ndarray) and np.may_share_memory(first, operand)
    if not is_view and np.size(first):
        launched(name)
    return result


# ---- in and out of the stand-in --------------------------------------------------------------------------


def _wrap(value):
    """NumPy's results as the device's: arrays, and scalars as arrays without axes."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.char not in DTYPES:
            raise TypeError(f"CuPy has no dtype {value.dtype}")
        array = object.__new__(ndarray)
        array._host = np.asarray(value)
        return array
    if isinstance(value, tuple | list):
        return type(value)(_wrap(item) for item in value)
    return value


def _host(value, name):
    """An argument of the function `name` for NumPy. A NumPy array among device arrays is refused."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError(f"cupy.{name}: Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, tuple | list):
        return type(value)(_host(item, name) for item in value)
    return value


def _operand(value, name):
    """As `_host`, for what CuPy takes as an array or a number alone."""
    if not isinstance(value, ndarray | SCALARS):
        raise TypeError(f"cupy.{name}: Unsupported type {type(value)}")
    return _host(value, name)


def _array(value, name):
    if not isinstance(value, ndarray):
        raise TypeError(f"cupy.{name}: got a {type(value)}; expected a cupy.ndarray")
    return value._host


def _bound(name, args, kwargs):
    """The arguments by the names that CuPy gives them. Raises TypeError where its function does not take them."""
    try:
        return signature(NAMES[name]).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _out(out, result):
    """What a function with `out` returns: that very array."""
    if isinstance(out, tuple):
        out = out[0] if len(out) == 1 else out
    return _wrap(result) if out is None else out


# ---- indices ---------------------------------------------------------------------------------------------


def _index(key, what):
    """(NumPy's index, whether arrays are in it). A mask's size must be known: that waits. A list is copied there."""
    parts, advanced = [], False
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, np.ndarray):
            raise TypeError(f"{what}: a NumPy array as index of a cupy.ndarray; make the index by xp.arange, say")
        if isinstance(part, bool | np.bool_):
            raise TypeError(f"{what}: {part} as index")
        if isinstance(part, ndarray):
            if part.dtype == bool:
                _note("wait", f"{what} by a mask")
            part, advanced = part._host, True
        elif isinstance(part, list):
            if part and not all(isinstance(item, int | np.integer) for item in part):
                raise TypeError(f"{what}: a list as index with something else than integers")
            _note("to_device", f"{what} by a list")
            part, advanced = np.array(part, "int64"), True
        elif not (part is None or part is Ellipsis or isinstance(part, slice | int | np.integer)):
            raise IndexError(f"{what}: a {type(part).__name__} as index")
        parts.append(part)
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)                           # so that an element is a view without axes, as CuPy's
    return tuple(parts), advanced


def _each_place_once(array, index):
    """NumPy keeps the last value that is set at a place, CuPy that of any thread."""
    places = np.arange(array.size).reshape(array.shape)[index]
    if len(np.unique(places)) < places.size:
        raise UndefinedError("setting several values at one place, which a GPU does in no order")


# ---- the array -------------------------------------------------------------------------------------------


class ndarray:
    """As cupy.ndarray; the values are in `_host`, which only this file may touch."""

    __module__ = "cupy"
    __slots__ = ("_host",)
    __hash__ = None
    __array_priority__ = 100

    def __init__(self, *args, **kwargs):
        raise NotModelled("cupy.ndarray(...): use cupy.empty")

    # ---- refused ----

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy "
                        "array explicitly.")

    def __array_function__(self, func, kinds, args, kwargs):
        raise TypeError(f"np.{func.__name__} was handed a device array; {CALL_XP}.{func.__name__}")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        """NumPy's scalars come here too, as in np.float32(2) * x: they may."""
        scalars = any(isinstance(x, np.generic) for x in inputs)
        if scalars and method == "__call__" and not kwargs and all(isinstance(x, ndarray | SCALARS) for x in inputs):
            return _Ufunc(ufunc.__name__)(*inputs)
        raise TypeError(f"np.{ufunc.__name__} was handed a device array; {CALL_XP}.{ufunc.__name__}")

    def __getattr__(self, name):
        if f"cupy.ndarray.{name}" in NAMES:
            raise NotModelled(f"cupy.ndarray.{name}")
        raise AttributeError(f"'cupy.ndarray' object has no attribute {name!r}")

    # ---- what waits for a value, or copies it ----

    def __float__(self):
        return float(self._read("float"))

    def __int__(self):
        return int(self._read("int"))

    def __complex__(self):
        return complex(self._read("complex"))

    def __bool__(self):
        return bool(self._read("bool"))

    def _read(self, how):
        _note("wait", f"{how}() of an array")
        return self._host

    def item(self):
        return self._read("item").item()

    def tolist(self):
        return self.get().tolist()

    def tobytes(self, order="C"):
        return self.get().tobytes(order)

    def __repr__(self):
        return repr(self.get())

    def __str__(self):
        return str(self.get())

    def __format__(self, spec):
        return format(self.get(), spec)

    def __reduce__(self):
        return _from_host, (self.get(),)

    def get(self, stream=None, order="C", out=None, blocking=True):
        if out is not None:
            raise NotModelled("cupy.ndarray.get(out=...)")
        _note("to_host", f"{self.dtype} {self.shape}")
        return self._host.copy(order)

    def set(self, arr, stream=None):
        if not isinstance(arr, np.ndarray) or arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError("cupy.ndarray.set: expected a NumPy array of the same dtype and shape")
        _note("to_device", f"{self.dtype} {self.shape}")
        self._host[...] = arr

    # ---- indexing ----

    def __getitem__(self, key):
        index, advanced = _index(key, "getting")
        if advanced:
            launched("getting by an array")
            return _wrap(np.asarray(self._host[index], order="C"))
        return _wrap(self._host[index])

    def __setitem__(self, key, value):
        index, advanced = _index(key, "setting")
        if advanced and isinstance(value, SCALARS):
            _note("to_device", "setting a number at places given by an array")
        elif advanced:
            _each_place_once(self._host, index)
        if _counting and self._host[index].size:
            launched("setting")
        self._host[index] = _operand(value, "ndarray.__setitem__")

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (self[n] for n in range(len(self)))

    def scatter_add(self, slices, value):
        _Ufunc("add").at(self, slices, value)

    def fill(self, value):
        self[...] = value

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        return self.copy()

    # ---- shape and parts ----

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: self._host.flags)
    T = property(lambda self: _wrap(self._host.T))
    mT = property(lambda self: _wrap(self._host.mT))
    real = property(lambda self: _wrap(self._host.real))
    imag = property(lambda self: _wrap(self._host.imag))
    device = property(lambda self: _Device())
    data = property(lambda self: types.SimpleNamespace(ptr=self._host.ctypes.data))

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if casting is not None or subok is not None:
            raise TypeError("cupy.ndarray.astype: casting and subok are not supported")
        return _wrap(_computed("astype", self._host.astype(dtype, order, copy=copy), self._host))


def _from_host(host):
    _note("to_device", f"{host.dtype} {host.shape}")
    return _wrap(host.copy())


def _method(name):
    def method(self, *args, **kwargs):
        given = _bound(f"cupy.ndarray.{name}", args, kwargs)
        if isinstance(given.get("indices"), list):
            _note("to_device", f"{name} by a list")
        wider = name == "view" and np.dtype(given.get("dtype", self.dtype)).itemsize != self.itemsize
        if wider and not self._host.flags.c_contiguous:
            raise ValueError("To change to a dtype of a different size, the array must be C-contiguous")
        result = getattr(self._host, name)(*(_host(a, f"ndarray.{name}") for a in args),
                                           **{k: _host(a, f"ndarray.{name}") for k, a in kwargs.items()})
        return _out(given.get("out"), _computed(name, result, None if given.get("out") is not None else self._host))
    return method


METHODS = ("all", "any", "argmax", "argmin", "argsort", "clip", "conj", "conjugate", "copy", "cumprod", "cumsum",
           "diagonal", "dot", "flatten", "max", "mean", "min", "prod", "ravel", "repeat", "reshape", "round",
           "searchsorted", "sort", "squeeze", "std", "sum", "swapaxes", "take", "trace", "transpose", "var", "view")
for _name in METHODS:
    setattr(ndarray, _name, _method(_name))


def _operator(name, swapped=False):
    def binary(self, other):
        if not isinstance(other, ndarray | SCALARS):
            if isinstance(other, np.ndarray):
                _operand(other, name)
            return NotImplemented
        return _Ufunc(name)(other, self) if swapped else _Ufunc(name)(self, other)
    return binary


def _in_place(name):
    def binary(self, other):
        return _Ufunc(name)(self, other, self)
    return binary


for _name, _ufunc in {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "pow": "power",
                      "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or",
                      "xor": "bitwise_xor", "lshift": "left_shift", "rshift": "right_shift"}.items():
    setattr(ndarray, f"__{_name}__", _operator(_ufunc))
    setattr(ndarray, f"__r{_name}__", _operator(_ufunc, swapped=True))
    setattr(ndarray, f"__i{_name}__", _in_place(_ufunc))
for _name, _ufunc in {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal",
                      "ne": "not_equal"}.items():
    setattr(ndarray, f"__{_name}__", _operator(_ufunc))
for _name, _ufunc in {"neg": "negative", "abs": "absolute", "invert": "invert"}.items():
    setattr(ndarray, f"__{_name}__", lambda self, ufunc=_ufunc: _Ufunc(ufunc)(self))
ndarray.__pos__ = lambda self: self.copy()
ndarray.__matmul__ = lambda self, other: _matmul(self, other)
ndarray.__rmatmul__ = lambda self, other: _matmul(other, self)


# ---- ufuncs ----------------------------------------------------------------------------------------------


def _copied_first(args, out):
    """The operands that share memory with an output and are not that very object: CuPy copies each, x[:2] too in
    add(x[:2], y, out=x[:2])."""
    return [a for a in args if isinstance(a, ndarray) and any(
        a is not o and np.may_share_memory(a._host, o._host) for o in out)]


class _Ufunc:
    """CuPy's ufuncs take out, dtype and casting, nothing more; add and multiply reduce; a few have `at`. A result is in
    C order whatever the operands are."""

    def __init__(self, name, place="cupy"):
        self.name = name
        self._numpy = getattr(np if place == "cupy" else scipy.special, name)
        self.nin, self.nout = self._numpy.nin, self._numpy.nout
        self.nargs = self.nin + self.nout

    def __call__(self, *args, out=None, dtype=None, casting="same_kind", **others):
        if others:
            raise TypeError(f"cupy.{self.name}: Wrong arguments {others}")
        if not self.nin <= len(args) <= self.nargs:
            raise TypeError(f"Wrong number of arguments for 'cupy_{self.name}'. It must be either {self.nin} or "
                            f"{self.nargs} (with outputs), but given {len(args)}.")
        if len(args) > self.nin:
            args, out = args[:self.nin], args[self.nin:]
        if out is not None:
            out = out if isinstance(out, tuple) else (out,)
        how = {"order": "C"} if out is None else {"out": tuple(_array(o, self.name) for o in out)}
        if dtype is not None:
            how["dtype"] = dtype
        for _ in _copied_first(args, out or ()):
            launched("copy of an operand")
        launched(self.name)
        return _out(out, self._numpy(*(_operand(a, self.name) for a in args), casting=casting, **how))

    def reduce(self, array, axis=0, dtype=None, out=None, keepdims=False):
        names = {"add": "sum", "multiply": "prod"}
        if self.name not in names:
            raise NotImplementedError(f"`cupy_{self.name}.reduce` is not supported yet")
        return getattr(array, names[self.name])(axis, dtype, out, keepdims)

    def at(self, a, indices, b=None):
        if self.name not in SCATTERED:
            raise NotImplementedError(f"`cupy_{self.name}.at` is not supported yet")
        if _array(a, f"{self.name}.at").dtype.char not in SCATTER_DTYPES:
            raise TypeError("scatter_add only supports int32, float16, float32, float64, uint32, uint64, as data type")
        index, _ = _index(indices, f"{self.name}.at")
        if isinstance(b, SCALARS):
            _note("to_device", f"{self.name}.at with a number")
        launched(f"{self.name}.at")
        self._numpy.at(a._host, index, _operand(b, f"{self.name}.at"))

    def __getattr__(self, name):
        if f"cupy.ufunc.{name}" in NAMES:
            raise NotModelled(f"cupy.{self.name}.{name}")
        raise AttributeError(f"'cupy.ufunc' object has no attribute {name!r}")


# ---- functions -------------------------------------------------------------------------------------------
# Those that do what NumPy's do, move nothing and never wait; their first argument is an array or a list of arrays.

PLAIN = ("all", "any", "argmax", "argmin", "argsort", "around", "array_split", "broadcast_arrays",
         "broadcast_to", "clip", "concatenate", "cumprod", "cumsum", "diag", "diagonal", "diff",
         "dot", "empty_like", "expand_dims", "flip", "hstack", "inner", "isclose", "max", "mean", "min", "moveaxis",
         "ones_like", "outer", "prod", "ravel", "repeat", "reshape", "roll", "round", "searchsorted", "sort", "split",
         "squeeze", "stack", "std", "sum", "swapaxes", "take", "take_along_axis", "tensordot", "tile", "trace",
         "transpose", "tril", "triu", "var", "vstack", "zeros_like", "full_like")
CREATING = ("arange", "empty", "eye", "full", "identity", "linspace", "ones", "tri", "zeros")
WAITING = ("argwhere", "average", "flatnonzero", "nonzero", "unique")
TRANSFORMS = ("fft", "ifft", "rfft", "irfft")


def _function(name, numpy_function, check=None):
    short = name.removeprefix("cupy.")

    def function(*args, **kwargs):
        given = _bound(name, args, kwargs)
        if check is not None:
            check(given, short)
        result = numpy_function(*(_host(a, short) for a in args), **{k: _host(a, short) for k, a in kwargs.items()})
        if short not in ("empty", "empty_like"):
            views = args and given.get("out") is None
            _computed(short, result, getattr(args[0], "_host", None) if views else None)
        return _out(given.get("out"), result)
    function.__name__ = short
    return function


def _arrays_first(given, name):
    first = next(iter(given.values()))
    for array in first if isinstance(first, tuple | list) else (first,):
        _array(array, name)
    if isinstance(given.get("indices"), list):
        _note("to_device", f"{name} by a list")


def _numbers_only(given, name):
    """What creates an array takes its sizes and values from Python: reading them from an array would wait."""
    if any(isinstance(leaf, ndarray) for value in given.values() for leaf in _leaves(value)):
        raise TypeError(f"cupy.{name}: got an array for a number")


def _waits(given, name):
    _arrays_first(given, name)
    _note("wait", name)


def _where(*args, **kwargs):
    given = _bound("cupy.where", args, kwargs)
    condition = _array(given["condition"], "where")
    if "x" not in given:
        _note("wait", "where with a condition alone")
        return _wrap(np.where(condition))
    launched("where")
    return _wrap(np.where(condition, *(_operand(given[name], "where") for name in ("x", "y"))))


def _matmul(*args, **kwargs):
    given = _bound("cupy.matmul", args, kwargs)
    if set(given) - {"args", "out", "dtype"}:
        raise NotModelled(f"cupy.matmul with {set(given) - {'args', 'out', 'dtype'}}")
    a, b, *more = (_array(array, "matmul") for array in args)
    out = args[2] if more else kwargs.get("out")
    how = {} if out is None else {"out": _array(out, "matmul")}
    launched("matmul")
    return _out(out, np.matmul(a, b, dtype=given.get("dtype"), **how))


def _copyto(*args, **kwargs):
    given = _bound("cupy.copyto", args, kwargs)
    dst, src = _array(given["dst"], "copyto"), _operand(given["src"], "copyto")
    where = given.get("where")
    launched("copyto")
    np.copyto(dst, src, given.get("casting", "same_kind"), where=True if where is None else _array(where, "copyto"))


def _made(name, copy):
    """array, asarray and the like: from device arrays nothing moves, from anything else it does."""
    def function(*args, **kwargs):
        given = _bound(f"cupy.{name}", args, kwargs)
        given.pop("blocking", None)
        value, *_ = given.values()
        how = {key: given[key] for key in ("dtype", "order") if given.get(key) is not None}
        leaves = _leaves(value)
        here = [isinstance(leaf, ndarray) for leaf in leaves]
        if any(here) and not all(here):
            raise TypeError(f"cupy.{name}: a list of device arrays and {type(leaves[here.index(False)])}")
        if not any(here):
            if isinstance(value, np.ndarray) and how.get("order", "K") in "KA":          # as _array_default has it
                how["order"] = "F" if value.flags.fnc else "C"
            host = np.array(value, **how)
            _note("to_device", f"{host.dtype} {host.shape}" if isinstance(value, np.ndarray) else
                  f"{name} of a {type(value).__name__}")
            return _wrap(host)
        host = _host(value, name)
        made = np.array(host, **how) if copy or isinstance(host, list | tuple) else np.asarray(host, **how)
        if name.startswith("ascontiguous"):
            made = np.ascontiguousarray(made)
        _computed(name, made, host if isinstance(host, np.ndarray) else None)
        return _wrap(made) if made is not host else value
    return function


def _leaves(value):
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _asnumpy(*args, **kwargs):
    given = _bound("cupy.asnumpy", args, kwargs)
    return given["a"].get() if isinstance(given["a"], ndarray) else np.asarray(given["a"])


def _result_type(*arrays_and_dtypes):
    return np.result_type(*(a.dtype if isinstance(a, ndarray) else _host(a, "result_type") for a in arrays_and_dtypes))


def _norm(*args, **kwargs):
    return _function("cupy.linalg.norm", np.linalg.norm, _arrays_first)(*args, **kwargs)


def _scatter_add(a, slices, value):
    a.scatter_add(slices, value)


class Generator:
    """Draws what NumPy's generator of the same seed draws."""

    __module__ = "cupy.random"

    def __init__(self, bit_generator):
        self.bit_generator = bit_generator
        self._numpy = np.random.default_rng(bit_generator.seed)

    def random(self, size=None, dtype=np.float64, out=None):
        if np.dtype(dtype).char not in "fd":
            raise NotModelled(f"cupy.random.Generator.random of dtype {dtype}")
        launched("random")
        return _wrap(np.asarray(self._numpy.random(size, dtype, None if out is None else _array(out, "random"))))

    def standard_normal(self, size=None, dtype=np.float64, out=None):
        return _wrap(np.asarray(self._numpy.standard_normal(size, dtype)))

    def __getattr__(self, name):
        if f"cupy.random.Generator.{name}" in NAMES:
            raise NotModelled(f"cupy.random.Generator.{name}")
        raise AttributeError(f"'cupy.random.Generator' object has no attribute {name!r}")


class _BitGenerator:
    made = 0                                             # a launch, and memory for every thread's state, each time

    def __init__(self, seed=None):
        _BitGenerator.made += 1
        self.seed = seed


def _default_rng(seed=None):
    return seed if isinstance(seed, Generator) else Generator(_BitGenerator(seed))


class _Device:
    def __init__(self, device=None):
        self.id = device or 0

    def synchronize(self):
        _note("wait", "Device.synchronize")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def __str__(self):
        return f"<CUDA Device {self.id}>"


class _Event:
    """When the host came by; nothing is ever behind it."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self._seconds, self._timed = None, not disable_timing

    def record(self, stream=None):
        self._seconds = time.perf_counter()

    def synchronize(self):
        _note("wait", "Event.synchronize")


def _elapsed(start_event, end_event):
    """Milliseconds."""
    if not (start_event._timed and end_event._timed) or None in (start_event._seconds, end_event._seconds):
        raise RuntimeError("cudaErrorInvalidResourceHandle: an event that was not recorded, or without timing")
    return 1e3 * (end_event._seconds - start_event._seconds)


class _MemoryPool:
    def free_all_blocks(self, stream=None):
        freed.append(type(self).__name__)


freed = []                      # the pools that were asked to give their memory back
PROPERTIES = {"name": b"stand-in", "multiProcessorCount": 1, "totalGlobalMem": 1 << 30, "major": 9, "minor": 0}


MODELLED = {
    "cupy.ndarray": ndarray, "cupy.where": _where, "cupy.matmul": _matmul, "cupy.copyto": _copyto,
    "cupy.asnumpy": _asnumpy, "cupy.result_type": _result_type, "cupy.linalg.norm": _norm,
    "cupy.array": _made("array", copy=True), "cupyx.scatter_add": _scatter_add,
    "cupy.random.default_rng": _default_rng, "cupy.random.Generator": Generator,
    "cupy.random.XORWOW": _BitGenerator, "cupy.random.Philox4x3210": _BitGenerator,
    "cupy.cuda.runtime.getDeviceCount": lambda: 1, "cupy.cuda.is_available": lambda: True,
    "cupy.cuda.Device": _Device, "cupy.cuda.Event": _Event, "cupy.cuda.get_elapsed_time": _elapsed,
    "cupy.cuda.runtime.getDeviceProperties": lambda device: dict(PROPERTIES),
    "cupy.cuda.runtime.runtimeGetVersion": lambda: 13000, "cupy.cuda.runtime.driverGetVersion": lambda: 13010,
    "cupy.cuda.runtime.memGetInfo": lambda: (1 << 29, 1 << 30),
    "cupy.get_default_memory_pool": _MemoryPool, "cupy.get_default_pinned_memory_pool": _MemoryPool,
    **{f"cupy.{name}": _made(name, copy=False) for name in ("asarray", "asanyarray", "ascontiguousarray")},
    **{f"cupy.{name}": _function(f"cupy.{name}", getattr(np, name), _arrays_first) for name in PLAIN},
    **{f"cupy.{name}": _function(f"cupy.{name}", getattr(np, name), _numbers_only) for name in CREATING},
    **{f"cupy.{name}": _function(f"cupy.{name}", getattr(np, name), _waits) for name in WAITING},
    **{f"cupy.fft.{name}": _function(f"cupy.fft.{name}", getattr(np.fft, name), _arrays_first) for name in TRANSFORMS},
}


# ---- the modules -----------------------------------------------------------------------------------------


class _Module(types.ModuleType):
    """A module that has what CuPy's has, as far as it is modelled."""

    def __getattr__(self, name):
        full, place = f"{self.__name__}.{name}", self.__name__
        kind = NAMES.get(full)
        if kind is None:
            raise AttributeError(f"module {place!r} has no attribute {name!r}")
        if full in MODELLED:
            found = MODELLED[full]
        elif kind == "module":
            found = _Module(full)
        elif kind == "numpy":
            found = getattr(np, name)
        elif kind.startswith("ufunc") and hasattr(np if place == "cupy" else scipy.special, name):
            found = _Ufunc(name, place)
        else:
            raise NotModelled(full)
        setattr(self, name, found)
        return found


def install(monkeypatch):
    """The stand-in in the place of cupy and cupyx until the test ends. Returns the module."""
    cupy, cupyx = _Module("cupy"), _Module("cupyx")
    for module in (cupy, cupy.random, cupy.linalg, cupy.fft, cupy.cuda, cupyx, cupyx.scipy, cupyx.scipy.special):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cupy, "__version__", VERSION, raising=False)
    events.clear()
    return cupy


def peek(tree):
    """The values, for a test's comparison: outside all that is counted."""
    if isinstance(tree, ndarray):
        return tree._host.copy()
    if isinstance(tree, tuple | list):
        return tuple(peek(item) for item in tree)
    if isinstance(tree, dict):
        return {key: peek(item) for key, item in tree.items()}
    return tree
