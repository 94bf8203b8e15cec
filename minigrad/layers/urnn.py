"""URNN: the unitary evolution recurrent network (Arjovsky, Shah and Bengio 2016, arXiv 1511.06464).

Complex inside, real outside: h complex numbers enter and leave as 2h real ones, [Re | Im]. The gradient of a complex z
is dz = dL/dRe z + i dL/dIm z, and through y = A z it is dz = A* dy. As in the paper, matrices act on columns; a row
of z (B, h) is a sample's column. Derivation of the backward: docs/derivations/urnn.md.
"""

import math

from minigrad.backend import array_module
from minigrad.check import check_count
from minigrad.fast import urnn as fast_urnn
from minigrad.fast.urnn import EPS, complex_dtype
from minigrad.initializers import generator, glorot_uniform, uniform
from minigrad.layers.recurrent import Recurrent
from minigrad.parameter import Parameter

# ---- complex rows as real ones ---------------------------------------------------------------------------


def complex_rows(halves):
    """[Re z | Im z] (..., 2h) -> z (..., h)."""
    h = halves.shape[-1] // 2
    return halves[..., :h] + 1j * halves[..., h:]


def real_rows(z):
    """z (..., h) -> [Re z | Im z] (..., 2h). It and `complex_rows` are each other's backward."""
    return array_module(z).concatenate([z.real, z.imag], axis=-1)


# ---- the parts of a step ---------------------------------------------------------------------------------


def rotation(z, omega):
    """D z, D = diag(e^{i omega}). z (B, h) complex, omega (h,) -> (B, h), cache."""
    D = array_module(z).exp(1j * omega)
    return z * D, (z, D)


def rotation_backward(dy, cache):
    """dz = conj(D) dy, domega = sum over the batch of Im(conj(z) dz)."""
    z, D = cache
    dz = dy * D.conj()
    return dz, (z.conj() * dz).imag.sum(axis=0)


def reflection(z, v):
    """R z, R = I - 2 v v* / |v|^2: z - (2 / s) p v with p = v* z and s = |v|^2.

    z (B, h), v (h,), both complex -> (B, h), cache. (A row z has v* z = sum_k z_k conj(v_k).)
    """
    p, s = z @ v.conj(), (v * v.conj()).real.sum()                           # (B,), ()
    return z - (2 / s) * p[:, None] * v, (z, v, p, s)


def reflection_backward(dy, cache):
    """dz = R dy; with q = dy* v, dv = -(2 / s) (conj(p) dy + q z) + (4 / s^2) Re(q p) v, summed over the batch."""
    z, v, p, s = cache
    q = dy.conj() @ v                                                        # (B,)
    dz = dy - (2 / s) * q.conj()[:, None] * v
    dv = -(2 / s) * (p.conj() @ dy + q @ z) + (4 / (s * s)) * (q @ p).real * v
    return dz, dv


def fourier(z):
    """F z, the discrete Fourier transform divided by sqrt(h): unitary. z (B, h) -> (B, h)."""
    return array_module(z).fft.fft(z, norm="ortho")


def fourier_inverse(z):
    """F^-1 z = F* z: the backward of `fourier`, and `fourier` is its own."""
    return array_module(z).fft.ifft(z, norm="ortho")


def unitary(z, omega1, omega2, omega3, v1, v2, permutation):
    """W z, W = D3 R2 F^-1 D2 P R1 F D1, rightmost first; (P z)_k = z_{permutation[k]}.

    z (B, h) complex; omega (h,) real; v (2h,), [Re | Im]; permutation (h,) integer -> (B, h), cache.
    """
    z, D1_cache = rotation(z, omega1)
    z, R1_cache = reflection(fourier(z), complex_rows(v1))
    z, D2_cache = rotation(z[:, permutation], omega2)
    z, R2_cache = reflection(fourier_inverse(z), complex_rows(v2))
    y, D3_cache = rotation(z, omega3)
    return y, (D1_cache, R1_cache, D2_cache, R2_cache, D3_cache)


def unitary_backward(dy, cache, permutation):
    """dz = W* dy, and (domega1, domega2, domega3, dv1, dv2)."""
    D1_cache, R1_cache, D2_cache, R2_cache, D3_cache = cache
    dz, domega3 = rotation_backward(dy, D3_cache)
    dz, dv2 = reflection_backward(dz, R2_cache)
    dz, domega2 = rotation_backward(fourier(dz), D2_cache)
    dz, dv1 = reflection_backward(dz[:, permutation.argsort()], R1_cache)
    dz, domega1 = rotation_backward(fourier_inverse(dz), D1_cache)
    return dz, (domega1, domega2, domega3, real_rows(dv1), real_rows(dv2))


def modrelu(z, b):
    """max(r + b, 0) z / r, r = sqrt(|z|^2 + eps^2) with eps = 1e-5: a smooth |z|, so that z = 0 is no special case.

    z (B, h) complex, b (h,) real -> (B, h), cache.
    """
    xp = array_module(z)
    r = xp.sqrt(z.real * z.real + z.imag * z.imag + EPS * EPS)
    f = xp.maximum(1 + b / r, 0)
    return f * z, (z, b, r, f)


