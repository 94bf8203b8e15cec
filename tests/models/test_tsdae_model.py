"""models/tsdae.py: gradients, PyTorch's, one row of memory, tied weights, no leak, padding, embeddings, files."""

import copy
import tracemalloc
import warnings

import numpy as np
import pytest
from helpers import assert_close, assert_identical, grads
from oracles import gradient, pytorch
from tsdae_oracle import Reference

from minigrad import Layer, gradcheck, memory
from minigrad.data.sentences import CLS, PAD, SEP, SPECIAL, UNK, WordVocabulary, padded
from minigrad.layers import LSTM
from minigrad.losses import softmax_cross_entropy
from minigrad.optim import Adam, AdamW
from minigrad.tensors import CheckpointError, load_tensors, save_tensors
from models.srupp_lm import LanguageModel
from models.tsdae import BEST, TSDAE, pool

VOCAB, D, HIDDEN, LENGTH, LAYERS = 11, 8, 12, 10, 2
DEAD = ("W_q", "b_q", "W_k", "b_k")
SETTINGS = {"d": D, "heads": 2, "d_hidden": HIDDEN, "layers": LAYERS, "length": LENGTH, "rng": 0, "dtype": "float64"}
SHARED = ("attention", "attention_norm", "feed_forward", "feed_forward_norm")
every_pooling = pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
every_norm = pytest.mark.parametrize("norm", ["pre", "post"])
every_activation = pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
tied_or_not = pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
every_head = pytest.mark.parametrize("heads", [1, 2, 4])


def off_their_start(layer, size=0.3):
    """No bias is 0 and no gain 1."""
    rng = np.random.default_rng(1)
    for p in layer.parameters():
        p.value += (size * rng.standard_normal(p.value.shape)).astype(p.value.dtype)
    return layer


def model_of(vocabulary=VOCAB, **settings):
    return off_their_start(TSDAE(vocabulary, **{**SETTINGS, **settings}))


def sentences_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [[CLS, *rng.integers(len(SPECIAL), VOCAB, n).tolist(), SEP] for n in lengths]


NOISY, CLEAN = sentences_of([2, 3, 1, 1]), sentences_of([5, 3, 1, 4], seed=1)
(NOISY_IDS, NOISY_MASK), (CLEAN_IDS, CLEAN_MASK) = BATCH = padded(NOISY), padded(CLEAN)
ARGUMENTS = NOISY_IDS, CLEAN_IDS, NOISY_MASK, CLEAN_MASK
N = sum(len(sentence) - 1 for sentence in CLEAN)
S = np.random.default_rng(2).standard_normal((4, D))


def loss_of(model, noisy, clean, noisy_mask=None, clean_mask=None, rng=None):
    """The loss, with the gradients of its own alone in the parameters."""
    logits, cache = model.forward(noisy, clean, noisy_mask, clean_mask, rng)
    loss, loss_cache = softmax_cross_entropy.forward(logits, model.targets(clean, clean_mask))
    model.zero_grad()
    model.backward(softmax_cross_entropy.backward(1.0, loss_cache), cache)
    return float(loss)


def one_line(error):
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


# ---- gradients -------------------------------------------------------------------------------------------

class F(Layer):
    """The model with its masks held fixed: the number of logits depends on them."""

    def __init__(self, model, noisy_mask, clean_mask):
        self.model, self.masks = model, (noisy_mask, clean_mask)

    def forward(self, noisy, clean, rng=None):
        return self.model.forward(noisy, clean, *self.masks, rng)

    def backward(self, dlogits, cache):
        return self.model.backward(dlogits, cache)



@pytest.mark.parametrize("settings", [
    {"pooling": "cls", "tie": True, "norm": "pre", "activation": "gelu_tanh", "layers": 2},
    {"pooling": "cls", "tie": False, "norm": "post", "activation": "gelu"},
    {"pooling": "mean", "tie": True, "norm": "post", "activation": "relu"},
    {"pooling": "max", "tie": True, "norm": "post", "activation": "gelu"},
    {"pooling": "max", "tie": False, "norm": "pre", "activation": "relu"}], ids=str)
def test_gradients_with_masks_and_dropout(settings):
    model = TSDAE(VOCAB, **{**SETTINGS, "layers": 1, "dropout": 0.2, "attention_dropout": 0.2, **settings})
    report = gradcheck(F(model, NOISY_MASK, CLEAN_MASK), ARGUMENTS[:2], {"rng": 5}, mode="direction")
    assert report.ok, report


