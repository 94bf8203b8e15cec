"""What the classification tasks share (pixel_mnist.py, imdb.py): flags, evaluation, the training of one model, figures.

Not a task itself. A curve needs many evaluations and the whole test set is slow to go through: so each evaluation takes
a fixed random part of it, and the end of every epoch, and of the run, the whole.
"""

from tasks.frame.common import (  # first: it sets the number of BLAS threads
    OPTIMIZERS,
    clip_settings,
    device_of,
    go_on,
    make_optimizer,
    names_to_compare,
    number,
    require_none,
    tell,
    train_in_turn,
    whole,
)

# isort: split
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import asnumpy, to_device
from minigrad.initializers import GATE_BLOCKS
from minigrad.layers import RRALSTM, Bidirectional
from minigrad.losses import softmax_cross_entropy
from minigrad.optim import RMSprop
from minigrad.tensors import write_atomically
from minigrad.training.trainer import Trainer
from models.cells import label
from tasks.frame.figures import draw_attention_weights, draw_curves
from tasks.frame.run_folder import UsageError

# The RMSprop of RRA's lineage (deeplearning.net tutorial): E[g^2], E[g] and v as Graves 2013, 1e-4 inside the root.
CENTRED = {"lr": 1e-4, "rho": 0.95, "momentum": 0.9, "centred": True, "eps": 1e-4, "eps_inside": True}

SAMPLED, TRIED = 40, 4             # batches whose size is looked at, and that are tried, to estimate a run's time


# ---- flags -----------------------------------------------------------------------------------------------

def add_flags(own, defaults, models, both_ways=(), others=()):
    """The flags of the model, which both tasks have."""
    words = "; each with bi before it: reading both ways" if both_ways else ""
    words += f"; {', '.join(others)}" if others else ""
    own.add_argument("--model", choices=[*models, *both_ways, *others], metavar="NAME",
                     help=f"{', '.join(models)}{words} (default rra)")
    own.add_argument("--compare", metavar="A,B", help="train several models on the same batches")
    own.add_argument("--paper", action="store_true", default=None, help="the paper's setting, see above")
    own.add_argument("-K", "--window", type=whole(0), help=f"rra: states attended to; rnn-residual, rnn-attention: k "
                                                           f"(default {defaults['window']})")
    own.add_argument("--offset", type=int, choices=[1, 2], help="rra: 2, the paper (default), or 1, its code")
    own.add_argument("--normalize", choices=["sum", "softmax"], help="rra: of the attention weights (default sum)")
    own.add_argument("--hidden", type=whole(1), help=f"units, of urnn complex ones (default {defaults['hidden']})")
    own.add_argument("--forget-bias", type=number(), help="rra, lstm: first value (default 1; --paper: 0)")
    own.add_argument("--init", choices=list(GATE_BLOCKS), help="rra, lstm: how W and U start (default orthogonal)")
    own.add_argument("--eps", type=number(0, open_low=True), help="the optimizer's eps (default: its own)")
    own.add_argument("--rmsprop", choices=["plain", "centred"],
                     help="with --optimizer rmsprop: plain (default), or as in the deeplearning.net tutorial: centred, "
                          "momentum 0.9, rho 0.95, lr 1e-4, 1e-4 inside the root")
    own.add_argument("--eval-size", type=whole(1), help="test examples of an evaluation within an epoch (default "
                                                        f"{defaults['eval_size']:,})")


FLAGS = {"model": "rra", "compare": None, "paper": False, "offset": 2, "normalize": "sum", "forget_bias": 1.0,
         "init": "orthogonal", "eps": None, "rmsprop": "plain"}


def names_of(settings, models):
    """The models to train; those of --compare are among `models`."""
    return [settings["model"]] if settings["compare"] is None else names_to_compare(settings["compare"], models)


def setting_of(settings, usual):
    """What a figure says of it: "the paper's setting" for --paper with nothing but model, K, bias and seed changed."""
    own = {"window", "forget_bias", *FLAGS}
    if settings["paper"] and all(settings[key] == value for key, value in usual.items() if key not in own):
        return "the paper's setting"
    return f"{settings['optimizer']}, after the paper's setting" if settings["paper"] else settings["optimizer"]


def optimizer_of(settings, parameters):
    """The optimizer that the settings name. Raises UsageError for flags that contradict one another."""
    if settings["rmsprop"] == "plain":
        return make_optimizer(settings, parameters)
    if settings["optimizer"] != "rmsprop":
        raise UsageError(f"--rmsprop centred was given, but the optimizer is {settings['optimizer']}")
    given = {key: settings[key] for key in ("lr", "eps") if settings[key] is not None}
    return RMSprop(parameters, **{**CENTRED, **given})


def default_lr(given, defaults):
    """The learning rate of the defaults belongs to their optimizer: another one starts with its own."""
    if given.get("rmsprop") == "centred" or given.get("optimizer", defaults["optimizer"]) != defaults["optimizer"]:
        return {**defaults, "lr": None}
    return defaults


