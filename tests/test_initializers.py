"""First values: distributions, shapes, dtypes, repeatability."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minigrad import initializers as init
from minigrad.initializers import GATE_BLOCKS, blocks, gate_blocks, glorot_uniform, normal, orthogonal, uniform

RANDOM = {"uniform": uniform, "normal": normal, "glorot_uniform": glorot_uniform, "orthogonal": orthogonal}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("dtype", [None, "float32", "float64", np.float64, np.dtype("float64")])
def test_shape_dtype_and_seed(name, dtype):
    def draw(rng):
        return RANDOM[name](rng, (5, 3), dtype=dtype)

    array = draw(7)
    assert array.shape == (5, 3)
    assert array.dtype == np.dtype(dtype or "float32")
    np.testing.assert_array_equal(array, draw(7))
    np.testing.assert_array_equal(array, draw(np.random.default_rng(7)))
    assert not np.array_equal(array, draw(8))
    assert not np.array_equal(draw(None), draw(None))


@pytest.mark.parametrize("name", RANDOM)
def test_precisions_see_the_same_numbers(name):
    np.testing.assert_array_equal(RANDOM[name](7, (5, 3), dtype="float32"),
                                  RANDOM[name](7, (5, 3), dtype="float64").astype("float32"))


@pytest.mark.parametrize("name", RANDOM)
def test_a_generator_moves_on(name):
    rng = np.random.default_rng(0)
    assert not np.array_equal(RANDOM[name](rng, (4, 4)), RANDOM[name](rng, (4, 4)))


def test_zeros():
    assert init.zeros((2, 3)).dtype == np.float32
    assert init.zeros((2, 3), "float64").dtype == np.float64
    assert not init.zeros((2, 3)).any()


def test_uniform():
    u = uniform(0, (200, 100), -2.0, 3.0, "float64")
    assert u.min() >= -2
    assert u.max() < 3
    assert abs(u.mean() - 0.5) < 5 * 5 / math.sqrt(12 * u.size)
    assert abs(u.var() - 25 / 12) < 0.06
    assert 0 <= uniform(0, (100,)).min() <= uniform(0, (100,)).max() <= 1


def test_normal():
    z = normal(0, (200, 100), 0.1, "float64")
    assert abs(z.mean()) < 5 * 0.1 / math.sqrt(z.size)
    assert abs(z.std() - 0.1) < 0.003
    assert 0.6 < (abs(z) < 0.1).mean() < 0.76


@pytest.mark.parametrize(("d_in", "d_out"), [(300, 100), (1, 5), (5, 1)])
def test_glorot_uniform(d_in, d_out):
    draws = np.stack([glorot_uniform(seed, (d_in, d_out), "float64") for seed in range(max(1, 3000 // (d_in * d_out)))])
    a = math.sqrt(6 / (d_in + d_out))
    assert abs(draws).max() <= a
    assert abs(draws).max() > 0.98 * a
    assert abs(draws.var() / (2 / (d_in + d_out)) - 1) < 0.1


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 1000))
def test_orthogonal_is_orthonormal(rows, columns, seed):
    Q = orthogonal(seed, (rows, columns), "float64")
    assert Q.shape == (rows, columns)
    few = Q.T @ Q if rows >= columns else Q @ Q.T
    np.testing.assert_allclose(few, np.eye(min(rows, columns)), atol=1e-12)


def test_orthogonal_is_uniformly_distributed():
    """In 2 x 2 the angle of the first column is uniform and both signs of the determinant are as likely. Neither
    holds for the plain Q of a QR decomposition, whose signs are LAPACK's."""
    Q = np.stack([orthogonal(seed, (2, 2), "float64") for seed in range(2000)])
    angles = np.arctan2(Q[:, 1, 0], Q[:, 0, 0])
    counts, _ = np.histogram(angles, bins=8, range=(-math.pi, math.pi))
    assert abs(counts - 250).max() < 5 * math.sqrt(250)
    assert abs((np.linalg.det(Q) > 0).mean() - 0.5) < 5 * 0.5 / math.sqrt(2000)
    assert abs(orthogonal(0, (1, 400), "float64").mean()) < 0.01
    assert {float(np.sign(orthogonal(seed, (1, 1), "float64"))[0, 0]) for seed in range(20)} == {-1.0, 1.0}


def test_blocks_are_drawn_each_on_its_own():
    W = blocks(orthogonal, 0, 6, 4, 3, "float64")
    assert W.shape == (6, 12)
    assert W.flags.c_contiguous
    gates = np.split(W, 3, axis=1)
    for gate in gates:
        np.testing.assert_allclose(gate.T @ gate, np.eye(4), atol=1e-12)
    assert not np.allclose(gates[0], gates[1])
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(gates[0], orthogonal(rng, (6, 4), "float64"))
    np.testing.assert_array_equal(gates[1], orthogonal(rng, (6, 4), "float64"))


@pytest.mark.parametrize("name", GATE_BLOCKS)
def test_gate_blocks(name):
    W, U = gate_blocks(name, 0, 3, 50, "float64")
    assert (W.shape, U.shape) == ((3, 200), (50, 200))
    assert W.dtype == U.dtype == np.float64
    again = gate_blocks(name, 0, 3, 50)
    assert again[0].dtype == np.float32
    np.testing.assert_array_equal(again[1], U.astype("float32"))
    assert not np.allclose(U[:, :50], U[:, 50:100])


def test_gate_blocks_are_distributed_as_their_sources_say():
    def U_of(name):
        return gate_blocks(name, 0, 3, 50, "float64")[1]

    for name in ("orthogonal", "glorot"):
        for gate in np.split(U_of(name), 4, axis=1):
            np.testing.assert_allclose(gate @ gate.T, np.eye(50), atol=1e-12)
    W = gate_blocks("orthogonal", 0, 3, 50, "float64")[0][:, :50]
    np.testing.assert_allclose(W @ W.T, np.eye(3), atol=1e-12)
    W = gate_blocks("glorot", 0, 3, 50, "float64")[0]
    assert 0.95 * math.sqrt(6 / 53) < abs(W).max() <= math.sqrt(6 / 53)       # of one gate: 3 + 50, not 3 + 200
    for block in gate_blocks("uniform", 0, 3, 50, "float64"):
        assert 0.95 / math.sqrt(50) < abs(block).max() <= 1 / math.sqrt(50)
    assert abs(U_of("normal").std() - 0.1) < 0.003


def test_gate_blocks_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="init is 'xavier'; expected one of 'orthogonal', 'glorot'"):
        gate_blocks("xavier", 0, 3, 5)
