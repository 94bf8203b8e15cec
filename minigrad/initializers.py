"""Initial values of parameters, drawn on the host, so that CPU and GPU runs start from the same numbers.

`rng` may be a NumPy Generator, a seed, or None (a new generator from the system's entropy); weights are (d_in, d_out).
"""

import math

import numpy as np

from minigrad.backend import DEFAULT_DTYPE
from minigrad.check import check_choice


def generator(rng=None):
    """A NumPy Generator from a Generator, a seed or None."""
    return np.random.default_rng(rng)


def zeros(shape, dtype=None):
    return np.zeros(shape, dtype or DEFAULT_DTYPE)


def identity(size, dtype=None):
    """(size, size), ones on the diagonal."""
    return np.eye(size, dtype=dtype or DEFAULT_DTYPE)


def uniform(rng, shape, low=0.0, high=1.0, dtype=None):
    """U[low, high)."""
    return generator(rng).uniform(low, high, shape).astype(dtype or DEFAULT_DTYPE)


def normal(rng, shape, sigma=1.0, dtype=None):
    """N(0, sigma^2)."""
    return (sigma * generator(rng).standard_normal(shape)).astype(dtype or DEFAULT_DTYPE)


def glorot_uniform(rng, shape, dtype=None):
    """U(-a, a), a = sqrt(6 / (d_in + d_out)) (Glorot and Bengio 2010, equation 16)."""
    a = math.sqrt(6 / (shape[0] + shape[1]))
    return uniform(rng, shape, -a, a, dtype)


def orthogonal(rng, shape, dtype=None):
    """A matrix with orthonormal rows or columns, whichever are fewer, uniformly distributed (Haar): the Q of a
    Gaussian matrix, with the signs corrected by R's diagonal (Saxe et al. 2013 propose it for deep networks)."""
    rows, columns = shape
    q, r = np.linalg.qr(generator(rng).standard_normal((max(shape), min(shape))))
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    return (q if rows >= columns else q.T).astype(dtype or DEFAULT_DTYPE)


def blocks(initializer, rng, d_in, d_out, count, dtype=None):
    """(d_in, count * d_out): `count` gate blocks side by side, each drawn separately by `initializer`."""
    rng = generator(rng)
    return np.concatenate([initializer(rng, (d_in, d_out), dtype=dtype) for _ in range(count)], axis=1)


def _uniform_inverse_sqrt(rng, shape, dtype=None):
    a = 1 / math.sqrt(shape[1])
    return uniform(rng, shape, -a, a, dtype)


def _normal_tenth(rng, shape, dtype=None):
    return normal(rng, shape, 0.1, dtype)


# How the gate blocks of W (d, 4h) and U (h, 4h) are initialised, with the code that does it in this way.
GATE_BLOCKS = {
    "orthogonal": (orthogonal, orthogonal),              # deeplearning.net tutorial: RRA's lineage
    "glorot": (glorot_uniform, orthogonal),              # Keras
    "uniform": (_uniform_inverse_sqrt, _uniform_inverse_sqrt),   # PyTorch: +-1/sqrt(h)
    "normal": (_normal_tenth, _normal_tenth),            # Lasagne: sigma 0.1
}


def gate_blocks(init, rng, d, h, dtype=None, count=4):
    """W (d, count h) and U (h, count h) of a recurrence, each gate block drawn separately; `init` is a key of
    GATE_BLOCKS. `count` is the number of blocks: 4 for an LSTM's gates, 1 for a recurrence without gates.

    Raises ValueError for an unknown name.
    """
    check_choice("gate_blocks", "init", init, GATE_BLOCKS)
    rng = generator(rng)
    for_W, for_U = GATE_BLOCKS[init]
    return blocks(for_W, rng, d, h, count, dtype), blocks(for_U, rng, h, h, count, dtype)
