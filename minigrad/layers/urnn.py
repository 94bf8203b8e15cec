"""URNN: the unitary evolution recurrent network (Arjovsky, Shah and Bengio 2016, arXiv 1511.06464).

Complex inside, real outside: h complex numbers are handed over as 2h real ones, [Re | Im]. The gradient of a complex z
is dz = dL/dRe z + i dL/dIm z, and through y = A z it is dz = A* dy. As in the paper, matrices act on columns; z (B, h)
holds a column of each sample as a row. Derivation of the backward: docs/derivations/urnn.md.
"""

import math

from minigrad.backend import array_module
from minigrad.check import check_count
from minigrad.fast.urnn import EPS, complex_dtype, loop_backward, loop_forward
from minigrad.initializers import generator, glorot_uniform, uniform
from minigrad.layers.recurrent import Recurrent
from minigrad.parameter import Parameter

# ---- complex rows as real ones ---------------------------------------------------------------------------


def complex_rows(halves):
    """[Re z | Im z] (..., 2h) -> z (..., h)."""
    h = halves.shape[-1] // 2
    return halves[..., :h] + 1j * halves[..., h:]


def real_rows(z):
    """z (..., h) -> [Re z | Im z] (..., 2h). Each of the two is the other's backward."""
    return array_module(z).concatenate([z.real, z.imag], axis=-1)


# ---- the equations ---------------------------------------------------------------------------------------


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
    """max(r + b, 0) z / r, r = sqrt(|z|^2 + eps^2) with eps = 1e-5: |z| made smooth, so that z = 0 needs no care.

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


def urnn_step(x, h, omega1, omega2, omega3, v1, v2, V, b, permutation):
    """One step, as written: h' = modReLU(W h + V x). x (B, d), h (B, h) complex -> h', cache."""
    Wh, W_cache = unitary(h, omega1, omega2, omega3, v1, v2, permutation)
    h_new, modrelu_cache = modrelu(Wh + complex_rows(x @ V), b)
    return h_new, (x, W_cache, modrelu_cache)


def urnn_step_backward(dh_new, cache, V, permutation):
    """The step's gradients, from the bottom up: (dx, dh), (domega1, domega2, domega3, dv1, dv2, dV, db)."""
    x, W_cache, modrelu_cache = cache
    dz, db = modrelu_backward(dh_new, modrelu_cache)
    dxV = real_rows(dz)                                                      # (B, 2h)
    dh, dW = unitary_backward(dz, W_cache, permutation)
    return (dxV @ V.T, dh), (*dW, x.T @ dxV, db)


# ---- the layer -------------------------------------------------------------------------------------------


class URNN(Recurrent):
    """h_t = modReLU(W h_{t-1} + V x_t), h_t complex and W unitary, over a sequence (`urnn_step` is the cell).

    omega1, omega2, omega3, b (h,); v1, v2, h0 (2h,) and V (d, 2h), in halves [Re | Im]. h0 is the state before a
    sequence, learned. At the start omega ~ U(-pi, pi), v and V Glorot uniform, b ~ U(-0.01, 0.01) and
    h0 ~ U(-a, a), a = sqrt(3 / (2h)). The permutation P is drawn here and stays. It is no Parameter: a model that is to
    read a checkpoint must be made from the same seed; a training checkpoint tells when it is not.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, 2h), (h,)), cache; state: h (B, 2h), None for h0.
    The dtype is that of x and the parameters together, float32 at least. Nothing is drawn: rng has no effect.

    Raises ValueError for wrong shapes, TypeError for wrong dtypes, float16 among them, or a mix of devices.
    """

    buffers = ("permutation",)

    def __init__(self, d, h, *, rng=None, dtype=None):
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
        self.permutation = rng.permutation(h)

    def forward(self, x, state=None, mask=None, rng=None):
        V = self.V.value
        xp = array_module(x=x, V=V, mask=mask)
        self.check_input(x, mask, V.shape[0])
        complex_dtype(xp.result_type(x.dtype, V.dtype))
        h, = self.split_state(state, self.state_shapes(x.shape[0]))
        learned = h is None
        y, h, cache = loop_forward(x, self.h0.value if learned else h, mask, self._values(), self.permutation)
        return (y, (h,)), (cache, learned)

    def backward(self, upstream, cache):
        """Backpropagation through time (`loop_backward`): dx (B, L, d) and dstate0 = (dh,).

        Where h_0 was the learned one, h0.grad += dh, summed over the batch.
        """
        cache, learned = cache
        T, B, h = cache.zs.shape
        dy, (dh,) = self.check_upstream(upstream, (B, T, 2 * h), self.state_shapes(B))
        (dx, dh), gradients = loop_backward(dy, dh, cache, self._values(), self.permutation)
        for parameter, gradient in zip(self._weights(), gradients):
            parameter.grad += gradient
        if learned:
            self.h0.grad += dh.sum(axis=0)
        return dx, (dh,)

    def initial_state(self, batch, dtype=None):
        """The state before a sequence, written out: h0 for each sample."""
        h0 = self.h0.value
        return (array_module(h0).tile(h0, (batch, 1)),)

    def _weights(self):
        return self.omega1, self.omega2, self.omega3, self.v1, self.v2, self.V, self.b

    def _values(self):
        return [parameter.value for parameter in self._weights()]

    def state_shapes(self, B):
        return {"h": (B, 2 * len(self.b.value))}
