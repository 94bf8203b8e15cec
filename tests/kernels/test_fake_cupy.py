"""The stand-in for CuPy itself: it has CuPy's names, refuses what a GPU refuses or waits for, and catches faults."""

import importlib.util
import math
import re
from pathlib import Path

import fake_cupy
import numpy as np
import pytest
import scipy.special
from fake_cupy import NAMES, NotModelled, TransferError, UndefinedError, no_transfers, peek, transfers
from fake_cupy_names import of_real, recorded, signature

from minigrad import functional
from minigrad.backend import asnumpy, step_generator, to_device, uniform_like
from minigrad.clipping import clip_grad_norm
from minigrad.fast import lstm as lstm_loop
from minigrad.layers import (
    LSTM,
    RNN,
    RRALSTM,
    URNN,
    Embedding,
    Linear,
    TransformerEncoderLayer,
    dropout as dropout_file,
    embedding,
    recurrent as recurrent_file,
    rra as rra_file,
    transformer as transformer_file,
)
from minigrad.losses import mean_squared_error
from minigrad.optim import SGD

ROOT = Path(__file__).resolve().parents[2]
B, L, D = 2, 3, 4


@pytest.fixture
def cupy(fake_gpu):
    return fake_gpu


@pytest.fixture
def x(cupy):
    """(B, D) on the device; what made it is not counted."""
    array = cupy.asarray(np.random.default_rng(0).standard_normal((B, D)))
    fake_cupy.events.clear()
    return array


# ---- CuPy's names ----------------------------------------------------------------------------------------


def test_the_stand_in_has_no_name_that_cupy_has_not():
    class Plain:
        """What every class has, under any version of Python."""

    own = {name for name in vars(fake_cupy.ndarray) if name.startswith("__") or not name.startswith("_")}
    ours = {f"cupy.ndarray.{name}" for name in own - {"__slots__", "__getattr__", *dir(Plain)}}
    assert ours <= set(NAMES)
    assert set(fake_cupy.MODELLED) <= set(NAMES)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_the_recorded_names_are_those_of_the_real_cupy():
    """Of the recorded version all are; of another one those that the stand-in offers, with all of their parameters."""
    (version, names), (real_version, real_names) = recorded(), of_real()
    if version == real_version:                  # but for submodules that something has imported since
        more = {name for name, kind in real_names.items() if name not in names and kind != "module"}
        # Some Pythons have more to tell of what is compiled: a buffer, `self`.
        assert more <= {f"cupy.ndarray.{name}" for name in ("__buffer__", "__release_buffer__")}
        told = {name: kind.replace("( self", "(") for name, kind in real_names.items()}
        assert [name for name in names if names[name] != told[name] and "**" not in names[name]] == []
    for name in fake_cupy.MODELLED:
        assert name in real_names
        ours, theirs = names[name], real_names[name]
        if ours.startswith("(") and "**" not in theirs:
            assert set(signature(ours).parameters) <= set(signature(theirs).parameters), name


def test_all_that_the_code_asks_of_xp_is_there():
    """Also in lines that no test reaches on the stand-in."""
    asked = set()
    for path in [*ROOT.glob("minigrad/**/*.py"), *ROOT.glob("models/*.py")]:
        text = path.read_text(encoding="utf-8")
        asked.update(re.findall(r"\bxp\.(\w+(?:\.\w+)?)", text))
        asked.update(re.findall(r"\barray_module\([^()]*\)\.(\w+)", text))
    assert {"exp", "add.at", "add.reduce", "fft.ifft", "concatenate", "take_along_axis"} <= asked
    for name in asked:
        first, _, rest = name.partition(".")
        place = "cupy.ufunc" if NAMES.get(f"cupy.{first}", "").startswith("ufunc") else f"cupy.{first}"
        assert f"cupy.{first}" in NAMES, name
        assert not rest or f"{place}.{rest}" in NAMES, name


