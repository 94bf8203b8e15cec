"""Work in parts that stay in the cache (memory.cache_blocks): the parts are all of an array, and what is computed part
by part is what the plain formula over the whole array gives."""

import math

import numpy as np
import pytest
from helpers import assert_close, assert_identical
from test_optim import CASES, make, parameters_and_gradients, run

from minigrad import Parameter, memory
from minigrad.clipping import grad_norm
from minigrad.functional import gelu_tanh, softmax_attention
from minigrad.losses import softmax_cross_entropy
from minigrad.memory import apply, cache_blocks


@pytest.fixture
def one_row_each(monkeypatch):
    monkeypatch.setattr(memory, "CACHE_BLOCK", 1)


@pytest.mark.parametrize("shape", [(10, 6), (10,), (7, 2, 3), (1, 100), (0, 4), (3, 0), ()], ids=str)
@pytest.mark.parametrize("size", [1, 100, 1 << 18])
def test_the_parts_are_the_whole_once(shape, size, monkeypatch):
    monkeypatch.setattr(memory, "CACHE_BLOCK", size)
    array = np.zeros(shape)
    parts = cache_blocks(array)
    for part in parts:
        array[part] += 1
        assert array[part].nbytes <= max(size, array[:1].nbytes if shape else 8)
    assert (array == 1).all()
    assert len(parts) == 1 or array.nbytes > size


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "float64")])
def test_elementwise_is_the_operation(dtypes):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((40, 700)).astype(dtypes[0]), rng.standard_normal((40, 1)).astype(dtypes[1])
    for function in (np.add, np.subtract, np.multiply):
        y = apply(function, a, b)
        assert_identical(y, function(a, b))
        assert y.dtype == dtypes[1]


# ---- the loss --------------------------------------------------------------------------------------------

def plain_cross_entropy(logits, targets, real):
    """(loss, dlogits) by the formula, row by row."""
    loss, dlogits, n = 0.0, np.zeros_like(logits), max(real.sum(), 1)
    for row, target in zip(np.argwhere(real), targets[real]):
        z = logits[tuple(row)]
        P = np.exp(z - z.max())
        P /= P.sum()
        loss -= math.log(P[target]) / n
        P[target] -= 1
        dlogits[tuple(row)] = P / n
    return loss, dlogits


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(5, 7, 11), (30, 9)], ids=str)
def test_cross_entropy_equals_the_plain_formula(masked, shape, one_row_each):
    rng = np.random.default_rng(0)
    logits, targets = 3 * rng.standard_normal(shape), rng.integers(shape[-1], size=shape[:-1])
    real = rng.random(shape[:-1]) < 0.7 if masked else np.ones(shape[:-1], bool)
    loss, cache = softmax_cross_entropy.forward(
        np.where(real[..., None], logits, np.nan), targets, real if masked else None)
    expected, dlogits = plain_cross_entropy(logits, targets, real)
    assert_close(loss, expected, 1e-12)
    assert_close(softmax_cross_entropy.backward(1.0, cache), dlogits, 1e-12)


# ---- gelu ------------------------------------------------------------------------------------------------

def plain_gelu_tanh(x):
    """(y, dy/dx) as Hendrycks and Gimpel write it."""
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)


@pytest.mark.parametrize("shape", [(9, 40), (200,), ()], ids=str)
def test_gelu_tanh_equals_the_plain_formula(shape, one_row_each):
    rng = np.random.default_rng(0)
    x, dy = 3 * rng.standard_normal(shape), np.asarray(rng.standard_normal(shape))
    x = np.asarray(x)
    y, cache = gelu_tanh.forward(x)
    expected, slope = plain_gelu_tanh(x)
    assert_close((y, gelu_tanh.backward(dy, cache)), (expected, slope * dy), 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gelu_tanh_far_out_is_the_identity_and_zero_without_a_warning(dtype):
    x = np.array([-1e4, -60, 60, 1e4], dtype)
    y, cache = gelu_tanh.forward(x)
    assert_identical(y, np.maximum(x, 0))
    assert_identical(gelu_tanh.backward(np.ones_like(x), cache), (x > 0).astype(dtype))


# ---- attention: gradients into memory that is not cleared before ------------------------------------------

@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"causal": True, "window": 2}], ids=str)
@pytest.mark.parametrize("more", [0, 3])
def test_attention_writes_every_gradient(settings, more, monkeypatch):
    """Keys that no query sees have gradients of zero, whatever stood in the recycled memory."""
    def filled(shape, dtype, xp=np):
        return xp.full(shape, np.nan, dtype)
    monkeypatch.setattr("minigrad.functional.empty", filled)
    monkeypatch.setattr("minigrad.memory.empty", filled)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 3, 4)).transpose(0, 2, 1, 3) for n in (5, 5 + more, 5 + more))
    A, cache = softmax_attention.forward(q, k, v, **settings)
    gradients = softmax_attention.backward(np.ones_like(A), cache)
    assert all(np.isfinite(array).all() for array in (A, *gradients))
    assert [array.strides for array in (A, *gradients)] == [q.strides, q.strides, k.strides, v.strides]
    if "window" in settings and more:
        assert not gradients[1][:, :, :more - 1].any()


# ---- optimizers ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_a_step_in_parts_is_the_step(name, monkeypatch):
    histories = []
    for size in (1 << 18, 1):
        monkeypatch.setattr(memory, "CACHE_BLOCK", size)
        parameters, gradients = parameters_and_gradients("float32")
        histories.append(run(make(name, parameters), gradients[:10], 0.01)[-1])
    for whole, in_parts in zip(*histories):
        np.testing.assert_array_equal(in_parts, whole)


def test_the_norm_in_parts_is_the_norm(one_row_each):
    parameters = [Parameter(np.zeros((6, 5), "float32")), Parameter(np.zeros(3)), Parameter(np.zeros((0, 2)))]
    rng = np.random.default_rng(0)
    for parameter in parameters:
        parameter.grad[...] = rng.standard_normal(parameter.grad.shape)
    total = sum((parameter.grad.astype("float64")**2).sum() for parameter in parameters)
    assert float(grad_norm(parameters)) == pytest.approx(math.sqrt(total), rel=1e-14)
    parameters[0].grad[4, 2] = np.inf
    assert grad_norm(parameters) == np.inf
    parameters[1].grad[1] = np.nan
    assert np.isnan(grad_norm(parameters))
