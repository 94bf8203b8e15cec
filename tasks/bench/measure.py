"""How tasks/bench.py measures: timing side by side, the floor, memory, and cost against size.

Two sides timed in turn, call by call, disturb each other: the idle BLAS threads of one spin while the other computes.
So each side runs in blocks with a pause before, the blocks of all sides take turns, and a side's figure is its minimum.
"""

import math
import statistics
import time
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from minigrad import backend
from minigrad.backend import to_device
from minigrad.layers import LSTM, RRALSTM
from minigrad.memory import empty
from minigrad.tree import tree_leaves

BLOCKS = 5
PRODUCTS = "matrix products alone"    # what a floor is
UNSTEADY = 2.0                     # median / minimum above which nothing is judged
STRAIGHT = 0.2                     # the farthest a point may lie from the straight line, relative


class Side(NamedTuple):
    """Something to be timed."""

    layer: str              # RRALSTM, LSTM ..., or the name of a work
    name: str               # minigrad, PyTorch eager, ...
    way: str                # which of several ways to write it; "" where there is one
    call: Callable          # one forward + backward
    result: Callable        # the same: {"y": ..., "dx": ..., "dW": ...} in minigrad's layout
    threads: tuple          # the thread counts to try, or a word where the side cannot be told
    limit: Callable         # limit(threads): a context in which the side has that many


class Timing(NamedTuple):
    """A side at its best thread count."""

    ms: float               # minimum
    median_ms: float
    threads: Any

    @property
    def steady(self):
        return self.median_ms <= UNSTEADY * self.ms


def measure(sides, repeats, pause):
    """[Timing], one a side: at least `repeats` calls at each of its thread counts."""
    runs = [(n, threads) for n, side in enumerate(sides) for threads in side.threads]
    seconds = {run: [] for run in runs}
    for _ in range(min(BLOCKS, repeats)):
        for n, threads in runs:
            time.sleep(pause)
            with sides[n].limit(threads):
                sides[n].call()                                              # not timed: it wakes caches and threads
                for _ in range(math.ceil(repeats / min(BLOCKS, repeats))):
                    start = time.perf_counter()
                    sides[n].call()
                    seconds[n, threads].append(time.perf_counter() - start)
    timings = {run: Timing(1e3 * min(s), 1e3 * statistics.median(s), run[1]) for run, s in seconds.items()}
    return [min(timings[n, threads] for threads in side.threads) for n, side in enumerate(sides)]


def verdict(ratio, at_most, not_judged, steady=True):
    """What is said of a ratio that may be `at_most`, None for no target; not_judged: why not, or None."""
    if at_most is None:
        return "no target"
    if not_judged:
        return f"not judged ({not_judged})"
    return "unsteady" if not steady else "met" if ratio <= at_most else "missed"


# ---- minigrad's side -------------------------------------------------------------------------------------

def blas_threads(counts):
    """(thread counts to try, limit, note): NumPy's BLAS is told by threadpoolctl; without it, it stays as it is."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return ("as set",), lambda threads: nullcontext(), (
            "threadpoolctl cannot be imported: minigrad and the floor are measured at the BLAS thread count as it is")
    return counts, lambda threads: threadpool_limits(threads, user_api="blas"), None


def upstream_and_input(B, S, d, h):
    """x (B, S, d) and dy (B, S, h), float32, the same for every side."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((B, S, d), "float32"), rng.standard_normal((B, S, h), "float32")


def make_layer(name, d, h, K):
    rng = np.random.default_rng(1)
    return LSTM(d, h, rng=rng, dtype="float32") if name == "LSTM" else RRALSTM(d, h, K, rng=rng, dtype="float32")


def our_side(layer, x, dy, threads, limit):
    """minigrad's forward + backward."""
    def call():
        (y, _), cache = layer.forward(x)
        dx, _ = layer.backward((dy, None), cache)
        return y, dx

    def result():
        layer.zero_grad()
        y, dx = call()
        gradients = {f"d{name}": parameter.grad.copy() for name, parameter in layer.named_parameters()}
        return to_device({"y": y, "dx": dx, **gradients}, "cpu")

    return Side(type(layer).__name__, "minigrad", "", call, result, threads, limit)


# ---- the floor -------------------------------------------------------------------------------------------

