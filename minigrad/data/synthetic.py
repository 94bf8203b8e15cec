"""Generated problems."""

import numpy as np

from minigrad.check import check_count


def adding_problem(n, S, seed, dtype="float32"):
    """The adding problem as in RRA (Wang 2017, section 4.1), after Hochreiter and Schmidhuber 1997.

    Returns x (n, S, 2) and target (n, 1). x[:, :, 0] ~ U[0, 1); x[:, :, 1] is 1 at two steps, else 0: the first
    uniform on 0 ... floor(S/10), the second on floor(S/2) ... S-1. The target is the sum of the two marked numbers.
    Always predicting 1 has an expected squared error of 1/6.

    `seed` is an integer or a sequence of integers. Everything is drawn in float64 and then converted, so that runs
    in any precision see the same numbers (in float32 one of them may round up to 1).

    Raises ValueError for S < 2 (the marks would coincide) or n < 1.
    """
    check_count("adding_problem", "S", S, least=2)
    check_count("adding_problem", "n", n)
    rng = np.random.default_rng(seed)
    first = rng.integers(0, S // 10 + 1, n)
    second = rng.integers(S // 2, S, n)
    x = np.zeros((n, S, 2), dtype)
    x[:, :, 0] = rng.random((n, S))
    rows = np.arange(n)
    x[rows, first, 1] = 1
    x[rows, second, 1] = 1
    return x, (x[rows, first, 0] + x[rows, second, 0])[:, None]
