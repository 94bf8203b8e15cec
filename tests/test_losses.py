"""Losses: values and gradients against PyTorch and by finite differences; masks, extremes, bad input."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minigrad import gradcheck
from minigrad.losses import mean_squared_error, softmax_cross_entropy

SHAPES = [(), (7,), (3, 4), (2, 3, 2)]


def logits_and_targets(shape, V=5, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return 2 * rng.standard_normal((*shape, V)).astype(dtype), np.asarray(rng.integers(0, V, shape))


def plain_cross_entropy(logits, targets, mask=None):
    """One position after another, from the definition."""
    terms = []
    for position in np.ndindex(targets.shape):
        if mask is None or mask[position]:
            e = [math.exp(z) for z in logits[position]]
            terms.append(-math.log(e[targets[position]] / sum(e)))
    return sum(terms) / len(terms) if terms else 0.0


def both(logits, targets, mask=None, dloss=1.0):
    loss, cache = softmax_cross_entropy.forward(logits, targets, mask)
    return loss, softmax_cross_entropy.backward(dloss, cache)


# ---- mean squared error ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_mean_squared_error_equals_pytorch(shape):
    torch = pytest.importorskip("torch")
    y, target = np.random.default_rng(0).standard_normal((2, *shape))
    y, target = np.asarray(y), np.asarray(target)
    theirs = torch.tensor(y, requires_grad=True)
    expected = torch.nn.functional.mse_loss(theirs, torch.tensor(target))
    expected.backward()
    loss, cache = mean_squared_error.forward(y, target)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-13)
    np.testing.assert_allclose(mean_squared_error.backward(1.0, cache), theirs.grad.numpy(), rtol=1e-13)


@pytest.mark.parametrize("dloss", [0.5, np.float64(0.5), np.array(0.5)], ids=repr)
@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_has_the_dtype_of_what_it_is_for(masked, dloss):
    y = np.ones((3, 2), "float32")
    assert mean_squared_error.backward(dloss, mean_squared_error.forward(y, 0 * y)[1]).dtype == "float32"
    mask = np.array([True, False, True]) if masked else None
    assert both(y, np.array([0, 1, 1]), mask, dloss)[1].dtype == "float32"


def test_mean_squared_error_by_hand():
    y, target = np.array([[1.0], [4.0]]), np.array([[3.0], [1.0]])
    loss, cache = mean_squared_error.forward(y, target)
    assert loss == (4 + 9) / 2
    np.testing.assert_array_equal(mean_squared_error.backward(1.0, cache), [[-2.0], [3.0]])
    np.testing.assert_array_equal(mean_squared_error.backward(0.5, cache), [[-1.0], [1.5]])
    np.testing.assert_array_equal(mean_squared_error.backward(np.array(0.5), cache), [[-1.0], [1.5]])


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_mean_squared_error_by_finite_differences(shape):
    y, target = np.random.default_rng(0).standard_normal((2, *shape))
    report = gradcheck(mean_squared_error, (y, target))
    assert report.ok, report


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_mean_squared_error_keeps_dtype_and_inputs(dtype):
    y, target = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(dtype)
    kept = y.copy(), target.copy()
    loss, cache = mean_squared_error.forward(y, target)
    dy = mean_squared_error.backward(1.0, cache)
    assert type(loss) is np.ndarray
    assert loss.shape == ()
    assert loss.dtype == dy.dtype == dtype
    np.testing.assert_array_equal((y, target), kept)
    np.testing.assert_array_equal(dy, mean_squared_error.backward(1.0, cache))


def test_mean_squared_error_is_zero_at_the_target_and_shows_nan():
    y = np.array([1.0, 2.0])
    loss, cache = mean_squared_error.forward(y, y.copy())
    assert loss == 0
    assert not mean_squared_error.backward(1.0, cache).any()
    assert np.isnan(mean_squared_error.forward(y, np.array([1.0, np.nan]))[0])


@pytest.mark.parametrize(("y", "target", "error", "sentence"), [
    (np.zeros((3, 1)), np.zeros(3), ValueError, r"target has shape \(3,\); expected \(3, 1\)"),
    (np.zeros((3, 1)), np.zeros((1, 1)), ValueError, r"target has shape \(1, 1\); expected \(3, 1\)"),
    (np.zeros((0, 1)), np.zeros((0, 1)), ValueError, r"y has shape \(0, 1\); expected at least one entry"),
    (np.zeros(3, int), np.zeros(3), TypeError, "y has dtype int64; expected floating-point"),
    (np.zeros(3, "float32"), np.zeros(3, "int64"), TypeError, "target has dtype int64; expected floating-point"),
    (np.zeros(3), [0.0, 0.0, 0.0], TypeError, "target is a list; expected a NumPy or CuPy array"),
])
def test_mean_squared_error_refuses(y, target, error, sentence):
    with pytest.raises(error, match=sentence):
        mean_squared_error.forward(y, target)


# ---- softmax cross entropy -------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_cross_entropy_equals_pytorch(shape, masked):
    torch = pytest.importorskip("torch")
    logits, targets = logits_and_targets(shape)
    mask = np.asarray(np.random.default_rng(1).random(shape) < 0.7) if masked else None
    if masked and shape == ():
        mask = np.array(True)
    theirs = torch.tensor(logits, requires_grad=True)
    kept = torch.tensor(targets if mask is None else np.where(mask, targets, -100))
    expected = torch.nn.functional.cross_entropy(theirs.reshape(-1, 5), kept.reshape(-1), ignore_index=-100)
    (3 * expected).backward()
    loss, dlogits = both(logits, targets, mask, dloss=3.0)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-13)
    np.testing.assert_allclose(dlogits, theirs.grad.numpy(), rtol=1e-12, atol=1e-16)


@settings(max_examples=40, deadline=None)
@given(shape=st.sampled_from(SHAPES), V=st.integers(1, 6), seed=st.integers(0, 99), share=st.floats(0, 1))
def test_cross_entropy_equals_its_definition(shape, V, seed, share):
    logits, targets = logits_and_targets(shape, V, seed)
    mask = np.asarray(np.random.default_rng(seed).random(shape) < share)
    for m in (None, mask):
        loss, dlogits = both(logits, targets, m)
        np.testing.assert_allclose(loss, plain_cross_entropy(logits, targets, m), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(dlogits.sum(axis=-1), 0, atol=1e-14)      # shifting all logits changes nothing
        assert dlogits.shape == logits.shape


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_cross_entropy_by_finite_differences(shape):
    logits, targets = logits_and_targets(shape)
    mask = np.asarray(np.arange(targets.size).reshape(shape) % 3 != 1)
    for keywords in ({}, {"mask": mask}):
        report = gradcheck(softmax_cross_entropy, (logits, targets), keywords)
        assert report.ok, report


def test_what_stands_at_a_masked_position_changes_nothing():
    logits, targets = logits_and_targets((3, 4))
    mask = np.array([[1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]], bool)
    loss, dlogits = both(logits, targets, mask)
    assert not dlogits[~mask].any()
    for filling, target in [(np.nan, -1), (np.inf, 10**9), (-np.inf, 5), (1e300, -(2**62))]:
        odd, odd_targets = logits.copy(), targets.copy()
        odd[~mask], odd_targets[~mask] = filling, target
        odd_loss, odd_dlogits = both(odd, odd_targets, mask)
        np.testing.assert_array_equal(odd_loss, loss)
        np.testing.assert_array_equal(odd_dlogits, dlogits)
    packed_loss, packed = both(logits[mask], targets[mask])
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-14)
    np.testing.assert_allclose(dlogits[mask], packed, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_real_position_gives_zero(dtype):
    logits, targets = logits_and_targets((3, 4), dtype=dtype)
    logits[0] = np.nan
    loss, dlogits = both(logits, targets - 100, np.zeros((3, 4), bool))
    assert loss == 0
    assert loss.dtype == dlogits.dtype == dtype
    assert not dlogits.any()
    loss, dlogits = both(np.zeros((0, 4), dtype), np.zeros((0,), int))
    assert loss == 0
    assert dlogits.shape == (0, 4)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_huge_logits_stay_finite(dtype):
    logits = np.array([[1e4, -1e4, 0], [1e4, 1e4, -1e4]], dtype)
    loss, dlogits = both(logits, np.array([0, 1]))
    np.testing.assert_allclose(loss, math.log(2) / 2, rtol=1e-3)
    np.testing.assert_allclose(dlogits, [[0, 0, 0], [0.25, -0.25, 0]], atol=1e-7)
    assert loss.dtype == dlogits.dtype == dtype
    loss, dlogits = both(logits, np.array([1, 2]))
    np.testing.assert_allclose(loss, 2e4, rtol=1e-3)
    assert np.isfinite(dlogits).all()


def test_a_closed_class_has_probability_zero():
    logits = np.array([[0.0, -np.inf, 0.0]])
    loss, dlogits = both(logits, np.array([0]))
    np.testing.assert_allclose(loss, math.log(2))
    np.testing.assert_allclose(dlogits, [[-0.5, 0, 0.5]])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("target_dtype", ["int64", "int32", "uint8", "int8"])
def test_cross_entropy_keeps_dtype_and_inputs(dtype, target_dtype):
    logits, targets = logits_and_targets((3, 4), dtype=dtype)
    targets, mask = targets.astype(target_dtype), np.arange(12).reshape(3, 4) % 4 > 0
    kept = logits.copy(), targets.copy(), mask.copy()
    for m in (None, mask):
        loss, cache = softmax_cross_entropy.forward(logits, targets, m)
        dlogits = softmax_cross_entropy.backward(1.0, cache)
        assert type(loss) is np.ndarray
        assert loss.shape == ()
        assert loss.dtype == dlogits.dtype == dtype
        np.testing.assert_array_equal(dlogits, softmax_cross_entropy.backward(1.0, cache))
        np.testing.assert_allclose(softmax_cross_entropy.backward(0.25, cache), dlogits / 4, rtol=1e-6)
        assert softmax_cross_entropy.backward(np.array(2.0, dtype), cache).dtype == dtype
        assert not softmax_cross_entropy.backward(0.0, cache).any()
    for before, after in zip(kept, (logits, targets, mask)):
        np.testing.assert_array_equal(before, after)


def test_cross_entropy_of_non_contiguous_logits():
    logits, targets = logits_and_targets((3, 4))
    turned = np.asfortranarray(logits[:, ::-1])
    loss, dlogits = both(turned[:, ::-1], targets)
    expected_loss, expected = both(logits, targets)
    np.testing.assert_array_equal(loss, expected_loss)
    np.testing.assert_array_equal(dlogits, expected)


@pytest.mark.parametrize(("change", "error", "sentence"), [
    ({"logits": np.zeros((2, 3, 5), int)}, TypeError, "logits has dtype int64; expected floating-point numbers"),
    ({"logits": np.zeros((2, 5))}, ValueError, r"targets has shape \(2, 3\); expected .*, \(2,\)"),
    ({"logits": np.zeros(())}, ValueError, r"targets has shape \(2, 3\)"),
    ({"targets": np.zeros((2, 3))}, TypeError, "targets has dtype float64; expected integers"),
    ({"targets": np.zeros((2, 3), bool)}, TypeError, "targets has dtype bool; expected integers"),
    ({"targets": np.zeros((3, 2), int)}, ValueError, r"targets has shape \(3, 2\); expected .*, \(2, 3\)"),
    ({"targets": np.zeros((2, 3, 5), int)}, ValueError, r"targets has shape \(2, 3, 5\)"),
    ({"targets": np.full((2, 3), 5)}, ValueError, r"targets run from 5 to 5; expected 0 \.\.\. 4"),
    ({"targets": np.full((2, 3), -1)}, ValueError, r"targets run from -1 to -1; expected 0 \.\.\. 4"),
    ({"targets": [[0] * 3] * 2}, TypeError, "targets is a list; expected a NumPy or CuPy array"),
    ({"mask": np.ones((2, 3))}, TypeError, "mask has dtype float64; expected bool"),
    ({"mask": np.ones((2, 4), bool)}, ValueError, r"mask has shape \(2, 4\); expected \(2, 3\)"),
    ({"mask": np.ones((2, 3), bool), "targets": np.full((2, 3), 9)}, ValueError, "targets run from 9 to 9"),
])
def test_cross_entropy_refuses(change, error, sentence):
    given = {"logits": np.zeros((2, 3, 5)), "targets": np.zeros((2, 3), int), **change}
    with pytest.raises(error, match=sentence):
        softmax_cross_entropy.forward(**given)
