"""SRU++ against torch autograd of the paper's equations, and exact facts: attention, memory, masks, segments, steps."""

import math
from itertools import pairwise

import numpy as np
import pytest
from cases import B, L, mask_kinds
from helpers import assert_close, assert_identical, grads
from oracles import (
    gradient,
    tensor,
    tensors,
    torch_backward,
    torch_srupp,
)

from minigrad.backend import uniform_like
from minigrad.functional import QUERY_BLOCK
from minigrad.layers import SRU, SRUpp

D, P, M = 6, 8, 4
HIGHWAY_BIAS = -1.0

SETTINGS = {
    "one head": {},
    "two heads": {"heads": 2},
    "four heads, k = 4": {"heads": 4, "h": 5},
    "window 1": {"window": 1},
    "window 3, two heads, k = 4": {"window": 3, "heads": 2, "h": 5},
    "memory 2, window 6, norm of the input": {"memory": 2, "window": 6, "cell_norm": "pre"},
    "no memory": {"memory": 0},
    "not causal": {"causal": False},
    "not causal, two heads, memory 3": {"causal": False, "heads": 2, "memory": 3},
    "no inner norm": {"layer_norm": False},
    "norm of the output, k = 4": {"cell_norm": "post", "h": 5},
    "norm of the output, no inner norm, rescale": {"cell_norm": "post", "layer_norm": False, "rescale": True},
    "tanh": {"activation": "tanh"},
    "rescale": {"rescale": True},
    "without attention": {"attention": False},
    "without attention, norm of the input, k = 4": {"attention": False, "cell_norm": "pre", "h": 5},
    "detached, norm of the input, window 3": {"detach_memory": True, "cell_norm": "pre", "window": 3},
    "detached without attention": {"detach_memory": True, "attention": False},
}
every_setting = pytest.mark.parametrize("name", SETTINGS)
every_way = pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])


def layer_of(h=D, projection=P, d=D, dtype="float64", **settings):
    """An SRUpp whose parameters are all off their start, alpha above all."""
    layer = SRUpp(d, h, projection, highway_bias=HIGHWAY_BIAS, rng=0, dtype=dtype, **settings)
    rng = np.random.default_rng(1)
    for p in layer.parameters():
        p.value += (0.2 * rng.standard_normal(p.value.shape)).astype(dtype)
    if layer.attention:
        layer.alpha.value[...] = 0.7
    return layer


def draw(layer, L=L, B=B, seed=0):
    """x, c, memory of M slots."""
    rng, (d, h) = np.random.default_rng(seed), (layer.W_q.value.shape[0], len(layer.v_f.value))
    return rng.standard_normal((B, L, d)), rng.standard_normal((B, h)), rng.standard_normal((B, M, d))


MEMORY_MASK = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)          # a gap, nothing, everything


def draw_upstream(state, y, seed=7):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(y.shape), tuple(rng.standard_normal(array.shape) for array in state[:2])


def s_of(layer):
    """The highway's factor, from its formula."""
    return 1.0 if layer.scale == 1 else math.sqrt(1 + 2 * math.exp(HIGHWAY_BIAS))


def initial_state(layer, x):
    c = np.zeros((len(x), len(layer.v_f.value)))
    return c, np.zeros((len(x), 0, x.shape[2])), np.zeros((len(x), 0), bool)


