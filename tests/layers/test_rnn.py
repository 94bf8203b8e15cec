"""RNN and IRNN: the fast loop against the plain equations and PyTorch, and exact facts of every form."""

import numpy as np
import pytest
from cases import TABLE, B, D, H, L, irnn, mask_kinds
from helpers import assert_close, assert_identical, grads, upstream
from oracles import choose, gradient, pytorch, tensor, tensors, torch_backward

from minigrad import gradcheck
from minigrad.initializers import GATE_BLOCKS
from minigrad.layers import IRNN, RNN
from minigrad.layers.rnn import (
    irnn_step,
    irnn_step_backward,
    residual_step,
    residual_step_backward,
    rnn_step,
    rnn_step_backward,
)
from minigrad.layers.rra import NORMALIZERS

FORMS = [case for case in TABLE if case.name.startswith(("RNN", "IRNN"))]
FORMS_OF_RNN = {"(3)": {}, "(4)": {"residual": 3}, "(4), k = 1": {"residual": 1},
                "(4), linear": {"residual": 2, "shortcut": "linear"}, "(5)": {"residual": 4, "attention": True},
                "(5), long": {"residual": 12, "attention": True, "normalize": "softmax"},
                "(5), k = 2": {"residual": 2, "attention": True}}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def state_of(layer, seed=1):
    shape, = layer.state_shapes(B).values()
    return (numbers(*shape, seed=seed),)


# ---- the plain equations ---------------------------------------------------------------------------------

def step_functions(layer):
    """(forward, backward) of one step on the state's one array."""
    A, R, b = (p.value for p in layer.parameters()[:3])
    if isinstance(layer, IRNN):
        return (lambda x, h: irnn_step(x, h, A, R, b), lambda dh, cache: irnn_step_backward(dh, cache, A, R))
    if layer.residual is None:
        return (lambda x, h: rnn_step(x, h, A, R, b), lambda dh, cache: rnn_step_backward(dh, cache, A, R))
    F = {"W_f": layer.W_f.value if layer.shortcut == "linear" else None, "w_hat": layer.attention_weights()[0]}
    return (lambda x, past: residual_step(x, past, A, R, b, **F),
            lambda dpast, cache: residual_step_backward(dpast, cache, A, R, **F))


def newest(h_or_past):
    return h_or_past if h_or_past.ndim == 2 else h_or_past[:, -1]


def plain(layer, x, state, mask, upstream_of):
    """Every step in turn, the mask in each: (y, state), then (dx, dstate0), then the parameters' gradients."""
    forward, backward = step_functions(layer)
    (state,), ys, caches, dxs = state, [], [], []
    for x_t, real in zip(x.swapaxes(0, 1), mask.T):
        new, cache = forward(np.where(real[:, None], x_t, 0), state)
        state = choose(real, new, state)
        ys.append(choose(real, newest(new), 0))
        caches.append(cache)
    out = np.stack(ys, axis=1), (state,)
    dy, (dstate,) = upstream_of(out)
    totals = [np.zeros_like(p.value) for p in layer.parameters()]
    for t in reversed(range(x.shape[1])):
        real, dnew = mask[:, t], dstate.copy()
        newest(dnew)[...] += dy[:, t]
        (dx, dold), weights = backward(choose(real, dnew, 0), caches[t])
        dstate = choose(real, dold, dstate)
        dxs.insert(0, choose(real, dx, 0))
        totals = [a + b for a, b in zip(totals, weights, strict=True)]
    if getattr(layer, "attention", False):
        totals[3] = NORMALIZERS[layer.normalize].backward(totals[3], layer.attention_weights()[1])
    return out, (np.stack(dxs, axis=1), (dstate,)), totals


@pytest.mark.parametrize("kind", mask_kinds())
@pytest.mark.parametrize("case", FORMS, ids=lambda case: case.name)
def test_the_fast_loop_equals_the_plain_equations(case, kind):
    layer, x, state, mask = case.layer(), case.x(), case.keywords()["state"], mask_kinds()[kind]
    out, cache = layer.forward(x, state=state, mask=mask)
    returned = layer.backward(upstream(out), cache)
    assert_close((out, returned, grads(layer)), plain(layer, x, state, mask, upstream))


