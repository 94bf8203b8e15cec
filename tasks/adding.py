"""The adding problem: RRA against LSTM (Wang 2017, section 4.1, Figure 4).

    python tasks/adding.py                            the quick start: RRA to a test MSE below 0.01, 1.5 minutes
    python tasks/adding.py --model lstm               the same for the LSTM, or any of the models RRA is compared with
    python tasks/adding.py --compare rra,lstm         both on the same data, and Figure 4
    python tasks/adding.py --paper --compare rra,lstm the paper's setting (Adadelta, zero biases), 8,000 iterations each
    python tasks/adding.py --resume runs/adding/...   go on with a run that was stopped

A sequence holds S numbers from U[0, 1), two of them marked: the first among the first tenth, the second in the second
half. The model reads it step by step and must say their sum. Always answering 1 has a mean squared error of 1/6 =
0.167; a model that has learnt nothing sits there for some thousand iterations, then drops within a few hundred.

Defaults: Adam with learning rate 2e-3, batches of 50, global norm clipped at 1, 128 units, forget bias 1,
K = 10, an evaluation every 200 iterations, the end at a test MSE below 0.01 or at 10,000 iterations.

Expect: a run folder (runs/adding/TIME) with config.json, log.csv, figure4.png (test MSE against iteration),
figure7.png (RRA's attention weights over training), last and best checkpoints, result.json.
"""

from tasks.frame.common import (  # first: it sets the number of BLAS threads
    clip_settings,
    device_of,
    go_on,
    make_optimizer,
    names_to_compare,
    number,
    parser_for,
    require_none,
    run,
    say,
    settings_of,
    steps_of,
    tell,
    train_in_turn,
    whole,
)

# isort: split
import json
import sys
from pathlib import Path

import numpy as np

from minigrad.backend import asnumpy, to_device
from minigrad.data import Batches, adding_problem
from minigrad.initializers import GATE_BLOCKS
from minigrad.layers import RRALSTM, Stack
from minigrad.losses import mean_squared_error
from minigrad.tensors import write_atomically
from minigrad.training.trainer import Trainer
from models.cells import CELLS, build_cell, label as label_of
from models.regressor import SequenceRegressor
from tasks.frame.figures import draw_attention_weights, draw_curves
from tasks.frame.run_folder import UsageError, open_run_folder

DEFAULTS = {
    "length": 100, "window": 10, "offset": 2, "normalize": "sum", "hidden": 128, "layers": 1, "forget_bias": 1.0,
    "init": "orthogonal", "model": "rra", "compare": None, "paper": False, "train_size": 100_000,
    "test_size": 10_000, "batch_size": 50, "optimizer": "adam", "lr": 2e-3, "eps": None, "clip_norm": 1.0,
    "target": 0.01, "eval_every": 200}
# Stated in the paper: S, 128 units, batch 50, Adadelta, 100,000/10,000. Unstated: the rest, from the author's lineage
# (shared defaults of the deeplearning.net tutorial: rho 0.95, eps 1e-6, no learning rate, zero biases, no clipping).
PAPER = {"optimizer": "adadelta", "lr": None, "clip_norm": 0.0, "forget_bias": 0.0, "target": None}
STEPS = {False: 10_000, True: 8_000}                # at most, by --paper
BEATS = 0.95                                        # of the baseline's test MSE, in five evaluations running


def parse(argv):
    """The settings of this run; see `--help`."""
    parser = parser_for("adding", __doc__)
    own = parser.add_argument_group("of this task")
    own.add_argument("-S", "--length", type=whole(2), help="steps of a sequence (default 100)")
    own.add_argument("-K", "--window", type=whole(0), help="RRA: states attended to; rnn-residual, rnn-attention: k "
                                                           "(default 10)")
    own.add_argument("--offset", type=int, choices=[1, 2], help="RRA: 2, the paper (default), or 1, its code")
    own.add_argument("--normalize", choices=["sum", "softmax"], help="RRA: of the attention weights (default sum)")
    own.add_argument("--hidden", type=whole(1), help="units (default 128)")
    own.add_argument("--layers", type=whole(1), help="recurrent layers (default 1)")
    own.add_argument("--forget-bias", type=number(), help="rra, lstm: first value (default 1; --paper: 0)")
    own.add_argument("--eps", type=number(0, open_low=True), help="the optimizer's eps (default: its own)")
    own.add_argument("--init", choices=list(GATE_BLOCKS), help="rra, lstm: how W and U start (default orthogonal)")
    own.add_argument("--model", choices=CELLS, metavar="NAME", help=f"{', '.join(CELLS)} (default rra)")
    own.add_argument("--compare", metavar="A,B", help="train several models on the same data: rra,lstm")
    own.add_argument("--paper", action="store_true", default=None, help="the paper's setting; 8,000 iterations")
    own.add_argument("--train-size", type=whole(1), help="default 100,000")
    own.add_argument("--test-size", type=whole(1), help="default 10,000")
    own.add_argument("--target", type=number(0),
                     help="stop at this test MSE (default 0.01; with --steps, --epochs, --paper: none)")
    settings = settings_of(parser, argv, lambda given: {**DEFAULTS, **(PAPER if "paper" in given else {})})
    given = parser.parse_args(argv)
    if given.steps or given.epochs:
        settings["target"] = given.target
    names_of(settings)
    return settings


