"""models/classifier.py and models/cells.py: what is read of the outputs, the classifiers, the cells by name."""

import numpy as np
import pytest
from cases import B, D, H, L, mask_kinds
from helpers import all_gradients, assert_close, assert_identical

from minigrad.gradcheck import gradcheck
from minigrad.layers import LSTM, RRALSTM, SRU, URNN, Bidirectional, Linear, Stack
from minigrad.losses import softmax_cross_entropy
from minigrad.optim import Adam
from models import classifier
from models.cells import BOTH_WAYS, CELLS, build_cell, label
from models.classifier import SequenceClassifier, TextClassifier, last_outputs, masked_mean

MASKS = {"no mask": None, **mask_kinds()}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def outputs(seed=0, h=H):
    return np.random.default_rng(seed).standard_normal((B, L, h))


def real_steps(mask, sample):
    return [t for t in range(L) if mask is None or mask[sample, t]]


# ---- what is read of the outputs -------------------------------------------------------------------------

@every_mask
def test_the_mean_is_that_of_a_plain_loop(mask):
    hs, expected = outputs(), np.zeros((B, H))
    for b in range(B):
        steps = real_steps(mask, b)
        for t in steps:
            expected[b] += hs[b, t] / len(steps)
    s, cache = masked_mean.forward(hs, mask)
    assert_close(s, expected)
    ds, dhs = outputs(1)[:, 0], np.zeros((B, L, H))
    for b in range(B):
        steps = real_steps(mask, b)
        for t in steps:
            dhs[b, t] = ds[b] / len(steps)
    assert_close(masked_mean.backward(ds, cache), dhs)


@every_mask
@pytest.mark.parametrize("from_left", [0, 2, H])
def test_the_ends_are_those_of_a_plain_loop(mask, from_left):
    hs, expected = outputs(), np.zeros((B, H))
    ds, dhs = outputs(1)[:, 0], np.zeros((B, L, H))
    for b in range(B):
        steps = real_steps(mask, b)
        for column in range(H):
            if steps:
                t = steps[-1] if column < from_left else steps[0]
                expected[b, column] = hs[b, t, column]
                dhs[b, t, column] = ds[b, column]
    s, cache = last_outputs.forward(hs, mask, from_left)
    assert_identical(s, expected)
    assert_identical(last_outputs.backward(ds, cache), dhs)


READINGS = {"mean": (masked_mean, ()), "ends": (last_outputs, (2,))}


