"""On a real GPU what test_fake_device.py holds on the stand-in for one: layers, losses, steps, runs as on the CPU.

Once through the fused kernels and once through plain CuPy. And what only a real one can show: that a training step
waits for nothing. (test_contract.py and test_kernels.py have tests on a GPU too: `pytest -m gpu` runs all.)
"""

import contextlib

import device_parity
import numpy as np
import pytest
from cases import TABLE
from device_parity import FAMILIES, LOG_EVERY, OPTIMIZERS, SCALES, SMALL, Device, tensors_of, trainer_of

from minigrad import kernels
from minigrad.backend import asnumpy, module_of_device
from minigrad.tree import tree_map

pytestmark = pytest.mark.gpu

DEVICE = Device(still=contextlib.nullcontext, fetch=lambda tree: tree_map(asnumpy, tree))


@pytest.fixture(params=["kernels", "plain CuPy"])
def way(request, monkeypatch):
    monkeypatch.setenv(kernels.SWITCH, "1" if request.param == "kernels" else "0")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_layer(case):
    device_parity.layer_agrees(DEVICE, case)


def test_losses():
    device_parity.losses_agree(DEVICE)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    device_parity.optimizer_agrees(DEVICE, name)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("scale", SCALES)
def test_clipping(scale):
    device_parity.clipping_agrees(DEVICE, scale)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", FAMILIES)
def test_training(name, tmp_path):
    trainer = trainer_of(FAMILIES[name][0], "gpu", tmp_path / "gpu")
    trainer.train(10)
    device_parity.training_agrees(trainer, name, tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_gives_the_same_bits_again(name, tmp_path):
    """Through the kernels nothing is added in the order in which threads happen to come."""
    for run in ("first", "second"):
        trainer_of(FAMILIES[name][0], "gpu", tmp_path / run).train(10)
    first, second = (tensors_of(tmp_path / run) for run in ("first", "second"))
    for key in first:
        np.testing.assert_array_equal(second[key], first[key], err_msg=key)


@pytest.mark.parametrize(("first", "then"), [("cpu", "gpu"), ("gpu", "cpu")])
@pytest.mark.parametrize("name", ["char_lm", "tsdae"])
def test_resumed_on_the_other_device(name, first, then, tmp_path):
    device_parity.resumed_on_the_other_device(name, first, then, tmp_path)


@pytest.mark.usefixtures("quick_figures")
@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.__name__)
def test_task(task, tmp_path, monkeypatch):
    device_parity.task_agrees(task, tmp_path, monkeypatch)


# ---- waiting ---------------------------------------------------------------------------------------------

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long began = clock64();
    while (clock64() - began < cycles) {}
}
"""
HALF_A_SECOND = 1_000_000_000                                    # cycles of a clock of at most 2 GHz


def waits(cupy, work):
    """True when `work()` returns only after what had been launched before it: half a second's kernel."""
    spin, end = cupy.RawKernel(SPIN, "spin"), cupy.cuda.Event()
    spin((1,), (1,), (1,))                                       # compiled and loaded
    cupy.cuda.Device().synchronize()
    spin((1,), (1,), (HALF_A_SECOND,))
    end.record()
    work()
    waited = end.done
    cupy.cuda.Device().synchronize()
    return waited


@pytest.mark.parametrize("name", ["adding", "char_lm", "imdb", "pixels, rra", "pixels, rwa"])
def test_a_step_waits_for_nothing(name, tmp_path):
    """Between log intervals the CPU only launches; at one it reads the loss and the norm, and waits.

    (TSDAE's steps launch about as much as a driver takes without waiting for room, a thousand kernels.)
    """
    cupy = module_of_device("gpu")
    trainer = trainer_of(FAMILIES[name][0], "gpu", tmp_path / "run")
    trainer.train(2 * LOG_EVERY)                                 # kernels compiled, memory in CuPy's pools
    assert not waits(cupy, trainer._one_step)
    trainer.step = 3 * LOG_EVERY - 1
    assert waits(cupy, trainer._one_step)
