"""Recycled memory: aligned, reused once an array and its views are gone, bounded."""

import gc
import sys
import threading

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minigrad import memory
from minigrad.memory import empty, zeros

BIG = memory.POOLED_FROM


@pytest.fixture
def pool(monkeypatch):
    """An empty pool."""
    gc.collect()
    idle = {}
    monkeypatch.setattr(memory, "_idle", idle)
    return idle


def idle_bytes(pool):
    return sum(memory.nbytes for memories in pool.values() for memory in memories)


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0), (1,), (3, 5), (7, 11, 13), (1 << 14, 3), (257, 65)])
@pytest.mark.parametrize("dtype", ["float32", np.float64, np.dtype("int64"), bool, "complex128", "uint8"])
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