# ---- the equations under torch autograd ------------------------------------------------------------------

def torch_forward(layer, weights, x, state, mask):
    """y and the last states, oldest first, from the formulas; `state` a list of h_{t-k} ... h_{t-1}."""
    torch, ys = pytorch(), []
    for t in range(x.shape[1]):
        real = torch.tensor(mask[:, t, None])
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


@pytest.mark.parametrize("kind", ["gaps", "a sample with no real step", "all real"])
@pytest.mark.parametrize("case", FORMS, ids=lambda case: case.name)
def test_every_form_equals_torch_autograd(case, kind):
    torch, layer, x, (state,), mask = pytorch(), case.layer(), case.x(), case.keywords()["state"], mask_kinds()[kind]
    out, cache = layer.forward(x, state=(state,), mask=mask)
    dy, (dstate,) = upstream(out)
    dx, (dstate0,) = layer.backward((dy, (dstate,)), cache)
    tx, tstate, weights = tensor(x), tensor(state), tensors(layer)
    ty, last = torch_forward(layer, weights, tx, [tstate] if state.ndim == 2 else list(tstate.unbind(1)), mask)
    tlast = last[0] if state.ndim == 2 else torch.stack(last, 1)
    torch_backward((ty, tlast), (dy, dstate))
    assert_close(out, (ty.detach().numpy(), (tlast.detach().numpy(),)))
    assert_close((dx, dstate0, grads(layer)), (gradient(tx), gradient(tstate), [gradient(w) for w in weights.values()]))


# ---- exact facts of RNN ----------------------------------------------------------------------------------

def run(layer, x, state, mask=None, seed=7):
    """y, the newest state, dx, the gradient of the newest state, the gradients of W, U, b; dy and dh from the seed."""
    (y, (last,)), cache = layer.forward(x, state=(state,), mask=mask)
    dy, dh = numbers(*y.shape, seed=seed).astype(y.dtype), numbers(B, H, seed=seed + 1).astype(y.dtype)
    dlast = np.zeros_like(last)
    newest(dlast)[...] = dh
    dx, (dstate0,) = layer.backward((dy, (dlast,)), cache)
    return y, newest(last), dx, newest(dstate0), grads(layer)[:3]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 2, 5, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_W_f_0_is_the_plain_rnn_bit_for_bit(k, masked, dtype):
    plain_rnn, residual = RNN(D, H, rng=1, dtype=dtype), RNN(D, H, k, "linear", rng=1, dtype=dtype)
    residual.W_f.value[...] = 0
    x, past, mask = numbers(B, L, D).astype(dtype), numbers(B, k, H).astype(dtype), mask_kinds()["gaps"]
    mask = mask if masked else None
    assert_identical(run(residual, x, past, mask), run(plain_rnn, x, past[:, -1], mask))
    assert residual.W_f.grad.any()                   # but the shortcut is learned


@pytest.mark.parametrize("k", [1, 3])
def test_W_f_the_identity_is_the_identity_shortcut(k):
    linear, identity = RNN(D, H, k, "linear", rng=1, dtype="float64"), RNN(D, H, k, rng=1, dtype="float64")
    linear.W_f.value[...] = np.eye(H)
    x, past = numbers(B, L, D), numbers(B, k, H)
    assert_close(run(linear, x, past), run(identity, x, past))


@pytest.mark.parametrize("normalize", ["sum", "softmax"])
def test_attention_over_one_state_is_the_shortcut_from_h_t_2(normalize):
    """k = 2: w_hat = 1 whatever w is, and w has no gradient."""
    attention = RNN(D, H, 2, attention=True, normalize=normalize, rng=1, dtype="float64")
    x, past = numbers(B, L, D), numbers(B, 2, H)
    assert_identical(run(attention, x, past), run(RNN(D, H, 2, rng=1, dtype="float64"), x, past))
    assert attention.w.grad[0] == 0


