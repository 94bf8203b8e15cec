"""SRU and SRU++ on the CPU: cost over L, and what a symbol costs when a text is generated step by step."""

import time

import numpy as np

from minigrad.layers import SRU
from models.srupp_lm import build
from tasks.bench.layers import make_srupp
from tasks.bench.measure import measure_cost, thread_limits, upstream_and_input

VOCAB = 205                        # symbols of enwik8
SAME = 1.25                        # step by step with a window: what still counts as the same cost


def costs(settings):
    """Four tables over L: a line is fitted, to that of full causal attention a parabola."""
    (_, B, d, p), window = settings["srupp_size"], settings["srupp_window"]
    sizes = {"B": min(B, settings["over_L_batch"]), "d": d, "d'": p}
    makers = {"SRU": lambda: SRU(d, d, rng=1, dtype="float32"),
              "SRUpp without attention": lambda: make_srupp(d, p, attention=False),
              f"SRUpp, window {window}": lambda: make_srupp(d, p, window=window),
              "SRUpp, causal": lambda: make_srupp(d, p)}
    tables = []
    for name, make in makers.items():
        def with_data(size, make=make):
            return make(), *upstream_and_input(size["B"], size["L"], d, d)
        degree = 2 if name == "SRUpp, causal" else 1
        tables.append(measure_cost(name, "L", settings["over_L"], sizes, with_data, settings, degree))
    return tables


def stepping(settings):
    """What a byte costs at the beginning and at the end of a text that is read symbol by symbol: a row for each window.

    With a window the last bytes may cost no more than SAME times what the first do; without one the number of keys
    grows.
    """
    _, _, d, p = settings["srupp_size"]
    layers, steps = settings["step_layers"], settings["step_bytes"]
    (_, limit), *_ = thread_limits("numpy", 1)
    beginning, end, rows = slice(steps // 20, 3 * steps // 20), slice(9 * steps // 10, steps), []
    for window in (settings["step_window"], None):
        model = build("srupp", VOCAB, d, layers=layers, projection=p, window=window, rng=0, dtype="float32")
        with limit():                                # the fastest of several runs for each step
            seconds = np.min([generation(model, steps) for _ in range(settings["step_repeats"])], axis=0)
        first, last = (1e6 * float(np.median(seconds[part])) for part in (beginning, end))
        verdict = "no target" if window is None else "met" if last <= SAME * first else "missed"
        rows.append({"window": window, "first_us": first, "last_us": last, "ratio": last / first, "verdict": verdict})
    return {"layers": layers, "d": d, "d'": p, "vocab": VOCAB, "bytes": steps, "rows": rows}


def generation(model, steps):
    """[seconds] of each step of a text of random bytes."""
    ids, stepping, seconds = np.random.default_rng(4).integers(0, VOCAB, (steps, 1)), model.begin(), []
    for now in ids:
        start = time.perf_counter()
        _, stepping = model.step(now, stepping)
        seconds.append(time.perf_counter() - start)
    return seconds
