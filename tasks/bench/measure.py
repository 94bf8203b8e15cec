"""How the bench measures on the CPU: timing side by side, memory, and cost against size.

Two sides timed in turn, call by call, disturb each other: the idle BLAS threads of one spin while the other computes.
So each side runs in blocks with a pause before each, the blocks of all sides alternate, and a side counts with its
minimum.
"""

import importlib
import math
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import to_device
from minigrad.memory import release_idle_memory
from minigrad.tree import tree_leaves

try:
    from threadpoolctl import threadpool_limits
except ImportError:                # NumPy's BLAS then keeps the threads that it has
    threadpool_limits = None

THREADS = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
BLOCKS = 5
UNSTEADY = 2.0                     # median / minimum above which nothing is judged
STRAIGHT = 0.2                     # the farthest a point may lie from the fitted line, relative


class Side(NamedTuple):
    """Something to be timed."""

    row: str                # RRALSTM, TSDAE step, ...
    name: str               # minigrad, PyTorch eager, ...
    way: str                # which of several ways to write it; "" where there is one
    call: Callable          # one forward + backward, or one training step
    result: Callable        # the same: {"y": ..., "dx": ..., "dW": ...} in minigrad's layout, on the host
    library: str = "numpy"  # whose threads are counted: numpy, torch, jax


class Work(NamedTuple):
    """A row of the table: minigrad's side and its peers'."""

    name: str
    size: str               # in words
    ours: Side
    peers: list             # [Side]
    notes: list             # versions of the peers, and which cannot be imported
    checked: Any = None     # (ours, peers) on the part that is compared; None: on all
    bytes: Any = None       # as `bytes_per_step`
    sentences: Any = None   # that a call encodes


class Timing(NamedTuple):
    """A side at its best number of threads."""

    ms: float               # minimum
    median_ms: float
    threads: Any

    @property
    def steady(self):
        return self.median_ms <= UNSTEADY * self.ms


def measure(sides, repeats, pause, most_threads=None):
    """[Timing], one for each side: at least `repeats` calls at each number of threads."""
    runs = [(side, *limit) for side in sides for limit in thread_limits(side.library, most_threads)]
    seconds = [[] for _ in runs]
    for _ in range(min(BLOCKS, repeats)):
        for (side, _, limit), found in zip(runs, seconds):
            time.sleep(pause)
            with limit():
                side.call()                                                  # not timed: it wakes caches and threads
                for _ in range(math.ceil(repeats / min(BLOCKS, repeats))):
                    start = time.perf_counter()
                    side.call()
                    found.append(time.perf_counter() - start)
    timings = [(side, Timing(1e3 * min(found), 1e3 * statistics.median(found), threads))
               for (side, threads, _), found in zip(runs, seconds)]
    return [min(timing for of, timing in timings if of is side) for side in sides]


def thread_limits(library, most=None):
    """[(threads, limit)]: within limit() the library has that many; a word in place of a number that cannot be set."""
    counts = [count for count in THREADS if count <= (most or count)]
    if library == "torch":
        return [(count, partial(torch_threads, count)) for count in counts]
    if library == "jax":
        return [("its own", nullcontext)]                                    # XLA's cannot be changed once it runs
    if threadpool_limits is None:
        return [("as set", nullcontext)]
    return [(count, partial(threadpool_limits, count, user_api="blas")) for count in counts]


@contextmanager
def torch_threads(count):
    """A context in which PyTorch has that many threads."""
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def verdict(ratio, at_most, not_judged, steady=True):
    """What is said of a ratio that may be `at_most`, None for no target; not_judged: why not, or None."""
    if at_most is None:
        return "no target"
    if not_judged:
        return f"not judged ({not_judged})"
    return "unsteady" if not steady else "met" if ratio <= at_most else "missed"


# ---- minigrad's side -------------------------------------------------------------------------------------

def upstream_and_input(B, S, d, h):
    """x (B, S, d) and dy (B, S, h), float32, the same for every side."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((B, S, d), "float32"), rng.standard_normal((B, S, h), "float32")


def our_side(layer, x, dy, row=None):
    """minigrad's forward + backward of a recurrent layer."""
    def call():
        (y, _), cache = layer.forward(x)
        dx, _ = layer.backward((dy, None), cache)
        return y, dx

    def result():
        layer.zero_grad()
        y, dx = call()
        gradients = {f"d{name}": parameter.grad.copy() for name, parameter in layer.named_parameters()}
        return to_device({"y": y, "dx": dx, **gradients}, "cpu")

    return Side(row or type(layer).__name__, "minigrad", "", call, result)


# ---- memory ----------------------------------------------------------------------------------------------

def bytes_per_step(layer, x, dy, columns=1):
    """Bytes for each step, sample and hidden unit: the arrays of the cache, and the peak of one forward + backward.

    columns: of y, for each unit. Idle memory is released first: tracemalloc does not see what was allocated before.
    """
    units = dy.size / columns
    release_idle_memory()
    tracemalloc.start()
    try:
        _, cache = layer.forward(x)
        layer.backward((dy, None), cache)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return {"cache_bytes": bytes_of(leaf for _, leaf in tree_leaves(cache)) / units, "peak_bytes": peak / units}


def bytes_of(leaves):
    """Bytes of the arrays among the leaves; memory that several of them share counts once."""
    total, counted_to = 0, 0
    for first, last in sorted(np.lib.array_utils.byte_bounds(leaf) for leaf in leaves if isinstance(leaf, np.ndarray)):
        total += max(0, last - max(first, counted_to))
        counted_to = max(counted_to, last)
    return total


# ---- cost against size -----------------------------------------------------------------------------------

def measure_cost(name, axis, values, sizes, make, settings, degree=1):
    """A layer's cost over one of its sizes, the others fixed: rows, and a polynomial of that degree fitted to them.

    make(size) -> layer, x, dy; each row has the milliseconds and the bytes of a forward and backward, at one thread.
    """
    rows, sides = [], []
    for value in values:
        layer, x, dy = make({**sizes, axis: value})
        rows.append({axis: value, "steps": x.shape[1], **bytes_per_step(layer, x, dy)})
        sides.append(our_side(layer, x, dy))
    for row, timing in zip(rows, measure(sides, settings["cost_repeats"], settings["pause"] / 5, 1)):
        row.update(ms=timing.ms, us_per_step=1e3 * timing.ms / row.pop("steps"))
    coefficients, farthest = fit(values, [row["ms"] for row in rows], degree)
    return {"layer": name, "axis": axis, "fixed": {key: size for key, size in sizes.items() if key != axis},
            "rows": rows, "coefficients_ms": coefficients, "farthest": farthest, "fits": farthest <= STRAIGHT}


def fit(values, ms, degree):
    """([c_0, c_1, ...], the relative distance of the farthest point) of ms = c_0 + c_1 value + ...

    It is fitted to relative distances, so that the smallest sizes count as much as the largest.
    """
    ms, values = np.asarray(ms, dtype=float), np.asarray(values, dtype=float)
    powers = values[:, None] ** np.arange(degree + 1) / ms[:, None]
    scale = abs(powers).max(axis=0)
    coefficients = np.linalg.lstsq(powers / scale, np.ones(len(ms)), rcond=None)[0] / scale
    return coefficients.tolist(), float(abs(powers @ coefficients - 1).max())
