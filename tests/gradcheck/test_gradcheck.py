"""The gradient checker itself: right gradients pass, planted faults are found and named, kinks are told from errors."""

import sys

import numpy as np
import pytest
from planted_faults import FAULTS, REFERENCES, Recurrence, Tanh, arguments
from scipy.sparse import csr_array

from minigrad import Layer, Parameter, Residual, Sequential, functional, gradcheck, losses
from minigrad.fast import lstm as fast_lstm
from minigrad.gradcheck.__main__ import main
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
    "RRALSTM": (RRALSTM(4, 2, 3, rng=0), (X[:, :3],), {"mask": MASK[:, :3], "state": states((3, 4, 2), (3, 2))}),
    "Sequential": (Sequential(Linear(4, 5, rng=0), Dropout(0.3), Linear(5, 2, rng=1)), (X,), {"rng": 3}),
    "Residual": (Residual(Linear(4, 4, rng=0)), (X,), {"mask": MASK}),
    "Stack": (Stack(LSTM(4, 3, rng=0), RRALSTM(3, 2, 2, rng=1)), (X[:, :3],),
              {"mask": MASK[:, :3], "state": (states((3, 3), (3, 3)), states((3, 3, 2), (3, 2)))}),
    **{name: (namespace, (X, X + 1, normal(3, 5, 2)) if name.endswith("_attention") else (X,), {})
       for name, namespace in vars(functional).items() if hasattr(namespace, "forward")},
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


class OneEntryOff(Linear):
    def backward(self, dy, cache):
        before, dx = self.W.grad[self.index], super().backward(dy, cache)
        self.W.grad[self.index] += 1e-3 * (self.W.grad[self.index] - before)
        return dx


@pytest.mark.parametrize("index", [(0, 0), (17, 5), (59, 29)])
def test_direction_mode_finds_one_entry_in_a_larger_model(index):
    rng = np.random.default_rng(0)
    wide = OneEntryOff(60, 30, rng=0)
    wide.index = index
    model = Sequential(Linear(20, 60, rng=0), Tanh(rng), wide, Tanh(rng), Linear(30, 5, rng=1))
    report = gradcheck(model, (normal(6, 20),), mode="direction")
    assert wrong_rows(report) == {"layers.2.W"}
    row, = (row for row in report.rows if row.name == "layers.2.W")
    assert row.index == index
    assert row.analytic / row.numeric == pytest.approx(1.001, rel=1e-6)


def test_a_gradient_near_large_outputs_is_not_excused():
    """Outputs of 1e4 round so coarsely that the slope at a smaller eps could be anything: that is no evidence."""
    M, claimed = np.ones((5, 5)) / 5, []

    def backward(dy, x):
        claimed.append(1.00001 * (dy * (1 - np.tanh(x @ M)**2)) @ M.T)
        return claimed[-1]
    layer = function(lambda x: 1e4 + np.tanh(x @ M), backward)
    for seed in range(4):
        claimed.clear()
        row = gradcheck(layer, (normal(8, 5, seed=seed),), seed=seed).rows[0]
        assert row.kinks == 0
        assert row.bad[np.abs(claimed[0]) > 0.05].all()


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


class Slotted(Scale):
    __slots__ = ("W",)


class OnlySlots:
    __slots__ = ("W",)
    __init__, forward, backward = Scale.__init__, Scale.forward, Scale.backward


@pytest.mark.parametrize("kind", [Scale, Slotted, OnlySlots])
def test_the_parameters_of_what_is_no_Layer_are_checked(kind):
    assert wrong_rows(gradcheck(kind(), (normal(3, 4),))) == {"W"}


class Lazy(Linear):
    """Makes a layer at the first call."""

    def forward(self, x, mask=None, rng=None):
        self.parts = [*getattr(self, "parts", [Linear(4, 4, rng=0)])]
        return super().forward(x)


def test_parameters_that_forward_makes_are_reported():
    report = gradcheck(Lazy(4, 4), (normal(3, 4),))
    assert any("forward edits the layer's attribute parts.0.W;" in problem for problem in report.problems)