@every_pooling
def test_pooling_takes_the_real_positions(pooling):
    h, mask = np.random.default_rng(0).standard_normal((3, 5, D)), np.arange(5) < np.array([[5], [2], [1]])
    s, _ = pool(h, mask, pooling)
    for row, real, got in zip(h, mask, s):
        assert_close(got, {"cls": row[0], "mean": row[real].mean(axis=0), "max": row[real].max(axis=0)}[pooling])
    assert_identical(pool(np.where(mask[:, :, None], h, 99.0), mask, pooling)[0], s)


# ---- against PyTorch -------------------------------------------------------------------------------------

@every_pooling
@tied_or_not
@every_norm
@every_activation
def test_loss_and_gradients_equal_torchs(pooling, tie, norm, activation):
    model = model_of(pooling=pooling, tie=tie, norm=norm, activation=activation)
    reference, loss = Reference(model), loss_of(model, *ARGUMENTS)
    expected = reference.loss(NOISY, CLEAN)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert set(reference.leaves) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.grad, gradient(reference.leaves[name]), rtol=1e-10, atol=1e-10, err_msg=name)


@every_head
def test_embedding_and_logits_equal_torchs(heads):
    model = model_of(heads=heads)
    reference = Reference(model)
    for source, s in zip(NOISY, model.encoder(NOISY_IDS, NOISY_MASK)):
        assert_close(s, reference.vector(source).detach().numpy())
    logits = [reference.logits(pytorch().tensor(s), sentence[:-1]).detach().numpy() for s, sentence in zip(S, CLEAN)]
    assert_close(model.decoder(CLEAN_IDS[:, :-1], S, CLEAN_MASK[:, 1:]), np.concatenate(logits))


@tied_or_not
def test_five_steps_of_adamw_equal_torchs(tie):
    torch, model = pytorch(), model_of(tie=tie, norm="post" if tie else "pre")
    reference, settings = Reference(model), {"lr": 0.01, "weight_decay": 0.1}
    ours = AdamW(model.parameters(), **settings)
    theirs = torch.optim.AdamW(reference.leaves.values(), **settings)
    losses, expected = [], []
    for step in range(5):
        noisy, clean = sentences_of([3, 1, 2], seed=step), sentences_of([6, 1, 4], seed=10 + step)
        losses.append(loss_of(model, *(part for pair in zip(padded(noisy), padded(clean)) for part in pair)))
        ours.step()
        loss = reference.loss(noisy, clean)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.value, reference.leaves[name].detach().numpy(), rtol=1e-8, atol=1e-8, err_msg=name)


# ---- one row of memory: exact facts ----------------------------------------------------------------------

def cross_of(model, fast=True):
    """The model's cross-attentions, computed the fast way or as the equation has it."""
    found = [layer.cross_attention for layer in model.decoder.layers]
    for cross in found:
        cross.one_row = fast
    return found


ROWS = np.random.default_rng(3).standard_normal((4, 6, D))


@every_head
@every_norm
def test_the_fast_way_equals_the_general_one(norm, heads):
    losses, found = [], []
    for fast in (True, False):
        model = model_of(heads=heads, norm=norm)
        cross_of(model, fast)
        losses.append(loss_of(model, *ARGUMENTS))
        found.append(grads(model))
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)
    assert_close(*found, 1e-13)


@every_norm
def test_what_has_no_gradient_is_the_cross_attentions_queries_and_keys(norm):
    """And, with the norm in front of them, the norm that nothing else reads."""
    model = model_of(norm=norm)
    loss_of(model, *ARGUMENTS)
    names, gains = {id(p): name for name, p in model.named_parameters()}, ("norm.gain", "norm.bias")
    dead = {f"decoder.layers.{n}.cross_attention.{name}" for n in range(LAYERS) for name in DEAD}
    with_norms = dead | {f"decoder.layers.{n}.cross_attention_{name}" for n in range(LAYERS) for name in gains}
    zero = {name for name, p in model.named_parameters() if not p.grad.any()}
    assert zero == (with_norms if norm == "pre" else dead)
    assert dead <= {names[id(p)] for p in model.unused_parameters()} <= zero


@pytest.mark.parametrize("spared", [True, False], ids=["no_decay", "all decay"])
def test_unused_weights_stay_bit_for_bit_where_they_are_not_decayed(spared):
    model = model_of()
    before = {name: p.value.copy() for name, p in model.named_parameters()}
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1,
                      no_decay=model.unused_parameters() if spared else ())
    for _ in range(3):
        loss_of(model, *ARGUMENTS)
        optimizer.step()
    unused = {id(p) for p in model.unused_parameters()}
    for name, p in model.named_parameters():
        assert (p.value == before[name]).all() == (spared and id(p) in unused), name


