"""What gradcheck found: a table, and where in a tensor a gradient is wrong."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Row:
    """One tensor. `errors` is |analytic - numeric| / (atol + rtol max): above 1 is wrong, NaN is at a kink; None in
    direction mode."""

    name: str
    shape: tuple
    status: str                    # ok, kink, wrong
    wrong: int
    kinks: int
    checked: int
    index: Any                     # of the worst entry, or the name of a direction
    analytic: float
    numeric: float
    relative_error: float
    errors: Any = None
    bad: Any = None


@dataclass(repr=False)
class Report:
    """`.ok` is True when every gradient agrees and no rule of the contract is broken; `print(report)` is a table.

    rows        one per tensor
    problems    sentences: rules of the contract that are broken
    notes       sentences that are not errors, about kinks for example
    plain       the Report on the same layer with fast=False, where it has a fast form; else None
    """

    layer: str
    mode: str
    rows: list = field(default_factory=list)
    problems: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    plain: Any = None

    @property
    def ok(self):
        return self._agrees() and (self.plain is None or self.plain.ok)

    def _agrees(self):
        return not self.problems and all(row.status != "wrong" for row in self.rows)

    def __bool__(self):
        return self.ok

    def __str__(self):
        head = ("tensor", "shape", "worst index", "analytic", "numeric", "rel. error", "wrong", "")
        table = [head] + [(r.name, str(r.shape), str(r.index), f"{r.analytic: .9e}", f"{r.numeric: .9e}",
                           f"{r.relative_error:.1e}", f"{r.wrong}/{r.checked}", r.status) for r in self.rows]
        table = table if self.rows else []
        widths = [max((len(line[n]) for line in table), default=0) for n in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
        lines += [f"problem: {problem}" for problem in self.problems] + [f"note: {note}" for note in self.notes]
        verdict = "every gradient agrees" if self._agrees() else "WRONG"
        form = "" if self.plain is None else ", the fast form"
        lines = [f"gradcheck of {self.layer} ({self.mode} mode){form}: {verdict}", *lines]
        if self.plain is not None:
            first, *rest = str(self.plain).splitlines()
            lines.append(f"{first.partition(':')[0]}, the equations with fast=False:{first.partition(':')[2]}")
            lines += [] if self.plain.ok else rest
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self, path):
        """Draw, per tensor, where analytic and numeric differ, as PNG. Raises ValueError in direction mode."""
        from minigrad.gradcheck.plot import draw

        if not self.rows or any(row.errors is None for row in self.rows):
            raise ValueError("Report.plot: nothing was compared entry by entry; expected mode='full'")
        draw(self, path)


def relative_error(analytic, numeric):
    """|a - n| / max(|a|, |n|); 0 when both are 0, infinite when one is not finite."""
    difference, size = abs(analytic - numeric), max(abs(analytic), abs(numeric))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else 0.0
