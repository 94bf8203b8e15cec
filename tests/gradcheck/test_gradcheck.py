"""The gradient checker itself: right gradients pass, planted faults are found and named, kinks are told from errors."""

import subprocess
import sys

import numpy as np
import pytest
from planted_faults import FAULTS, REFERENCES, Recurrence, Tanh, arguments
from scipy.sparse import csr_array

from minigrad import Layer, Parameter, Residual, Sequential, functional, gradcheck, losses
from minigrad.fast import lstm as fast_lstm
from minigrad.gradcheck.__main__ import main, make_inputs, parse
from minigrad.layers import GRU, LSTM, RRALSTM, Dropout, Linear, Stack, rra

MODES = ["full", "direction"]
both_modes = pytest.mark.parametrize("mode", MODES)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def function(forward, backward):
    """A namespace: y = forward(x), dx = backward(dy, x)."""
    class Function:
        @staticmethod
        def forward(x):
            return forward(x), (x,)

        @staticmethod
        def backward(dy, cache):
            x, = cache
            return backward(dy, x)
    return Function


def elementwise(f, slope):
    return function(f, lambda dy, x: dy * slope(x))


def wrong_rows(report):
    return {row.name for row in report.rows if row.status == "wrong"} - {"all together"}


# ---- what is right passes --------------------------------------------------------------------------------

def stack():
    return Stack(LSTM(4, 3, rng=0), RRALSTM(3, 5, 2, rng=1))


def states(*shapes):
    return tuple(normal(*shape, seed=n + 5) for n, shape in enumerate(shapes))


