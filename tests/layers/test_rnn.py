"""RNN and IRNN: their equations under torch autograd, and exact facts of every form."""

import numpy as np
import pytest
from cases import B, D, H, L, mask_kinds
from helpers import assert_close, assert_identical, grads, upstream
from oracles import gradient, pytorch, tensor, tensors, torch_backward

from minigrad.layers import IRNN, RNN

FORMS = {"(3)": {}, "(4)": {"residual": 3}, "(4), k = 1": {"residual": 1},
         "(4), linear": {"residual": 2, "shortcut": "linear"}, "(5)": {"residual": 4, "attention": True},
         "(5), long": {"residual": 12, "attention": True, "normalize": "softmax"},
         "(5), k = 2": {"residual": 2, "attention": True}}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def rnn(*arguments, **settings):
    return RNN(D, H, *arguments, rng=1, dtype=settings.pop("dtype", "float64"), **settings)


# ---- the equations under torch autograd ------------------------------------------------------------------

def torch_forward(layer, weights, x, state, mask):
    """y and the last states, oldest first, from the formulas; `state` a list of h_{t-k} ... h_{t-1}."""
    torch, ys = pytorch(), []
    for t, real in enumerate(torch.tensor(mask).T[:, :, None]):
        if isinstance(layer, IRNN):
            h = torch.relu(x[:, t] @ weights["V"] + state[-1] @ weights["W"] + weights["b"])
        else:
            h = torch.tanh(x[:, t] @ weights["W"] + state[-1] @ weights["U"] + weights["b"])
            if layer.attention:
                w = weights["w"]
                w_hat = w / w.sum() if layer.normalize == "sum" else torch.softmax(w, 0)
                h = h + sum(w_hat[i - 1] * state[-(i + 1)] for i in range(1, layer.residual))
            elif layer.residual:
                h = h + (state[0] @ weights["W_f"] if layer.shortcut == "linear" else state[0])
        ys.append(torch.where(real, h, 0.0))
        state = [torch.where(real, new, old) for new, old in zip([*state[1:], h], state)]
    return torch.stack(ys, 1), state


@pytest.mark.parametrize("layer", [*(rnn(**form) for form in FORMS.values()), IRNN(D, H, rng=0, dtype="float64")],
                         ids=[*FORMS, "IRNN"])
def test_every_form_equals_torch_autograd(layer):
    torch, x, mask = pytorch(), numbers(B, L, D), mask_kinds()["a sample with no real step"]
    for p in layer.parameters():
        p.value += 0.3 * numbers(*p.value.shape, seed=2) ** 2                # off zero and the identity
    state = numbers(B, getattr(layer, "residual", None) or 1, H)
    given = state if getattr(layer, "residual", None) else state[:, 0]
    out, cache = layer.forward(x, state=(given,), mask=mask)
    dy, (dstate,) = upstream(out)
    layer.zero_grad()
    dx, (dstate0,) = layer.backward((dy, (dstate,)), cache)
    tx, tstate, weights = tensor(x), tensor(state), tensors(layer)
    ty, last = torch_forward(layer, weights, tx, list(tstate.unbind(1)), mask)
    tlast = torch.stack(last, 1).reshape(given.shape)
    torch_backward((ty, tlast), (dy, dstate))
    assert_close(out, (ty.detach().numpy(), (tlast.detach().numpy(),)))
    assert_close((dx, dstate0, grads(layer)),
                 (gradient(tx), gradient(tstate).reshape(given.shape), [gradient(w) for w in weights.values()]))


# ---- exact facts of RNN ----------------------------------------------------------------------------------

def newest(h_or_past):
    return h_or_past if h_or_past.ndim == 2 else h_or_past[:, -1]


def run(layer, x, state, mask=None, seed=7):
    """y, the newest state, dx, the gradient of the newest state, the gradients of W, U, b; dy and dh from the seed."""
    (y, (last,)), cache = layer.forward(x, state=(state,), mask=mask)
    dy, dh = numbers(*y.shape, seed=seed).astype(y.dtype), numbers(B, H, seed=seed + 1).astype(y.dtype)
    dlast = np.zeros_like(last)
    newest(dlast)[...] = dh
    dx, (dstate0,) = layer.backward((dy, (dlast,)), cache)
    return y, newest(last), dx, newest(dstate0), grads(layer)[:3]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 2, 9])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fast", [True, False])
def test_W_f_0_is_the_plain_rnn_bit_for_bit(fast, masked, k, dtype):
    plain_rnn, residual = rnn(dtype=dtype, fast=fast), rnn(k, "linear", dtype=dtype, fast=fast)
    residual.W_f.value[...] = 0
    x, past = numbers(B, L, D).astype(dtype), numbers(B, k, H).astype(dtype)
    mask = mask_kinds()["gaps"] if masked else None
    assert_identical(run(residual, x, past, mask), run(plain_rnn, x, past[:, -1], mask))
    assert residual.W_f.grad.any()                   # but the shortcut is learned


