"""The frame: trees, checks of arguments, Parameter, Layer and its named parameters, Sequential, Residual."""

import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

import minigrad
from minigrad import Layer, Parameter, Residual, Sequential
from minigrad.layer import summary, validate_on_host
from minigrad.layers import LSTM, URNN, Dropout, Linear
from minigrad.tensors import CheckpointError
from minigrad.tree import tree_leaves, tree_map


class Pair(NamedTuple):
    left: Any
    right: Any


class Holder(Layer):
    """A layer with whatever attributes it is given."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def parameter(value=0.0, name="p"):
    return Parameter(np.full((2,), value), name)


def names_of(layer):
    return [name for name, _ in layer.named_parameters()]


# ---- trees -----------------------------------------------------------------------------------------------


def test_tree_map_keeps_the_structure():
    tree = Pair((1, None, [2, {"a": 3}]), Pair(None, ()))
    doubled = tree_map(lambda leaf: 2 * leaf, tree)
    assert doubled == Pair((2, None, [4, {"a": 6}]), Pair(None, ()))
    assert isinstance(doubled, Pair)
    assert isinstance(doubled.left, tuple)
    assert isinstance(doubled.left[2], list)
    assert tree_map(abs, -1) == 1
    assert tree_map(abs, None) is None


def test_tree_leaves_are_named_by_their_paths():
    tree = Pair((1, None, [2, {"a": 3}]), {5: 4})
    assert list(tree_leaves(tree)) == [("left.0", 1), ("left.2.0", 2), ("left.2.1.a", 3), ("right.5", 4)]
    assert next(iter(tree_leaves(tree, "state"))) == ("state.left.0", 1)
    assert list(tree_leaves(7, "x")) == [("x", 7)]
    assert list(tree_leaves(None, "x")) == []


# ---- Parameter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (2, 3)])
def test_parameter(shape, dtype):
    value = np.ones(shape, dtype)
    p = Parameter(value, "W")
    assert p.value is value
    assert p.grad.shape == shape
    assert p.grad.dtype == dtype
    assert not np.any(p.grad)
    assert repr(p) == f"Parameter(W, shape={shape}, dtype={dtype})"


def test_parameter_zero_grad_is_in_place():
    p = parameter()
    grad, view = p.grad, p.grad[:1]
    p.grad += 3
    p.zero_grad()
    assert p.grad is grad
    assert not grad.any()
    assert not view.any()


@pytest.mark.parametrize(("value", "sentence"), [
    (np.arange(3), "w has dtype int64; expected floating-point numbers"),
    (np.ones(3, bool), "w has dtype bool; expected floating-point numbers"),
    (np.ones(3, complex), "w has dtype complex128; expected floating-point numbers"),
    ([1.0, 2.0], "w is a list; expected a NumPy or CuPy array"),
    (1.0, "w is a float; expected a NumPy or CuPy array"),
])
def test_parameter_refuses(value, sentence):
    with pytest.raises(TypeError) as error:
        Parameter(value, "w")
    assert str(error.value) == sentence


# ---- named parameters ------------------------------------------------------------------------------------


def test_named_parameters_come_in_attribute_order_with_dotted_names():
    inner = Holder(W=parameter(), b=parameter())
    layer = Holder(alpha=parameter(), inner=inner, none=None, number=3, text="W", array=np.zeros(3), v=parameter())
    assert names_of(layer) == ["alpha", "inner.W", "inner.b", "v"]

    assert layer.parameters() == [p for _, p in layer.named_parameters()]
    assert [name for name, _ in layer.children()] == ["alpha", "inner", "v"]


def test_named_parameters_look_into_lists_tuples_and_dicts():
    layer = Holder(heads=[parameter(), (parameter(), None, Holder(W=parameter()))],
                   gates={"i": parameter(), "deep": [Holder(b=parameter())], 3: parameter()},
                   pair=Pair(parameter(), 1), empty=[], nothing={})
    assert names_of(layer) == ["heads.0", "heads.1.0", "heads.1.2.W", "gates.i", "gates.deep.0.b", "gates.3", "pair.0"]


def test_a_shared_parameter_comes_once_under_its_first_name():
    shared = parameter()
    layer = Holder(embedding=Holder(W=shared, b=parameter()), output=Holder(W=shared), again=[shared, {"x": shared}])
    assert names_of(layer) == ["embedding.W", "embedding.b"]


def test_a_shared_layer_comes_once():
    cell = Linear(2, 2)
    assert names_of(Sequential(cell, cell, Residual(cell))) == ["layers.0.W", "layers.0.b"]
    assert names_of(Holder(layers=[cell], by_name={"again": cell}, cell=cell)) == ["layers.0.W", "layers.0.b"]


def test_equal_parameters_that_are_not_one_object_are_both_there():
    value = np.zeros(2)
    assert names_of(Holder(a=Parameter(value), b=Parameter(value))) == ["a", "b"]
    assert len({id(p) for p in Sequential(Linear(2, 2, rng=0), Linear(2, 2, rng=0)).parameters()}) == 4


def test_layers_that_hold_each_other_end():
    a, b = Holder(W=parameter()), Holder(V=parameter())
    a.other, b.other = b, a
    assert len(a.parameters()) == 2


def test_a_shared_layer_collects_the_gradients_of_all_its_uses():
    cell = Linear(3, 3, rng=0, dtype="float64")
    twice, x = Sequential(cell, cell), np.random.default_rng(0).standard_normal((4, 3))
    y, cache = twice.forward(x)
    dy = np.ones_like(y)
    twice.backward(dy, cache)
    dmiddle = dy @ cell.W.value.T
    np.testing.assert_allclose(cell.W.grad, cell(x).T @ dy + x.T @ dmiddle, rtol=1e-12)


# ---- Layer -----------------------------------------------------------------------------------------------


def test_a_bare_layer_says_what_it_lacks():
    with pytest.raises(NotImplementedError, match="Holder has no forward"):
        Holder().forward(np.zeros(3))
    with pytest.raises(NotImplementedError, match="Holder has no forward"):
        Holder()(np.zeros(3))
    with pytest.raises(NotImplementedError, match="Holder has no backward"):
        Holder().backward(np.zeros(3), ())


@pytest.mark.parametrize("dtype", ["float64", np.float64, np.dtype("float64")])
def test_astype_keeps_the_parameter_objects(dtype):
    shared = Parameter(np.ones(3, "float32"))
    shared.grad += 0.5
    layer = Holder(a=shared, b=[shared, Parameter(np.zeros((2, 2), "float32"))])
    before = layer.parameters()
    assert layer.astype(dtype) is layer
    assert layer.parameters() == before
    assert all(p.value.dtype == p.grad.dtype == np.float64 for p in layer.parameters())
    np.testing.assert_array_equal(shared.value, 1)
    np.testing.assert_array_equal(shared.grad, 0.5)
    x = np.ones((1, 3))
    assert Linear(3, 2).astype(dtype)(x).dtype == np.float64


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_astype_refuses_what_is_not_floating_point(dtype):
    with pytest.raises(TypeError, match=f"dtype is '{dtype}'; expected a floating-point dtype"):
        Linear(3, 2).astype(dtype)


def test_to_device_moves_a_shared_parameter_once_and_keeps_its_object(monkeypatch):
    class DeviceArray:
        def __init__(self, host):
            self.host, self.shape, self.dtype = host, host.shape, host.dtype

    DeviceArray.__module__ = "cupy"
    fake, moves = types.ModuleType("cupy"), []
    fake.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=lambda: 1))
    fake.asarray = lambda array: moves.append(array) or DeviceArray(array)
    fake.asnumpy = lambda array: array.host
    monkeypatch.setitem(sys.modules, "cupy", fake)
    shared = parameter(3.0)
    shared.grad += 1
    layer = Holder(a=shared, b={"c": shared})
    layer.to_device("gpu").to_device("gpu")
    assert len(moves) == 2                                       # its value and its gradient
    assert isinstance(shared.value, DeviceArray)
    assert layer.parameters() == [shared]
    layer.to_device("cpu")
    np.testing.assert_array_equal(shared.value, 3)
    np.testing.assert_array_equal(shared.grad, 1)


def test_validate_asks_every_child():
    class Strict(Layer):
        def validate(self):
            raise ArithmeticError("w sums to zero")

    Holder(a=Linear(2, 2), b=[Sequential(Linear(2, 2))], c=parameter()).validate()
    for layer in (Holder(a=Strict()), Sequential(Linear(2, 2), Residual(Strict())), Holder(a={"b": [Strict()]})):
        with pytest.raises(ArithmeticError, match="w sums to zero"):
            layer.validate()
    with pytest.raises(ArithmeticError):
        validate_on_host(Strict(), np.zeros(1))


def test_repr_shows_shapes_and_settings_and_nests():
    assert repr(Linear(3, 2)) == "Linear(W (3, 2), b (2,))"
    layer = Sequential(Linear(3, 2), Residual(Holder(W=parameter(), p=0.5, name="a", norm=Dropout(0.1), _hidden=1)))
    assert repr(layer) == """Sequential(
    layers.0: Linear(W (3, 2), b (2,))
    layers.1: Residual(
        layer: Holder(
            W (2,), p=0.5, name='a'
            norm: Dropout(p=0.1)
        )
    )
)"""


def test_summary_and_count():
    tied = Linear(300, 20)
    layer = Sequential(tied, Linear(20, 1, bias=False, dtype="float64"), tied)
    assert layer.count_parameters() == 300 * 20 + 20 + 20
    assert summary(layer) == """\