def compare(layer, x, state, mask, **oracle):
    """All outputs and gradients against torch autograd, to 1e-10."""
    rng = oracle.pop("rng", None)
    (y, after), cache = layer.forward(x, state=state, mask=mask, rng=rng)
    dy, (dc, dmemory) = draw_upstream(after, y)
    dx, dstate0 = layer.backward((dy, (dc, dmemory, None)), cache)

    state, mask = state or initial_state(layer, x), np.ones(x.shape[:2], bool) if mask is None else mask
    weights, tx, tc, tmemory = tensors(layer), tensor(x), tensor(state[0]), tensor(state[1])
    *values, memory_mask = torch_srupp(
        layer, weights, tx, (tc, tmemory, state[2]), mask, scale=s_of(layer), **oracle)
    torch_backward(values, (dy, dc, dmemory if values[2].requires_grad else None))
    assert_close((y, after[:2]), (values[0].detach().numpy(), tuple(a.detach().numpy() for a in values[1:])), 1e-10)
    assert_identical(after[2], memory_mask)
    assert_close(dx, gradient(tx), 1e-10)
    assert_close(dstate0[0], gradient(tc), 1e-10)
    if dstate0[1] is None:
        assert layer.detach_memory
        assert not gradient(tmemory).any()
    else:
        assert_close(dstate0[1], gradient(tmemory), 1e-10)
    assert dstate0[2] is None
    assert_close(dict(zip(weights, grads(layer))), {n: gradient(leaf) for n, leaf in weights.items()}, 1e-10)


ALL_REAL, NONE_REAL = np.ones((B, M), bool), np.zeros((B, M), bool)


@every_way
@pytest.mark.parametrize(("memory_mask", "kind"), [
    (MEMORY_MASK, "gaps"), (MEMORY_MASK, "a sample with no real step"), (ALL_REAL, None), (NONE_REAL, None),
    (None, None), (None, "gaps")], ids=["part of a memory, gaps", "part of a memory, no real step", "a full memory",
                                        "an empty memory", "no state", "no state, gaps"])
@every_setting
def test_it_equals_torch_autograd(name, memory_mask, kind, fast):
    layer = layer_of(**SETTINGS[name], fast=fast)
    x, c, memory = draw(layer)
    state = None if memory_mask is None else (c, memory, memory_mask)
    compare(layer, x, state, None if kind is None else mask_kinds()[kind])


@pytest.mark.parametrize("settings", [{}, {"heads": 2, "h": 5, "window": 3, "cell_norm": "pre"}, {"causal": False},
                                      {"attention": False}, {"layer_norm": False, "cell_norm": "post"}], ids=str)
@pytest.mark.parametrize("dropped", ["attention_dropout", "dropout", "recurrent_dropout", "all"])
@every_way
def test_it_equals_torch_autograd_with_the_same_dropout_masks(fast, settings, dropped):
    """Drawn one after another: of the attention weights, of the rows before W_o, of r."""
    names = ["attention_dropout", "dropout", "recurrent_dropout"]
    p = {name: 0.4 if dropped in (name, "all") else 0.0 for name in names}
    layer = layer_of(**settings, **p, fast=fast)
    x, c, memory = draw(layer)
    seen = M + L - (0 if layer.window is None else max(0, M - layer.window + 1))      # by any query of the one block
    rng, drops = np.random.default_rng(3), []
    for name, shape in zip(names, [(B, layer.heads, L, seen), (B, L, P), (B, len(layer.v_f.value))]):
        drawn = p[name] and (layer.attention or name != "attention_dropout")
        drops.append((uniform_like(rng, np.empty(shape)) >= 0.4) / 0.6 if drawn else None)
    if drops[0] is not None:
        drops[0] = np.concatenate([np.ones((*drops[0].shape[:3], M + L - seen)), drops[0]], axis=3)
    compare(layer, x, (c, memory, np.ones((B, M), bool)), None, drops=drops, rng=np.random.default_rng(3))


# ---- exact facts -----------------------------------------------------------------------------------------


def at_alpha_0(**settings):
    layer = layer_of(**settings)
    layer.alpha.value[...] = 0
    return layer


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("settings", [{}, {"heads": 2, "window": 3}, {"layer_norm": False, "h": 5}, {"causal": False}],
                         ids=str)
