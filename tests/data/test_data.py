"""The adding problem as it is documented, and the order in which examples are met."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minigrad.data import Batches, Streams, adding_problem
from minigrad.data.reviews import LengthBatches, Reviews
from minigrad.data.sentences import DenoisingBatches

# ---- the adding problem ----------------------------------------------------------------------------------


def marks(x):
    """(first, second) marked step of each sample; there must be exactly two."""
    assert set(np.unique(x[:, :, 1])) <= {0, 1}
    rows, steps = np.nonzero(x[:, :, 1])
    np.testing.assert_array_equal(rows, np.repeat(np.arange(len(x)), 2))
    return steps[::2], steps[1::2]


@pytest.mark.parametrize("S", [2, 3, 9, 10, 11, 19, 25, 100])
def test_marks_lie_in_their_ranges_and_reach_both_ends(S):
    x, _ = adding_problem(3000, S, seed=0)
    first, second = marks(x)
    assert (first.min(), first.max()) == (0, S // 10)
    assert (second.min(), second.max()) == (S // 2, S - 1)
    assert (first < second).all()


@pytest.mark.parametrize("S", [10, 100])
def test_marks_are_uniform_and_independent(S):
    n = 20_000
    first, second = marks(adding_problem(n, S, seed=1)[0])
    for steps, count in ((first, S // 10 + 1), (second - S // 2, S - S // 2)):
        expected = n / count
        assert abs(np.bincount(steps, minlength=count) - expected).max() < 5 * math.sqrt(expected)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(n)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 30), S=st.integers(2, 40), seed=st.integers(0, 10**6),
       dtype=st.sampled_from(["float32", "float64"]))
def test_shapes_and_targets(n, S, seed, dtype):
    x, target = adding_problem(n, S, seed, dtype)
    assert x.shape == (n, S, 2)
    assert target.shape == (n, 1)
    assert x.dtype == target.dtype == dtype
    np.testing.assert_allclose(target[:, 0], (x[:, :, 0] * x[:, :, 1]).sum(axis=1), rtol=1e-6)
    assert 0 <= x[:, :, 0].min() <= x[:, :, 0].max() <= 1
    first, second = marks(x)
    rows = np.arange(n)
    np.testing.assert_array_equal(target[:, 0], x[rows, first, 0] + x[rows, second, 0])


def test_numbers_are_uniform_in_zero_to_one():
    u = adding_problem(2000, 100, seed=0, dtype="float64")[0][:, :, 0]
    assert 0 <= u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    counts, _ = np.histogram(u, bins=20, range=(0, 1))
    assert abs(counts - 10_000).max() < 5 * 100
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 5 / math.sqrt(2000)


def test_always_predicting_one_has_an_error_of_a_sixth():
    """(u1 + u2 - 1)^2 has mean 1/6 and variance 1/15 - 1/36."""
    n = 50_000
    errors = (adding_problem(n, 10, seed=3, dtype="float64")[1] - 1) ** 2
    assert abs(errors.mean() - 1 / 6) < 5 * math.sqrt((1 / 15 - 1 / 36) / n)


def test_a_function_of_its_arguments():
    def draw(*arguments):
        return adding_problem(*arguments)[0].tobytes()

    assert draw(20, 10, 4) == draw(20, 10, 4)
    assert draw(20, 10, [4, 1]) == draw(20, 10, (4, 1))
    assert len({draw(20, 10, seed) for seed in (0, 1, 4, [4, 1], [4, 2])}) == 5
    for single, double in zip(adding_problem(20, 10, 4, "float32"), adding_problem(20, 10, 4, "float64")):
        np.testing.assert_allclose(single, double, rtol=1e-6)


@pytest.mark.parametrize(("n", "S", "sentence"), [
    (5, 1, "S is 1; expected a whole number of at least 2"), (5, 0, "S is 0"), (5, -3, "S is -3"),
    (5, 2.0, "S is 2.0; expected a whole number"), (0, 10, "n is 0; expected a whole number of at least 1"),
    (True, 10, "n is True"), (5, "10", "S is '10'"),
])
def test_bad_sizes_are_refused(n, S, sentence):
    with pytest.raises(ValueError, match=sentence):
        adding_problem(n, S, seed=0)


# ---- batches ---------------------------------------------------------------------------------------------

KINDS = {
    "Batches": lambda seed: Batches([np.arange(23)], 5, seed),
    "Streams": lambda seed: Streams(np.arange(500, dtype=np.uint16), 3, 5, seed),
    "LengthBatches": lambda seed: LengthBatches(
        Reviews(np.arange(200), np.arange(41) * 5, np.zeros(40, int), np.ones(40, int)), 4, seed),
    "DenoisingBatches": lambda seed: DenoisingBatches([np.arange(5, n) for n in range(8, 28)], 4, seed, vocab=30)}


def leaves(batch):
    return [(array.shape, array.tobytes()) for array in batch]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_step_is_a_function_of_seed_and_step(make):
    """In any order of access, so that a resumed run goes on exactly; every epoch of every seed has its own order."""
    one, n = make(3), make(3).per_epoch
    for step in (2 * n + 1, 0, n - 1, 5 * n, 2 * n + 1, 1):
        assert leaves(one[step]) == leaves(make(3)[step])
    epochs = [[leaves(make(seed)[epoch * n + k]) for k in range(n)] for seed in range(3) for epoch in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 9
    assert [one.position(step) for step in (0, n - 1, n, 2 * n + 1)] == [(0, 0), (0, n - 1), (1, 0), (2, 1)]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), share=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_each_epoch_is_a_permutation_without_repetition(n, share, seed):
    batch_size = max(1, round(share * n))
    ids = np.arange(n)
    batches = Batches([ids, ids[:, None] * [1.0, 10.0]], batch_size, seed)
    assert batches.per_epoch == n // batch_size
    for epoch in range(3):
        seen = []
        for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            rows, others = batches[step]
            assert batches.position(step)[0] == epoch
            assert len(rows) == batch_size
            np.testing.assert_array_equal(others, rows[:, None] * [1.0, 10.0])       # aligned
            seen += rows.tolist()
        assert len(seen) == len(set(seen)) == n // batch_size * batch_size            # the remainder is dropped
        assert set(seen) <= set(range(n))


def test_every_example_is_met_at_every_place():
    """A batch's first example is uniform over the data."""
    ids = np.arange(10)
    batches = Batches([ids], 5, seed=0)
    counts = np.bincount([batches[step][0][0] for step in range(4000)], minlength=10)
    assert abs(counts - 400).max() < 5 * 20


def test_a_batch_is_a_copy():
    ids = np.arange(6.0)
    batches = Batches([ids], 6, seed=0)
    batches[0][0][...] = -1
    np.testing.assert_array_equal(ids, np.arange(6.0))
    assert (batches[0][0] >= 0).all()


@pytest.mark.parametrize(("arrays", "batch_size", "sentence"), [
    ([np.zeros(5), np.zeros((4, 5))], 2, r"the arrays have lengths \[5, 4\]; expected one length"),
    ([], 2, r"the arrays have lengths \[\]; expected one length"),
    ([np.zeros(5)], 6, r"batch_size is 6, larger than the data \(5 examples\)"),
    ([np.zeros(0)], 1, r"batch_size is 1, larger than the data \(0 examples\)"),
    ([np.zeros(5)], 0, "batch_size is 0; expected a whole number of at least 1"),
    ([np.zeros(5)], 2.0, "batch_size is 2.0; expected a whole number"),
])
def test_bad_batches_are_refused(arrays, batch_size, sentence):
    with pytest.raises(ValueError, match=sentence):
        Batches(arrays, batch_size, seed=0)