def test_a_name_that_is_not_there(cupy, x):
    with pytest.raises(AttributeError, match="module 'cupy' has no attribute 'spacing'"):
        cupy.spacing(x)
    with pytest.raises(AttributeError, match=r"module 'cupyx\.scipy\.special' has no attribute 'owens_t'"):
        cupy_special().owens_t(x)
    with pytest.raises(AttributeError, match=r"'cupy\.ndarray' object has no attribute 'itemset'"):
        x.itemset(0, 1.0)
    with pytest.raises(NotModelled, match=r"^cupy\.kron$"):
        cupy.kron(x, x)
    with pytest.raises(NotModelled, match=r"^cupy\.ndarray\.partition$"):
        x.partition(1)


def cupy_special():
    return importlib.import_module("cupyx.scipy.special")


# ---- what it allows --------------------------------------------------------------------------------------


def test_what_stays_on_the_device_moves_nothing(cupy, x):
    with no_transfers():
        y = cupy.exp(x) * np.float64(2) + np.float32(1) - x / 3
        y[0, 1] = 7
        y[:, cupy.arange(2)] += y[:, :2]
        total = y.sum(axis=0, keepdims=True, dtype="float64")
        cupy.multiply(y, total, y)
        cupy.copyto(y, -math.inf, where=y > 4)
        scaled = 2 * cupy.where(cupy.isfinite(y), y, 0) @ cupy.ones((D, 1))
        rows = [row.max() for row in y]
        assert cupy.stack(rows).shape == (B,)
        assert cupy.asarray([rows[0], rows[1]]).shape == (B,)
        assert not len(cupy.zeros((0, 2)))
    h = peek(x)
    e = np.exp(h) * 2 + 1 - h / 3
    e[0, 1] = 7
    e[:, [0, 1]] *= 2
    e *= e.sum(axis=0)
    e[e > 4] = -math.inf
    np.testing.assert_allclose(peek(y), e)
    np.testing.assert_allclose(peek(scaled)[:, 0], 2 * np.where(np.isfinite(e), e, 0).sum(axis=1))
    assert fake_cupy.events == []


def test_results_without_axes_are_arrays_and_elements_are_views(cupy, x):
    assert isinstance(x.sum(), cupy.ndarray)
    assert x.sum().shape == ()
    element = x[1, 2]
    element += 1
    assert peek(x)[1, 2] == peek(element)
    x.real[...] = 0
    assert not peek(x).any()


def test_memory_is_laid_out_as_cupy_lays_it_out(cupy):
    """A ufunc's result and an indexed copy are in C order; from the host only an array that is F-contiguous alone
    keeps its order, where NumPy keeps that of any."""
    host = np.arange(24.0).reshape(2, 3, 4)
    x = cupy.asarray(host.transpose(1, 0, 2))
    assert x.flags.c_contiguous
    assert cupy.asarray(host.T).flags.f_contiguous
    assert (x.T * 2).flags.c_contiguous
    assert x[:, :, cupy.arange(2)].flags.c_contiguous
    assert cupy.asarray(host[:1, :, 0].T).strides == (8, 8)
    assert not cupy.zeros_like(cupy.asarray(host.T)).flags.c_contiguous


def test_an_operand_that_shares_memory_with_out_is_copied_first(cupy, x):
    with fake_cupy.launches() as names:
        cupy.add(x, 1, out=x)
        part = x[:1]
        cupy.add(part, 1, out=part)
    assert names == ["add", "add"]
    with fake_cupy.launches() as names:
        cupy.add(x[:1], 1, out=x[:1])
    assert names == ["copy of an operand", "add"]


