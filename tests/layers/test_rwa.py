"""RWA: the paper's equations under torch autograd, exact facts of a weighted average, and large scores."""

import numpy as np
import pytest
from cases import B, D, H, L, mask_kinds
from helpers import all_gradients, assert_close, assert_identical, grads, upstream
from oracles import gradient, pytorch, tensor, tensors, torch_backward

from minigrad.backend import sigmoid
from minigrad.layers import RWA


def layer_of(scale=1.0, dtype="float64", d=D):
    """An RWA with all of its weights times `scale`, biases off zero."""
    layer, rng = RWA(d, H, rng=3, dtype=dtype), np.random.default_rng(4)
    for p in (layer.b_u, layer.b_g):
        p.value[...] = 0.3 * rng.standard_normal(H)
    for name in layer.weights:
        getattr(layer, name).value *= scale
    return layer


def numbers(*shape, seed=0, dtype="float64"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def state_of(dtype="float64"):
    return tuple(numbers(3, B, H, seed=1, dtype=dtype))


# ---- against PyTorch -------------------------------------------------------------------------------------

def torch_rwa(weights, x, h, n, d, mask):
    """The paper's equations, numerator and denominator, in torch, with the mask in every step: y, h, n, d."""
    torch, ys = pytorch(), []
    for t, real in enumerate(torch.tensor(mask).T[:, :, None]):
        xh = torch.cat([x[:, t], h], 1)
        z = (x[:, t] @ weights["W_u"] + weights["b_u"]) * torch.tanh(xh @ weights["W_g"] + weights["b_g"])
        e = torch.exp(xh @ weights["W_a"])
        n, d = torch.where(real, n + z * e, n), torch.where(real, d + e, d)
        h = torch.where(real, torch.tanh(n / d), h)
        ys.append(torch.where(real, h, 0.0))
    return torch.stack(ys, 1), h, n, d


def test_rwa_equals_torch_autograd_from_the_learned_start():
    torch, layer, mask, x = pytorch(), layer_of(), mask_kinds()["gaps"], numbers(B, L, D)
    (y, state), cache = layer.forward(x, mask=mask)
    dy, dstate = upstream((y, state))
    dx, _ = layer.backward((dy, dstate), cache)
    weights, tx, zero = tensors(layer), tensor(x), torch.zeros(B, H, dtype=torch.float64)
    ty, th, tn, td = torch_rwa(weights, tx, torch.tanh(weights["s"]).expand(B, H), zero, zero, mask)
    out = (ty, th, tn / td, torch.log(td))
    torch_backward(out, (dy, *dstate))
    assert_close((y, *state), [array.detach().numpy() for array in out])
    assert_close((dx, grads(layer)), (gradient(tx), [gradient(leaf) for leaf in weights.values()]))


# ---- it is a weighted average ----------------------------------------------------------------------------

def history(layer, x, y):
    """z and a (B, L, h) of every step, from the outputs before it."""
    h_0 = np.tanh(layer.s.value)
    before = np.concatenate([np.broadcast_to(h_0, y[:, :1].shape), y[:, :-1]], axis=1)
    xh = np.concatenate([x, before], axis=2)
    u, g = x @ layer.W_u.value + layer.b_u.value, xh @ layer.W_g.value + layer.b_g.value
    return u * np.tanh(g), xh @ layer.W_a.value


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_r_is_the_average_of_the_history_weighed_by_its_scores(scale):
    """r_t = sum_i z_i e^{a_i - m} / sum_i e^{a_i - m}, l_t = m + log sum_i e^{a_i - m}, m = max_i a_i, for each t."""
    layer, x = layer_of(), numbers(B, 12, D)
    layer.W_a.value *= scale
    y, _ = layer(x)
    z, a = history(layer, x, y)
    for t in range(12):
        _, (h, r, l) = layer(x[:, :t + 1])
        m = a[:, :t + 1].max(axis=1)
        e = np.exp(a[:, :t + 1] - m[:, None])
        average = (z[:, :t + 1] * e).sum(axis=1) / e.sum(axis=1)
        assert_close((r, l, h), (average, m + np.log(e.sum(axis=1)), np.tanh(average)))
        assert_identical(h, y[:, t])


@pytest.mark.parametrize("constant", [2.5, -700.0, 700.0])
def test_adding_a_constant_to_all_scores_changes_nothing(constant):
    """An input that is always one adds the constant; u and g do not see it. Its gradient is zero when l has none."""
    layer, x = layer_of(d=D + 1), numbers(B, L, D + 1)
    x[..., -1] = 1
    for p in (layer.W_u, layer.W_g, layer.W_a):
        p.value[D] = 0
    (y, (h, r, l)), cache = layer.forward(x)
    dy, (dh, dr, _) = upstream((y, (h, r, l)))
    layer.backward((dy, (dh, dr, None)), cache)
    np.testing.assert_allclose(layer.W_a.grad[D], 0, atol=1e-13)
    layer.W_a.value[D] = constant
    moved_y, moved = layer(x)
    assert_close((moved_y, *moved), (y, h, r, l + constant), 1e-10)


def test_a_constant_in_l_and_the_scores_changes_nothing():
    """With a state given, l is a score like the others: sum_t da_t + dl_0 = dl."""
    layer, x = layer_of(d=D + 1), numbers(B, L, D + 1)
    x[..., -1] = 1
    out, cache = layer.forward(x, state=state_of())
    dy, dstate = upstream(out)
    _, (_, _, dl_0) = layer.backward((dy, dstate), cache)
    assert_close(layer.W_a.grad[D] + dl_0.sum(axis=0), dstate[2].sum(axis=0))


@pytest.mark.parametrize("fast", [True, False])
def test_the_first_output_and_what_depends_on_the_start(fast):
    """p_1 = 1: the first average is z_1 whatever its score, and r and l of no step reach nothing."""
    layer, x = layer_of(), numbers(B, 1, D)
    layer.fast = fast
    (y, (h, r, l)), cache = layer.forward(x)
    z, a = history(layer, x, y)
    assert_close((y[:, 0], h, r, l), (np.tanh(z[:, 0]), np.tanh(z[:, 0]), z[:, 0], a[:, 0]))
    _, (_, dr, dl) = layer.backward(upstream((y, (h, r, l))), cache)
    assert not dr.any()
    assert not dl.any()


# ---- large scores ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["all real", "a sample with no real step"])
@pytest.mark.parametrize("given", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [30.0, 1e4])
@pytest.mark.parametrize("fast", [True, False])
def test_large_scores_stay_finite(fast, scale, dtype, given, kind):
    """Scores of +-1e4 and more: no overflow, no warning (they are errors here), in values or gradients."""
    layer, mask = layer_of(scale, dtype), mask_kinds()[kind]
    layer.fast = fast
    (y, after), cache = layer.forward(
        numbers(B, L, D, dtype=dtype), state=state_of(dtype) if given else None, mask=mask)
    dx, dstate0 = layer.backward(upstream((y, after)), cache)
    empty = (after[2] == -np.inf).all(axis=1)
    assert_identical(empty, ~mask.any(axis=1) & (not given))
    for array in (y, *after[:2], after[2][~empty], dx, *dstate0, *grads(layer)):
        assert np.isfinite(array).all()


@pytest.mark.parametrize("given", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("size", [1e2, 1e4, -1e4])
def test_the_fast_loop_equals_the_plain_one_for_large_scores(size, given):
    """One input drives the scores alone, up and down by turns, so that the values stay comparable."""
    layer, x = layer_of(d=D + 1), numbers(B, 12, D + 1)
    x[..., -1] = np.array([0, 1, -1, 1, 1, -1, 0, 0.001, 1.001, -1, 1, 0.5])
    layer.W_u.value[D], layer.W_g.value[D], layer.W_a.value[D] = 0, 0, size
    keywords = {"state": state_of()} if given else {}
    dout = upstream(layer(x))
    fast = all_gradients(layer, x, keywords, dout)
    layer.fast = False
    plain = all_gradients(layer, x, keywords, dout)
    assert_close(fast[0], plain[0], 1e-11)
    for a, b in zip((fast[1][0], *fast[1][1], *fast[2]), (plain[1][0], *plain[1][1], *plain[2])):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * max(np.abs(b).max(), 1e-300))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("jump", [-1e4, -50.0, -20.0, 0.0, 20.0, 50.0, 79.0, 81.0, 100.0, 637.0, 640.0, 1e4])
def test_one_step_far_above_or_below_what_was_there(jump, dtype):
    """p = sigma(a - l) and l' = logaddexp(l, a), also around where the loop cuts a - m off: p to a few units in its
    last place however small it is (with z = 1 and r = 0 before, r is p)."""
    layer = layer_of(0, dtype)
    layer.b_u.value[...], layer.b_g.value[...] = 1, 20                       # z = 1
    layer.W_a.value[0] = 1
    x, zero = np.zeros((1, 1, D), dtype), np.zeros((1, H), dtype)
    x[..., 0] = jump
    _, (_, r, l) = layer(x, state=(zero, zero, zero))
    a, eps = np.full((1, H), jump, dtype), np.finfo(dtype).eps
    np.testing.assert_allclose(r, sigmoid(a), rtol=4 * eps, atol=np.finfo(dtype).tiny)
    np.testing.assert_allclose(l, np.logaddexp(0, a), rtol=4 * eps, atol=4 * eps)


def test_float32_agrees_to_its_rounding():
    single, x = layer_of(dtype="float32"), numbers(B, 40, D, dtype="float32")
    double = layer_of(dtype="float32").astype("float64")
    for a, b in zip(single(x)[1], double(x.astype("float64"))[1]):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


# ---- the start -------------------------------------------------------------------------------------------

def test_the_initial_state():
    layer = layer_of()
    assert_identical(layer.initial_state(B),
                     (np.tile(np.tanh(layer.s.value), (B, 1)), np.zeros((B, H)), np.full((B, H), -np.inf)))


@pytest.mark.parametrize("fast", [True, False])
def test_a_sample_with_no_real_step_keeps_the_start_and_hands_its_gradient_to_s(fast):
    layer, mask = layer_of(), np.zeros((B, L), bool)
    layer.fast = fast
    (y, state), cache = layer.forward(numbers(B, L, D), mask=mask)
    assert_identical(state, layer.initial_state(B))
    assert not y.any()
    dy, dstate = upstream((y, state))
    dx, dstate0 = layer.backward((dy, dstate), cache)
    assert_identical(dstate0, dstate)
    assert_close(layer.s.grad, (dstate[0] * (1 - np.tanh(layer.s.value) ** 2)).sum(axis=0))
    assert not any(g.any() for g in [dx, *grads(layer)[1:]])


def test_the_parameters_at_the_start():
    layer = RWA(4, 400, rng=0)
    shapes = {name: p.value.shape for name, p in layer.named_parameters()}
    assert shapes == {"s": (400,), "W_u": (4, 400), "b_u": (400,), "W_g": (404, 400), "b_g": (400,), "W_a": (404, 400)}
    assert abs(layer.s.value.mean()) < 0.15
    assert abs(layer.s.value.std() - 1) < 0.1
    assert not any(bias.value.any() for bias in (layer.b_u, layer.b_g))
    for W in (layer.W_u.value, layer.W_g.value, layer.W_a.value):
        bound = np.sqrt(6 / sum(W.shape))
        assert 0.98 * bound < np.abs(W).max() <= bound


@pytest.mark.parametrize(("arguments", "sentence"), [((0, 5), "RWA: d is 0"), ((4, 2.5), "RWA: h is 2.5")])
def test_bad_settings(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        RWA(*arguments)