@pytest.mark.parametrize("lag", [2, 3, 4])
def test_attention_to_one_state_is_the_shortcut_from_it(lag):
    """w[0] weighs the newest of the window, h_{t-2}; the last weight h_{t-k}."""
    attention = RNN(D, H, 4, attention=True, rng=1, dtype="float64")
    attention.w.value[...] = np.arange(2, 5) == lag
    x, past = numbers(B, L, D), numbers(B, 4, H)
    assert_close(run(attention, x, past), run(RNN(D, H, lag, rng=1, dtype="float64"), x, past[:, -lag:]))


@pytest.mark.parametrize(("settings", "first_seen"), [
    ({"residual": 1}, 1), ({"residual": 3}, 3), ({"residual": 2, "shortcut": "linear"}, 2),
    ({"residual": 4, "attention": True}, 2)])
def test_a_shortcut_is_seen_from_its_first_step_on(settings, first_seen):
    """Before the sequence the states are zero: y is the plain RNN's until the shortcut reaches h_1."""
    (y, _), (y_plain, _) = (RNN(D, H, rng=1, dtype="float64", **form)(numbers(1, 6, D)) for form in (settings, {}))
    same = (y == y_plain).all(axis=(0, 2))
    assert same[:first_seen].all()
    assert not same[first_seen:].any()


def test_the_shortcut_is_outside_the_tanh():
    """With W = U = 0 and b = 0, h_t = h_{t-k}: three states in turn, though they are beyond tanh's reach."""
    layer = RNN(D, H, 3, dtype="float64")
    layer.W.value[...], layer.U.value[...] = 0, 0
    past = 10 * numbers(B, 3, H)
    y, (last,) = layer(numbers(B, 7, D), state=(past,))
    assert_identical(y, past[:, [0, 1, 2, 0, 1, 2, 0]])
    assert_identical(last, past[:, [1, 2, 0]])


def test_sum_normalisation_is_scale_invariant():
    layer = RNN(D, H, 4, attention=True, rng=0, dtype="float64")
    out, cache = layer.forward(numbers(B, L, D))
    layer.backward(upstream(out), cache)
    dw = layer.w.grad.copy()
    assert abs(layer.w.value @ dw) <= 1e-13 * (np.abs(layer.w.value) @ np.abs(dw))
    layer.w.value *= -7.0
    assert_close(layer(numbers(B, L, D)), out)


@pytest.mark.parametrize("settings", FORMS_OF_RNN.values(), ids=FORMS_OF_RNN)
def test_the_parameters_at_the_start(settings):
    layer, same_seed = RNN(4, 50, rng=0, **settings), RNN(4, 50, rng=0)
    W, U, b, *rest = layer.parameters()
    assert_identical([W.value, U.value], [same_seed.W.value, same_seed.U.value])
    np.testing.assert_allclose(U.value.T @ U.value, np.eye(50), atol=1e-5)
    bound = np.sqrt(6 / 54)
    assert 0.9 * bound < np.abs(W.value).max() <= bound
    assert not b.value.any()
    assert [p.name for p in rest] == (["w"] if settings.get("attention") else ["W_f"] if "shortcut" in settings else [])
    if settings.get("attention"):
        w = layer.w.value
        assert w.shape == (settings["residual"] - 1,)
        assert w.min() >= 0
        assert w.max() < 1
    elif rest:
        np.testing.assert_allclose(layer.W_f.value.T @ layer.W_f.value, np.eye(50), atol=1e-5)


@pytest.mark.parametrize("init", GATE_BLOCKS)
def test_init_names_a_rule(init):
    a = 1 / np.sqrt(30)
    for p in RNN(20, 30, 2, "linear", init=init, rng=0).parameters()[:2]:
        assert init != "uniform" or 0.9 * a < np.abs(p.value).max() <= a
        assert init != "normal" or 0.08 < p.value.std() < 0.12
    W, U, _ = (p.value for p in RNN(20, 30, 2, init=init, rng=0).parameters())
    for weights, name in ((W, {"orthogonal"}), (U, {"orthogonal", "glorot"})):
        rows = weights @ weights.T
        assert (abs(rows - np.eye(len(rows))).max() < 1e-5) == (init in name)
    assert init != "glorot" or 0.9 * np.sqrt(6 / 50) < abs(W).max() <= np.sqrt(6 / 50)