def test_the_weight_of_the_one_row_is_never_dropped():
    """Dropped, it would be 0 or more than 1 at each position and head."""
    model = model_of(attention_dropout=0.5)
    assert [cross.dropout for cross in cross_of(model)] == [0.0] * LAYERS
    y, _ = cross_of(model)[0].forward(ROWS, S[:, None], rng=np.random.default_rng(0))
    assert_identical(y, np.repeat(y[:, :1], 6, axis=1))
    assert (model(*ARGUMENTS, rng=np.random.default_rng(0)) != model(*ARGUMENTS)).any()


# ---- tied weights ----------------------------------------------------------------------------------------

def untied_like(tied):
    """An untied model with the values of a tied one."""
    untied, values = TSDAE(VOCAB, **{**tied.settings, "tie": False}, rng=1, dtype="float64"), Reference(tied)
    for name, p in untied.named_parameters():
        p.value[...] = values[name].detach().numpy()
    return untied


def test_tying_is_by_identity():
    model = model_of()
    assert model.decoder.words is model.encoder.words
    for ours, theirs in zip(model.decoder.layers, model.encoder.layers, strict=True):
        for part in SHARED:
            assert getattr(ours, part) is getattr(theirs, part)
    named = dict(model.named_parameters())
    assert len({id(p) for p in named.values()}) == len(named) == len(model.parameters())
    inner = {id(p) for p in model.encoder.parameters()}
    own = {name for name, p in model.decoder.named_parameters() if id(p) not in inner}
    assert {name.split(".")[2 if name.startswith("layers") else 0] for name in own} == {
        "cross_attention", "cross_attention_norm", "transform", "transform_norm", "b_v"}
    assert set(named) == {f"encoder.{name}" for name, _ in model.encoder.named_parameters()} | {
        f"decoder.{name}" for name in own}


@pytest.mark.parametrize("layers", [1, 3])
@tied_or_not
def test_the_number_of_parameters(tie, layers):
    model = model_of(tie=tie, layers=layers)
    words = VOCAB * D + LENGTH * D + 2 * D
    attention = 4 * (D * D + D) + 2 * D
    feed_forward = D * HIDDEN + HIDDEN + HIDDEN * D + D + 2 * D
    both = words + layers * (attention + feed_forward)
    alone = layers * attention + D * D + D + 2 * D + VOCAB
    assert sum(p.value.size for p in model.parameters()) == (both if tie else 2 * both) + alone


@every_norm
def test_the_gradient_of_tied_weights_is_the_sum_of_their_uses(norm):
    tied = model_of(norm=norm)
    untied = untied_like(tied)
    assert loss_of(tied, *ARGUMENTS) == pytest.approx(loss_of(untied, *ARGUMENTS), rel=1e-14)
    theirs = {name: p.grad for name, p in untied.named_parameters()}
    for name, p in tied.named_parameters():
        uses = [theirs[name]] + [theirs[name.replace("encoder.", "decoder.")]] * name.startswith("encoder.")
        assert_close(p.grad, sum(uses))
        assert len(uses) == 1 or (uses[0] != uses[1]).any()
    assert sum(name.startswith("encoder.") for name in theirs) == 4 + 16 * LAYERS


class TwoTables(Layer):
    """Words whose embedding at the output is another Parameter than that at the input, with the same values."""

    def __init__(self, words):
        self.input, self.embedding = words, copy.deepcopy(words.embedding)
        self.norm, self.norm_first = words.norm, words.norm_first
        self.forward, self.backward = words.forward, words.backward


@every_norm
def test_the_embeddings_gradient_is_the_sum_of_three_uses(norm):
    tied = model_of(norm=norm)
    untied = untied_like(tied)
    untied.decoder.words = TwoTables(untied.decoder.words)
    assert loss_of(tied, *ARGUMENTS) == pytest.approx(loss_of(untied, *ARGUMENTS), rel=1e-14)
    three = [untied.encoder.words.embedding.W.grad, untied.decoder.words.input.embedding.W.grad,
             untied.decoder.words.embedding.W.grad]
    assert len({id(array) for array in three}) == 3
    assert all(np.abs(array).max() > 1e-3 for array in three)
    assert not three[0][PAD].any()                               # a padded place reads no row; the output knows all
    assert not three[1][PAD].any()
    assert three[2].all()
    assert_close(tied.encoder.words.embedding.W.grad, sum(three))


