"""The recycled memory (arrays are never shared, the pool keeps its limit), cache blocks, apply and matmul."""

import gc
import math
import sys
import threading

import numpy as np
import pytest
from helpers import assert_close, assert_identical
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minigrad import Parameter, memory
from minigrad.clipping import grad_norm
from minigrad.functional import gelu_tanh, softmax_attention
from minigrad.losses import softmax_cross_entropy
from minigrad.memory import apply, cache_blocks, empty, matmul, zeros

# ---- recycled memory -------------------------------------------------------------------------------------

BIG = memory.POOLED_FROM


@pytest.fixture
def pool(monkeypatch):
    """An empty pool."""
    gc.collect()
    idle = {}
    monkeypatch.setattr(memory, "_idle", idle)
    return idle


def idle_bytes(pool):
    return sum(block.nbytes for blocks in pool.values() for block in blocks)


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0), (1,), (3, 5), (7, 11, 13), (1 << 14, 3), (257, 65)])
@pytest.mark.parametrize("dtype", ["float32", np.float64, bool])
def test_empty_is_what_numpy_gives_and_aligned(shape, dtype):
    for make in (empty, zeros):
        array = make(shape, dtype)
        assert type(array) is np.ndarray
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.ctypes.data % memory.ALIGNMENT == 0
        array[...] = 1
        assert array.all()


@pytest.mark.parametrize("size", [1, BIG - 1, BIG, BIG + 1, 3 * BIG, (1 << 20) + 7])
def test_zeros_is_zero_in_recycled_memory(size):
    for _ in range(3):
        array = zeros((size,), "uint8")
        assert not array.any()
        array[...] = 255


def test_empty_recycles_what_a_dead_array_gave_back(pool):
    array = empty((BIG,), "uint8")
    place = array.ctypes.data
    assert not pool
    view = array[10:20]
    del array
    assert empty((BIG,), "uint8").ctypes.data != place           # the view lives
    del view
    again, other = empty((BIG,), "uint8"), empty((BIG,), "uint8")
    assert place in (again.ctypes.data, other.ctypes.data)
    assert again.ctypes.data != other.ctypes.data


def test_empty_shares_blocks_between_near_sizes_but_stays_near(pool):
    sizes = range(BIG, 4 * BIG, 997)
    for size in sizes:
        empty((size,), "uint8")
    assert len(pool) <= 2 * 8 + 1
    for block in pool:
        assert any(size <= block <= size * 1.125 + memory.ALIGNMENT for size in sizes)


def test_small_arrays_are_not_pooled(pool):
    for _ in range(5):
        empty((BIG - 1,), "uint8")
    assert not pool


def test_the_pool_keeps_its_limit(pool, monkeypatch):
    monkeypatch.setattr(memory, "POOL_LIMIT", 10 * BIG)
    held = [empty((BIG * (1 + n % 3),), "uint8") for n in range(30)]
    held.clear()
    assert 5 * BIG <= idle_bytes(pool) <= 10 * BIG
    for n in range(30):
        empty((BIG * (1 + n % 3),), "uint8")
    assert idle_bytes(pool) <= 10 * BIG
    empty((20 * BIG,), "uint8")                                  # larger than all of the pool
    assert idle_bytes(pool) <= 10 * BIG


def test_too_large_an_array_is_a_plain_memory_error(pool):
    with pytest.raises(MemoryError):
        empty((1 << 60,), "uint8")
    gc.collect()
    assert not pool


class HeldMemory(RuleBasedStateMachine):
    """Arrays, views and copies held and dropped in any order: no two live arrays ever share memory.

    Every array is filled with a number of its own, so memory that was handed out twice shows in a view's values.
    """

    def __init__(self):
        super().__init__()
        self.held, self.number = [], 0.0                         # [(array, its number)]

    @rule(size=st.sampled_from([1, 999, BIG // 8 - 1, BIG // 8, BIG // 8 + 1, BIG // 7, BIG // 4]),
          make=st.sampled_from([empty, zeros]))
    def allocate(self, size, make):
        array = make((size,), "float64")
        self.number += 1
        array[...] = self.number
        self.held.append((array, self.number))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["slice", "stride", "transpose", "bytes", "copy", "memoryview", "same"]))
    def derive(self, data, how):
        array, number = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        derived = {"slice": lambda: array[len(array) // 3:], "stride": lambda: array[::-2],
                   "transpose": lambda: array.reshape(1, *array.shape).T.swapaxes(0, 1)[0],
                   "bytes": lambda: np.frombuffer(array.view(), "float64") if array.flags.c_contiguous else array,
                   "copy": array.copy, "memoryview": lambda: np.asarray(memoryview(array)),
                   "same": lambda: array}[how]()
        self.held.append((derived, number))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data):
        del self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def refill(self, data):
        """Writing into one array changes its own views only: their numbers change with it."""
        array, old = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        self.number += 1
        array[...] = self.number
        self.held = [(other, self.number if other is array else number) for other, number in self.held
                     if other is array or number != old or not np.shares_memory(other, array)]

    @invariant()
    def nobody_wrote_into_another(self):
        for array, number in self.held:
            assert array.size == 0 or (array[0] == number and array[-1] == number and (array == number).all())


