"""The language model of models/srupp_lm.py: its size, its layers, steps, gradients, truncation, and that it learns."""

import numpy as np
import pytest
from cases import mask_kinds
from helpers import assert_close, assert_identical, grads
from oracles import gradient, pytorch, tensor, tensors, torch_srupp

from minigrad.layers import LSTM, SRU, SRUpp
from minigrad.losses import softmax_cross_entropy
from minigrad.optim import Adam
from minigrad.tree import tree_map
from models.srupp_lm import LAYERS, attention_places, build, count_parameters, width_for

VOCAB, D, B, L = 7, 8, 3, 7
every_layer = pytest.mark.parametrize("layer", LAYERS)


def model_of(layer, dtype="float64", **settings):
    """A small model with alpha and the output's bias off their start, its memory not detached."""
    model = build(layer, VOCAB, D, **{"layers": 2, "rng": 0, "dtype": dtype, **settings})
    for name, p in model.named_parameters():
        if name.endswith(("alpha", "output.b")):
            p.value += 0.5
    for inner in model.layers.layers:
        inner.detach_memory = False
    return model


def ids_of(length=L, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (B, length))


# ---- the size --------------------------------------------------------------------------------------------

@every_layer
@pytest.mark.parametrize("settings", [
    {}, {"layers": 1}, {"layers": 3, "projection": 5}, {"layers": 6, "attention_every": 2},
    {"layers": 5, "attention_every": 3}, {"layers": 4, "attention_last": 1},
    {"layers": 3, "projection": 6, "heads": 2, "window": 4, "dropout": 0.1}], ids=str)
@pytest.mark.parametrize(("vocab", "d"), [(50, 16), (256, 12)])
def test_the_count_is_the_number_of_parameters(layer, vocab, d, settings):
    model = build(layer, vocab, d, **settings, rng=0)
    assert count_parameters(layer, vocab, d, **settings) == sum(p.value.size for p in model.parameters())


@every_layer
@pytest.mark.parametrize("vocab", [50, 256])
@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("parameters", [100_000, 2_000_000])
def test_the_width_for_a_number_of_parameters(layer, parameters, layers, vocab):
    """Within 3 %, and no width of the next steps is nearer."""
    d = width_for(layer, parameters, vocab, layers=layers)
    off = [abs(count_parameters(layer, vocab, width, layers=layers) - parameters) for width in (d, d - 4, d + 4)]
    assert off[0] <= 0.03 * parameters
    assert off[0] == min(off)


@pytest.mark.parametrize(("ratio", "heads"), [(8, 1), (4, 2)])
def test_the_width_fits_ratio_and_heads(ratio, heads):
    d = width_for("srupp", 400_000, 205, layers=3, ratio=ratio, heads=heads)
    assert d % (ratio * heads) == 0
    build("srupp", 205, d, layers=3, projection=d // ratio, heads=heads, rng=0)


# ---- the layers ------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("settings", "places"), [
    ({"layers": 10, "every": 5}, [5, 10]), ({"layers": 10, "every": 10}, [10]), ({"layers": 10, "every": 11}, []),
    ({"layers": 4}, [1, 2, 3, 4]), ({"layers": 7, "every": 3}, [3, 6]), ({"layers": 5, "last": 2}, [4, 5]),
    ({"layers": 5, "last": 0}, []), ({"layers": 3, "last": 7}, [1, 2, 3]), ({"layers": 5, "every": 1, "last": 1}, [5])],
    ids=str)
def test_the_places_of_attention(settings, places):
    found = attention_places(**settings)
    assert len(found) == settings["layers"]
    assert [n for n, attends in enumerate(found, 1) if attends] == places
    if "every" not in settings or "last" not in settings:
        keywords = {f"attention_{name}": n for name, n in settings.items() if name != "layers"}
        model = build("srupp", VOCAB, D, layers=settings["layers"], **keywords, rng=0)
        assert [layer.attention for layer in model.layers.layers] == found


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"layers": 4, "every": 2, "last": 1}, "every is 2 and last is 1; expected one of the two"),
    ({"layers": 4, "every": 0}, "every is 0"), ({"layers": 0}, "layers is 0"),
    ({"layers": 4, "last": -1}, "last is -1")])