def test_at_alpha_0_keys_and_values_have_no_gradient_and_alpha_has(settings, masked):
    layer = at_alpha_0(**settings)
    x, c, memory = draw(layer)
    (y, state), cache = layer.forward(x, (c, memory, MEMORY_MASK), mask_kinds()["gaps"] if masked else None)
    dy, dstate = draw_upstream(state, y)
    layer.backward((dy, (*dstate, None)), cache)
    assert not layer.W_k.grad.any()
    assert not layer.W_v.grad.any()
    assert abs(layer.alpha.grad[0]) > 1e-3
    assert layer.W_q.grad.any()


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize(("h", "rescale"), [(D, True), (5, False)])
def test_at_alpha_0_without_norm_it_is_an_sru(h, rescale, attention):
    """With W = W_q W_o: outputs and all gradients that both have."""
    layer = layer_of(h, layer_norm=False, rescale=rescale, attention=attention)
    if attention:
        layer.alpha.value[...] = 0
    sru = SRU(D, h, highway_bias=HIGHWAY_BIAS, rescale=rescale, dtype="float64")
    sru.W.value[...] = layer.W_q.value @ layer.W_o.value
    for name in ("v_f", "v_r", "b_f", "b_r"):
        getattr(sru, name).value[...] = getattr(layer, name).value
    x, c, _ = draw(layer)
    mask = mask_kinds()["gaps"]
    (y, after), cache = layer.forward(x, (c, np.zeros((B, 0, D)), np.zeros((B, 0), bool)), mask)
    (y_sru, c_sru), cache_sru = sru.forward(x, (c,), mask)
    assert_close((y, after[0]), (y_sru, c_sru[0]))
    dy, (dc, _) = draw_upstream(after, y)
    dx, dstate0 = layer.backward((dy, (dc, None, None)), cache)
    assert_close((dx, dstate0[0]), (lambda dx, dstate: (dx, dstate[0]))(*sru.backward((dy, (dc,)), cache_sru)))
    assert_close((layer.W_q.grad, layer.W_o.grad), (sru.W.grad @ layer.W_o.value.T, layer.W_q.value.T @ sru.W.grad))
    for name in ("v_f", "v_r", "b_f", "b_r"):
        assert_close(getattr(layer, name).grad, getattr(sru, name).grad)


@pytest.mark.parametrize(("d", "p"), [(8, 4), (64, 16), (96, 12)])
def test_the_parameter_count(d, p):
    def count(**settings):
        return sum(q.value.size for q in SRUpp(d, d, p, **settings).parameters())
    assert count() == count(heads=2) == count(window=5) == d * p + 2 * p**2 + 3 * d * p + 4 * d + 2 * p + 1
    assert count(attention=False) == count() - 2 * p**2 - 1
    assert count(layer_norm=False) == count() - 2 * p


def test_the_values_at_the_start():
    layer = SRUpp(60, 60, 40, dropout=0.36, rng=0)
    assert not layer.alpha.value.any()
    limits = {"W_q": 6 / 100, "W_k": 6 / 120, "W_v": 6 / 120, "W_o": 6 / 220 * 0.64}
    for name, square in limits.items():
        assert 0.95 * math.sqrt(square) < np.abs(getattr(layer, name).value).max() <= math.sqrt(square) * (1 + 1e-6)
    assert (layer.norm.gain.value == 1).all()
    assert not layer.norm.bias.value.any()
    assert (layer.b_r.value == -2).all()
    assert not layer.b_f.value.any()


# ---- no step sees a later one ----------------------------------------------------------------------------

