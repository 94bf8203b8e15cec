"""Linear and Dropout: what the contract table does not see."""

import numpy as np
import pytest

from minigrad.layers import Dropout, Linear

X = np.ones((200, 500))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_a_share_and_the_mean(p):
    y, (scaled_mask, shape) = Dropout(p).forward(X, rng=np.random.default_rng(0))
    kept = y != 0
    assert kept.mean() == pytest.approx(1 - p, abs=0.01)
    np.testing.assert_allclose(y[kept], 1 / (1 - p))
    assert y.mean() == pytest.approx(1, abs=0.03)
    dx = Dropout(p).backward(3 * X, (scaled_mask, shape))
    np.testing.assert_allclose(dx, 3 * y)


def test_dropout_is_the_identity_in_evaluation_and_at_p_0():
    for layer, rng in [(Dropout(0.5), None), (Dropout(0.0), np.random.default_rng(0))]:
        y, cache = layer.forward(X, rng=rng)
        np.testing.assert_array_equal(y, X)
        np.testing.assert_array_equal(layer.backward(X, cache), X)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan"), "half"])
def test_dropout_refuses_other_p(p):
    with pytest.raises(ValueError, match="Dropout: p is"):
        Dropout(p)


def test_dropout_refuses_integers():
    with pytest.raises(TypeError, match="Dropout: x has dtype int64; expected floating-point"):
        Dropout(0.5).forward(np.ones((2, 2), int))


def test_linear_is_the_formula():
    layer = Linear(3, 2, rng=0, dtype="float64")
    layer.b.value[...] = [1, 2]
    x = np.random.default_rng(0).standard_normal((4, 5, 3))
    np.testing.assert_allclose(layer(x), np.einsum("bld,dh->blh", x, layer.W.value) + np.array([1, 2]))
    limit = np.sqrt(6 / 5)
    assert np.abs(Linear(3, 2, rng=0).W.value).max() <= limit
    assert np.abs(Linear(300, 200, rng=0).W.value).max() == pytest.approx(np.sqrt(6 / 500), rel=0.01)


@pytest.mark.parametrize(("x", "error", "sentence"), [
    (np.ones((2, 4)), ValueError, r"Linear: x has shape \(2, 4\); expected \(..., 3\)"),
    (np.ones((2, 3), int), TypeError, "Linear: x has dtype int64"),
    (np.float64(1), TypeError, "x is a float64; expected a NumPy or CuPy array"),
    ([[1.0, 2.0, 3.0]], TypeError, "x is a list"),
])
def test_linear_refuses(x, error, sentence):
    with pytest.raises(error, match=sentence):
        Linear(3, 2).forward(x)