def test_what_moves_is_counted(cupy, x):
    with transfers() as moved:
        cupy.asarray(np.zeros(3, "int64"))
        cupy.asarray(0.5, "float32")
        cupy.asnumpy(x), x.get(), asnumpy(x)
        float(x.sum()), bool(x[0, 0] > 0), x[0, 0].item()
        x[[0, 1]]
        x[cupy.arange(2)] = 3.0
    assert [kind for kind, _ in moved] == ["to_device"] * 2 + ["to_host"] * 3 + ["wait"] * 3 + ["to_device"] * 2
    with transfers() as moved:
        cupy.flatnonzero(x), x[x > 0]
        x[x > 0] = 0
    assert moved == [("wait", "flatnonzero"), ("wait", "getting by a mask"), ("wait", "setting by a mask"),
                     ("to_device", "setting a number at places given by an array")]


def test_the_parameters_are_those_of_cupy(cupy, x):
    for call in (lambda: cupy.add(x, x, where=x > 0), lambda: cupy.sum(x, where=x > 0), lambda: x.max(initial=0.0),
                 lambda: cupy.take_along_axis(x, cupy.zeros((B, 1), int)), lambda: cupy.exp(x, subok=True),
                 lambda: cupy.clip(x, 0, 1, casting="unsafe"), lambda: x.argsort(stable=True)):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(NotImplementedError, match=r"`cupy_maximum.reduce` is not supported yet"):
        cupy.maximum.reduce(x)
    with pytest.raises(TypeError, match="scatter_add only supports"):
        cupy.add.at(cupy.zeros(3, "int64"), cupy.arange(2), cupy.ones(2, "int64"))
    with pytest.raises(TypeError, match="CuPy has no dtype float128"):
        cupy.asarray(np.zeros(2, "longdouble"))


def test_a_generator_is_made_when_it_is_first_drawn_from(cupy):
    before = fake_cupy._BitGenerator.made
    rng = step_generator(3, 5, "gpu")
    assert fake_cupy._BitGenerator.made == before
    with no_transfers():
        u, v = (uniform_like(rng, cupy.zeros((40, 50), dtype)) for dtype in ("float32", "float64"))
    assert fake_cupy._BitGenerator.made == before + 1
    assert (u.dtype, v.dtype) == ("float32", "float64")
    assert abs(peek(u).mean() - 0.5) < 0.03
    again = step_generator(3, 5, "gpu").random((40, 50), "float32")
    np.testing.assert_array_equal(peek(again), peek(u))


# ---- planted faults --------------------------------------------------------------------------------------
# What an author of a layer does by mistake: each is refused, or within no_transfers().

