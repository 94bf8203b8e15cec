"""What tasks/bench.py measures of IRNN, RWA and URNN: the layers, and the floor of each."""

import math

import numpy as np

from minigrad.fast.rwa import BLOCK
from minigrad.layers import IRNN, RWA, URNN
from minigrad.memory import empty
from tasks.bench import measure as bench_measure
from tasks.bench.srupp import filled

NAMES = ("IRNN", "RWA", "URNN")
FLOORS = {"URNN": "Fourier transforms and products alone"}
COLUMNS = {"URNN": 2}                                # of y, that a unit has: URNN's are complex; 1 where none is given


def make_layer(name, d, h):
    """A layer whose values are not at their trivial first ones, where a wrong peer could agree with it.

    IRNN's W, the identity, is its own transpose, and its V is all but zero: here V is larger, and W has some noise, its
    eigenvalues within the unit circle.
    """
    rng = np.random.default_rng(1)
    if name == "URNN":
        return URNN(d, h, rng=rng, dtype="float32")
    if name == "RWA":
        layer, biases = RWA(d, h, rng=rng, dtype="float32"), ("b_u", "b_g")
    else:
        layer, biases = IRNN(d, h, input_std=0.5, rng=rng, dtype="float32"), ("b",)
        layer.W.value *= 1 - 0.1 / math.sqrt(h)
        layer.W.value += 0.1 / h * rng.standard_normal((h, h), "float32")
    for bias in biases:
        getattr(layer, bias).value += 0.1 * rng.standard_normal(h, "float32")
    return layer


def upstream_and_input(name, B, S, d, h):
    """x (B, S, d) and dy, of the shape of the layer's y."""
    return bench_measure.upstream_and_input(B, S, d, COLUMNS.get(name, 1) * h)


# ---- the floors ------------------------------------------------------------------------------------------

def floor_products(name, B, S, d, h):
    """{name: function}: the matrix products of a layer, and URNN's Fourier transforms, alone, in its shapes."""
    return {"IRNN": irnn_products, "RWA": rwa_products, "URNN": urnn_products}[name](B, S, d, h)


def irnn_products(B, S, d, h):
    """Those of minigrad/fast/rnn.py."""
    x1, V1, V_T, W, W_T = filled(S * B, d + 1), filled(d + 1, h), filled(h, d), filled(h, h), filled(h, h)
    hs, dz, u, z, dx = filled(S, B, h), filled(S, B, h), filled(B, h), filled(S * B, h), filled(S * B, d)
    flat_hs, flat_dz = hs.reshape(S * B, h), dz.reshape(S * B, h)
    return {"step": lambda: [np.matmul(h_t, W, out=u) for h_t in hs],
            "backward step": lambda: [np.matmul(dz_t, W_T, out=u) for dz_t in dz],
            "input": lambda: np.matmul(x1, V1, out=z),
            "weight gradients": lambda: (flat_hs.T @ flat_dz, x1.T @ flat_dz),
            "dx": lambda: np.matmul(flat_dz, V_T, out=dx)}


def rwa_products(B, S, d, h):
    """Those of minigrad/fast/rwa.py: g and a as two blocks; a block of steps at a time where they can be."""
    U, U_T, W1, W_T = filled(2, h, h), filled(2, h, h), filled(3, d + 1, h), filled(3, h, d)
    x1, hs, duga, ga = filled(S, B, d + 1), filled(S, B, h), filled(3, BLOCK, B, h), filled(2, B, h)
    uqp = filled(3, S, B, h)
    blocks = []
    for first in range(0, S, BLOCK):
        n = min(BLOCK, S - first)
        steps, rows = slice(first, first + n), n * B
        blocks.append((x1[steps].reshape(rows, d + 1), hs[steps].reshape(rows, h), uqp[:, steps].reshape(3, rows, h),
                       duga[:, :n].reshape(3, rows, h)))

    def weight_gradients():
        for x, h_before, _, flat in blocks:
            np.matmul(h_before.T, flat[1:])
            np.matmul(x.T, flat)

    return {"step": lambda: [np.matmul(h_t, U, out=ga) for h_t in hs],
            "backward step": lambda: [np.matmul(duga[1:, t % BLOCK], U_T, out=ga) for t in range(S)],
            "input": lambda: [np.matmul(x, W1, out=uga) for x, _, uga, _ in blocks],
            "weight gradients": weight_gradients,
            "dx": lambda: [np.matmul(flat, W_T) for *_, flat in blocks]}


def urnn_products(B, S, d, h):
    """The Fourier transforms and products of minigrad/fast/urnn.py, without its rotations and reflections."""
    z, rows, w, p = filled_complex(B, h), filled_complex(S * B, h), filled_complex(h), filled_complex(B)
    x, V, dx = filled(S * B, d), filled(d, 2 * h), filled(S * B, d)
    pairs = rows.view("float32")                                             # (S B, 2h)

    def transforms():
        for _ in range(2 * S):                                               # forward and backward
            np.fft.fft(z, norm="ortho")
            np.fft.ifft(z, norm="ortho")

    def projections():
        for _ in range(4 * S):
            np.matmul(z, w, out=p)

    def reflections():
        for _ in range(2):
            p, q = rows @ w, rows @ w
            p @ rows, q @ rows, q @ p

    return {"Fourier transforms": transforms, "projections on v": projections, "dv": reflections,
            "input": lambda: np.matmul(x, V, out=pairs), "dV": lambda: x.T @ pairs,
            "dx": lambda: np.matmul(pairs, V.T, out=dx)}


def filled_complex(*shape):
    """A complex64 array of random numbers."""
    array = empty(shape, np.dtype("complex64"))
    array.real[...], array.imag[...] = filled(*shape), filled(*shape)
    return array
