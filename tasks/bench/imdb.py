"""IMDB's rows: a training step of the classifier with RRALSTM, and its recurrent layer alone.

The peer is the same in PyTorch eager, written well: RRALSTM's loop of peers.py over embedded rows, the mean over the
real steps as one product. Reviews are padded on the right, and padded steps cannot reach the real ones before them:
PyTorch needs no mask but the mean's.
"""

import functools

import numpy as np

from minigrad.data.reviews import SPECIAL
from minigrad.layers import RRALSTM
from minigrad.optim import Adadelta
from models.classifier import TextClassifier
from tasks.bench.measure import Work, our_side, upstream_and_input
from tasks.bench.peers import TORCH_WAYS, imported, rra_in_torch, torch_rra
from tasks.bench.steps import Units, our_step, torch_step

STEP, LAYER = "IMDB step", "IMDB RRALSTM"
OPTIMIZER = {"lr": 1.0, "rho": 0.95, "eps": 1e-6}
CLASSES = 2


def make_model(size):
    """The model of a size (B, L, d = h, K, vocabulary), its biases not at their trivial first values."""
    _, _, h, K, vocab = size
    rng = np.random.default_rng(1)
    cell = RRALSTM(h, h, K, rng=rng, dtype="float32")
    model = TextClassifier(vocab, h, cell, h, CLASSES, rng=rng, dtype="float32")
    for parameter in model.parameters():
        if parameter.value.ndim == 1 and parameter is not cell.w:
            parameter.value += 0.1 * rng.standard_normal(parameter.value.shape, "float32")
    return model


def random_batch(size):
    """ids (B, L), mask (B, L), labels (B,): reviews of L random words, a quarter of them up to a quarter shorter."""
    B, L, _, _, vocab = size
    rng = np.random.default_rng(2)
    lengths = np.full(B, L)
    lengths[B - B // 4:] -= rng.integers(1, L // 4 + 1, B // 4)
    return rng.integers(len(SPECIAL), vocab, (B, L)), np.arange(L) < lengths[:, None], np.arange(B) % CLASSES


def works(settings):
    """[Work]: the step and the layer alone."""
    size = settings["imdb_size"]
    B, L, h, K, vocab = size
    model, (ids, mask, labels) = make_model(size), random_batch(size)
    layer, x = model.classifier.cell, model.embedding(ids)
    _, dy = upstream_and_input(B, L, h, h)
    # The loss is a mean over reviews and steps; a first step of Adadelta moves a parameter by about sqrt(eps).
    units = Units(1 / ids.size, OPTIMIZER["eps"] ** 0.5)

    def loss_of(model):
        logits, cache = model.forward(ids, mask)
        return logits, labels, cache

    torch, note = imported("torch")
    words = f"B={B} L={L} d=h={h} K={K}"
    return [Work(STEP, f"{words}, vocabulary {vocab:,}, {(~mask).sum():,} of {B * L:,} steps padded",
                 our_step(STEP, model, lambda model: Adadelta(model.parameters(), **OPTIMIZER), loss_of, units),
                 torch_steps(torch, model, (ids, mask, labels), units) if torch else [], [note]),
            Work(LAYER, f"{words}, no mask", our_side(layer, x, dy, LAYER),
                 rra_in_torch(torch, layer, x, dy, row=LAYER) if torch else [], [note])]


def torch_steps(torch, model, batch, units):
    """[Side]: PyTorch's training step in every way to write it."""
    ids, mask, labels = batch
    weights = (mask / mask.sum(axis=1, keepdims=True)).astype("float32")[:, None]            # (B, 1, L)
    batch = [torch.tensor(np.ascontiguousarray(array)) for array in (ids.T, weights, labels)]

    def begin():
        tensors = {name: torch.tensor(parameter.value, requires_grad=True)
                   for name, parameter in model.named_parameters()}
        return tensors, torch.optim.Adadelta(tensors.values(), **OPTIMIZER, foreach=False)
    offset = model.classifier.cell.offset
    return [torch_step(STEP, way, begin, functools.partial(torch_loss, torch, products, offset, batch), units)
            for way, products in TORCH_WAYS.items()]


def torch_loss(torch, products, offset, batch, tensors):
    """The loss; tensors: the parameters by name, laid out as minigrad's: the embedding's, the cell's, the output's."""
    (ids, weights, labels), F = batch, torch.nn.functional
    E, *cell, W, b = tensors.values()
    x = F.embedding(ids, E).transpose(0, 1)                                  # (B, L, d), in memory time first
    s = torch.bmm(weights, torch_rra(torch, products, offset, x, *cell))[:, 0]
    return F.cross_entropy(torch.addmm(b, s, W), labels)
