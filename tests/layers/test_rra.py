"""RRALSTM: the paper's equations under torch autograd, and exact facts of the window and its weights."""

import numpy as np
import pytest
from cases import B, D, H, L, mask_kinds
from helpers import assert_close, assert_identical, grads, upstream
from hypothesis import given, settings, strategies as st
from oracles import gradient, pytorch, tensor, tensors, torch_backward

from minigrad.layers import LSTM, RRALSTM


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def torch_rra(layer, weights, x, past, c, mask):
    """Equations 7 to 10 in torch, from the paper, with the mask in every step: y, past, c."""
    torch, (W, U, b, w) = pytorch(), weights.values()
    w_hat = w / w.sum() if layer.normalize == "sum" else torch.softmax(w, 0)
    window, ys = list(past.unbind(1)), []                            # oldest first, window[-1] = h_{t-1}
    for t, real in enumerate(torch.tensor(mask).T[:, :, None]):
        i, f, o, g = (x[:, t] @ W + window[-1] @ U + b).split(H, 1)
        new_c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)                                      # (8)
        a = sum(w_hat[k - 1] * window[len(window) - k - layer.offset + 1] for k in range(1, len(w) + 1))     # (9)
        new_h = torch.sigmoid(o) * torch.tanh(new_c + a)                                                     # (10)
        c = torch.where(real, new_c, c)
        window = [torch.where(real, new, old) for new, old in zip([*window[1:], new_h], window)]
        ys.append(torch.where(real, new_h, 0.0))
    return torch.stack(ys, 1), torch.stack(window, 1), c


@pytest.mark.parametrize("normalize", ["sum", "softmax"])
@pytest.mark.parametrize(("K", "offset"), [(1, 1), (1, 2), (3, 1), (3, 2), (3, 4), (10, 2)])
def test_rra_equals_torch_autograd(K, offset, normalize):
    layer = RRALSTM(D, H, K, offset, normalize, rng=2, dtype="float64")
    mask = mask_kinds()["a sample with no real step"]
    layer.b.value += 0.3 * numbers(4 * H)
    x, past, c = numbers(B, L, D), numbers(B, K + offset - 1, H), numbers(B, H)
    out, cache = layer.forward(x, state=(past, c), mask=mask)
    dy, dstate = upstream(out)
    returned = layer.backward((dy, dstate), cache)
    weights, (tx, tpast, tc) = tensors(layer), map(tensor, (x, past, c))
    expected = torch_rra(layer, weights, tx, tpast, tc, mask)
    torch_backward(expected, (dy, *dstate))
    assert_close(out, tuple(array.detach().numpy() for array in expected), 1e-10)
    assert_close(returned, (gradient(tx), (gradient(tpast), gradient(tc))), 1e-10)
    assert_close(grads(layer), [gradient(leaf) for leaf in weights.values()], 1e-10)


# ---- exact facts -----------------------------------------------------------------------------------------