def test_bad_places_of_attention(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        attention_places(**settings)


@pytest.mark.parametrize(("layer", "kind"), [("sru", SRU), ("sru-proj", SRUpp), ("srupp", SRUpp), ("lstm", LSTM)])
def test_the_layers_of_each_variant(layer, kind):
    model = build(layer, VOCAB, 16, layers=3, highway_bias=-1.5, rng=0)
    assert [type(inner) for inner in model.layers.layers] == [kind] * 3
    if kind is SRUpp:
        assert all(inner.attention == (layer == "srupp") for inner in model.layers.layers)
        assert all(inner.norm is not None for inner in model.layers.layers)
        assert {inner.W_q.value.shape for inner in model.layers.layers} == {(16, 4)}
    if kind is not LSTM:
        assert all((inner.b_r.value == -1.5).all() for inner in model.layers.layers)


def test_the_recurrent_dropout_leaves_the_last_layer_out():
    for layer in ("sru", "sru-proj", "srupp"):
        model = build(layer, VOCAB, D, layers=3, dropout=0.2, rng=0)
        assert [inner.recurrent_dropout for inner in model.layers.layers] == [0.2, 0.2, 0.0]


def test_the_first_logits_are_small():
    """So that a fresh model's loss is about log(vocab): no symbol is favoured."""
    for layer in LAYERS:
        model = build(layer, 50, 64, layers=4, rng=0)
        ids = np.random.default_rng(0).integers(0, 50, (4, 40))
        loss, _ = softmax_cross_entropy.forward(model(ids)[0], np.roll(ids, 1))
        assert float(loss) == pytest.approx(np.log(50), rel=0.25)


# ---- steps, segments, masks ------------------------------------------------------------------------------

@every_layer
@pytest.mark.parametrize("settings", [{}, {"window": 3}, {"heads": 2, "attention_last": 1}], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["", "state"])
def test_step_by_step_equals_forward(layer, settings, given):
    model, ids = model_of(layer, layers=3, projection=4, **settings), ids_of(60)
    state = model(ids_of(5, seed=1))[1] if given else None
    logits, _ = model(ids, state)
    stepping = model.begin(state)
    for t in range(60):
        y, stepping = model.step(ids[:, t], stepping)
        assert_close(y, logits[:, t], 1e-11)


@every_layer
def test_stepping_after_a_prompt_with_a_mask(layer):
    """Prompts of different lengths in one batch: each goes on as if it were alone."""
    model, prompt, mask, ids = model_of(layer, window=4), ids_of(), mask_kinds()["left padding"], ids_of(10, seed=1)
    stepping = model.begin(model(prompt, mask=mask)[1])
    for t in range(10):
        y, stepping = model.step(ids[:, t], stepping)
    for n in range(B):
        whole = np.concatenate([prompt[n, mask[n]], ids[n]])[None]
        assert_close(y[n], model(whole)[0][0, -1], 1e-11)


@every_layer
def test_no_logit_sees_a_later_symbol(layer):
    model, ids = model_of(layer), ids_of(140)
    logits = model(ids)[0]
    for t in (1, 70, 128):
        other = ids.copy()
        other[:, t] = (other[:, t] + 1) % VOCAB
        assert_identical(model(other)[0][:, :t], logits[:, :t])


# ---- gradients -------------------------------------------------------------------------------------------


def loss_and_gradients(model, ids, targets, state=None):
    """(loss, the state after it, gradients added)."""
    (logits, state), cache = model.forward(ids, state)
    loss, loss_cache = softmax_cross_entropy.forward(logits, targets)
    model.backward((softmax_cross_entropy.backward(1.0, loss_cache), None), cache)
    return float(loss), state


@every_layer
def test_a_segments_gradients_end_at_its_first_step(layer):
    """Truncated: the same as of the segment alone, from a state of plain numbers."""
    model, text = model_of(layer, memory=4), ids_of(13)
    for inner in model.layers.layers:
        inner.detach_memory = True
    _, state = loss_and_gradients(model, text[:, :6], text[:, 1:7])
    first = grads(model)
    loss_and_gradients(model, text[:, 6:12], text[:, 7:], state)
    both = grads(model)
    model.zero_grad()
    loss_and_gradients(model, text[:, 6:12], text[:, 7:], tree_map(np.copy, state))
    assert_close(both, [a + b for a, b in zip(first, grads(model))])


def test_two_segments_equal_torch_with_a_detached_state():
    """Embedding, two layers of SRU++ and output in torch autograd, state and memory detached between the segments."""
    torch = pytorch()
    model = build("srupp", VOCAB, D, layers=2, projection=4, heads=2, memory=3, rng=0, dtype="float64")
    inner, text = model.layers.layers, ids_of(13)
    for n, p in enumerate(model.parameters()):
        p.value += 0.2 * np.random.default_rng(n).standard_normal(p.value.shape)
    state, ours = None, []
    for start in (0, 6):
        loss, state = loss_and_gradients(model, text[:, start:start + 6], text[:, start + 1:start + 7], state)
        ours.append(loss)

    weights, theirs = [tensors(layer) for layer in inner], []
    W, V, b = around = [tensor(p.value) for p in (model.embedding.W, model.output.W, model.output.b)]
    states = [(torch.zeros(B, D), torch.zeros(B, 0, D), np.ones((B, 0), bool))] * 2
    for start in (0, 6):
        y = W[torch.tensor(text[:, start:start + 6])]
        for n, layer in enumerate(inner):
            y, c, memory, memory_mask = torch_srupp(layer, weights[n], y, states[n], np.ones((B, 6), bool))
            states[n] = c.detach(), memory.detach(), memory_mask
        logits, targets = y @ V + b, torch.tensor(text[:, start + 1:start + 7])
        theirs.append(torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1)))
    sum(theirs).backward()
    assert_close(ours, [loss.item() for loss in theirs], 1e-10)
    got = [p.grad for p in (model.embedding.W, model.output.W, model.output.b)]
    assert_close(got, list(map(gradient, around)), 1e-10)
    for layer, leaves in zip(inner, weights):
        assert_close(grads(layer), [gradient(leaf) for leaf in leaves.values()], 1e-10)