def test_a_step_moves_a_tied_weight_once():
    model = model_of()
    loss_of(model, *ARGUMENTS)
    W = model.encoder.words.embedding.W
    before, direction = W.value.copy(), np.sign(W.grad)
    Adam([*model.encoder.parameters(), *model.decoder.parameters()], lr=0.01).step()
    assert_close(before - model.decoder.words.embedding.W.value, 0.01 * direction, 1e-4)


# ---- no leaks --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("t", [1, 3, 5])
@every_norm
def test_a_logit_sees_no_later_word(norm, t):
    decoder, ids = model_of(norm=norm).decoder, np.random.default_rng(0).integers(0, VOCAB, (4, 7))
    other = ids.copy()
    other[:, t:] = (ids[:, t:] + 1 + np.arange(7 - t)) % VOCAB
    logits, changed = (decoder(array, S).reshape(4, 7, VOCAB) for array in (ids, other))
    assert_identical(changed[:, :t], logits[:, :t])
    assert (changed[:, t:] != logits[:, t:]).all()


def test_the_words_that_are_predicted_are_not_seen(monkeypatch):
    """forward: with s held fixed, the logits of the words before a changed one stay, and so does its own."""
    model = model_of()
    monkeypatch.setattr(model.encoder, "forward", lambda *_: (S, None))
    for t in range(1, CLEAN_IDS.shape[1]):
        other = CLEAN_IDS.copy()
        other[0, t] = 5 if other[0, t] != 5 else 6
        before, after = (model(NOISY_IDS, ids, NOISY_MASK)[0] for ids in (CLEAN_IDS, other))
        assert_identical(after[:t], before[:t])
        assert (after[t:] != before[t:]).all()


def test_of_the_noisy_sentence_the_decoder_sees_s_alone(monkeypatch):
    model, other = model_of(), (NOISY_IDS[::-1].copy(), NOISY_MASK[::-1].copy())
    clean = CLEAN_IDS, CLEAN_MASK
    logits, changed = (model(ids, clean[0], mask, clean[1]) for ids, mask in ((NOISY_IDS, NOISY_MASK), other))
    assert (logits != changed).any(axis=1).sum() > N / 2
    monkeypatch.setattr(model.encoder, "forward", lambda *_: (S, None))
    logits, changed = (model(ids, clean[0], mask, clean[1]) for ids, mask in ((NOISY_IDS, NOISY_MASK), other))
    assert_identical(changed, logits)


def test_the_encoders_gradient_comes_through_s_alone():
    """Untied: what the encoder's parameters get is its own backward of the decoder's ds."""
    model = model_of(tie=False)
    loss_of(model, *ARGUMENTS)
    expected = grads(model.encoder)
    s, cache = model.encoder.forward(NOISY_IDS, NOISY_MASK)
    logits, decoder_cache = model.decoder.forward(CLEAN_IDS[:, :-1], s, CLEAN_MASK[:, 1:])
    _, loss_cache = softmax_cross_entropy.forward(logits, model.targets(CLEAN_IDS, CLEAN_MASK))
    model.zero_grad()
    dlogits = softmax_cross_entropy.backward(1.0, loss_cache)
    model.encoder.backward(model.decoder.backward(dlogits, decoder_cache), cache)
    assert_close(grads(model.encoder), expected)
    assert all(array.any() for array in expected)


# ---- padding ---------------------------------------------------------------------------------------------

def test_a_batch_is_its_sentences_one_by_one():
    """The loss is one mean over all their words, not a mean of means."""
    model = model_of()
    total, sums = 0, [np.zeros_like(p.value) for p in model.parameters()]
    for source, target in zip(NOISY, CLEAN):
        words = len(target) - 1
        total += words * loss_of(model, np.array([source]), np.array([target]))
        sums = [a + words * b for a, b in zip(sums, grads(model))]
    assert loss_of(model, *ARGUMENTS) == pytest.approx(total / N, rel=1e-13)
    assert_close(grads(model), [a / N for a in sums])


def test_logits_are_made_of_real_targets_only():
    model = model_of()
    targets = model.targets(CLEAN_IDS, CLEAN_MASK)
    assert targets.tolist() == [word for sentence in CLEAN for word in sentence[1:]]
    assert model(*ARGUMENTS).shape == (len(targets), VOCAB) == (N, VOCAB)
    assert CLEAN_MASK[:, 1:].sum() == N < CLEAN_IDS[:, 1:].size
    everywhere = model(NOISY_IDS, CLEAN_IDS)
    assert everywhere.shape == (*CLEAN_IDS[:, 1:].shape, VOCAB)
    assert model.targets(CLEAN_IDS).shape == CLEAN_IDS[:, 1:].shape
    picked = model(NOISY_IDS, CLEAN_IDS, NOISY_MASK)[CLEAN_MASK[:, 1:]]
    assert_close(picked, model(*ARGUMENTS))