MASK = np.array([[1, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
X = normal(3, 5, 4)
RIGHT = {
    "Linear": (Linear(4, 5, rng=0), (X,), {}),
    "Linear without bias": (Linear(4, 5, bias=False, rng=0), (X,), {}),
    "Dropout": (Dropout(0.4), (X,), {"rng": 3}),
    "Dropout in evaluation, y is x": (Dropout(0.4), (X,), {}),
    "mean_squared_error": (losses.mean_squared_error, (X, normal(3, 5, 4, seed=1)), {}),
    "softmax_cross_entropy": (losses.softmax_cross_entropy, (X, np.arange(15).reshape(3, 5) % 4), {"mask": MASK}),
    "LSTM": (LSTM(4, 5, rng=0), (X,), {}),
    "LSTM, state and mask": (LSTM(4, 5, rng=0), (X,), {"mask": MASK, "state": states((3, 5), (3, 5))}),
    "RRALSTM": (RRALSTM(4, 5, 3, rng=0), (X,), {"mask": MASK, "state": states((3, 4, 5), (3, 5))}),
    "Sequential": (Sequential(Linear(4, 5, rng=0), Dropout(0.3), Linear(5, 2, rng=1)), (X,), {"rng": 3}),
    "Residual": (Residual(Linear(4, 4, rng=0)), (X,), {"mask": MASK}),
    "Stack": (stack(), (X,), {"mask": MASK, "state": (states((3, 3), (3, 3)), states((3, 3, 5), (3, 5)))}),
    **{name: (namespace, (X,), {}) for name, namespace in vars(functional).items()
       if hasattr(namespace, "forward") and not name.endswith("_attention")},            # these: test_attention.py
    **{f"reference {reference.__name__}": (reference(np.random.default_rng(0)), *arguments(reference))
       for reference in REFERENCES},
}


@both_modes
@pytest.mark.parametrize("name", RIGHT)
def test_right_gradients_pass(name, mode):
    layer, inputs, keywords = RIGHT[name]
    report = gradcheck(layer, inputs, keywords, mode=mode)
    assert report.ok, report
    assert not report.notes
    assert {row.status for row in report.rows} == {"ok"}


A = normal(4, 4, seed=2)
KNOWN = {
    "x^2": (elementwise(np.square, lambda x: 2 * x), lambda dy, x: 2 * x * dy),
    "sin": (elementwise(np.sin, np.cos), lambda dy, x: np.cos(x) * dy),
    "x^T A x": (function(lambda x: np.einsum("ni,ij,nj->n", x, A, x), lambda dy, x: dy[:, None] * (x @ (A + A.T))),
                lambda dy, x: dy[:, None] * np.einsum("ij,nj->ni", A + A.T, x)),
    "sum": (function(np.sum, lambda dy, x: np.broadcast_to(dy, x.shape)), lambda dy, x: dy * np.ones_like(x)),
}


@both_modes
@pytest.mark.parametrize("name", KNOWN)
def test_the_numeric_side_equals_known_derivatives(name, mode):
    """Against the derivative by hand, with the upstream gradient that the checker drew."""
    layer, known = KNOWN[name]
    x, seen = normal(3, 4), []
    spied = function(lambda x: layer.forward(x)[0], lambda dy, x: seen.append(dy) or layer.backward(dy, (x,)) * 1.5)
    row = gradcheck(spied, (x,), mode=mode).rows[0]
    assert row.status == "wrong"                                 # on purpose: then both modes name an entry
    np.testing.assert_allclose(row.numeric, known(seen[0], x)[row.index], rtol=1e-8)
    np.testing.assert_allclose(row.analytic, 1.5 * row.numeric, rtol=1e-8)
    assert row.relative_error == pytest.approx(1 / 3)


# ---- what is wrong is found, and named -------------------------------------------------------------------

@both_modes
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_faults_are_found_and_named(fault, mode):
    layer = fault.make(np.random.default_rng(0))
    report = gradcheck(layer, *arguments(fault.reference), mode=mode)
    assert not report.ok, report
    assert not report
    assert fault.tensors or fault.problem
    assert wrong_rows(report) - set(fault.maybe.split()) == set(fault.tensors.split()), report
    if fault.problem:
        assert any(fault.problem in problem for problem in report.problems), report
    for row in report.rows:
        if row.name in fault.tensors.split():
            assert isinstance(row.index, tuple)
            assert len(row.index) == len(row.shape)
            assert not abs(row.analytic - row.numeric) <= 1e-8 + 1e-6 * abs(row.numeric), report
            if fault.index:
                assert all(wanted in (None, got) for wanted, got in zip(fault.index, row.index)), report
            assert row.name in str(report)
            assert str(row.index) in str(report)


def test_there_are_enough_faults():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
    assert {fault.reference for fault in FAULTS} == set(REFERENCES)


class OneOff(Linear):
    """With one entry of its gradient off by a thousandth."""

    def backward(self, dy, cache):
        dx = super().backward(dy, cache)
        self.W.grad[self.index] *= 1.001
        return dx


@pytest.mark.parametrize("index", [(0, 0), (17, 5), (59, 29)])
def test_direction_mode_finds_one_entry_in_a_larger_model(index):
    wide, tanh = OneOff(60, 30, rng=2), Tanh(None)
    wide.index = index
    model = Sequential(Linear(20, 60, rng=0), tanh, wide, tanh, Linear(30, 5, rng=1))
    report = gradcheck(model, (normal(6, 20),), mode="direction")
    assert wrong_rows(report) == {"layers.2.W"}
    row, = (row for row in report.rows if row.name == "layers.2.W")
    assert row.index == index
    assert row.analytic / row.numeric == pytest.approx(1.001, rel=1e-6)


def test_a_gradient_next_to_large_outputs_is_not_excused():
    """Outputs of 1e4 round so coarsely that the slope at a smaller eps could be anything: that is no evidence."""
    M, claimed = np.ones((5, 5)) / 5, []

    def backward(dy, x):
        claimed.append(1.00001 * (dy * (1 - np.tanh(x @ M)**2)) @ M.T)
        return claimed[-1]
    layer = function(lambda x: 1e4 + np.tanh(x @ M), backward)
    for seed in range(10):
        claimed.clear()
        row = gradcheck(layer, (normal(8, 5, seed=seed),), seed=seed).rows[0]
        assert row.kinks == 0
        assert (row.errors > 1)[np.abs(claimed[0]) > 0.05].all()


class Scale:
    """y = x W, no Layer; the gradient of W is wrong."""

    def __init__(self):
        self.W = Parameter(normal(4))

    def forward(self, x):
        return x * self.W.value, (x,)

    def backward(self, dy, cache):
        x, = cache
        self.W.grad += 7 * (dy * x).sum(axis=0)
        return dy * self.W.value


def test_a_layer_that_is_no_Layer_has_its_parameters_checked():
    assert wrong_rows(gradcheck(Scale(), (normal(3, 4),))) == {"W"}


class Wrapping(Layer):
    """A layer around another object; a `lazy` one makes it at the first call."""

    def __init__(self, inner, lazy=False, **held):
        vars(self).update(held, inner=None if lazy else inner, make=lambda: inner)

    def forward(self, x, mask=None, rng=None):
        self.inner = self.inner or self.make()
        return self.inner.forward(x)

    def backward(self, dy, cache):
        return self.inner.backward(dy, cache)


def test_parameters_that_forward_makes_are_reported():
    report = gradcheck(Wrapping(Linear(4, 4, rng=0), lazy=True), (normal(3, 4),))
    assert any("forward edits the layer's attribute inner.W;" in problem for problem in report.problems)


def test_parameters_that_no_layer_holds_are_reported():
    inner = Scale()
    report = gradcheck(Wrapping(inner, unused=[len, inner, np]), (normal(3, 4),))
    assert {problem.partition(" is held by a Scale, which is no Layer: it is neither checked nor trained")[0]
            for problem in report.problems} == {"the Parameter inner.W", "the Parameter unused.1.W"}
    inner = Linear(4, 4, rng=0)
    assert gradcheck(Wrapping(inner, tied={"a": (inner.W, inner)}, names={"a"}), (normal(3, 4),)).ok


class Alone(Recurrence):
    def backward(self, upstream, cache):
        return super().backward(upstream, cache)[0]


@pytest.mark.parametrize(("layer", "x", "problem"), [
    (Alone(np.random.default_rng(0)), normal(2, 3, 4),
     "backward of a recurrent layer must return the pair (dx, dstate0), for state=None too"),
    (functional.tanh, np.arange(4), "nothing to compare: no floating-point input and no parameter"),
    (functional.tanh, np.zeros((0, 3)), "nothing to compare: no floating-point input and no parameter"),
    (elementwise(lambda x: x.astype(int), lambda x: 0 * x), normal(3), "forward returns no floating-point output"),
    (function(np.square, lambda dy, x: 1.0), normal(3), "the gradient of x is a float; expected an array"),
    (elementwise(np.log, lambda x: 1 / x), -np.ones(3),
     "forward's output is not finite at these inputs: nothing to compare there"),
])
def test_what_cannot_be_compared_is_no_success(layer, x, problem):
    report = gradcheck(layer, (x,))
    assert not report.ok
    assert report.problems == [problem]
    assert f"problem: {problem}" in str(report)


class Odd(Linear):
    """With a 0-d parameter, and odd things in its attributes and its cache."""

    def __init__(self):
        super().__init__(4, 4, rng=0)
        self.alpha = Parameter(np.array(1.5))
        self.settings = {"dtype": np.float32, "names": ("a", None), "self": self, "table": csr_array(np.eye(4))}

    def forward(self, x, mask=None, rng=None):
        y, cache = super().forward(x)
        return self.alpha.value * y, {"y": y, "inner": cache, "table": self.settings["table"], "f": len, "i": np.int8}

    def backward(self, dy, cache):
        self.alpha.grad += (dy * cache["y"]).sum()
        return super().backward(self.alpha.value * dy, cache["inner"])


def test_odd_things_in_caches_and_attributes_do_no_harm():
    report = gradcheck(Odd(), (normal(3, 4),))
    assert report.ok, report
    assert [row.shape for row in report.rows] == [(3, 4), (4, 4), (4,), ()]


# ---- kinks -----------------------------------------------------------------------------------------------

def relu_wrong(at_kink=0.0, smooth=1.0, where=np.s_[...]):
    """ReLU with its slope at 0 replaced, and its slope at positive x multiplied, at `where`."""
    def slope(x):
        found = np.where(x > 0, 1.0, 0.0)
        found[where] *= smooth
        return np.where(x == 0, at_kink, found)
    return elementwise(lambda x: np.maximum(x, 0), slope)


def absolute(slope):
    return elementwise(np.abs, lambda x: np.where(x == 0, slope, np.sign(x)))


def first_maximum():
    def backward(dy, x):
        dx = np.zeros_like(x)
        np.put_along_axis(dx, x.argmax(axis=-1)[:, None], dy[:, None], axis=-1)
        return dx
    return function(lambda x: x.max(axis=-1), backward)


AT_ZERO = np.array([[0.0, -1.2, 0.7], [0.4, 0.0, 0.0], [1.1, -0.3, 0.9]])
W_KINK = normal(3, 5, seed=4)
KINKS = {
    "relu at 0": (functional.relu, AT_ZERO, 3),
    "relu within eps": (functional.relu, np.where(AT_ZERO == 0, 3e-6, AT_ZERO), 3),
    "relu, another subgradient": (relu_wrong(at_kink=0.3), AT_ZERO, 3),
    "abs at 0, another subgradient": (absolute(-0.9), AT_ZERO, 3),
    "a tie of three maxima": (first_maximum(), np.where(AT_ZERO < 2, AT_ZERO[:, :1], 0), 9),
    "relu at 0, and a curve": (
        elementwise(lambda x: np.maximum(x, 0) - 50 * x * x, lambda x: (x > 0) - 100 * x), AT_ZERO, 3),
    "relu of five sums, all zero": (
        function(lambda x: np.maximum(x @ W_KINK, 0), lambda dy, x: (dy * (x @ W_KINK > 0)) @ W_KINK.T),
        np.array([[0.5, 0.1, 0.3], [0.0, 0.0, 0.0]]), 3),
}


@both_modes
@pytest.mark.parametrize("name", KINKS)
def test_kinks_are_named_and_are_no_errors(name, mode):
    layer, x, count = KINKS[name]
    report = gradcheck(layer, (x,), mode=mode)
    assert report.ok, report
    if count:
        assert report.rows[0].status == "kink"
        assert "x: " in report.notes[0]
        assert "kink" in report.notes[0]
        assert "note: x: " in str(report)
        if mode == "full":
            assert report.rows[0].kinks == count
            assert report.notes[0].startswith(f"x: {count} of {x.size} lie at a kink")


@both_modes
@pytest.mark.parametrize(("name", "layer", "index"), [
    ("above the subgradients", relu_wrong(at_kink=1.01), (0, 0)),
    ("below the subgradients", relu_wrong(at_kink=-0.01), (0, 0)),
    ("abs", absolute(1.01), (0, 0)),
])
def test_a_wrong_gradient_at_a_kink_is_an_error(name, layer, index, mode):
    x = AT_ZERO.copy()
    x[1] = 0.5                                                   # one kink alone
    report = gradcheck(layer, (x,), mode=mode)
    assert wrong_rows(report) == {"x"}, report
    assert report.rows[0].index == index


@both_modes
@pytest.mark.parametrize("smooth", [1.0001, 1.5, 0.0])
def test_a_kink_excuses_no_smooth_point(smooth, mode):
    """Nor in direction mode, where every direction passes over the kinks: the check goes on next to them."""
    report = gradcheck(relu_wrong(smooth=smooth, where=(2, 2)), (AT_ZERO,), mode=mode)
    assert not report.ok, report
    if mode == "full":
        assert report.rows[0].index == (2, 2)
        assert report.rows[0].wrong == 1
    assert "(2, 2)" in str(report)


def test_all_entries_at_a_kink_are_still_checked_next_to_it():
    half = elementwise(lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, 0.5, 0))
    report = gradcheck(half, (np.zeros((3, 4)),))
    assert report.rows[0].kinks == 12
    assert not report.ok
    assert "next to the kinks" in report.problems[0]


def rounds(kind, value):
    return np.asarray(value).astype(kind).astype(float)


NO_KINKS = {
    "sign": (elementwise(np.sign, lambda x: 0 * x), 0.0),
    "a step to the right": (elementwise(lambda x: (x > 0) * 1.0, lambda x: 0 * x), 0.0),
    "a step to the left": (elementwise(np.floor, lambda x: 0 * x), 1.0),
    "round": (elementwise(np.round, lambda x: 0 * x), 0.5),
    "float32 in forward, x": (elementwise(lambda x: rounds("f4", x), lambda x: 1 + 0 * x), normal(40)),
    "float32 in forward, tanh": (elementwise(lambda x: rounds("f4", np.tanh(x)), lambda x: 1 - np.tanh(x)**2),
                                 normal(40)),
    "float16 in forward": (elementwise(lambda x: rounds("f2", x), lambda x: 1 + 0 * x), normal(40)),
    "a square root at 0": (elementwise(lambda x: np.sqrt(np.abs(x)), lambda x: 0 * x + 1), 0.0),
    **{f"|x| smoothed at {width:g}": (elementwise(
        lambda x, w=width: np.sqrt(x * x + w * w), lambda x, w=width: x / np.sqrt(x * x + w * w) + 0.5), 0.0)
       for width in (1e-4, 1e-6, 1e-8, 1e-10)},
    **{f"softplus of width {width:g}": (elementwise(
        lambda x, w=width: w * np.logaddexp(0, x / w), lambda x, w=width: 0 * x + 0.4), 0.0)
       for width in (1e-4, 1e-6, 1e-8, 1e-10)},
}


@both_modes
@pytest.mark.parametrize("name", NO_KINKS)
def test_steps_rounding_and_sharp_curves_are_not_excused_as_kinks(name, mode):
    layer, x = NO_KINKS[name]
    report = gradcheck(layer, (np.atleast_1d(x),), mode=mode)
    assert wrong_rows(report) == {"x"}, report


@both_modes
@pytest.mark.parametrize("k", [1.0, 1e3, 1e5])
@pytest.mark.parametrize("error", [0.0, 3e-6, 1e-4])
def test_strong_curvature_hides_no_error_and_is_no_kink(k, error, mode):
    layer = elementwise(lambda x: np.tanh(k * x), lambda x: (1 + error) * k * (1 - np.tanh(k * x)**2))
    report = gradcheck(layer, (normal(12) / k,), mode=mode)
    assert report.rows[0].kinks == 0
    assert report.ok if error == 0 else wrong_rows(report) == {"x"}, report


@both_modes
@pytest.mark.parametrize("scale", [1e-6, 1e-12])
@pytest.mark.parametrize("error", [0.0, 0.05, -1.0])
def test_small_gradients_are_compared_too(scale, error, mode):
    """An absolute tolerance of 1e-8 alone would pass anything below it."""
    layer = elementwise(lambda x: scale * np.sin(x), lambda x: (1 + error) * scale * np.cos(x))
    report = gradcheck(layer, (normal(12),), mode=mode)
    assert report.ok if error == 0 else wrong_rows(report) == {"x"}, report


@both_modes
def test_large_inputs(mode):
    for error in (0.0, 1e-4):
        layer = elementwise(np.square, lambda x, error=error: (2 + error) * x)
        assert gradcheck(layer, (1e5 * normal(5),), mode=mode).ok == (error == 0)


def softmax(wrong=0.0):
    def forward(x):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    def backward(dy, x):
        y = forward(x)
        return y * (dy - (1 + wrong) * (dy * y).sum(axis=-1, keepdims=True))
    return function(forward, backward)


@both_modes
@pytest.mark.parametrize("scale", [1, 20, 100])
def test_a_saturated_softmax_is_right(scale, mode):
    for seed in range(3):
        for error in (0.0, 1e-4):
            report = gradcheck(softmax(error), (scale * normal(3, 4, seed=seed),), mode=mode, seed=seed)
            assert report.ok == (error == 0), report


def squared_relu(wrong=0.0, at_zero=0.0):
    return elementwise(lambda x: np.maximum(x, 0)**2,
                       lambda x: np.where(x == 0, at_zero, (2 + wrong) * np.maximum(x, 0)))


JUMPS = {
    "squared relu": (squared_relu(), True),
    "squared relu, wrong elsewhere": (squared_relu(wrong=1e-4), False),
    "squared relu, 3e-5 at 0": (squared_relu(at_zero=3e-5), False),
    "x|x|": (elementwise(lambda x: x * np.abs(x), lambda x: 2 * np.abs(x)), True),
}


@both_modes
@pytest.mark.parametrize("name", JUMPS)
def test_jumps_of_the_second_derivative(name, mode):
    """The central difference is off by a multiple of eps, which is no error; but a slope that is off is one."""
    layer, right = JUMPS[name]
    for seed in range(3):
        report = gradcheck(layer, (AT_ZERO,), mode=mode, seed=seed)
        assert report.ok == right, report
        assert not report.notes


@both_modes
def test_where_eps_leaves_the_domain_a_smaller_one_is_advised(mode):
    for error in (0.0, 1e-4):
        layer = elementwise(np.sqrt, lambda x, error=error: 0.5 * (1 + error) / np.sqrt(x))
        report = gradcheck(layer, (np.array([1e-6, 0.3, 1.2]),), mode=mode)
        assert "x: forward's output is not finite within eps of these inputs; try a smaller eps" in report.notes
        assert gradcheck(layer, (np.array([1e-6, 0.3, 1.2]),), mode=mode, eps=1e-8, rtol=1e-5).ok == (error == 0)


# ---- random numbers, purity, arguments -------------------------------------------------------------------

def test_a_generator_is_not_advanced():
    generator = np.random.default_rng(4)
    before = generator.bit_generator.state
    for rng in (generator, 4):
        report = gradcheck(Dropout(0.5), (X,), {"rng": rng})
        assert report.ok, report
    assert generator.bit_generator.state == before


class Raising(Linear):
    def backward(self, dy, cache):
        super().backward(dy, cache)
        raise RuntimeError("in the layer")


class Doubling(Linear):
    def backward(self, dy, cache):
        return 2 * super().backward(dy, cache)


@both_modes
@pytest.mark.parametrize("kind", [Linear, Doubling, Raising])
def test_layer_and_inputs_are_untouched(kind, mode):
    layer, x = kind(4, 4, rng=0), normal(3, 4).astype("float32")
    for p in layer.parameters():
        p.grad += 7
    arrays = [(p, p.value, p.grad, p.value.copy(), p.grad.copy()) for p in layer.parameters()]
    mask, kept = np.ones(3, bool), x.copy()
    if kind is Raising:
        with pytest.raises(RuntimeError, match="in the layer"):
            gradcheck(layer, (x,), mode=mode)
    else:
        assert gradcheck(layer, (x,), {"mask": mask}, mode=mode).ok == (kind is Linear)
    for p, value, grad, value_copy, grad_copy in arrays:
        assert p.value is value
        assert p.grad is grad
        assert value.dtype == grad.dtype == np.float32
        np.testing.assert_array_equal(value, value_copy)
        np.testing.assert_array_equal(grad, grad_copy)
    np.testing.assert_array_equal(x, kept)
    assert mask.all()


def test_nan_at_a_masked_step_is_no_error():
    x = X.copy()
    x[~MASK] = np.nan
    assert gradcheck(LSTM(4, 5, rng=0), (x,), {"mask": MASK}).ok


@pytest.mark.parametrize(("keywords", "words"), [
    ({"mode": "fast"}, "mode is 'fast'; expected one of 'full', 'direction'"),
    ({"eps": 0}, "eps is 0"), ({"eps": float("nan")}, "eps is nan"), ({"rtol": -1}, "rtol is -1"),
    ({"atol": "small"}, "atol is 'small'"),
])
def test_bad_settings(keywords, words):
    with pytest.raises(ValueError, match=words):
        gradcheck(Linear(4, 4), (normal(3, 4),), **keywords)


@pytest.mark.parametrize(("arguments", "words"), [
    ((normal(3, 4),), "inputs is a ndarray; expected a tuple of arrays"),
    (((), {}), "missing a required argument: 'x'"),
    (((normal(3, 4),), {"masc": None}), "masc"),
    (((normal(3, 4),), [1]), "keywords is a list; expected a dict"),
])
def test_arguments_that_do_not_fit(arguments, words):
    with pytest.raises(TypeError, match=words):
        gradcheck(Linear(4, 4), *arguments)


# ---- the report, and the command line --------------------------------------------------------------------

def test_the_report_is_a_table():
    report = gradcheck(Doubling(4, 3, rng=0), (normal(3, 4),))
    head, columns, *lines = str(report).splitlines()
    assert head == f"gradcheck of Doubling (full mode): WRONG at x{list(report.rows[0].index)}"
    for word in ("tensor", "shape", "worst index", "analytic", "numeric", "rel. error"):
        assert word in columns
    assert [line.split()[0] for line in lines] == ["x", "W", "b"]
    row = report.rows[0]
    for word in ("(3, 4)", str(row.index), f"{row.analytic:.9e}", f"{row.numeric:.9e}", "5.0e-01", "12/12", "wrong"):
        assert word in lines[0]
    assert row.errors.shape == (3, 4)
    assert row.errors.min() > 1
    assert row.errors.max() > 1e5


def test_plot(tmp_path):
    path, square = tmp_path / "plot.png", elementwise(np.square, lambda x: 2 * x)
    for layer, x in ((Doubling(4, 3, rng=0), normal(3, 4)), (functional.relu, AT_ZERO), (square, normal(3, 1))):
        gradcheck(layer, (x,)).plot(path)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="expected mode='full'"):
        gradcheck(layer, (x,), mode="direction").plot(tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


RRA = ["minigrad.layers:RRALSTM", "--shape", "2,4,3", "--set", "d=3", "--set", "h=2", "--set", "K=3"]
LINEAR = ["minigrad.layers:Linear", "--set", "d_in=3", "--set", "d_out=3"]
TANH = ["minigrad.functional:tanh", "--shape", "3"]


@pytest.mark.parametrize("arguments", [
    [*RRA, "--mask", "--state", "--rng", "3", "--mode", "direction", "--seed", "4"],
    [*RRA, "--set", "normalize=softmax", "--set", "offset=1"],
    ["minigrad.functional:softmax", "--shape", "3,4"],
    ["minigrad.losses:mean_squared_error", "--shape", "3,4", "--shape", "3,4"],
    ["minigrad.layers:Dropout", "--shape", "3,4", "--set", "p=0.5", "--rng", "1"],
    ["minigrad.layers:Embedding", "--shape", "2,5", "--ids", "3", "--set", "vocab=3", "--set", "d=2"],
])
def test_command_line(arguments, capsys):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("gradcheck of ")
    assert "every gradient agrees" in out
    assert ("state.0" in out) == ("--state" in arguments)
    assert not err


def test_command_line_in_a_process_of_its_own():
    command = [sys.executable, "-m", "minigrad.gradcheck", *RRA]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "every gradient agrees" in done.stdout


@pytest.mark.parametrize("seed", range(4))
def test_command_line_mask(seed):
    arguments = parse([*RRA, "--mask", "--seed", str(seed)])
    mask = make_inputs(arguments, None)[1]["mask"]
    assert mask[0].any()
    assert not mask[-1].any()


LAYERS = """
from planted_faults import *
from in_the_same_folder import scale

class Drawn(Layer):
    def __init__(self, rng):
        self.W = Parameter(rng.standard_normal(4))

    def forward(self, x, mask=None, rng=None):
        self.check(x)
        return scale * x * self.W.value, x

    def check(self, x):
        pass

    def backward(self, dy, x):
        self.W.grad += scale * (dy * x).sum(axis=0)
        return scale * dy * self.W.value

class Deep(Drawn):
    def check(self, x):
        np.zeros(3) + np.zeros(4)

class Unmade(Drawn):
    def __init__(self, rng):
        raise RuntimeError("two\\nlines")

class Stopped(Drawn):
    def check(self, x):
        raise KeyboardInterrupt

class Log(Layer):
    def forward(self, x, mask=None, rng=None):
        return np.log(x), x

    def backward(self, dy, x):
        return dy / x

"""


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """A file of layers that imports another one in its folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "in_the_same_folder", raising=False)
    (tmp_path / "in_the_same_folder.py").write_text("scale = 2\n", encoding="utf-8")
    (tmp_path / "layers.py").write_text(LAYERS + FAULTS[0].source(), encoding="utf-8")
    return f"{tmp_path / 'layers.py'}:"


def test_command_line_on_a_file(layers, tmp_path, capsys):
    """Layers in a file: status 0, or 1 with the tensor named and a picture drawn."""
    assert main([f"{layers}Drawn", "--shape", "3,4"]) == 0
    assert main([f"{layers}Affine", "--shape", "4,4", "--plot", str(tmp_path / "plot.png")]) == 1
    out, err = capsys.readouterr()
    assert not err
    assert "WRONG at x[" in out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "status", "line"), [
    ("Deep", 2, "Deep.forward raises ValueError: operands could not be broadcast together with shapes (3,) (4,) "
                "(layers.py, line 22)"),
    ("Unmade", 2, "Unmade.__init__ raises RuntimeError: two lines (layers.py, line 26)"),
    ("Stopped", 130, "interrupted"),
])
def test_the_authors_errors_are_one_line_with_the_place(layers, capsys, name, status, line):
    assert main([f"{layers}{name}", "--shape", "3,4"]) == status
    assert capsys.readouterr() == ("", f"error: {line}\n")


def test_command_line_traceback(layers, capsys):
    assert main([f"{layers}Deep", "--shape", "3,4", "--traceback"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "np.zeros(3) + np.zeros(4)" in err


def test_command_line_tolerances_and_positive_inputs(layers, capsys):
    assert main([f"{layers}Log", "--shape", "3,4"]) == 1
    assert "forward's output is not finite" in capsys.readouterr().out
    log = [f"{layers}Log", "--shape", "3,4", "--positive"]
    assert main(log) == 0
    assert main([*log, "--eps", "1e-7", "--rtol", "1e-13", "--atol", "0"]) == 1
    assert main([*log, "--eps", "1e-4", "--rtol", "1e-3", "--atol", "1e-3"]) == 0


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "the following arguments are required: layer"),
    (["minigrad.layers", "--shape", "3"], "expected module:Class or path/to/file.py:Class"),
    (["minigrad.nowhere:Layer", "--shape", "3"], "minigrad.nowhere cannot be imported"),
    (["nowhere.py:Layer", "--shape", "3"], "nowhere.py is not there"),
    (["minigrad.layers:Nothing", "--shape", "3"], "minigrad.layers has no class Nothing; it has "),
    ([*LINEAR, "--shape", "3,0"], "expected positive sizes such as 3,7,4"),
    ([*LINEAR, "--set", "d_in"], "expected NAME=VALUE"),
    ([*LINEAR[:3], "--shape", "3"], "missing 1 required positional argument: 'd_out'"),
    (LINEAR, "--shape is missing"),
    ([*LINEAR, "--shape", "2,4"], "x has shape (2, 4)"),
    ([*LINEAR, "--shape", "2,3", "--state"], "Linear is not a recurrent layer"),
    ([*TANH, "--set", "d_in=3"], "takes no --set"),
    ([*TANH, "--shape", "3"], "too many positional arguments"),
    ([*TANH, "--mode", "direction", "--plot", "x.png"], "expected --mode full"),
    ([*TANH, "--mode", "quick"], "invalid choice: 'quick'"),
    ([*TANH, "--plot", "x.jpg"], "x.jpg: it draws PNG; expected a name that ends in .png"),
    ([*TANH, "--ids", "0"], "--ids is 0; expected 1 or larger"),
    ([*TANH, "--ids", "2", "--positive"], "expected them without --positive"),
    ([*TANH, "--seed", "-1"], "a seed is negative; expected 0 or larger"),
    ([*TANH, "--eps", "-1"], "eps is -1.0"),
    (["minigrad.layers:LSTM", "--set", "d=0", "--set", "h=3", "--shape", "2,3,4"],
     "LSTM.__init__ raises ValueError: LSTM: d is 0"),
])
def test_bad_usage_is_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


# ---- both forms ------------------------------------------------------------------------------------------

X_RRA = normal(2, 5, 4)


def wrong_by_a_percent(function):
    return lambda *arguments: tuple(1.01 * gradient for gradient in function(*arguments))


def test_the_plain_form_is_checked_too(monkeypatch, capsys):
    """Equations that are not what runs by default: their fault is found, and said to be theirs."""
    monkeypatch.setattr(rra, "rra_attention_backward", wrong_by_a_percent(rra.rra_attention_backward))
    layer = RRALSTM(4, 3, 3, rng=0)
    report = gradcheck(layer, (X_RRA,))
    assert not report.ok
    assert not report.plain.ok
    assert all(row.status == "ok" for row in report.rows)
    assert layer.fast
    assert isinstance(next(row.index for row in report.plain.rows if row.name == "w"), tuple)
    assert main(RRA) == 1
    printed = capsys.readouterr().out
    assert "the fast form: every gradient agrees" in printed
    assert "the equations with fast=False: WRONG at " in printed
    assert ", w[" in printed


def test_a_wrong_fast_form_is_said_to_be_the_fast_one(monkeypatch, capsys):
    original = fast_lstm._add_window_to_past
    monkeypatch.setattr(fast_lstm, "_add_window_to_past", lambda dhs, ds, weights, offset: original(
        dhs, ds, 1.01 * weights, offset))
    assert main([*RRA, "--state"]) == 1
    printed = capsys.readouterr().out
    assert "the fast form: WRONG at " in printed
    assert "the equations with fast=False: every gradient agrees" in printed


def test_the_layers_inside_are_checked_in_both_forms():
    layer = Stack(LSTM(4, 3, rng=0), RRALSTM(3, 2, 2, rng=0, fast=False))
    assert gradcheck(layer, (X_RRA,)).plain.ok
    assert [inner.fast for inner in layer.layers] == [True, False]
    assert gradcheck(Stack(GRU(4, 3, rng=0)), (X_RRA,)).plain is None
