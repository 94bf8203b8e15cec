"""Loading and launching: one compilation for each device and dtype, what fails is one sentence, the right device."""

import sys
import types

import numpy as np
import pytest

from minigrad import kernels
from minigrad.kernels import fused, launch


class Module:
    """In place of cupy.RawModule: says what it was given."""

    made, error = [], None

    def __init__(self, code, options):
        self.code, self.options, self.launches = code, options, []
        Module.made.append(self)

    def compile(self):
        if Module.error:
            raise Module.error

    def get_function(self, name):
        return lambda grid, block, arguments: self.launches.append((name, grid, block, arguments))


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy with two devices; `.current` is the current one's number."""
    cupy = types.ModuleType("cupy")
    cupy.current, cupy.RawModule = 0, Module
    cupy.cuda = types.SimpleNamespace(Device=lambda: types.SimpleNamespace(id=cupy.current))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(Module, "made", [])
    monkeypatch.setattr(Module, "error", None)
    for cached in (launch._kernel, launch._module):
        cached.cache_clear()
    yield cupy
    for cached in (launch._kernel, launch._module):
        cached.cache_clear()


def test_a_family_is_compiled_once_for_each_device_and_dtype(cupy):
    kernel = launch.kernel("sru", "sru_forward", "float32")
    kernel(3, 32, 1, 2.0)
    kernel((3, 4), (32, 8), 5)
    kernel(0, 32, 1)
    kernel((3, 0), 32, 1)
    assert launch.kernel("sru", "sru_forward", np.dtype("float32")) is kernel
    launch.kernel("sru", "sru_backward", "float32")
    module, = Module.made
    assert module.launches == [("sru_forward", (3,), (32,), (1, 2.0)), ("sru_forward", (3, 4), (32, 8), (5,))]
    assert module.options == ("-std=c++17", "-DREAL=float")
    assert "sru_backward" in module.code
    launch.kernel("sru", "sru_forward", "float64")
    launch.kernel("norm", "norm_forward", "float32")
    cupy.current = 1
    launch.kernel("sru", "sru_forward", "float32")
    assert len(Module.made) == 4


@pytest.mark.parametrize(("error", "cause"), [
    (RuntimeError("sru.cu(3): remark: here\nsru.cu(7): error: expected a ';'\n1 error detected"), "expected a ';'"),
    (RuntimeError("=====\nFailed to find CUDA headers\nInstall them\n====="), "(Failed to find CUDA headers)"),
    (ImportError(), "(ImportError)")])
def test_a_kernel_that_does_not_compile(cupy, error, cause):
    Module.error = error
    with pytest.raises(kernels.KernelError) as raised:
        launch.kernel("sru", "sru_forward", "float32")
    assert "the GPU kernels of sru.cu could not be compiled for float32" in str(raised.value)
    assert cause in str(raised.value)
    assert "MINIGRAD_KERNELS=0" in str(raised.value)


def test_a_dtype_without_kernels(cupy):
    with pytest.raises(kernels.KernelError, match=r"arrays of \w+ have no GPU kernels; expected one of float16, "):
        launch.kernel("sru", "sru_forward", np.longdouble)


def test_where_there_are_kernels(cupy, monkeypatch):
    assert kernels.of(np) is None
    assert kernels.of(cupy) is fused
    monkeypatch.setattr(launch, "gpu_available", lambda: True)
    assert kernels.available()
    monkeypatch.setenv(kernels.SWITCH, "0")
    assert kernels.of(cupy) is None
    assert not kernels.available()
    for value in ("false", "2", " 0"):
        monkeypatch.setenv(kernels.SWITCH, value)
        with pytest.raises(kernels.KernelError, match=f"MINIGRAD_KERNELS is '{value}' in the environment; expected 0"):
            kernels.of(cupy)
        assert kernels.of(np) is None
    monkeypatch.setenv(kernels.SWITCH, "")
    assert kernels.of(cupy) is fused
    monkeypatch.delenv(kernels.SWITCH)
    monkeypatch.setattr(launch, "gpu_available", lambda: False)
    assert not kernels.available()


def test_arrays_on_two_devices():
    class OnDevice:
        def __init__(self, device):
            self.device = device
    with pytest.raises(kernels.KernelError, match=r"layer_norm_forward got arrays on the devices \['0', '1'\]"):
        fused.layer_norm_forward(OnDevice(0), OnDevice(1), OnDevice(0), 1e-5)
    with pytest.raises(kernels.KernelError, match="layer_norm_backward got arrays on the devices"):
        fused.layer_norm_backward(OnDevice(0), OnDevice(0), (OnDevice(1), None, None))


@pytest.mark.parametrize("name", fused.__all__)
def test_every_function_minds_the_device(name):
    """Those of the optimizers do it themselves, with `device_of`."""
    function = getattr(fused, name)
    assert hasattr(function, "__wrapped__") or function.__module__ == "minigrad.kernels.optim"
