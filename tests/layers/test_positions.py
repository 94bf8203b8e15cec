"""Sinusoidal and learned positions: values by hand, gradients, and what the contract table does not see."""

import math

import numpy as np
import pytest
from helpers import assert_close, assert_identical

from minigrad.layers import LearnedPositions, SinusoidalPositions

MASK = np.array([[1, 1, 1, 0], [1, 0, 1, 1]], bool)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


# ---- sinusoidal ------------------------------------------------------------------------------------------

def rows(d, L):
    return SinusoidalPositions(d)(np.zeros((1, L, d)))[0]


def test_the_first_position_is_0_1_0_1():
    assert_identical(rows(6, 1), np.array([[0, 1, 0, 1, 0, 1.0]]))


@pytest.mark.parametrize("d", [1, 2, 5, 8])
def test_sinusoidal_is_the_formula(d):
    expected = [[(math.cos if n % 2 else math.sin)(t / 10000 ** (2 * (n // 2) / d)) for n in range(d)]
                for t in range(50)]
    assert_close(rows(d, 50), np.array(expected))


def test_a_step_is_a_rotation():
    """(sin, cos) of t + k are those of t turned by k's angle, whatever t is."""
    p, angle = rows(4, 20), 5 / 100
    sin, cos = p[:15, 2], p[:15, 3]
    assert_close(p[5:, 2:], np.stack([sin * math.cos(angle) + cos * math.sin(angle),
                                      cos * math.cos(angle) - sin * math.sin(angle)], axis=1))


def test_far_positions_are_exact_in_single_precision():
    x = np.zeros((1, 20000, 4), "float32")
    y = SinusoidalPositions(4)(x)
    assert y.dtype == np.float32
    assert_identical(y[0], rows(4, 20000).astype("float32"))
    assert y[0, -1, 0] == pytest.approx(math.sin(19999), abs=1e-7)


def test_sinusoidal_is_added_and_dx_is_dy():
    layer, x, dy = SinusoidalPositions(4), draw(2, 5, 4), draw(2, 5, 4, seed=1)
    y, cache = layer.forward(x)
    assert_identical(y, x + rows(4, 5))
    assert_identical(layer.backward(dy, cache), dy)
    assert layer.parameters() == []


# ---- learned ---------------------------------------------------------------------------------------------

def learned(length=6, d=3):
    layer = LearnedPositions(length, d, rng=0, dtype="float64")
    layer.P.value += draw(length, d, seed=2)
    return layer


def test_rows_beyond_the_sequence_get_no_gradient():
    layer, dy = learned(), draw(2, 4, 3, seed=1)
    layer.backward(dy, layer.forward(draw(2, 4, 3))[1])
    assert not layer.P.grad[4:].any()
    assert_close(layer.P.grad[:4], dy[0] + dy[1])


def test_a_padded_position_gives_no_gradient():
    layer, dy = learned(), draw(2, 4, 3, seed=1)
    layer.backward(np.where(MASK[:, :, None], dy, np.nan), layer.forward(draw(2, 4, 3), mask=MASK)[1])
    assert_close(layer.P.grad[:4], (dy * MASK[:, :, None]).sum(axis=0))
    assert not layer.P.grad[4:].any()


def test_what_stands_at_a_padded_position_reaches_no_other():
    layer, x = learned(), draw(2, 4, 3)
    got = layer(np.where(MASK[:, :, None], x, np.nan), mask=MASK)
    assert_identical(got[MASK], layer(x)[MASK])


def test_learned_starts_as_bert_does():
    P = LearnedPositions(500, 64, rng=0).P.value
    assert P.dtype == np.float32
    assert P.std() == pytest.approx(0.02, rel=0.02)
    assert abs(P.mean()) < 5e-4


# ---- bad input -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("layer", "x", "keywords", "error", "sentence"), [
    (learned(), np.ones((2, 7, 3)), {}, ValueError, r"LearnedPositions: x has shape \(2, 7, 3\); expected at most 6"),
    (learned(), np.ones((2, 4, 2)), {}, ValueError, r"LearnedPositions: x has shape \(2, 4, 2\); expected \(batch"),
    (learned(), np.ones((2, 4, 3), int), {}, TypeError, "LearnedPositions: x has dtype int64"),
    (learned(), np.ones((2, 4, 3)), {"mask": MASK[:1]}, ValueError, r"mask has shape \(1, 4\); expected \(2, 4\)"),
    (learned(), np.ones((2, 4, 3)), {"mask": MASK * 1.0}, TypeError, "LearnedPositions: mask has dtype float64"),
    (SinusoidalPositions(3), np.ones((2, 4, 1)), {}, ValueError, r"SinusoidalPositions: x has shape \(2, 4, 1\)"),
    (SinusoidalPositions(3), np.ones((2, 4, 3), int), {}, TypeError, "SinusoidalPositions: x has dtype int64"),
])
def test_bad_input(layer, x, keywords, error, sentence):
    with pytest.raises(error, match=sentence):
        layer.forward(x, **keywords)


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: SinusoidalPositions(0), "SinusoidalPositions: d is 0"),
    (lambda: LearnedPositions(0, 3), "LearnedPositions: length is 0"),
    (lambda: LearnedPositions(4, 2.0), "LearnedPositions: d is 2.0"),
], ids=["no width", "no length", "a fraction"])
def test_bad_settings(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


