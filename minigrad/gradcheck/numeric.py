"""The numeric side: the slope of L along a line, by central differences, and what to say when it disagrees."""

import math
from typing import NamedTuple

import numpy as np

ROUNDING = 2.0**-52
CLOSER = (0.1, 0.01)               # of eps: tried in turn before a difference is called an error
AT_KINK = (1e-1, 1e-3, 1e-4)       # of eps: a kink's jump in slope is the same at each of them
STEADY = 0.05                      # relative change of that jump that rounding may cause
TINY = 0.01                        # atol may hide at most this part of a tensor's largest slope
SINGLE = 2e-9                      # relative: double precision does better, single precision (6e-8) does not


class Tolerances(NamedTuple):
    """Two slopes agree when |a - n| <= atol + rtol max(|a|, |n|); eps is the step."""

    eps: float
    rtol: float
    atol: float

    def error(self, analytic, numeric):
        """The difference in units of what is tolerated: above 1 is wrong; NaN and infinity are infinitely wrong."""
        difference = abs(analytic - numeric)
        allowed = self.atol + self.rtol * max(abs(analytic), abs(numeric))
        if not math.isfinite(difference):
            return math.inf
        return difference / allowed if allowed else math.inf if difference else 0.0

    def agree(self, analytic, numeric):
        return self.error(analytic, numeric) <= 1


class Verdict(NamedTuple):
    """status: "ok"; "beside" (ok, measured next to a kink that is nearer than eps); "kink" (at one: the analytic value
    is a subgradient, there is no more to say); "wrong". error: in units of what is tolerated."""

    status: str
    numeric: float
    error: float


class Line:
    """L(t) = sum <dout, outputs(t)>, where `move(t)` puts the layer's tensors at the point t of a line."""

    def __init__(self, layer, move, tolerances):
        self.layer, self.move, self.tolerances = layer, move, tolerances

    def at(self, t):
        self.move(t)
        return self.layer.outputs()

    def central(self, scale=1.0):
        """(slope by the central difference, how far the rounding of the outputs can have moved it)."""
        eps = self.tolerances.eps * scale
        low, high = self.at(-eps), self.at(eps)
        self.move(0)
        with np.errstate(invalid="ignore", over="ignore"):
            moved = high - low                                   # the difference comes first, so that little cancels
            weighted = (self.layer.flat_dout * high)[moved != 0]
            return (float(self.layer.flat_dout @ moved) / (2 * eps),
                    ROUNDING * float(np.linalg.norm(weighted)) / (2 * eps))

    def slope(self, scale=1.0):
        return self.central(scale)[0]

    def rounding(self):
        """What the rounding of all outputs, moved or not, can make of a slope."""
        return 2 * ROUNDING * self.layer.size / self.tolerances.eps

    def judge(self, analytic, first):
        """Verdict on an analytic slope, `first` being the central difference at eps."""
        error = self.tolerances.error(analytic, first)
        if error <= 1 or error == math.inf:
            return Verdict("ok" if error <= 1 else "wrong", first, error)
        return self.closer(analytic, first) or self.at_kink(analytic) or Verdict("wrong", first, error)

    def closer(self, analytic, first):
        """A Verdict if the slopes agree once eps is smaller, else None: L is strongly curved, or a kink is near.

        Where rounding moves the smaller difference by more than is tolerated it could agree by chance: that is no
        evidence, and the difference stays an error.
        """
        before = first
        for scale in CLOSER:
            near, noise = self.central(scale)
            if not noise <= self.tolerances.atol + self.tolerances.rtol * abs(analytic):
                return None
            change = near - before
            for limit in (near + change / 99, near + change / 9):    # Richardson: of eps^2, or of eps at a
                if self.tolerances.agree(analytic, limit):                       # jump of the second derivative
                    return Verdict("ok", limit, self.tolerances.error(analytic, limit))
            if self.tolerances.agree(analytic, near) and self.tolerances.agree(
                    analytic, self.slope(scale / 2)):            # twice: what is curved would have moved on
                return Verdict("beside", near, self.tolerances.error(analytic, near))
            if self.tolerances.agree(before, near):
                return None                                              # a straight piece: nothing will change
            before = near
        return None

    def at_kink(self, analytic):
        """A Verdict if L has a kink at t = 0 and the analytic slope is a subgradient there, else None.

        Every output is judged by itself, since each kink may choose its own subgradient: an output has a kink if its
        slopes to the right and to the left differ by one and the same jump at all of AT_KINK (what is smooth, however
        sharp, has a smaller jump nearer by; what is a step, or rounding, has a larger one).
        """
        here = self.at(0)
        left, right = self.one_sided(here, AT_KINK[0])
        jump = right - left
        noise = ROUNDING * np.abs(self.layer.flat_dout * here) / (AT_KINK[0] * self.tolerances.eps)
        kink = np.abs(jump) > 100 * noise
        for scale in AT_KINK[1:]:
            if not kink.any():
                return None
            near_left, near_right = self.one_sided(here, scale)
            kink &= np.abs(near_right - near_left - jump) <= STEADY * np.abs(jump)
        middle = (left + right) / 2
        low = float(np.where(kink, np.minimum(left, right), middle).sum())
        high = float(np.where(kink, np.maximum(left, right), middle).sum())
        inside = kink.any() and self.tolerances.agree(analytic, min(max(analytic, low), high))
        return Verdict("kink", float(middle.sum()), 0.0) if inside else None

    def one_sided(self, here, scale):
        """Each output's slopes, weighted by dout, to the left and to the right, extrapolated to a step of zero."""
        eps = self.tolerances.eps * scale
        slopes = []
        with np.errstate(invalid="ignore", over="ignore"):
            for step in (-eps, eps):
                far, near = (self.at(step) - here) / step, (self.at(step / 2) - here) / (step / 2)
                slopes.append(self.layer.flat_dout * (2 * near - far))
        self.move(0)
        return slopes

    def single_precision(self, analytic, size):
        """The relative difference, if it is beyond doubt larger than double precision leaves; else 0."""
        slopes = [(4 * self.slope(scale / 2) - self.slope(scale)) / 3
                  for scale in (0.95, 0.9, 0.85, 0.8, 0.75)]
        difference, spread = abs(sum(slopes) / len(slopes) - analytic), max(slopes) - min(slopes)
        known = max(SINGLE * size, 5 * spread, self.rounding(), self.layer.floor)
        return difference / size if difference > known else 0.0