@every_norm
def test_where_a_word_is_predicted_changes_no_logit(norm):
    """Gaps, a beginning or an end left out, and a sentence of which nothing is predicted."""
    decoder, ids = model_of(norm=norm).decoder, np.random.default_rng(0).integers(0, VOCAB, (4, 7))
    everywhere = decoder(ids, S).reshape(4, 7, VOCAB)
    predicted = np.array([[0, 1, 0, 0, 1, 0, 0], [1] * 7, [0] * 7, [0, 0, 0, 0, 0, 0, 1]], bool)
    for mask in (predicted, predicted[::-1].copy(), np.zeros((4, 7), bool)):
        assert_close(decoder(ids, S, mask), everywhere[mask])


# ---- embeddings ------------------------------------------------------------------------------------------

TEXTS = ["a man plays a guitar .", "two dogs run", "the cat sleeps on the mat", "a woman reads",
         "rain falls on the old roof", "children play with a ball", "he eats bread", "birds sing ."]
WORDS = WordVocabulary.of(TEXTS, 60)


def text_model(dtype="float32", **settings):
    return model_of(WORDS, dtype=dtype, d=16, heads=4, **settings)


@every_pooling
def test_an_embedding_does_not_depend_on_its_batch(pooling):
    model = text_model(pooling=pooling)
    vectors = model.encode(TEXTS)
    assert (vectors.shape, vectors.dtype) == ((8, 16), np.float32)
    for n, text in enumerate(TEXTS):
        assert_close(model.encode([text])[0], vectors[n], 1e-5)
    for batch_size in (1, 3, 8, 100):
        assert_close(model.encode(TEXTS, batch_size), vectors, 1e-5)
    assert_close(model.encode(TEXTS[::-1]), vectors[::-1], 1e-5)
    order = np.random.default_rng(0).integers(0, 8, 150)         # more than a batch, and the same ones again
    assert_close(model.encode([TEXTS[n] for n in order]), vectors[order], 1e-5)
    assert np.abs(vectors - vectors[:1]).max(axis=1)[1:].min() > 1e-2


def test_encode_is_the_encoder_between_cls_and_sep():
    model = text_model("float64")
    ids = np.array([[CLS, *WORDS.encode("two cats run"), SEP]])
    assert UNK in ids
    vectors = model.encode(["two cats run"])
    assert vectors.dtype == np.float32
    assert_close(vectors, model.encoder(ids).astype("float32"), 1e-6)
    assert_identical(model.encode(("Two CATS  run",)), vectors)
    assert_identical(model.encode(text for text in ["two cats run"]), vectors)
    assert model.encode([]).shape == (0, 16)


