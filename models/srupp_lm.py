"""A language model: embedding, n layers of SRU, SRU++ or LSTM, output (Lei 2021, arXiv 2102.12459)."""

from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import array_module
from minigrad.check import check_choice, check_count, check_shape
from minigrad.initializers import generator, uniform
from minigrad.layer import Layer
from minigrad.layers import LSTM, SRU, Dropout, Embedding, Linear, SRUpp, Stack
from minigrad.layers.recurrent import split_upstream

LAYERS = ("sru", "sru-proj", "srupp", "lstm")      # sru-proj: SRU++ without its attention
LABELS = {"sru": "SRU", "sru-proj": "projected SRU", "srupp": "SRU++", "lstm": "LSTM"}
# Settings of `model_of`, and the layers that some of them apply to.
SETTINGS = {"layer": "srupp", "width": 256, "ratio": 4, "layers": 4, "lstm_layers": 2, "heads": 1, "unroll": 128,
            "memory": None, "window": None, "attention_every": 1, "attention_last": None, "no_layer_norm": False,
            "highway_bias": -2.0, "dropout": 0.0, "attention_dropout": 0.0, "dtype": "float32", "seed": 0}
TAKEN_BY = {**dict.fromkeys(("heads", "memory", "window", "attention_every", "attention_last", "attention_dropout"),
                            ("srupp",)),
            "ratio": ("sru-proj", "srupp"), "no_layer_norm": ("sru-proj", "srupp"), "lstm_layers": ("lstm",),
            "layers": ("sru", "sru-proj", "srupp"), "highway_bias": ("sru", "sru-proj", "srupp")}


class LanguageModelCache(NamedTuple):
    """What backward reads: the cache of each part, the mask, and the shape of the logits."""

    embedding: Any
    in_drop: Any
    layers: Any
    out_drop: Any
    output: Any
    mask: Any
    shape: tuple


class LanguageModel(Layer):
    """The logits of each next symbol: y = layers(embedding(ids)) W + b, with dropout before the layers and after them.

    embedding   Embedding(vocab, d), entries of variance 1. (SRU++'s code has 1/d. Then the initial keys and queries
                are so small that attention is uniform, and the highway's x' is negligible compared with c: at our
                budgets every variant learns more slowly; docs/results/char_lm.md.)
    layers      a Stack of recurrent layers, the first one's input and the last one's output d wide
    output      Linear(d, vocab); W starts as U(-sqrt(3/d), sqrt(3/d)), b as zero, as in the code of SRU++

    forward(ids (B, L) integer, state=None, mask=None, rng=None) -> (logits (B, L, vocab), state), cache
    backward((dlogits, dstate), cache) -> (None, dstate0): ids have no gradient. The state is the Stack's. At a masked
    step the logits are 0 and the state does not change.
    Symbol by symbol: `stepping = model.begin(state)`, `logits (B, vocab), stepping = model.step(ids (B,), stepping)`.
    Raises ValueError and TypeError as its parts do.
    """

    recurrent = True

    def __init__(self, vocab, d, layers, dropout=0.0, *, rng=None, dtype=None):
        rng = generator(rng)
        self.embedding = Embedding(vocab, d, sigma=1.0, rng=rng, dtype=dtype)
        self.layers = Stack(*layers)
        self.output = Linear(d, vocab, rng=rng, dtype=dtype)
        a = float(np.sqrt(3 / d))
        self.output.W.value[...] = uniform(rng, (d, vocab), -a, a, dtype)
        self.drop = Dropout(dropout)

    def forward(self, ids, state=None, mask=None, rng=None):
        array_module(ids=ids, mask=mask)
        if ids.ndim != 2:
            raise ValueError(f"LanguageModel: ids has shape {ids.shape}; expected (batch, length)")
        x, embedding_cache = self.embedding.forward(ids, mask=mask)
        x, in_cache = self.drop.forward(x, rng=rng)
        (h, state), layers_cache = self.layers.forward(x, state=state, mask=mask, rng=rng)
        h, out_cache = self.drop.forward(h, rng=rng)
        logits, output_cache = self.output.forward(h)
        if mask is not None:
            logits = array_module(logits).where(mask[:, :, None], logits, 0)
        return (logits, state), LanguageModelCache(
            embedding_cache, in_cache, layers_cache, out_cache, output_cache, mask, logits.shape)

    def backward(self, upstream, cache):
        embedding_cache, in_cache, layers_cache, out_cache, output_cache, mask, shape = cache
        dlogits, dstate = split_upstream(upstream)
        dh = None
        if dlogits is not None:
            check_shape("LanguageModel", "dlogits", dlogits, shape)
            if mask is not None:
                dlogits = array_module(dlogits).where(mask[:, :, None], dlogits, 0)
            dh = self.drop.backward(self.output.backward(dlogits, output_cache), out_cache)
        dx, dstate0 = self.layers.backward((dh, dstate), layers_cache)
        self.embedding.backward(self.drop.backward(dx, in_cache), embedding_cache)
        return None, dstate0

    def initial_state(self, batch, dtype=None):
        """The state before a text."""
        return self.layers.initial_state(batch, dtype)

    def begin(self, state=None):
        """The `stepping` of the first `step`: after a state that forward returned, or at the start of a text."""
        return self.layers.begin(state)

    def step(self, ids, stepping=None):
        """(logits (B, vocab) of the next symbol, the next step's `stepping`) after one symbol (B,) of each text."""
        h, stepping = self.layers.step(self.embedding(ids), stepping)
        return self.output(h), stepping