FAULTS = {
    "a function of NumPy": lambda x, xp: np.exp(x),
    "a function of SciPy": lambda x, xp: scipy.special.expit(x),
    "NumPy's where": lambda x, xp: np.where(x > 0, x, 0),
    "NumPy's sum": lambda x, xp: np.sum(x),
    "NumPy's stack of device arrays": lambda x, xp: np.stack([x, x]),
    "NumPy's array of device arrays": lambda x, xp: np.array([x[0], x[1]]),
    "NumPy's view of it": lambda x, xp: np.asarray(x),
    "an array of NumPy beside it": lambda x, xp: x * np.ones(D),
    "an array of NumPy before it": lambda x, xp: np.ones(D) - x,
    "a constant that is an array of NumPy": lambda x, xp: x * np.array(2.0),
    "in place with an array of NumPy": lambda x, xp: x.__iadd__(np.ones(D)),
    "an array of NumPy in place": lambda x, xp: np.ones((B, D)).__imul__(x),
    "out of NumPy": lambda x, xp: xp.exp(x, out=np.empty((B, D))),
    "a product with NumPy": lambda x, xp: x @ np.ones((D, 2)),
    "stack with one of NumPy": lambda x, xp: xp.stack([x, np.ones((B, D))]),
    "a list of both made an array": lambda x, xp: xp.array([x[0], np.ones(D)]),
    "written into NumPy": lambda x, xp: np.zeros((B, D)).__setitem__(..., x),
    "NumPy written into it": lambda x, xp: x.__setitem__(..., np.zeros((B, D))),
    "an index left on the host": lambda x, xp: x[np.arange(2)],
    "an index list": lambda x, xp: x[[1, 0]],
    "a mask left on the host": lambda x, xp: x.__setitem__(np.ones((B, D), bool), 0),
    "a mask on the device": lambda x, xp: x[x > 0],
    "a scatter by an index on the host": lambda x, xp: xp.add.at(x, np.array([0, 0]), x),
    "NumPy's scatter": lambda x, xp: np.add.at(x, xp.arange(2), x),
    "NumPy indexed by it": lambda x, xp: np.arange(5)[xp.arange(2)],
    "float": lambda x, xp: x * float(x[0, 0]),
    "a function of math": lambda x, xp: math.exp(x[0, 0]),
    "if": lambda x, xp: 1 if (x > 0).any() else 0,
    "Python's max": lambda x, xp: max(x[0]),
    "Python's loop that reads values": lambda x, xp: [int(n) for n in xp.arange(3)],
    "range of a length on the device": lambda x, xp: range(xp.asarray(x).sum()),
    "a size from the device": lambda x, xp: xp.zeros(xp.arange(3).max()),
    "item": lambda x, xp: x[0, 0].item(),
    "an assertion of equality": lambda x, xp: x == x and None,
    "text of it": lambda x, xp: f"{x}",
    "a constant made an array": lambda x, xp: x * xp.asarray(0.5),
    "a name that CuPy lacks": lambda x, xp: xp.vecdot(x, x),
    "where= of a ufunc": lambda x, xp: xp.divide(1, x, where=x > 0),
    "nonzero": lambda x, xp: xp.nonzero(x > 0),
    "numbers drawn on the host": lambda x, xp: uniform_like(np.random.default_rng(0), x),
    "two values set at one place": lambda x, xp: x.__setitem__(xp.zeros(2, int), x),
    "two values added at one place": lambda x, xp: x.__setitem__(xp.zeros(2, int), x[xp.zeros(2, int)] + x),
}


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name, cupy, x):
    before = peek(x)
    with pytest.raises((TypeError, AttributeError, TransferError, UndefinedError)), no_transfers():
        FAULTS[name](x, cupy)
    np.testing.assert_array_equal(peek(x), before)


# ---- faults planted into minigrad ------------------------------------------------------------------------


def one_step(layer, x, **keywords):
    """A training step on the device."""
    x = to_device(x, "gpu")
    keywords = {name: to_device(value, "gpu") for name, value in keywords.items()}
    layer.to_device("gpu")
    optimizer = SGD(layer.parameters())
    with no_transfers():
        y, cache = layer.forward(x, rng=step_generator(0, 0, "gpu"), **keywords)
        recurrent = isinstance(y, tuple)
        dy = (y[0] if recurrent else y) * 0.1
        layer.backward((dy, None) if recurrent else dy, cache)
        clip_grad_norm(layer.parameters(), 1.0)
        optimizer.step()


def lstm():
    return LSTM(D, 3, rng=0), np.ones((B, L, D), "float32")


def rra(**settings):
    return RRALSTM(D, 3, 2, rng=0, **settings), np.ones((B, L, D), "float32")


def encoder():
    return TransformerEncoderLayer(D, 2, 5, dropout=0.1, rng=0), np.ones((B, L, D), "float32")


MASK = np.array([[1, 1, 0], [1, 1, 1]], bool)


def plant_packing(patch):
    def of(cls, mask):
        if mask is None or mask.all():                           # without asking where the mask is
            return None
        raise AssertionError("not reached")
    patch.setattr(lstm_loop.Packing, "of", classmethod(of))


def plant_rows(patch):
    patch.setattr(transformer_file, "_rows", lambda array, mask: array if mask is None else array[mask])


def plant_scatter(patch):
    patch.setattr(embedding, "scatter_add", np.add.at)


def plant_scatter_that_sets(patch):
    def add(target, ids, updates):
        target[ids] += updates
    patch.setattr(embedding, "scatter_add", add)


