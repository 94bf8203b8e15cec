"""What tasks/bench.py measures of TSDAE: a training step and its floor, and encoding sentences."""

import copy
import functools
import importlib
import math
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import asnumpy
from minigrad.data.sentences import CLS, SEP, SPECIAL, DenoisingBatches
from minigrad.losses import softmax_cross_entropy
from minigrad.memory import empty
from minigrad.optim import AdamW
from models.tsdae import EVALUATED, TSDAE
from tasks.bench import tsdae_peers as bench_tsdae_peers
from tasks.bench.measure import PRODUCTS, Side

# eps is far above the usual 1e-8: a gradient that is nothing but rounding, b_k's (adding to all scores of a row changes
# no weight), would else move its parameter by lr one way or the other, and no two programs would agree.
OPTIMIZER = {"lr": 2e-3, "eps": 1e-3, "weight_decay": 0.1}


class Work(NamedTuple):
    """What is measured under one name: both sides' sides, its size in words, the products of its floor."""

    name: str               # TSDAE step, TSDAE encode, IMDB step ...
    size: str
    sides: list
    peers: list
    products: Any           # {name: function}, or None
    sentences: Any          # that a call encodes, or None
    floor: str = PRODUCTS


class OfIds(TSDAE):
    """A TSDAE whose sentences are ids already: what `encode` does beside splitting text into words."""

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


def works(settings, threads, limit, thread_counts):
    """([Work], [note]): the step and the encoding, by minigrad and by PyTorch where it is there."""
    size, encoded = settings["tsdae_size"], settings["tsdae_encoded"]
    _, L, d, heads, layers, vocab = size
    model, notes, peers = make_model(size), [], ([], [])
    data = make_batch(size)
    sentences = [np.concatenate([[CLS], words, [SEP]]) for words in random_sentences(encoded, L, vocab)]
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        notes.append(f"torch cannot be imported ({error}): its rows are left out")
    else:
        notes.append(f"torch {torch.__version__}")
        peers = (bench_tsdae_peers.step_sides(torch, model, data, OPTIMIZER, thread_counts),
                 bench_tsdae_peers.encode_sides(torch, model, sentences, EVALUATED, thread_counts))
    common = f"{L // 2} to {L} ids a sentence, d={d} heads={heads} layers={layers}"
    return [Work("TSDAE step", in_words(size, data), [our_step(model, data, threads, limit)], peers[0],
                 floor_products(size, data), None),
            Work("TSDAE encode", f"{encoded:,} sentences, {EVALUATED} at a time, {common}",
                 [our_encode(model, sentences, threads, limit)], peers[1], None, encoded)], notes


# ---- minigrad's side -------------------------------------------------------------------------------------

def our_step(model, data, threads, limit):
    """minigrad's training step."""
    def begin():
        own = copy.deepcopy(model)
        return own, AdamW(own.parameters(), no_decay=own.unused_parameters(), **OPTIMIZER)
    return Side("TSDAE step", "minigrad", "", functools.partial(train, *begin(), *data),
                functools.partial(first_step, begin, data), threads, limit)


def train(model, optimizer, noisy, noisy_mask, clean, clean_mask, places=None):
    """Forward, backward, AdamW; the loss. places: model.predicted_places(clean_mask), which finding on a GPU waits."""
    optimizer.zero_grad()
    logits, cache = model.forward(noisy, clean, noisy_mask, clean_mask, places=places)
    loss, loss_cache = softmax_cross_entropy.forward(logits, model.targets(clean, clean_mask, places))
    model.backward(softmax_cross_entropy.backward(1.0, loss_cache), cache)
    optimizer.step()
    return loss


