"""A training step as something to be timed and compared: its loss, its gradients, and how far every parameter moves."""

import copy
from functools import partial
from typing import NamedTuple

from minigrad.backend import asnumpy
from minigrad.losses import softmax_cross_entropy
from tasks.bench.measure import Side
from tasks.bench.peers import EAGER


class Units(NamedTuple):
    """What the results are divided by so that their entries are near 1 and can be compared."""

    gradient: float
    move: float


def compare_by(loss, gradients, moves, units):
    """{"loss", "d...", "move of ..."}, the gradients and moves in those units."""
    return {"loss": loss, **{f"d{name}": gradient / units.gradient for name, gradient in gradients.items()},
            **{f"move of {name}": move / units.move for name, move in moves.items()}}


def our_step(row, model, make_optimizer, loss_of, units):
    """minigrad's training step. loss_of(model) -> (logits, targets, cache); make_optimizer(model)."""
    def begin():
        own = copy.deepcopy(model)
        return own, make_optimizer(own)

    def step(model, optimizer):
        optimizer.zero_grad()
        logits, targets, cache = loss_of(model)
        loss, loss_cache = softmax_cross_entropy.forward(logits, targets)
        model.backward(softmax_cross_entropy.backward(1.0, loss_cache), cache)
        optimizer.step()
        return loss

    def result():
        model, optimizer = begin()
        named = dict(model.named_parameters())
        before = {name: parameter.value.copy() for name, parameter in named.items()}
        loss = step(model, optimizer)
        return compare_by(asnumpy(loss), {name: asnumpy(parameter.grad) for name, parameter in named.items()},
                          {name: asnumpy(parameter.value - before[name]) for name, parameter in named.items()}, units)
    return Side(row, "minigrad", "", partial(step, *begin()), result)


def torch_step(row, way, begin, loss_of, units, laid_back=lambda arrays: arrays, name=EAGER):
    """PyTorch's. begin() -> ({name: tensor}, optimizer); loss_of(tensors); laid_back(arrays): in minigrad's layout."""
    def step(tensors, optimizer):
        optimizer.zero_grad()
        loss = loss_of(tensors)
        loss.backward()
        optimizer.step()
        return loss

    def values(tensors):
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}

    def result():
        tensors, optimizer = begin()
        before, loss = values(tensors), step(tensors, optimizer)
        gradients = {name: tensor.grad.cpu().numpy() for name, tensor in tensors.items()}
        moves = {name: value - before[name] for name, value in values(tensors).items()}
        return compare_by(loss.detach().cpu().numpy(), laid_back(gradients), laid_back(moves), units)
    return Side(row, name, way, partial(step, *begin()), result, "torch")