@every_layer
def test_it_overfits_one_batch(layer):
    model = build(layer, 11, 24, layers=2, projection=8, rng=0)
    text = np.random.default_rng(0).integers(0, 11, (2, 25))
    optimizer, losses = Adam(model.parameters(), lr=0.02), []
    for _ in range(120):
        optimizer.zero_grad()
        losses.append(loss_and_gradients(model, text[:, :-1], text[:, 1:])[0])
        optimizer.step()
    assert losses[0] > 2
    assert losses[-1] < 0.05


# ---- bad input -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("settings", "sentence"), [
    ({"layer": "gru"}, "build: layer is 'gru'; expected one of 'sru', 'sru-proj', 'srupp', 'lstm'"),
    ({"layers": 0}, "layers is 0"),
    ({"projection": 5, "heads": 2}, "projection is 5"),
    ({"attention_every": 2, "attention_last": 1}, "every is 2 and last is 1"),
    ({"dropout": 1.0}, "p is 1.0|dropout is 1.0"),
    ({"d": 0}, "d is 0"),
    ({"d": 2}, "projection is 0"),
    ({"vocab": 0}, "vocab is 0"),
    ({"memory": -1}, "memory is -1"),
    ({"window": 0}, "window is 0"),
])
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(**{"layer": "srupp", "vocab": VOCAB, "d": D, **settings})


@pytest.mark.parametrize(("arguments", "error", "sentence"), [
    ((ids_of()[0],), ValueError, r"LanguageModel: ids has shape \(7,\); expected \(batch, length\)"),
    ((ids_of().astype(float),), TypeError, "ids has dtype float64; expected integers"),
    ((ids_of() + VOCAB,), ValueError, "ids run from"),
    ((ids_of(), None, np.ones((B, 6), bool)), ValueError, r"mask has shape \(3, 6\)"),
    ((ids_of(), (None,)), ValueError, r"Stack: state is 1 entries; expected a tuple \(layer 0, layer 1\)"),
    (([[1, 2]],), TypeError, "ids is a list"),
])
@pytest.mark.parametrize("layer", ["srupp", "lstm"])
def test_bad_input(layer, arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        model_of(layer).forward(*arguments)


@every_layer
def test_a_step_of_wrong_ids(layer):
    model = model_of(layer)
    for ids, error in ((np.array([VOCAB] * B), ValueError), (np.ones(B), TypeError), (ids_of(), ValueError)):
        with pytest.raises(error, match=r"ids|x has shape"):
            model.step(ids)


def test_heads_are_those_of_the_attention_alone():
    """The projected SRU has none: a comparison with --heads 2 may give it an odd d'."""
    model = build("sru-proj", 20, 28, projection=7, heads=2, layers=1, rng=0)
    assert model.layers.layers[0].W_q.value.shape == (28, 7)
    with pytest.raises(ValueError, match="projection is 7 and heads 2"):
        build("srupp", 20, 28, projection=7, heads=2, layers=1, rng=0)
