"""TSDAE's rows: a training step, and encoding sentences."""

import functools

import numpy as np

from minigrad.data.sentences import CLS, SEP, SPECIAL, DenoisingBatches
from minigrad.optim import AdamW
from models.tsdae import EVALUATED, TSDAE
from tasks.bench import tsdae_peers
from tasks.bench.measure import Side, Work
from tasks.bench.peers import imported
from tasks.bench.steps import Units, our_step

STEP, ENCODE = "TSDAE step", "TSDAE encode"
# eps is far above the usual 1e-8: a gradient that is nothing but rounding, b_k's (adding to all scores of a row changes
# no weight), would else move its parameter by lr one way or the other, and no two programs would agree.
OPTIMIZER = {"lr": 2e-3, "eps": 1e-3, "weight_decay": 0.1}


class OfIds(TSDAE):
    """A TSDAE whose sentences are ids already: `encode` without splitting text into words."""

    def ids_of(self, sentences):
        return sentences


def make_model(size):
    """The model of a size (B, L, d, heads, layers, vocab), gains and biases not at their trivial first values."""
    _, L, d, heads, layers, vocab = size
    rng = np.random.default_rng(1)
    model = OfIds(vocab, d, heads, layers=layers, length=L, rng=rng, dtype="float32")
    for parameter in model.parameters():
        if parameter.value.ndim == 1:
            parameter.value += 0.1 * rng.standard_normal(parameter.value.shape, "float32")
    return model


def random_sentences(count, L, vocab):
    """[(n,) int64]: random words; n is uniform in L/2 ... L with [CLS] and [SEP] counted, one at least of L."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(L // 2, L + 1, count)
    lengths[0] = L
    return [rng.integers(len(SPECIAL), vocab, max(n - 2, 1)) for n in lengths]


def make_batch(size):
    """(noisy, noisy_mask, clean, clean_mask) of random sentences."""
    B, L, *_, vocab = size
    return DenoisingBatches(random_sentences(B, L, vocab), B, 0, vocab=vocab)[0]


def in_words(size, data):
    """The size of a training step, and of its batch."""
    B, L, d, heads, layers, vocab = size
    return (f"B={B}, {L // 2} to {L} ids a sentence, d={d} heads={heads} layers={layers} + {layers}, vocabulary "
            f"{vocab:,}, 60 % of the words deleted, {data[3][:, 1:].sum():,} targets")


def units_of(data):
    """The gradients as those of the sum over the targets, the moves by the learning rate, so that decay is seen."""
    return Units(1 / data[3][:, 1:].sum(), OPTIMIZER["lr"])


def training_step(model, batch, units, places=None):
    """minigrad's. places: model.predicted_places(clean_mask), which would make a GPU wait."""
    noisy, noisy_mask, clean, clean_mask = batch

    def loss_of(model):
        logits, cache = model.forward(noisy, clean, noisy_mask, clean_mask, places=places)
        return logits, model.targets(clean, clean_mask, places), cache
    return our_step(STEP, model, lambda model: AdamW(
        model.parameters(), no_decay=model.unused_parameters(), **OPTIMIZER), loss_of, units)


def works(settings):
    """[Work]: the step and the encoding."""
    size, encoded = settings["tsdae_size"], settings["tsdae_encoded"]
    _, L, d, heads, layers, vocab = size
    model, data, (torch, note) = make_model(size), make_batch(size), imported("torch")
    sentences = [np.concatenate([[CLS], words, [SEP]]) for words in random_sentences(encoded, L, vocab)]
    encode = functools.partial(model.encode, sentences)
    return [Work(STEP, in_words(size, data), training_step(model, data, units_of(data)),
                 tsdae_peers.step_sides(torch, model, data, OPTIMIZER, units_of(data)) if torch else [], [note]),
            Work(ENCODE, f"{encoded:,} sentences, {EVALUATED} at a time, {L // 2} to {L} ids a sentence, d={d} "
                 f"heads={heads} layers={layers}", Side(ENCODE, "minigrad", "", encode, lambda: {"vectors": encode()}),
                 tsdae_peers.encode_sides(torch, model, sentences, EVALUATED) if torch else [], [note],
                 sentences=encoded)]