def plant_last_states(patch):
    patch.setattr(lstm_loop, "last_states", lambda hs, P, packing: hs[np.arange(len(hs) - P, len(hs))])


def plant_pack(patch):
    patch.setattr(lstm_loop, "pack", lambda x, packing: np.where(packing.mask[:, :, None], x, 0))


def plant_validate(patch):
    patch.setattr(recurrent_file, "validate_on_host", lambda layer, x: layer.validate())


def plant_permutation(patch):
    patch.setattr(URNN, "buffers", ())


def plant_dropout(patch):
    patch.setattr(dropout_file, "uniform_like", lambda rng, x: np.random.default_rng(0).random(x.shape))


def plant_optimizer(patch):
    patch.setattr(SGD, "update", lambda self, theta, g: np.subtract(theta, self.lr * g, out=theta))


def plant_rate(patch):
    patch.setattr(SGD, "update", lambda self, theta, g: theta.__isub__(g * (self.lr / (1 + float(abs(g).max())))))


def plant_sum(patch):
    class normalizer(functional.sum_normalize):
        @staticmethod
        def forward(x):
            s = float(x.sum())
            return x / s, (x / s, s)
    patch.setitem(rra_file.NORMALIZERS, "sum", normalizer)


def plant_bias(patch):
    forward = Linear.forward
    patch.setattr(Linear, "forward", lambda self, x, mask=None, rng=None: forward(self, x + np.float64(1), mask, rng)
                  if np.isfinite(asnumpy(x)).all() else None)


PLANTED = {
    "asking a mask whether it is full": (plant_packing, lstm, {"mask": MASK}),
    "rows taken by a mask": (plant_rows, encoder, {"mask": MASK}),
    "a repeated id added to by indexing": (
        plant_scatter_that_sets, lambda: (Embedding(6, D, rng=0), np.array([[1, 1], [2, 3]])), {}),
    "NumPy's add.at": (plant_scatter, lambda: (Embedding(6, D, rng=0), np.array([[1, 1], [2, 3]])), {}),
    "NumPy's arange as index": (plant_last_states, lstm, {}),
    "NumPy's where in pack": (plant_pack, lstm, {"mask": MASK}),
    "a look at the weights in forward": (plant_validate, rra, {}),
    "a permutation that stays on the host": (
        plant_permutation, lambda: (URNN(D, 3, rng=0), np.ones((B, L, D), "float32")), {}),
    "dropout drawn on the host": (plant_dropout, encoder, {}),
    "an update by NumPy": (plant_optimizer, lstm, {}),
    "a learning rate from the gradient's size": (plant_rate, lstm, {}),
    "a sum read as a float": (plant_sum, rra, {}),
    "a look at x": (plant_bias, lambda: (Linear(D, 2, rng=0), np.ones((B, D), "float32")), {}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_caught(name, cupy, monkeypatch):
    plant, make, keywords = PLANTED[name]
    layer, x = make()
    one_step(layer, x, **keywords)
    plant(monkeypatch)
    layer, x = make()
    with pytest.raises((TypeError, TransferError, UndefinedError)):
        one_step(layer, x, **keywords)


def test_a_cell_with_a_stray_call_of_numpy_is_caught(cupy):
    """The equations as they stand are CuPy's as well; with NumPy's tanh in them they are not."""
    rng = np.random.default_rng(0)
    arrays = to_device([rng.standard_normal(shape) for shape in [(B, D), (B, 3), (D, 3), (3, 3), (3,)]], "gpu")
    layer = RNN(D, 3)
    with no_transfers():
        (h, state), cache = layer.cell(arrays[0], (arrays[1],), *arrays[2:])
        layer.cell_backward((h, state), cache, *arrays[2:])
        loss, _ = mean_squared_error.forward(arrays[1], arrays[1] + 1)
    assert float(loss) == 1
    with pytest.raises(TypeError):
        np.tanh(arrays[0] @ arrays[2] + arrays[1] @ arrays[3] + arrays[4])