def modrelu_backward(dy, cache):
    """Where r + b > 0, with a = Re(conj(z) dy); zero elsewhere:

        dz = (1 + b / r) dy - (b / r^3) a z             db = a / r, summed over the batch
    """
    z, b, r, f = cache
    a = (f > 0) * (z.conj() * dy).real
    return f * dy - b / (r * r * r) * a * z, (a / r).sum(axis=0)


# ---- the layer -------------------------------------------------------------------------------------------


class URNN(Recurrent):
    """h_t = modReLU(W h_{t-1} + V x_t), h_t complex and W unitary, over a sequence.

    omega1, omega2, omega3, b (h,); v1, v2, h0 (2h,) and V (d, 2h), in halves [Re | Im]. h0 is the learned initial
    state. Initially omega ~ U(-pi, pi), v and V Glorot uniform, b ~ U(-0.01, 0.01) and
    h0 ~ U(-a, a), a = sqrt(3 / (2h)). The permutation P is drawn once: a buffer, saved with the Parameters.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, 2h), (h,)), cache; state: h (B, 2h), None for h0.
    The dtype is that of x and the parameters together, float32 at least. `rng` has no effect.
    fast=False runs `cell` and `cell_backward` step by step; the default is the loop of minigrad/fast/urnn.py.

    Raises ValueError for wrong shapes, TypeError for wrong dtypes, float16 among them, or a mix of devices.
    """

    buffers = ("permutation",)
    weights = ("V", "omega1", "omega2", "omega3", "v1", "v2", "b")

    # ---- the equations: they run with fast=False; the fast form is minigrad/fast/urnn.py -----------------

    def cell(self, x, state, V, omega1, omega2, omega3, v1, v2, b):
        """One step: h' = modReLU(W h + V x), W of `unitary`. x (B, d), state (h,), h (B, 2h) -> (h', (h',)), cache."""
        h, = state
        Wh, W_cache = unitary(complex_rows(h), omega1, omega2, omega3, v1, v2, self.permutation)
        z, modrelu_cache = modrelu(Wh + complex_rows(x @ V), b)
        h_new = real_rows(z)
        return (h_new, (h_new,)), (x, W_cache, modrelu_cache)

    def cell_backward(self, upstream, cache, V, *_):
        """The step's gradients, from the bottom up: dx, (dh,), (dV, domega1, domega2, domega3, dv1, dv2, db)."""
        dy, (dh_new,) = upstream
        x, W_cache, modrelu_cache = cache
        dz, db = modrelu_backward(complex_rows(dh_new + dy), modrelu_cache)
        dxV = real_rows(dz)                                                  # (B, 2h)
        dh, dW = unitary_backward(dz, W_cache, self.permutation)
        return dxV @ V.T, (real_rows(dh),), (x.T @ dxV, *dW, db)

    def state_shapes(self, B):
        return {"h": (B, 2 * len(self.b.value))}

    def initial_state(self, batch, dtype=None):
        """The state before a sequence: h0 for each sample."""
        h0 = self.h0.value
        return (array_module(h0).tile(h0.astype(dtype or h0.dtype, copy=False), (batch, 1)),)

    def initial_state_backward(self, dstate0):
        """dh0 is dh_0 summed over the batch."""
        dh, = dstate0
        self.add_gradients(h0=dh.sum(axis=0))

    def cell_weights(self, dtype):
        complex_dtype(dtype)                                                 # raises TypeError for float16
        return super().cell_weights(dtype)

    # ---- parameters, and the fast loop -------------------------------------------------------------------

    def __init__(self, d, h, *, fast=True, rng=None, dtype=None):
        check_count("URNN", "d", d)
        check_count("URNN", "h", h)
        rng, a = generator(rng), math.sqrt(3 / (2 * h))
        omegas = uniform(rng, (3, h), -math.pi, math.pi, dtype)
        self.omega1, self.omega2, self.omega3 = (
            Parameter(omega.copy(), f"omega{n}") for n, omega in enumerate(omegas, 1))
        vs = glorot_uniform(rng, (2, 2 * h), dtype)
        self.v1, self.v2 = (Parameter(v.copy(), f"v{n}") for n, v in enumerate(vs, 1))
        self.V = Parameter(glorot_uniform(rng, (d, 2 * h), dtype), "V")
        self.b = Parameter(uniform(rng, (h,), -0.01, 0.01, dtype), "b")
        self.h0 = Parameter(uniform(rng, (2 * h,), -a, a, dtype), "h0")
        self.permutation, self.fast = rng.permutation(h), fast

    def fast_forward(self, x, state, mask, weights):
        y, h, cache = fast_urnn.loop_forward(x, *state, mask, weights, self.permutation)
        return y, (h,), cache

    def fast_backward(self, dy, dstate, cache, weights):
        dx, dh, gradients = fast_urnn.loop_backward(dy, *dstate, cache, weights, self.permutation)
        return dx, (dh,), gradients
