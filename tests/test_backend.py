"""The backend: which module an array belongs to, devices, special functions, random numbers."""

import importlib
import subprocess
import sys
import types

import numpy as np
import pytest

from minigrad import backend
from minigrad.backend import (
    DeviceError,
    array_module,
    asnumpy,
    device_name,
    erf,
    gpu_available,
    gpu_problem,
    module_of_device,
    on_host,
    require_working,
    resolve_device,
    sigmoid,
    step_generator,
    to_device,
    uniform_like,
)


class DeviceArray:
    """Stands in for a CuPy array; only its class's module matters."""

    def __init__(self, host):
        self.host = host


DeviceArray.__module__ = "cupy._core.core"


@pytest.fixture
def cupy(monkeypatch):
    """A module named cupy that has one device."""
    fake = types.ModuleType("cupy")
    fake.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=lambda: 1))
    fake.asarray = DeviceArray
    fake.asnumpy = lambda array: array.host
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def failing(error):
    def fail(*arguments):
        raise error
    return fail


# ---- array_module ----------------------------------------------------------------------------------------


def test_array_module_of_numpy_arrays():
    x = np.zeros(3)
    assert array_module(x) is np
    assert array_module(None, x, None, W=x, mask=None) is np
    assert array_module(np.array(1.0)) is np
    assert on_host(x)


@pytest.mark.parametrize(("thing", "kind"), [([1.0], "list"), (1.0, "float"), (np.float64(1), "float64")])
def test_array_module_names_what_is_no_array(thing, kind):
    with pytest.raises(TypeError, match=f"^argument 2 is a {kind}; expected a NumPy or CuPy array$"):
        array_module(np.zeros(2), thing)
    with pytest.raises(TypeError, match=f"^mask is a {kind};"):
        array_module(x=np.zeros(2), mask=thing)


def test_array_module_of_nothing():
    with pytest.raises(TypeError, match="got no array"):
        array_module(None, mask=None)


def test_a_mix_is_refused_with_a_sentence(cupy):
    x, W = np.zeros(3), DeviceArray(np.zeros(3))
    assert array_module(W, W) is cupy
    assert not on_host(W)
    with pytest.raises(TypeError) as error:
        array_module(x=x, mask=None, W=W)
    assert str(error.value) == ("x is on the CPU (NumPy) and W on the GPU (CuPy): move one of them with "
                                "minigrad.backend.to_device(array, 'cpu' or 'gpu')")
    with pytest.raises(TypeError, match=r"^argument 1 is on the GPU \(CuPy\) and argument 2 on the CPU \(NumPy\)"):
        array_module(W, x)


# ---- devices ---------------------------------------------------------------------------------------------


def test_to_device_moves_trees_and_leaves_alone_what_is_there(cupy):
    x = np.arange(3.0)
    state = (x, None, [x + 1, {"c": x + 2}])
    assert to_device(x, "cpu") is x
    assert asnumpy(x) is x
    on_gpu = to_device(state, "gpu")
    assert isinstance(on_gpu[2][1]["c"], DeviceArray)
    assert on_gpu[1] is None
    assert to_device(on_gpu[0], "gpu") is on_gpu[0]
    back = to_device(on_gpu, "cpu")
    assert back[0] is x
    np.testing.assert_array_equal(back[2][1]["c"], x + 2)


def test_asnumpy_refuses_what_is_no_array():
    with pytest.raises(TypeError, match="is a list; expected a NumPy or CuPy array"):
        asnumpy([1.0])


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "CuPy cannot be imported" in gpu_problem()
    assert "README.md, section GPU" in gpu_problem()
    assert not gpu_available()
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    assert module_of_device("auto") is np
    with pytest.raises(DeviceError, match="device 'gpu' was asked for, but CuPy cannot be imported"):
        resolve_device("gpu")
    with pytest.raises(DeviceError):
        to_device(np.zeros(2), "gpu")


BANNER = "\n================\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libcuda.so.1\n====\n"


@pytest.mark.parametrize("error", [ImportError(BANNER), AttributeError("module 'numpy' has no attribute 'product'"),
                                   OSError(), SystemExit("bye")])
def test_a_broken_cupy_is_one_line(monkeypatch, error):
    monkeypatch.setattr(importlib, "import_module", failing(error))
    problem = gpu_problem()
    assert "\n" not in problem
    assert problem.startswith("CuPy cannot be imported (")
    for text in ("ImportError: libcuda.so.1", "has no attribute 'product'", "OSError", "bye"):
        if text in f"{error} {type(error).__name__}":
            assert text in problem


@pytest.mark.parametrize(("count", "sentence"), [
    (failing(RuntimeError("cudaErrorNoDevice: none is detected\nmore")),
     "CuPy is installed but finds no usable CUDA device (cudaErrorNoDevice: none is detected)"),
    (failing(RuntimeError()), "CuPy is installed but finds no usable CUDA device (RuntimeError)"),
    (lambda: 0, "CuPy is installed but this machine has no CUDA device"),
])
def test_cupy_without_a_device(cupy, count, sentence):
    cupy.cuda.runtime.getDeviceCount = count
    sentence += "; see README.md, section GPU"
    assert gpu_problem() == sentence
    assert resolve_device("auto") == "cpu"
    with pytest.raises(DeviceError) as error:
        resolve_device("gpu")
    assert str(error.value) == f"device 'gpu' was asked for, but {sentence}"


