"""The cliff of Pascanu et al. 2013 (section 2.3, Figure 6): gradient descent, clipped and not. See clipping.py."""

from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from minigrad import Parameter
from minigrad.backend import sigmoid
from minigrad.optim import SGD
from tasks.clipping_variants import PAINT, VARIANTS, clip, write_csv
from tasks.frame.figures import save

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


def cliff(out):
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
    """The surface from above with the trajectories, and next to it their losses and gradient norms."""
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
    """Next to the line that leaves the frame: where it leads, and the gradient that did it."""
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
