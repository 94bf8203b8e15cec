"""The adding problem: RRA against LSTM (Wang 2017, section 4.1, Figure 4).

    python tasks/adding.py                            the quick start: RRA to a test MSE below 0.01, 1.5 minutes
    python tasks/adding.py --model lstm               the same for the LSTM, or any of the models RRA is compared with
    python tasks/adding.py --compare rra,lstm         both on the same data, and Figure 4
    python tasks/adding.py --paper --compare rra,lstm the paper's setting (Adadelta, zero biases), 8,000 iterations each
    python tasks/adding.py --resume runs/adding/...   continue a run that was stopped

A sequence holds S numbers from U[0, 1), two of them marked: the first among the first tenth, the second in the second
half. The model reads it step by step and must say their sum. Always answering 1 has a mean squared error of 1/6 =
0.167; a model that has learnt nothing stays there for some thousand iterations, then drops within a few hundred.

Defaults: Adam with learning rate 2e-3, batches of 50, global norm clipped at 1, 128 units, forget bias 1,
K = 10, an evaluation every 200 iterations, the end at a test MSE below 0.01 or at 10,000 iterations.

Expect: a run folder (runs/adding/TIME) with config.json, log.csv, figure4.png (test MSE against iteration),
figure7.png (RRA's attention weights over training), last and best checkpoints, result.json.
"""

import sys

import numpy as np

from minigrad.backend import asnumpy, to_device
from minigrad.data import Batches, adding_problem
from minigrad.layers import RRALSTM, Stack
from minigrad.losses import mean_squared_error
from models.cells import CELLS, SETTINGS, build_cell, taken_by
from models.regressor import SequenceRegressor
from tasks import frame
from tasks.frame.cell_flags import add_cell_flags, cell_label, cell_settings
from tasks.frame.figures import draw_attention_weights
from tasks.frame.flags import number, whole

DEFAULTS = {
    **SETTINGS, "model": "rra", "length": 100, "hidden": 128, "layers": 1, "train_size": 100_000, "test_size": 10_000,
    "batch_size": 50, "optimizer": "adam", "lr": 2e-3, "eps": None, "clip_norm": 1.0, "target": 0.01,
    "eval_every": 200, "steps": 10_000}
# Stated in the paper: S, 128 units, batch 50, Adadelta, 100,000/10,000. Unstated: the rest, from the author's lineage
# (shared defaults of the deeplearning.net tutorial: rho 0.95, eps 1e-6, no learning rate, zero biases, no clipping).
PAPER = {"optimizer": "adadelta", "lr": None, "clip_norm": 0.0, "forget_bias": 0.0, "target": None, "steps": 8_000}
BEATS = 0.95                                        # of the baseline's test MSE, in five evaluations running


def flags(group):
    add_cell_flags(group, DEFAULTS)
    group.add_argument("-S", "--length", type=whole(2), help="steps of a sequence (default 100)")
    group.add_argument("--layers", type=whole(1), help="recurrent layers (default 1)")
    group.add_argument("--train-size", type=whole(1), help="default 100,000")
    group.add_argument("--test-size", type=whole(1), help="default 10,000")
    group.add_argument("--target", type=number(0),
                       help="stop at this test MSE (default 0.01; with --steps, --epochs, --paper: none)")


def check(settings, given):
    """--steps and --epochs switch the target off, unless one is given with them."""
    if {"steps", "epochs"} & set(given):
        settings["target"] = given.get("target")


# ---- data, model, step, evaluation -----------------------------------------------------------------------

def generate(settings):
    """(train, test), each (x, target); a function of seed, S and the sizes alone."""
    seed, S, dtype = settings["seed"], settings["length"], settings["dtype"]
    return (adding_problem(settings["train_size"], S, [seed, 10], dtype),
            adding_problem(settings["test_size"], S, [seed, 11], dtype))


def build(settings, data=None):
    """The model; W, U and b start the same for rra and lstm, the readout for all of one width."""
    rng, layers, width = np.random.default_rng([settings["seed"], 1]), [], 2
    for _ in range(settings["layers"]):
        layer, width = build_cell(settings["model"], width, settings["hidden"], rng=rng, **cell_settings(settings))
        layers.append(layer)
    return SequenceRegressor(layers[0] if len(layers) == 1 else Stack(*layers), width, dtype=settings["dtype"],
                             rng=np.random.default_rng([settings["seed"], 2]))


def batches(settings, data):
    return Batches(data[0], settings["batch_size"], seed=settings["seed"])


def forward_backward(model, batch, rng):
    """One training step's loss and gradients."""
    x, target = batch
    y, cache = model.forward(x, rng=rng)
    loss, loss_cache = mean_squared_error.forward(y, target)
    model.backward(mean_squared_error.backward(1.0, loss_cache), cache)
    return loss