layers.0.W  (300, 20)  float32  6,000
layers.0.b  (20,)      float32     20
layers.1.W  (20, 1)    float64     20
total                           6,040"""
    assert summary(Sequential()).split() == ["total", "0"]


# ---- save and load ---------------------------------------------------------------------------------------


def make(seed, d=3, dtype="float32"):
    """Shared layers, one of them with a buffer."""
    linear, cell = Linear(d, d, rng=seed, dtype=dtype), URNN(d, 4, rng=seed, dtype=dtype)
    return Holder(layers=[linear, Residual(linear)], cell=cell, again=[cell])


def values(layer):
    return {name: array.copy() for name, array in layer.named_arrays().items()}


def test_a_layer_is_saved_and_loaded_in_place(tmp_path):
    source, target = make(0), make(1)
    assert set(values(source)) == {*names_of(source), "cell.permutation"}
    source.save(tmp_path / "layer.safetensors")
    arrays = target.named_arrays()
    assert (arrays["cell.permutation"] != source.cell.permutation).any()
    assert target.load(tmp_path / "layer.safetensors") is target
    for name, array in target.named_arrays().items():
        assert array is arrays[name]
        np.testing.assert_array_equal(array, values(source)[name])
    x = np.random.default_rng(0).standard_normal((2, 5, 3)).astype("float32")
    np.testing.assert_array_equal(target.cell(x)[0], source.cell(x)[0])


@pytest.mark.parametrize(("other", "sentence"), [
    (make(1, d=2), r"layers.0.W is float32 \(3, 3\); this model has float32 \(2, 2\)"),
    (make(1, dtype="float64"), r"layers.0.W is float32 \(3, 3\); this model has float64 \(3, 3\)"),
    (Holder(layers=make(1).layers), "cell.V is not known"), (Holder(more=parameter()), "more is missing")])
def test_a_layer_that_does_not_fit_is_left_alone(other, sentence, tmp_path):
    make(0).save(tmp_path / "layer.safetensors")
    before = values(other)
    with pytest.raises(CheckpointError, match=sentence):
        other.load(tmp_path / "layer.safetensors")
    for name, array in other.named_arrays().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_damaged_file_is_refused_and_the_layer_left_alone(tmp_path):
    path, layer = tmp_path / "layer.safetensors", make(0)
    layer.save(path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1                                             # of the last array's last number
    path.write_bytes(content)
    before = values(layer)
    with pytest.raises(CheckpointError, match="does not have the SHA-256 in its header"):
        layer.load(path)
    for name, array in layer.named_arrays().items():
        np.testing.assert_array_equal(array, before[name])


# ---- Sequential and Residual -----------------------------------------------------------------------------


class Spy(Layer):
    """The identity; remembers the keywords it was given."""

    def forward(self, x, mask=None, rng=None):
        self.given = mask, rng
        return x, ()

    def backward(self, dy, cache):
        return dy


def test_sequential_is_the_composition_and_backward_its_reverse():
    a, b = Linear(3, 4, rng=0, dtype="float64"), Linear(4, 2, rng=1, dtype="float64")
    layer, x = Sequential(a, b), np.random.default_rng(0).standard_normal((5, 3))
    y, cache = layer.forward(x)
    np.testing.assert_array_equal(y, b(a(x)))
    dy = np.random.default_rng(1).standard_normal(y.shape)
    np.testing.assert_allclose(layer.backward(dy, cache), dy @ b.W.value.T @ a.W.value.T, rtol=1e-12)
    np.testing.assert_allclose(b.W.grad, a(x).T @ dy, rtol=1e-12)


def test_containers_hand_on_mask_and_rng():
    spies = [Spy(), Spy(), Spy()]
    mask, rng = np.ones((2, 3), bool), np.random.default_rng(0)
    Sequential(spies[0], Residual(Sequential(spies[1])), spies[2]).forward(np.ones((2, 3, 1)), mask=mask, rng=rng)
    assert all(spy.given[0] is mask and spy.given[1] is rng for spy in spies)
    Sequential(*spies).forward(np.ones(3))
    assert spies[0].given == (None, None)


def test_an_empty_sequential_is_the_identity():
    x = np.ones(3)
    y, cache = Sequential().forward(x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(Sequential().backward(x, cache), x)


def test_residual_adds_its_input():
    inner = Linear(3, 3, rng=0, dtype="float64")
    x, dy = np.random.default_rng(0).standard_normal((2, 4, 3))
    y, cache = Residual(inner).forward(x)
    np.testing.assert_array_equal(y, x + inner(x))
    np.testing.assert_allclose(Residual(inner).backward(dy, cache), dy + dy @ inner.W.value.T, rtol=1e-12)


def test_residual_refuses_a_layer_that_changes_the_shape():
    with pytest.raises(ValueError, match=r"maps \(4, 3\) to \(4, 2\); expected the same shape"):
        Residual(Linear(3, 2)).forward(np.ones((4, 3), "float32"))
    with pytest.raises(ValueError, match="expected the same shape"):     # (4, 1) would broadcast
        Residual(Linear(3, 1)).forward(np.ones((4, 3), "float32"))


@pytest.mark.parametrize("make", [Sequential, Residual])
def test_containers_refuse_what_does_not_fit(make):
    with pytest.raises(TypeError, match="LSTM is recurrent and returns a state"):
        make(LSTM(2, 3))
    for thing in (Linear, np.zeros(3), None, lambda x: x):
        with pytest.raises(TypeError, match=f"{make.__name__}: got a .*; expected layers"):
            make(thing)


def test_public_names():
    assert set(minigrad.__all__) >= {"Parameter", "Layer", "Sequential", "gradcheck", "summary"}
    assert all(hasattr(minigrad, name) for name in minigrad.__all__)
    assert callable(minigrad.gradcheck)
    assert isinstance(Dropout(0.5), Layer)