def test_a_sentence_of_any_length_and_one_warning_for_all_that_were_cut():
    model = text_model()
    most = LENGTH - 2
    exact, long, longer = " ".join(["dogs"] * most), " ".join(["dogs"] * 9), " ".join(["dogs"] * 500)
    with pytest.warns(UserWarning, match=r"2 of 4 sentences have more than 8 words, .* beyond was cut off") as seen:
        vectors = model.encode([longer, "two dogs", exact, long])
    assert [warning.filename for warning in seen] == [__file__]
    assert_close(vectors[[0, 3]], vectors[[2, 2]], 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(model.encode([exact, "two dogs"]), vectors[[2, 1]], 1e-5)


@pytest.mark.parametrize(("sentences", "error", "sentence"), [
    (["a man", "two dogs", " \t"], ValueError, r"TSDAE: sentence 3 has no word \(' \\t'\); expected at least one"),
    (["", "a"], ValueError, r"TSDAE: sentence 1 has no word \(''\)"),
    ("a man plays", TypeError, "TSDAE: sentences is a str; expected a list of them")])
def test_what_cannot_be_encoded_is_named(sentences, error, sentence):
    with pytest.raises(error, match=sentence) as caught:
        text_model().encode(sentences)
    one_line(caught)


def test_a_model_without_a_vocabulary_encodes_ids_alone():
    model = model_of()
    assert model.encoder(NOISY_IDS, NOISY_MASK).shape == (4, D)
    with pytest.raises(ValueError, match="TSDAE: this model was made without a vocabulary; expected a Word") as caught:
        model.encode(["a man"])
    one_line(caught)


# ---- learning --------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def learned():
    """A model that has learned eight sentences by heart, and the last loss."""
    model = TSDAE(WORDS, d=32, heads=2, d_hidden=48, layers=1, length=9, rng=0)
    optimizer = Adam(model.parameters(), lr=0.01)
    ids, mask = padded(model.ids_of(TEXTS))
    for _ in range(80):
        loss = loss_of(model, ids, ids, mask, mask)
        optimizer.step()
    return model, loss, (ids, mask)


def test_it_overfits_one_batch(learned):
    assert learned[1] < 0.1


def test_what_was_learned_is_given_back(learned):
    model, _, _ = learned
    vectors = model.encode(TEXTS)
    assert model.reconstruct(vectors) == TEXTS
    assert model.reconstruct(vectors[[3, 0]]) == [TEXTS[3], TEXTS[0]]
    assert model.reconstruct(vectors.tolist(), words=2) == [" ".join(text.split()[:2]) for text in TEXTS]
    assert model.reconstruct(vectors[:0]) == []


def test_the_decoder_uses_s(learned):
    model, _, (ids, mask) = learned
    s, clean = model.encoder(ids, mask), np.where(mask, ids, PAD)

    def loss_with(s):
        logits = model.decoder(clean[:, :-1], s, mask[:, 1:])
        return float(softmax_cross_entropy.forward(logits, model.targets(ids, mask))[0])
    assert loss_with(s) < 0.1
    assert loss_with(np.roll(s, 1, axis=0)) > loss_with(s) + 1


# ---- files -----------------------------------------------------------------------------------------------

@tied_or_not
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_saved_model_comes_back_bit_for_bit(tmp_path, tie, dtype):
    model = text_model(dtype, tie=tie, pooling="mean", norm="post", activation="relu", dropout=0.1)
    model.save(tmp_path / BEST)
    for path in (tmp_path / BEST, str(tmp_path / BEST), tmp_path):
        again = TSDAE.load(path)
        assert again.settings == model.settings
        assert again.vocabulary.words == WORDS.words
        assert [name for name, _ in again.named_parameters()] == [name for name, _ in model.named_parameters()]
        for p, q in zip(again.parameters(), model.parameters()):
            assert p.value.dtype == q.value.dtype == dtype
            np.testing.assert_array_equal(p.value, q.value)
        assert_identical(again.encode(TEXTS), model.encode(TEXTS))
        assert (again.decoder.words is again.encoder.words) == tie
    assert [path.name for path in tmp_path.iterdir()] == [BEST]


def test_what_training_adds_to_a_checkpoint_is_left_out(tmp_path):
    model = text_model()
    model.save(tmp_path / "a.safetensors")
    tensors, meta = load_tensors(tmp_path / "a.safetensors")
    tensors |= {"optimizer.m.0": np.ones(3), "trainer.total": np.ones(1)}
    save_tensors(tmp_path / "b.safetensors", tensors, {**meta, "step": 7, "config": {**meta["config"], "lr": 0.1}})
    assert_identical(TSDAE.load(tmp_path / "b.safetensors").encode(TEXTS), model.encode(TEXTS))


def changed(tmp_path, change):
    """The path of a saved model whose tensors and settings were changed."""
    text_model().save(tmp_path / "a.safetensors")
    tensors, meta = load_tensors(tmp_path / "a.safetensors")
    change(tensors, meta["config"]["model"])
    save_tensors(tmp_path / "a.safetensors", tensors, meta)
    return tmp_path / "a.safetensors"


NORM = "decoder.layers.1.cross_attention_norm.gain"


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda tensors, model: tensors.pop(NORM), f"{NORM} is missing"),
    (lambda tensors, model: tensors.pop("decoder.b_v"), "not one of tasks/tsdae.py, or damaged .'decoder.b_v' is miss"),
    (lambda tensors, model: tensors.update(more=np.ones(2)), "more is not known to this model"),
    (lambda tensors, model: tensors.update({NORM: np.ones(15, "float32")}), rf"{NORM} is float32 \(15,\); this model"),
    (lambda tensors, model: tensors.update({NORM: np.ones(16)}), f"{NORM} is float64"),
    (lambda tensors, model: tensors.update({"decoder.b_v": np.ones(len(WORDS), int)}), "not one of tasks/tsdae.py"),
    (lambda tensors, model: model.update(d=20), r"encoder.words.embedding.W is float32 \(\d+, 16\); this model has"),
    (lambda tensors, model: model.update(heads=3), "not one of tasks/tsdae.py, or damaged .*heads 3"),
    (lambda tensors, model: model.update(layers=3), r"encoder.layers.2.attention.W_q is missing"),
    (lambda tensors, model: model.update(layers=1), r"decoder.layers.1.cross_attention.W_k is not known to this model"),
    (lambda tensors, model: model.update(tie=False), r"decoder.words.embedding.W is missing"),
    (lambda tensors, model: model.update(pooling="sum"), "not one of tasks/tsdae.py, or damaged .*pooling is 'sum'"),
    (lambda tensors, model: model.update(colour="red"), "not one of tasks/tsdae.py, or damaged .*'colour'"),
    (lambda tensors, model: model.pop("words"), "not one of tasks/tsdae.py, or damaged .'words' is missing"),
    (lambda tensors, model: model.update(words=["a", "b"]), "not one of tasks/tsdae.py, or damaged .*words begin with"),
    (lambda tensors, model: model["words"].pop(), r"encoder.words.embedding.W is float32"),
    (lambda tensors, model: model.update(buckets=3), r"encoder.words.embedding.W is float32"),
    (lambda tensors, model: model.update(buckets="3"), "not one of tasks/tsdae.py, or damaged .*buckets is '3'"),
    (lambda tensors, model: model.update(words=None), "not one of tasks/tsdae.py"),
    (lambda tensors, model: model.update(length=[3]), "not one of tasks/tsdae.py"),
])
def test_a_checkpoint_that_does_not_fit_is_one_line(tmp_path, change, sentence):
    with pytest.raises(CheckpointError, match=f"a.safetensors: {sentence}") as error:
        TSDAE.load(changed(tmp_path, change))
    one_line(error)


