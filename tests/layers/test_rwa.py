"""RWA: the fast loop against the plain equations and PyTorch, and exact facts of a weighted average."""

import numpy as np
import pytest
from cases import B, D, H, L, mask_kinds
from helpers import all_gradients, assert_close, assert_identical, grads, upstream
from oracles import choose, gradient, tensor, tensors, torch_backward

from minigrad import gradcheck
from minigrad.backend import sigmoid
from minigrad.fast.rwa import BLOCK
from minigrad.layers import RWA
from minigrad.layers.recurrent import Recurrent
from minigrad.layers.rwa import rwa_step, rwa_step_backward


def layer_of(scale=1.0, dtype="float64", d=D, h=H):
    """An RWA with all of its weights times `scale`, biases off zero."""
    layer, rng = RWA(d, h, rng=3, dtype=dtype), np.random.default_rng(4)
    for p in (layer.b_u, layer.b_g):
        p.value[...] = 0.3 * rng.standard_normal(h)
    for p in layer._weights():
        p.value *= scale
    return layer


def draw(*shapes, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def state_of(seed=1, dtype="float64"):
    return tuple(draw(*[(B, H)] * 3, seed=seed, dtype=dtype))


# ---- against the plain equations -------------------------------------------------------------------------

def plain_forward(layer, x, state, mask=None):
    """(y, state), caches: `rwa_step` after `rwa_step`, the mask in every one of them."""
    weights, ys, caches = [p.value for p in layer._weights()], [], []
    mask = np.ones(x.shape[:2], bool) if mask is None else mask
    for t, real in enumerate(mask.T):
        after, cache = rwa_step(np.where(real[:, None], x[:, t], 0), *state, *weights)
        state = tuple(choose(real, new, old) for new, old in zip(after, state))
        ys.append(choose(real, after[0], 0))
        caches.append(cache)
    return (np.stack(ys, axis=1), state), caches


def plain_backward(layer, dy, dstate, caches, mask=None):
    """dx, dstate0, the weights' gradients: the steps' own backward, last step first."""
    W_u, _, W_g, _, W_a = (p.value for p in layer._weights())
    dxs, totals = [], [0] * 5
    mask = np.ones(dy.shape[:2], bool) if mask is None else mask
    for t in reversed(range(len(caches))):
        real = mask[:, t]
        dh, dr, dl = (choose(real, gradient, 0) for gradient in dstate)
        (dx, *before), weights = rwa_step_backward(dh + choose(real, dy[:, t], 0), dr, dl, caches[t], W_u, W_g, W_a)
        dstate = tuple(choose(real, new, old) for new, old in zip(before, dstate))
        dxs.insert(0, choose(real, dx, 0))
        totals = [a + b for a, b in zip(totals, weights)]
    return np.stack(dxs, axis=1), dstate, totals


def assert_close_in_size(got, expected, tolerance):
    """Within `tolerance` of each array's largest entry; what is not finite must be the same."""
    for a, b in zip(got, expected, strict=True):
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        scale = np.abs(b[finite]).max(initial=0)
        np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=tolerance * scale)


def compare(layer, x, state, mask, tolerance):
    """Values and gradients of the layer beside the plain loop's."""
    (y, after), cache = layer.forward(x, state=state, mask=mask)
    (plain_y, plain_after), caches = plain_forward(layer, x, state or layer.initial_state(len(x)), mask)
    assert_close_in_size((y, *after), (plain_y, *plain_after), tolerance)
    dy, dstate = upstream((y, after))
    layer.zero_grad()
    dx, dstate0 = layer.backward((dy, dstate), cache)
    plain_dx, plain_dstate0, totals = plain_backward(layer, dy, dstate, caches, mask)
    got = (dx, *dstate0, *grads(layer)[1:])
    assert all(np.isfinite(array).all() for array in got)
    assert_close_in_size(got, (plain_dx, *plain_dstate0, *totals), tolerance)


@pytest.mark.parametrize("kind", mask_kinds())
@pytest.mark.parametrize("given", [True, False], ids=["state", "no state"])
def test_the_fast_loop_equals_the_plain_equations(kind, given):
    compare(layer_of(), *draw((B, L, D)), state_of() if given else None, mask_kinds()[kind], 1e-13)