@pytest.mark.parametrize("settings", FORMS_OF_RNN.values(), ids=FORMS_OF_RNN)
def test_the_gradient_check_of_every_form(settings):
    layer = RNN(D, H, rng=2, dtype="float64", **settings)
    report = gradcheck(layer, (numbers(B, L, D),), {"state": state_of(layer), "mask": mask_kinds()["gaps"]})
    assert report.ok, report


# ---- exact facts of IRNN ---------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_irnn_starts_by_copying_a_state_that_is_not_negative(dtype):
    layer, h = IRNN(D, H, rng=0, dtype=dtype), np.abs(numbers(B, H)).astype(dtype)
    h[0, 0] = 0
    (y, (last,)), cache = layer.forward(np.zeros((B, 100, D), dtype), state=(h,))
    assert_identical((y, last), (np.repeat(h[:, None], 100, axis=1), h))
    dh = numbers(B, H, seed=3).astype(dtype)
    _, (dh0,) = layer.backward((None, (dh,)), cache)
    assert_identical(dh0, np.where(h > 0, dh, 0))    # and its gradient; where h is exactly 0 it ends


def test_the_derivative_at_the_kink_is_0():
    layer = IRNN(D, H, rng=0, dtype="float64")
    (y, _), cache = layer.forward(np.zeros((B, L, D)))
    dx, (dh0,) = layer.backward(upstream((y, (y[:, 0],))), cache)
    assert not y.any()
    assert not dx.any()
    assert not dh0.any()
    assert not any(g.any() for g in grads(layer))


def test_the_parameters_of_irnn_at_the_start():
    for input_std in (0.001, 0.5):
        V, W, b = (p.value for p in IRNN(40, 60, input_std=input_std, rng=0).parameters())
        assert_identical((W, b), (np.eye(60, dtype="float32"), np.zeros(60, "float32")))
        assert V.shape == (40, 60)
        assert 0.95 < V.std() / input_std < 1.05
        assert abs(V.mean()) < 0.05 * input_std
    assert not IRNN(4, 5, input_std=0).V.value.any()


@pytest.mark.parametrize("seed", range(8))
def test_the_gradient_check_of_irnn_does_not_depend_on_the_seed(seed):
    layer = irnn("IRNN").make("float64", np.random.default_rng(seed))
    report = gradcheck(layer, (numbers(B, L, D, seed=seed),), {"state": state_of(layer, seed + 50)}, mode="direction")
    assert report.ok, report


# ---- unbounded states and padding ------------------------------------------------------------------------

def growing(name):
    """A layer whose state doubles in a step, at least."""
    if name == "IRNN":
        layer = IRNN(D, H, rng=0, dtype="float32")
        layer.W.value *= 2
        return layer
    if name == "linear":
        layer = RNN(D, H, 1, "linear", rng=0, dtype="float32")
        layer.W_f.value[...] = 2 * np.eye(H)
        return layer
    layer = RNN(D, H, 3, attention=True, rng=0, dtype="float32")
    layer.w.value[...] = [3, -2]                     # sums to 1, and h grows all the same
    return layer


@pytest.mark.parametrize("name", ["IRNN", "linear", "attention"])
def test_a_state_does_not_grow_through_padding(name):
    """Over 400 steps it would overflow; behind the last of 5 real steps it does not go on."""
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


# ---- state -----------------------------------------------------------------------------------------------

def test_state_of_a_short_sequence_keeps_the_given_past():
    layer = RNN(D, H, 7, attention=True, rng=0, dtype="float64")
    past = numbers(B, 7, H)
    y, (new_past,) = layer(numbers(B, 3, D, seed=1), state=(past,))
    assert_identical(new_past, np.concatenate([past[:, 3:], y], axis=1))


