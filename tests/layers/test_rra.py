"""LSTM and RRALSTM: the fast loop against the plain equations, and exact facts of the cell."""

import numpy as np
import pytest
from cases import TABLE, B, mask_kinds
from helpers import assert_close, assert_identical, grads, upstream
from hypothesis import given, settings, strategies as st
from oracles import plain_backward, plain_forward

from minigrad.fast.lstm import BLOCK
from minigrad.layers import LSTM, RRALSTM
from minigrad.layers.rra import NORMALIZERS

CELLS = [case for case in TABLE if case.name.startswith(("LSTM", "RRALSTM"))]


@pytest.mark.parametrize("kind", mask_kinds())
@pytest.mark.parametrize("case", CELLS, ids=lambda case: case.name)
def test_the_fast_loop_equals_the_plain_equations(case, kind):
    layer, x, state, mask = case.layer(), case.x(), case.keywords()["state"], mask_kinds()[kind]
    out, cache = layer.forward(x, state=state, mask=mask)
    plain_out, plain_caches = plain_forward(layer, x, state, mask)
    assert_close(out, plain_out)
    dy, dstate = upstream(out)
    dx, dstate0 = layer.backward((dy, dstate), cache)
    plain_dx, plain_dstate0, totals = plain_backward(layer, dy, dstate, mask, plain_caches)
    assert_close((dx, dstate0), (plain_dx, plain_dstate0))
    if isinstance(layer, RRALSTM) and len(layer.w.value):
        totals[3] = NORMALIZERS[layer.normalize].backward(totals[3], layer.attention_weights()[1])
    assert_close(grads(layer), totals)