def evaluation(settings, data, device):
    """f(model, step) -> {"test_mse": ..., and RRA's normalised attention weights of its first layer}."""
    x, target = to_device(data[1], device)
    rows = 500

    def evaluate(model, step):
        squares = [((model(x[n:n + rows]) - target[n:n + rows])**2).sum(dtype="float64")
                   for n in range(0, len(x), rows)]
        figures = {"test_mse": float(sum(squares)) / len(x)}
        cell = model.cell.layers[0] if isinstance(model.cell, Stack) else model.cell
        if isinstance(cell, RRALSTM) and len(cell.w.value):
            weights = asnumpy(cell.attention_weights()[0])
            figures.update({f"w_hat_{k}": float(w) for k, w in enumerate(weights, 1)})
        return figures
    return evaluate


# ---- when it is solved -----------------------------------------------------------------------------------

def always_one(data):
    """The baseline: the test MSE of always predicting 1."""
    return float(((1 - data[1][1])**2).mean(dtype="float64"))


def beats_baseline(points, baseline):
    """(step, confirmed): the first evaluation that with the next four lies below 0.95 x the baseline's test MSE.

    points: [(step, test MSE)]. Not confirmed while fewer than four have followed; (None, False) if there is none.
    """
    below = [mse < BEATS * baseline for _, mse in points]
    for n, (step, _) in enumerate(points):
        if all(below[n:n + 5]):
            return step, len(points) >= n + 5
    return None, False


def stop(run):
    """Say when the baseline is beaten; end at the target."""
    points, baseline, target = run.trainer.log.column("test_mse"), always_one(run.data), run.settings["target"]
    step, confirmed = beats_baseline(points, baseline)
    if confirmed and not beats_baseline(points[:-1], baseline)[1]:
        run.trainer.progress.line(f"{run.settings['model']}: beats the baseline since step {step}: five evaluations "
                                  f"running below {BEATS} x {baseline:.4f}")
    if target and points[-1][1] < target:
        return f"test MSE {points[-1][1]:.4g} is below the target {target}"
    return None


# ---- what came out ---------------------------------------------------------------------------------------

def result(run):
    baseline = always_one(run.data)
    step, confirmed = beats_baseline(run.trainer.log.column("test_mse"), baseline)
    return {"baseline": baseline, "beats_baseline_at": step, "beats_baseline_confirmed": confirmed}


def summary(run, result):
    points, step = run.trainer.log.column("test_mse"), result["beats_baseline_at"]
    verdict = "has not beaten the baseline" if step is None else (
        f"beats the baseline ({BEATS} x {result['baseline']:.4f}) from step {step}"
        + ("" if result["beats_baseline_confirmed"] else
           f" (so far: {sum(s > step for s, _ in points)} of 4 evaluations followed)"))
    return (f"{result['model']}: test MSE {points[-1][1]:.4g} at step {points[-1][0]}; {verdict}; "
            f"{run.trainer.seconds:.0f} s")


def figures(run):
    """figure7.png, for RRA."""
    log, settings = run.trainer.log, run.settings
    weights = {int(c.removeprefix("w_hat_")): log.column(c) for c in log.columns if c.startswith("w_hat_")}
    if weights:
        draw_attention_weights(run.trainer.out / "figure7.png", weights, settings["offset"],
                               f"RRA's attention weights over training, K = {settings['window']}")


def title(settings):
    how = "the paper's setting" if settings["paper"] else settings["optimizer"]
    return f"Adding problem, S = {settings['length']}, {settings['hidden']} units, {how}"


def beats_cell(kept):
    """Of a table of kept runs: when the baseline was beaten, with a star while that is not confirmed."""
    step = kept["result"]["beats_baseline_at"]
    return "not" if step is None else f"{step:,}" + ("" if kept["result"]["beats_baseline_confirmed"] else " *")


TASK = frame.Task(
    name="adding", description=__doc__, defaults=DEFAULTS, paper=PAPER, flags=flags, check=check,
    variants=CELLS, flags_of=taken_by(CELLS), label=cell_label,
    data=generate, model=build, batches=batches, step=forward_backward, evaluation=evaluation, stop=stop,
    curve=frame.Curve("test_mse", "test MSE", title, "figure4.png", baseline=always_one, baseline_name="always 1"),
    describe=lambda settings, data: f"always predicting 1 has a test MSE of {always_one(data):.4f}",
    result=result, summary=summary, figures=figures,
    shown=frame.Shown(what=False, in_label=("window",), note="\\* fewer than four evaluations followed", columns={
        "beats the baseline at": beats_cell,
        "test MSE at the end": lambda kept: f"{kept['result']['test_mse']:.4f} at {kept['result']['steps']:,}"}))

if __name__ == "__main__":
    sys.exit(frame.run(TASK))
