"""The contract table: every public layer with inputs to try it on. test_contract.py runs each row through each rule."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from minigrad import Residual, Sequential
from minigrad.layers import LSTM, RRALSTM, Dropout, Linear, Stack
from minigrad.tree import tree_map
from models.regressor import SequenceRegressor

B, L, D, H = 3, 7, 4, 5


@dataclass
class Case:
    """One row of the table.

    make        f(dtype, rng) -> the layer
    shape       of x, batch first
    state       f(batch) -> a state of zeros, for a recurrent layer
    masks       whether a mask matters to it (it is handed one then)
    draws       whether it draws random numbers
    """

    name: str
    make: Any
    shape: tuple = (B, L, D)
    state: Any = None
    masks: bool = False
    draws: bool = False

    def layer(self, dtype="float64"):
        return self.make(dtype, np.random.default_rng(3))

    def x(self, seed=0, dtype="float64"):
        return np.random.default_rng(seed).standard_normal(self.shape).astype(dtype)

    def keywords(self, seed=1, dtype="float64"):
        """state, mask and rng, as far as the layer uses them."""
        rng = np.random.default_rng(seed)
        found = {}
        if self.state:
            found["state"] = tree_map(lambda zeros: rng.standard_normal(zeros.shape).astype(dtype), self.state(B))
        if self.masks:
            found["mask"] = mask_kinds()["gaps"]
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


def rra(name, K, **settings):
    offset = settings.get("offset", 2)
    return Case(name, lambda dtype, rng: RRALSTM(D, H, K, rng=rng, dtype=dtype, **settings), masks=True,
                state=rra_state(K, offset))


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
    Case("Stack", lambda dtype, rng: Stack(LSTM(D, 3, rng=rng, dtype=dtype), RRALSTM(3, H, 2, rng=rng, dtype=dtype)),
         masks=True, state=lambda batch: (lstm_state(batch, 3), rra_state(2, 2)(batch))),
    Case("Sequential", lambda dtype, rng: Sequential(
        Linear(D, 6, rng=rng, dtype=dtype), Dropout(0.3), Linear(6, 2, rng=rng, dtype=dtype)), draws=True),
    Case("Residual", lambda dtype, rng: Residual(Linear(D, D, rng=rng, dtype=dtype))),
    Case("SequenceRegressor", lambda dtype, rng: SequenceRegressor(
        RRALSTM(D, H, 2, rng=rng, dtype=dtype), H, 2, rng=rng, dtype=dtype), masks=True),
]