@pytest.mark.parametrize("T", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 2])
def test_blocks_of_steps_add_up(T):
    """Products are taken a block of steps at a time: lengths around a block's ends."""
    mask = np.ones((B, T), bool)
    mask[0, T // 2:] = False
    compare(layer_of(), *draw((B, T, D)), state_of(), mask, 1e-13)


def test_float32_agrees_to_its_rounding():
    compare(layer_of(dtype="float32"), *draw((B, 40, D), dtype="float32"), None, None, 2e-6)


# ---- against PyTorch -------------------------------------------------------------------------------------

def torch_rwa(weights, x, h, n, d, mask):
    """The paper's equations, numerator and denominator, in torch, with the mask in every step: y, h, n, d."""
    torch = pytest.importorskip("torch", reason="PyTorch is a test oracle only; pip install torch to run these")
    ys = []
    for t, real in enumerate(torch.tensor(mask).T[:, :, None]):
        xh = torch.cat([x[:, t], h], 1)
        z = (x[:, t] @ weights["W_u"] + weights["b_u"]) * torch.tanh(xh @ weights["W_g"] + weights["b_g"])
        e = torch.exp(xh @ weights["W_a"])
        n, d = torch.where(real, n + z * e, n), torch.where(real, d + e, d)
        h = torch.where(real, torch.tanh(n / d), h)
        ys.append(torch.where(real, h, 0.0))
    return torch.stack(ys, 1), h, n, d


@pytest.mark.parametrize("kind", [kind for kind in mask_kinds() if "no real" not in kind])
def test_rwa_equals_torch_autograd(kind):
    torch = pytest.importorskip("torch", reason="PyTorch is a test oracle only; pip install torch to run these")
    layer, mask, (x,) = layer_of(), mask_kinds()[kind], draw((B, L, D))
    (y, state), cache = layer.forward(x, mask=mask)
    dy, dstate = upstream((y, state))
    dx, _ = layer.backward((dy, dstate), cache)
    weights, tx, zero = tensors(layer), tensor(x), torch.zeros(B, H, dtype=torch.float64)
    ty, th, tn, td = torch_rwa(weights, tx, torch.tanh(weights["s"]).expand(B, H), zero, zero, mask)
    out = (ty, th, tn / td, torch.log(td))
    torch_backward(out, (dy, *dstate))
    assert_close((y, *state), [array.detach().numpy() for array in out])
    assert_close(dx, gradient(tx))
    assert_close(grads(layer), [gradient(leaf) for leaf in weights.values()])


def test_a_given_state_equals_torch_autograd():
    torch = pytest.importorskip("torch", reason="PyTorch is a test oracle only; pip install torch to run these")
    layer, state, (x,) = layer_of(), state_of(), draw((B, L, D))
    out, cache = layer.forward(x, state=state)
    dy, dstate = upstream(out)
    dx, dstate0 = layer.backward((dy, dstate), cache)
    weights, (tx, h, r, l) = tensors(layer), map(tensor, (x, *state))
    d = torch.exp(l)
    ty, th, tn, td = torch_rwa(weights, tx, h, r * d, d, np.ones((B, L), bool))
    torch_backward((ty, th, tn / td, torch.log(td)), (dy, *dstate))
    assert_close((dx, *dstate0), [gradient(leaf) for leaf in (tx, h, r, l)])
    assert_close(grads(layer), [gradient(leaf) for leaf in weights.values()])
    assert not layer.s.grad.any()


# ---- it is a weighted average ----------------------------------------------------------------------------

def history(layer, x, y, h_0):
    """z and a (B, L, h) of every step, from the outputs before it."""
    before = np.concatenate([np.broadcast_to(h_0, y[:, :1].shape), y[:, :-1]], axis=1)
    xh = np.concatenate([x, before], axis=2)
    u, g = x @ layer.W_u.value + layer.b_u.value, xh @ layer.W_g.value + layer.b_g.value
    return u * np.tanh(g), xh @ layer.W_a.value


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_r_is_the_average_of_the_history_weighed_by_its_scores(scale):
    """r_t = sum_i z_i e^{a_i - m} / sum_i e^{a_i - m}, l_t = m + log sum_i e^{a_i - m}, m = max_i a_i, for each t."""
    layer, (x,) = layer_of(), draw((B, 12, D))
    layer.W_a.value *= scale
    y, _ = layer(x)
    z, a = history(layer, x, y, np.tanh(layer.s.value))
    for t in range(12):
        _, (h, r, l) = layer(x[:, :t + 1])
        m = a[:, :t + 1].max(axis=1)
        e = np.exp(a[:, :t + 1] - m[:, None])
        average = (z[:, :t + 1] * e).sum(axis=1) / e.sum(axis=1)
        assert_close((r, l), (average, m + np.log(e.sum(axis=1))))
        assert_identical(h, y[:, t])
        assert_close(h, np.tanh(average))


@pytest.mark.parametrize("constant", [2.5, -700.0, 700.0])
def test_adding_a_constant_to_all_scores_changes_nothing(constant):
    """An input that is always one adds the constant; u and g do not see it. Its gradient is zero when l has none."""
    layer, (x,) = layer_of(d=D + 1), draw((B, L, D + 1))
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
    layer, (x,) = layer_of(d=D + 1), draw((B, L, D + 1))
    x[..., -1] = 1
    out, cache = layer.forward(x, state=state_of())
    dy, dstate = upstream(out)
    _, (_, _, dl_0) = layer.backward((dy, dstate), cache)
    assert_close(layer.W_a.grad[D] + dl_0.sum(axis=0), dstate[2].sum(axis=0))


def test_equal_scores_give_the_plain_mean():
    layer, (x,) = layer_of(), draw((B, L, D))
    layer.W_a.value[...] = 0
    y, (_, r, l) = layer(x)
    z, _ = history(layer, x, y, np.tanh(layer.s.value))
    assert_close((r, l), (z.mean(axis=1), np.full((B, H), np.log(L))))


def test_the_first_output_and_what_depends_on_the_start():
    """p_1 = 1: the first average is z_1 whatever its score, and r and l of no step reach nothing."""
    layer, (x,) = layer_of(), draw((B, 1, D))
    (y, (h, r, l)), cache = layer.forward(x)
    z, a = history(layer, x, y, np.tanh(layer.s.value))
    assert_close((y[:, 0], h, r, l), (np.tanh(z[:, 0]), np.tanh(z[:, 0]), z[:, 0], a[:, 0]))
    _, (_, dr, dl) = layer.backward(upstream((y, (h, r, l))), cache)
    assert not dr.any()
    assert not dl.any()


# ---- large scores ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["all real", "gaps", "a sample with no real step"])
@pytest.mark.parametrize("given", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [30.0, 1e3, 1e4])
def test_large_scores_stay_finite(scale, dtype, given, kind):
    """Scores of +-1e4 and more: no overflow, no warning (they are errors here), in values or gradients."""
    layer, state, mask = layer_of(scale, dtype), state_of(dtype=dtype) if given else None, mask_kinds()[kind]
    x, = draw((B, L, D), dtype=dtype)
    (y, after), cache = layer.forward(x, state=state, mask=mask)
    dx, dstate0 = layer.backward(upstream((y, after)), cache)
    empty = (after[2] == -np.inf).all(axis=1)
    assert_identical(empty, ~mask.any(axis=1) & (not given))
    for array in (y, *after[:2], after[2][~empty], dx, *dstate0, *grads(layer)):
        assert np.isfinite(array).all()


@pytest.mark.parametrize("size", [1e2, 1e4, -1e4])
def test_the_fast_loop_equals_the_plain_equations_for_large_scores(size):
    """One input drives the scores alone, up and down by turns, so that the values stay comparable."""
    layer, (x,) = layer_of(d=D + 1), draw((B, 12, D + 1))
    x[..., -1] = np.array([0, 1, -1, 1, 1, -1, 0, 0.001, 1.001, -1, 1, 0.5])
    layer.W_u.value[D], layer.W_g.value[D], layer.W_a.value[D] = 0, 0, size
    for state in (None, state_of()):
        compare(layer, x, state, None, 1e-11)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("jump", [-1e4, -50.0, -20.0, 0.0, 20.0, 50.0, 79.0, 81.0, 100.0, 637.0, 640.0, 1e4])
def test_one_step_far_above_or_below_what_was_there(jump, dtype):
    """p = sigma(a - l) and l' = logaddexp(l, a), also around where the loop cuts a - m off: p to a few units in its
    last place however small it is (with z = 1 and r = 0 before, r is p)."""
    layer = layer_of(dtype=dtype)
    for p in layer._weights():
        p.value[...] = 0
    layer.b_u.value[...], layer.b_g.value[...] = 1, 20                       # z = 1
    layer.W_a.value[0] = 1
    x, zero = np.zeros((1, 1, D), dtype), np.zeros((1, H), dtype)
    x[..., 0] = jump
    _, (_, r, l) = layer(x, state=(zero, zero, zero))
    a = np.full((1, H), jump, dtype)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(r, sigmoid(a), rtol=4 * eps, atol=np.finfo(dtype).tiny)
    np.testing.assert_allclose(l, np.logaddexp(0, a), rtol=4 * eps, atol=4 * eps)


# ---- the start -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_state_is_the_initial_state_written_out(dtype):
    layer, (x,) = layer_of(dtype=dtype), draw((B, L, D), dtype=dtype)
    start = layer.initial_state(B)
    assert_identical(start, (np.tile(np.tanh(layer.s.value), (B, 1)), np.zeros((B, H)), np.full((B, H), -np.inf)))
    assert {array.dtype for array in start} == {np.dtype(dtype)}
    dout = upstream(layer(x))
    out, (dx, dstate0), got = all_gradients(layer, x, {}, dout)
    given_out, (given_dx, given_dstate0), given = all_gradients(layer, x, {"state": start}, dout)
    assert_identical((out, dx, dstate0, got[1:]), (given_out, given_dx, given_dstate0, given[1:]))
    assert not given[0].any()
    tolerance = {"float32": 1e-6, "float64": 1e-14}[dtype]
    assert_close(got[0], (dstate0[0] * (1 - start[0] ** 2)).sum(axis=0), tolerance)


@pytest.mark.parametrize("masked", [False, True], ids=["an empty sequence", "masked throughout"])
def test_a_sample_with_no_real_step_keeps_the_start_and_hands_its_gradient_to_s(masked):
    layer, (x,) = layer_of(), draw((B, L, D))
    mask = np.zeros((B, L), bool) if masked else None
    (y, state), cache = layer.forward(x if masked else x[:, :0], mask=mask)
    assert_identical(state, layer.initial_state(B))
    assert not y.any()
    dy, dstate = upstream((y, state))
    dx, dstate0 = layer.backward((dy, dstate), cache)
    assert_identical(dstate0, dstate)
    assert not dx.any()
    assert_close(layer.s.grad, (dstate[0] * (1 - np.tanh(layer.s.value) ** 2)).sum(axis=0))
    assert not any(g.any() for g in grads(layer)[1:])


def test_one_piece_equals_segments_from_the_start():
    """s has a gradient in the first segment alone: of the dstate0 that has come that far."""
    layer, (x,) = layer_of(), draw((B, L, D))
    out, cache = layer.forward(x)
    dy, dstate = upstream(out)
    layer.backward((dy, dstate), cache)
    whole = grads(layer)
    layer.zero_grad()
    (first_y, state), first = layer.forward(x[:, :3])
    (second_y, state), second = layer.forward(x[:, 3:], state=state)
    assert_close((np.concatenate([first_y, second_y], axis=1), state), out)
    _, dstate = layer.backward((dy[:, 3:], dstate), second)
    layer.backward((dy[:, :3], dstate), first)
    assert_close(grads(layer), whole)


def test_step_by_step_equals_the_whole():
    layer, (x,) = layer_of(), draw((B, L, D))
    y, _ = layer(x)
    stepping = layer.begin()
    for t in range(L):
        y_t, stepping = layer.step(x[:, t], stepping)
        assert_close(y_t, y[:, t])


def test_the_parameters_at_the_start():
    layer = RWA(4, 400, rng=0)
    shapes = {name: p.value.shape for name, p in layer.named_parameters()}
    assert shapes == {"s": (400,), "W_u": (4, 400), "b_u": (400,), "W_g": (404, 400), "b_g": (400,), "W_a": (404, 400)}
    assert abs(layer.s.value.mean()) < 0.15
    assert abs(layer.s.value.std() - 1) < 0.1
    assert not layer.b_u.value.any()
    assert not layer.b_g.value.any()
    for name in ("W_u", "W_g", "W_a"):
        W = getattr(layer, name).value
        bound = np.sqrt(6 / sum(W.shape))
        assert 0.98 * bound < np.abs(W).max() <= bound


# ---- planted faults --------------------------------------------------------------------------------------

class Segments(Recurrent):
    """An RWA run in two segments; `keep` says which of (dh, dr, dl) the second hands back to the first."""

    def __init__(self, keep):
        self.layer, self.keep = layer_of(d=2, h=2), keep

    def forward(self, x, state=None, mask=None, rng=None):
        (y, state), first = self.layer.forward(x[:, :2], state=state)
        (y_2, state), second = self.layer.forward(x[:, 2:], state=state)
        return (np.concatenate([y, y_2], axis=1), state), (first, second)

    def backward(self, upstream, cache):
        (first, second), (dy, dstate) = cache, upstream
        dy, dy_2 = (None, None) if dy is None else (dy[:, :2], dy[:, 2:])
        dx_2, dstate = self.layer.backward((dy_2, dstate), second)
        dx, dstate0 = self.layer.backward((dy, tuple(d * kept for d, kept in zip(dstate, self.keep))), first)
        return np.concatenate([dx, dx_2], axis=1), dstate0


@pytest.mark.parametrize("keep", [(1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1)], ids=str)
def test_a_state_gradient_that_is_dropped_is_found(keep):
    """(1, 1, 0) is what becomes of a running maximum that backward takes for a constant: l without a gradient."""
    report = gradcheck(Segments(keep), draw((2, 4, 2)))
    assert not report.problems
    assert {row.status for row in report.rows} == {"ok" if all(keep) else "wrong"}, report
    assert report.rows[0].wrong == (0 if all(keep) else 2 * 2 * 2)           # all of the first segment's x, no other


# ---- bad input -------------------------------------------------------------------------------------------

X = np.zeros((2, 3, 4))


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: RWA(0, 5), r"RWA: d is 0; expected a whole number of at least 1"),
    (lambda: RWA(4, 2.5), r"RWA: h is 2.5; expected a whole number of at least 1"),
    (lambda: RWA(4, 5).forward(np.zeros((2, 3))), r"RWA: x has shape \(2, 3\); expected \(batch, length, 4\)"),
    (lambda: RWA(4, 5).forward(X, mask=np.ones((2, 4), bool)), r"mask has shape \(2, 4\); expected \(2, 3\)"),
    (lambda: RWA(4, 5).forward(X, state=(X, X)), r"state is 2 entries; expected a tuple \(h, r, l\)"),
    (lambda: RWA(4, 5).forward(X, state=RWA(4, 5).initial_state(3)), r"state's h has shape \(3, 5\); expected \(2, 5\)"),
    (lambda: RWA(4, 5).backward((X, None), RWA(4, 5).forward(X)[1]), r"dy has shape \(2, 3, 4\); expected \(2, 3, 5\)"),
    (lambda: RWA(4, 5).backward((None, (None, None, np.zeros((2, 4)))), RWA(4, 5).forward(X)[1]),
     r"dstate's l has shape \(2, 4\); expected \(2, 5\)"),
])
def test_bad_input(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


# ---- cost ------------------------------------------------------------------------------------------------

def test_memory_is_linear_in_the_length():
    def cache_bytes(T):
        _, (cache, _) = RWA(2, 16, rng=0).forward(np.zeros((8, T, 2), "float32"))
        return sum(array.nbytes for array in cache if array is not None)
    one_state = 8 * 16 * 4
    assert cache_bytes(400) - cache_bytes(200) == 200 * (5 * one_state + 8 * 3 * 4)