def floor_products(B, S, d, h):
    """{name: function}: the matrix products of minigrad/fast/lstm.py, alone, in its shapes and layouts."""
    rng = np.random.default_rng(2)

    def filled(*shape):
        array = empty(shape, np.dtype("float32"))
        array[...] = rng.standard_normal(shape, "float32") / math.sqrt(h)
        return array

    x1, hs, gates, dz = filled(S * B, d + 1), filled(S, B, h), filled(4, S * B, h), filled(4, S, B, h)
    inputs, z, U = filled(S * B, h + d + 1), filled(4, B, h), filled(4, h, h)
    W, W1 = filled(d, 4 * h), filled(4, d + 1, h)
    flat_dz = dz.reshape(4, S * B, h)

    def steps():
        for t in range(S):
            np.matmul(hs[t], U, out=z)

    def backward_steps():
        for t in range(S):
            np.matmul(dz[:, t], U, out=z)

    return {"step": steps, "backward step": backward_steps,
            "input": lambda: np.matmul(x1, W1, out=gates),
            "weight gradients": lambda: np.matmul(inputs.T, flat_dz),
            "dx": lambda: [flat_dz[gate] @ W[:, gate * h:(gate + 1) * h].T for gate in range(4)]}


def measure_floor(products, threads, limit, repeats, pause):
    """({product: Timing}, their sum as a Timing) of {name: function}: each at its best thread count."""
    sides = [Side("", "floor", name, call, call, threads, limit) for name, call in products.items()]
    timings = dict(zip(products, measure(sides, repeats, pause)))
    total = Timing(sum(t.ms for t in timings.values()), sum(t.median_ms for t in timings.values()), "best")
    return timings, total


# ---- memory ----------------------------------------------------------------------------------------------

def bytes_per_step(layer, x, dy, columns=1):
    """Bytes a step, sample and hidden unit: the arrays of the cache, and the peak of one forward + backward.

    columns: of y, that a unit has. The pool of dead arrays is emptied first: tracemalloc sees no memory that was there
    before.
    """
    units = dy.size / columns
    backend.release_idle_memory()
    tracemalloc.start()
    try:
        _, cache = layer.forward(x)
        layer.backward((dy, None), cache)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return {"cache_bytes": bytes_of(leaf for _, leaf in tree_leaves(cache)) / units, "peak_bytes": peak / units}


def bytes_of(leaves):
    """Bytes of the arrays among the leaves, memory that several of them see counted once."""
    total, counted_to = 0, 0
    for first, last in sorted(np.lib.array_utils.byte_bounds(leaf) for leaf in leaves if isinstance(leaf, np.ndarray)):
        total += max(0, last - max(first, counted_to))
        counted_to = max(counted_to, last)
    return total


# ---- cost against size -----------------------------------------------------------------------------------

def measure_cost(name, axis, values, sizes, make, threads, limit, repeats, pause):
    """A layer's cost over one of its sizes, the others as given: {"rows": [...], and how straight it is}.

    make(size) -> layer, x, dy; each row has the milliseconds and the bytes of a forward and backward, at one thread.
    """
    rows, sides = [], []
    for value in values:
        layer, x, dy = make({**sizes, axis: value})
        rows.append({axis: value, "steps": x.shape[1], **bytes_per_step(layer, x, dy)})
        sides.append(our_side(layer, x, dy, threads[:1], limit))
    for row, timing in zip(rows, measure(sides, repeats, pause)):
        row.update(ms=timing.ms, us_per_step=1e3 * timing.ms / row.pop("steps"))
    fixed = {name: size for name, size in sizes.items() if name != axis}
    return {"layer": name, "axis": axis, "fixed": fixed, "rows": rows,
            **straightness(values, [row["ms"] for row in rows])}


def straightness(values, ms):
    """How well ms = start + slope * value holds: the line, its farthest point (relative), whether that is linear."""
    (start, slope), farthest = fit(values, ms, 1)
    return {"start_ms": start, "slope_ms": slope, "farthest": farthest, "linear": farthest <= STRAIGHT}


def fit(values, ms, degree):
    """(coefficients of value^0, value^1, ..., the distance of the farthest point, relative) of ms as a polynomial.

    It is fitted to relative distances, so that the smallest sizes count as much as the largest.
    """
    ms, values = np.asarray(ms, dtype=float), np.asarray(values, dtype=float)
    powers = values[:, None] ** np.arange(degree + 1) / ms[:, None]
    scale = abs(powers).max(axis=0)
    coefficients = np.linalg.lstsq(powers / scale, np.ones(len(ms)), rcond=None)[0] / scale
    return coefficients.tolist(), float(abs(powers @ coefficients - 1).max())
