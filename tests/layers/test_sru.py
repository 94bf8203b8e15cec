"""SRU: both loops against torch autograd, the ends of chunks, and exact facts of the cell."""

import math

import numpy as np
import pytest
from cases import B, L, mask_kinds
from helpers import all_gradients, assert_close, assert_identical, flat, grads, upstream
from oracles import gradient, tensor, tensors, torch_backward, torch_sru

from minigrad.backend import uniform_like
from minigrad.fast.sru import CHUNK
from minigrad.layers import SRU

H = 5
HIGHWAY_BIAS = -1.0


def layer_of(k, projection=None, **settings):
    """An SRU with k slices, its biases off their start."""
    layer = SRU(H if k == 3 else 4, H, projection, HIGHWAY_BIAS, **{"rng": 0, "dtype": "float64", **settings})
    rng = np.random.default_rng(1)
    layer.b_f.value += (0.5 * rng.standard_normal(H)).astype(layer.b_f.value.dtype)
    layer.b_r.value += (0.5 * rng.standard_normal(H)).astype(layer.b_r.value.dtype)
    return layer


def draw(layer, L=L):
    """x, c."""
    rng, d = np.random.default_rng(0), getattr(layer, layer.weights[0]).value.shape[0]
    return rng.standard_normal((B, L, d)), rng.standard_normal((B, H))


def dropout_mask(seed, p=0.4):
    """The (B, H) mask that a layer draws from this seed."""
    return (uniform_like(np.random.default_rng(seed), np.empty((B, H))) >= p) / (1 - p)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize(("kind", "drop"), [
    (None, False), ("left padding", True), ("a sample with no real step", True)])
@pytest.mark.parametrize("projection", [None, 2])
@pytest.mark.parametrize("activation", ["identity", "tanh"])
@pytest.mark.parametrize("k", [3, 4])
def test_it_equals_torch_autograd(k, activation, projection, kind, drop, fast):
    layer = layer_of(k, projection, activation=activation, rescale=True, fast=fast,
                     recurrent_dropout=0.4 if drop else 0.0)
    (x, c), mask = draw(layer), np.ones((B, L), bool) if kind is None else mask_kinds()[kind]
    keywords = {"state": (c,), "mask": None if kind is None else mask, "rng": 5}
    dout = upstream(((np.empty((B, L, H))), (c,)))
    out, returned, ours = all_gradients(layer, x, keywords, dout)
    weights, tx, tc = tensors(layer), tensor(x), tensor(c)
    scale = math.sqrt(1 + 2 * math.exp(HIGHWAY_BIAS)) if k == 3 else 1.0
    expected = torch_sru(layer, weights, tx, tc, mask, scale, dropout_mask(5) if drop else None)
    torch_backward(expected, (dout[0], dout[1][0]))
    assert_close(out, (expected[0].detach().numpy(), (expected[1].detach().numpy(),)), 1e-10)
    assert_close(returned, (gradient(tx), (gradient(tc),)), 1e-10)
    assert_close(ours, [gradient(leaf) for leaf in weights.values()], 1e-10)