def names_of(settings):
    """The models to train."""
    return [settings["model"]] if settings["compare"] is None else names_to_compare(settings["compare"], CELLS)


def build(settings, name):
    """The model `name`; W, U and b start the same for rra and lstm, the readout for all of one width."""
    own = {key: settings[key] for key in ("window", "offset", "normalize", "forget_bias", "init", "dtype")}
    rng, layers, width = np.random.default_rng([settings["seed"], 1]), [], 2
    for _ in range(settings["layers"]):
        layer, width = build_cell(name, width, settings["hidden"], rng=rng, **own)
        layers.append(layer)
    return SequenceRegressor(layers[0] if len(layers) == 1 else Stack(*layers), width, dtype=settings["dtype"],
                             rng=np.random.default_rng([settings["seed"], 2]))


def generate(settings):
    """(train, test), each (x, target); a function of seed, S and the sizes alone."""
    seed, S, dtype = settings["seed"], settings["length"], settings["dtype"]
    return (adding_problem(settings["train_size"], S, [seed, 10], dtype),
            adding_problem(settings["test_size"], S, [seed, 11], dtype))


def forward_backward(model, batch, rng):
    """One training step's loss and gradients."""
    x, target = batch
    y, cache = model.forward(x, rng=rng)
    loss, loss_cache = mean_squared_error.forward(y, target)
    model.backward(mean_squared_error.backward(1.0, loss_cache), cache)
    return loss


def evaluation(test, device):
    """f(model) -> {"test_mse": ..., and RRA's normalised attention weights of its first layer}."""
    x, target = to_device(test, device)
    rows = 500

    def evaluate(model):
        squares = [((model(x[n:n + rows]) - target[n:n + rows])**2).sum(dtype="float64")
                   for n in range(0, len(x), rows)]
        figures = {"test_mse": float(sum(squares)) / len(x)}
        cell = model.cell.layers[0] if isinstance(model.cell, Stack) else model.cell
        if isinstance(cell, RRALSTM) and len(cell.w.value):
            weights = asnumpy(cell.attention_weights()[0])
            figures.update({f"w_hat_{k}": float(w) for k, w in enumerate(weights, 1)})
        return figures
    return evaluate


def always_one(test):
    """The baseline: the test MSE of always predicting 1."""
    return float(((1 - test[1])**2).mean(dtype="float64"))


def mse_curve(log):
    """[(step, test MSE)] from the first training step on; that of the untrained model would squash the figure."""
    return [(step, mse) for step, mse in log.column("test_mse") if step]


def beats_baseline(points, baseline):
    """(step, confirmed): the first evaluation that with the next four lies below 0.95 x the baseline's test MSE.

    points: [(step, test MSE)]. Not confirmed while fewer than four have followed; (None, False) if there is none.
    """
    below = [mse < BEATS * baseline for _, mse in points]
    for n, (step, _) in enumerate(points):
        if all(below[n:n + 5]):
            return step, len(points) >= n + 5
    return None, False


