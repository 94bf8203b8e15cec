"""Learning-rate schedules: the learning rate as a function of the step alone, so that a resumed run is exact.

`schedule(step)` is the learning rate, a float, of the next step, counting from 0; `Trainer(schedule=...)` calls it
before each step. Any function of the step works; these are the usual ones.
"""

import math

from minigrad.check import check_count, check_number


class Constant:
    """lr (step + 1) / warmup for step < warmup, then lr.

    Raises ValueError for an lr that is negative or not finite, and for a warmup that is not a whole number from 0 up.
    """

    def __init__(self, lr, warmup=0):
        name = type(self).__name__
        check_number(name, "lr", lr, 0, open_high=True)
        check_count(name, "warmup", warmup, least=0)
        self.lr, self.warmup = lr, warmup

    def __call__(self, step):
        if step < self.warmup:
            return float(self.lr * (step + 1) / self.warmup)
        return float(self.lr)

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"


class WarmupCosine(Constant):
    """A linear warm-up, then half a cosine from lr down to `final` (Loshchilov and Hutter 2017, (5), one cycle):

        lr (step + 1) / warmup                                                    step < warmup
        k lr + (1 - k) final,   k = (1 + cos(pi n)) / 2,                          warmup <= step < steps
                                n = (step - warmup) / (steps - warmup)
        final                                                                     step >= steps

    The cosine begins where the warm-up ends: lr at step = warmup, half-way to `final` in the middle of the remaining
    steps. SRU++'s published code begins it at step 0 and joins it after the warm-up: lr (1 + cos(pi step / steps)) /
    (1 + cos(pi warmup / steps)). In its setting (16,000 of 400,000 steps) that is 1.004 times the plain cosine from
    step 0, and up to 7.5 % below this one.

    A run that continues for longer than planned must keep its `steps`, and continues at `final`: with other `steps`
    it would have been a different run from the end of the warm-up.

    Raises ValueError as `Constant` does, for fewer steps than `warmup` (or none), and for a `final` outside [0, lr].
    """

    def __init__(self, lr, warmup, steps, final=0.0):
        super().__init__(lr, warmup)
        check_count("WarmupCosine", "steps", steps, least=max(1, warmup))
        check_number("WarmupCosine", "final", final, 0, lr)
        self.steps, self.final = steps, final

    def __call__(self, step):
        if step < self.warmup:
            return super().__call__(step)
        if step >= self.steps:
            return float(self.final)
        n = (step - self.warmup) / (self.steps - self.warmup)
        k = (1 + math.cos(math.pi * n)) / 2
        return float(k * self.lr + (1 - k) * self.final)
