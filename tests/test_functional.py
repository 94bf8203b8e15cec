"""Functions without parameters: values, gradients, extremes."""

import numpy as np
import pytest
import scipy.stats

from minigrad import functional, gradcheck

FUNCTIONS = {
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True),
    "sum_normalize": lambda x: x / x.sum(axis=-1, keepdims=True),
    "tanh": np.tanh,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": lambda x: x * scipy.stats.norm.cdf(x),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_gradients_and_dtype(name):
    function, x = getattr(functional, name), np.random.default_rng(2).standard_normal((3, 5))
    np.testing.assert_allclose(function.forward(x)[0], FUNCTIONS[name](x), rtol=1e-13)
    report = gradcheck(function, (x,))
    assert report.ok, report
    y, cache = function.forward(x.astype("float32"))
    assert y.dtype == function.backward(y, cache).dtype == np.float32


def test_every_function_is_listed():
    listed = {name for name, value in vars(functional).items() if hasattr(value, "forward")}
    assert listed == {*FUNCTIONS, "softmax_attention"}           # that one is in test_attention.py


def test_softmax_of_huge_values():
    y, _ = functional.softmax.forward(np.array([[1e4, -1e4], [1e308, 1e308], [-1e308, 0]]))
    np.testing.assert_array_equal(y, [[1, 0], [0.5, 0.5], [0, 1]])


def test_relu_shows_nan_and_takes_the_subgradient_zero():
    x = np.array([-1.0, 0.0, 2.0, np.nan])
    y, cache = functional.relu.forward(x)
    np.testing.assert_array_equal(y, [0, 0, 2, np.nan])
    np.testing.assert_array_equal(functional.relu.backward(np.ones(4), cache)[:3], [0, 0, 1])


def test_sum_normalize_ignores_the_scale():
    w = np.array([1.0, 2.0, -0.5])
    _, cache = functional.sum_normalize.forward(w)
    dw = functional.sum_normalize.backward(np.array([3.0, -1.0, 2.0]), cache)
    assert abs((w * dw).sum()) < 1e-15
    np.testing.assert_allclose(functional.sum_normalize.forward(-7 * w)[0], functional.sum_normalize.forward(w)[0])
