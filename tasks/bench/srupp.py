"""What tasks/bench.py measures of SRU and SRU++: the layer and its floor, cost over L, and generation step by step."""

import functools
import math
import statistics
import time

import numpy as np

from minigrad.functional import QUERY_BLOCK, attention_blocks, softmax_attention
from minigrad.layers import SRU, SRUpp
from minigrad.layers.srupp_memory import KeysAndValues
from minigrad.memory import empty
from models.srupp_lm import build
from tasks.bench import measure as bench_measure
from tasks.bench.measure import STRAIGHT, Side, measure

ALPHA = 0.3                        # of the attention; at 0, where it starts, much of the backward would be zeros
VOCAB = 205                        # symbols of enwik8
SAME = 1.25                        # step by step: what counts as the same cost, with a window; also for what is added
NOISE = 0.05                       # step by step: how far two equal costs may lie apart, without a window


def upstream_and_input(L, B, d):
    """x (B, L, d) and dy of the same shape."""
    return bench_measure.upstream_and_input(B, L, d, d)


def make_srupp(d, p, **settings):
    """One SRU++ layer, alpha, layer norm and biases not at their trivial first values; it carries no memory."""
    rng = np.random.default_rng(1)
    layer = SRUpp(d, d, p, memory=0, rng=rng, dtype="float32", **settings)
    for parameter in (layer.norm.gain, layer.norm.bias, layer.b_f):
        parameter.value += 0.1 * rng.standard_normal(d if parameter is layer.b_f else p, "float32")
    if layer.attention:
        layer.alpha.value[...] = ALPHA
    return layer


# ---- the floor -------------------------------------------------------------------------------------------

def filled(*shape):
    """A float32 array of random numbers."""
    array = empty(shape, np.dtype("float32"))
    array[...] = np.random.default_rng(2).standard_normal(shape, "float32") / math.sqrt(shape[-1])
    return array


def floor_products(L, B, d, p):
    """{name: function}: the matrix products of one causal SRU++ layer with d = h, alone, in its shapes and layouts."""
    n, h = L * B, d
    x, Q, dQ, W_q, W_kv = filled(n, d), filled(n, p), filled(n, p), filled(d, p), filled(2, p, p)
    q, k, v, dA, dk, dv, out_q = (filled(B, L, p) for _ in range(7))
    n1, W_o, W_o_T, u = filled(n, p + 1), filled(3, p + 1, h), filled(3, h, p), filled(3, n, h)
    out_d, out_p, out_3p = filled(n, d), filled(n, p), filled(3, n, p)
    blocks = [(rows, keys, *(filled(B, rows.stop - rows.start, keys.stop) for _ in range(2)))        # P; S or dS
              for rows, keys in attention_blocks(L, L, True, None, QUERY_BLOCK)]

    def project():
        np.matmul(x, W_q, out=out_p)
        for W in W_kv:
            np.matmul(Q, W, out=out_p)

    def project_backward():
        for W in W_kv:
            Q.T @ dQ
            np.matmul(dQ, W.T, out=out_p)
        x.T @ dQ
        np.matmul(dQ, W_q.T, out=out_d)

    def attend():
        for rows, keys, P, S in blocks:
            np.matmul(q[:, rows], k[:, keys].swapaxes(1, 2), out=S)
            np.matmul(P, v[:, keys], out=out_q[:, rows])

    def attend_backward():
        for rows, keys, P, dS in blocks:
            np.matmul(P.swapaxes(1, 2), dA[:, rows], out=dv[:, keys])
            np.matmul(dA[:, rows], v[:, keys].swapaxes(1, 2), out=dS)
            np.matmul(P, k[:, keys], out=out_q[:, rows])
            np.matmul(P.swapaxes(1, 2), q[:, rows], out=dk[:, keys])

    return {"Q, K, V": project, "their gradients": project_backward, "scores and A": attend,
            "gradients of these": attend_backward, "U": lambda: np.matmul(n1, W_o, out=u),
            "dW_o": lambda: np.matmul(n1.T, u), "d of its rows": lambda: np.matmul(u, W_o_T, out=out_3p)}


# ---- cost over L -----------------------------------------------------------------------------------------

def variants(window):
    """{name: make(size) -> layer, x, dy} of the four tables over L."""
    def with_data(make):
        return lambda size: (make(size), *upstream_and_input(size["L"], size["B"], size["d"]))

    def srupp(**settings):
        return with_data(lambda size: make_srupp(size["d"], size["d'"], **settings))

    return {"SRU": with_data(lambda size: SRU(size["d"], size["d"], rng=1, dtype="float32")),
            "SRUpp without attention": srupp(attention=False), f"SRUpp, window {window}": srupp(window=window),
            "SRUpp, causal": srupp()}


def costs(settings, threads, limit):
    """The four tables; that of full causal attention beside the attention part alone."""
    _, B, d, p = settings["srupp_size"]
    sizes = {"B": min(B, settings["over_L_batch"]), "d": d, "d'": p}
    how = threads, limit, settings["cost_repeats"], settings["pause"] / 5
    tables = []
    for name, make in variants(settings["srupp_window"]).items():
        its_sizes = {key: size for key, size in sizes.items() if name != "SRU" or key != "d'"}
        tables.append(bench_measure.measure_cost(name, "L", settings["over_L"], its_sizes, make, *how))
    return [*tables[:-1], beside_attention(tables[-1], sizes, *how)]