@every_mask
@pytest.mark.parametrize(("reading", "more"), READINGS.values(), ids=READINGS)
def test_the_gradient_is_that_of_central_differences(reading, more, mask):
    hs, ds, eps = outputs(), outputs(1)[:, 0], 1e-5
    slopes = np.zeros_like(hs)
    for at in np.ndindex(*hs.shape):
        above, below = hs.copy(), hs.copy()
        above[at] += eps
        below[at] -= eps
        difference = reading.forward(above, mask, *more)[0] - reading.forward(below, mask, *more)[0]
        slopes[at] = (ds * difference).sum() / (2 * eps)
    assert_close(reading.backward(ds, reading.forward(hs, mask, *more)[1]), slopes, 1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@every_mask
@pytest.mark.parametrize(("reading", "more"), READINGS.values(), ids=READINGS)
def test_what_stands_at_a_padded_step_has_no_effect(reading, more, mask, dtype):
    hs = outputs().astype(dtype)
    dirty = hs.copy()
    if mask is not None:
        dirty[~mask] = np.nan
    before = dirty.copy()
    (s, cache), (clean, _) = reading.forward(dirty, mask, *more), reading.forward(hs, mask, *more)
    assert s.dtype == dtype
    assert_identical(s, clean)
    dhs = reading.backward(np.ones((B, H), dtype), cache)
    assert dhs.dtype == dtype
    assert np.isfinite(dhs).all()
    np.testing.assert_array_equal(dirty, before)


# ---- SequenceClassifier ----------------------------------------------------------------------------------

def both_ways(seed=0, left=3, right=2):
    rng = np.random.default_rng(seed)
    return Bidirectional(LSTM(D, left, rng=rng, dtype="float64"), SRU(D, right, rng=rng, dtype="float64"))


@every_mask
def test_last_reads_each_direction_at_its_own_end(mask):
    cell = both_ways()
    model = SequenceClassifier(cell, 5, 3, rng=0, dtype="float64")
    x = outputs(2, D)
    s, at_the_last = np.zeros((B, 5)), np.zeros((B, 5))
    for b in range(B):
        steps = real_steps(mask, b)
        if steps:                                                            # each sample alone, without its padding
            alone = x[b:b + 1, steps]
            (_, state), _ = cell.forward_layer.forward(alone)
            (turned, _), _ = cell.backward_layer.forward(alone[:, ::-1])
            s[b, :3], s[b, 3:] = state[0][0], turned[0, -1]
            (y, _), _ = cell.forward(alone)
            at_the_last[b] = y[0, -1]
            assert_close(at_the_last[b, :3], s[b, :3])
    W, b = model.readout.W.value, model.readout.b.value
    got = model(x, mask)
    assert_close(got, s @ W + b)
    if mask is None or mask.any():
        assert np.abs(got - (at_the_last @ W + b)).max() > 1e-3              # planted: both halves at the last step
    report = gradcheck(model, (x,), {"mask": mask}, mode="direction")
    assert report.ok, report


def test_a_bidirectional_cell_is_read_from_both_ends_by_default():
    assert both_ways(left=3, right=1).columns() == (3, 4)
    assert LSTM(D, 4).columns() == (4, 4)
    assert Stack(LSTM(D, D), both_ways(left=1, right=2)).columns() == (1, 3)


@pytest.mark.parametrize("name", CELLS)
def test_a_cells_columns_are_those_of_its_outputs(name):
    cell, width = build_cell(name, D, H, window=3, rng=0, dtype="float64")
    assert cell.columns() == (width, width)


@pytest.mark.parametrize("pooling", classifier.POOLINGS)
def test_a_sample_with_no_real_step_is_told_by_the_bias_alone(pooling):
    model = SequenceClassifier(RRALSTM(D, H, 2, rng=0, dtype="float64"), H, 3, pooling=pooling, rng=1, dtype="float64")
    model.readout.b.value[...] = [1, 2, 3]
    x = outputs(2, D)
    x[1] = np.nan
    mask = mask_kinds()["a sample with no real step"]
    logits, dx, gradients = all_gradients(model, x, {"mask": mask}, np.ones((B, 3)))
    assert_identical(logits[1], np.array([1.0, 2.0, 3.0]))
    assert not dx[1].any()
    assert all(np.isfinite(array).all() for array in (logits, dx, *gradients))


def test_dropout_of_what_is_read_only_in_training():
    make = lambda p: SequenceClassifier(
        LSTM(D, H, rng=0, dtype="float64"), H, 3, pooling="mean", dropout=p,
                                        rng=1, dtype="float64")
    model, without, x = make(0.5), make(0.0), outputs(2, D)
    assert_identical(model(x), without(x))
    assert_identical(without.forward(x, rng=np.random.default_rng(0))[0], without(x))
    s = masked_mean.forward(model.cell.forward(x)[0][0])[0]
    kept = (np.random.default_rng(3).random(s.shape) >= 0.5) * 2.0
    dropped = (kept * s) @ model.readout.W.value + model.readout.b.value
    assert_close(model.forward(x, rng=np.random.default_rng(3))[0], dropped)
    report = gradcheck(model, (x,), {"rng": 3}, mode="direction")
    assert report.ok, report


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: SequenceClassifier(Linear(D, H), H, 3), "SequenceClassifier: cell is a Linear; expected a recurrent la"),
    (lambda: SequenceClassifier(LSTM(D, H), H, 3, pooling="first"),
     "pooling is 'first'; expected one of 'mean', 'last'"),
    (lambda: SequenceClassifier(LSTM(D, H), H, 3, dropout=1.0), r"Dropout: p is 1.0; expected a number in \[0, 1\)"),
    (lambda: SequenceClassifier(LSTM(D, H), H, 0), "Linear: .* is 0; expected a whole number of at least 1"),
    (lambda: SequenceClassifier(LSTM(D, H), H, 3)(np.zeros((B, 0, D), "float32")), r"x has shape \(3, 0, 4\); expec"),
    (lambda: SequenceClassifier(LSTM(D, H), H, 3)(np.zeros((B, D), "float32")), r"x has shape \(3, 4\); expected \(b"),
    (lambda: SequenceClassifier(LSTM(D, H), H, 3)(np.zeros((B, L, 9), "float32")), r"LSTM: x has shape \(3, 7, 9\)"),
    (lambda: SequenceClassifier(LSTM(D, H), H, 3)(np.zeros((B, L, D), "float32"), np.ones((B, L))),
     "SequenceClassifier: mask has dtype float64; expected bool"),
    (lambda: SequenceClassifier(LSTM(D, H), H, 3)(np.zeros((B, L, D), "float32"), np.ones((B, 9), bool)),
     r"SequenceClassifier: mask has shape \(3, 9\); expected \(3, 7\)"),
    (lambda: SequenceClassifier(LSTM(D, H), 9, 3)(np.zeros((B, L, D), "float32")), r"Linear: x has shape \(3, 5\)"),
    (lambda: TextClassifier(6, D, LSTM(D, H), H)(np.zeros((B, L), "float32")), "Embedding: ids has dtype float32"),
    (lambda: TextClassifier(6, D, LSTM(D, H), H)(np.full((B, L), 6)), "Embedding: ids run from 6 to 6; expected 0 ..."),
    (lambda: TextClassifier(6, D, LSTM(D, H), H)(np.zeros((B, 0), int)), r"x has shape \(3, 0, 4\); expected \(batch")])
