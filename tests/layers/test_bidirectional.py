"""Bidirectional around unequal layers: each direction by hand, one shared cell, and torch's own bidirectional LSTM."""

import numpy as np
import pytest
from cases import B, L, mask_kinds
from helpers import assert_close, assert_identical, floats, grads
from oracles import pytorch

from minigrad import Parameter
from minigrad.layers import LSTM, RNN, RRALSTM, RWA, SRU, URNN, Bidirectional, Linear, SRUpp, Stack
from minigrad.layers.recurrent import Recurrent
from minigrad.tree import tree_map

D = 4


def srupp(h, seed, **settings):
    layer = SRUpp(D, h, 6, rng=seed, dtype="float64", **settings)
    layer.alpha.value[...] = 0.7
    return layer


def layers(name):
    """(forward layer, backward layer), of two widths and seeds."""
    common = {"dtype": "float64"}
    return {
        "LSTM, LSTM": lambda: (LSTM(D, 5, rng=1, **common), LSTM(D, 3, rng=2, **common)),
        "RRALSTM, LSTM": lambda: (RRALSTM(D, 5, 3, rng=1, **common), LSTM(D, 2, rng=2, **common)),
        "LSTM, RRALSTM": lambda: (LSTM(D, 2, rng=1, **common), RRALSTM(D, 5, 3, offset=1, rng=2, **common)),
        "SRU, SRU": lambda: (SRU(D, D, rng=1, **common), SRU(D, 3, 2, activation="tanh", rng=2, **common)),
        "SRUpp, RRALSTM": lambda: (srupp(5, 1), RRALSTM(D, 3, 2, rng=2, **common)),
        "LSTM, SRUpp": lambda: (LSTM(D, 3, rng=1, **common), srupp(D, 2, window=3, heads=2)),
        "SRUpp not causal, SRUpp": lambda: (srupp(5, 1, causal=False), srupp(D, 2, cell_norm="pre")),
        "RWA, LSTM": lambda: (RWA(D, 5, rng=1, **common), LSTM(D, 2, rng=2, **common)),
        "RNN, RWA": lambda: (RNN(D, 3, 2, rng=1, **common), RWA(D, 4, rng=2, **common)),
        "URNN, RNN": lambda: (URNN(D, 2, rng=1, **common), RNN(D, 3, 3, attention=True, rng=2, **common)),
        "SRU, Stack": lambda: (SRU(D, 5, rng=1, **common),
                               Stack(LSTM(D, 3, rng=2, **common), SRU(3, 3, rng=3, **common))),
        "Bidirectional, LSTM": lambda: (Bidirectional(SRU(D, 2, rng=1, **common), LSTM(D, 3, rng=2, **common)),
                                        LSTM(D, 4, rng=3, **common)),
    }[name]()


NAMES = ["LSTM, LSTM", "RRALSTM, LSTM", "LSTM, RRALSTM", "SRU, SRU", "SRUpp, RRALSTM", "LSTM, SRUpp",
         "SRUpp not causal, SRUpp", "RWA, LSTM", "RNN, RWA", "URNN, RNN", "SRU, Stack", "Bidirectional, LSTM"]
every_pair = pytest.mark.parametrize("name", NAMES)
every_mask = pytest.mark.parametrize("kind", [None, *mask_kinds()])


def mask_of(kind):
    return None if kind is None else mask_kinds()[kind]


def state_of(layer, seed=3):
    """A state of random numbers, its memories of three slots, two of them real."""
    rng = np.random.default_rng(seed)

    def fill(tree):
        if isinstance(tree, tuple):
            if len(tree) == 3 and tree[2].dtype == bool:
                memory = rng.standard_normal((B, 3, D))
                return rng.standard_normal(tree[0].shape), memory, np.tile([False, True, True], (B, 1))
            return tuple(map(fill, tree))
        return rng.standard_normal(tree.shape)
    return fill(layer.initial_state(B))


def draw_like(tree, seed):
    rng = np.random.default_rng(seed)
    return tree_map(lambda a: rng.standard_normal(a.shape) if a.dtype.kind == "f" else None, tree)


def x_of(seed=0):
    return np.random.default_rng(seed).standard_normal((B, L, D))


def row(tree, n):
    return tree_map(lambda a: a[n:n + 1], tree)


def newest(array, like):
    """As many of the newest slots as `like` has: a memory that grows also has empty ones where there is a mask."""
    return array if array.ndim < 3 else array[:, array.shape[1] - like.shape[1]:]