def test_parameters_that_no_layer_holds_are_reported():
    inner, layer = Scale(), Tanh(None)
    inner.itself, inner.numpy, inner.more = inner, np, {"b": [{inner.W}, Parameter(normal(2))]}
    layer.inner, layer.unused, layer.tied = inner, [len, inner], (layer, Linear(2, 2, rng=0))
    report = gradcheck(layer, (normal(3, 4),))
    said = "is held by an object that is no Layer, or in a set: it is neither checked nor trained"
    assert [problem for problem in report.problems if "held" in problem] == [
        f"the Parameter inner.{name} {said}" for name in ("W", "more.b.1")]


def test_a_recurrent_layer_returns_a_pair():
    class Alone(Recurrence):
        def backward(self, upstream, cache):
            return super().backward(upstream, cache)[0]
    report = gradcheck(Alone(np.random.default_rng(0)), (normal(2, 3, 4),))
    assert report.problems == ["backward of a recurrent layer must return the pair (dx, dstate0), for state=None too"]


NOTHING = "nothing to compare: no floating-point input and no parameter"


@pytest.mark.parametrize(("forward", "backward", "x", "problem"), [
    (np.square, lambda dy, x: None, np.arange(4), NOTHING),
    (np.square, lambda dy, x: 2 * x * dy, np.zeros((0, 3)), NOTHING),
    (lambda x: (x > 0).astype(int), lambda dy, x: 0 * x, normal(3), "forward returns no floating-point output"),
    (np.square, lambda dy, x: 1.0, normal(3), "the gradient of x is a float; expected an array"),
    (np.log, lambda dy, x: dy / x, normal(3),
     "forward's output is not finite at these inputs: nothing to compare there"),
])
def test_what_cannot_be_compared_is_a_problem(forward, backward, x, problem):
    report = gradcheck(function(forward, backward), (x,))
    assert not report.ok
    assert not report.rows
    assert str(report).splitlines()[1:] == [f"problem: {problem}"]           # no head without a table


def test_scalars_and_fortran_order():
    class Scaled(Layer):
        def __init__(self):
            self.alpha, self.W = Parameter(np.array(1.5)), Parameter(np.asfortranarray(normal(4, 4)))

        def forward(self, x):
            return self.alpha.value * (x @ self.W.value), x

        def backward(self, dy, x):
            self.add_gradients(alpha=(dy * (x @ self.W.value)).sum(), W=self.alpha.value * np.outer(x, dy))
            return self.alpha.value * (self.W.value @ dy)
    report = gradcheck(Scaled(), (normal(4),))
    assert report.ok, report
    assert [row.shape for row in report.rows] == [(4,), (), (4, 4)]


def test_odd_things_in_caches_and_attributes_do_no_harm():
    class Odd(Linear):
        def __init__(self):
            super().__init__(4, 4, rng=0)
            self.settings = {"dtype": np.float32, "names": ("a", None), "self": self, "table": csr_array(np.eye(4))}

        def forward(self, x, mask=None, rng=None):
            y, cache = super().forward(x)
            return y, {"inner": cache, "table": self.settings["table"], "size": x.sum(), "dtype": np.float64, "f": len}

        def backward(self, dy, cache):
            return super().backward(dy, cache["inner"])
    report = gradcheck(Odd(), (normal(3, 4),))
    assert report.ok, report


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
    "relu within eps, left": (functional.relu, np.where(AT_ZERO == 0, -4e-7, AT_ZERO), 3),
    "relu, another subgradient": (relu_wrong(at_kink=0.3), AT_ZERO, 3),
    "abs at 0": (absolute(0), AT_ZERO, None),                    # 0 is the central difference itself: no kink seen
    "abs at 0, another subgradient": (absolute(-0.9), AT_ZERO, 3),
    "abs within eps": (absolute(0), np.where(AT_ZERO == 0, 3e-6, AT_ZERO), 3),
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
    """Nor in direction mode, where every direction passes over the kinks: the check goes on near them."""
    report = gradcheck(relu_wrong(smooth=smooth, where=(2, 2)), (AT_ZERO,), mode=mode)
    assert not report.ok, report
    if mode == "full":
        assert report.rows[0].index == (2, 2)
        assert report.rows[0].wrong == 1
    assert "(2, 2)" in str(report)


def test_all_entries_at_a_kink_are_still_checked_near_it():
    half = elementwise(lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, 0.5, 0))
    report = gradcheck(half, (np.zeros((3, 4)),))
    assert report.rows[0].kinks == 12
    assert not report.ok
    assert "near the kinks" in report.problems[0]


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
       for width in (1e-4, 1e-5, 1e-6, 1e-8, 1e-10)},
    **{f"softplus of width {width:g}": (elementwise(
        lambda x, w=width: w * np.logaddexp(0, x / w), lambda x, w=width: 0 * x + 0.4), 0.0)
       for width in (1e-4, 1e-5, 1e-6, 1e-8, 1e-10)},
}


