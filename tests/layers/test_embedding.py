"""Embedding against torch, and what the contract table does not see: repeated ids, the padding id, masks, ranges."""

import numpy as np
import pytest
from helpers import assert_close, assert_identical
from hypothesis import given, settings, strategies as st
from oracles import gradient, pytorch, tensor, torch_backward

from minigrad.layers import Embedding
from minigrad.layers.embedding import scatter_add

IDS = np.array([[1, 4, 1, 1], [0, 2, 4, 2]])
MASK = np.array([[1, 1, 0, 1], [0, 1, 1, 1]], bool)


def layer_of(padding_id=None):
    return Embedding(6, 3, padding_id, rng=0, dtype="float64")


def upstream(shape=(2, 4, 3)):
    return np.random.default_rng(1).standard_normal(shape)


@pytest.mark.parametrize("padding_id", [None, 0, 2])
@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2), (0, 4)], ids=str)
def test_it_equals_torch(shape, padding_id):
    torch = pytorch()
    layer, ids = layer_of(padding_id), IDS.ravel()[:np.prod(shape)].reshape(shape)
    dy = upstream((*shape, 3))
    y, cache = layer.forward(ids)
    assert layer.backward(dy, cache) is None
    W = tensor(layer.W.value)
    ty = torch.nn.functional.embedding(torch.tensor(ids), W, padding_idx=padding_id)
    torch_backward([ty], [dy])
    assert_close((y, layer.W.grad), (ty.detach().numpy(), gradient(W)))


def test_the_padding_row_is_zero_and_stays_so():
    layer, dy = layer_of(2), upstream()
    assert not layer.W.value[2].any()
    assert layer.W.value[[0, 1, 3, 4, 5]].all()
    y, cache = layer.forward(IDS)
    assert not y[IDS == 2].any()
    dy[IDS == 2] = np.nan
    layer.backward(dy, cache)
    assert not layer.W.grad[2].any()
    assert np.isfinite(layer.W.grad).all()


@pytest.mark.parametrize("padding_id", [None, 4])
def test_a_masked_position_is_zero_and_gives_no_gradient(padding_id):
    layer, dy = layer_of(padding_id), upstream()
    y, cache = layer.forward(IDS, mask=MASK)
    assert not y[~MASK].any()
    assert_identical(y[MASK], layer.W.value[IDS[MASK]])
    layer.backward(np.where(MASK[..., None], dy, np.nan), cache)
    got = layer.W.grad.copy()
    layer.zero_grad()
    layer.backward(dy[MASK], layer.forward(IDS[MASK])[1])
    assert_close(got, layer.W.grad)


@pytest.mark.parametrize("garbage", [-1, 6, 10**9])
def test_an_id_out_of_range_under_the_mask_does_not_matter(garbage):
    layer, dy = layer_of(), upstream()
    y, cache = layer.forward(np.where(MASK, IDS, garbage), mask=MASK)
    assert_identical(y, layer(IDS, mask=MASK))
    layer.backward(dy, cache)
    assert np.isfinite(layer.W.grad).all()


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint64"])
def test_any_integers_will_do(dtype):
    layer, dy = layer_of(2), upstream()
    y, cache = layer.forward(IDS.astype(dtype), mask=MASK)
    layer.backward(dy, cache)
    got = layer.W.grad.copy()
    layer.zero_grad()
    expected, cache = layer.forward(IDS, mask=MASK)
    layer.backward(dy, cache)
    assert_identical((y, got), (expected, layer.W.grad))


def test_rows_start_with_a_variance_of_1_over_d():
    W = Embedding(1000, 64, rng=0).W.value
    assert np.abs(W).max() <= np.sqrt(3 / 64)
    assert W.var() == pytest.approx(1 / 64, rel=0.02)


@pytest.mark.parametrize(("ids", "keywords", "error", "sentence"), [
    (np.array([0, 6]), {}, ValueError, r"Embedding: ids run from 0 to 6; expected 0 \.\.\. 5"),
    (np.array([-1, 3]), {}, ValueError, r"ids run from -1 to 3"),
    (np.array([200], "uint8"), {}, ValueError, r"ids run from 200 to 200"),
    (np.array([1.0]), {}, TypeError, "ids has dtype float64; expected integers"),
    (np.array([True]), {}, TypeError, "ids has dtype bool; expected integers"),
    ([1, 2], {}, TypeError, "ids is a list"),
    (IDS, {"mask": MASK[:1]}, ValueError, r"mask has shape \(1, 4\); expected \(2, 4\)"),
    (IDS, {"mask": MASK.astype(int)}, TypeError, "mask has dtype int64; expected bool"),
    (np.where(MASK, 6, 0), {"mask": MASK}, ValueError, "ids run from 0 to 6"),
])
def test_bad_input(ids, keywords, error, sentence):
    with pytest.raises(error, match=sentence):
        layer_of().forward(ids, **keywords)


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"vocab": 0, "d": 3}, "vocab is 0"), ({"vocab": 5, "d": 0}, "d is 0"), ({"vocab": 5.0, "d": 3}, "vocab is 5.0"),
    ({"vocab": 5, "d": 3, "padding_id": 5}, "padding_id is 5; expected an id below vocab, 5"),
    ({"vocab": 5, "d": 3, "padding_id": -1}, "padding_id is -1"),
])
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=f"Embedding: {sentence}"):
        Embedding(**settings)


# ---- scatter_add -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_scatter_add_equals_add_at(data):
    V = data.draw(st.integers(1, 6))
    row = data.draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
    ids_shape = data.draw(st.sampled_from([(0,), (1,), (9,), (2, 4)]))
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    id_dtype = data.draw(st.sampled_from(["int32", "int64", "uint8"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    target = rng.standard_normal((V, *row)).astype(dtype)
    ids = rng.integers(0, V, ids_shape).astype(id_dtype)
    updates = rng.standard_normal((*ids_shape, *row)).astype(dtype)
    expected = target.copy()
    np.add.at(expected, ids, updates)
    kept_ids, kept_updates, place = ids.copy(), updates.copy(), target.ctypes.data
    scatter_add(target, ids, updates)
    assert target.dtype == dtype
    assert target.ctypes.data == place
    np.testing.assert_allclose(target, expected, rtol=1e-5 if dtype == "float32" else 1e-12, atol=1e-6)
    np.testing.assert_array_equal(ids, kept_ids)
    np.testing.assert_array_equal(updates, kept_updates)


def test_scatter_add_into_a_view_with_non_contiguous_updates():
    whole = np.zeros((3, 8))
    updates = np.arange(16.0).reshape(4, 4).T
    scatter_add(whole[:, ::2], np.array([2, 0, 2, 0]), updates)
    expected = np.zeros((3, 4))
    np.add.at(expected, np.array([2, 0, 2, 0]), updates)
    np.testing.assert_array_equal(whole[:, ::2], expected)
    assert not whole[:, 1::2].any()


@pytest.mark.parametrize("ids", [[0, 3], [-1, 0]])
def test_scatter_add_refuses_an_id_out_of_range(ids):
    target = np.zeros((3, 2))
    with pytest.raises(IndexError, match=rf"ids run from {min(ids)} to {max(ids)}; expected 0 \.\.\. 2"):
        scatter_add(target, np.array(ids), np.ones((2, 2)))
    assert not target.any()


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (2,), (1, 2)])
def test_scatter_add_refuses_updates_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"updates has shape .*; expected \(2, 2\)"):
        scatter_add(np.zeros((3, 2)), np.array([0, 1]), np.ones(shape))