@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("length", "window"), [(9, None), (9, 1), (9, 3), (300, None), (300, 2), (300, 130)])
def test_a_later_input_changes_no_earlier_output(length, window, heads):
    """Bit for bit, across blocks of queries too."""
    assert length < 10 or length > 2 * QUERY_BLOCK
    layer = layer_of(heads=heads, window=window, projection=4)
    x, c, memory = draw(layer, length)
    state = c, memory, MEMORY_MASK
    y = layer(x, state)[0].copy()
    for t in {0, 4, length // 2, length - 1}:
        other = x.copy()
        other[:, t] += 100
        y_other, _ = layer(other, state)
        assert_identical(y_other[:, :t], y[:, :t])
        assert (y_other[:, t] != y[:, t]).all()


@pytest.mark.parametrize("window", [1, 3])
def test_the_window_ends_where_it_says(window):
    """The rows before W_o at step t come from x_{t-window+1} ... x_t and nothing older."""
    layer = layer_of(window=window, layer_norm=False)
    x, *_ = draw(layer, 9)
    other = x.copy()
    other[:, 2] += 1
    A, A_other = (layer.forward(array)[1].attention.A for array in (x, other))
    changed = (A_other != A).all(axis=(0, 2))
    assert_identical(changed, np.isin(np.arange(9), range(2, 2 + window)))
    assert_identical(A[:, 2 + window:], A_other[:, 2 + window:])


# ---- segments and memory ---------------------------------------------------------------------------------

def in_segments(layer, x, state, mask, cuts, dy, dstate):
    """((y, state), dx, dstate0, gradients) of the sequence in parts, each part's dstate0 handed to the one before."""
    parts = [slice(a, b) for a, b in zip((0, *cuts), (*cuts, x.shape[1]))]
    ys, caches, dxs = [], [], []
    for part in parts:
        (y, state), cache = layer.forward(x[:, part], state, None if mask is None else mask[:, part])
        ys.append(y)
        caches.append(cache)
    layer.zero_grad()
    for part, cache in zip(reversed(parts), reversed(caches)):
        dx, dstate = layer.backward((dy[:, part], dstate), cache)
        dxs.insert(0, dx)
    return (np.concatenate(ys, axis=1), state), np.concatenate(dxs, axis=1), dstate, grads(layer)


def as_memory_allows(mask, cuts, slots, window):
    """f(n, M, T): what the steps of sample n, counted without the masked ones, see of what was before their segment."""
    def sees(n, M, T):
        starts = [mask[n, :cut].sum() for cut in (0, *cuts, mask.shape[1])]
        allowed = np.zeros((T, M + T), bool)
        for number, (start, stop) in enumerate(pairwise(starts)):
            for t in range(start, stop):
                oldest = -M if number == 0 else start - slots
                oldest = oldest if window is None else max(oldest, t - window + 1)
                allowed[t, max(0, M + oldest):M + t + 1] = True
        return allowed
    return sees


@pytest.mark.parametrize("cuts", [(3, 6), (2, 7, 7, 8)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("settings", [
    {"memory": 2}, {"memory": 0}, {"memory": 2, "window": 5}, {"memory": 1, "cell_norm": "pre"},
    {"memory": 2, "cell_norm": "post", "heads": 2}, {"memory": 3, "layer_norm": False, "h": 5}], ids=str)
def test_a_shorter_memory_is_the_attention_that_it_allows(settings, masked, cuts):
    """Segments against one sequence in torch whose mask of pairs says which earlier steps were still remembered."""
    layer = layer_of(**settings)
    x, c, memory = draw(layer, 10)
    mask = np.random.default_rng(2).random((B, 10)) < 0.7 if masked else np.ones((B, 10), bool)
    weights, tx, tc, tmemory = tensors(layer), tensor(x), tensor(c), tensor(memory)
    *values, memory_mask = torch_srupp(layer, weights, tx, (tc, tmemory, MEMORY_MASK), mask, scale=s_of(layer),
                                       sees=as_memory_allows(mask, cuts, layer.memory, layer.window))
    y, c1, memory1 = (array.detach().numpy() for array in values)
    dy, (dc, dmemory) = draw_upstream((c1, memory1), y)
    torch_backward(values, (dy, dc, dmemory))
    got, dx, dstate0, gradients = in_segments(
        layer, x, (c, memory, MEMORY_MASK), mask if masked else None, cuts, dy, (dc, dmemory, None))
    assert_close(got[0], y, 1e-10)
    assert_close(got[1], (c1, memory1, memory_mask), 1e-10)
    assert_close((dx, dstate0), (gradient(tx), (gradient(tc), gradient(tmemory), None)), 1e-10)
    assert_close(gradients, [gradient(leaf) for leaf in weights.values()], 1e-10)


@pytest.mark.parametrize("settings", [{}, {"window": 4}, {"memory": 2, "cell_norm": "pre"}], ids=str)
def test_segments_with_a_detached_memory_equal_torchs_detach(settings):
    """No gradient goes into the memory; through c it goes on; W_q, W_k and W_v keep what the memory's rows give."""
    layer = layer_of(detach_memory=True, **settings)
    x, c, memory = draw(layer, 10)
    mask, cuts = np.random.default_rng(2).random((B, 10)) < 0.8, (4, 7)
    dy = np.random.default_rng(3).standard_normal((B, 10, D))
    weights, tx, tc = tensors(layer), tensor(x), tensor(c)
    state, ys = (tc, tensor(memory), MEMORY_MASK), []
    for start, stop in pairwise((0, *cuts, 10)):
        y, *state = torch_srupp(layer, weights, tx[:, start:stop], state, mask[:, start:stop], scale=s_of(layer))
        ys.append(y)
    torch_backward(ys, [dy[:, start:stop] for start, stop in pairwise((0, *cuts, 10))])
    ys = [y.detach().numpy() for y in ys]
    got, dx, dstate0, gradients = in_segments(layer, x, (c, memory, MEMORY_MASK), mask, cuts, dy, None)
    assert_close(got[0], np.concatenate(ys, axis=1), 1e-10)
    assert dstate0[1] is None
    assert_close((dx, dstate0[0]), (gradient(tx), gradient(tc)), 1e-10)
    assert_close(gradients, [gradient(leaf) for leaf in weights.values()], 1e-10)


@pytest.mark.parametrize(("settings", "slots"), [
    ({}, L + 2), ({"window": 1}, 0), ({"window": 4}, 3), ({"window": 4, "memory": 9}, 9), ({"memory": 0}, 0),
    ({"memory": 3}, 3), ({"causal": False}, 0), ({"causal": False, "memory": 2}, 2), ({"attention": False}, 0),
    ({"attention": False, "memory": 3}, 0)], ids=str)
def test_the_slots_of_the_memory(settings, slots):
    layer = layer_of(**settings)
    x, c, memory = draw(layer)
    _, (_, after, mask) = layer(x, (c, memory[:, :2], np.ones((B, 2), bool)))
    assert after.shape == (B, slots, D)
    assert mask.shape == (B, slots)


def test_the_memory_is_the_newest_inputs():
    layer = layer_of(memory=3)
    x, *_ = draw(layer)
    mask = mask_kinds()["gaps"]
    _, (_, memory, memory_mask) = layer(x, mask=mask)
    for n in range(B):
        assert_identical(memory[n], x[n, mask[n]][-3:])
    assert memory_mask.all()
    _, (_, memory, memory_mask) = layer(x[:, :2])
    assert_identical(memory, np.concatenate([np.zeros((B, 1, D)), x[:, :2]], axis=1))
    assert_identical(memory_mask, np.tile([False, True, True], (B, 1)))


def test_what_stands_in_an_empty_slot_does_not_matter():
    layer = layer_of()
    x, c, memory = draw(layer)
    (y, after), cache = layer.forward(x, (c, memory, MEMORY_MASK))
    garbage = np.where(MEMORY_MASK[:, :, None], memory, np.nan)
    (y2, after2), cache2 = layer.forward(x, (c, garbage, MEMORY_MASK))
    assert_identical((y2, after2), (y, after))
    dy, dstate = draw_upstream(after, y)
    first, second = (layer.backward((dy, (*dstate, None)), a) for a in (cache, cache2))
    assert_identical(first, second)
    assert not first[1][1][~MEMORY_MASK].any()


@every_way
def test_a_query_that_sees_no_key_adds_nothing(fast):
    """R = Q there, and nothing reaches the weights of keys and values."""
    layer = layer_of(causal=False, layer_norm=False, fast=fast)
    x, *_ = draw(layer, B=1)
    _, cache = layer.forward(x, mask=np.zeros((1, L), bool))
    assert not cache.attention.A.any()
    layer._attend_backward(np.ones_like(cache.attention.A), cache.attention, fast)
    assert not any(p.grad.any() for p in (layer.W_k, layer.W_v, layer.alpha))


# ---- step by step ----------------------------------------------------------------------------------------

def steps(layer, x, stepping):
    ys = []
    for t in range(x.shape[1]):
        y, stepping = layer.step(x[:, t], stepping)
        ys.append(y)
    return np.stack(ys, axis=1), stepping


STEPPED = [{}, {"window": 1}, {"window": 40, "heads": 2}, {"heads": 4, "h": 5, "cell_norm": "pre"},
           {"cell_norm": "post", "layer_norm": False, "window": 5, "activation": "tanh", "rescale": True},
           {"attention": False, "causal": False}, {"memory": 2}, {"memory": 2, "window": 4}]
every_stepped = pytest.mark.parametrize("settings", STEPPED, ids=str)


@pytest.mark.parametrize("length", [1, 3, 300])
@pytest.mark.parametrize("memory_mask", [None, MEMORY_MASK, NONE_REAL, MEMORY_MASK[:, :0]],
                         ids=["no state", "partly real", "none real", "empty"])
@every_stepped
def test_step_by_step_equals_forward(settings, memory_mask, length):
    layer = layer_of(**settings)
    x, c, memory = draw(layer, length)
    state = None if memory_mask is None else (c, memory[:, :memory_mask.shape[1]], memory_mask)
    y, after = layer(x, state)
    got, (c, _) = steps(layer, x, layer.begin(state))
    assert_close((got, c), (y, after[0]))


@pytest.mark.parametrize("before", [0, 5, 16, 17])
@every_stepped
def test_two_continuations_of_one_beginning_do_not_disturb_each_other(settings, before):
    """Their steps taken in turn, from the same value of `stepping`: as each alone, and the value can be used again."""
    layer = layer_of(**settings)
    x, c, memory = draw(layer, before + 30)
    other = np.concatenate([x[:, :before], draw(layer, 30, seed=1)[0]], axis=1)
    state = c, memory, MEMORY_MASK
    expected, expected_other = layer(x, state)[0][:, before:], layer(other, state)[0][:, before:]
    stepping = layer.begin(state)
    for t in range(before):
        _, stepping = layer.step(x[:, t], stepping)
    branches, ys = [stepping, stepping, stepping], [[], [], []]
    for t in range(before, before + 30):
        for n, sequence in enumerate((x, other, x)):
            y, branches[n] = layer.step(sequence[:, t], branches[n])
            ys[n].append(y)
    for got, wanted in zip(ys, (expected, expected_other, expected)):
        assert_close(np.stack(got, axis=1), wanted)
    assert_close(steps(layer, x[:, before:], stepping)[0], expected)


@pytest.mark.parametrize("window", [1, 4, 20])
def test_with_a_window_stepping_keeps_a_bounded_number_of_keys(window):
    layer = layer_of(window=window)
    x, c, memory = draw(layer, 500)
    sizes, stepping = set(), layer.begin((c, memory, MEMORY_MASK))
    for t in range(500):
        _, stepping = layer.step(x[:, t], stepping)
        seen = stepping[1]
        assert seen.last - seen.first <= window
        sizes.add(seen.store[0].shape[2])
    assert max(sizes) <= max(16, 2 * window + M)
    assert sum(array.nbytes for array in seen.store) <= 2 * 8 * B * P * max(16, 2 * window + M)


def test_a_layer_that_is_not_causal_cannot_be_stepped():
    layer = layer_of(causal=False)
    with pytest.raises(TypeError, match="SRUpp: causal is False; a sequence can be read step by step"):
        layer.step(np.zeros((B, D)))


# ---- bad input -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("settings", "sentence"), [
    ({"heads": 3}, "SRUpp: projection is 8 and heads 3; expected"),
    ({"window": 3, "causal": False}, "SRUpp: window is given and causal is False"),
    ({"window": 0}, "SRUpp: window is 0"),
    ({"memory": -1}, "SRUpp: memory is -1"),
    ({"projection": 0}, "SRUpp: projection is 0"),
    ({"h": 2.5}, "SRUpp: h is 2.5"),
    ({"cell_norm": "both"}, "SRUpp: cell_norm is 'both'; expected one of None, 'pre', 'post'"),
    ({"attention_dropout": -0.1}, "SRUpp: attention_dropout is -0.1"),
    ({"recurrent_dropout": 1.0}, "SRUpp: recurrent_dropout is 1.0"),
    ({"highway_bias": math.nan}, "SRUpp: highway_bias is nan"),
])
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        SRUpp(**{"d": D, "h": D, "projection": P, **settings})


X, C, MEM, REAL = np.zeros((B, L, D)), np.zeros((B, D)), np.zeros((B, M, D)), np.ones((B, M), bool)


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize(("x", "keywords", "error", "sentence"), [
    (X[:, 0], {}, ValueError, r"SRUpp: x has shape \(3, 6\); expected \(batch, length, 6\)"),
    (X, {"mask": np.ones((B, 6), bool)}, ValueError, r"SRUpp: mask has shape \(3, 6\); expected \(3, 7\)"),
    (X, {"state": C}, ValueError, r"SRUpp: state is ndarray; expected a tuple \(c, memory, memory_mask\)"),
    (X, {"state": (C, MEM)}, ValueError, "SRUpp: state is 2 entries"),
    (X, {"state": (C[:1], MEM, REAL)}, ValueError, r"SRUpp: state's c has shape \(1, 6\); expected \(3, 6\)"),
    (X, {"state": (C, MEM[:1], REAL[:1])}, ValueError, r"memory has shape \(1, 4, 6\); expected \(3, any, 6\)"),
    (X, {"state": (C, MEM[..., :5], REAL)}, ValueError, r"SRUpp: state's memory has shape \(3, 4, 5\)"),
    (X, {"state": (C, MEM[0], REAL)}, ValueError, r"SRUpp: state's memory has shape \(4, 6\)"),
    (X, {"state": (C, MEM, REAL[:, :2])}, ValueError, r"memory_mask has shape \(3, 2\); expected \(3, 4\)"),
    (X, {"state": (C, MEM, REAL.astype(float))}, TypeError, "SRUpp: state's memory_mask has dtype float64"),
    (X, {"state": (C, MEM, None)}, TypeError, "SRUpp: state's memory_mask"),
    (X, {"state": (C, None, REAL)}, TypeError, "SRUpp: state's memory is None; expected an array"),
    (X, {"state": (None, MEM, REAL)}, TypeError, "SRUpp: state's c is None; expected an array"),
    (X, {"state": (C, MEM.astype(int), REAL)}, TypeError, "SRUpp: state's memory has dtype int64"),
])
def test_bad_input(attention, x, keywords, error, sentence):
    with pytest.raises(error, match=sentence):
        layer_of(attention=attention).forward(x, **keywords)


@pytest.mark.parametrize(("state", "error", "sentence"), [
    (C, ValueError, "SRUpp: state is ndarray"),
    ((C, MEM), ValueError, "SRUpp: state is 2 entries"),
    ((None, MEM, REAL), TypeError, "SRUpp: state's c is None"),
    ((C, MEM[..., :5], REAL), ValueError, r"state's memory has shape \(3, 4, 5\)"),
])
def test_stepping_from_a_bad_state(state, error, sentence):
    with pytest.raises(error, match=sentence):
        layer_of().begin(state)


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize(("x", "error", "sentence"), [
    (X, ValueError, r"SRUpp: x has shape \(3, 7, 6\); expected \(batch, 6\)"),
    (X[:, 0, :5], ValueError, r"SRUpp: x has shape \(3, 5\)"),
    (X[:1, 0], ValueError, r"SRUpp: x has shape \(1, 6\); expected"),
])
def test_a_step_of_a_wrong_shape(attention, x, error, sentence):
    """Of another batch than the steps before, too: nothing is broadcast."""
    layer = layer_of(attention=attention)
    _, stepping = layer.step(X[:, 0])
    with pytest.raises(error, match=sentence):
        layer.step(x, stepping)