# ---- one step, and an evaluation -------------------------------------------------------------------------

def forward_backward(model, batch, rng):
    """One training step's loss and gradients; batch: the model's inputs (x, or ids and mask), then the labels."""
    *inputs, labels = batch
    logits, cache = model.forward(*inputs, rng=rng)
    loss, loss_cache = softmax_cross_entropy.forward(logits, labels)
    model.backward(softmax_cross_entropy.backward(1.0, loss_cache), cache)
    return loss


def right_share(model, batches, device):
    """The share of examples that the model classifies rightly; batches: (inputs ..., labels)."""
    right = count = 0
    for batch in batches:
        *inputs, labels = to_device(batch, device)
        right = right + (model(*inputs).argmax(axis=1) == labels).sum()      # on a GPU it stays there
        count += len(labels)
    return float(right) / count


class Evaluation:
    """evaluate(model) for a Trainer: {metric: on a part of the test set, metric_all: on the whole, w_hat_k ...}.

    part, every   functions that yield batches of the part and of the whole test set
    per_epoch     steps; the whole is gone through where an epoch ends, and at step `last`: elsewhere it is None
    metric        "test_accuracy" or "test_error", as shares
    """

    def __init__(self, part, every, per_epoch, last, metric, device):
        self.part, self.every, self.per_epoch, self.last = part, every, per_epoch, last
        self.metric, self.device = metric, device
        self.step = lambda: 0                                                # the trainer's, once there is one

    def __call__(self, model):
        step = self.step()
        whole_set = step > 0 and (step % self.per_epoch == 0 or step == self.last)
        figures = {self.metric: self._share(model, self.part()),
                   f"{self.metric}_all": self._share(model, self.every()) if whole_set else None}
        for name, weights in attention_of(model).items():
            figures.update({f"{name}_{k}": float(w) for k, w in enumerate(weights, 1)})
        return figures

    def _share(self, model, batches):
        share = right_share(model, batches, self.device)
        return share if self.metric == "test_accuracy" else 1 - share


def attention_of(model):
    """{column: normalised attention weights (K,) on the host} of the model's RRA cells; {} for other models."""
    cell = getattr(model, "classifier", model).cell
    cells = {"w_hat": cell}
    if isinstance(cell, Bidirectional):
        cells = {"w_hat": cell.forward_layer, "w_hat_backward": cell.backward_layer}
    return {name: asnumpy(layer.attention_weights()[0]) for name, layer in cells.items()
            if isinstance(layer, RRALSTM) and len(layer.w.value)}


# ---- a task ----------------------------------------------------------------------------------------------

class Task(NamedTuple):
    """What train_one needs to know of a task."""

    build: Callable             # build(name) -> the model, on the CPU
    batches: Any                # training batches, as Trainer takes them
    part: Callable              # of the test set, see Evaluation
    every: Callable
    metric: str
    figure: str                 # name of its figure: figure5.png
    title: str
    record: dict                # what is kept of the data with a result
    config: dict                # what a checkpoint keeps beside the settings


def train_one(task, name, settings, out, steps):
    """Train one model in its folder; returns its log and writes result.json and the figures."""
    device, metric = device_of(settings), task.metric
    model = task.build(name).to_device(device)
    evaluation = Evaluation(task.part, task.every, task.batches.per_epoch, steps, metric, device)
    trainer = Trainer(
        model, optimizer_of(settings, model.parameters()), task.batches, forward_backward, evaluation, out=out,
        best=f"{metric}_all", largest=metric == "test_accuracy", seed=settings["seed"], device=device,
        config={**settings, "model": name, "compare": None, **task.config}, eval_every=settings["eval_every"],
        eval_epochs=True, shown=(metric, f"{metric}_all"), quiet=settings["quiet"], **clip_settings(settings))
    evaluation.step = lambda: trainer.step
    go_on(trainer, settings, name, steps)
    require_an_end(trainer, metric, steps)
    if not settings["quiet"]:
        about = duration(seconds_for(task, name, settings, steps, trainer.step))
        count = sum(parameter.value.size for parameter in model.parameters())
        tell(f"{label(name, settings['window'])}: {count:,} parameters, {steps:,} steps, "
              f"{steps / task.batches.per_epoch:.3g} epochs; about {about} on this machine")
    try:
        trainer.train(steps)
    finally:
        if trainer.log.rows:
            figures_of(task, name, settings, trainer.log, out)
    report(task, name, settings, trainer, out)
    return trainer.log


def require_an_end(trainer, metric, steps):
    """Raise UsageError where a resumed run would end at an evaluation that it has made already, on a part."""
    row = trainer.log.rows[-1] if trainer.log.rows else {"step": None}
    if row["step"] == steps and row[f"{metric}_all"] is None:
        raise UsageError(f"--steps: {steps} are asked for, but the run in {trainer.out} stands there already, within "
                         "an epoch; expected more")


