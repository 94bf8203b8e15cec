"""The contract table: every public layer with inputs to try it on. test_contract.py runs each row through each rule."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minigrad import Residual, Sequential
from minigrad.layers import (
    GRU,
    IRNN,
    LSTM,
    RNN,
    RRALSTM,
    RWA,
    SRU,
    URNN,
    Bidirectional,
    Dropout,
    Embedding,
    FeedForward,
    LayerNorm,
    LearnedPositions,
    Linear,
    MultiHeadAttention,
    SinusoidalPositions,
    SRUpp,
    Stack,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)
from minigrad.tree import tree_map
from models.classifier import SequenceClassifier, TextClassifier
from models.regressor import SequenceRegressor
from models.srupp_lm import LanguageModel
from models.tsdae import TSDAE

B, L, D, H = 3, 7, 4, 5


@dataclass
class Case:
    """One row of the table.

    make        f(dtype, rng) -> the layer
    shape       of x, batch first
    state       f(batch) -> a state of zeros, for a recurrent layer
    masks       whether a mask matters to it (it is handed one then), as the keyword mask_name
    tied        whether a Parameter has several uses: its gradient's sum is then the same but for rounding
    ids_of      further inputs of integers below `ids`, by name
    draws       whether it draws random numbers
    ids         for a layer that is given integers: they are below this number
    segments    whether a recurrent layer can be continued: it does not look ahead
    own_start   whether no state is not one of zeros, but what the layer's initial_state writes out
    extra       shapes of further inputs by name; a name with "mask" in it is boolean
    flags       further keywords, as they are
    """

    name: str
    make: Any
    shape: tuple = (B, L, D)
    state: Any = None
    masks: bool = False
    mask_name: str = "mask"
    tied: bool = False
    draws: bool = False
    ids: int = 0
    segments: bool = True
    own_start: bool = False
    extra: dict = field(default_factory=dict)
    ids_of: dict = field(default_factory=dict)
    flags: dict = field(default_factory=dict)

    def layer(self, dtype="float64"):
        return self.make(dtype, np.random.default_rng(3))

    def x(self, seed=0, dtype="float64"):
        if self.ids:
            return np.random.default_rng(seed).integers(0, self.ids, self.shape)
        return np.random.default_rng(seed).standard_normal(self.shape).astype(dtype)

    def keywords(self, seed=1, dtype="float64"):
        """state, mask and rng, as far as the layer uses them."""
        rng = np.random.default_rng(seed)
        found = {}
        if self.state:
            found["state"] = tree_map(lambda zeros: np.ones_like(zeros) if zeros.dtype == bool else
                                      rng.standard_normal(zeros.shape).astype(dtype), self.state(B))
        for name, shape in self.extra.items():
            found[name] = rng.random(shape) < 0.7 if "mask" in name else rng.standard_normal(shape).astype(dtype)
        for name, shape in self.ids_of.items():
            found[name] = rng.integers(0, self.ids, shape)
        found.update(self.flags)
        if self.masks:
            found[self.mask_name] = mask_kinds()["gaps"]
        if self.draws:
            found["rng"] = 5
        return found


def mask_kinds():
    """{kind: (B, L) mask} of every kind of mask that the design lists; the last sample has the most real steps."""
    right = np.ones((B, L), bool)
    right[0, 3:] = right[1, 5:] = False
    left = right[:, ::-1].copy()
    gaps = np.array([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]], bool)
    none = gaps.copy()
    none[1] = False
    return {"right padding": right, "left padding": left, "gaps": gaps, "a sample with no real step": none,
            "all real": np.ones((B, L), bool), "no real step at all": np.zeros((B, L), bool)}


def lstm_state(batch, h=H):
    return np.zeros((batch, h)), np.zeros((batch, h))


def rra_state(K, offset, h=H):
    return lambda batch: (np.zeros((batch, max(1, K + offset - 1), h)), np.zeros((batch, h)))


def rwa_state(batch, h=H):
    return np.zeros((batch, h)), np.zeros((batch, h)), np.zeros((batch, h))


def sru_state(batch, h=H):
    return (np.zeros((batch, h)),)


def srupp_state(slots, d=D, h=H):
    return lambda batch: (np.zeros((batch, h)), np.zeros((batch, slots, d)), np.zeros((batch, slots), bool))


def rnn(name, residual=None, **settings):
    """RNN with its bias off zero; the state is h_{t-1}, or with a shortcut the last `residual` states."""
    def make(dtype, rng):
        layer = RNN(D, H, residual, rng=rng, dtype=dtype, **settings)
        layer.b.value += 0.3 * rng.standard_normal(H).astype(dtype)
        return layer
    return Case(name, make, masks=True,
                state=lambda batch: (np.zeros((batch, residual, H) if residual else (batch, H)),))


def irnn(name):
    """IRNN off its first values, where W is the identity, V nearly nothing and b zero."""
    def make(dtype, rng):
        layer = IRNN(D, H, rng=rng, dtype=dtype)
        for parameter, sigma in ((layer.V, 0.5), (layer.W, 0.3), (layer.b, 0.3)):
            parameter.value += sigma * rng.standard_normal(parameter.value.shape).astype(dtype)
        return layer
    return Case(name, make, masks=True, state=lambda batch: (np.zeros((batch, H)),))


def sru(name, d=D, **settings):
    return Case(name, lambda dtype, rng: SRU(d, H, rng=rng, dtype=dtype, **settings), shape=(B, L, d), masks=True,
                state=sru_state, draws="recurrent_dropout" in settings)


def urnn(name):
    """URNN with its bias wide enough that modReLU turns some units off in some steps and scales the others."""
    def make(dtype, rng):
        layer = URNN(D, H, rng=rng, dtype=dtype)
        layer.b.value[...] = np.linspace(-1.5, 0.3, H)
        return layer
    return Case(name, make, masks=True, state=lambda batch: (np.zeros((batch, 2 * H)),), own_start=True)


def srupp(name, slots=0, d=D, p=4, segments=True, **settings):
    """SRU++ with alpha off zero, where the attention counts; `slots` of memory in its state."""
    def make(dtype, rng):
        layer = SRUpp(d, H, p, rng=rng, dtype=dtype, **settings)
        if layer.attention:
            layer.alpha.value[...] = 0.7
        return layer
    return Case(name, make, shape=(B, L, d), masks=True, state=srupp_state(slots, d), segments=segments,
                draws="dropout" in settings)


def rra(name, K, **settings):
    offset = settings.get("offset", 2)
    return Case(name, lambda dtype, rng: RRALSTM(D, H, K, rng=rng, dtype=dtype, **settings), masks=True,
                state=rra_state(K, offset))


def tsdae(dtype, rng, **settings):
    """A small model; other tables (tests/test_tsdae_model.py) try its settings."""
    return TSDAE(6, D, 2, 5, layers=1, length=L, dropout=0.2, attention_dropout=0.2, rng=rng, dtype=dtype, **settings)


TABLE = [
    Case("Linear", lambda dtype, rng: Linear(D, H, rng=rng, dtype=dtype)),
    Case("Linear without bias", lambda dtype, rng: Linear(D, H, bias=False, rng=rng, dtype=dtype), shape=(B, D)),
    Case("Dropout", lambda dtype, rng: Dropout(0.4), draws=True),
    Case("Dropout in evaluation", lambda dtype, rng: Dropout(0.4)),
    Case("LSTM", lambda dtype, rng: LSTM(D, H, rng=rng, dtype=dtype), masks=True, state=lstm_state),
    rra("RRALSTM", 3),
    rra("RRALSTM, window longer than the sequence", 9, normalize="softmax"),
    rra("RRALSTM, softmax, offset 1", 3, normalize="softmax", offset=1),
    rra("RRALSTM, K = 1, offset 1", 1, offset=1),
    rra("RRALSTM, K = 0", 0),
    rra("RRALSTM, offset 3", 2, offset=3),
    Case("GRU", lambda dtype, rng: GRU(D, H, rng=rng, dtype=dtype), masks=True, state=sru_state),
    rnn("RNN"),
    rnn("RNN, residual", 3),
    rnn("RNN, linear residual", 2, shortcut="linear"),
    rnn("RNN, attention", 4, attention=True),
    rnn("RNN, attention, softmax, window longer than the sequence", 9, attention=True, normalize="softmax"),
    irnn("IRNN"),
    Case("Stack", lambda dtype, rng: Stack(LSTM(D, 3, rng=rng, dtype=dtype), RRALSTM(3, H, 2, rng=rng, dtype=dtype)),
         masks=True, state=lambda batch: (lstm_state(batch, 3), rra_state(2, 2)(batch))),
    Case("LayerNorm", lambda dtype, rng: LayerNorm(D, dtype=dtype)),
    Case("Embedding", lambda dtype, rng: Embedding(6, D, padding_id=2, rng=rng, dtype=dtype), shape=(B, L), ids=6,
         masks=True),
    Case("SinusoidalPositions", lambda dtype, rng: SinusoidalPositions(D)),
    Case("LearnedPositions", lambda dtype, rng: LearnedPositions(L + 1, D, rng=rng, dtype=dtype)),
    Case("MultiHeadAttention", lambda dtype, rng: MultiHeadAttention(D, 2, 6, rng=rng, dtype=dtype), masks=True),
    Case("MultiHeadAttention, causal", lambda dtype, rng: MultiHeadAttention(D, 2, rng=rng, dtype=dtype), masks=True,
         flags={"causal": True}),
    Case("MultiHeadAttention, memory, dropout", lambda dtype, rng: MultiHeadAttention(
        D, 2, dropout=0.3, rng=rng, dtype=dtype), draws=True, extra={"memory": (B, 6, D), "mask": (B, 6)}),
    Case("MultiHeadAttention, memory of one row", lambda dtype, rng: MultiHeadAttention(D, 2, rng=rng, dtype=dtype),
         extra={"memory": (B, 1, D)}),
    Case("FeedForward", lambda dtype, rng: FeedForward(D, 7, rng=rng, dtype=dtype)),
    Case("FeedForward, gelu_tanh", lambda dtype, rng: FeedForward(D, 7, "gelu_tanh", rng=rng, dtype=dtype)),
    Case("FeedForward, relu", lambda dtype, rng: FeedForward(D, 7, "relu", rng=rng, dtype=dtype)),
    Case("TransformerEncoderLayer", lambda dtype, rng: TransformerEncoderLayer(
        D, 2, 7, rng=rng, dtype=dtype), masks=True),
    Case("TransformerEncoderLayer, pre, dropout", lambda dtype, rng: TransformerEncoderLayer(
        D, 2, 7, "pre", dropout=0.2, attention_dropout=0.2, rng=rng, dtype=dtype), masks=True, draws=True),
    Case("TransformerDecoderLayer", lambda dtype, rng: TransformerDecoderLayer(
        D, 2, 7, rng=rng, dtype=dtype), masks=True, extra={"memory": (B, 6, D), "memory_mask": (B, 6)}),
    Case("TransformerDecoderLayer, pre, one row", lambda dtype, rng: TransformerDecoderLayer(
        D, 2, 7, "pre", "relu", dropout=0.2, rng=rng, dtype=dtype), masks=True, draws=True,
        extra={"memory": (B, 1, D)}),
    Case("RWA", lambda dtype, rng: RWA(D, H, rng=rng, dtype=dtype), masks=True, state=rwa_state,
         own_start=True),
    urnn("URNN"),
    sru("SRU"),
    sru("SRU, d = h", d=H, rescale=True),
    sru("SRU, projection, tanh", projection=3, activation="tanh"),
    sru("SRU, d = h, projection, dropout", d=H, projection=3, recurrent_dropout=0.4),
    srupp("SRUpp"),
    srupp("SRUpp, d = h, two heads, window", slots=2, d=H, heads=2, window=3),
    srupp("SRUpp, memory shorter than the window, norm of the input", slots=2, window=5, memory=2, cell_norm="pre",
          segments=False),
    srupp("SRUpp, no inner norm, norm of the output", layer_norm=False, cell_norm="post", activation="tanh"),
    srupp("SRUpp without attention", attention=False, d=H, rescale=True),
    srupp("SRUpp, not causal", causal=False, segments=False),
    srupp("SRUpp, every dropout", slots=1, window=2, dropout=0.3, attention_dropout=0.3, recurrent_dropout=0.3),
    Case("Bidirectional", lambda dtype, rng: Bidirectional(
        RRALSTM(D, H, 2, rng=rng, dtype=dtype), SRU(D, 3, rng=rng, dtype=dtype)), masks=True, segments=False,
        state=lambda batch: (rra_state(2, 2)(batch), sru_state(batch, 3))),
    Case("LanguageModel", lambda dtype, rng: LanguageModel(
        6, D, [SRUpp(D, D, 4, window=3, rng=rng, dtype=dtype), LSTM(D, D, rng=rng, dtype=dtype)], dropout=0.3,
        rng=rng, dtype=dtype), shape=(B, L), ids=6, masks=True, draws=True,
        state=lambda batch: (srupp_state(2, D, D)(batch), lstm_state(batch, D))),
    Case("Sequential", lambda dtype, rng: Sequential(
        Linear(D, 6, rng=rng, dtype=dtype), Dropout(0.3), Linear(6, 2, rng=rng, dtype=dtype)), draws=True),
    Case("Residual", lambda dtype, rng: Residual(Linear(D, D, rng=rng, dtype=dtype))),
    Case("SequenceRegressor", lambda dtype, rng: SequenceRegressor(
        RRALSTM(D, H, 2, rng=rng, dtype=dtype), H, 2, rng=rng, dtype=dtype), masks=True),
    Case("SequenceClassifier", lambda dtype, rng: SequenceClassifier(
        RRALSTM(D, H, 2, rng=rng, dtype=dtype), H, 3, dropout=0.3, rng=rng, dtype=dtype), masks=True, draws=True),
    Case("SequenceClassifier, both ways, last", lambda dtype, rng: SequenceClassifier(Bidirectional(
        LSTM(D, 3, rng=rng, dtype=dtype), SRU(D, 2, rng=rng, dtype=dtype)), 5, 3, rng=rng, dtype=dtype),
        masks=True),
    Case("TextClassifier", lambda dtype, rng: TextClassifier(
        6, D, Bidirectional(RRALSTM(D, 3, 2, rng=rng, dtype=dtype), LSTM(D, 3, rng=rng, dtype=dtype)), 6, rng=rng,
        dtype=dtype), shape=(B, L), ids=6, masks=True),
    Case("TSDAE", lambda dtype, rng: tsdae(dtype, rng, pooling="mean"), shape=(B, L), ids=6, draws=True,
         masks=True, mask_name="noisy_mask", tied=True, ids_of={"clean": (B, 5)}),
    Case("TSDAE's encoder", lambda dtype, rng: tsdae(dtype, rng, pooling="max").encoder, shape=(B, L), ids=6,
         draws=True, masks=True),
    Case("TSDAE's decoder", lambda dtype, rng: tsdae(dtype, rng, norm="post").decoder, shape=(B, L), ids=6, draws=True,
         tied=True, extra={"s": (B, D)}),
]