TestHeldMemory = HeldMemory.TestCase
TestHeldMemory.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_empty_from_many_threads(pool, monkeypatch):
    monkeypatch.setattr(memory, "POOL_LIMIT", 12 * BIG)
    interval, wrong = sys.getswitchinterval(), []

    def work(thread):
        rng, held = np.random.default_rng(thread), []
        try:
            for n in range(400):
                array = empty((int(rng.choice([BIG, BIG + BIG // 2, 2 * BIG])),), "uint8")
                array[:64] = array[-64:] = (thread * 61 + n) % 256
                held.append((array, (thread * 61 + n) % 256))
                if len(held) > 4:
                    held.pop(int(rng.integers(len(held))))
                if any((a[:64] != value).any() or (a[-64:] != value).any() for a, value in held):
                    wrong.append((thread, n))
        except Exception as error:  # a thread's error would go unseen
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert idle_bytes(pool) <= (12 + 4 * 2) * BIG                # each thread may be a block late in its count


# ---- operations into such memory -------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "float64")])
def test_apply_is_the_operation(dtypes):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((40, 700)).astype(dtypes[0]), rng.standard_normal((40, 1)).astype(dtypes[1])
    for function in (np.add, np.subtract, np.multiply):
        y = apply(function, a, b)
        assert_identical(y, function(a, b))
        assert y.dtype == dtypes[1]


@pytest.mark.parametrize(("a", "b"), [
    ((3, 4), (4, 2)), ((2, 3, 4), (4, 2)), ((2, 3, 4), (2, 4, 5)), ((2, 3, 4), (1, 4, 5)), ((0, 3, 4), (4, 2)),
    ((5, 1, 3, 4), (2, 4, 2))], ids=str)
def test_matmul_is_the_product(a, b):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(a), rng.standard_normal(b).astype("float32")
    y = matmul(a, b)
    assert_close(y, a @ b)
    assert y.shape == (a @ b).shape
    assert y.dtype == "float64"


# ---- cache blocks ----------------------------------------------------------------------------------------


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


def cross_entropy(rng):
    logits, targets, real = 3 * rng.standard_normal((5, 7, 11)), rng.integers(11, size=(5, 7)), rng.random((5, 7)) < 0.7
    losses = [softmax_cross_entropy.forward(logits, targets, mask) for mask in (None, real)]
    return [(loss, softmax_cross_entropy.backward(1.0, cache)) for loss, cache in losses]


def gelu(rng):
    x, dy = rng.standard_normal((2, 9, 40))
    y, cache = gelu_tanh.forward(x)
    return y, gelu_tanh.backward(dy, cache)


def norms(rng):
    parameters = [Parameter(np.zeros(shape)) for shape in [(6, 5), (3,), (0, 2)]]
    found = []
    for entry in (1.0, np.inf, np.nan):
        for parameter in parameters:
            parameter.grad[...] = rng.standard_normal(parameter.grad.shape)
        parameters[0].grad[4, 2] = entry
        found.append(grad_norm(parameters))
    assert math.isinf(found[1])
    return found


@pytest.mark.parametrize("compute", [cross_entropy, gelu, norms])
def test_what_is_computed_in_parts_is_the_same(compute, monkeypatch):
    """Each against its formula: test_losses.py, test_functional.py, test_clipping.py; the optimizers: test_optim.py."""
    whole = compute(np.random.default_rng(0))
    monkeypatch.setattr(memory, "CACHE_BLOCK", 1)
    assert_close(compute(np.random.default_rng(0)), whole, 1e-13)


@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"causal": True, "window": 2}], ids=str)
@pytest.mark.parametrize("more", [0, 3])
def test_attention_writes_every_gradient(settings, more, monkeypatch):
    """Keys that no query sees have gradients of zero, whatever the recycled memory held."""
    def filled(shape, dtype, xp=np):
        return xp.full(shape, np.nan, dtype)
    monkeypatch.setattr("minigrad.functional.empty", filled)
    monkeypatch.setattr(memory, "empty", filled)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 3, 4)).transpose(0, 2, 1, 3) for n in (5, 5 + more, 5 + more))
    A, cache = softmax_attention.forward(q, k, v, **settings)
    gradients = softmax_attention.backward(np.ones_like(A), cache)
    assert all(np.isfinite(array).all() for array in (A, *gradients))
    assert [array.strides for array in (A, *gradients)] == [q.strides, q.strides, k.strides, v.strides]
    if "window" in settings and more:
        assert not gradients[1][:, :, :more - 1].any()
