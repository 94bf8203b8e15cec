"""Frozen trajectories: the first training losses of each model, against values made independently with PyTorch.

The frozen numbers come from `torch_losses` below (PyTorch autograd, torch.optim, torch's clipping, the paper's
equations written there again); where PyTorch is installed they are made anew and compared too.
"""

import numpy as np
import pytest
from helpers import assert_close

from minigrad.clipping import clip_grad_norm
from minigrad.data import Batches, adding_problem
from minigrad.layers import LSTM, RRALSTM
from minigrad.losses import mean_squared_error, softmax_cross_entropy
from minigrad.optim import Adadelta, Adam
from models.cells import build_cell
from models.classifier import TextClassifier
from models.regressor import SequenceRegressor

S, H, K, STEPS = 12, 6, 3, 8
CLIP = 0.5
MODELS = ["lstm", "rra"]
OPTIMIZERS = ["adam", "adadelta"]
FROZEN = {
    ("lstm", "adam"): [
        0.9694395578816148, 0.8664661737510473, 0.8293346684057568, 0.5857746138365318,
        0.34060406113870967, 0.2464995168215827, 0.2598889492089086, 0.19709727059201587],
    ("lstm", "adadelta"): [
        0.9694395578816148, 1.0844910389476887, 1.2767867890492781, 1.1689382982360614,
        1.02633113828915, 1.0091000103316454, 0.5444172918057744, 0.9340297465466986],
    ("rra", "adam"): [
        1.0066898296413775, 0.8198134287056904, 0.7329868680963086, 0.5166790617512635,
        0.26877864822278413, 0.20316249437618378, 0.26890577426734935, 0.17524618493878785],
    ("rra", "adadelta"): [
        1.0066898296413775, 1.1112934203398463, 1.2377880212338703, 1.1397615560947678,
        0.963147940967048, 0.9513222111978387, 0.49937122329408423, 0.837617314671706],
}


def model_and_data(name):
    rng = np.random.default_rng(5)
    cell = LSTM(2, H, rng=rng, dtype="float64") if name == "lstm" else RRALSTM(2, H, K, rng=rng, dtype="float64")
    model = SequenceRegressor(cell, H, rng=rng, dtype="float64")
    return model, Batches(adding_problem(64, S, 9, "float64"), 16, seed=2)


def our_losses(name, optimizer):
    model, batches = model_and_data(name)
    optimizer = {"adam": lambda p: Adam(p, lr=0.02), "adadelta": Adadelta}[optimizer](model.parameters())
    losses = []
    for step in range(STEPS):
        losses.append(train_step(model, optimizer, batches[step]))
    return losses


def train_step(model, optimizer, batch):
    x, target = batch
    optimizer.zero_grad()
    y, cache = model.forward(x)
    loss, loss_cache = mean_squared_error.forward(y, target)
    model.backward(mean_squared_error.backward(1.0, loss_cache), cache)
    clip_grad_norm(model.parameters(), CLIP)
    optimizer.step()
    return float(loss)