def train_one(name, settings, data, out, steps):
    """Train one model in its folder; returns its log and writes result.json and the figures."""
    train, test = data
    device = device_of(settings)
    model = build(settings, name).to_device(device)
    batches = Batches(train, settings["batch_size"], seed=settings["seed"])
    trainer = Trainer(
        model, make_optimizer(settings, model.parameters()), batches, forward_backward, evaluation(test, device),
        out=out, best="test_mse", config={**settings, "model": name, "compare": None}, seed=settings["seed"],
        device=device, eval_every=settings["eval_every"], quiet=settings["quiet"], **clip_settings(settings))
    go_on(trainer, settings, name, steps)
    baseline = always_one(test)

    def stop(log):
        points = log.column("test_mse")
        step, confirmed = beats_baseline(points, baseline)
        if confirmed and not beats_baseline(points[:-1], baseline)[1]:
            trainer.progress.line(f"{name}: beats the baseline since step {step}: five evaluations running below "
                                  f"{BEATS} x {baseline:.4f}")
        if settings["target"] and points[-1][1] < settings["target"]:
            return f"test MSE {points[-1][1]:.4g} is below the target {settings['target']}"
        return None

    say(settings, f"{name}: {sum(p.value.size for p in model.parameters()):,} parameters, at most {steps:,} steps; "
                  f"always predicting 1 has a test MSE of {baseline:.4f}")
    try:
        reason = trainer.train(steps, stop)
    finally:
        if trainer.log.rows:
            figures_of(name, settings, trainer.log, baseline, out)
    report(name, trainer, baseline, reason, out)
    return trainer.log


def report(name, trainer, baseline, reason, out):
    """Keep what came out in result.json, and print it."""
    points = trainer.log.column("test_mse")
    step, confirmed = beats_baseline(points, baseline)
    verdict = "has not beaten the baseline" if step is None else (
        f"beats the baseline ({BEATS} x {baseline:.4f}) from step {step}"
        + ("" if confirmed else f" (so far: {sum(s > step for s, _ in points)} of 4 evaluations followed)"))
    result = {"model": name, "steps": trainer.step, "test_mse": points[-1][1], "best": trainer.best,
              "baseline": baseline, "beats_baseline_at": step, "beats_baseline_confirmed": confirmed,
              "seconds": round(trainer.seconds, 1)}
    write_atomically(out / "result.json", f"{json.dumps(result, indent=1)}\n".encode())
    tell(f"{name}: test MSE {points[-1][1]:.4g} at step {points[-1][0]}; {verdict}; {trainer.seconds:.0f} s"
          + (f"; stopped: {reason}" if reason else ""))


def title(settings):
    how = "the paper's setting" if settings["paper"] else settings["optimizer"]
    return f"Adding problem, S = {settings['length']}, {settings['hidden']} units, {how}"


def figures_of(name, settings, log, baseline, out):
    """figure4.png, and for RRA figure7.png."""
    draw_curves(out / "figure4.png", {label(name, settings): mse_curve(log)}, title=title(settings),
                x_label="iteration", y_label="test MSE", horizontal=(baseline, f"always 1: {baseline:.3f}"))
    weights = {int(c.removeprefix("w_hat_")): log.column(c) for c in log.columns if c.startswith("w_hat_")}
    if weights:
        draw_attention_weights(out / "figure7.png", weights, settings["offset"],
                               f"RRA's attention weights over training, K = {settings['window']}")


def label(name, settings):
    return label_of(name, settings["window"])


def main(argv):
    settings = parse(argv)
    device_of(settings)                             # before anything is written
    steps = steps_of(settings, settings["train_size"] // settings["batch_size"] or 1, STEPS[bool(settings["paper"])])
    try:                                            # nor is anything written for settings that do not fit
        for name in names_of(settings):
            make_optimizer(settings, build(settings, name).parameters())
        data = generate(settings)
        Batches(data[0], settings["batch_size"], seed=settings["seed"])
    except ValueError as error:
        raise UsageError(str(error)) from error
    out, hold = open_run_folder("adding", settings)
    say(settings, f"writing to {out}")
    if settings["compare"] is None:
        train_one(settings["model"], settings, data, out, steps)
    else:
        compare(settings, data, out, steps)
    del hold
    say(settings, f"figures: {', '.join(str(path) for path in sorted(Path(out).rglob('figure*.png')))}")


def compare(settings, data, out, steps):
    """Train the models one after another, each in its own folder, then draw them together (Figure 4)."""
    logs, stopped = train_in_turn(names_of(settings), settings, out,
                                  lambda name, folder: train_one(name, settings, data, folder, steps))
    baseline = always_one(data[1])
    draw_curves(out / "figure4.png", {label(name, settings): mse_curve(log) for name, log in logs.items()},
                title=title(settings), x_label="iteration", y_label="test MSE",
                horizontal=(baseline, f"always 1: {baseline:.3f}"))
    require_none(stopped)


if __name__ == "__main__":
    sys.exit(run(main))
