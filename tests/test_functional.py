"""Functions without parameters: values, gradients, extremes."""

import numpy as np
import pytest
import scipy.stats
from oracles import gradient, pytorch, tensor, torch_backward

from minigrad import functional, gradcheck

FUNCTIONS = {
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True),
    "sum_normalize": lambda x: x / x.sum(axis=-1, keepdims=True),
    "tanh": np.tanh,
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
    assert listed == {*FUNCTIONS, "softmax_attention", "plain_attention"}    # these two are in test_attention.py


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


# ---- GELU ------------------------------------------------------------------------------------------------

EXTREMES = np.array([-1e4, -30, 0, 30, 1e4])


def slope(name, x):
    function = getattr(functional, name)
    y, cache = function.forward(x)
    return function.backward(np.ones_like(y), cache)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_at_extremes(name, dtype):
    """x and slope 1 on the right, 0 and slope 0 on the left; nothing overflows on the way."""
    x = EXTREMES.astype(dtype)
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        y, dx = getattr(functional, name).forward(x)[0], slope(name, x)
    assert y.dtype == dx.dtype == dtype
    np.testing.assert_array_equal(y, [0, 0, 0, 30, 1e4])
    np.testing.assert_allclose(dx, [0, 0, 0.5, 1, 1], rtol=0, atol=1e-190)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_of_single_precision_is_rounded_only(name):
    x = np.linspace(-9, 9, 400).astype("float32")
    wide = x.astype("float64")
    np.testing.assert_allclose(slope(name, x), slope(name, wide), rtol=0, atol=2e-6)
    np.testing.assert_allclose(
        getattr(functional, name).forward(x)[0], getattr(functional, name).forward(wide)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_gelu_equals_torchs(name, approximate):
    torch = pytorch()
    x = np.concatenate([np.linspace(-9, 9, 400), EXTREMES])
    leaf, dy = tensor(x), np.random.default_rng(0).standard_normal(x.shape)
    expected = torch.nn.functional.gelu(leaf, approximate=approximate)
    torch_backward([expected], [dy])
    y, cache = getattr(functional, name).forward(x)
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(
        getattr(functional, name).backward(dy, cache), gradient(leaf), rtol=1e-13, atol=1e-13)


def test_the_slope_of_gelu_tanh_is_its_own_and_not_that_of_gelu():
    """Its formula's derivative by a complex step, exact to rounding."""
    x = np.linspace(-9, 9, 400)
    np.testing.assert_allclose(slope("gelu_tanh", x), FUNCTIONS["gelu_tanh"](x + 1e-30j).imag / 1e-30, rtol=0,
                               atol=1e-14)
    assert np.abs(slope("gelu_tanh", x) - slope("gelu", x)).max() == pytest.approx(1e-3, rel=0.5)