@pytest.mark.parametrize("T", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize("k", [3, 4])
def test_the_fast_loop_equals_the_plain_one_around_the_ends_of_chunks(k, T):
    layer = layer_of(k, activation="tanh", rescale=True)
    (x, c), mask = draw(layer, T), np.ones((B, T), bool)
    mask[0, T // 2:] = mask[1, :CHUNK] = False
    keywords = {"state": (c,), "mask": mask}
    dout = upstream(layer(x, **keywords))
    fast = all_gradients(layer, x, keywords, dout)
    layer.fast = False
    assert_close(fast, all_gradients(layer, x, keywords, dout))


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


def test_a_dropped_unit_passes_x_through_at_every_step():
    """One mask for all steps of a sample; a kept unit's r is divided by 1 - p; c never sees the dropout."""
    layer = SRU(H, H, recurrent_dropout=0.4, rng=0, dtype="float64")
    x, _ = draw(layer)
    y, c = layer(x, rng=np.random.default_rng(5))
    dropped = np.repeat((dropout_mask(5) == 0)[:, None], L, axis=1)
    assert 0 < dropped.sum() < dropped.size
    assert_identical(y[dropped], x[dropped])
    assert_close((y - x)[~dropped], (layer(x)[0] - x)[~dropped] / 0.6)
    assert_identical(c, layer(x)[1])


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


def test_gates_that_are_open_or_shut():
    """f = 0 and r = 1: y is the candidate; f = 1: c is kept."""
    layer = SRU(4, H, rng=0, dtype="float64")
    x, c = draw(layer)
    layer.b_f.value[...], layer.b_r.value[...] = -1e4, 1e4
    assert_close(layer(x)[0], x @ layer.W.value[:, :H])
    layer.b_f.value[...] = 1e4
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
    two, one = layer_of(4, projection=3), layer_of(4)
    one.W.value = two.W_q.value @ two.W_o.value
    one.v_f.value, one.v_r.value = two.v_f.value, two.v_r.value
    x, c = draw(one)
    dout = upstream(one(x, (c,)))
    assert_close(*(all_gradients(layer, x, {"state": (c,)}, dout)[:2] for layer in (two, one)))
    assert_close((two.W_q.grad, two.W_o.grad), (one.W.grad @ two.W_o.value.T, two.W_q.value.T @ one.W.grad))


@pytest.mark.parametrize(("settings", "count"), [
    ({"d": 5, "h": 5}, 3 * 25 + 4 * 5), ({"d": 4, "h": 5}, 4 * 20 + 4 * 5),
    ({"d": 5, "h": 5, "projection": 2}, 5 * 2 + 3 * 2 * 5 + 4 * 5),
    ({"d": 4, "h": 5, "projection": 2}, 4 * 2 + 4 * 2 * 5 + 4 * 5)], ids=str)
def test_the_parameter_count(settings, count):
    assert SRU(**settings).count_parameters() == count


def test_the_values_at_the_start():
    layer = SRU(60, 60, highway_bias=-2.0, v_range=0.5, rng=0)
    assert not layer.b_f.value.any()
    assert (layer.b_r.value == -2).all()
    for v in (layer.v_f.value, layer.v_r.value):
        assert 0.4 < np.abs(v).max() <= 0.5
    limit = math.sqrt(6 / (60 + 180))
    assert 0.95 * limit < np.abs(layer.W.value).max() <= limit
    assert not SRU(5, 5, v_range=0.0).v_f.value.any()


# ---- edges -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_inputs_saturate_and_do_not_overflow(size):
    layer = layer_of(4, dtype="float32", activation="tanh")
    x = (size * draw(layer)[0]).astype("float32")
    (y, state), cache = layer.forward(x)
    dx, _ = layer.backward(upstream((y, state)), cache)
    assert all(np.isfinite(array).all() for array in (y, dx, *state, *grads(layer)))


def test_memory_is_linear_in_L():
    def cache_bytes(L):
        _, cache = SRU(32, 32, rng=0).forward(np.zeros((4, L, 32), "float32"))
        return sum(array.nbytes for array in {id(a): a for a in flat(cache.loop) if hasattr(a, "nbytes")}.values())
    assert cache_bytes(800) / cache_bytes(400) == pytest.approx(2, rel=0.02)
    assert cache_bytes(400) <= 400 * 4 * 32 * 4 * 6.1            # x twice, u0, f, r and c: six numbers a unit and step


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: SRU(0, 5), "SRU: d is 0"),
    (lambda: SRU(4, 5.0), "SRU: h is 5.0"),
    (lambda: SRU(4, 5, 0), "SRU: projection is 0"),
    (lambda: SRU(4, 5, activation="relu"), "SRU: activation is 'relu'; expected one of 'identity', 'tanh'"),
    (lambda: SRU(4, 5, recurrent_dropout=1.0), r"SRU: recurrent_dropout is 1.0; expected a number in \[0, 1\)"),
    (lambda: SRU(4, 5, highway_bias=math.inf), "SRU: highway_bias is inf"),
    (lambda: SRU(4, 5, v_range=-1), "SRU: v_range is -1"),
])
def test_bad_settings(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
