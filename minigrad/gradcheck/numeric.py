"""The numeric side: the slope of L along a line, by central differences, and the verdict on an analytic one."""

import math
from typing import NamedTuple

import numpy as np

ROUNDING = 2.0**-52
CLOSER = (0.1, 0.01)               # of eps: tried in turn before a difference is called an error
AT_KINK = (1e-1, 1e-3, 1e-4)       # of eps: a kink's jump in slope is the same at each of them
STEADY = 0.05                      # relative change of that jump that rounding may make
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


class Slope(NamedTuple):
    value: float
    noise: float                   # how far the rounding of the outputs can have moved it


class Verdict(NamedTuple):
    """status: "ok"; "near" (ok, but a kink is nearer than eps); "kink" (at one: the analytic value
    is a subgradient, and no more can be said); "wrong". error: in units of what is tolerated."""

    status: str
    numeric: float
    error: float


class Line:
    """L(t) = sum <dout, outputs(t)>, where `move(t)` puts the layer's tensors at the point t of a line."""

    def __init__(self, tested, move, tolerances):
        self.tested, self.move, self.tolerances = tested, move, tolerances

    def at(self, t):
        self.move(t)
        return self.tested.outputs()

    def central(self, scale=1.0):
        eps = self.tolerances.eps * scale
        low, high = self.at(-eps), self.at(eps)
        self.move(0)
        with np.errstate(invalid="ignore", over="ignore"):
            moved = high - low                                   # the difference comes first, so that little cancels
            weighted = (self.tested.flat_dout * high)[moved != 0]
            return Slope(float(self.tested.flat_dout @ moved) / (2 * eps),
                         ROUNDING * float(np.linalg.norm(weighted)) / (2 * eps))

    def judge(self, analytic, first):
        """Verdict on an analytic slope, `first` being the central difference at eps."""
        error = self.tolerances.error(analytic, first.value)
        if error <= 1 or error == math.inf:
            return Verdict("ok" if error <= 1 else "wrong", first.value, error)
        return self.closer(analytic, first) or self.at_kink(analytic) or Verdict("wrong", first.value, error)

    def closer(self, analytic, first):
        """A Verdict if the slopes agree once eps is smaller, else None: L is strongly curved, or a kink is near.

        Where rounding moves the smaller difference by more than is tolerated it could agree by chance: that is no
        evidence, and the difference stays an error.
        """
        before, previous = first, 1.0
        for scale in CLOSER:
            near, shrink = self.central(scale), (scale / previous)**2
            if not near.noise <= self.tolerances.atol + self.tolerances.rtol * abs(analytic):
                return None
            curved = near.value + (near.value - before.value) * shrink / (1 - shrink)    # Richardson's extrapolation
            if self.tolerances.agree(analytic, curved):
                return Verdict("ok", curved, self.tolerances.error(analytic, curved))
            if self.tolerances.agree(analytic, near.value) and self.tolerances.agree(
                    analytic, self.central(scale / 2).value):        # twice: what is curved would have moved on
                return Verdict("near", near.value, self.tolerances.error(analytic, near.value))
            if self.tolerances.agree(before.value, near.value):
                return None                                      # a straight piece: nothing will change
            before, previous = near, scale
        return None

    def at_kink(self, analytic):
        """A Verdict if L has a kink at t = 0 and the analytic slope is a subgradient there, else None.

        Every output is judged separately, since each kink may choose its own subgradient: an output has a kink if its
        slopes to the right and to the left differ by one and the same jump at all of AT_KINK (for a smooth
        function the jump shrinks with the step; for a discontinuity, or rounding, it grows).
        """
        here = self.at(0)
        left, right = self.one_sided(here, AT_KINK[0])
        jump = right - left
        noise = ROUNDING * np.abs(self.tested.flat_dout * here) / (AT_KINK[0] * self.tolerances.eps)
        middle = (left + right) / 2
        slope, tolerated = float(middle.sum()), self.tolerances.atol + self.tolerances.rtol * abs(analytic)
        if np.linalg.norm(noise) <= tolerated and abs(slope - analytic) <= tolerated:
            return Verdict("ok", slope, abs(slope - analytic) / tolerated)     # only the second derivative jumps
        kink = np.abs(jump) > 100 * noise
        for scale in AT_KINK[1:]:
            if not kink.any():
                return None
            near_left, near_right = self.one_sided(here, scale)
            kink &= np.abs(near_right - near_left - jump) <= STEADY * np.abs(jump)
        low = float(np.where(kink, np.minimum(left, right), middle).sum())
        high = float(np.where(kink, np.maximum(left, right), middle).sum())
        nearest = min(max(analytic, low), high)
        inside = kink.any() and self.tolerances.agree(analytic, nearest)
        return Verdict("kink", slope, 0.0) if inside else None

    def one_sided(self, here, scale):
        """Each output's slopes, weighted by dout, to the left and to the right, extrapolated to a step of zero."""
        eps = self.tolerances.eps * scale
        slopes = []
        with np.errstate(invalid="ignore", over="ignore"):
            for step in (-eps, eps):
                far, near = (self.at(step) - here) / step, (self.at(step / 2) - here) / (step / 2)
                slopes.append(self.tested.flat_dout * (2 * near - far))
        self.move(0)
        return slopes

    def single_precision(self, analytic, size):
        """The relative difference, if double precision cannot explain it; else 0."""
        slopes = [(4 * self.central(scale / 2).value - self.central(scale).value) / 3 for scale in (0.95, 0.85, 0.75)]
        difference, spread = abs(sum(slopes) / len(slopes) - analytic), max(slopes) - min(slopes)
        unmoved = 2 * ROUNDING * self.tested.size / self.tolerances.eps  # outputs that move by less than their rounding
        return difference / size if difference > max(SINGLE * size, 5 * spread, unmoved, self.tested.floor) else 0.0


def steps(array):
    """The factor of eps at each entry: its size if above 1, so that the step is not lost in rounding."""
    return np.where(np.isfinite(array), np.maximum(np.abs(array), 1), 1)


def entry(tested, tensor, position, tolerances):
    """The line along one entry of a tensor."""
    flat = tensor.reshape(-1)
    value = float(flat[position])
    step = float(steps(np.array(value)))

    def move(t):
        flat[position] = value + t if t else value
    return Line(tested, move, tolerances._replace(eps=tolerances.eps * step))


def direction(tested, tensors, vectors, tolerances):
    """The line along `vectors`, one for each of `tensors`."""
    values = [tensor.copy() for tensor in tensors]

    def move(t):
        for tensor, value, vector in zip(tensors, values, vectors):
            tensor[...] = value + t * vector if t else value
    return Line(tested, move, tolerances)


def compare(lines, analytic):
    """A Verdict for each line of one tensor.

    atol is for the rounding of the central differences. A tensor whose slopes are all near or below it would pass
    whatever its gradient is; so atol is cut down to a part of the largest slope (and what rounding needs).
    """
    slopes = [line.central() for line in lines]
    largest = max((abs(slope.value) for slope in slopes if math.isfinite(slope.value)), default=0.0)
    for line in lines:
        noise = ROUNDING * line.tested.size / line.tolerances.eps
        atol = min(line.tolerances.atol, TINY * largest + 10 * noise)
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
