"""How the bench measures on a GPU: CUDA events, the card's own rates, a time limit, memory released.

CuPy and PyTorch both run on the legacy default stream. An event is recorded after each call, and the host waits for the
last one only: a call's time is that between two events. Where the host is faster than the card it is the card's time,
else that of the host's launches. The median counts.
"""

import contextlib
import gc
import importlib
import itertools
import os
import signal
import sys
import threading
import time
from typing import NamedTuple

import numpy as np

from minigrad.backend import card, module_of_device, to_device
from minigrad.kernels import sru
from tasks.bench.measure import UNSTEADY

WARM_UP, MOST_WARM_UP = 3, 10      # calls that are not timed, at least, and while they still become faster
LEAST_CALLS, MOST_SECONDS = 5, 4.0                                           # of a side
VARIABLES = ("CUPY_TF32", "NVIDIA_TF32_OVERRIDE", "CUPY_ACCELERATORS", "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM",
             "CUDA_LAUNCH_BLOCKING", "MINIGRAD_KERNELS")                     # of the environment, that change figures


class GpuTiming(NamedTuple):
    """Milliseconds a call."""

    ms: float               # the median, which counts
    min_ms: float
    spread: float           # the middle half of the calls lies within this share of the median
    calls: int

    @property
    def steady(self):
        return self.ms <= UNSTEADY * self.min_ms


# ---- clocks ----------------------------------------------------------------------------------------------

class CupyClock:
    """mark() -> an event on CuPy's current stream."""

    def mark(self):
        event = module_of_device("gpu").cuda.Event()
        event.record()
        return event

    def wait(self, mark):
        mark.synchronize()

    def ms(self, first, second):
        return module_of_device("gpu").cuda.get_elapsed_time(first, second)


class TorchClock(CupyClock):
    """The same on PyTorch's."""

    def __init__(self, torch):
        self.torch = torch

    def mark(self):
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, first, second):
        return first.elapsed_time(second)


def measure(call, clock, repeats):
    """GpuTiming of `repeats` calls; of fewer, LEAST_CALLS, where they would take over MOST_SECONDS."""
    seconds = []
    while len(seconds) < WARM_UP or (seconds[-1] < 0.5 * seconds[-2] and len(seconds) < MOST_WARM_UP):
        began = time.perf_counter()
        call()
        clock.wait(clock.mark())
        seconds.append(time.perf_counter() - began)
    calls = min(repeats, max(LEAST_CALLS, int(MOST_SECONDS / max(seconds[-1], 1e-9))))
    marks = [clock.mark()]
    for _ in range(calls):
        call()
        marks.append(clock.mark())
    clock.wait(marks[-1])
    ms = [clock.ms(first, second) for first, second in itertools.pairwise(marks)]
    low, median, high = np.quantile(ms, [0.25, 0.5, 0.75]).tolist()
    return GpuTiming(median, min(ms), (high - low) / max(median, 1e-9), calls)


# ---- the card's rates ------------------------------------------------------------------------------------

def rates(settings):
    """{copy TB/s, float32 product TFLOP/s, microseconds a launch of a kernel of ours and of cupy.dot}."""
    clock, repeats, xp = CupyClock(), settings["repeats"], module_of_device("gpu")
    copied, n, calls = settings["copy_bytes"], settings["matrix"], settings["launch_calls"]
    free, _ = xp.cuda.runtime.memGetInfo()
    while 3 * copied > free:
        copied //= 2
    if 4 * 3 * 4 * n * n > free:
        n //= 2

    def copying():
        source, target = xp.zeros(copied // 4, "float32"), xp.empty(copied // 4, "float32")
        return measure(lambda: xp.copyto(target, source), clock, repeats).ms

    def product():
        """(n, n) @ (n, n) of random numbers: equal ones take less power, and less time."""
        rng = np.random.default_rng(0)
        a, b = (to_device(rng.standard_normal((n, 1), "float32"), "gpu") * to_device(
            rng.standard_normal((1, n), "float32"), "gpu") for _ in range(2))
        out = xp.empty((n, n), "float32")
        return measure(lambda: xp.matmul(a, b, out=out), clock, repeats).ms

    def launch_us(launch):
        return 1e3 * measure(lambda: [launch() for _ in range(calls)], clock, LEAST_CALLS).ms / calls

    found = {"copy_bytes": copied, "matrix": n, "copy_tb_s": 2e-9 * copied / copying()}    # as many read as written
    release()
    found["product_tflop_s"] = 2e-9 * n**3 / product()
    release()
    dtype, (B, _, _, h) = np.dtype("float32"), settings["lstm_size"]
    u, x, cs, hs = (xp.zeros(shape, dtype) for shape in [(1, 1, 3), (1, 1, 1), (2, 1, 1), (1, 1, 1)])
    vectors = [xp.zeros(1, dtype) for _ in range(4)]
    a, b, out = (xp.zeros(shape, dtype) for shape in [(B, h), (h, 4 * h), (B, 4 * h)])
    return {**found, "kernel_us": launch_us(lambda: sru.launch_forward(u, x, vectors, 0, cs, hs)),
            "dot_us": launch_us(lambda: xp.dot(a, b, out=out))}


def the_card():
    """What a figure depends on: {card, multiprocessors, memory, capability, CUDA's versions, CuPy's, VARIABLES}."""
    xp = module_of_device("gpu")
    runtime, properties = xp.cuda.runtime, card()
    versions = {"cuda_runtime": runtime.runtimeGetVersion(), "cuda_driver": runtime.driverGetVersion()}
    return {"card": properties["name"],
            "multiprocessors": properties["multiProcessorCount"], "memory_bytes": properties["totalGlobalMem"],
            "free_bytes": runtime.memGetInfo()[0], "capability": f"{properties['major']}.{properties['minor']}",
            **{name: f"{version // 1000}.{version % 1000 // 10}" for name, version in versions.items()},
            "cupy": xp.__version__, "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ}}


# ---- memory and time -------------------------------------------------------------------------------------

def release():
    """Return the memory of dead arrays to the card, for the next row and the other library."""
    gc.collect()
    xp = module_of_device("gpu")
    xp.get_default_memory_pool().free_all_blocks()
    xp.get_default_pinned_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


class TimeIsUp(BaseException):
    """Raised by time_limit; no library's `except Exception` stops it."""


@contextlib.contextmanager
def time_limit(seconds):
    """Within it TimeIsUp is raised after that many seconds, where there is SIGALRM, and in the main thread alone."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number, frame):
        raise TimeIsUp(f"{seconds:.0f} s were up")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reset_compiler():
    """After a compilation that was interrupted."""
    with contextlib.suppress(Exception):
        importlib.import_module("torch._dynamo").reset()
