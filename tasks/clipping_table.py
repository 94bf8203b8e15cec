"""The adding problem under plain SGD, clipped and not: how many runs diverge, how many learn. See clipping.py."""

import json
import math
import time

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from minigrad.backend import to_device
from minigrad.data import Batches
from minigrad.optim import SGD
from minigrad.tensors import write_atomically
from minigrad.training import Interrupted, Progress
from tasks import adding
from tasks.clipping_variants import PAINT, VARIANTS, clip, write_csv
from tasks.frame import device_of
from tasks.frame.figures import save

BLOW_UP = 10                                        # times its first loss: diverged
LEARNT = 0.5                                        # times the test MSE of always predicting 1


def train_run(settings, seed, variant, data, steps, show=lambda step, row: None):
    """One run, to its end or until it diverges. `curve` has rows [step, loss, gradient norm]: the
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
            "test_mse": test_mse, "baseline": adding.always_one((None, test)), "clipped": acted,
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
    return adding.build({**adding.DEFAULTS, **settings, "seed": seed})


def generate(settings, seed):
    """(train, test) of a seed."""
    return adding.generate({**settings, "seed": seed})


def test_error(model, test, settings):
    """The test MSE; None where it is not a finite number."""
    try:
        mse = adding.evaluation(settings, (None, test), device_of(settings))(model, 0)["test_mse"]
    except ArithmeticError:
        return None
    return finite_or_none(mse)


def wanted(settings):
    """[(seed, variant)] of the table, in the order in which they are run: a seed's three variants together."""
    seeds = range(settings["seed"], settings["seed"] + settings["seeds"])
    return [(seed, variant) for seed in seeds for variant in VARIANTS]


def table(out, settings):
    """Make all runs, keeping each as soon as it is done; returns the table's rows.

    Raises Interrupted after Ctrl-C; the runs that are done are kept.
    """
    pairs, steps, runs, data_of = wanted(settings), settings["steps"], [], (None, None)
    progress = Progress(0, len(pairs) * steps, settings["quiet"])
    try:
        for n, (seed, variant) in enumerate(pairs):
            if data_of[0] != seed:
                data_of = seed, generate(settings, seed)
            show = lambda step, row, n=n: progress.update(n * steps + step, {"loss": row[1], "|g|": row[2]})
            runs.append(train_run(settings, seed, variant, data_of[1], steps, show))
            keep(out, runs)
            progress.update((n + 1) * steps)
            progress.line(f"{VARIANTS[variant]}, seed {seed}: {outcome(runs[-1])}")
    except KeyboardInterrupt:
        raise Interrupted(f"stopped: {len(runs)} of {len(pairs)} runs are done and kept in {out}") from None
    finally:
        progress.close()
    draw_losses(out / "losses.png", runs, settings)
    return rows_of(runs)


def outcome(one):
    """A run in a few words."""
    return f"diverged at step {one['diverged_at']}: {one['why']}" if one["why"] else f"test MSE {one['test_mse']:.4f}"


def keep(out, runs):
    """Write runs.json, and log.csv and table.md, which are made from it; each atomically."""
    write_atomically(out / "runs.json", f"{json.dumps(runs, allow_nan=False)}\n".encode())
    write_csv(out / "log.csv", ["variant", "seed", "step", "loss", "grad_norm"],
              [[one["variant"], one["seed"], *row] for one in runs for row in one["curve"]])
    write_atomically(out / "table.md", markdown(rows_of(runs)).encode())


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
