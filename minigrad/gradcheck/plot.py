"""Where in each tensor the gradient is wrong, as a picture."""

import math
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

LOW, HIGH = 1e-6, 1e6              # of the colour scale: error over tolerance


def as_image(array):
    """Two axes: the last one across, all others down; a vector is one row."""
    return array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(1, -1)


def draw(report, path):
    """One panel per tensor: colour is error / tolerance (blue agrees, red does not, grey is a kink), a cross marks a
    wrong entry."""
    colours = colormaps["RdYlBu_r"].with_extremes(bad="lightgrey")
    columns = min(3, len(report.rows))
    rows = math.ceil(len(report.rows) / columns)
    figure = Figure(figsize=(4.2 * columns + 0.8, 2.6 * rows + 0.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.ravel()[len(report.rows):]:
        panel.set_visible(False)
    for panel, row in zip(panels.ravel(), report.rows):
        errors, bad = as_image(row.errors), as_image(row.bad)
        image = panel.imshow(np.clip(errors, LOW, HIGH), norm=LogNorm(LOW, HIGH), cmap=colours, aspect="auto",
                             interpolation="nearest")
        down, across = np.nonzero(bad)
        if down.size <= 400:
            panel.plot(across, down, "x", color="black", markersize=5)
        panel.set_title(f"{row.name} {row.shape}: {row.wrong} of {row.checked} wrong", fontsize=9)
        panel.tick_params(labelsize=7)
        panel.locator_params(integer=True, nbins=6)
        if errors.shape[0] == 1:
            panel.set_yticks([])                                 # one row, or one column, has no axis to number
        if errors.shape[1] == 1:
            panel.set_xticks([])
    figure.colorbar(image, ax=panels, shrink=0.8, label="error / tolerance (above 1: wrong)")
    verdict = "every gradient agrees" if report.ok else "WRONG"
    figure.suptitle(f"gradcheck of {report.layer}: {verdict}", fontsize=11)
    figure.savefig(Path(path), format="png")
