"""The kernels of minigrad/kernels on the CPU: each .cu compiled as C++ with cuda_shim.h, and launched on NumPy arrays.

`Shim(folder).kernel` takes the place of `launch.kernel`, so that everything from a layer down to the kernel's text
runs, but for CuPy. What a launch is given is held to the kernel's signature: count, dtype, contiguity. Nothing may be
loaded or written outside its arrays; and each grid runs twice, in opposite orders, which may not change a bit: the
threads of a GPU have no order. (Not so where a kernel has its arrays' addresses from a table.)
"""

import ctypes
import functools
import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np

from minigrad.kernels import launch

HERE = Path(__file__).parent
FLAGS = ["g++", "-std=c++20", "-O0", "-fPIC", "-pthread", "-w", f"-I{HERE}"]
GLOBAL = 'extern "C" __global__ void'
SIGNATURE = re.compile(GLOBAL + r' (\w+)\(([^)]*)\)\s*\{(.*?)\n\}', re.DOTALL)
GUARD = 1024                       # entries before and after each array
SMALL = 1 << 24                    # bytes: larger arrays are given as they are
LOAD = re.compile(r"(inline \w+ load\(const \w+\* a, Index i\) \{ )")
BUILT_IN = {"Index": np.int64, "float": np.float32, "double": np.float64, "bool": np.bool_, "Acc": None, "REAL": None}


def families():
    return sorted(path.stem for path in launch.FOLDER.glob("*.cu"))


def signatures(text):
    """{kernel: ([(type, name)], whether it synchronises)} of a .cu file's text."""
    found = {}
    for name, parameters, body in SIGNATURE.findall(re.sub(r"//.*", "", text)):
        pairs = [tuple(p.strip().rsplit(None, 1)) for p in parameters.replace("\n", " ").split(",")]
        found[name] = pairs, bool(re.search(r"__syncthreads|block_\w+\(", body))
    return found


def unit(dtype, sources):
    """One translation unit: every text in a namespace of its own, so that none leans on another, and for each kernel a
    function of void**, which takes its arguments as CUDA does."""
    real = launch.options(dtype)[-1].partition("=")[2]
    lines = [f'#define REAL {real}\n#include "cuda_shim.h"\n']
    for space, text in sources.items():
        text = LOAD.sub(r"\1may_read(a + i); ", text)
        lines.append(f"namespace {space} {{\n{text.replace(GLOBAL, 'static void')}\n}}\n")
        for name, (parameters, _) in signatures(text).items():
            arguments = ", ".join(f"*({kind}*)a[{n}]" for n, (kind, _) in enumerate(parameters))
            lines.append(f'extern "C" void run_{space}_{name}(void** a) '
                         f"{{ using namespace {space}; {name}({arguments}); }}\n")
    return '#line 1 "unit"\n'.join(lines)


def compiled(*arguments):
    """What g++ makes, its path the last argument; made once by all processes that share the folder.

    AssertionError with the compiler's log.
    """
    *arguments, path = arguments
    lock, deadline = path.with_name(f"{path.name}.lock"), time.monotonic() + 300
    while not path.exists():
        try:
            lock.mkdir()
        except FileExistsError:                                              # another process is at it
            assert time.monotonic() < deadline, f"{lock} is still there"
            time.sleep(0.1)
            continue
        try:
            part = path.with_name(f"{path.name}.part")
            done = subprocess.run([*FLAGS, *arguments, part], stderr=subprocess.PIPE, text=True, timeout=200)
            assert done.returncode == 0, done.stderr
            part.replace(path)
        finally:
            lock.rmdir()
    return path