@pytest.mark.parametrize("settings", FORMS_OF_RNN.values(), ids=FORMS_OF_RNN)
def test_step_by_step_is_the_whole_sequence(settings):
    layer, x = RNN(D, H, rng=0, dtype="float64", **settings), numbers(B, L, D)
    y, stepping = layer(x)[0], layer.begin(layer.initial_state(B))
    for t in range(L):
        y_t, stepping = layer.step(x[:, t], stepping)
        assert_close(y_t, y[:, t])


# ---- sums near zero --------------------------------------------------------------------------------------

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


# ---- bad input -------------------------------------------------------------------------------------------

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


X = np.zeros((2, 3, 4))
LAYERS = {"RNN": lambda: RNN(4, 5, dtype="float64"), "residual": lambda: RNN(4, 5, 3, dtype="float64"),
          "IRNN": lambda: IRNN(4, 5, dtype="float64")}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("x", "keywords", "error", "sentence"), [
    (np.zeros((2, 3)), {}, ValueError, r"RNN: x has shape \(2, 3\); expected \(batch, length, 4\)"),
    (np.zeros((2, 3, 5)), {}, ValueError, r"x has shape \(2, 3, 5\); expected \(batch, length, 4\)"),
    (np.zeros((2, 3, 4), int), {}, TypeError, r"x has dtype int64; expected floating-point"),
    ([[1.0]], {}, TypeError, r"x is a list; expected a NumPy or CuPy array"),
    (X, {"mask": np.ones((2, 4), bool)}, ValueError, r"mask has shape \(2, 4\); expected \(2, 3\)"),
    (X, {"mask": np.ones((2, 3))}, TypeError, r"mask has dtype float64; expected bool"),
    (X, {"state": np.zeros((2, 5))}, ValueError, r"state is ndarray; expected a tuple"),
    (X, {"state": (np.zeros((3, 5)),)}, ValueError, r"state's (h|past) has shape \(3, 5\); expected \(2, (3, )?5\)"),
])
def test_bad_input(name, x, keywords, error, sentence):
    with pytest.raises(error, match=sentence):
        LAYERS[name]().forward(x, **keywords)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("upstream", "error", "sentence"), [
    (X, TypeError, r"expected the pair \(dy, dstate\)"),
    ((X, None), ValueError, r"dy has shape \(2, 3, 4\); expected \(2, 3, 5\)"),
    ((None, np.zeros(3)), ValueError, r"dstate is ndarray; expected a tuple"),
    ((None, (np.zeros((2, 4)),)), ValueError, r"dstate's (h|past) has shape \(2, 4\); expected \(2, (3, )?5\)"),
])
def test_a_wrong_upstream_gradient_is_refused_not_broadcast(name, upstream, error, sentence):
    layer = LAYERS[name]()
    _, cache = layer.forward(X)
    with pytest.raises(error, match=sentence):
        layer.backward(upstream, cache)


# ---- cost ------------------------------------------------------------------------------------------------

def cache_bytes(layer, S):
    _, (cache, *_) = layer.forward(np.zeros((8, S, 2), "float32"))
    return sum(array.nbytes for array in (cache.x1, cache.m, cache.hs))


def test_memory_is_linear_in_S_and_the_window_is_never_copied():
    irnn, attention = IRNN(2, 16, rng=0), RNN(2, 16, 10, attention=True, rng=0)
    assert cache_bytes(irnn, 400) / cache_bytes(irnn, 200) == pytest.approx(2, rel=0.05)
    per_state = 8 * 16 * 4                           # one (B, h) float32
    longer = RNN(2, 16, 100, attention=True, rng=0)
    assert cache_bytes(longer, 200) - cache_bytes(attention, 200) == 90 * per_state      # the longer past, nothing else


def test_without_a_shortcut_a_step_is_kept_once():
    _, (cache, *_) = RNN(2, 16, rng=0).forward(np.zeros((8, 20, 2), "float32"))
    assert np.shares_memory(cache.m, cache.hs)