def torch_losses(name, optimizer):
    """The same run, written with PyTorch alone."""
    import torch

    model, batches = model_and_data(name)
    weights = {n: torch.tensor(p.value, requires_grad=True) for n, p in model.named_parameters()}
    W, U, b = (weights[f"cell.{n}"] for n in "WUb")
    make = {"adam": lambda p: torch.optim.Adam(p, lr=0.02),
            "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, rho=0.95, eps=1e-6)}[optimizer]
    torch_optimizer, losses = make(list(weights.values())), []
    for step in range(STEPS):
        x, target = map(torch.tensor, batches[step])
        history, c = [torch.zeros(len(x), H, dtype=torch.float64)] * (K + 2), torch.zeros(len(x), H).double()
        for t in range(S):
            i, f, o, g = (x[:, t] @ W + history[-1] @ U + b).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            a = 0.0
            if name == "rra":
                w = weights["cell.w"]
                a = sum(w[k] / w.sum() * history[-2 - k] for k in range(K))
            history.append(torch.sigmoid(o) * torch.tanh(c + a))
        y = history[-1] @ weights["readout.W"] + weights["readout.b"]
        loss = torch.nn.functional.mse_loss(y, target)
        torch_optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((w.grad**2).sum() for w in weights.values()))
        for w in weights.values():
            w.grad *= torch.clamp(CLIP / norm, max=1.0)
        torch_optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_the_first_losses_are_the_frozen_ones(name, optimizer):
    assert_close(our_losses(name, optimizer), FROZEN[name, optimizer], 1e-9)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_the_frozen_losses_are_pytorchs(name, optimizer):
    pytest.importorskip("torch", reason="PyTorch is a test oracle only; pip install torch to run this")
    assert_close(torch_losses(name, optimizer), FROZEN[name, optimizer], 1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_one_batch_is_overfitted(name, dtype):
    model, _ = model_and_data(name)
    model.astype(dtype)
    batch = adding_problem(8, S, 1, dtype)
    optimizer = Adam(model.parameters(), lr=0.02)
    losses = [train_step(model, optimizer, batch) for _ in range(400)]
    assert losses[-1] < 1e-3 < losses[0]


# ---- a classifier of texts -------------------------------------------------------------------------------

VOCAB, D, B = 20, 5, 8
FROZEN_TEXTS = {
    ("rra", "mean"): [
        0.7361615975399243, 0.6963255386541882, 0.7243808831842522, 0.6901205001957155,
        0.7133810118429976, 0.6840437881230673, 0.7028983514911624, 0.6779870987375066],
    ("birra", "last"): [
        0.7862199076792715, 0.6581084750315702, 0.7646020965464454, 0.6421180639253572,
        0.7443112015889587, 0.6263281532579704, 0.7246189005251555, 0.6102819966506423]}


def texts(step):
    """(ids (B, S), mask, labels): texts of 1 to S words, padded on the right."""
    rng = np.random.default_rng([9, step])
    mask = np.arange(S) < rng.integers(1, S + 1, (B, 1))
    return np.where(mask, rng.integers(2, VOCAB, (B, S)), 0), mask, rng.integers(0, 2, B)


def text_model(name, reads):
    rng = np.random.default_rng(5)
    cell, width = build_cell(name, D, H, window=K, rng=rng, dtype="float64")
    return TextClassifier(VOCAB, D, cell, width, 2, pooling=reads, rng=rng, dtype="float64")


def our_text_losses(name, reads):
    model, losses = text_model(name, reads), []
    optimizer = Adadelta(model.parameters())
    for step in range(STEPS):
        ids, mask, labels = texts(step % 2)
        logits, cache = model.forward(ids, mask)
        loss, loss_cache = softmax_cross_entropy.forward(logits, labels)
        optimizer.zero_grad()
        model.backward(softmax_cross_entropy.backward(1.0, loss_cache), cache)
        optimizer.step()
        losses.append(float(loss))
    return losses


def torch_text_losses(name, reads):
    """The same run, text by text, written with PyTorch alone."""
    import torch

    weights = {n: torch.tensor(p.value, requires_grad=True) for n, p in text_model(name, reads).named_parameters()}
    optimizer, losses = torch.optim.Adadelta(list(weights.values()), lr=1.0, rho=0.95, eps=1e-6), []

    def states(x, prefix):
        W, U, b, w = (weights[f"classifier.cell.{prefix}{n}"] for n in "WUbw")
        history, c = [torch.zeros(H).double()] * (K + 2), torch.zeros(H).double()
        for x_t in x:
            i, f, o, g = (x_t @ W + history[-1] @ U + b).chunk(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            a = sum(w[k] / w.sum() * history[-2 - k] for k in range(K))
            history.append(torch.sigmoid(o) * torch.tanh(c + a))
        return torch.stack(history[K + 2:])

    for step in range(STEPS):
        ids, mask, labels = map(torch.tensor, texts(step % 2))
        read = []
        for text, real in zip(ids, mask):
            x = weights["embedding.W"][text[real]]
            if name == "rra":
                read.append(states(x, "").mean(0))
            else:
                read.append(torch.cat([states(x, "forward_layer.")[-1], states(x.flip(0), "backward_layer.")[-1]]))
        logits = torch.stack(read) @ weights["classifier.readout.W"] + weights["classifier.readout.b"]
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "reads"), FROZEN_TEXTS)
def test_the_first_losses_of_a_text_classifier_are_the_frozen_ones(name, reads):
    assert_close(our_text_losses(name, reads), FROZEN_TEXTS[name, reads], 1e-9)


@pytest.mark.parametrize(("name", "reads"), FROZEN_TEXTS)
def test_the_frozen_losses_of_a_text_classifier_are_pytorchs(name, reads):
    pytest.importorskip("torch", reason="PyTorch is a test oracle only; pip install torch to run this")
    assert_close(torch_text_losses(name, reads), FROZEN_TEXTS[name, reads], 1e-9)
