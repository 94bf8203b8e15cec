"""What the recurrent layers share and the contract table does not see: blocks of steps, stepping, starts, bad input."""

import numpy as np
import pytest
from cases import B, D, H, L
from helpers import all_gradients, assert_close, upstream

from minigrad.layers import GRU, IRNN, LSTM, RNN, RRALSTM, RWA, SRU, URNN, Bidirectional, Stack
from minigrad.layers.recurrent import Recurrent

FAST = {"LSTM": LSTM, "RRALSTM": lambda *sizes, **settings: RRALSTM(*sizes, 3, **settings), "RNN": RNN,
        "RNN, residual": lambda *sizes, **settings: RNN(*sizes, 3, **settings),
        "RNN, linear": lambda *sizes, **settings: RNN(*sizes, 2, "linear", **settings),
        "RNN, attention": lambda *sizes, **settings: RNN(*sizes, 4, attention=True, **settings),
        "IRNN": IRNN, "RWA": RWA, "URNN": URNN}
FAMILIES = {**FAST, "GRU": GRU, "SRU": SRU}
LEARNED_STARTS = ("RWA", "URNN")


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("T", [4, 5, 6, 7, 8, 9, 19, 20, 21, 67])
@pytest.mark.parametrize("name", FAST)
def test_the_fast_loop_equals_the_plain_one_around_the_ends_of_blocks(name, T):
    """Products are taken a block of steps at a time: 5 of RWA, 8 of URNN, 20 of LSTM and RRALSTM."""
    layer, x, mask = FAST[name](D, H, rng=0, dtype="float64"), numbers(2, T, D), np.ones((2, T), bool)
    mask[0, T // 2:], x[0, T // 2:] = False, np.nan
    dout = upstream(layer(x, mask=mask))
    fast = all_gradients(layer, x, {"mask": mask}, dout)
    layer.fast = False
    assert_close(fast, all_gradients(layer, x, {"mask": mask}, dout))


@pytest.mark.parametrize("name", FAMILIES)
def test_step_by_step_equals_the_whole(name):
    layer, x = FAMILIES[name](D, H, rng=0, dtype="float64"), numbers(B, L, D)
    y, stepping = layer(x)[0], layer.begin()
    for t in range(L):
        y_t, stepping = layer.step(x[:, t], stepping)
        assert_close(y_t, y[:, t])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_initial_state_has_the_dtype_asked_for(name):
    layer = FAMILIES[name](D, H, rng=0, dtype="float32")
    for dtype, expected in (("float64", "float64"), (None, "float32")):
        assert {entry.dtype for entry in layer.initial_state(B, dtype)} == {np.dtype(expected)}


@pytest.mark.parametrize("name", LEARNED_STARTS)
def test_a_learned_start_in_a_composite(name):
    for layer in (Stack(FAMILIES[name](D, H, rng=0), LSTM(2 * H if name == "URNN" else H, 3, rng=1)),
                  Bidirectional(FAMILIES[name](D, H, rng=0), FAMILIES[name](D, 3, rng=1))):
        x = numbers(B, L, D).astype("float32")
        assert_close(layer(x), layer(x, state=layer.initial_state(B)), 0)


@pytest.mark.parametrize("name", FAST)
def test_memory_is_linear_in_the_length(name):
    def cache_bytes(T):
        _, cache = FAST[name](2, 16, rng=0).forward(np.zeros((8, T, 2), "float32"))
        return sum(array.nbytes for array in cache.loop if array is not None)
    assert cache_bytes(400) / cache_bytes(200) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("make", [lambda K: RRALSTM(2, 16, K, rng=0), lambda K: RNN(2, 16, K, attention=True, rng=0)])
def test_a_window_is_never_copied(make):
    def cache_bytes(K):
        _, cache = make(K).forward(np.zeros((8, 200, 2), "float32"))
        return sum(array.nbytes for array in cache.loop if array is not None)
    assert cache_bytes(100) - cache_bytes(10) == 90 * (8 * 16 * 4)           # the longer past, nothing else


# ---- bad input -------------------------------------------------------------------------------------------

X = np.zeros((2, 3, 4))


def bad_first_entry(layer, batch):
    return tuple(np.zeros((batch, *shape[1:])) for shape in layer.state_shapes(2).values())


class Wrong(LSTM):
    """Forgets c in what its cell returns, or b among its cell's gradients."""

    def __init__(self, forgets):
        super().__init__(4, 5, fast=False, dtype="float64")
        self.forgets = forgets

    def cell(self, x, state, W, U, b):
        (y, (h, c)), cache = super().cell(x, state, W, U, b)
        return (y, (h,) if self.forgets == "c" else (h, c)), cache

    def cell_backward(self, upstream, cache, W, U, b):
        dx, dstate, (*gradients, _) = super().cell_backward(upstream, cache, W, U, b)
        return dx, dstate, gradients


def test_a_cell_that_returns_the_wrong_number_of_things():
    with pytest.raises(ValueError, match=r"Wrong.cell: the new state is 1 entries; expected a tuple \(h, c\)"):
        Wrong("c").forward(X)
    _, cache = Wrong("b").forward(X)
    with pytest.raises(ValueError, match=r"Wrong.cell_backward: the weights' gradients is 2 entries; .* \(W, U, b\)"):
        Wrong("b").backward((np.zeros((2, 3, 5)), None), cache)


def test_a_family_without_a_cell_says_so():
    with pytest.raises(NotImplementedError, match="Recurrent has no cell"):
        Recurrent().cell(X, ())