@pytest.mark.parametrize("k", [1, 3])
def test_W_f_the_identity_is_the_identity_shortcut(k):
    linear = rnn(k, "linear")
    linear.W_f.value[...] = np.eye(H)
    x, past = numbers(B, L, D), numbers(B, k, H)
    assert_close(run(linear, x, past), run(rnn(k), x, past))


@pytest.mark.parametrize("normalize", ["sum", "softmax"])
def test_attention_over_one_state_is_the_shortcut_from_h_t_2(normalize):
    """k = 2: w_hat = 1 whatever w is, and w has no gradient."""
    attention, x, past = rnn(2, attention=True, normalize=normalize), numbers(B, L, D), numbers(B, 2, H)
    assert_identical(run(attention, x, past), run(rnn(2), x, past))
    assert attention.w.grad[0] == 0


@pytest.mark.parametrize("lag", [2, 3, 4])
def test_attention_to_one_state_is_the_shortcut_from_it(lag):
    """w[0] weighs the newest of the window, h_{t-2}; the last weight h_{t-k}."""
    attention, x, past = rnn(4, attention=True), numbers(B, L, D), numbers(B, 4, H)
    attention.w.value[...] = np.arange(2, 5) == lag
    assert_close(run(attention, x, past), run(rnn(lag), x, past[:, -lag:]))


@pytest.mark.parametrize(("settings", "first_seen"), [
    ({"residual": 1}, 1), ({"residual": 3}, 3), ({"residual": 2, "shortcut": "linear"}, 2),
    ({"residual": 4, "attention": True}, 2)])
def test_a_shortcut_is_seen_from_its_first_step_on(settings, first_seen):
    """Before the sequence the states are zero: y is the plain RNN's until the shortcut reaches h_1."""
    (y, _), (y_plain, _) = (rnn(**form)(numbers(1, 6, D)) for form in (settings, {}))
    same = (y == y_plain).all(axis=(0, 2))
    assert same[:first_seen].all()
    assert not same[first_seen:].any()


def test_the_shortcut_is_outside_the_tanh():
    """With W = U = 0 and b = 0, h_t = h_{t-k}: three states in turn, though they are beyond tanh's reach."""
    layer, past = rnn(3), 10 * numbers(B, 3, H)
    layer.W.value[...], layer.U.value[...] = 0, 0
    y, (last,) = layer(numbers(B, 7, D), state=(past,))
    assert_identical((y, last), (past[:, [0, 1, 2, 0, 1, 2, 0]], past[:, [1, 2, 0]]))


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS)
def test_the_parameters_at_the_start(settings):
    layer, same_seed = RNN(4, 50, rng=0, **settings), RNN(4, 50, rng=0)
    W, U, b, *rest = layer.parameters()
    assert_identical([W.value, U.value], [same_seed.W.value, same_seed.U.value])
    bound = np.sqrt(6 / 54)
    assert 0.9 * bound < np.abs(W.value).max() <= bound
    assert not b.value.any()
    assert [p.name for p in rest] == (["w"] if settings.get("attention") else ["W_f"] if "shortcut" in settings else [])
    if settings.get("attention"):
        assert rest[0].value.shape == (settings["residual"] - 1,)
        assert 0 <= rest[0].value.min() <= rest[0].value.max() < 1
    for like_U in [U, *(p for p in rest if p.name == "W_f")]:
        np.testing.assert_allclose(like_U.value.T @ like_U.value, np.eye(50), atol=1e-5)


def test_init_names_a_rule():
    a = 1 / np.sqrt(30)
    assert all(0.9 * a < np.abs(p.value).max() <= a
               for name, p in RNN(20, 30, 2, "linear", init="uniform", rng=0).named_parameters() if name != "b")


@pytest.mark.parametrize("w", [[1.0, -1.0], [0.0, 0.0], [1.0, -1.0 + 1e-7]])
def test_a_sum_near_zero_is_refused_with_advice(w):
    layer = RNN(4, 5, 3, attention=True, rng=0, dtype="float64")
    layer.w.value[...] = w
    with pytest.raises(ArithmeticError, match=r"RNN: the attention weights w sum to .* use normalize='softmax'"):
        layer.forward(np.zeros((1, 3, 4)))
    with pytest.raises(ArithmeticError):
        layer.validate()
    layer.normalize = "softmax"
    layer.forward(np.zeros((1, 3, 4)))


# ---- exact facts of IRNN ---------------------------------------------------------------------------------

@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_irnn_starts_by_copying_a_state_that_is_not_negative(dtype, fast):
    layer, h = IRNN(D, H, rng=0, dtype=dtype, fast=fast), np.abs(numbers(B, H)).astype(dtype)
    h[0, 0] = 0
    (y, (last,)), cache = layer.forward(np.zeros((B, 100, D), dtype), state=(h,))
    assert_identical((y, last), (np.repeat(h[:, None], 100, axis=1), h))
    dh = numbers(B, H, seed=3).astype(dtype)
    _, (dh0,) = layer.backward((None, (dh,)), cache)
    assert_identical(dh0, np.where(h > 0, dh, 0))    # and its gradient; where h is exactly 0 it ends


