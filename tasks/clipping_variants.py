"""What the two parts of tasks/clipping.py share: the ways of clipping, their names and colours, a table as a file."""

import csv
import io

from minigrad.clipping import clip_grad_norm, clip_grad_value, grad_norm
from minigrad.tensors import write_atomically
from tasks.frame.figures import COLOURS

VARIANTS = {"none": "no clipping", "value": "by value", "norm": "by norm"}
PAINT = {"none": COLOURS[6], "value": COLOURS[2], "norm": COLOURS[0], None: "#222222"}    # None: what they share


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


def write_csv(path, columns, rows):
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([columns, *(["" if cell is None else cell for cell in row] for row in rows)])
    write_atomically(path, buffer.getvalue().encode())