def steps(array):
    """What eps is multiplied by at each entry: its size where above 1, so that the step is not lost in rounding."""
    return np.where(np.isfinite(array), np.maximum(np.abs(array), 1), 1)


def entry(layer, tensor, position, tolerances):
    """The line along one entry of a tensor."""
    flat = tensor.reshape(-1)
    value = float(flat[position])
    step = float(steps(np.array(value)))

    def move(t):
        flat[position] = value + t if t else value
    return Line(layer, move, tolerances._replace(eps=tolerances.eps * step))


def direction(layer, tensors, vectors, tolerances):
    """The line along `vectors`, one for each of `tensors`."""
    values = [tensor.copy() for tensor in tensors]

    def move(t):
        for tensor, value, vector in zip(tensors, values, vectors):
            tensor[...] = value + t * vector if t else value
    return Line(layer, move, tolerances)


def compare(lines, analytic):
    """A Verdict for each line of one tensor.

    atol is for the rounding of the central differences. A tensor whose slopes are all near or below it would pass
    whatever its gradient is, so atol is at most a part of the largest slope (and what rounding needs).
    """
    slopes = [line.slope() for line in lines]
    largest = max((abs(slope) for slope in slopes if math.isfinite(slope)), default=0.0)
    for line in lines:
        atol = min(line.tolerances.atol, TINY * largest + 5 * line.rounding())
        line.tolerances = line.tolerances._replace(atol=atol)
    return [line.judge(float(a), slope) for line, a, slope in zip(lines, analytic, slopes)]


def worst(verdicts):
    """The position of the largest error; kinks come last."""
    return max(range(len(verdicts)), key=lambda n: (verdicts[n].status != "kink", verdicts[n].error))


def rounded(lines, analytic, verdicts, sizes):
    """How far, relatively, the lines' slopes differ beyond what double precision explains; 0 where they do not."""
    differences = [abs(float(a) - v.numeric) / size if v.status == "ok" and size else 0.0
                   for a, v, size in zip(analytic, verdicts, sizes)]
    n = max(range(len(lines)), key=differences.__getitem__)
    return lines[n].single_precision(float(analytic[n]), sizes[n]) if differences[n] > SINGLE else 0.0