def shaped_as(dtree, tree):
    """A gradient of a state, its memories cut to the newest slots of `tree`."""
    if isinstance(tree, tuple):
        return tuple(shaped_as(d, a) for d, a in zip(dtree, tree))
    return None if dtree is None else newest(dtree, tree)


def assert_states(got, expected):
    assert_close([newest(a, b) for a, b in zip(floats(got), floats(expected))], floats(expected))


@every_mask
@pytest.mark.parametrize("given", [False, True], ids=["", "state"])
@every_pair
def test_it_equals_both_layers_by_hand(name, given, kind):
    """The backward layer reads each sample's real steps from the last one: one sample at a time, without any mask."""
    both, mask = Bidirectional(*layers(name)), mask_of(kind)
    x, state = x_of(), state_of(both) if given else None
    (y, after), cache = both.forward(x, state, mask)
    dy, dafter = draw_like((y, after), 7)
    dx, dstate0 = both.backward((dy, dafter), cache)
    got = grads(both)

    both.zero_grad()
    h = y.shape[2] - layers(name)[1].forward(x[:1])[0][0].shape[2]
    for n in range(B):
        steps = np.flatnonzero(np.ones(L, bool) if mask is None else mask[n])
        expected_dx = np.zeros((L, D))
        for number, (layer, order, part) in enumerate([
                (both.forward_layer, steps, slice(0, h)), (both.backward_layer, steps[::-1], slice(h, None))]):
            (y_n, after_n), cache_n = layer.forward(x[n:n + 1, order], None if state is None else row(state[number], n))
            assert_close(y[n, order, part], y_n[0])
            assert_states(row(after[number], n), after_n)
            dafter_n = shaped_as(row(dafter[number], n), after_n)
            dx_n, dstate0_n = layer.backward((dy[n:n + 1, order, part], dafter_n), cache_n)
            expected_dx[order] += dx_n[0]
            if given:
                assert_close(row(dstate0[number], n), dstate0_n)
        assert_close(dx[n], expected_dx)
    assert_close(got, grads(both), 1e-11)


def test_one_cell_for_both_directions_receives_the_sum():
    shared, x, mask = RRALSTM(D, 5, 3, rng=1, dtype="float64"), x_of(), mask_of("gaps")
    both = Bidirectional(shared, shared)
    assert len(both.parameters()) == len(shared.parameters())
    (y, after), cache = both.forward(x, None, mask)
    dy, dafter = draw_like((y, after), 7)
    dx, _ = both.backward((dy, dafter), cache)
    got = grads(shared)
    apart = Bidirectional(RRALSTM(D, 5, 3, rng=1, dtype="float64"), RRALSTM(D, 5, 3, rng=1, dtype="float64"))
    (y2, after2), cache = apart.forward(x, None, mask)
    assert_identical((y, after), (y2, after2))
    assert_identical(dx, apart.backward((dy, dafter), cache)[0])
    assert_close(got, [a + b for a, b in zip(grads(apart.forward_layer), grads(apart.backward_layer))])


def test_the_backward_layers_state_is_the_one_before_the_first_step():
    both, x = Bidirectional(*layers("LSTM, LSTM")), x_of()
    y, (state_f, state_b) = both(x)
    assert_identical((state_f[0], state_b[0]), (y[:, -1, :5], y[:, 0, 5:]))


def test_the_states_go_to_their_layers():
    both, x = Bidirectional(*layers("LSTM, LSTM")), x_of()
    y = both(x)[0]
    zero_f, zero_b = both.initial_state(B)
    other_f, other_b = (tree_map(lambda a: a + 1, state) for state in (zero_f, zero_b))
    changed = both(x, (other_f, zero_b))[0] != y
    assert changed[..., :5].all()
    assert not changed[..., 5:].any()
    changed = both(x, (zero_f, other_b))[0] != y
    assert changed[..., 5:].all()
    assert not changed[..., :5].any()


@pytest.mark.parametrize("missing", [(None, None), (None, 1), (0, None)], ids=str)
def test_either_state_and_either_gradient_may_be_missing(missing):
    both, x = Bidirectional(*layers("LSTM, RRALSTM")), x_of()
    zeros = both.initial_state(B)
    state = tuple(None if n is None else zeros[n] for n in missing)
    (y, after), cache = both.forward(x, state)
    assert_identical((y, after), both(x))
    dy, dafter = draw_like((y, after), 7)
    dafter = tuple(None if n is None else dafter[n] for n in missing)
    full = tuple(tree_map(np.zeros_like, after[n]) if d is None else d for n, d in enumerate(dafter))
    assert_identical(both.backward((dy, dafter), cache), both.backward((dy, full), cache))