@pytest.mark.parametrize("meta", [
    {}, {"config": {"layer": "srupp", "d": 8}}, {"config": {"model": "srupp"}}, {"config": {"model": {"d": 8}}},
    {"config": None}, [1, 2], None, {"config": {"model": [["words", 3]]}}], ids=str)
def test_a_checkpoint_of_another_task_is_one_line(tmp_path, meta):
    rng, path = np.random.default_rng(0), tmp_path / "a.safetensors"
    other = LanguageModel(6, 4, [LSTM(4, 4, rng=rng)], rng=rng)
    save_tensors(path, {name: p.value for name, p in other.named_parameters()}, meta)
    with pytest.raises(CheckpointError, match=r"a.safetensors: not one of tasks/tsdae.py, or damaged \(") as error:
        TSDAE.load(path)
    one_line(error)


@pytest.mark.parametrize("change", [
    lambda data: data[:-9], lambda data: data[:40], lambda data: b"", lambda data: b"garbage" * 99,
    lambda data: data[:60] + b"\xff\xff" + data[62:]], ids=["end", "beginning", "empty", "garbage", "header"])
def test_a_damaged_file_is_one_line(tmp_path, change):
    path = tmp_path / "a.safetensors"
    text_model().save(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"a.safetensors") as error:
        TSDAE.load(path)
    one_line(error)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such file"):
        TSDAE.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match=f"{BEST}: there is no such file"):
        TSDAE.load(tmp_path)


# ---- dtypes, memory, bad input ---------------------------------------------------------------------------

def test_the_loss_keeps_to_one_array_of_the_logits_size_each_way():
    logits = np.random.default_rng(0).standard_normal((512, 4096)).astype("float32")
    targets = np.random.default_rng(1).integers(0, 4096, 512)

    def arrays_at_most(f):
        memory.release_idle_memory()
        tracemalloc.start()
        try:
            before, answer = tracemalloc.get_traced_memory()[0], f()
            return (tracemalloc.get_traced_memory()[1] - before) / logits.nbytes, answer
        finally:
            tracemalloc.stop()
    for mask in (None, targets % 3 > 0):
        forward, (_, cache) = arrays_at_most(lambda mask=mask: softmax_cross_entropy.forward(logits, targets, mask))
        backward, dlogits = arrays_at_most(lambda cache=cache: softmax_cross_entropy.backward(1.0, cache))
        assert dlogits.nbytes == logits.nbytes
        assert 1 <= forward < 1.3
        assert 1 <= backward < 1.3


def test_loss_and_gradients_do_not_depend_on_the_blocks_of_the_cache(monkeypatch):
    found = []
    for block in (100, 10**6):
        monkeypatch.setattr(memory, "CACHE_BLOCK", block)
        model = model_of()
        found.append((np.array(loss_of(model, *ARGUMENTS)), *grads(model)))
    assert_close(*found, 1e-13)


MODEL = model_of()


