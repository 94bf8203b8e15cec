"""The tasks' figures, as PNG; no window system is needed and no global state of matplotlib is touched."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ["#1f5fa8", "#d1622b", "#2f8f5b", "#8a4fa3", "#b08b1e", "#4a4a4a", "#c0392b", "#16a0a0"]


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


def draw_curves(path, series, *, title, x_label, y_label, horizontal=None, log_y=False, colours=None):
    """One line a series ({name: [(x, y)]}), and a dashed horizontal line (value, name)."""
    figure, axes = new_figure()
    for n, (name, points) in enumerate(series.items()):
        colour = colours[n] if colours is not None else COLOURS[n % len(COLOURS)]
        x, y = zip(*points) if points else ((), ())
        axes.plot(x, y, color=colour, linewidth=1.8, label=name, marker="o" if len(points) < 2 else None)
    if horizontal is not None:
        value, name = horizontal
        axes.axhline(value, color="#555555", linewidth=1.0, linestyle="--", label=name)
    if log_y:
        axes.set_yscale("log")
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=8, ncols=2 if len(series) > 6 else 1)
    save(figure, path)


def draw_attention_weights(path, weights, offset, title):
    """The normalised weights over training, one line an offset: {k: [(step, w_hat_k)]} (the paper's Figure 7)."""
    from matplotlib import colormaps

    shades = colormaps["viridis"]
    names = {f"$h_{{t-{k + offset - 1}}}$": points for k, points in weights.items()}
    colours = [shades(0.92 * n / max(len(names) - 1, 1)) for n in range(len(names))]
    draw_curves(path, names, title=title, x_label="iteration", y_label=r"$\hat w_k$", colours=colours)


def save(figure, path):
    """Write a figure as PNG."""
    figure.savefig(Path(path), format="png")
