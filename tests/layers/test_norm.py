"""LayerNorm against torch, and what the contract table does not see."""

import numpy as np
import pytest
from helpers import assert_close, assert_identical, grads
from oracles import gradient, pytorch, tensor, torch_backward

from minigrad.layers import LayerNorm
from minigrad.layers.norm import normalize, normalize_backward


def layer_of(d, eps=1e-5, dtype="float64"):
    layer, rng = LayerNorm(d, eps, dtype=dtype), np.random.default_rng(4)
    layer.gain.value += 0.3 * rng.standard_normal(d)
    layer.bias.value += 0.3 * rng.standard_normal(d)
    return layer


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("eps", [1e-5, 1.0])
@pytest.mark.parametrize("shape", [(6,), (3, 7, 6), (2, 3, 4, 5), (4, 2), (4, 1), (2, 0, 6)], ids=str)
def test_it_equals_torch(shape, eps, offset):
    torch = pytorch()
    layer, rng = layer_of(shape[-1], eps), np.random.default_rng(0)
    x, dy = rng.standard_normal(shape) + offset, rng.standard_normal(shape)
    y, cache = layer.forward(x)
    dx = layer.backward(dy, cache)
    tx, gain, bias = tensor(x), tensor(layer.gain.value), tensor(layer.bias.value)
    ty = torch.nn.functional.layer_norm(tx, shape[-1:], gain, bias, eps)
    torch_backward([ty], [dy])
    tolerance = 1e-12 * max(1, offset)               # the mean of numbers near 100 has a rounding of 1e-14
    assert_close((y, dx), (ty.detach().numpy(), gradient(tx)), tolerance)
    assert_close(grads(layer), [gradient(gain), gradient(bias)], tolerance)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e6])
def test_a_constant_row_becomes_the_bias(value):
    """x_hat is 0, not 0/0; and eps alone stands under the root of the backward."""
    layer = layer_of(4)
    x, dy = np.full((2, 4), value), np.random.default_rng(0).standard_normal((2, 4))
    y, cache = layer.forward(x)
    assert_identical(y, np.tile(layer.bias.value, (2, 1)))
    dx_hat = dy * layer.gain.value
    assert_close(layer.backward(dy, cache), (dx_hat - dx_hat.mean(axis=1, keepdims=True)) / np.sqrt(1e-5), 1e-10)
    assert not layer.gain.grad.any()


def test_it_does_not_see_a_shift_or_a_scale_of_x():
    x = np.random.default_rng(0).standard_normal((4, 6))
    layer = layer_of(6, eps=1e-14)
    assert_close(layer(7 * x + 3), layer(x), 1e-10)


def test_dx_is_orthogonal_to_ones_and_to_x_hat():
    """What would move the mean or the variance is taken out (of the variance all but eps's share)."""
    x, dy = (np.random.default_rng(n).standard_normal((4, 6)) for n in (0, 1))
    x_hat, cache = normalize(x, 1e-15)
    dx = normalize_backward(dy, cache)
    assert_close((dx.sum(axis=1), (dx * x_hat).sum(axis=1)), (np.zeros(4), np.zeros(4)), 1e-12)


def test_in_single_precision_a_large_offset_costs_no_more_than_its_own_rounding():
    x = np.random.default_rng(0).standard_normal((20, 64)).astype("float32") + np.float32(1000)
    single, double = LayerNorm(64), LayerNorm(64, dtype="float64")
    assert_close(single(x), double(x.astype("float64")), 1e-3)
    assert single(x).dtype == np.float32


@pytest.mark.parametrize("eps", [0, float("nan"), "small", True])
def test_eps_must_be_above_0(eps):
    with pytest.raises(ValueError, match="LayerNorm: eps is"):
        LayerNorm(4, eps)


@pytest.mark.parametrize(("x", "error", "sentence"), [
    (np.ones((2, 3)), ValueError, r"LayerNorm: x has shape \(2, 3\); expected \(..., 4\)"),
    (np.ones((2, 1)), ValueError, r"LayerNorm: x has shape \(2, 1\)"),
    (np.ones(()), ValueError, r"LayerNorm: x has shape \(\)"),
    (np.ones((2, 4), int), TypeError, "LayerNorm: x has dtype int64"),
    ([[1.0] * 4], TypeError, "x is a list"),
])
def test_bad_input(x, error, sentence):
    with pytest.raises(error, match=sentence):
        LayerNorm(4).forward(x)