def first_step(begin, data):
    """The loss, the gradients and the moves of a first step: {"loss", "d...", "move of ..."}.

    The gradients are those of the sum over the targets, the moves are divided by lr: so that their entries are near 1,
    and what weight decay adds is seen.
    """
    model, optimizer = begin()
    before = {name: parameter.value.copy() for name, parameter in model.named_parameters()}
    loss, count = train(model, optimizer, *data), data[3][:, 1:].sum()
    named = dict(model.named_parameters())
    return {"loss": asnumpy(loss), **{f"d{name}": asnumpy(count * parameter.grad) for name, parameter in named.items()},
            **{f"move of {name}": asnumpy(parameter.value - before[name]) / OPTIMIZER["lr"]
               for name, parameter in named.items()}}


def our_encode(model, sentences, threads, limit):
    """minigrad's embeddings of sentences of ids."""
    call = functools.partial(model.encode, sentences)
    return Side("TSDAE encode", "minigrad", "", call, lambda: {"vectors": call()}, threads, limit)


# ---- the floor -------------------------------------------------------------------------------------------

def filled(*shape):
    """A float32 array of random numbers."""
    array = empty(shape, np.dtype("float32"))
    array[...] = np.random.default_rng(3).standard_normal(shape, "float32") / math.sqrt(shape[-1])
    return array


def floor_products(size, data):
    """{name: function}: the matrix products of a step, alone, in its shapes: padded and real positions as there."""
    _, _, d, heads, layers, vocab = size
    noisy_mask, predicted = data[1], data[3][:, 1:]
    W, W_1, W_2, E = filled(d, d), filled(d, 4 * d), filled(4 * d, d), filled(vocab, d)
    masks = (noisy_mask, predicted) * layers
    N = int(predicted.sum())
    x, z, n, dlogits = filled(predicted.size, d), filled(N, 4 * d), filled(N, d), filled(N, vocab)
    outs = {width: filled(predicted.size, width) for width in (d, 4 * d)}
    q, S, A = {}, {}, {}
    for mask in masks:
        B, L = mask.shape
        q[L], A[L], S[L] = filled(B, heads, L, d // heads), filled(B, heads, L, d // heads), filled(B, heads, L, L)

    def forward(rows, width_in, weight):
        np.matmul((x if width_in == d else z)[:rows], weight, out=outs[weight.shape[1]][:rows])

    def attention():
        for mask in masks:
            for _ in range(4):
                forward(mask.size, d, W)

    def attention_backward():
        for mask in masks:
            for _ in range(4):
                np.matmul(x[:mask.size], W.T, out=outs[d][:mask.size])
                x[:mask.size].T @ x[:mask.size]

    def heads_forward():
        for L in (mask.shape[1] for mask in masks):
            np.matmul(q[L], q[L].swapaxes(-1, -2), out=S[L])
            np.matmul(S[L], q[L], out=A[L])

    def heads_backward():
        for L in (mask.shape[1] for mask in masks):
            np.matmul(q[L], q[L].swapaxes(-1, -2), out=S[L])
            for P in (S[L], S[L], S[L].swapaxes(-1, -2)):
                np.matmul(P, q[L], out=A[L])

    def feed_forward():
        for rows in (mask.sum() for mask in masks):
            forward(rows, d, W_1)
            forward(rows, 4 * d, W_2)

    def feed_forward_backward():
        for rows in (mask.sum() for mask in masks):
            np.matmul(x[:rows], W_2.T, out=outs[4 * d][:rows])
            np.matmul(z[:rows], W_1.T, out=outs[d][:rows])
            z[:rows].T @ x[:rows]
            x[:rows].T @ z[:rows]

    def head_backward():
        np.matmul(dlogits, E, out=n)
        dlogits.T @ n

    logits = filled(N, vocab)
    return {"q, k, v, o": attention, "their gradients": attention_backward, "scores and A": heads_forward,
            "gradients of these": heads_backward, "feed-forward": feed_forward,
            "its gradients": feed_forward_backward, "logits": lambda: np.matmul(n, E.T, out=logits),
            "gradients of the head": head_backward}