class Shim:
    """The compiled kernels, each dtype when it is first asked for.

    folder    where the libraries are, or will be, for these sources
    sources   {a name: text, as `launch.source` gives it}; default: every family under its own name
    """

    def __init__(self, folder, sources=None):
        self.folder = folder
        self.sources = {family: launch.source(family) for family in families()} if sources is None else sources
        self.signatures = {name: signatures(text) for name, text in self.sources.items()}

    @functools.cache  # noqa: B019 - a Shim lives as long as its tests
    def library(self, dtype):
        path = self.folder / f"{dtype}-{os.getpid()}.cpp"
        path.write_text(unit(dtype, self.sources), "utf-8")
        runtime = compiled("-c", HERE / "cuda_shim.cpp", "-o", self.folder.parent / "cuda_shim.o")
        return ctypes.CDLL(str(compiled("-shared", path, runtime, "-o", self.folder / f"{dtype}.so")))

    def kernel(self, source, name, dtype, first=0, fibers=True):
        """As launch.kernel. first: the first block that is run; fibers: else threads of the machine."""
        dtype = np.dtype(dtype)
        launch.options(dtype)                                               # raises for a dtype without kernels
        parameters, synchronises = self.signatures[source][name]
        library = self.library(dtype.name)
        body = getattr(library, f"run_{source}_{name}")

        def start(blocks, threads, *arguments):
            grid, block = (tuple(n) if isinstance(n, tuple) else (n,) for n in (blocks, threads))
            if not all(grid):
                return
            assert len(arguments) == len(parameters), f"{name} takes {len(parameters)} arguments, not {len(arguments)}"
            values = [as_argument(value, *parameter, dtype) for value, parameter in zip(arguments, parameters)]
            sizes = [(ctypes.c_uint * 2)(*(*n, 1)[:2]) for n in (grid, block)]
            how = 0 if not synchronises else 1 if fibers else 2              # of cuda_shim.cpp
            by_address = parameters[0][1] == "table"                         # of arrays that are not seen here

            def run(turned):
                return run_guarded(library, values, name, not by_address, lambda pointers: library.launch(
                    body, pointers, how, *sizes, ctypes.c_uint(first), turned))
            once, twice = run(0), {} if by_address or first or how == 2 else run(1)
            for n, array in twice.items():
                assert array.tobytes() == once[n].tobytes(), f"{name}: {parameters[n][1]} depends on the threads' order"
            for n, array in once.items():
                if "const" not in parameters[n][0]:
                    values[n][...] = array
        return start


def run_guarded(library, values, name, all_seen, run):
    """run(pointers) with a guarded copy of each array among the values: {its place: the copy afterwards}.

    AssertionError where the kernel leaves them. all_seen: it is given every array that it loads from.
    """
    guards = {n: guarded(v) for n, v in enumerate(values) if isinstance(v, np.ndarray) and v.nbytes < SMALL}
    given = [guards[n][1] if n in guards else v for n, v in enumerate(values)]
    arrays = [v for v in given if isinstance(v, np.ndarray)] if all_seen else []
    ends = [end for v in arrays for end in (v.ctypes.data, v.ctypes.data + v.nbytes)]
    ends = (ctypes.c_void_p * len(ends))(*ends)                              # alive until the kernel has ended
    library.may_read_between(ends, len(arrays))
    given = [ctypes.c_void_p(v.ctypes.data) if isinstance(v, np.ndarray) else v for v in given]
    run((ctypes.c_void_p * len(given))(*map(ctypes.addressof, given)))
    assert not library.has_read_outside(), f"{name} reads outside its arrays"
    for n, (around, copy) in guards.items():
        assert intact(around, copy), f"{name} writes outside its {n + 1}th argument"
    return {n: copy for n, (_, copy) in guards.items()}


def as_argument(value, kind, name, dtype):
    """The array, or a ctypes value, for a parameter of the C type `kind`; AssertionError for what would not fit it."""
    kind = kind.replace("const", "").strip()
    if not kind.endswith("*"):
        expected = {"Index": int, "double": float}[kind]
        assert type(value) is expected, f"{name} is {value!r}; expected a Python {expected.__name__}"
        return (ctypes.c_longlong if kind == "Index" else ctypes.c_double)(value)
    if isinstance(value, int):
        assert value == 0, f"{name} is {value}; expected an array or 0"
        return ctypes.c_void_p(0)
    kind, value = kind.rstrip("* "), getattr(value, "_host", value)          # of an array of fake_cupy
    expected = {"REAL": dtype, "Acc": launch.sum_dtype(dtype)}.get(kind) or np.dtype(BUILT_IN[kind])
    assert isinstance(value, np.ndarray), f"{name} is a {type(value).__name__}"
    assert value.dtype == expected, f"{name} has dtype {value.dtype}; expected {expected}"
    assert value.flags.c_contiguous, f"{name} is not contiguous"
    return value


def guarded(array):
    """(what is around a copy of the array, the copy)."""
    fill = np.nan if array.dtype.kind == "f" else 1
    around = np.full(array.size + 2 * GUARD, fill, array.dtype)
    around[GUARD:GUARD + array.size] = array.reshape(-1)
    return around, around[GUARD:GUARD + array.size].reshape(array.shape)


def intact(around, array):
    """Whether the guards are as they were made."""
    guards = np.concatenate([around[:GUARD], around[GUARD + array.size:]])
    return guards.tobytes() == guarded(array.reshape(-1)[:0])[0].tobytes()
