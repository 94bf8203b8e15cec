"""SRU: the fast recurrence against the plain equations and against torch autograd, and exact facts of the cell."""

import math
import tracemalloc

import numpy as np
import pytest
from cases import B, L, mask_kinds
from helpers import assert_close, assert_identical, flat, grads, upstream
from oracles import (
    gradient,
    plain_sru_backward,
    plain_sru_forward,
    pytorch,
    tensor,
    tensors,
    torch_backward,
    torch_sru,
)

from minigrad.backend import uniform_like
from minigrad.fast.sru import CHUNK
from minigrad.layers import SRU
from minigrad.layers.sru import sru_cell, sru_cell_backward

H = 5
HIGHWAY_BIAS = -1.0


def layer_of(k, projection=None, dtype="float64", **settings):
    """An SRU with k slices, its biases off their start."""
    layer = SRU(H if k == 3 else 4, H, projection, HIGHWAY_BIAS, rng=0, dtype=dtype, **settings)
    rng = np.random.default_rng(1)
    layer.b_f.value += 0.5 * rng.standard_normal(H)
    layer.b_r.value += 0.5 * rng.standard_normal(H)
    return layer


def draw(layer, L=L, seed=0):
    """x, c."""
    rng, d = np.random.default_rng(seed), (layer.W if layer.projection is None else layer.W_q).value.shape[0]
    return rng.standard_normal((B, L, d)), rng.standard_normal((B, H))


def dropout_mask(seed, p=0.4):
    """The (B, H) mask that a layer draws from this seed."""
    like = np.empty((B, H))
    return (uniform_like(np.random.default_rng(seed), like) >= p) / (1 - p)


def run(k, activation, projection, rescale, kind, given, drop):
    """The layer and its arguments; its out, its upstream, and what its backward says."""
    layer = layer_of(k, projection, activation=activation, rescale=rescale, recurrent_dropout=0.4 if drop else 0.0)
    x, c = draw(layer)
    mask = None if kind is None else mask_kinds()[kind]
    out, cache = layer.forward(x, state=(c,) if given else None, mask=mask,
                               rng=np.random.default_rng(5) if drop else None)
    dy, (dc,) = upstream(out)
    returned = layer.backward((dy, (dc,)), cache)
    inputs = (x, c if given else np.zeros_like(c), np.ones((B, L), bool) if mask is None else mask,
              dropout_mask(5) if drop else None)
    return layer, inputs, out, (dy, dc), returned