def test_cupy_with_a_device(cupy):
    assert gpu_problem() is None
    assert gpu_available()
    assert resolve_device("auto") == resolve_device("gpu") == "gpu"
    assert resolve_device("cpu") == "cpu"
    assert module_of_device("gpu") is cupy


NO_COMPILER = 'Failure finding "libnvrtc.so.13 or libnvrtc.so.12": No such file: libnvrtc.so.13 or libnvrtc.so.12\n'


def test_a_gpu_that_answers_but_cannot_compute(cupy):
    """CuPy without CUDA's compiler: it can be imported and counts devices, and fails at the first operation."""
    backend._first_computation.cache_clear()
    cupy.ones = failing(RuntimeError(NO_COMPILER))
    for device in ("gpu", "auto"):
        with pytest.raises(DeviceError) as error:
            require_working(device)
        assert str(error.value) == (f"CuPy finds the GPU but cannot compute on it ({NO_COMPILER.strip()}); "
                                    "see README.md, section GPU")
    assert require_working("cpu") == "cpu"


def test_a_gpu_that_computes_is_tried_once(fake_gpu):
    from fake_cupy import no_transfers

    backend._first_computation.cache_clear()
    assert require_working("gpu") == require_working("auto") == "gpu"
    with no_transfers():
        assert require_working("gpu") == "gpu"
    backend._first_computation.cache_clear()


def test_the_name_of_a_device(fake_gpu):
    assert device_name("cpu") == "cpu"
    assert device_name("auto") == device_name("gpu") == f"gpu: stand-in, CuPy {fake_gpu.__version__}"


@pytest.mark.parametrize("device", ["cuda", "GPU", "", None])
def test_an_unknown_device(device):
    with pytest.raises(ValueError, match="expected 'cpu', 'gpu' or 'auto'"):
        resolve_device(device)


def test_importing_minigrad_needs_no_heavy_or_optional_library():
    program = ("import sys, minigrad, minigrad.backend, minigrad.layers, minigrad.losses, minigrad.optim, "
               "minigrad.training.checkpoint, minigrad.data, minigrad.training.trainer\n"
               "print([name for name in ('cupy', 'torch', 'matplotlib', 'jax') if name in sys.modules])")
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_importing_anything_at_all_asks_for_no_gpu_library():
    """Not even where one is installed: a module that looks for CuPy, PyTorch or Triton meets an error."""
    program = """
import importlib, pkgutil, sys
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cupy", "cupyx", "cupy_backends", "cuda", "torch", "triton", "jax"):
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Refuses())
names = [info.name for package in ("minigrad", "models", "tasks")
         for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
         if not info.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len([name for name in names if name.startswith("minigrad.kernels.")]), len(names))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    of_kernels, everything = map(int, answer.stdout.split())
    assert of_kernels >= 6
    assert everything > 60


# ---- special functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("function", [sigmoid, erf])
def test_special_functions_keep_the_dtype_and_do_not_overflow(function, dtype):
    x = np.array([[-np.inf, -1e4, -30, 0], [0.5, 30, 1e4, np.inf]], dtype)
    with np.errstate(all="raise", under="ignore"):
        y = function(x)
    assert y.dtype == dtype
    assert y.shape == x.shape
    low = 0 if function is sigmoid else -1
    np.testing.assert_allclose(y[[0, 0, 1, 1], [0, 1, 2, 3]], [low, low, 1, 1])
    assert np.isnan(function(np.array([np.nan], dtype))).all()


def test_special_functions_are_exact():
    x = np.linspace(-5, 5, 41)
    np.testing.assert_allclose(sigmoid(x), 1 / (1 + np.exp(-x)), rtol=1e-14)
    np.testing.assert_allclose(erf(np.array([0.5, 1.0, 2.0])),
                               [0.5204998778130465, 0.8427007929497149, 0.9953222650189527], rtol=1e-15)


# ---- random numbers --------------------------------------------------------------------------------------


def test_step_generator_is_a_function_of_seed_and_step():
    def draw(seed, step):
        return step_generator(seed, step).random(4).tolist()

    assert draw(1, 2) == draw(1, 2)
    assert len({tuple(draw(seed, step)) for seed in range(5) for step in range(5)}) == 25


@pytest.mark.usefixtures("fake_gpu")
def test_step_generator_on_a_device_is_seeded_the_same_way():
    def draw(seed, step):
        return tuple(asnumpy(step_generator(seed, step, "gpu").random((3,), "float32")))

    assert draw(1, 2) == draw(1, 2)
    assert len({draw(seed, step) for seed in range(5) for step in range(5)}) == 25


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "longdouble"])
def test_uniform_like(dtype):
    x = np.zeros((50, 40), dtype)
    u = uniform_like(np.random.default_rng(0), x)
    assert u.shape == x.shape
    assert u.dtype == x.dtype
    assert 0 <= u.min() < 0.01
    assert 0.99 < u.max() <= 1
    assert abs(u.astype("float64").mean() - 0.5) < 0.03
    np.testing.assert_array_equal(u, uniform_like(np.random.default_rng(0), x))
    assert not x.any()
    assert uniform_like(np.random.default_rng(0), np.array(1.0)).shape == ()
