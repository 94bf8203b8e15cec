"""Gradient clipping shown: the cliff of Pascanu et al. 2013 (section 2.3, Figure 6), and a table on a real task.

    python tasks/clipping.py                          both, 3 minutes
    python tasks/clipping.py --only cliff             the picture alone, 3 seconds
    python tasks/clipping.py --only table --lr 0.4    the table at another learning rate
    python tasks/clipping.py --steps 50               a quick look: which runs diverge, 15 seconds
    python tasks/clipping.py --resume runs/clipping/TIME    make the runs that a stopped table lacks

The cliff: one recurrent unit, x_t = w sigma(x_{t-1}) + b, whose loss over (w, b) has a wall. Gradient descent from one
start, three times: without clipping the gradient on the wall throws it off to where the loss is flat; clipped by norm
or by value it stays beside the wall and follows it down. The picture has fixed settings (START, CLIFF) and is computed
on the CPU in float64; the flags are the table's, and --only cliff refuses them.

The table: the adding problem under plain SGD. For each of --seeds seeds three runs that share all but the clipping:
data, first weights, batches. A run has diverged when its loss is not finite or exceeds 10 times its first value; it
ends there and is counted. It has learnt when its test MSE at the end is below half of that of always predicting 1.

Defaults: LSTM, S = 20, 16 units, batches of 20, learning rate 0.5, 2,000 steps, seeds 0 to 9, norm clipped at 1, values
at 0.3. Everything else is as in tasks/adding.py (orthogonal gates, forget bias 1). Flags that have no meaning here
are refused: --optimizer (but sgd), --eval-every (a run is evaluated at its end), a threshold of 0.

Expect: without clipping 7 of 10 runs diverge within 8 steps and 1 learns; by value and by norm none diverges and all
learn (median test MSE 0.007 and 0.009, always predicting 1: 0.167). A run folder (runs/clipping/TIME) with config.json,
cliff.png, cliff.csv, losses.png, log.csv (every run's losses and gradient norms), table.md, result.json, and runs.json,
in which each run is kept as soon as it is done.
"""

from tasks.frame.common import (  # first: it sets the number of BLAS threads
    device_of,
    parser_for,
    run,
    say,
    settings_of,
    steps_of,
    whole,
)

# isort: split
import csv
import io
import json
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from minigrad import Parameter
from minigrad.backend import sigmoid, to_device
from minigrad.clipping import clip_grad_norm, clip_grad_value, grad_norm
from minigrad.data import Batches
from minigrad.optim import SGD
from minigrad.tensors import CheckpointError, write_atomically
from minigrad.training.progress import Progress
from minigrad.training.trainer import Interrupted
from tasks import adding
from tasks.frame.figures import COLOURS, save
from tasks.frame.run_folder import UsageError, note_resumed, open_run_folder, read_config

VARIANTS = {"none": "no clipping", "value": "by value", "norm": "by norm"}
PAINT = {"none": COLOURS[6], "value": COLOURS[2], "norm": COLOURS[0], None: "#222222"}    # None: what they share
DEFAULTS = {
    "only": None, "model": "lstm", "length": 20, "window": 10, "hidden": 16, "seeds": 10, "train_size": 20_000,
    "test_size": 2_000, "batch_size": 20, "optimizer": "sgd", "lr": 0.5, "clip_norm": 1.0, "clip_value": 0.3,
    "log_every": 20}
STEPS = 2_000
BLOW_UP = 10                                        # times its first loss: diverged
LEARNT = 0.5                                        # times the test MSE of always predicting 1
OF_BOTH = {"only", "threads", "out", "resume", "quiet"}              # flags that mean something to the cliff too


# ---- clipping, of either part --------------------------------------------------------------------------

def clip(variant, parameters, threshold):
    """Clip the gradients in place; returns (their norm before, whether that changed any entry)."""
    if variant == "norm":
        norm = clip_grad_norm(parameters, threshold)
        return float(norm), bool(norm > threshold)
    norm = float(grad_norm(parameters))
    if variant == "none":
        return norm, False
    acts = any(bool((abs(p.grad) > threshold).any()) for p in parameters)
    clip_grad_value(parameters, threshold)
    return norm, acts


# ---- the cliff -----------------------------------------------------------------------------------------

T, X_0, TARGET = 50, 0.5, 0.7                       # the paper's steps, first state and target
START = (5.2, -2.3)                                 # ours, as what follows: (w, b)
CLIFF = {"lr": 0.5, "steps": 80, "threshold": 1.0}
FRAME = ((4.0, 5.5), (-2.9, -1.45))                 # of the picture: w, b