@pytest.mark.parametrize("drop", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("given", [False, True], ids=["", "state"])
@pytest.mark.parametrize("kind", [None, *mask_kinds()])
@pytest.mark.parametrize("rescale", [False, True], ids=["", "rescale"])
@pytest.mark.parametrize("projection", [None, 2])
@pytest.mark.parametrize("activation", ["identity", "tanh"])
@pytest.mark.parametrize("k", [3, 4])
def test_the_fast_recurrence_equals_the_plain_equations(k, activation, projection, rescale, kind, given, drop):
    layer, (x, c, mask, m), out, (dy, dc), returned = run(k, activation, projection, rescale, kind, given, drop)
    (y, last), caches = plain_sru_forward(layer, x, c, mask, m)
    assert_close(out, (y, (last,)))
    dx, dc0, total = plain_sru_backward(layer, dy, dc, mask, caches)
    assert_close(returned, (dx, (dc0,)))
    assert_close(grads(layer), [total[name] for name, _ in layer.named_parameters()])


@pytest.mark.parametrize("kind", [None, "left padding", "a sample with no real step"])
@pytest.mark.parametrize("drop", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("projection", [None, 2])
@pytest.mark.parametrize("activation", ["identity", "tanh"])
@pytest.mark.parametrize("k", [3, 4])
def test_it_equals_torch_autograd(k, activation, projection, rescale, kind, drop):
    layer, (x, c, mask, m), out, (dy, dc), returned = run(k, activation, projection, rescale, kind, True, drop)
    weights, tx, tc = tensors(layer), tensor(x), tensor(c)
    scale = math.sqrt(1 + 2 * math.exp(HIGHWAY_BIAS)) if rescale else 1.0
    expected = torch_sru(layer, weights, tx, tc, mask, scale, m)
    torch_backward(expected, (dy, dc))
    assert_close(out, (expected[0].detach().numpy(), (expected[1].detach().numpy(),)), 1e-10)
    assert_close(returned, (gradient(tx), (gradient(tc),)), 1e-10)
    assert_close(grads(layer), [gradient(leaf) for leaf in weights.values()], 1e-10)


@pytest.mark.parametrize("drop", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("activation", ["identity", "tanh"])
@pytest.mark.parametrize("k", [3, 4])
def test_one_step_equals_torch_autograd(k, activation, drop):
    torch, rng = pytorch(), np.random.default_rng(0)
    u, x, c, dh, dc = (rng.standard_normal(s) for s in [(B, k * H), (B, H), (B, H), (B, H), (B, H)])
    vectors, m = rng.standard_normal((4, H)), dropout_mask(5) if drop else None
    (h, new_c), cache = sru_cell(u, x, c, *vectors, 1.3, activation, m)
    (du, dx, dc0), sums = sru_cell_backward(dh, dc, cache, *vectors[:2], 1.3)

    leaves = [tensor(array) for array in (u, x, c, *vectors)]
    tu, tx, tc, v_f, v_r, b_f, b_r = leaves
    u0, u1, u2, *u3 = tu.split(H, 1)
    f, r = torch.sigmoid(u1 + v_f * tc + b_f), torch.sigmoid(u2 + v_r * tc + b_r)
    tc1 = f * tc + (1 - f) * u0
    x_ = u3[0] if u3 else 1.3 * tx
    th = x_ + (r if m is None else torch.tensor(m) * r) * ((tc1 if activation == "identity" else torch.tanh(tc1)) - x_)
    torch_backward((th, tc1), (dh, dc))
    assert_close((h, new_c), (th.detach().numpy(), tc1.detach().numpy()))
    assert_close((du, dx, dc0, *sums), tuple(map(gradient, leaves)))


@pytest.mark.parametrize("T", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize("k", [3, 4])
def test_chunks_of_steps_add_up(k, T):
    """The element-wise work is done a chunk of steps at a time: lengths around a chunk's ends."""
    layer = layer_of(k, activation="tanh", rescale=True)
    (x, c), mask = draw(layer, T), np.ones((B, T), bool)
    mask[0, T // 2:] = mask[1, :CHUNK] = False
    out, cache = layer.forward(x, (c,), mask)
    plain_out, caches = plain_sru_forward(layer, x, c, mask, None)
    dy, (dc,) = upstream(out)
    dx, dc0, total = plain_sru_backward(layer, dy, dc, mask, caches)
    assert_close((flat(out), layer.backward((dy, (dc,)), cache)), (flat(plain_out), (dx, (dc0,))))
    assert_close(grads(layer), [total[name] for name, _ in layer.named_parameters()])


# ---- exact facts -----------------------------------------------------------------------------------------

def test_where_everything_is_dropped_y_is_x():
    """A dropped unit passes x' through; it is not zeroed."""
    layer = SRU(H, H, recurrent_dropout=1 - 1e-9, rng=0, dtype="float64")
    x, c = draw(layer)
    ((y, _), cache) = layer.forward(x, (c,), rng=np.random.default_rng(0))
    assert_identical(y, x)
    dy = np.random.default_rng(1).standard_normal(y.shape)
    dx, (dc,) = layer.backward((dy, None), cache)
    assert_identical(dx, dy)
    assert not any(g.any() for g in (dc, *grads(layer)))


def test_where_everything_is_dropped_y_is_the_projected_highway():
    layer = SRU(4, H, recurrent_dropout=1 - 1e-9, rng=0, dtype="float64")
    x, _ = draw(layer)
    (y, _), _ = layer.forward(x, rng=np.random.default_rng(0))
    assert_close(y, x @ layer.W.value[:, 3 * H:])


def test_a_dropped_unit_passes_x_through_at_every_step():
    """One mask for all steps of a sample; a kept unit's r is divided by 1 - p."""
    layer = SRU(H, H, recurrent_dropout=0.4, rng=0, dtype="float64")
    x, _ = draw(layer)
    (y, _), _ = layer.forward(x, rng=np.random.default_rng(5))
    dropped = np.repeat((dropout_mask(5) == 0)[:, None], L, axis=1)
    assert 0 < dropped.sum() < dropped.size
    assert_identical(y[dropped], x[dropped])
    assert_close((y - x)[~dropped], (layer(x)[0] - x)[~dropped] / 0.6)


def test_the_cell_never_sees_the_dropout():
    layer = SRU(H, H, recurrent_dropout=0.4, rng=0, dtype="float64")
    x, _ = draw(layer)
    assert_identical(layer.forward(x, rng=np.random.default_rng(5))[0][1], layer(x)[1])


@pytest.mark.parametrize(("d", "highway_bias", "rescale", "scale"), [
    (H, -2.0, True, 1.1272), (H, 0.0, True, math.sqrt(3)), (H, 0.0, False, 1.0), (4, 0.0, True, 1.0)])
def test_the_scale_of_the_highway(d, highway_bias, rescale, scale):
    """s = sqrt(1 + 2 exp(b)) of b_r's start, for k = 3 alone; with r shut, y = s x, or x W_highway for k = 4."""
    layer = SRU(d, H, highway_bias=highway_bias, rescale=rescale, rng=0, dtype="float64")
    assert (layer.b_r.value == highway_bias).all()
    layer.b_r.value[...] = -1e4                      # r = 0; the scale is a constant and does not follow
    x = np.random.default_rng(0).standard_normal((2, 3, d))
    highway = x if d == H else x @ layer.W.value[:, 3 * H:]
    assert_close(layer(x)[0], scale * highway, 1e-4)


def test_with_f_shut_and_r_open_y_is_the_candidate():
    layer = SRU(4, H, rng=0, dtype="float64")
    layer.b_f.value[...], layer.b_r.value[...] = -1e4, 1e4
    x, _ = draw(layer)
    assert_close(layer(x)[0], x @ layer.W.value[:, :H])


def test_with_f_open_the_state_is_kept():
    layer = SRU(4, H, rng=0, dtype="float64")
    layer.b_f.value[...] = 1e4
    x, c = draw(layer)
    assert_close(layer(x, (c,))[1], (c,))


def test_the_gates_see_the_old_state():
    """The first step, from c = 0: v_f and v_r have no part in it; from another c they have."""
    layer = layer_of(3)
    x, c = draw(layer)
    before, before_c = layer(x[:, :1])[0], layer(x[:, :1], (c,))[0]
    layer.v_f.value += 1
    layer.v_r.value += 1
    assert_identical(layer(x[:, :1])[0], before)
    assert (layer(x[:, :1], (c,))[0] != before_c).all()


def test_the_columns_are_candidate_forget_reset_highway():
    layer = SRU(4, H, rng=0, dtype="float64")
    x = np.random.default_rng(0).standard_normal((1, 1, 4))
    u0, u1, u2, u3 = np.split(x[0, 0] @ layer.W.value, 4)
    f, r = 1 / (1 + np.exp(-u1)), 1 / (1 + np.exp(-u2))
    y, (c,) = layer(x)
    assert_close((c[0], y[0, 0]), ((1 - f) * u0, u3 + r * ((1 - f) * u0 - u3)))


def test_a_projection_is_the_product_of_two_matrices():
    """Equal outputs to W = W_q W_o, and gradients that are its gradient's shares: dW_q = dW W_o^T, dW_o = W_q^T dW."""
    two = layer_of(4, projection=3)
    one = layer_of(4)
    one.W.value = two.W_q.value @ two.W_o.value
    one.v_f.value, one.v_r.value = two.v_f.value, two.v_r.value
    x, c = draw(one)
    (out, cache), (out_two, cache_two) = one.forward(x, (c,)), two.forward(x, (c,))
    assert_close(out_two, out)
    assert_close(two.backward(upstream(out), cache_two), one.backward(upstream(out), cache))
    assert_close((two.W_q.grad, two.W_o.grad), (one.W.grad @ two.W_o.value.T, two.W_q.value.T @ one.W.grad))


@pytest.mark.parametrize(("settings", "count"), [
    ({"d": 5, "h": 5}, 3 * 25 + 4 * 5), ({"d": 4, "h": 5}, 4 * 20 + 4 * 5),
    ({"d": 5, "h": 5, "projection": 2}, 5 * 2 + 3 * 2 * 5 + 4 * 5),
    ({"d": 4, "h": 5, "projection": 2}, 4 * 2 + 4 * 2 * 5 + 4 * 5)], ids=str)
def test_the_parameter_count(settings, count):
    assert sum(p.value.size for p in SRU(**settings).parameters()) == count


def test_the_values_at_the_start():
    layer = SRU(60, 60, highway_bias=-2.0, v_range=0.5, rng=0)
    assert not layer.b_f.value.any()
    assert (layer.b_r.value == -2).all()
    for v in (layer.v_f.value, layer.v_r.value):
        assert 0.4 < np.abs(v).max() <= 0.5
    limit = math.sqrt(6 / (60 + 180))
    assert 0.95 * limit < np.abs(layer.W.value).max() <= limit
    assert not SRU(5, 5, v_range=0.0).v_f.value.any()


# ---- masks, steps, segments ------------------------------------------------------------------------------

@pytest.mark.parametrize("k", [3, 4])
@pytest.mark.parametrize("padded", ["left", "right"])
def test_padding_is_as_if_it_were_not_there(padded, k):
    layer = layer_of(k)
    x, c = draw(layer)
    filler = np.full((B, 4, x.shape[2]), np.nan)
    wide = np.concatenate([filler, x] if padded == "left" else [x, filler], axis=1)
    mask = ~np.isnan(wide[..., 0])
    y, last = layer(wide, (c,), mask=mask)
    expected, expected_last = layer(x, (c,))
    assert_identical((y[mask].reshape(expected.shape), last), (expected, expected_last))
    assert not y[~mask].any()


@pytest.mark.parametrize("projection", [None, 2])
@pytest.mark.parametrize("k", [3, 4])
def test_step_by_step_equals_forward(k, projection):
    layer = layer_of(k, projection, activation="tanh", rescale=True)
    x, c = draw(layer, 40)
    y, last = layer(x, (c,))
    stepping, ys = layer.begin((c,)), []
    for t in range(40):
        y_t, stepping = layer.step(x[:, t], stepping)
        ys.append(y_t)
    assert_close((np.stack(ys, axis=1), stepping), (y, last))


def test_stepping_starts_from_zero():
    layer = layer_of(3)
    x, _ = draw(layer)
    assert_close(layer.step(x[:, 0], layer.begin())[0], layer(x)[0][:, 0])
    assert_close(layer.step(x[:, 0])[0], layer(x)[0][:, 0])


def test_a_long_sequence_is_stable():
    """1,000 steps: float32 stays by float64, in the outputs and in the gradients; and nothing grows."""
    single, double = layer_of(3, dtype="float32"), layer_of(3)
    x, c = draw(double, 1000)
    for p, q in zip(single.parameters(), double.parameters()):
        q.value[...] = p.value
    out, cache = double.forward(x, (c,))
    dout = upstream(out)
    returned = double.backward(dout, cache)
    out32, cache32 = single.forward(x.astype("float32"), (c.astype("float32"),))
    returned32 = single.backward((dout[0].astype("float32"), (dout[1][0].astype("float32"),)), cache32)
    assert_close(out32, out, 1e-4)
    assert_close(returned32, returned, 1e-3)
    assert_close(grads(single), grads(double), 1e-2)
    assert np.abs(out[1]).max() < 10


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_inputs_saturate_and_do_not_overflow(size):
    layer = layer_of(4, dtype="float32", activation="tanh")
    x = (size * draw(layer)[0]).astype("float32")
    (y, state), cache = layer.forward(x)
    dx, _ = layer.backward(upstream((y, state)), cache)
    assert all(np.isfinite(array).all() for array in (y, dx, *state, *grads(layer)))


def cache_bytes(L, **settings):
    layer = SRU(32, 32, rng=0, **settings)
    _, (cache, xs, _) = layer.forward(np.zeros((4, L, 32), "float32"))
    return sum(array.nbytes for array in {id(a): a for a in [*cache, xs] if a is not None}.values())


def test_memory_is_linear_in_L():
    assert cache_bytes(800) / cache_bytes(400) == pytest.approx(2, rel=0.02)
    assert cache_bytes(400) <= 400 * 4 * 32 * 4 * 6.1            # x twice, u0, f, r and c: six numbers a unit and step


def test_repeated_use_holds_no_more_memory():
    layer, x = SRU(32, 32, rng=0), np.random.default_rng(0).standard_normal((4, 200, 32)).astype("float32")

    def train():
        state = None
        for _ in range(10):
            (y, state), cache = layer.forward(x, state)
            layer.backward((y, None), cache)
    train()
    tracemalloc.start()
    try:
        train()
        before = tracemalloc.get_traced_memory()[0]
        train()
        assert tracemalloc.get_traced_memory()[0] - before < x.nbytes / 4
    finally:
        tracemalloc.stop()


# ---- bad input -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: SRU(0, 5), "SRU: d is 0"),
    (lambda: SRU(4, 5.0), "SRU: h is 5.0"),
    (lambda: SRU(4, 5, 0), "SRU: projection is 0"),
    (lambda: SRU(4, 5, activation="relu"), "SRU: activation is 'relu'; expected one of 'identity', 'tanh'"),
    (lambda: SRU(4, 5, recurrent_dropout=1.0), r"SRU: recurrent_dropout is 1.0; expected a number in \[0, 1\)"),
    (lambda: SRU(4, 5, recurrent_dropout=-0.1), "SRU: recurrent_dropout is -0.1"),
    (lambda: SRU(4, 5, highway_bias=math.nan), "SRU: highway_bias is nan"),
    (lambda: SRU(4, 5, highway_bias=math.inf), "SRU: highway_bias is inf"),
    (lambda: SRU(4, 5, v_range=-1), "SRU: v_range is -1"),
])
def test_bad_settings(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


X = np.zeros((2, 3, 4))


@pytest.mark.parametrize("projection", [None, 3])
@pytest.mark.parametrize(("x", "keywords", "error", "sentence"), [
    (np.zeros((2, 4)), {}, ValueError, r"SRU: x has shape \(2, 4\); expected \(batch, length, 4\)"),
    (np.zeros((2, 3, 5)), {}, ValueError, r"SRU: x has shape \(2, 3, 5\)"),
    (np.zeros((2, 3, 4), int), {}, TypeError, "SRU: x has dtype int64"),
    (X, {"mask": np.ones((3, 2), bool)}, ValueError, r"SRU: mask has shape \(3, 2\); expected \(2, 3\)"),
    (X, {"mask": np.ones((2, 3))}, TypeError, "SRU: mask has dtype float64"),
    (X, {"state": np.zeros((2, 5))}, ValueError, r"SRU: state is ndarray; expected a tuple \(c\)"),
    (X, {"state": (np.zeros((2, 5)),) * 2}, ValueError, "SRU: state is 2 entries"),
    (X, {"state": (np.zeros((1, 5)),)}, ValueError, r"SRU: state's c has shape \(1, 5\); expected \(2, 5\)"),
    (X, {"state": (None,)}, TypeError, "SRU: state's c is None"),
])
def test_bad_input(projection, x, keywords, error, sentence):
    with pytest.raises(error, match=sentence):
        SRU(4, 5, projection, dtype="float64").forward(x, **keywords)


@pytest.mark.parametrize(("dout", "sentence"), [
    ((np.zeros((1, 3, 5)), None), r"SRU: dy has shape \(1, 3, 5\); expected \(2, 3, 5\)"),
    ((None, (np.zeros((2, 4)),)), r"SRU: dstate's c has shape \(2, 4\); expected \(2, 5\)"),
    ((None, (None, None)), "SRU: dstate is 2 entries"),
])
def test_a_wrong_upstream_gradient_is_refused_not_broadcast(dout, sentence):
    layer = SRU(4, 5, dtype="float64")
    _, cache = layer.forward(X)
    with pytest.raises(ValueError, match=sentence):
        layer.backward(dout, cache)