def test_bad_input(make, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence) as error:
        make()
    assert len(str(error.value).splitlines()) == 1


# ---- TextClassifier --------------------------------------------------------------------------------------

@every_mask
def test_a_text_classifier_is_a_classifier_of_the_words_vectors(mask):
    model = TextClassifier(6, D, RRALSTM(D, H, 2, rng=0, dtype="float64"), H, 3, rng=1, dtype="float64")
    ids = np.random.default_rng(0).integers(0, 6, (B, L))
    vectors = model.embedding.W.value[ids]
    assert_close(model(ids, mask), model.classifier(vectors, mask))
    if mask is not None:
        other = np.where(mask, ids, 10**6)                       # no word at all: it is never looked at
        assert_identical(model(other, mask), model(ids, mask))
    dlogits = outputs(1, 3)[:, 0]
    _, returned, gradients = all_gradients(model, ids, {"mask": mask}, dlogits)
    _, dx, _ = all_gradients(model.classifier, vectors, {"mask": mask}, dlogits)
    expected = np.zeros((6, D))
    for b in range(B):
        for t in real_steps(mask, b):
            expected[ids[b, t]] += dx[b, t]
    assert returned is None
    assert_close(gradients[0], expected)


# ---- the cells by name -----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [*CELLS, *BOTH_WAYS])
def test_every_cell_has_the_width_it_says(name):
    cell, width = build_cell(name, D, H, window=3, rng=0, dtype="float64")
    assert cell.recurrent
    (y, _), _ = cell.forward(outputs(0, D), mask=mask_kinds()["gaps"])
    assert y.shape == (B, L, width)
    assert y.dtype == "float64"
    assert width == H * (2 if "urnn" in name else 1) * (2 if name in BOTH_WAYS else 1)
    assert isinstance(cell, Bidirectional) == (name in BOTH_WAYS)
    again, _ = build_cell(name, D, H, window=3, rng=0, dtype="float64")
    assert_identical([p.value for p in cell.parameters()], [p.value for p in again.parameters()])


def parameters_of(name, **settings):
    return {key: p.value for key, p in build_cell(name, D, H, rng=5, **settings)[0].named_parameters()}