class Point(NamedTuple):
    """One iterate of gradient descent: where it is, its error, its gradient's norm, and whether clipping acts there."""

    w: float
    b: float
    error: float
    norm: float
    clipped: bool


def cliff_forward(w, b):
    """One unit without input, run for T steps:

        x_t = w sigma(x_{t-1}) + b,  x_0 = 0.5
        E = (sigma(x_T) - 0.7)^2

    w, b: arrays of one shape, a model an entry -> E, cache.
    """
    x, s = np.full_like(w, X_0), []
    for _ in range(T):
        s.append(sigmoid(x))                                                 # s_t = sigma(x_{t-1})
        x = w * s[-1] + b
    y = sigmoid(x)
    return (y - TARGET)**2, (w, s, y)


def cliff_backward(cache):
    """Backpropagation through time: dE/dw and dE/db.

        dx_T = 2 (y - 0.7) y (1 - y)          dx_{t-1} = dx_t w s_t (1 - s_t)
        dw = sum_t dx_t s_t                   db = sum_t dx_t
    """
    w, s, y = cache
    dx = 2 * (y - TARGET) * y * (1 - y)
    dw, db = np.zeros_like(w), np.zeros_like(w)
    for s_t in reversed(s):
        dw += dx * s_t
        db += dx
        dx = dx * w * s_t * (1 - s_t)
    return dw, db


def descend(variant, start=START, lr=CLIFF["lr"], steps=CLIFF["steps"], threshold=CLIFF["threshold"]):
    """Gradient descent on E from `start`, clipped by `variant`: a list of steps + 1 Points."""
    w, b = (Parameter(np.array([value]), name) for value, name in zip(start, "wb"))
    optimizer, points = SGD([w, b], lr=lr), []
    for _ in range(steps + 1):
        where = float(w.value[0]), float(b.value[0])
        optimizer.zero_grad()
        E, cache = cliff_forward(w.value, b.value)
        dw, db = cliff_backward(cache)
        w.grad += dw
        b.grad += db
        points.append(Point(*where, float(E[0]), *clip(variant, [w, b], threshold)))
        optimizer.step()
    return points


def in_frame(point):
    """Whether a point lies in the picture."""
    return all(low <= value <= high for value, (low, high) in zip(point, FRAME))


def thrown(points):
    """The step whose update takes the trajectory out of the frame; None if it stays."""
    return next((n for n, point in enumerate(points[1:]) if not in_frame(point)), None)


def shared_steps(paths):
    """How many steps all the trajectories take together."""
    together = [len({(point.w, point.b) for point in points}) == 1 for points in zip(*paths.values())]
    return [*together, False].index(False) - 1


def cliff(out, settings):
    """Draw cliff.png, write cliff.csv; returns {variant: what happened}."""
    paths = {variant: descend(variant) for variant in VARIANTS}
    write_csv(out / "cliff.csv", ["variant", "step", "w", "b", "loss", "grad_norm"],
              [[variant, n, *point[:4]] for variant, points in paths.items() for n, point in enumerate(points)])
    draw_cliff(out / "cliff.png", paths)
    facts = {variant: cliff_facts(points) for variant, points in paths.items()}
    print(f"cliff: from w = {START[0]}, b = {START[1]}, {CLIFF['steps']} steps of learning rate {CLIFF['lr']}, "
          f"thresholds {CLIFF['threshold']}")
    for variant, fact in facts.items():
        end = f"at ({fact['w']:.3g}, {fact['b']:.3g}), loss {fact['loss']:.2g}"
        how = "stays by the wall" if fact["thrown_at"] is None else (
            f"thrown off at step {fact['thrown_at']} by a gradient of norm {fact['thrown_by']:.3g}")
        acted = "" if variant == "none" else f"; clipping acted at {fact['clipped']} steps"
        print(f"cliff, {VARIANTS[variant]}: {how}; ends {end}{acted}")
    return facts


def cliff_facts(points):
    """A trajectory in numbers, for result.json."""
    at, end = thrown(points), points[-1]
    return {"thrown_at": at, "thrown_by": None if at is None else points[at].norm, "w": end.w, "b": end.b,
            "loss": end.error, "mean_loss_of_last_20": sum(point.error for point in points[-20:]) / 20,
            "largest_grad_norm": max(point.norm for point in points),
            "clipped": sum(point.clipped for point in points[:-1])}


