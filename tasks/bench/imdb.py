"""What tasks/bench.py measures of IMDB: a training step of RRA's classifier, and its recurrent layer alone.

The peer is the same in PyTorch eager, written well: the loops of tasks/bench_peers.py over embedded rows that are time
first already, the mean over the real steps as one product, Adadelta in both of its forms. A review is padded on the
right, where nothing that is behind its real steps can reach them: there PyTorch needs no mask but that of the mean.
"""

import copy
import functools
import importlib

import numpy as np

from minigrad.data.reviews import SPECIAL
from minigrad.layers import RRALSTM
from minigrad.losses import softmax_cross_entropy
from minigrad.optim import Adadelta
from models.classifier import TextClassifier
from tasks.bench import measure as bench_measure
from tasks.bench.measure import Side
from tasks.bench.peers import TORCH_WAYS, rra_in_torch, torch_limit, torch_rra
from tasks.bench.srupp import filled
from tasks.bench.tsdae import Work

STEP, LAYER = "IMDB step", "IMDB RRALSTM"
OPTIMIZER = {"lr": 1.0, "rho": 0.95, "eps": 1e-6}
FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
CLASSES = 2


def make_model(size):
    """The model of a size (B, L, d = h, K, vocabulary), its biases not at their trivial first values."""
    _, _, h, K, vocab = size
    rng = np.random.default_rng(1)
    cell = RRALSTM(h, h, K, rng=rng, dtype="float32")
    model = TextClassifier(vocab, h, cell, h, CLASSES, rng=rng, dtype="float32")
    for bias in (cell.b, model.classifier.readout.b):
        bias.value += 0.1 * rng.standard_normal(bias.value.shape, "float32")
    return model


