"""The tasks' figures, as PNG; no window system is needed and no global state of matplotlib is touched."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ["#1f5fa8", "#d1622b", "#2f8f5b", "#8a4fa3", "#b08b1e", "#4a4a4a", "#c0392b", "#16a0a0"]


class Curve(NamedTuple):
    """The number by which a task judges its runs, and the figure that shows it over the iterations."""

    metric: str                         # its name among the evaluation's
    y_label: str
    title: Callable                     # title(settings)
    file: str | None = "curve.png"      # None: the task draws it itself
    best: str | None = None             # the name that chooses `best`, where it is another one
    maximize: bool = False              # larger is better
    baseline: Callable | None = None    # baseline(data) -> what the number has to beat, a dashed line
    baseline_name: str = "baseline"
    more: Callable = lambda log: {}     # more(log) -> {name: [(step, value)]}, further lines in a run's own figure


def draw_curve(task, run):
    """The figure of one run."""
    log = run.trainer.log
    draw_series(task, run.settings, {task.label_of(run.settings): log}, run.data, run.trainer.out,
                task.curve_of(run.data).more(log))


def draw_comparison(task, settings, runs, data, out):
    """The figure of several: [(settings, log)]."""
    draw_series(task, settings, {task.label_of(own): log for own, log in runs}, data, out)


def draw_series(task, settings, logs, data, out, more=None):
    curve, horizontal = task.curve_of(data), None
    if curve.file is None:
        return
    if curve.baseline:
        value = curve.baseline(data)
        horizontal = (value, f"{curve.baseline_name}: {value:.3f}")
    series = {name: without_first(log.column(curve.metric)) for name, log in logs.items()}
    draw_curves(out / curve.file, {**series, **(more or {})}, title=curve.title(settings), x_label="iteration",
                y_label=curve.y_label, horizontal=horizontal)


def mean_between(log, column, evaluations):
    """[(step, mean)] of a column at the rows where `evaluations`, another one, has a value: the mean since the last."""
    points, values = [], []
    for row in log.rows:
        values += [] if row[column] is None else [row[column]]
        if row["step"] and row[evaluations] is not None:
            points.append((row["step"], sum(values) / len(values)))
            values = []
    return points


def draw_norm(run, title):
    """grad_norm.png: the gradient's norm over the iterations, and where it is clipped."""
    clip = run.settings["clip_norm"]
    draw_curves(run.trainer.out / "grad_norm.png", {"global norm before clipping": run.trainer.log.column("grad_norm")},
                title=title, x_label="iteration", y_label="gradient norm", log_y=True,
                horizontal=(clip, f"clipped at {clip:g}") if clip else None)


def without_first(points):
    """[(step, value)] from the first training step on; the untrained model's would squash the figure."""
    return [(step, value) for step, value in points if step]


def new_figure(width=7.0, height=4.2):
    """(figure, axes) in the house style."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def draw_curves(path, series, *, title, x_label, y_label, horizontal=None, colours=None, log_y=False):
    """One line a series, {name: [(x, y)]}, and a dashed horizontal line (value, name)."""
    draw_runs(path, {name: [points] for name, points in series.items()}, title=title, x_label=x_label,
              y_label=y_label, horizontal=horizontal, colours=colours, log_y=log_y)


def draw_runs(path, groups, *, title, x_label, y_label, horizontal=None, colours=None, log_y=False, in_step=True):
    """One thick line a group, {name: [[(x, y)] of each run]}: the mean, over the runs as thin lines if several.

    in_step=False: the runs' x differ (seconds); the mean is then that of their first points, their second ones, ...
    """
    figure, axes = new_figure()
    for n, (name, runs) in enumerate(groups.items()):
        colour = colours[n] if colours is not None else COLOURS[n % len(COLOURS)]
        for points in runs if len(runs) > 1 else []:
            axes.plot(*zip(*points), color=colour, linewidth=0.7, alpha=0.55)
        mean = mean_points(runs) if in_step else [
            tuple(sum(values) / len(runs) for values in zip(*points)) for points in zip(*runs)]
        x, y = zip(*mean) if mean else ((), ())
        axes.plot(x, y, color=colour, linewidth=1.9, label=name, marker="o" if len(mean) == 1 else None)
    if horizontal is not None:
        value, name = horizontal
        axes.axhline(value, color="#555555", linewidth=1.0, linestyle="--", label=name)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.margins(x=0.01)
    if log_y:
        axes.set_yscale("log")
    if len(groups) > 6:                              # many: next to the curves, not over them
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    else:
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def mean_points(runs):
    """[(x, mean y)] at the x that all runs have."""
    values = [dict(points) for points in runs]
    shared = [x for x in values[0] if all(x in other for other in values)]
    return [(x, sum(run[x] for run in values) / len(values)) for x in shared]


def draw_attention_weights(path, weights, offset, title):
    """The normalised weights over training, one line an offset: {k: [(step, w_hat_k)]} (the paper's Figure 7)."""
    shades = colormaps["turbo"]
    names = {f"$h_{{t-{k + offset - 1}}}$": points for k, points in weights.items()}
    colours = [shades(0.92 * n / max(len(names) - 1, 1)) for n in range(len(names))]
    draw_curves(path, names, title=title, x_label="iteration", y_label=r"$\hat w_k$", colours=colours)


def save(figure, path):
    """Write a figure as PNG."""
    figure.savefig(Path(path), format="png")