@pytest.mark.parametrize("T", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7])
def test_blocks_of_steps_add_up(T):
    """The weights' products are taken a block of steps at a time: lengths around a block's ends."""
    layer = RRALSTM(3, 4, 5, rng=0, dtype="float64")
    x, mask = np.random.default_rng(0).standard_normal((2, T, 3)), np.ones((2, T), bool)
    mask[0, T // 2:] = False
    state = np.zeros((2, 6, 4)), np.zeros((2, 4))
    out, cache = layer.forward(x, state, mask)
    plain_out, plain_caches = plain_forward(layer, x, state, mask)
    dy, dstate = upstream(out)
    plain_dx, plain_dstate0, totals = plain_backward(layer, dy, dstate, mask, plain_caches)
    assert_close((out, *layer.backward((dy, dstate), cache)), (plain_out, plain_dx, plain_dstate0))
    assert_close(grads(layer)[:3], totals[:3])


# ---- exact facts -----------------------------------------------------------------------------------------

def twin(K, dtype="float64", **keywords):
    """An LSTM and an RRALSTM with the same W, U, b."""
    return LSTM(4, 5, rng=1, dtype=dtype), RRALSTM(4, 5, K, rng=1, dtype=dtype, **keywords)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("offset", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_K_0_is_the_lstm_bit_for_bit(dtype, offset, masked):
    lstm, rra = twin(0, dtype, offset=offset)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((B, 7, 4)).astype(dtype)
    h, c, dy, dh, dc = (rng.standard_normal(s).astype(dtype) for s in [(B, 5), (B, 5), (B, 7, 5), (B, 5), (B, 5)])
    mask = mask_kinds()["gaps"] if masked else None
    (y, (h1, c1)), cache = lstm.forward(x, state=(h, c), mask=mask)
    (y2, (past, c2)), cache2 = rra.forward(x, state=(h[:, None], c), mask=mask)
    assert_identical((y, h1, c1), (y2, past[:, -1], c2))
    dx, (dh0, dc0) = lstm.backward((dy, (dh, dc)), cache)
    dx2, (dpast0, dc02) = rra.backward((dy, (dh[:, None], dc)), cache2)
    assert_identical((dx, dh0, dc0), (dx2, dpast0[:, -1], dc02))
    assert_identical(grads(lstm), grads(rra)[:3])
    assert rra.w.value.size == 0


@pytest.mark.parametrize("normalize", ["sum", "softmax"])
@pytest.mark.parametrize("offset", [1, 2])
def test_K_1_has_no_gradient_of_w(normalize, offset):
    _, layer = twin(1, offset=offset, normalize=normalize)
    out, cache = layer.forward(np.random.default_rng(0).standard_normal((B, 7, 4)))
    layer.backward(upstream(out), cache)
    assert layer.w.grad[0] == 0


@pytest.mark.parametrize("offset", [1, 2])
@settings(max_examples=25, deadline=None)
@given(K=st.integers(2, 9), seed=st.integers(0, 1000), factor=st.sampled_from([-3.0, 0.01, 0.5, 7.0, 1e4]))
def test_sum_normalisation_is_scale_invariant(offset, K, seed, factor):
    """sum_k w_k dw_k = 0; scaling w by any non-zero constant changes no output; dw scales by its inverse."""
    layer = RRALSTM(4, 5, K, offset, rng=seed, dtype="float64")
    x = np.random.default_rng(seed).standard_normal((2, 7, 4))
    out, cache = layer.forward(x)
    layer.backward(upstream(out), cache)
    dw = layer.w.grad.copy()
    w = np.abs(layer.w.value)
    assert abs(layer.w.value @ dw) <= 1e-13 * w @ np.abs(dw) + 1e-15 * w.sum()           # dw itself can nearly cancel
    layer.zero_grad()
    layer.w.value *= factor
    scaled, cache = layer.forward(x)
    assert_close(scaled, out)
    layer.backward(upstream(out), cache)
    np.testing.assert_allclose(layer.w.grad * factor, dw, rtol=1e-9, atol=1e-12 * max(np.abs(dw).max(), 1e-2))


def test_offset_is_a_python_int():
    """A kernel takes 8 bytes of it: a NumPy integer may have fewer."""
    assert type(RRALSTM(4, 5, 3, np.int32(2), rng=0).offset) is int


def test_softmax_is_invariant_to_a_shift():
    layer = RRALSTM(4, 5, 3, normalize="softmax", rng=0, dtype="float64")
    x = np.random.default_rng(0).standard_normal((2, 7, 4))
    out, cache = layer.forward(x)
    layer.backward(upstream(out), cache)
    assert abs(layer.w.grad.sum()) < 1e-14
    layer.w.value += 3.5
    assert_close(layer(x), out)


@pytest.mark.parametrize("K", [0, 1, 10])
def test_the_parameter_count_is_the_lstms_plus_K(K):
    def count(layer):
        return sum(p.value.size for p in layer.parameters())
    lstm, rra = LSTM(2, 128), RRALSTM(2, 128, K)
    assert count(lstm) == 4 * (2 * 128 + 128**2 + 128) == 67_072
    assert count(rra) == count(lstm) + K


@pytest.mark.parametrize(("offset", "first_seen"), [(1, 1), (2, 2)])
def test_w_0_weighs_the_newest_state_of_the_window(offset, first_seen):
    """With w = (1, 0, 0), the attention of step t is h_{t-offset}: step t first differs from an LSTM there."""
    lstm, rra = twin(3, offset=offset)
    rra.w.value[...] = [1, 0, 0]
    x = np.random.default_rng(0).standard_normal((1, 6, 4))
    (y, _), (y_rra, _) = lstm(x), rra(x)
    same = (y == y_rra).all(axis=(0, 2))
    assert same[:first_seen].all()
    assert not same[first_seen:].any()
    rra.w.value[...] = [0, 0, 1]                     # now the oldest: two steps later
    same = (y == rra(x)[0]).all(axis=(0, 2))
    assert same[:first_seen + 2].all()
    assert not same[first_seen + 2:].any()


def test_attention_is_in_the_output_and_not_in_the_cell():
    """c_t keeps its LSTM form (equation 8): while h_{t-1} is still the LSTM's, so is c_t."""
    lstm, rra = twin(2, offset=2)
    x = np.random.default_rng(0).standard_normal((1, 3, 4))
    (_, (_, c)), (_, (_, c_rra)) = lstm(x), rra(x)
    assert_identical(c, c_rra)                       # a_3 = h_1 enters h_3 only
    (y, _), (y_rra, _) = lstm(x), rra(x)
    assert (y[:, 2] != y_rra[:, 2]).all()


def test_the_forget_bias_and_the_blocks_at_the_start():
    for layer in (LSTM(3, 8, forget_bias=1.5, rng=0), RRALSTM(3, 8, 4, forget_bias=1.5, rng=0)):
        b = layer.b.value
        assert (b[8:16] == 1.5).all()
        assert not b[:8].any()
        assert not b[16:].any()
        for gate in range(4):
            block = layer.U.value[:, gate * 8:(gate + 1) * 8]
            np.testing.assert_allclose(block.T @ block, np.eye(8), atol=1e-5)
    w = RRALSTM(3, 8, 4, rng=0).w.value
    assert w.min() >= 0
    assert w.max() < 1


def test_state_of_a_short_sequence_keeps_the_given_past():
    layer = RRALSTM(4, 5, 6, rng=0, dtype="float64")
    past = np.random.default_rng(0).standard_normal((2, 7, 5))
    y, (new_past, _) = layer(np.random.default_rng(1).standard_normal((2, 3, 4)), state=(past, np.zeros((2, 5))))
    assert_identical(new_past, np.concatenate([past[:, 3:], y], axis=1))


def test_truncated_backpropagation_through_time():
    """Without dstate handed back, a segment's gradients are those of the segment alone, from its initial state."""
    layer = RRALSTM(4, 5, 3, rng=0, dtype="float64")
    x, dy = (np.random.default_rng(n).standard_normal((2, 8, size)) for n, size in [(0, 4), (1, 5)])
    (_, state), first = layer.forward(x[:, :4])
    _, second = layer.forward(x[:, 4:], state=state)
    layer.backward((dy[:, 4:], None), second)
    layer.backward((dy[:, :4], None), first)
    truncated = grads(layer)
    layer.zero_grad()
    _, alone = layer.forward(x[:, 4:], state=tuple(array.copy() for array in state))
    layer.backward((dy[:, 4:], None), alone)
    _, alone = layer.forward(x[:, :4])
    layer.backward((dy[:, :4], None), alone)
    assert_identical(truncated, grads(layer))


# ---- sums near zero --------------------------------------------------------------------------------------

@pytest.mark.parametrize("w", [[1.0, -1.0], [0.0, 0.0], [1.0, -1.0 + 1e-7], [-5e3, 5e3]])
def test_a_sum_near_zero_is_refused_with_advice(w):
    layer = RRALSTM(4, 5, 2, rng=0, dtype="float64")
    layer.w.value[...] = w
    with pytest.raises(ArithmeticError, match=r"w sum to .* use normalize='softmax'"):
        layer.forward(np.zeros((1, 3, 4)))
    with pytest.raises(ArithmeticError):
        layer.validate()


@pytest.mark.parametrize("w", [[1.0, -1.0 + 1e-5], [-1.0, -2.0], [1e-30, 1e-30]])
def test_a_small_or_negative_sum_is_not_refused(w):
    layer = RRALSTM(4, 5, 2, rng=0, dtype="float64")
    layer.w.value[...] = w
    assert np.isfinite(layer(np.ones((1, 3, 4)))[0]).all()


def test_softmax_needs_no_such_care():
    layer = RRALSTM(4, 5, 2, normalize="softmax", rng=0, dtype="float64")
    layer.w.value[...] = [1, -1]
    layer.validate()
    layer.forward(np.zeros((1, 3, 4)))


# ---- bad input -------------------------------------------------------------------------------------------

X = np.zeros((2, 3, 4))


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: LSTM(0, 5), r"LSTM: d is 0; expected a whole number of at least 1"),
    (lambda: LSTM(4, 2.5), r"LSTM: h is 2.5"),
    (lambda: RRALSTM(4, 5, -1), r"RRALSTM: K is -1; expected a whole number of at least 0"),
    (lambda: RRALSTM(4, 5, 3, offset=3), r"RRALSTM: offset is 3; expected one of 1, 2"),
    (lambda: RRALSTM(4, 5, 3, offset=0), r"RRALSTM: offset is 0"),
    (lambda: RRALSTM(4, 5, 3, normalize="mean"), r"normalize is 'mean'; expected one of 'sum', 'softmax'"),
    (lambda: LSTM(4, 5, init="xavier"), r"init is 'xavier'"),
    (lambda: LSTM(4, 5, forget_bias=float("nan")), r"forget_bias is nan"),
    (lambda: RRALSTM(4, 5, 2, forget_bias=float("inf")), r"forget_bias is inf"),
])
def test_bad_settings(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(("upstream", "sentence"), [
    ((None, np.zeros(3)), r"dstate is ndarray; expected a tuple"),
    ((None, (None,)), r"dstate is 1 entries"),
    ((None, (np.zeros((2, 4)), None)), r"dstate's h has shape \(2, 4\); expected \(2, 5\)"),
    ((None, (None, np.zeros((1, 5)))), r"dstate's c has shape \(1, 5\); expected \(2, 5\)"),
    ((np.zeros((1, 3, 5)), None), r"dy has shape \(1, 3, 5\); expected \(2, 3, 5\)"),
])
def test_a_wrong_upstream_gradient_is_refused_not_broadcast(upstream, sentence):
    layer = LSTM(4, 5, dtype="float64")
    _, cache = layer.forward(X)
    with pytest.raises(ValueError, match=sentence):
        layer.backward(upstream, cache)


@pytest.mark.parametrize("make", [lambda: LSTM(4, 5, dtype="float64"), lambda: RRALSTM(4, 5, 2, dtype="float64")],
                         ids=["LSTM", "RRALSTM"])
@pytest.mark.parametrize(("x", "keywords", "error", "sentence"), [
    (np.zeros((2, 3)), {}, ValueError, r"x has shape \(2, 3\); expected \(batch, length, 4\)"),
    (np.zeros((2, 3, 5)), {}, ValueError, r"x has shape \(2, 3, 5\); expected \(batch, length, 4\)"),
    (np.zeros((2, 3, 4), int), {}, TypeError, r"x has dtype int64; expected floating-point"),
    (np.zeros((2, 3, 4), complex), {}, TypeError, r"x has dtype complex128"),
    ([[1.0]], {}, TypeError, r"x is a list; expected a NumPy or CuPy array"),
    (X, {"mask": np.ones((2, 4), bool)}, ValueError, r"mask has shape \(2, 4\); expected \(2, 3\)"),
    (X, {"mask": np.ones((2, 3))}, TypeError, r"mask has dtype float64; expected bool"),
    (X, {"mask": [[True]]}, TypeError, r"mask is a list"),
    (X, {"state": np.zeros((2, 5))}, ValueError, r"state is ndarray; expected a tuple"),
    (X, {"state": (np.zeros((2, 5)),)}, ValueError, r"state is 1 entries; expected a tuple"),
    (X, {"state": (np.zeros((3, 5)), np.zeros((2, 5)))}, ValueError, r"state's (h|past) has shape \(3, 5\)"),
    (X, {"state": (0, 0)}, TypeError, r"state's (h|past) is 0; expected an array"),
])
def test_bad_input(make, x, keywords, error, sentence):
    layer = make()
    with pytest.raises(error, match=f"{sentence}"):
        layer.forward(x, **keywords)


def test_backward_wants_a_pair():
    layer = LSTM(4, 5, dtype="float64")
    (y, _), cache = layer.forward(X)
    with pytest.raises(TypeError, match=r"expected the pair \(dy, dstate\)"):
        layer.backward(y, cache)
    with pytest.raises(ValueError, match=r"dy has shape \(2, 3, 4\); expected \(2, 3, 5\)"):
        layer.backward((X, None), cache)


# ---- cost ------------------------------------------------------------------------------------------------

def cache_bytes(S, K):
    layer = RRALSTM(2, 16, K, rng=0)
    _, (cache, *_) = layer.forward(np.zeros((8, S, 2), "float32"))
    return sum(array.nbytes for array in cache if array is not None)


def test_memory_is_linear_in_S_and_the_window_is_never_copied():
    assert cache_bytes(400, 10) / cache_bytes(200, 10) == pytest.approx(2, rel=0.05)
    per_state = 8 * 16 * 4                           # one (B, h) float32
    assert cache_bytes(200, 100) - cache_bytes(200, 10) == 90 * per_state     # the longer past, nothing else
