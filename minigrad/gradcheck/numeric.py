"""The numeric side: the slope of L along a line, by central differences, and what to say when it disagrees."""

import math

import numpy as np

SCALES = (1.0, 0.1, 0.01)          # of eps, tried in turn before a difference is called an error
KINK_AGREES = 0.05                 # how much a kink's jump in slope may change from eps to eps/100


class Line:
    """L(t) = sum <dout, outputs(t)>, where `move(t)` puts the layer's tensors at the point t of a line."""

    def __init__(self, probe, move, tolerances):
        self.probe, self.move = probe, move
        self.eps, self.rtol, self.atol = tolerances

    def at(self, t):
        self.move(t)
        return self.probe.outputs()

    def slope(self, low, high, distance):
        """<dout, outputs(high) - outputs(low)> / distance; the difference comes first, so that little cancels."""
        return sum(float(np.dot(d, b - a)) for d, a, b in zip(self.probe.flat_dout, low, high)) / distance

    def central(self, eps):
        slope = self.slope(self.at(-eps), self.at(eps), 2 * eps)
        self.move(0)
        return slope

    def agrees(self, analytic, numeric):
        return abs(analytic - numeric) <= self.atol + self.rtol * max(abs(analytic), abs(numeric))

    def judge(self, analytic):
        """(status, numeric): status "ok", "kink" or "wrong".

        A kink is named only on evidence: either the slopes agree, within the same tolerances, once eps is small
        enough not to reach over it; or the slopes to the right and to the left differ by the same jump at eps and at
        eps/100, and the analytic value lies between them (a subgradient).
        """
        first = self.central(self.eps)
        if self.agrees(analytic, first) or not (math.isfinite(analytic) and math.isfinite(first)):
            return ("ok" if self.agrees(analytic, first) else "wrong"), first
        for scale in SCALES[1:]:
            closer = self.central(self.eps * scale)
            if self.agrees(analytic, closer):
                return "kink", closer
        (left, right), near = self.one_sided(self.eps), self.one_sided(self.eps * SCALES[-1])
        jump, slack = right - left, self.atol + self.rtol * max(abs(left), abs(right)) + self.eps * abs(right - left)
        stays = abs(jump - (near[1] - near[0])) <= KINK_AGREES * abs(jump)
        between = min(near) - slack <= analytic <= max(near) + slack
        return ("kink" if stays and between and abs(jump) > 100 * slack else "wrong"), first

    def one_sided(self, eps):
        """The slopes to the left and to the right."""
        here, low, high = self.at(0), self.at(-eps), self.at(eps)
        self.move(0)
        return self.slope(low, here, eps), self.slope(here, high, eps)


def entry(probe, tensor, position, tolerances):
    """The line along one entry of a tensor."""
    flat = tensor.reshape(-1)
    value = float(flat[position])

    def move(t):
        flat[position] = value + t
    return Line(probe, move, tolerances)


def direction(probe, tensors, vectors, tolerances):
    """The line along `vectors`, one for each of `tensors`."""
    values = [tensor.copy() for tensor in tensors]

    def move(t):
        for tensor, value, vector in zip(tensors, values, vectors):
            tensor[...] = value + t * vector if t else value
    return Line(probe, move, tolerances)