@pytest.mark.parametrize(("call", "error", "sentence"), [
    (lambda: MODEL(NOISY_IDS[0], CLEAN_IDS), ValueError, r"TSDAE: noisy has shape \(5,\); expected \(batch, length\)"),
    (lambda: MODEL(NOISY_IDS[:, :0], CLEAN_IDS), ValueError, r"TSDAE: noisy has shape \(4, 0\)"),
    (lambda: MODEL(NOISY_IDS, CLEAN_IDS[..., None]), ValueError, r"TSDAE: clean has shape \(4, 7, 1\)"),
    (lambda: MODEL(NOISY_IDS[:3], CLEAN_IDS), ValueError, r"noisy has shape \(3, 5\) and clean \(4, 7\); expected"),
    (lambda: MODEL(NOISY_IDS, CLEAN_IDS[:, :1]), ValueError, "clean ones of at least two positions"),
    (lambda: MODEL(NOISY_IDS + VOCAB, CLEAN_IDS), ValueError, "ids run from 11 to .*; expected 0 ... 10"),
    (lambda: MODEL(NOISY_IDS - 1, CLEAN_IDS), ValueError, "ids run from -1 to"),
    (lambda: MODEL(NOISY_IDS, CLEAN_IDS + VOCAB), ValueError, "ids run from 11 to"),
    (lambda: MODEL(NOISY_IDS * 1.0, CLEAN_IDS), TypeError, "ids has dtype float64; expected integers"),
    (lambda: MODEL(NOISY_IDS, CLEAN_IDS * 1.0), TypeError, "ids has dtype float64; expected integers"),
    (lambda: MODEL(NOISY, CLEAN_IDS), TypeError, "noisy is a list"),
    (lambda: MODEL(NOISY_IDS, CLEAN_IDS, NOISY_MASK * 1), TypeError, "TSDAE: noisy_mask has dtype int64; expected"),
    (lambda: MODEL(NOISY_IDS, CLEAN_IDS, NOISY_MASK, CLEAN_MASK[:, 1:]), ValueError, r"clean_mask has shape \(4, 6\)"),
    (lambda: MODEL(np.ones((4, 11), int), CLEAN_IDS), ValueError, r"expected at most 10 positions"),
    (lambda: MODEL(NOISY_IDS, np.ones((4, 12), int)), ValueError, r"expected at most 10 positions"),
    (lambda: MODEL.encoder(NOISY_IDS, NOISY_MASK[:1]), ValueError, r"Encoder: mask has shape \(1, 5\); expected"),
    (lambda: MODEL.encoder(NOISY_IDS[0]), ValueError, r"Encoder: ids has shape \(5,\)"),
    (lambda: MODEL.decoder(CLEAN_IDS, S[:, 1:]), ValueError, r"Decoder: s has shape \(4, 7\); expected \(batch, 8\)"),
    (lambda: MODEL.decoder(CLEAN_IDS, S[0]), ValueError, r"Decoder: s has shape \(8,\)"),
    (lambda: MODEL.decoder(CLEAN_IDS, S[:3]), ValueError, r"memory has shape \(3, 1, 8\); expected a batch of 4"),
    (lambda: MODEL.decoder(CLEAN_IDS, S, CLEAN_MASK[:, 1:]), ValueError, r"Decoder: predicted has shape \(4, 6\)"),
    (lambda: MODEL.backward(np.ones((N + 1, VOCAB)), MODEL.forward(*ARGUMENTS)[1]), ValueError,
     rf"Decoder: dlogits has shape \({N + 1}, 11\); expected \({N}, 11\)"),
])
def test_bad_input(call, error, sentence):
    with pytest.raises(error, match=sentence) as caught:
        call()
    one_line(caught)


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"heads": 3}, "d_key is 8 and heads 3; expected a width that the heads divide"),
    ({"pooling": "sum"}, "TSDAE: pooling is 'sum'; expected one of 'cls', 'mean', 'max'"),
    ({"norm": "both"}, "TSDAE: norm is 'both'; expected one of 'post', 'pre'"),
    ({"activation": "swish"}, "activation is 'swish'; expected one of 'relu', 'gelu', 'gelu_tanh'"),
    ({"layers": 0}, "TSDAE: layers is 0"), ({"length": 2}, "TSDAE: length is 2; expected a whole number of at least 3"),
    ({"dropout": 1.0}, "p is 1.0"), ({"attention_dropout": -0.1}, "dropout is -0.1"), ({"d": 0}, "d is 0"),
    ({"d_hidden": 0}, "d_hidden is 0"), ({"vocabulary": 0}, "vocab is 0"), ({"vocabulary": "ab"}, "vocab is 'ab'")])
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        TSDAE(**{"vocabulary": VOCAB, **SETTINGS, **settings})
    one_line(caught)