@both_modes
@pytest.mark.parametrize("name", NO_KINKS)
def test_steps_rounding_and_sharp_curves_are_not_excused_as_kinks(name, mode):
    layer, x = NO_KINKS[name]
    report = gradcheck(layer, (np.atleast_1d(x),), mode=mode)
    assert wrong_rows(report) == {"x"}, report


@both_modes
@pytest.mark.parametrize("k", [1.0, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("error", [0.0, 3e-6, 1e-3])
def test_strong_curvature_hides_no_error_and_is_no_kink(k, error, mode):
    layer = elementwise(lambda x: np.tanh(k * x), lambda x: (1 + error) * k * (1 - np.tanh(k * x)**2))
    report = gradcheck(layer, (normal(12) / k,), mode=mode)
    assert report.rows[0].kinks == 0
    assert report.ok if error == 0 else wrong_rows(report) == {"x"}, report


@both_modes
@pytest.mark.parametrize("scale", [1e-3, 1e-6, 1e-9, 1e-12])
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
    "squared relu, wrong at 0": (squared_relu(at_zero=-3e-5), False),
    "x|x|": (elementwise(lambda x: x * np.abs(x), lambda x: 2 * np.abs(x)), True),
}


@both_modes
@pytest.mark.parametrize("name", JUMPS)
def test_jumps_of_the_second_derivative(name, mode):
    """The central difference is off by a multiple of eps, which is no error; but a slope that is off is one."""
    layer, right = JUMPS[name]
    for x in (AT_ZERO, np.zeros((3, 3)) if "elsewhere" not in name else AT_ZERO):
        for seed in range(2):
            report = gradcheck(layer, (x,), mode=mode, seed=seed)
            assert report.ok == right, report
            assert not report.notes


@both_modes
def test_where_eps_leaves_the_domain_a_smaller_one_is_asked_for(mode):
    log, x = elementwise(np.log, lambda x: 1 / x), np.array([1e-5, 0.3])
    report = gradcheck(log, (x,), mode=mode, eps=2e-5)
    assert wrong_rows(report) == {"x"}
    assert "x: forward is not finite nearer than eps to the inputs: take a smaller eps" in report.notes
    assert gradcheck(log, (x,), mode=mode, eps=1e-8).ok


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
    assert gradcheck(LSTM(4, 5, rng=0), (x,), {"mask": MASK}, mode="direction").ok


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
    assert head == "gradcheck of Doubling (full mode): WRONG"
    assert columns.split() == ["tensor", "shape", "worst", "index", "analytic", "numeric", "rel.", "error", "wrong"]
    assert [line.split()[0] for line in lines] == ["x", "W", "b"]
    row = report.rows[0]
    for word in ("(3, 4)", str(row.index), f"{row.analytic:.9e}", f"{row.numeric:.9e}", "5.0e-01", "12/12", "wrong"):
        assert word in lines[0]
    assert row.errors.shape == row.bad.shape == (3, 4)
    assert row.bad.all()
    assert row.errors.max() > 1e5


def test_plot(tmp_path):
    path = tmp_path / "plot.png"
    gradcheck(functional.relu, (AT_ZERO,)).plot(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="expected mode='full'"):
        gradcheck(functional.relu, (AT_ZERO,), mode="direction").plot(tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


RRA = ["minigrad.layers:RRALSTM", "--shape", "2,4,3", "--set", "d=3", "--set", "h=2", "--set", "K=3"]


@pytest.mark.parametrize("more", [
    [], ["--mask"], ["--state"], ["--mask", "--state", "--rng", "3", "--mode", "direction", "--seed", "4"],
    ["--set", "normalize=softmax", "--set", "offset=1"],
])
def test_command_line(more, capsys):
    assert main([*RRA, *more]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("gradcheck of RRALSTM")
    assert "every gradient agrees" in out
    assert ("state.0" in out) == ("--state" in more)
    assert not err


@pytest.mark.parametrize("arguments", [
    ["minigrad.functional:softmax", "--shape", "3,4"],
    ["minigrad.losses:mean_squared_error", "--shape", "3,4", "--shape", "3,4"],
    ["minigrad.layers:Dropout", "--shape", "3,4", "--set", "p=0.5", "--rng", "1"],
])
def test_command_line_of_other_things(arguments, capsys):
    assert main(arguments) == 0
    assert "every gradient agrees" in capsys.readouterr().out


def test_command_line_on_a_file(tmp_path, capsys):
    """A faulty layer in a file of its own: status 1, the tensor named, a picture drawn."""
    path, plot = tmp_path / "mine.py", tmp_path / "mine.png"
    path.write_text("from planted_faults import *\n\n" + FAULTS[0].source(), encoding="utf-8")
    assert main([f"{path}:Affine", "--shape", "4,4", "--plot", str(plot)]) == 1
    out, _ = capsys.readouterr()
    assert "WRONG" in out
    wrong, = (line for line in out.splitlines()[2:] if line.endswith("wrong"))
    assert wrong.startswith("x ")
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "the following arguments are required: layer"),
    (["minigrad.layers"], "expected module:Class or path/to/file.py:Class"),
    (["minigrad.nowhere:Layer", "--shape", "3"], "minigrad.nowhere cannot be imported"),
    (["nowhere.py:Layer", "--shape", "3"], "nowhere.py is not there"),
    (["minigrad.layers:Nothing", "--shape", "3"], "minigrad.layers has no class Nothing; it has "),
    (["minigrad.layers:Linear", "--shape", "3,0"], "expected positive sizes such as 3,7,4"),
    (["minigrad.layers:Linear", "--set", "d_in"], "expected NAME=VALUE"),
    (["minigrad.layers:Linear", "--set", "d_in=3", "--shape", "3"], "missing 1 required positional argument: 'd_out'"),
    (["minigrad.layers:Linear", "--set", "d_in=3", "--set", "d_out=3"], "--shape is missing"),
    (["minigrad.layers:Linear", "--set", "d_in=3", "--set", "d_out=3", "--shape", "2,3", "--state"],
     "Linear is not a recurrent layer"),
    (["minigrad.functional:tanh", "--set", "d_in=3", "--shape", "3"], "takes no --set"),
    (["minigrad.functional:tanh", "--shape", "3", "--mode", "direction", "--plot", "x.png"], "expected --mode full"),
    (["minigrad.functional:tanh", "--shape", "3", "--plot", "x.jpg"], "x.jpg: it draws PNG; expected a name that"),
    (["minigrad.functional:tanh", "--shape", "3", "--ids", "-1"], "--ids: '-1'; expected a whole number, 1 or larger"),
    (["minigrad.functional:tanh", "--shape", "3", "--ids", "2", "--positive"], "expected them without --positive"),
    (["minigrad.functional:tanh", "--shape", "3", "--eps", "-1"], "eps is -1.0"),
    (["minigrad.layers:LSTM", "--set", "d=0", "--set", "h=3", "--shape", "2,3,4"],
     "ValueError: LSTM: d is 0"),
])
def test_bad_usage_is_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