def twin(K, dtype="float64", **keywords):
    """An LSTM and an RRALSTM with the same W, U, b."""
    return LSTM(4, 5, rng=1, dtype=dtype), RRALSTM(4, 5, K, rng=1, dtype=dtype, **keywords)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("offset", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_K_0_is_the_lstm_bit_for_bit(masked, offset, dtype, fast):
    lstm, rra = twin(0, dtype, offset=offset)
    lstm.fast = rra.fast = fast
    x, h, c, dy, dh, dc = (numbers(*shape, seed=n).astype(dtype) for n, shape in enumerate(
        [(B, 7, 4), (B, 5), (B, 5), (B, 7, 5), (B, 5), (B, 5)]))
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
    out, cache = layer.forward(numbers(B, 7, 4))
    layer.backward(upstream(out), cache)
    assert layer.w.grad[0] == 0


@settings(max_examples=25, deadline=None)
@given(K=st.integers(2, 9), seed=st.integers(0, 1000), factor=st.sampled_from([-3.0, 0.01, 0.5, 7.0, 1e4]))
def test_sum_normalisation_is_scale_invariant(K, seed, factor):
    """sum_k w_k dw_k = 0; scaling w by any non-zero constant changes no output; dw scales by its inverse."""
    layer, x = RRALSTM(4, 5, K, 1 + seed % 2, rng=seed, dtype="float64"), numbers(2, 7, 4, seed=seed)
    out, cache = layer.forward(x)
    layer.backward(upstream(out), cache)
    dw, w = layer.w.grad.copy(), np.abs(layer.w.value)
    assert abs(layer.w.value @ dw) <= 1e-13 * w @ np.abs(dw) + 1e-15 * w.sum()           # dw itself can nearly cancel
    layer.zero_grad()
    layer.w.value *= factor
    scaled, cache = layer.forward(x)
    assert_close(scaled, out)
    layer.backward(upstream(out), cache)
    np.testing.assert_allclose(layer.w.grad * factor, dw, rtol=1e-9, atol=1e-12 * max(np.abs(dw).max(), 1e-2))


def test_softmax_is_invariant_to_a_shift():
    layer, x = RRALSTM(4, 5, 3, normalize="softmax", rng=0, dtype="float64"), numbers(2, 7, 4)
    out, cache = layer.forward(x)
    layer.backward(upstream(out), cache)
    assert abs(layer.w.grad.sum()) < 1e-14
    layer.w.value += 3.5
    assert_close(layer(x), out)


@pytest.mark.parametrize("K", [0, 1, 10])
def test_the_parameter_count_is_the_lstms_plus_K(K):
    assert LSTM(2, 128).count_parameters() == 4 * (2 * 128 + 128**2 + 128) == 67_072
    assert RRALSTM(2, 128, K).count_parameters() == 67_072 + K


@pytest.mark.parametrize(("offset", "first_seen"), [(1, 1), (2, 2)])
def test_w_0_weighs_the_newest_state_of_the_window(offset, first_seen):
    """With w = (1, 0, 0), the attention of step t is h_{t-offset}: step t first differs from an LSTM there."""
    lstm, rra = twin(3, offset=offset)
    x = numbers(1, 6, 4)
    for w, seen in (([1, 0, 0], first_seen), ([0, 0, 1], first_seen + 2)):   # the last weighs the oldest
        rra.w.value[...] = w
        same = (lstm(x)[0] == rra(x)[0]).all(axis=(0, 2))
        assert same[:seen].all()
        assert not same[seen:].any()


def test_attention_is_in_the_output_and_not_in_the_cell():
    """c_t keeps its LSTM form (equation 8): while h_{t-1} is still the LSTM's, so is c_t."""
    lstm, rra = twin(2, offset=2)
    x = numbers(1, 3, 4)
    (y, (_, c)), (y_rra, (_, c_rra)) = lstm(x), rra(x)
    assert_identical(c, c_rra)                       # a_3 = h_1 enters h_3 only
    assert (y[:, 2] != y_rra[:, 2]).all()


def test_w_at_the_start():
    w = RRALSTM(3, 8, 100, rng=0).w.value
    assert 0 <= w.min() < 0.1
    assert 0.9 < w.max() < 1


def test_offset_is_a_python_int():
    """A kernel takes 8 bytes of it: a NumPy integer may have fewer."""
    assert type(RRALSTM(4, 5, 3, np.int32(2), rng=0).offset) is int


# ---- sums near zero --------------------------------------------------------------------------------------

def with_weights(w, **settings):
    layer = RRALSTM(4, 5, 2, rng=0, dtype="float64", **settings)
    layer.w.value[...] = w
    return layer


@pytest.mark.parametrize("w", [[1.0, -1.0], [0.0, 0.0], [1.0, -1.0 + 1e-7], [-5e3, 5e3]])
def test_a_sum_near_zero_is_refused_with_advice(w):
    with pytest.raises(ArithmeticError, match=r"w sum to .* use normalize='softmax'"):
        with_weights(w).forward(np.zeros((1, 3, 4)))
    with pytest.raises(ArithmeticError):
        with_weights(w).validate()


@pytest.mark.parametrize(("w", "normalize"), [
    ([1.0, -1.0 + 1e-5], "sum"), ([-1.0, -2.0], "sum"), ([1e-30, 1e-30], "sum"), ([1.0, -1.0], "softmax")])
def test_other_sums_are_not_refused(w, normalize):
    assert np.isfinite(with_weights(w, normalize=normalize)(np.ones((1, 3, 4)))[0]).all()


@pytest.mark.parametrize(("arguments", "sentence"), [
    ({"K": -1}, r"RRALSTM: K is -1; expected a whole number of at least 0"),
    ({"offset": 0}, r"RRALSTM: offset is 0; expected a whole number of at least 1"),
    ({"normalize": "mean"}, r"normalize is 'mean'; expected one of 'sum', 'softmax'"),
])
def test_bad_settings(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        RRALSTM(4, 5, **{"K": 3, **arguments})