# ---- building one ----------------------------------------------------------------------------------------


def attention_places(layers, every=1, last=None):
    """[bool]: which of `layers` layers have attention: each `every`-th one, or the `last` ones."""
    check_count("attention_places", "layers", layers)
    check_count("attention_places", "every", every)
    if last is None:
        return [(n + 1) % every == 0 for n in range(layers)]
    check_count("attention_places", "last", last, least=0)
    if every != 1:
        raise ValueError(f"attention_places: every is {every} and last is {last}; expected one of the two")
    return [n >= layers - last for n in range(layers)]


def build(layer, vocab, d, *, layers=4, projection=None, heads=1, window=None, memory=None, attention_every=1,
          attention_last=None, layer_norm=True, highway_bias=-2.0, dropout=0.0, attention_dropout=0.0, rng=None,
          dtype=None):
    """A LanguageModel of `layers` layers d wide.

    layer       "sru"; "sru-proj" (SRU++ without attention, layer norm kept); "srupp"; "lstm"
    projection  d' of "sru-proj" and "srupp"; default d // 4;  layer_norm: whether these two have one
    memory      slots of SRU++'s memory, through which no gradient flows (truncated backpropagation through time)
    dropout     before and after the layers, of the input of W_o, and of the recurrence (all layers but the last)

    Raises ValueError for wrong settings.
    """
    check_choice("build", "layer", layer, LAYERS)
    check_count("build", "layers", layers)
    rng, stack = generator(rng), []
    projection = d // 4 if projection is None else projection
    places = attention_places(layers, attention_every, attention_last)
    for n, attends in enumerate(places):
        common = {"rng": rng, "dtype": dtype}
        recurrent_dropout = dropout if n < layers - 1 else 0.0
        if layer == "lstm":
            stack.append(LSTM(d, d, **common))
        elif layer == "sru":
            stack.append(SRU(d, d, highway_bias=highway_bias, recurrent_dropout=recurrent_dropout, **common))
        else:
            stack.append(SRUpp(
                d, d, projection, heads if layer == "srupp" else 1, attention=attends and layer == "srupp",
                window=window, memory=memory, layer_norm=layer_norm, detach_memory=True,
                highway_bias=highway_bias, dropout=dropout, attention_dropout=attention_dropout,
                recurrent_dropout=recurrent_dropout, **common))
    return LanguageModel(vocab, d, stack, dropout, rng=rng, dtype=dtype)


def count_parameters(layer, vocab, d, *, layers=4, projection=None, attention_every=1, attention_last=None,
                     layer_norm=True, **settings):
    """The number of parameters of `build` with these settings, without building it; other settings are ignored."""
    check_choice("count_parameters", "layer", layer, LAYERS)
    p = d // 4 if projection is None else projection
    attending = sum(attention_places(layers, attention_every, attention_last)) if layer == "srupp" else 0
    each = {"lstm": 8 * d * d + 4 * d, "sru": 3 * d * d + 4 * d}.get(
        layer, d * p + 3 * p * d + 4 * d + 2 * p * layer_norm)
    return vocab * d + d * vocab + vocab + layers * each + attending * (2 * p * p + 1)


def width_for(layer, parameters, vocab, *, ratio=4, heads=1, **settings):
    """The width d whose model has the number of parameters nearest to `parameters`; projection = d // ratio."""
    grain = ratio * heads if layer in ("sru-proj", "srupp") else 1
    widths = range(grain, 65536, grain)

    def count(d):
        return count_parameters(layer, vocab, d, **{**settings, "projection": d // ratio})

    low, high = 0, len(widths) - 1
    while low < high:                                                        # the count grows with d
        middle = (low + high) // 2
        low, high = (middle + 1, high) if count(widths[middle]) < parameters else (low, middle)
    return min(widths[max(low - 1, 0):low + 1], key=lambda d: abs(count(d) - parameters))


# ---- from a task's settings ------------------------------------------------------------------------------

def sizes(settings):
    """Keywords of `build` and `count_parameters` on which the number of parameters depends."""
    return {"layers": settings["lstm_layers" if settings["layer"] == "lstm" else "layers"],
            "projection": settings["width"] // settings["ratio"], "attention_every": settings["attention_every"],
            "attention_last": settings["attention_last"], "layer_norm": not settings["no_layer_norm"]}


def size_of(settings, vocab):
    """The number of parameters of `model_of`."""
    return count_parameters(settings["layer"], vocab, settings["width"], **sizes(settings))


def model_of(settings, vocab, window=None):
    """The model of the settings, {key of SETTINGS: value}; a `window` given here replaces theirs."""
    memory = settings["memory"]
    if memory is None and settings["window"] is None:
        memory = settings["unroll"]                 # with a window: the layer's default, window - 1
    own = {key: settings[key] for key in ("heads", "highway_bias", "dropout", "attention_dropout", "dtype")}
    return build(settings["layer"], vocab, settings["width"], memory=memory, window=window or settings["window"],
                 rng=np.random.default_rng([settings["seed"], 1]), **own, **sizes(settings))