def attention_side(L, B, p, threads, limit):
    """softmax_attention's forward + backward, causal, one head."""
    rng = np.random.default_rng(3)
    q, k, v, dA = (rng.standard_normal((B, 1, L, p), "float32") for _ in range(4))

    def call():
        _, cache = softmax_attention.forward(q, k, v, causal=True)
        return softmax_attention.backward(dA, cache)
    return Side("SRUpp", "attention", "", call, call, threads[:1], limit)


def beside_attention(cost, sizes, threads, limit, repeats, pause):
    """A table over L with the attention part's own milliseconds, and both fitted as start + slope L + square L^2."""
    rows, values = cost["rows"], [row["L"] for row in cost["rows"]]
    timings = measure([attention_side(L, sizes["B"], sizes["d'"], threads, limit) for L in values], repeats, pause)
    rows = [{**row, "attention_ms": timing.ms, "attention_share": timing.ms / row["ms"],
             "rest_us_per_step": 1e3 * (row["ms"] - timing.ms) / row["L"]} for row, timing in zip(rows, timings)]
    kept = {key: cost[key] for key in ("layer", "axis", "fixed")}
    return {**kept, "rows": rows, **squares(values, [row["ms"] for row in rows], [row["attention_ms"] for row in rows])}


def squares(values, ms, attention_ms):
    """The layer's and the attention's milliseconds as start + slope L + square L^2, and whether the square is all its.

    It is if the layer's line and square fit, and its square exceeds the attention's by no more than STRAIGHT.
    """
    (start, slope, square), farthest = bench_measure.fit(values, ms, 2)
    (_, _, attention_square), _ = bench_measure.fit(values, attention_ms, 2)
    return {"start_ms": start, "slope_ms": slope, "square_ms": square, "farthest": farthest,
            "attention_square_ms": attention_square,
            "only_attention": farthest <= STRAIGHT and square <= (1 + STRAIGHT) * attention_square}


# ---- step by step ----------------------------------------------------------------------------------------

def stepping(settings, limit_one):
    """What a byte costs at the beginning and at the end of a text that is read symbol by symbol: a row a window."""
    _, _, d, p = settings["srupp_size"]
    layers, steps, repeats = settings["step_layers"], settings["step_bytes"], settings["step_repeats"]
    beginning, end = slice(steps // 20, 3 * steps // 20), slice(9 * steps // 10, steps)
    windows, rows = (settings["step_window"], None), []
    models = [build("srupp", VOCAB, d, layers=layers, projection=p, window=window, rng=0, dtype="float32")
              for window in windows]
    keys = {window: [min(n, window or n) for n in (steps // 10, 19 * steps // 20)] for window in windows}
    with limit_one:
        seconds = [fastest(repeats, settings["pause"], functools.partial(generation, model, steps)) for model in models]
        attending = {n: fastest(repeats, settings["pause"], functools.partial(attention_steps, n, layers, p, 200))
                     for n in sorted({n for both in keys.values() for n in both})}
    for window, each in zip(windows, seconds):
        attention_us = [1e6 * statistics.median(attending[n]) for n in keys[window]]
        row = {"window": window, "first_us": 1e6 * statistics.median(each[beginning]),
               "last_us": 1e6 * statistics.median(each[end]), "last_mean_us": 1e6 * statistics.mean(each[end])}
        rows.append({**row, "keys": keys[window], "attention_us": attention_us,
                     **judge_growth(row["first_us"], row["last_us"], attention_us, window)})
    return {"layers": layers, "d": d, "d'": p, "vocab": VOCAB, "bytes": steps, "rows": rows,
            "beginning": [beginning.start, beginning.stop], "end": [end.start, end.stop]}


def judge_growth(first_us, last_us, attention_us, window):
    """Whether the last bytes cost no more than the first ones and what the window, or the number of keys, explains.

    With a window: at most 1.25 times as much. Without one the attention's own growth counts too (1.25 times), but the
    rest must be the same to 5 %.
    """
    explained = attention_us[1] - attention_us[0]
    at_most = SAME * first_us if window else (1 + NOISE) * first_us + SAME * max(explained, 0)
    return {"explained_us": explained, "ratio": last_us / first_us, "at_most_us": at_most,
            "verdict": "met" if last_us <= at_most else "missed"}


def fastest(repeats, pause, seconds_of_steps):
    """[seconds] of each step: the fastest of several runs, so that what else runs on the machine counts little."""
    runs = []
    for _ in range(repeats):
        time.sleep(pause)
        runs.append(seconds_of_steps())
    return [min(each) for each in zip(*runs)]


def generation(model, steps):
    """[seconds] of each step of a text of random bytes."""
    ids, stepping, seconds = np.random.default_rng(4).integers(0, VOCAB, (steps, 1)), model.begin(), []
    for now in ids:
        start = time.perf_counter()
        _, stepping = model.step(now, stepping)
        seconds.append(time.perf_counter() - start)
    return seconds


def attention_steps(n, layers, p, steps):
    """[seconds] of one query of each layer over n keys and values, the layers in turn as in a model."""
    rng = np.random.default_rng(5)
    q, *arrays = (rng.standard_normal((1, 1, rows, p), "float32") for rows in [1] + [n] * (2 * layers))
    seen, seconds = [KeysAndValues(*pair, None) for pair in zip(arrays[::2], arrays[1::2])], []
    for _ in range(steps):
        start = time.perf_counter()
        for keys_and_values in seen:
            keys_and_values.attend(q)
        seconds.append(time.perf_counter() - start)
    return seconds