@pytest.mark.parametrize(("one", "other", "shared"), [
    ("rra", "lstm", "W U b"), ("rnn", "rnn-residual", "W U b"), ("rnn", "rnn-attention", "W U b")])
def test_the_weights_that_models_share_start_equal(one, other, shared):
    first, second = parameters_of(one), parameters_of(other)
    for key in shared.split():
        np.testing.assert_array_equal(first[key], second[key])


def test_the_two_directions_start_from_different_weights():
    first = parameters_of("birra")
    assert not np.array_equal(first["forward_layer.W"], first["backward_layer.W"])
    np.testing.assert_array_equal(first["forward_layer.W"], parameters_of("rra")["W"])


@pytest.mark.parametrize("name", ["rra", "birra"])
def test_the_settings_reach_the_cell(name):
    cell, _ = build_cell(name, D, H, window=4, offset=1, normalize="softmax", forget_bias=0.5, init="uniform", rng=0)
    for layer in [cell] if name == "rra" else [cell.forward_layer, cell.backward_layer]:
        assert (len(layer.w.value), layer.offset, layer.normalize) == (4, 1, "softmax")
        assert 0.5 in layer.b.value
    assert not np.array_equal(parameters_of("lstm", init="uniform")["U"], parameters_of("lstm")["U"])
    assert 0.5 in parameters_of("lstm", forget_bias=0.5)["b"]


def test_names_that_are_none():
    with pytest.raises(ValueError, match=r"build_cell: name is 'gru'; expected one of 'rra', 'lstm', .* 'bisru'"):
        build_cell("gru", D, H)
    with pytest.raises(ValueError, match="K is -1"):
        build_cell("rra", D, H, window=-1)
    with pytest.raises(ValueError, match="build_cell: name is 'bibirra'"):
        build_cell("bibirra", D, H)


def test_names_in_figures():
    assert [label(name, 5) for name in ("rra", "lstm", "birra", "birnn-attention", "rnn-residual", "urnn")] == [
        "RRA, K = 5", "LSTM", "bidirectional RRA, K = 5", "bidirectional attention RNN, k = 5", "residual RNN, k = 5",
        "uRNN"]


# ---- learning --------------------------------------------------------------------------------------------

def overfitted(model, x, mask, labels, lr, steps):
    """(first loss, last loss) of so many steps on one batch."""
    optimizer, losses = Adam(model.parameters(), lr=lr), []
    for _ in range(steps):
        logits, cache = model.forward(x, mask)
        loss, loss_cache = softmax_cross_entropy.forward(logits, labels)
        model.zero_grad()
        model.backward(softmax_cross_entropy.backward(1.0, loss_cache), cache)
        optimizer.step()
        losses.append(float(loss))
    return losses[0], losses[-1]


@pytest.mark.parametrize(("name", "pooling"), [("rra", "mean"), ("birra", "last")])
def test_one_batch_of_texts_is_overfitted(name, pooling):
    rng = np.random.default_rng(0)
    cell, width = build_cell(name, D, H, window=3, rng=rng)
    model = TextClassifier(12, D, cell, width, 2, pooling=pooling, rng=rng)
    ids, labels = rng.integers(0, 12, (6, L)), rng.integers(0, 2, 6)
    first, last = overfitted(model, ids, np.concatenate(list(mask_kinds().values())[:2]), labels, 0.05, 60)
    assert last < 0.02 < first


@pytest.mark.parametrize("name", ["urnn", "rwa", "irnn", "rnn-attention"])
def test_one_batch_of_sequences_is_overfitted(name):
    rng = np.random.default_rng(0)
    cell, width = build_cell(name, D, 8, window=3, rng=rng)
    model = SequenceClassifier(cell, width, 3, rng=rng)
    assert isinstance(cell, URNN) == (width == 16)
    x, labels = rng.standard_normal((6, L, D)).astype("float32"), rng.integers(0, 3, 6)
    first, last = overfitted(model, x, None, labels, 0.05, 80)
    assert last < 0.05 < first