def seconds_for(task, name, settings, steps, start=0):
    """About how long a model will take from step `start` to `steps`, tried on a few batches with a model of its own.

    Steps and evaluations are taken to cost in proportion to what their batches hold, words with padding or images.
    """
    device, per_epoch = device_of(settings), task.batches.per_epoch
    model = task.build(name).to_device(device)
    optimizer, of_test = optimizer_of(settings, model.parameters()), list(task.part())
    sizes = [task.batches[step][0].size for step in range(0, per_epoch, max(per_epoch // SAMPLED, 1))]

    def train_one_step(batch):
        loss = forward_backward(model, batch, None)
        optimizer.step()
        return loss

    def seconds_each(batches, work):
        """Seconds per number in the first array of the batches; the first batch warms up."""
        batches, seconds = [to_device(batch, device) for batch in batches], []
        for batch in batches:
            began = time.monotonic()
            with np.errstate(all="ignore"):
                float(work(batch))                                           # reading it waits for a GPU
            seconds.append(time.monotonic() - began)
        return sum(seconds[1:]) / max(sum(batch[0].size for batch in batches[1:]), 1)

    tried = seconds_each([task.batches[step] for step in (0, 0, *range(1, min(TRIED, per_epoch)))], train_one_step)
    middle = of_test[len(of_test) // 2]
    evaluated = seconds_each([middle, middle], lambda batch: model(*batch[:-1]).sum())
    part = sum(batch[0].size for batch in of_test)
    whole_set = part * task.record["test"] / task.record["part"]
    epochs = (steps - start) / per_epoch
    evaluations = part * (steps - start) / settings["eval_every"] + whole_set * max(epochs, 1)
    return tried * (steps - start) * sum(sizes) / len(sizes) + evaluated * evaluations


def duration(seconds):
    """"40 s", "12 min", "3.4 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def report(task, name, settings, trainer, out):
    """Keep what came out in result.json, and print it."""
    per_epoch, wholes = task.batches.per_epoch, trainer.log.column(f"{task.metric}_all")
    value = wholes[-1][1]
    result = {"model": name, "steps": trainer.step, "epochs": trainer.step / per_epoch, task.metric: value,
              "best": trainer.best, "per_epoch": [[step / per_epoch, value] for step, value in wholes],
              "parameters": sum(p.value.size for p in trainer.model.parameters()), "data": task.record,
              "seconds": round(trainer.seconds, 1)}
    write_atomically(out / "result.json", f"{json.dumps(result, indent=1)}\n".encode())
    tell(f"{label(name, settings['window'])}: {task.metric.replace('_', ' ')} {value:.2%} after "
          f"{trainer.step / per_epoch:.3g} epochs ({trainer.step:,} iterations); best {trainer.best['value']:.2%} at "
          f"{trainer.best['step']:,}; {duration(trainer.seconds)}")


def curve(task, log):
    """[(step, metric)] from the first training step on."""
    return [(step, value) for step, value in log.column(task.metric) if step]


def figures_of(task, name, settings, log, out):
    """The task's figure, and for RRA figure7.png."""
    draw(task, {label(name, settings["window"]): curve(task, log)}, out)
    for prefix, words in (("w_hat", ""), ("w_hat_backward", ", reading from the end")):
        weights = {int(column.removeprefix(f"{prefix}_")): log.column(column) for column in log.columns
                   if column.removeprefix(f"{prefix}_").isdecimal()}
        if weights:
            path = out / f"figure7{prefix.removeprefix('w_hat').replace('_', '-')}.png"
            draw_attention_weights(path, weights, settings["offset"], "RRA's attention weights over training, "
                                                                      f"K = {settings['window']}{words}")


def draw(task, series, out):
    draw_curves(out / task.figure, series, title=task.title, x_label="iteration", y_label=task.metric.replace("_", " "))


def compare(task, names, settings, out, steps):
    """Train the models one after another on the same batches, each in its own folder, then draw them together."""
    if not settings["quiet"] and not settings["resume"]:
        total = sum(seconds_for(task, name, settings, steps) for name in names)
        tell(f"all {len(names)} models: about {duration(total)} on this machine")
    logs, stopped = train_in_turn(names, settings, out,
                                  lambda name, folder: train_one(task, name, settings, folder, steps))
    draw(task, {label(name, settings["window"]): curve(task, log) for name, log in logs.items()}, out)
    require_none(stopped)


def check_optimizer(settings):
    """Raise UsageError for a wrong optimizer before anything slow begins."""
    if settings["optimizer"] not in OPTIMIZERS:
        raise UsageError(f"--optimizer is {settings['optimizer']!r}; expected one of {', '.join(OPTIMIZERS)}")