def random_batch(size):
    """ids (B, L), mask (B, L), labels (B,): reviews of L random words, a quarter of them up to a quarter shorter."""
    B, L, _, _, vocab = size
    rng = np.random.default_rng(2)
    lengths = np.full(B, L)
    lengths[B - B // 4:] -= rng.integers(1, L // 4 + 1, B // 4)
    return rng.integers(len(SPECIAL), vocab, (B, L)), np.arange(L) < lengths[:, None], np.arange(B) % CLASSES


def works(settings, threads, limit, thread_counts):
    """([Work], [note]): the step and the layer alone, by minigrad and by PyTorch where it is there."""
    size = settings["imdb_size"]
    B, L, h, K, vocab = size
    model, batch, notes = make_model(size), random_batch(size), []
    layer, x = model.classifier.cell, model.embedding(batch[0])
    _, dy = bench_measure.upstream_and_input(B, L, h, h)
    steps, layers = [our_step(model, batch, threads, limit)], [bench_measure.our_side(layer, x, dy, threads, limit)]
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        notes.append(f"torch cannot be imported ({error}): its rows are left out")
    else:
        notes.append(f"torch {torch.__version__}")
        steps += torch_steps(torch, model, batch, thread_counts)
        layers += rra_in_torch(torch, layer, x, dy, thread_counts)
    layers = [side._replace(layer=LAYER) for side in layers]
    words = f"B={B} L={L} d=h={h} K={K}"
    products = bench_measure.floor_products(B, L, h, h)
    return [Work(STEP, f"{words}, vocabulary {vocab:,}, {(~batch[1]).sum():,} of {B * L:,} steps padded", steps[:1],
                 steps[1:], {**products, "mean and readout": readout_products(size)}, None),
            Work(LAYER, f"{words}, no mask", layers[:1], layers[1:], products, None)], notes


def readout_products(size):
    """The products of the mean over time and of the readout, forward and backward, as one function."""
    B, L, h, _, _ = size
    weights, hs, s, ds, W, dlogits = (filled(*shape) for shape in (
        (B, 1, L), (B, L, h), (B, h), (B, h), (h, CLASSES), (B, CLASSES)))

    def products():
        np.matmul(weights, hs)
        s @ W
        s.T @ dlogits
        np.matmul(dlogits, W.T, out=ds)
    return products


# ---- minigrad's side -------------------------------------------------------------------------------------

def our_step(model, batch, threads, limit):
    """minigrad's training step."""
    def begin():
        own = copy.deepcopy(model)
        return own, Adadelta(own.parameters(), **OPTIMIZER)
    return Side(STEP, "minigrad", "", functools.partial(train, *begin(), *batch),
                functools.partial(first_step, begin, batch), threads, limit)


def train(model, optimizer, ids, mask, labels):
    """Forward, backward, Adadelta; the loss."""
    optimizer.zero_grad()
    logits, cache = model.forward(ids, mask)
    loss, loss_cache = softmax_cross_entropy.forward(logits, labels)
    model.backward(softmax_cross_entropy.backward(1.0, loss_cache), cache)
    optimizer.step()
    return loss


def first_step(begin, batch):
    """The loss, the gradients and the moves of a first step."""
    model, optimizer = begin()
    named = dict(model.named_parameters())
    before = {name: parameter.value.copy() for name, parameter in named.items()}
    loss = train(model, optimizer, *batch)
    return {"loss": loss, **in_units(batch[0].size, {name: parameter.grad for name, parameter in named.items()},
                                     {name: parameter.value - before[name] for name, parameter in named.items()})}


def in_units(count, gradients, moves):
    """{"d...", "move of ..."}, so large that they can be compared.

    The gradients are times `count`, the steps of all reviews; the moves are divided by sqrt(eps), which is what a first
    step of Adadelta moves a parameter by, times 1 / sqrt(1 - rho), if its gradient is large.
    """
    return {**{f"d{name}": count * gradient for name, gradient in gradients.items()},
            **{f"move of {name}": move / OPTIMIZER["eps"] ** 0.5 for name, move in moves.items()}}


# ---- PyTorch's -------------------------------------------------------------------------------------------

def torch_steps(torch, model, batch, thread_counts):
    """[Side]: a training step in every way to write it."""
    ids, mask, labels = batch
    weights = (mask / mask.sum(axis=1, keepdims=True)).astype("float32")[:, None]            # (B, 1, L)
    batch = [torch.tensor(np.ascontiguousarray(array)) for array in (ids.T, weights, labels)]
    sides = []
    for way, how in TORCH_WAYS.items():
        loss_of = functools.partial(torch_loss, torch, *how, model.classifier.cell.offset)
        for form, flags in FORMS.items():
            def begin(flags=flags):
                tensors = {name: torch.tensor(parameter.value, requires_grad=True)
                           for name, parameter in model.named_parameters()}
                return tensors, torch.optim.Adadelta(tensors.values(), **OPTIMIZER, **flags)
            sides.append(Side(STEP, "PyTorch eager", f"{way}, {form}",
                              functools.partial(torch_train, loss_of, *begin(), batch),
                              functools.partial(torch_first_step, loss_of, begin, batch), thread_counts, torch_limit))
    return sides


def torch_loss(torch, products, windows, offset, p, batch):
    """The loss; p: the parameters by name, laid out as minigrad's."""
    (ids, weights, labels), F = batch, torch.nn.functional
    x = F.embedding(ids, p["embedding.W"]).transpose(0, 1)                   # (B, L, d), in memory time first
    cell = (p[f"classifier.cell.{name}"] for name in ("W", "U", "b", "w"))
    s = torch.bmm(weights, torch_rra(torch, products, windows, offset, x, *cell))[:, 0]
    return F.cross_entropy(torch.addmm(p["classifier.readout.b"], s, p["classifier.readout.W"]), labels)


def torch_train(loss_of, tensors, optimizer, batch):
    """One training step; the loss."""
    optimizer.zero_grad()
    loss = loss_of(tensors, batch)
    loss.backward()
    optimizer.step()
    return loss


def torch_first_step(loss_of, begin, batch):
    """As `first_step`."""
    tensors, optimizer = begin()
    before = {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
    loss = torch_train(loss_of, tensors, optimizer, batch)
    return {"loss": loss.detach().numpy(),
            **in_units(batch[0].numel(), {name: tensor.grad.numpy() for name, tensor in tensors.items()},
                       {name: tensor.detach().numpy() - before[name] for name, tensor in tensors.items()})}