LAYERS = """
import numpy as np
from minigrad import Layer, Parameter
from near_the_layers import scale

class Drawn(Layer):
    def __init__(self, rng):
        self.W = Parameter(rng.standard_normal(4))

    def forward(self, x, mask=None, rng=None):
        return scale * x * self.W.value, x

    def backward(self, dy, x):
        self.W.grad += scale * (dy * x).sum(axis=0)
        return scale * dy * self.W.value

class Deep(Drawn):
    def backward(self, dy, x):
        return np.zeros(3) + np.zeros(4)

class Stopped(Drawn):
    def forward(self, x, mask=None, rng=None):
        raise KeyboardInterrupt

class Table(Drawn):
    def forward(self, ids):
        return self.W.value[ids], ids

    def backward(self, dy, ids):
        np.add.at(self.W.grad, ids, dy)

class Log(Layer):
    def forward(self, x, mask=None, rng=None):
        return np.log(x), x

    def backward(self, dy, x):
        return dy / x

class Mean(Layer):
    def forward(self, x, mask=None, rng=None):
        n = mask.sum(axis=1)[:, None]
        assert n[0] and not n[-1]
        return (x * mask[..., None]).sum(axis=1) / n, (mask, n)
"""


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """A file of layers that imports another one in its folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "near_the_layers", raising=False)
    (tmp_path / "near_the_layers.py").write_text("scale = 2\n", encoding="utf-8")
    (tmp_path / "layers.py").write_text(LAYERS, encoding="utf-8")
    return f"{tmp_path / 'layers.py'}:"


@pytest.mark.parametrize("arguments", [["Drawn", "--shape", "3,4"], ["Table", "--shape", "2,5", "--ids", "3"]])
def test_command_line_hands_out_a_generator_and_ids(layers, capsys, arguments):
    assert main([f"{layers}{arguments[0]}", *arguments[1:]]) == 0
    assert not capsys.readouterr().err


def test_the_authors_errors_are_one_line_with_the_place(layers, capsys):
    line = "error: ValueError: operands could not be broadcast together with shapes (3,) (4,) (layers.py, line 19)\n"
    assert main([f"{layers}Deep", "--shape", "3,4"]) == 2
    assert capsys.readouterr() == ("", line)
    assert main([f"{layers}Deep", "--shape", "3,4", "--traceback"]) == 2
    _, err = capsys.readouterr()
    assert err.startswith("Traceback")
    assert "return np.zeros(3)" in err
    assert err.endswith(line)
    assert main([f"{layers}Stopped", "--shape", "3,4"]) == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")


def test_command_line_tolerances_and_positive_inputs(layers, capsys):
    assert main([f"{layers}Log", "--shape", "3,4"]) == 1
    assert "forward's output is not finite" in capsys.readouterr().out
    log = [f"{layers}Log", "--shape", "3,4", "--positive"]
    assert main(log) == 0
    assert main([*log, "--eps", "1e-7", "--rtol", "1e-13", "--atol", "0"]) == 1
    assert main([*log, "--eps", "1e-4", "--rtol", "1e-3", "--atol", "1e-3"]) == 0


def test_command_line_mask_leaves_a_sample_without_a_real_step(layers, capsys):
    for seed in "01":
        assert main([f"{layers}Mean", "--shape", "2,3,4", "--mask", "--seed", seed]) == 1
        assert "forward's output is not finite" in capsys.readouterr().out


# ---- both forms ------------------------------------------------------------------------------------------

COMMAND = ["minigrad.layers:RRALSTM", "--shape", "3,7,4", "--set", "d=4", "--set", "h=5", "--set", "K=3"]


def test_the_plain_form_is_checked_too(monkeypatch, capsys):
    """Equations that are not what runs by default: their fault is found, and said to be theirs."""
    original = rra.rra_attention_backward
    monkeypatch.setattr(rra, "rra_attention_backward", lambda *arguments: [1.01 * d for d in original(*arguments)])
    layer = RRALSTM(4, 5, 3, rng=0)
    report = gradcheck(layer, (X,), mode="direction")
    assert not report.ok
    assert not report.plain.ok
    assert all(row.status == "ok" for row in report.rows)
    assert layer.fast
    assert isinstance(next(row for row in report.plain.rows if row.name == "w").index, tuple)
    assert main(COMMAND) == 1
    printed = capsys.readouterr().out
    assert "the fast form: every gradient agrees" in printed
    assert "the equations with fast=False: WRONG" in printed


def test_a_wrong_fast_form_is_said_to_be_the_fast_one(monkeypatch, capsys):
    original = fast_lstm._add_window_to_past
    monkeypatch.setattr(fast_lstm, "_add_window_to_past", lambda dhs, ds, weights, offset: original(
        dhs, ds, 1.01 * weights, offset))
    assert main([*COMMAND, "--state", "--mode", "direction"]) == 1
    printed = capsys.readouterr().out
    assert "the fast form: WRONG" in printed
    assert "the equations with fast=False: every gradient agrees" in printed


def test_the_layers_inside_are_checked_in_both_forms(monkeypatch):
    layer = Stack(LSTM(4, 3, rng=0), RRALSTM(3, 2, 2, rng=0, fast=False))
    assert gradcheck(layer, (X,), mode="direction").plain.ok
    assert [inner.fast for inner in layer.layers] == [True, False]
    assert gradcheck(Stack(GRU(4, 3, rng=0)), (X,), mode="direction").plain is None

    def fails(*arguments):
        raise RuntimeError("in the equations")
    monkeypatch.setattr(LSTM, "cell_backward", fails)
    with pytest.raises(RuntimeError, match="in the equations"):
        gradcheck(layer, (X,), mode="direction")
    assert [inner.fast for inner in layer.layers] == [True, False]
