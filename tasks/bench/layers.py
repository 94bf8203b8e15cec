"""The rows of recurrent layers on the CPU, with their peers; cost over S, B and K."""

import math

import numpy as np

from minigrad.layers import IRNN, LSTM, RRALSTM, RWA, URNN, SRUpp
from tasks.bench import rnns_peers, srupp_peers
from tasks.bench.measure import Work, bytes_per_step, measure_cost, our_side, upstream_and_input
from tasks.bench.peers import imported, lstm_in_torch, rra_in_jax, rra_in_torch
from tasks.bench.srupp_peers import load_official

D = 2                                                # width of x, as in the adding problem
PART = {"RRALSTM": "rra", "LSTM": "lstm", "IRNN": "rnns", "RWA": "rnns", "URNN": "rnns"}
CHECKED = {"RRALSTM": 100, "LSTM": 100, "IRNN": 100, "RWA": 100, "URNN": 25, "SRUpp": 512}   # steps compared, at most
LONG_BATCH = 16                                      # of the table over S, at most
PEERS = {"RRALSTM": [("torch", rra_in_torch), ("jax", rra_in_jax)], "LSTM": [("torch", lstm_in_torch)],
         "IRNN": [("torch", rnns_peers.in_torch), ("torch", rnns_peers.irnn_module)],
         "RWA": [("torch", rnns_peers.in_torch)], "URNN": [("torch", rnns_peers.in_torch)],
         "SRUpp": [("torch", srupp_peers.srupp_in_torch), ("sru", srupp_peers.official_srupp)]}
LOADERS = {"sru": load_official}                     # importlib.import_module for the others


def make_layer(name, d, h, K=None):
    """A float32 layer whose values are not at their trivial first ones, where a wrong peer could agree with it.

    IRNN's W, the identity, is its own transpose, and its V is nearly zero: here V is larger, and W has some noise, its
    eigenvalues within the unit circle.
    """
    rng = np.random.default_rng(1)
    if name == "RRALSTM":
        return RRALSTM(d, h, K, rng=rng, dtype="float32")
    if name in ("LSTM", "URNN"):
        return {"LSTM": LSTM, "URNN": URNN}[name](d, h, rng=rng, dtype="float32")
    if name == "RWA":
        layer, biases = RWA(d, h, rng=rng, dtype="float32"), ("b_u", "b_g")
    else:
        layer, biases = IRNN(d, h, input_std=0.5, rng=rng, dtype="float32"), ("b",)
        layer.W.value *= 1 - 0.1 / math.sqrt(h)
        layer.W.value += 0.1 / h * rng.standard_normal((h, h), "float32")
    for bias in biases:
        getattr(layer, bias).value += 0.1 * rng.standard_normal(h, "float32")
    return layer


def make_srupp(d, p, **settings):
    """One SRU++ layer without memory; alpha, layer norm and biases are not at their trivial first values."""
    rng = np.random.default_rng(1)
    layer = SRUpp(d, d, p, memory=0, rng=rng, dtype="float32", **settings)
    for parameter in (layer.norm.gain, layer.norm.bias, layer.b_f):
        parameter.value += 0.1 * rng.standard_normal(parameter.value.shape, "float32")
    if layer.attention:
        layer.alpha.value[...] = 0.3                 # at 0, where it starts, much of the backward would be zeros
    return layer


def works(settings):
    """Yield the Work of every layer that --only asks for."""
    B, S, h, K = (settings[key] for key in ("batch_size", "length", "hidden", "window"))
    for name in [name for name, part in PART.items() if part in settings["only"]]:
        columns = 2 if name == "URNN" else 1         # of y, for each unit: URNN's are complex
        words = f"B={B} S={S} d={D} h={h}" + (f" K={K}" if name == "RRALSTM" else "")
        yield layer_work(make_layer(name, D, h, K), words, *upstream_and_input(B, S, D, columns * h), columns)
    if "srupp" in settings["only"]:
        L, B, d, p = settings["srupp_size"]
        yield layer_work(make_srupp(d, p), f"L={L} B={B} d=h={d} d'={p}", *upstream_and_input(B, L, d, d))


def layer_work(layer, size, x, dy, columns=1):
    """A layer's Work. It is compared with its peers over its first steps.

    RRALSTM at its first random weights is chaotic: over some hundred steps the float32 rounding of each side grows
    until they have little in common (so does each side's distance to float64). URNN's grows faster, where modReLU turns
    a z near zero.
    """
    name, (peers, notes), checked = type(layer).__name__, peers_of(layer, x, dy), None
    if x.shape[1] > CHECKED[name]:
        first = x[:, :CHECKED[name]], dy[:, :CHECKED[name]]
        checked = our_side(layer, *first), peers_of(layer, *first)[0]
    return Work(name, size, our_side(layer, x, dy), peers, notes, checked, bytes_per_step(layer, x, dy, columns))


def peers_of(layer, x, dy):
    """([Side], [note]): every way of every peer of a layer; a note says which cannot be imported."""
    sides, notes = [], []
    for module_name, build in PEERS[type(layer).__name__]:
        module, note = imported(module_name, *filter(None, [LOADERS.get(module_name)]))
        sides += build(module, layer, x, dy) if module else []
        notes.append(note)
    return sides, notes


def costs(settings):
    """RRALSTM's cost over S (with a smaller batch), over B and over K."""
    sizes = {"S": settings["length"], "B": settings["batch_size"], "d": D, "h": settings["hidden"],
             "K": settings["window"]}

    def make(size):
        B, S, d, h, K = (size[name] for name in ("B", "S", "d", "h", "K"))
        return make_layer("RRALSTM", d, h, K), *upstream_and_input(B, S, d, h)
    over_S = {**sizes, "B": min(sizes["B"], LONG_BATCH)}
    return [measure_cost("RRALSTM", axis, settings[f"over_{axis}"], fixed, make, settings)
            for axis, fixed in (("S", over_S), ("B", sizes), ("K", sizes))]
