"""Gradient clipping: its properties, its extremes, and PyTorch's answer."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minigrad import Parameter
from minigrad.clipping import clip_grad_norm, clip_grad_value, grad_norm


def parameter(gradient, dtype="float64", name="W"):
    gradient = np.asarray(gradient, dtype)
    p = Parameter(np.ones(gradient.shape, dtype), name)
    p.grad[...] = gradient
    return p


def gradients(parameters):
    return [p.grad.copy() for p in parameters]


def flat(parameters):
    return np.concatenate([p.grad.ravel().astype("float64") for p in parameters])


finite = st.floats(-1e6, 1e6, allow_subnormal=False)
lists_of_gradients = st.lists(st.lists(finite, max_size=5), min_size=1, max_size=4)
larger = st.lists(st.lists(finite.filter(lambda g: g == 0 or abs(g) > 1e-100), max_size=5), min_size=1, max_size=4)
thresholds = st.floats(1e-6, 1e6)
TINY = 1e-300                                                     # below it numbers have few digits
modest = settings(max_examples=60, deadline=None)


# ---- global norm: properties -----------------------------------------------------------------------------


@modest
@given(lists=lists_of_gradients, c=thresholds, dtype=st.sampled_from(["float32", "float64"]))
def test_clipped_norm_direction_and_report(lists, c, dtype):
    parameters = [parameter(values, dtype) for values in lists]
    before = flat(parameters)
    N = clip_grad_norm(parameters, c)
    after = flat(parameters)
    expected = math.hypot(*before)
    assert float(N) == pytest.approx(expected, rel=1e-12)
    assert math.hypot(*after) <= c * (1 + 1e-6)
    if float(N) <= c:
        np.testing.assert_array_equal(after, before)             # bit for bit
    else:
        assert math.hypot(*after) == pytest.approx(c, rel=1e-6)
        cosine = (after / math.hypot(*after)) @ (before / expected)
        assert cosine == pytest.approx(1, abs=1e-6 if dtype == "float32" else 1e-12)
    assert all(p.grad.dtype == dtype and (p.value == 1).all() for p in parameters)


@modest
@given(values=st.lists(finite, min_size=1, max_size=12), c=thresholds, data=st.data())
def test_splitting_tensors_changes_nothing(values, c, data):
    cut = data.draw(st.integers(0, len(values)))
    whole, parts = [parameter(values)], [parameter(values[:cut]), parameter([values[cut:]])]
    np.testing.assert_allclose(clip_grad_norm(parts, c), clip_grad_norm(whole, c), rtol=1e-13)
    np.testing.assert_allclose(flat(parts), flat(whole), rtol=1e-13, atol=TINY)


def test_at_the_threshold_and_just_below_nothing_changes():
    for c in (5.0, np.nextafter(5.0, 6), 5.1, 1e9):
        p = parameter([3.0, 4.0])
        assert clip_grad_norm([p], c) == 5
        np.testing.assert_array_equal(p.grad, [3.0, 4.0])


def test_the_norm_is_global():
    a, b = parameter([3.0, 0.0]), parameter([[4.0]])
    assert clip_grad_norm([a, b], 1.0) == 5
    np.testing.assert_allclose(a.grad, [0.6, 0.0])
    np.testing.assert_allclose(b.grad, [[0.8]])


def test_in_place_and_a_zero_d_array_comes_back():
    parameters = [parameter([3.0, 4.0], "float32"), parameter(2.0), parameter(np.zeros((0, 3)))]
    grads = [p.grad for p in parameters]
    for c in (1.0, 100.0, 0.0, math.inf, np.float32(1), np.float64(0.1), 1):
        for N in (clip_grad_norm(parameters, c), grad_norm(parameters)):
            assert type(N) is np.ndarray
            assert N.shape == ()
            assert N.dtype == np.float64
    assert all(p.grad is grad for p, grad in zip(parameters, grads))
    assert [p.grad.dtype for p in parameters] == ["float32", "float64", "float64"]


def test_a_shared_parameter_counts_once():
    shared, other = parameter([3.0]), parameter([4.0])
    assert clip_grad_norm([shared, other, shared, shared], 2.5) == 5
    np.testing.assert_allclose(shared.grad, [1.5])
    clip_grad_value([shared, shared], 1.0)
    np.testing.assert_array_equal(shared.grad, [1.0])


@modest
@given(lists=larger, c=st.floats(0.2, 1e3))                      # PyTorch's own norm underflows below 1e-154
def test_equals_pytorch(lists, c):
    torch = pytest.importorskip("torch")
    parameters = [parameter(values) for values in lists]
    tensors = [torch.zeros(len(values), dtype=torch.float64) for values in lists]
    for tensor, values in zip(tensors, lists):
        tensor.grad = torch.tensor(values, dtype=torch.float64)
    theirs = torch.nn.utils.clip_grad_norm_(tensors, c)
    np.testing.assert_allclose(clip_grad_norm(parameters, c), theirs.item(), rtol=1e-12)
    for p, tensor in zip(parameters, tensors):                   # PyTorch divides by N + 1e-6: up to 1e-6/c apart
        np.testing.assert_allclose(p.grad, tensor.grad.numpy(), rtol=1e-5, atol=TINY)


# ---- global norm: extremes -------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0.0, 1.0, math.inf])
def test_a_zero_gradient_stays_zero(c):
    parameters = [parameter([0.0, -0.0]), parameter(np.zeros((2, 2)))]
    assert clip_grad_norm(parameters, c, error_if_nonfinite=True) == 0
    assert not flat(parameters).any()


def test_threshold_zero_zeroes_and_infinity_only_measures():
    p = parameter([3.0, 4.0])
    assert clip_grad_norm([p], math.inf) == 5
    np.testing.assert_array_equal(p.grad, [3.0, 4.0])
    assert clip_grad_norm([p], 0) == 5
    np.testing.assert_array_equal(p.grad, 0)


@pytest.mark.parametrize("c", [-1, -1e-9, math.nan, -math.inf, "1", None])
@pytest.mark.parametrize(("clip", "name"), [(clip_grad_norm, "max_norm"), (clip_grad_value, "max_value")])
def test_bad_thresholds_are_refused(clip, name, c):
    p = parameter([3.0, 4.0])
    with pytest.raises(ValueError, match=f"{clip.__name__}: {name} is .*; expected a number in"):
        clip([p], c)
    np.testing.assert_array_equal(p.grad, [3.0, 4.0])


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e20), ("float32", 3e38), ("float32", 1e-30),
                                             ("float32", 1e-45), ("float64", 1e200), ("float64", 1e-200),
                                             ("float64", 5e-324), ("float16", 6e4), ("float16", 6e-8)])
def test_the_report_neither_overflows_nor_underflows(dtype, size):
    p = parameter(np.array([[size, -size], [size, size]]), dtype)
    exact = float(p.grad[0, 0])
    assert exact > 0
    assert clip_grad_norm([p], math.inf, error_if_nonfinite=True) == pytest.approx(2 * exact, rel=1e-12)
    assert (abs(p.grad) == exact).all()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e20), ("float32", 3e38), ("float64", 1e200)])
def test_huge_gradients_are_clipped_to_the_threshold(dtype, size):
    p = parameter([size, -size, 0.0], dtype)
    clip_grad_norm([p], 2.0)
    np.testing.assert_allclose(p.grad, [math.sqrt(2), -math.sqrt(2), 0], rtol=1e-6)


def test_a_threshold_far_above_the_norm():
    for size in (1e-30, 1e-200, 5e-324):
        p = parameter([size, size])
        clip_grad_norm([p], 1e300)
        np.testing.assert_array_equal(p.grad, [size, size])


def test_finite_gradients_whose_norm_is_beyond_float64():
    p = parameter([1.7e308] * 4)
    with np.errstate(over="ignore"):
        with pytest.raises(FloatingPointError, match="the norm is inf; the gradient of all together is not finite"):
            clip_grad_norm([p], 1.0, error_if_nonfinite=True)
        assert np.isinf(clip_grad_norm([p], 1.0))
    assert np.isnan(p.grad).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("entries", "norm"), [
    ([np.inf, 1.0], np.inf), ([-np.inf, 0.0], np.inf), ([np.inf, -np.inf], np.inf), ([np.nan, 1.0], np.nan),
    ([np.nan, np.inf], np.nan)])
@pytest.mark.parametrize("c", [0.0, 1.0, math.inf])
def test_a_non_finite_norm_makes_every_gradient_nan(entries, norm, c, dtype):
    """The finite entry next to it is large enough for its square to overflow; there are no warnings."""
    parameters = [parameter([1.0, 0.0], dtype), parameter(entries, dtype), parameter([np.finfo(dtype).max], dtype)]
    np.testing.assert_array_equal(clip_grad_norm(parameters, c), norm)
    assert np.isnan(flat(parameters)).all()
    assert all(p.grad.dtype == dtype for p in parameters)


@pytest.mark.parametrize("entry", [np.inf, -np.inf, np.nan])
def test_error_if_nonfinite_raises_before_touching_anything(entry):
    parameters = [parameter([30.0], name="U"), parameter([[1.0, entry]], name="alpha"), parameter([entry], name="b")]
    before = gradients(parameters)
    with pytest.raises(FloatingPointError, match=r"norm is (inf|nan); the gradient of alpha is not finite"):
        clip_grad_norm(parameters, 1.0, error_if_nonfinite=True)
    for p, gradient in zip(parameters, before):
        np.testing.assert_array_equal(p.grad, gradient)


def test_parameters_without_entries():
    empty = [parameter(np.zeros((0, 3))), parameter(np.zeros((2, 0)))]
    assert clip_grad_norm(empty, 1.0, error_if_nonfinite=True) == 0
    clip_grad_value(empty, 1.0)
    assert clip_grad_norm([empty[0], parameter([3.0, 4.0]), empty[1]], 1.0) == 5


def test_mixed_dtypes_count_together():
    single, double = parameter([3.0], "float32"), parameter([4.0], "float64")
    assert clip_grad_norm([single, double], 1.0) == 5
    assert (single.grad.dtype, double.grad.dtype) == ("float32", "float64")
    np.testing.assert_allclose([single.grad[0], double.grad[0]], [0.6, 0.8], rtol=1e-7)


# ---- by value --------------------------------------------------------------------------------------------


@modest
@given(lists=lists_of_gradients, c=st.floats(0, 1e3), dtype=st.sampled_from(["float32", "float64"]))
def test_clip_by_value(lists, c, dtype):
    c = float(np.dtype(dtype).type(c))
    parameters = [parameter(values, dtype) for values in lists]
    grads, before = [p.grad for p in parameters], gradients(parameters)
    assert clip_grad_value(parameters, c) is None
    for p, grad, old in zip(parameters, grads, before):
        assert p.grad is grad
        assert p.grad.dtype == dtype
        np.testing.assert_array_equal(p.grad, np.minimum(np.maximum(old, -c), c))


def test_clip_by_value_of_non_finite_entries():
    p = parameter([np.nan, np.inf, -np.inf, 0.5])
    clip_grad_value([p], 2.0)
    np.testing.assert_array_equal(p.grad, [np.nan, 2.0, -2.0, 0.5])
    p = parameter([np.nan, np.inf, 3.0])
    clip_grad_value([p], math.inf)
    np.testing.assert_array_equal(p.grad, [np.nan, np.inf, 3.0])


@pytest.mark.parametrize("c", [0.5, 1, np.float32(0.5), np.float64(0.5), np.int64(2)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_thresholds_of_any_number_type(c, dtype):
    p = parameter([3.0, -0.1], dtype)
    clip_grad_value([p], c)
    np.testing.assert_allclose(p.grad, [c, -0.1])
    assert p.grad.dtype == dtype


# ---- what is clipped -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [clip_grad_norm, clip_grad_value])
def test_parameters_are_required(clip):
    walked = iter([parameter([1.0])])
    clip(walked, 1.0)
    for nothing in (walked, [], ()):
        with pytest.raises(ValueError, match=f"{clip.__name__}: got no parameters"):
            clip(nothing, 1.0)
    with pytest.raises(TypeError, match=f"{clip.__name__}: got a single Parameter"):
        clip(parameter([1.0]), 1.0)
    with pytest.raises(TypeError, match=f"{clip.__name__}: got a ndarray among the parameters"):
        clip([np.ones(3)], 1.0)