class Drawing(Recurrent):
    """Draws one number a call, so that the order of the draws shows."""

    def __init__(self):
        self.w = Parameter(np.ones(1), "w")

    def forward(self, x, state=None, mask=None, rng=None):
        return (x * (1 if rng is None else rng.random()), ()), ()


def test_both_layers_draw_from_the_one_generator():
    x = x_of()
    y = Bidirectional(Drawing(), Drawing()).forward(x, rng=np.random.default_rng(0))[0][0]
    rng = np.random.default_rng(0)
    assert_close(y, np.concatenate([x * rng.random(), x * rng.random()], axis=2))


@pytest.mark.parametrize("kind", ["right padding", "left padding", "gaps", "all real"])
def test_it_equals_torchs_bidirectional_lstm(kind):
    """On packed sequences, which torch pads on the right: the masks' real steps moved to the left."""
    torch, mask = pytorch(), mask_of(kind)
    lengths = mask.sum(axis=1)
    both = Bidirectional(LSTM(D, 5, rng=1, dtype="float64"), LSTM(D, 5, rng=2, dtype="float64"))
    x = x_of()
    (y, after), cache = both.forward(x, None, mask)
    dy, dafter = draw_like((y, after), 7)
    dx, _ = both.backward((dy, dafter), cache)

    module = torch.nn.LSTM(D, 5, batch_first=True, bidirectional=True, dtype=torch.float64)
    with torch.no_grad():
        for suffix, layer in (("l0", both.forward_layer), ("l0_reverse", both.backward_layer)):
            for name, p in (("weight_ih", layer.W), ("weight_hh", layer.U), ("bias_ih", layer.b)):
                getattr(module, f"{name}_{suffix}").copy_(torch.tensor(swap_last_gates(p.value).T.copy()))
            getattr(module, f"bias_hh_{suffix}").zero_()
    left = np.zeros((B, L, D))
    for n in range(B):
        left[n, :lengths[n]] = x[n, mask[n]]
    tx = torch.tensor(left, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(tx, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    out, (th, tc) = module(packed)
    ty, _ = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=L)
    loss = sum((ty[n, :lengths[n]] * torch.tensor(dy[n, mask[n]])).sum() for n in range(B))
    for direction in range(2):
        loss = loss + sum((array[direction] * torch.tensor(d)).sum() for array, d in zip((th, tc), dafter[direction]))
    loss.backward()
    for n in range(B):
        assert_close((y[n, mask[n]], dx[n, mask[n]]),
                     (ty[n, :lengths[n]].detach().numpy(), tx.grad[n, :lengths[n]].numpy()), 1e-10)
    for direction in range(2):
        assert_close(after[direction], (th[direction].detach().numpy(), tc[direction].detach().numpy()), 1e-10)
    for suffix, layer in (("l0", both.forward_layer), ("l0_reverse", both.backward_layer)):
        expected = [getattr(module, f"{name}_{suffix}").grad.numpy() for name in ("weight_ih", "weight_hh", "bias_ih")]
        assert_close(grads(layer), [swap_last_gates(g.T) for g in expected], 1e-10)


def swap_last_gates(weights):
    """Columns i, f, o, g <-> torch's i, f, g, o."""
    i, f, a, b = np.split(weights, 4, axis=-1)
    return np.concatenate([i, f, b, a], axis=-1)


# ---- bad input -------------------------------------------------------------------------------------------

X = np.zeros((B, L, D))


def two():
    return Bidirectional(*layers("LSTM, LSTM"))


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: Bidirectional(Linear(4, 4), LSTM(4, 4)), "Bidirectional: forward_layer is a Linear; expected"),
    (lambda: Bidirectional(LSTM(4, 4), None), "Bidirectional: backward_layer is a NoneType; expected"),
])
def test_other_than_recurrent_layers_are_refused(make, sentence):
    with pytest.raises(TypeError, match=sentence):
        make()


def test_it_cannot_be_read_step_by_step():
    with pytest.raises(TypeError, match="Bidirectional: a sequence cannot be read step by step"):
        two().step(np.zeros((B, D)))


def test_layers_of_two_input_widths_are_refused_at_the_first_call():
    both = Bidirectional(LSTM(D, 5, dtype="float64"), LSTM(D + 1, 5, dtype="float64"))
    with pytest.raises(ValueError, match=r"LSTM: x has shape \(3, 7, 4\); expected \(batch, length, 5\)"):
        both.forward(X)
