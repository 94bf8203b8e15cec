"""softmax_attention and plain_attention against torch autograd, and exact facts: masks, large scores, blocks."""

from unittest.mock import patch

import numpy as np
import pytest
from helpers import assert_close, assert_identical
from hypothesis import given, settings, strategies as st
from oracles import allowed_keys, gradient, pytorch, tensor, torch_attention, torch_backward

from minigrad import functional
from minigrad.backend import asnumpy, to_device, uniform_like
from minigrad.functional import attention_blocks, plain_attention, softmax_attention, softmax_rows


def draw(front, L, M, e=3, e_v=4, seed=0, dtype="float64"):
    """q, k, v, dA."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((*front, *shape)).astype(dtype) for shape in ((L, e), (M, e), (M, e_v), (L, e_v))]


def key_mask(B, M, seed=1):
    """Every kind of sample: all keys, some, none."""
    mask = np.random.default_rng(seed).random((B, M)) < 0.6
    mask[0], mask[-1] = True, False
    return mask


def pair_mask(*shape, seed=1):
    return np.random.default_rng(seed).random(shape) < 0.6


def over_keys(mask, rank):
    """(B, M) -> (B, 1 ..., 1, M), of this rank."""
    return mask.reshape(*mask.shape[:-1], *(1,) * (rank - mask.ndim), mask.shape[-1])


# name: the axes in front, L, M, arguments
CASES = {
    "two axes": ((), 4, 6, {}),
    "three axes": ((2,), 4, 6, {}),
    "four axes": ((2, 3), 5, 4, {}),
    "a scale": ((2,), 4, 6, {"scale": 0.3}),
    "causal": ((2, 2), 7, 7, {"causal": True}),
    "causal, more keys than queries": ((2,), 5, 9, {"causal": True}),
    "window 1": ((2,), 7, 7, {"causal": True, "window": 1}),
    "window 3": ((2, 2), 7, 7, {"causal": True, "window": 3}),
    "window 3, more keys than queries": ((2,), 5, 9, {"causal": True, "window": 3}),
    "a window longer than the keys": ((2,), 5, 9, {"causal": True, "window": 50}),
    "a mask of keys, two axes": ((), 4, 6, {"mask": key_mask(3, 6)[1]}),
    "a mask of keys, three axes": ((3,), 4, 6, {"mask": key_mask(3, 6)}),
    "a mask of keys, four axes": ((3, 2), 4, 6, {"mask": key_mask(3, 6)}),
    "a mask of keys, causal": ((3, 2), 6, 8, {"mask": key_mask(3, 8), "causal": True}),
    "a mask of keys, window": ((3, 2), 6, 8, {"mask": key_mask(3, 8), "causal": True, "window": 2}),
    "a mask of pairs": ((3, 2), 5, 6, {"mask": pair_mask(3, 2, 5, 6)}),
    "a mask of pairs for all heads": ((3, 2), 5, 6, {"mask": pair_mask(3, 1, 5, 6)}),
    "a mask of pairs for all": ((3, 2), 5, 6, {"mask": pair_mask(1, 1, 5, 6)}),
    "a mask of queries": ((3,), 5, 6, {"mask": pair_mask(3, 5, 1)}),
    "a mask of keys, of full rank": ((3, 2), 5, 6, {"mask": key_mask(3, 6)[:, None, None]}),
    "a mask of pairs, causal": ((3,), 5, 8, {"mask": pair_mask(3, 5, 8), "causal": True}),
    "a mask of pairs, window": ((3,), 5, 8, {"mask": pair_mask(1, 5, 8), "causal": True, "window": 4}),
}


def allowed(front, L, M, keywords):
    """The boolean that the arguments come to, (..., L, M)."""
    pairs = np.broadcast_to(allowed_keys(L, M, keywords.get("causal"), keywords.get("window")), (*front, L, M))
    mask = keywords.get("mask")
    return pairs if mask is None else pairs & over_keys(mask, pairs.ndim)


every_form = pytest.mark.parametrize(("form", "block"), [
    (softmax_attention, 2), (softmax_attention, 3), (softmax_attention, 128), (plain_attention, 3)],
    ids=["blocks of 2", "blocks of 3", "one block", "plain"])


@every_form
@pytest.mark.parametrize("name", CASES)
def test_it_equals_torch_autograd(name, form, block, monkeypatch):
    monkeypatch.setattr(functional, "QUERY_BLOCK", block)
    front, L, M, keywords = CASES[name]
    q, k, v, dA = draw(front, L, M)
    A, cache = form.forward(q, k, v, **keywords)
    leaves = [tensor(array) for array in (q, k, v)]
    expected = torch_attention(*leaves, allowed(front, L, M, keywords), keywords.get("scale"))
    torch_backward([expected], [dA])
    assert_close(A, expected.detach().numpy())
    assert_close(form.backward(dA, cache), tuple(map(gradient, leaves)))


@pytest.mark.parametrize("keywords", [{}, {"causal": True}, {"mask": pair_mask(3, 1, 6, 6) | np.eye(6, dtype=bool)}],
                         ids=["", "causal", "mask"])
def test_it_equals_torchs_own_attention(keywords):
    torch = pytorch()
    q, k, v, dA = draw((3, 2), 6, 6)
    A, cache = softmax_attention.forward(q, k, v, **keywords)
    leaves, mask = [tensor(array) for array in (q, k, v)], keywords.get("mask")
    expected = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=None if mask is None else torch.tensor(mask), is_causal="causal" in keywords)
    torch_backward([expected], [dA])
    assert_close(A, expected.detach().numpy())
    assert_close(softmax_attention.backward(dA, cache), tuple(map(gradient, leaves)))


# ---- dropout ---------------------------------------------------------------------------------------------

@every_form
@pytest.mark.parametrize("name", ["four axes", "causal, more keys than queries", "window 3, more keys than queries",
                                  "a mask of keys, causal", "a mask of pairs, window"])
def test_dropout_equals_torch_with_the_same_mask(name, form, block, monkeypatch):
    monkeypatch.setattr(functional, "QUERY_BLOCK", block)
    front, L, M, keywords = CASES[name]
    q, k, v, dA = draw(front, L, M)
    A, cache = form.forward(q, k, v, **keywords, dropout=0.4, rng=np.random.default_rng(3))
    drop, rng = np.zeros((*front, L, M)), np.random.default_rng(3)
    for rows, keys in attention_blocks(L, M, keywords.get("causal"), keywords.get("window"), functional.QUERY_BLOCK):
        part = drop[..., rows, keys]
        part[...] = (uniform_like(rng, part) >= 0.4) / 0.6
    leaves = [tensor(array) for array in (q, k, v)]
    expected = torch_attention(*leaves, allowed(front, L, M, keywords), drop=drop)
    torch_backward([expected], [dA])
    assert_close(A, expected.detach().numpy())
    assert_close(form.backward(dA, cache), tuple(map(gradient, leaves)))


def test_without_a_generator_nothing_is_dropped():
    q, k, v, _ = draw((2,), 4, 6)
    assert_identical(softmax_attention.forward(q, k, v, dropout=0.4)[0], softmax_attention.forward(q, k, v)[0])


# ---- large scores ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e4, 1e8])
def test_large_scores_pick_the_largest(size, dtype):
    """Scores of this size, both signs: the weights are one-hot, and halves where two are equal."""
    q = np.array([[[1.0], [-1.0]]], dtype)
    k = size * np.array([[[1.0], [0.5], [-1.0], [1.0]]], dtype)
    v = np.array([[[1.0], [2.0], [3.0], [4.0]]], dtype)
    A, cache = softmax_attention.forward(q, k, v, scale=1)
    assert_identical(A, np.array([[[2.5], [3.0]]]))
    dq, dk, dv = softmax_attention.backward(np.ones_like(A), cache)
    assert_identical(dv, np.array([[[0.5], [0], [1], [0.5]]]))
    assert_close((dq, dk), (np.zeros((1, 2, 1)), np.array([[[-0.75], [0], [0], [0.75]]])))


# ---- rows that see nothing -------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mask", [
    np.array([[True] * 6, [False] * 6]), np.array([True, False, True, False]).reshape(1, 4, 1),
    np.zeros((1, 1, 1), bool)], ids=["a sample", "some queries", "all"])
def test_a_query_that_sees_no_key_gives_zero_and_no_gradient(mask, dtype):
    q, k, v, dA = draw((2,), 4, 6, dtype=dtype)
    A, cache = softmax_attention.forward(q, k, v, mask=mask)
    pairs = np.broadcast_to(mask if mask.ndim == 3 else mask[:, None], (2, 4, 6))
    blind = ~pairs.any(axis=2)
    assert blind.any()
    assert not A[blind].any()
    assert not np.concatenate(cache.P, axis=1)[blind].any()
    dq, dk, dv = softmax_attention.backward(dA, cache)
    assert not dq[blind].any()
    assert all(np.isfinite(array).all() for array in (A, dq, dk, dv))
    _, seeing = softmax_attention.forward(q, k, v, mask=mask)
    assert_identical(softmax_attention.backward(np.where(blind[..., None], 0, dA).astype(dtype), seeing), (dq, dk, dv))


def test_softmax_of_rows_of_minus_infinity():
    S = np.array([[-np.inf, -np.inf], [-np.inf, 3.0], [0.0, 0.0]])
    assert_identical(softmax_rows(S), np.array([[0, 0], [0, 1], [0.5, 0.5]]))


@pytest.mark.parametrize("form", [softmax_attention, plain_attention])
@pytest.mark.parametrize("full_rank", [False, True], ids=["(B, M)", "(B, 1, 1, M)"])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_in_a_masked_key_or_value_never_leaks(causal, full_rank, form):
    q, k, v, dA = draw((3, 2), 6, 6)
    mask = key_mask(3, 6)
    hidden = ~mask[:, None, :, None]
    with_nan = (np.where(hidden, np.nan, array) for array in (k, v))
    got = form.forward(q, *with_nan, mask=mask[:, None, None] if full_rank else mask, causal=causal)
    expected = form.forward(q, k, v, mask=mask, causal=causal)
    assert_identical(got[0], expected[0])
    dq, dk, dv = form.backward(dA, got[1])
    assert_identical((dq, dk, dv), form.backward(dA, expected[1]))
    assert not np.broadcast_to(hidden, dk.shape)[dk != 0].any()
    assert not np.broadcast_to(hidden, dv.shape)[dv != 0].any()


# ---- blocks of queries -----------------------------------------------------------------------------------

@settings(max_examples=60, deadline=None)
@given(L=st.integers(1, 12), before=st.integers(0, 6), window=st.none() | st.integers(1, 14), block=st.integers(1, 13),
       masked=st.booleans(), seed=st.integers(0, 99))
def test_blocks_of_queries_equal_one_block_with_an_explicit_mask(L, before, window, block, masked, seed):
    M = L + before
    q, k, v, dA = draw((2, 2), L, M, seed=seed)
    pairs = np.broadcast_to(allowed_keys(L, M, True, window), (2, 1, L, M))
    mask = key_mask(2, M, seed) if masked else None
    if masked:
        pairs = pairs & mask[:, None, None]
    expected, expected_cache = softmax_attention.forward(q, k, v, mask=pairs)
    with patch.object(functional, "QUERY_BLOCK", block):
        A, cache = softmax_attention.forward(q, k, v, mask=mask, causal=True, window=window)
        assert len(cache.P) == -(-L // block)
        assert_close(A, expected, 1e-14)
        assert_close(softmax_attention.backward(dA, cache), softmax_attention.backward(dA, expected_cache), 1e-13)


@pytest.mark.parametrize("window", [None, 1, 5, 200])
def test_a_block_holds_the_keys_that_its_queries_see_and_no_others(window):
    L, M = 300, 340
    seen = allowed_keys(L, M, True, window)
    covered = []
    for rows, keys in attention_blocks(L, M, True, window, functional.QUERY_BLOCK):
        columns = seen[rows].any(axis=0)
        assert columns[keys].all()
        assert columns.sum() == keys.stop - keys.start
        covered += range(rows.start, rows.stop)
    assert covered == list(range(L))


@pytest.mark.parametrize("window", [1, 40])
def test_memory_is_linear_in_L_for_a_window(window):
    def kept(L):
        q, k, v, _ = draw((1,), L, L)
        _, cache = softmax_attention.forward(q, k, v, causal=True, window=window)
        return sum(P.size for P in cache.P)
    assert kept(1024) <= 1024 * (functional.QUERY_BLOCK + window - 1)
    assert kept(2048) / kept(1024) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(("window", "blocks"), [(None, 1), (7, 4), (100, 2), (5000, 1)])
def test_blocks_on_a_gpu(fake_gpu, window, blocks):
    """Few products: one block of causal queries; with a window, memory stays linear in L."""
    L = 200
    arrays = draw((2,), L, L)
    *device_arrays, dA = to_device(arrays, "gpu")
    A, cache = softmax_attention.forward(*device_arrays, causal=True, window=window)
    assert len(cache.P) == blocks
    assert sum(P.size for P in cache.P) <= 2 * L * min(L, 2 * max(window or L, functional.QUERY_BLOCK))
    expected, expected_cache = softmax_attention.forward(*arrays[:3], causal=True, window=window)
    assert_close(asnumpy(A), expected, 1e-13)
    got = tuple(map(asnumpy, softmax_attention.backward(dA, cache)))
    assert_close(got, softmax_attention.backward(arrays[3], expected_cache), 1e-13)


# ---- sizes of zero, dtypes, bad input --------------------------------------------------------------------

@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("front", "L", "M", "causal"), [
    (front, L, M, causal) for front, L, M in [((2,), 0, 0), ((2,), 0, 3), ((0,), 3, 3), ((0, 2), 3, 4), ((2, 0), 3, 4)]
    for causal in (False, True)] + [((2,), 3, 0, False), ((2, 2), 3, 0, False)], ids=str)
def test_sizes_of_zero(front, L, M, causal, masked):
    q, k, v, dA = draw(front, L, M)
    A, cache = softmax_attention.forward(q, k, v, mask=np.ones((front[0], M), bool) if masked else None, causal=causal)
    assert A.shape == (*front, L, 4)
    dq, dk, dv = softmax_attention.backward(dA, cache)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    if not L or not M:
        assert not any(array.any() for array in (A, dq, dk, dv))


Q, K, V, _ = draw((2, 2), 4, 6)


@pytest.mark.parametrize(("arguments", "keywords", "error", "sentence"), [
    ((Q, K[..., :2], V), {}, ValueError, r"q has shape \(2, 2, 4, 3\) and k \(2, 2, 6, 2\)"),
    ((Q, K[:1], V[:1]), {}, ValueError, r"and k \(1, 2, 6, 3\); expected"),
    ((Q, K[:, 0], V[:, 0]), {}, ValueError, r"and k \(2, 6, 3\)"),
    ((Q[0, 0, 0], K, V), {}, ValueError, r"q has shape \(3,\)"),
    ((Q, K, V[:, :, :5]), {}, ValueError, r"k has shape \(2, 2, 6, 3\) and v \(2, 2, 5, 4\); expected"),
    ((Q.astype(int), K, V), {}, TypeError, "q has dtype int64"),
    ((Q, K, V.astype(complex)), {}, TypeError, "v has dtype complex128"),
    ((Q, K.tolist(), V), {}, TypeError, "k is a list"),
    ((Q, K, V), {"mask": np.ones((2, 6))}, TypeError, "mask has dtype float64; expected bool"),
    ((Q, K, V), {"mask": np.ones((2, 5), bool)}, ValueError, r"mask has shape \(2, 5\); expected \(2, 6\), over"),
    ((Q, K, V), {"mask": np.ones((4, 6), bool)}, ValueError, r"mask has shape \(4, 6\)"),
    ((Q, K, V), {"mask": np.ones((2, 3, 4, 6), bool)}, ValueError, r"broadcasts to \(2, 2, 4, 6\)"),
    ((Q, K, V), {"mask": [[True]]}, TypeError, "mask is a list"),
    ((Q, K[:, :, :3], V[:, :, :3]), {"causal": True}, ValueError, "causal with 4 queries and 3 keys"),
    ((Q, K, V), {"window": 2}, ValueError, "window is given and causal is False"),
    ((Q, K, V), {"causal": True, "window": 0}, ValueError, "window is 0; expected a whole number of at least 1"),
    ((Q, K, V), {"causal": True, "window": 2.0}, ValueError, "window is 2.0"),
    ((Q, K, V), {"dropout": 1.0, "rng": np.random.default_rng(0)}, ValueError, "dropout is 1.0; expected a number in"),
    ((Q, K, V), {"dropout": -0.1, "rng": np.random.default_rng(0)}, ValueError, "dropout is -0.1"),
])
def test_bad_input(arguments, keywords, error, sentence):
    with pytest.raises(error, match=sentence):
        softmax_attention.forward(*arguments, **keywords)