def draw_cliff(path, paths):
    """The surface from above with the trajectories, and beside it their losses and gradient norms."""
    figure = Figure(figsize=(11.0, 5.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=[1.35, 1])
    draw_surface(figure.add_subplot(grid[:, 0]), paths)
    losses, norms = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
    together = shared_steps(paths)
    for variant, points in {None: next(iter(paths.values()))[:together + 1], **paths}.items():
        steps = range(len(points)) if variant is None else range(together, len(points))
        look = {"color": PAINT[variant], "linewidth": 1.5, "label": label_of(variant, together)}
        losses.plot(steps, [points[n].error for n in steps], **look)
        norms.semilogy(steps, [points[n].norm for n in steps], **look)
    norms.axhline(CLIFF["threshold"], color="#555555", linewidth=1.0, linestyle="--", label="threshold")
    for points in paths.values():
        if thrown(points) is not None:
            norms.annotate(f"flat there: {points[-1].norm:.0e}", (len(points) - 1, points[-1].norm), xytext=(0, 5),
                           textcoords="offset points", ha="right", fontsize=8)
    losses.set(ylabel="loss E")
    norms.set(ylabel="gradient norm before clipping", xlabel="step")
    for axes in (losses, norms):
        axes.grid(True, color="#e4e4e4", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    losses.legend(frameon=False, fontsize=8)
    norms.legend(handles=norms.lines[-1:], frameon=False, fontsize=8, loc="center left")
    save(figure, path)


def label_of(variant, together):
    return VARIANTS[variant] if variant else f"all three, the first {together} steps"


def draw_surface(axes, paths):
    """The loss over (w, b) as shades, the trajectories as lines; where one leaves the frame is written."""
    (w_low, w_high), (b_low, b_high) = FRAME
    w, b = np.meshgrid(np.linspace(w_low, w_high, 600), np.linspace(b_low, b_high, 600))
    shades = axes.contourf(w, b, cliff_forward(w, b)[0], 24, cmap="Greys", vmin=-0.03, vmax=0.75)
    axes.figure.colorbar(shades, ax=axes, location="right", pad=0.02, label="loss E",
                         ticks=[0, 0.1, 0.2, 0.3, 0.4], aspect=40)
    together = shared_steps(paths)
    for variant, points in {None: next(iter(paths.values()))[:together + 1], **paths}.items():
        axes.plot(*line(points if variant is None else points[together:]), "o-", color=PAINT[variant], markersize=3,
                  linewidth=1.4, label=label_of(variant, together))
        if thrown(points) is not None:
            write_where(axes, points, PAINT[variant])
    axes.plot(*START, "o", color="#222222", markersize=7)
    axes.annotate("start", START, xytext=(7, 4), textcoords="offset points")
    axes.set(xlim=FRAME[0], ylim=FRAME[1], xlabel="w", ylabel="b",
             title=r"$x_t = w\,\sigma(x_{t-1}) + b$,  $E = (\sigma(x_{50}) - 0.7)^2$")
    axes.legend(loc="lower left", fontsize=8)


def write_where(axes, points, colour):
    """Beside the line that leaves the frame: where it leads, and the gradient that did it."""
    at = thrown(points)
    here, there = points[at], points[at + 1]
    edge = min((high - low) / abs(move) for low, high, move in (
        (value, bound[move > 0], move) for value, bound, move in (
            (here.w, FRAME[0], there.w - here.w), (here.b, FRAME[1], there.b - here.b))))
    axes.annotate(f"thrown to ({there.w:.1f}, {there.b:.1f})\nby a gradient of norm {here.norm:.0f}",
                  (here.w + 0.9 * edge * (there.w - here.w), here.b + 0.9 * edge * (there.b - here.b)),
                  xytext=(14, -4), textcoords="offset points", color=colour, fontsize=9, va="center")


def line(points):
    """(w's, b's) of points."""
    return [point.w for point in points], [point.b for point in points]


# ---- the table -----------------------------------------------------------------------------------------

RUN = {"variant": str, "seed": int, "diverged_at": (int, type(None)), "why": (str, type(None)), "steps": int,
       "test_mse": (float, type(None)), "baseline": float, "clipped": int, "largest_grad_norm": (float, type(None)),
       "seconds": float, "curve": list}                                      # what runs.json keeps of each run


def train_run(settings, seed, variant, data, steps, show=lambda step, row: None):
    """One run, to its end or until it diverges; a dict as RUN says. `curve` has rows [step, loss, gradient norm]: the
    first --log-every steps, then the means over so many steps (of the norm, before clipping, the newest)."""
    began, (train, test) = time.monotonic(), data
    model = build(settings, seed).to_device(device_of(settings))
    batches = Batches(train, settings["batch_size"], seed=seed)
    threshold = {"none": None, "value": settings["clip_value"], "norm": settings["clip_norm"]}[variant]
    parameters, curve, losses, why = model.parameters(), [], [], None
    optimizer, first, acted, largest = SGD(parameters, lr=settings["lr"]), None, 0, 0.0
    with np.errstate(all="ignore"):                                          # what is not finite is looked for
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            try:
                loss = float(adding.forward_backward(model, to_device(batches[step - 1], device_of(settings)), None))
            except ArithmeticError as error:                                 # RRA's weights sum to nothing
                why = str(error)
                break
            first = loss if first is None else first
            norm, acts = clip(variant, parameters, threshold)
            losses.append(loss)
            largest, acted, why = max(largest, norm), acted + acts, divergence(loss, first)
            if why or step <= settings["log_every"] or step % settings["log_every"] == 0 or step == steps:
                curve.append([step, sum(losses) / len(losses), norm])
                losses = []
                show(step, curve[-1])
            if why:
                break
            optimizer.step()
        test_mse = None if why else test_error(model, test, settings)
    if not why and test_mse is None:
        why = "the test MSE is not finite"
    return {"variant": variant, "seed": seed, "diverged_at": step if why else None, "why": why, "steps": step,
            "test_mse": test_mse, "baseline": adding.always_one(test), "clipped": acted,
            "largest_grad_norm": finite_or_none(largest), "seconds": round(time.monotonic() - began, 2),
            "curve": [[step, finite_or_none(loss), finite_or_none(norm)] for step, loss, norm in curve]}


def finite_or_none(value):
    """JSON has no NaN and no Inf."""
    return value if math.isfinite(value) else None


def divergence(loss, first):
    """Why a run counts as diverged, or None."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if loss > BLOW_UP * first:
        return f"the loss is {loss:.4g}, above {BLOW_UP} times its first value {first:.4g}"
    return None


def build(settings, seed):
    """The model as in tasks/adding.py: it starts the same whatever the clipping."""
    return adding.build({**adding.DEFAULTS, **settings, "seed": seed}, settings["model"])


def generate(settings, seed):
    """(train, test) of a seed."""
    return adding.generate({**settings, "seed": seed})


def test_error(model, test, settings):
    """The test MSE; None where it is not a finite number."""
    try:
        mse = adding.evaluation(test, device_of(settings))(model)["test_mse"]
    except ArithmeticError:
        return None
    return finite_or_none(mse)


def wanted(settings):
    """[(seed, variant)] of the table, in the order in which they are run: a seed's three variants together."""
    seeds = range(settings["seed"], settings["seed"] + settings["seeds"])
    return [(seed, variant) for seed in seeds for variant in VARIANTS]


def table(out, settings, steps, runs):
    """Make the runs that `runs` lacks, keeping each as soon as it is done; returns the table's rows.

    Raises Interrupted after Ctrl-C; the runs that are done are kept.
    """
    done = {(one["seed"], one["variant"]) for one in runs}
    missing = [pair for pair in wanted(settings) if pair not in done]
    progress, data_of = Progress(0, len(missing) * steps or 1, settings["quiet"]), (None, None)
    try:
        for n, (seed, variant) in enumerate(missing):
            if data_of[0] != seed:
                data_of = seed, generate(settings, seed)
            show = lambda step, row, n=n: progress.update(n * steps + step, {"loss": row[1], "|g|": row[2]})
            runs.append(train_run(settings, seed, variant, data_of[1], steps, show))
            keep(out, settings, runs)
            progress.update((n + 1) * steps)
            progress.line(f"{VARIANTS[variant]}, seed {seed}: {outcome(runs[-1])}")
    except KeyboardInterrupt:
        raise Interrupted(f"stopped: {len(runs)} of {len(wanted(settings))} runs are done and kept in {out}: go on "
                          f"with --resume {out}") from None
    finally:
        progress.close()
    keep(out, settings, runs)
    draw_losses(out / "losses.png", runs, settings)
    return rows_of(runs)


def outcome(one):
    """A run in a few words."""
    return f"diverged at step {one['diverged_at']}: {one['why']}" if one["why"] else f"test MSE {one['test_mse']:.4f}"


def keep(out, settings, runs):
    """Write runs.json, which --resume reads, and log.csv and table.md, which are made from it; each atomically."""
    order = {pair: n for n, pair in enumerate(wanted(settings))}
    runs.sort(key=lambda one: order[one["seed"], one["variant"]])
    write_json(out / "runs.json", runs)
    write_csv(out / "log.csv", ["variant", "seed", "step", "loss", "grad_norm"],
              [[one["variant"], one["seed"], *row] for one in runs for row in one["curve"]])
    write_atomically(out / "table.md", markdown(rows_of(runs)).encode())


def read_runs(out, settings):
    """The runs kept in a folder. Raises CheckpointError for a damaged file, or one of other runs."""
    path = out / "runs.json"
    if not path.exists():
        return []
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))
        fits = isinstance(runs, list) and all(map(is_run, runs))
        pairs = [(one["seed"], one["variant"]) for one in runs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from error
    if not fits or len(set(pairs)) < len(pairs) or set(pairs) - set(wanted(settings)):
        raise CheckpointError(f"{path}: damaged: it does not hold runs of this table")
    return runs


def is_run(one):
    """Whether something read from a file is what `train_run` returns."""
    number = (int, float, type(None))
    return (set(one) == set(RUN) and all(isinstance(one[key], RUN[key]) for key in RUN) and one["steps"] > 0
            and (one["why"] is None) == (one["diverged_at"] is None) == (one["test_mse"] is not None)
            and all(len(row) == 3 and all(isinstance(cell, number) for cell in row) for row in one["curve"]))


def rows_of(runs):
    """The table: a dict for each variant that has runs."""
    return [row_of(variant, [one for one in runs if one["variant"] == variant]) for variant in VARIANTS
            if any(one["variant"] == variant for one in runs)]


def row_of(variant, runs):
    """Counts over a variant's runs; the test MSEs are of those that did not diverge."""
    left = [one for one in runs if one["why"] is None]
    errors = [one["test_mse"] for one in left]
    return {"variant": variant, "seeds": len(runs), "diverged": len(runs) - len(left),
            "diverged_at": sorted(one["diverged_at"] for one in runs if one["why"]),
            "learnt": sum(one["test_mse"] < LEARNT * one["baseline"] for one in left),
            "median_test_mse": float(np.median(errors)) if errors else None,
            "baseline": float(np.median([one["baseline"] for one in runs])),
            "clipped_share": sum(one["clipped"] for one in runs) / sum(one["steps"] for one in runs)}


def markdown(rows):
    """The rows as a Markdown table."""
    head = ("| clipping | seeds | diverged | at step | learnt | median test MSE of the rest | always 1 "
            "| clipping acted |\n|---|---|---|---|---|---|---|---|\n")
    return head + "".join(
        f"| {VARIANTS[row['variant']]} | {row['seeds']} | {row['diverged']} | {span(row['diverged_at'])} "
        f"| {row['learnt']} | {'-' if row['median_test_mse'] is None else format(row['median_test_mse'], '.4f')} "
        f"| {row['baseline']:.4f} | {'-' if row['variant'] == 'none' else format(row['clipped_share'], '.1%')} |\n"
        for row in rows)


def span(steps):
    """The first and last of sorted numbers: "2 to 7"."""
    return "-" if not steps else f"{steps[0]}" if steps[0] == steps[-1] else f"{steps[0]} to {steps[-1]}"


def draw_losses(path, runs, settings):
    """losses.png: the training losses, a panel a variant, a line a run; a cross where one diverged."""
    figure = Figure(figsize=(11.0, 4.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels, columns = figure.subplots(1, 3, sharex=True, sharey=True), rows_of(runs)
    for axes, (variant, name), row in zip(panels, VARIANTS.items(), columns):
        ours = [one for one in runs if one["variant"] == variant]
        for one in ours:
            points = [(step, loss) for step, loss, _ in one["curve"] if loss is not None]
            x, y = zip(*points) if points else ((), ())
            axes.plot(x, y, color=PAINT[variant], linewidth=0.9, alpha=0.7)
            if one["why"] and points:
                axes.plot(*points[-1], "x", color="#222222", markersize=7, zorder=3)
        axes.axhline(row["baseline"], color="#555555", linewidth=1.0, linestyle="--")
        axes.annotate("always 1", (0.02, row["baseline"]), xytext=(0, -11), textcoords="offset points", fontsize=8,
                      xycoords=("axes fraction", "data"))
        axes.set(title=f"{name}: {row['diverged']} of {row['seeds']} diverged", xlabel="step", xscale="log",
                 yscale="log")
        axes.grid(True, color="#e4e4e4", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("training loss")
    figure.suptitle(f"Adding problem, S = {settings['length']}, {settings['model'].upper()}, {settings['hidden']} "
                    f"units, SGD, learning rate {settings['lr']:g}", fontsize=11)
    save(figure, path)


# ---- files ---------------------------------------------------------------------------------------------

def write_json(path, content):
    write_atomically(path, f"{json.dumps(content, allow_nan=False)}\n".encode())


def write_csv(path, columns, rows):
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([columns, *(["" if cell is None else cell for cell in row] for row in rows)])
    write_atomically(path, buffer.getvalue().encode())


# ---- the command ---------------------------------------------------------------------------------------

def parse(argv):
    """The settings of this run; see `--help`."""
    parser = parser_for("clipping", __doc__)
    own = parser.add_argument_group("of this task")
    own.add_argument("--only", choices=["cliff", "table"], help="one of the two parts")
    own.add_argument("--seeds", type=whole(1), help="the table's runs a variant, from --seed up (default 10)")
    own.add_argument("--model", choices=["rra", "lstm"], help="default lstm")
    own.add_argument("-S", "--length", type=whole(2), help="steps of a sequence (default 20)")
    own.add_argument("-K", "--window", type=whole(0), help="RRA: states attended to (default 10)")
    own.add_argument("--hidden", type=whole(1), help="units (default 16)")
    own.add_argument("--train-size", type=whole(1), help="default 20,000")
    own.add_argument("--test-size", type=whole(1), help="default 2,000")
    own.add_argument("--log-every", type=whole(1), help="iterations a row of log.csv (default 20)")
    settings = settings_of(parser, argv, lambda given: DEFAULTS)
    given = {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}
    refuse_what_has_no_meaning(given, settings)
    return settings


def refuse_what_has_no_meaning(given, settings):
    """Raises UsageError for flags that other tasks have and this one, or the part that is asked for, has no use for."""
    if settings["optimizer"] != "sgd":
        raise UsageError(f"--optimizer is {settings['optimizer']!r}; expected sgd: the table shows clipping alone")
    if "eval_every" in given:
        raise UsageError(f"--eval-every is {given['eval_every']}; expected none: a run is evaluated once, at its end "
                         "(--log-every sets the rows of log.csv)")
    for key in ("clip_norm", "clip_value"):
        if not settings[key]:
            raise UsageError(f"--{key.replace('_', '-')} is 0; expected a threshold above 0: the runs without clipping "
                             "are made in any case")
    of_the_table = sorted(set(given) - OF_BOTH)
    if settings["only"] == "cliff" and of_the_table:
        raise UsageError(f"--{of_the_table[0].replace('_', '-')} is of the table; --only cliff draws one picture, with "
                         "settings of its own")
    if settings["resume"]:
        saved = read_config(settings["resume"])
        for key in ("steps", "epochs"):
            if settings[key] != saved[key]:
                raise UsageError(f"--{key} {settings[key]} differs from the run in {settings['resume']}, which has "
                                 f"{saved[key]!r}; a resumed run keeps its settings")


def main(argv):
    settings = parse(argv)
    device_of(settings)                             # before anything is written
    steps = steps_of(settings, settings["train_size"] // settings["batch_size"] or 1, STEPS)
    if settings["only"] != "cliff":
        try:                                        # nor is anything written for settings that do not fit
            build(settings, settings["seed"])
            Batches(generate(settings, settings["seed"])[0], settings["batch_size"], seed=settings["seed"])
        except ValueError as error:
            raise UsageError(str(error)) from error
    out, hold = open_run_folder("clipping", settings)
    runs = read_runs(out, settings) if settings["resume"] else []
    if settings["resume"]:
        note_resumed(out, settings)
        if settings["only"] != "cliff":
            say(settings, f"{len(runs)} of {len(wanted(settings))} runs are done")
    say(settings, f"writing to {out}")
    result, began = {}, time.monotonic()
    if settings["only"] != "table":
        result["cliff"] = cliff(out, settings)
    if settings["only"] != "cliff":
        result["table"] = table(out, settings, steps, runs)
        print(markdown(result["table"]), end="")
    write_json(out / "result.json", {**result, "seconds": round(time.monotonic() - began, 1)})
    del hold
    say(settings, f"figures: {', '.join(str(path) for path in sorted(Path(out).glob('*.png')))}")


if __name__ == "__main__":
    sys.exit(run(main))