@pytest.mark.parametrize("fast", [True, False])
def test_the_derivative_at_the_kink_is_0(fast):
    layer = IRNN(D, H, rng=0, dtype="float64", fast=fast)
    (y, _), cache = layer.forward(np.zeros((B, L, D)))
    dx, (dh0,) = layer.backward(upstream((y, (y[:, 0],))), cache)
    assert not any(array.any() for array in (y, dx, dh0, *grads(layer)))


def test_the_parameters_of_irnn_at_the_start():
    for input_std in (0.001, 0.5):
        V, W, b = (p.value for p in IRNN(40, 60, input_std=input_std, rng=0).parameters())
        assert_identical((W, b), (np.eye(60, dtype="float32"), np.zeros(60, "float32")))
        assert V.shape == (40, 60)
        assert 0.95 < V.std() / input_std < 1.05
        assert abs(V.mean()) < 0.05 * input_std
    assert not IRNN(4, 5, input_std=0).V.value.any()


# ---- unbounded states and padding ------------------------------------------------------------------------

def growing(name):
    """A layer whose state doubles in a step, at least."""
    if name == "IRNN":
        layer = IRNN(D, H, rng=0)
        layer.W.value *= 2
    elif name == "linear":
        layer = RNN(D, H, 1, "linear", rng=0)
        layer.W_f.value[...] = 2 * np.eye(H)
    else:
        layer = RNN(D, H, 3, attention=True, rng=0)
        layer.w.value[...] = [3, -2]                 # sums to 1, and h grows all the same
    return layer


@pytest.mark.parametrize("name", ["IRNN", "linear", "attention"])
def test_a_state_does_not_grow_through_padding(name):
    """Over 400 steps it would overflow; after the last of 5 real steps it does not go on."""
    layer, x = growing(name), np.zeros((B, 400, D), "float32")
    x[:, :5] = numbers(B, 5, D)
    short = layer.forward(x[:, :5])
    dout = upstream(short[0])
    expected = layer.backward(dout, short[1]), grads(layer)
    layer.zero_grad()
    with np.errstate(over="ignore", invalid="ignore"):
        assert not np.isfinite(layer(np.abs(x), None)[0]).all()
    out, cache = layer.forward(x, mask=np.repeat([np.arange(400) < 5], B, axis=0))
    dy = np.zeros((B, 400, H), "float32")
    dy[:, :5] = dout[0]
    dx, dstate0 = layer.backward((dy, dout[1]), cache)
    assert_identical((out[0][:, :5], out[1]), short[0])
    assert_close(((dx[:, :5], dstate0), grads(layer)), expected, 1e-4)


# ---- settings and memory ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: RNN(0, 5), r"RNN: d is 0; expected a whole number of at least 1"),
    (lambda: RNN(4, 2.5), r"RNN: h is 2.5"),
    (lambda: RNN(4, 5, 0), r"RNN: residual is 0; expected a whole number of at least 1"),
    (lambda: RNN(4, 5, True), r"RNN: residual is True; expected a whole number of at least 1"),
    (lambda: RNN(4, 5, 1, attention=True), r"RNN: residual is 1; expected a whole number of at least 2"),
    (lambda: RNN(4, 5, attention=True), r"RNN: residual is None with attention=True; expected k, at least 2"),
    (lambda: RNN(4, 5, shortcut="linear"), r"RNN: residual is None with shortcut='linear'; expected k, at least 1"),
    (lambda: RNN(4, 5, 3, "linear", True), r"RNN: shortcut is 'linear' with attention=True; expected 'identity'"),
    (lambda: RNN(4, 5, 3, "highway"), r"RNN: shortcut is 'highway'; expected one of 'identity', 'linear'"),
    (lambda: RNN(4, 5, 3, attention=True, normalize="mean"), r"normalize is 'mean'; expected one of 'sum', 'softmax'"),
    (lambda: RNN(4, 5, init="xavier"), r"init is 'xavier'"),
    (lambda: IRNN(0, 5), r"IRNN: d is 0"),
    (lambda: IRNN(4, -1), r"IRNN: h is -1; expected a whole number of at least 1"),
    (lambda: IRNN(4, 5, input_std=-0.1), r"IRNN: input_std is -0.1; expected a number in \[0, inf\)"),
    (lambda: IRNN(4, 5, input_std=float("nan")), r"IRNN: input_std is nan"),
])
def test_bad_settings(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_without_a_shortcut_a_step_is_kept_once():
    _, cache = RNN(2, 16, rng=0).forward(np.zeros((8, 20, 2), "float32"))
    assert np.shares_memory(cache.loop.m, cache.loop.hs)
