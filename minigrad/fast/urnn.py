"""The fast time loop of URNN. Its equations: `cell` in minigrad/layers/urnn.py.

Time is the first axis, and the arrays are complex. What makes it fast, and what the arrays hold
(docs/derivations/urnn.md, section 4):

* W is applied factor by factor, O(h log h) a row; as a matrix it would be O(h^2);
* of each step only the results of the two reflections are kept, y1 and y2: a reflection is its own inverse, so that dv
  follows from y and dy, and each domega from rows that are kept anyway;
* the sums that are the parameters' gradients are taken a block of steps at a time;
* V x of all steps is one real product: h complex numbers in memory are 2h real ones, alternating Re and Im.
"""

from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import array_module
from minigrad.memory import empty, zeros
from minigrad.packing import Packing, pack, unpack

EPS = 1e-5                         # of modReLU: the smallest r
BLOCK = 8                          # steps whose gradients are summed at once


class Chain(NamedTuple):
    """W = D3 R2 F^-1 D2 P R1 F D1, ready for B rows of h complex numbers; w is (2 / |v|^2) conj(v)."""

    D: tuple            # D1, D2, D3, each (B, h): a row for every sample is faster than broadcasting
    conj_D: tuple
    v: tuple            # v1, v2, each (h,)
    w: tuple            # w1, w2, each (h,)
    permutation: Any    # (h,) integer
    inverse: Any        # (h,) integer

    @classmethod
    def of(cls, omegas, vs, permutation, B):
        """From omega1, omega2, omega3 (h,) and v1, v2 (2h,)."""
        xp = array_module(*omegas, *vs, permutation=permutation)
        D, vs = tuple(rows_of(xp.exp(1j * omega), B) for omega in omegas), tuple(map(joined, vs))
        ws = tuple(2 / (v.real * v.real + v.imag * v.imag).sum() * v.conj() for v in vs)
        return cls(D, tuple(rows.conj() for rows in D), vs, ws, permutation, xp.argsort(permutation))

    def forward(self, h, y1, y2, out):
        """out = W h; y1 = R1 F D1 h and y2 = R2 F^-1 D2 P y1 are written too. All (B, h)."""
        xp = array_module(h)
        xp.multiply(h, self.D[0], out=out)
        reflect(xp.fft.fft(out, norm="ortho"), self.v[0], self.w[0], out=y1)
        xp.multiply(y1.take(self.permutation, axis=1), self.D[1], out=out)
        reflect(xp.fft.ifft(out, norm="ortho"), self.v[1], self.w[1], out=y2)
        xp.multiply(y2, self.D[2], out=out)

    def backward(self, dz, dy1, dy2, out):
        """out = W* dz; dy1 and dy2 are written too."""
        xp = array_module(dz)
        xp.multiply(dz, self.conj_D[2], out=dy2)
        reflect(dy2, self.v[1], self.w[1], out=out)
        u = xp.fft.fft(out, norm="ortho")
        u *= self.conj_D[1]
        dy1[...] = u.take(self.inverse, axis=1)
        reflect(dy1, self.v[0], self.w[0], out=out)
        xp.multiply(xp.fft.ifft(out, norm="ortho"), self.conj_D[0], out=out)


class URNNCache(NamedTuple):
    """What backward reads. T steps, everything time first; complex but for xs and r."""

    xs: Any         # (T, B, d)
    hs: Any         # (T+1, B, h)   row t + 1 is h_t
    y1: Any         # (T, B, h)     R1 F D1 h_{t-1}
    y2: Any         # (T, B, h)     R2 F^-1 D2 P y1
    zs: Any         # (T, B, h)     z_t = W h_{t-1} + V x_t
    r: Any          # (T, B, h)     sqrt(|z_t|^2 + eps^2)
    packing: Packing | None


# ---- forward ---------------------------------------------------------------------------------------------


def loop_forward(x, h0, mask, weights, permutation):
    """Run the cell over a sequence.

    x (B, L, d); h0 (B, 2h); mask (B, L) or None; weights V, omega1, omega2, omega3, v1, v2, b, their dtype that of x
    and the Parameters together. Returns y (B, L, 2h), the state after the last real step (B, 2h), cache.
    """
    V, *omegas, v1, v2, b = weights
    xp = array_module(x=x, state=h0, mask=mask, V=V)
    packing, dtype = Packing.of(mask), V.dtype
    (B, T, d), h, wide = x.shape, len(b), complex_dtype(dtype)
    chain, b = Chain.of(omegas, (v1, v2), permutation, B), rows_of(b, B)

    xs, r = empty((T, B, d), dtype, xp), empty((T, B, h), dtype, xp)
    hs, y1, y2, zs = (empty((n, B, h), wide, xp) for n in (T + 1, T, T, T))
    Wh, f = empty((B, h), wide, xp), empty((B, h), dtype, xp)
    xs[...] = pack(x, packing).transpose(1, 0, 2)
    xp.matmul(xs.reshape(T * B, d), pairs(joined(V)), out=pairs(zs).reshape(T * B, 2 * h))
    join(h0, hs[0])
    for t in range(T):
        z = zs[t]                                                            # V x_t so far
        chain.forward(hs[t], y1[t], y2[t], out=Wh)
        z += Wh
        modrelu_into(z, b, r[t], f, out=hs[t + 1])

    y = unpack(split(hs[1:]).transpose(1, 0, 2), packing)
    last = hs[T] if packing is None else hs[packing.lengths, xp.arange(B)]
    return y, split(last), URNNCache(xs, hs, y1, y2, zs, r, packing)


def modrelu_into(z, b, r, f, out):
    """out = f z, f = max(1 + b / r, 0), r = sqrt(|z|^2 + eps^2); r and f are written too."""
    xp = array_module(z)
    xp.multiply(z.real, z.real, out=r)
    xp.multiply(z.imag, z.imag, out=f)
    r += f
    r += EPS * EPS
    xp.sqrt(r, out=r)
    xp.divide(b, r, out=f)
    f += 1
    xp.maximum(f, 0, out=f)
    xp.multiply(z, f, out=out)


def reflect(z, v, w, out):
    """out = R z = z - (2 / |v|^2) (v* z) v for rows z (B, h); R* is R."""
    xp = array_module(z)
    xp.multiply((z @ w)[:, None], v, out=out)
    xp.subtract(z, out, out=out)


# ---- backward --------------------------------------------------------------------------------------------


def loop_backward(dy, dh, cache, weights, permutation):
    """Backpropagation through time: with G_t what reaches h_t from outside,

        dh_t = G_t + W* dz_{t+1}          dz_t = (1 + b / r_t) dh_t - (b / r_t^3) Re(conj(z_t) dh_t) z_t

    where r_t + b > 0, else 0. dy (B, L, 2h), dh (B, 2h), each or None. Returns dx, dh0, the weights' gradients.
    """
    V, *omegas, v1, v2, b = weights
    xs, hs, y1, y2, zs, r, packing = cache
    xp, dtype, (T, B, h), d = array_module(zs), r.dtype, zs.shape, xs.shape[2]
    chain, b = Chain.of(omegas, (v1, v2), permutation, B), rows_of(b, B)
    V_T = pairs(joined(V)).T                                                 # (2h, d)

    dhs = upstream_of(dy, dh, cache)                                         # (T+1, B, h)
    dz, dy1, dy2, dWh = (empty((BLOCK, B, h), zs.dtype, xp) for _ in range(4))
    f, k, a = (empty((BLOCK, B, h), dtype, xp) for _ in range(3))
    domegas, dvs, u = zeros((3, h), dtype, xp), zeros((2, h), zs.dtype, xp), empty((B, h), zs.dtype, xp)
    dx, dV, db = empty((T, B, d), dtype, xp), zeros((d, 2 * h), dtype, xp), zeros((h,), dtype, xp)

    for first in reversed(range(0, T, BLOCK)):
        n = min(BLOCK, T - first)
        steps, block = slice(first, first + n), slice(n)
        slopes(b, r[steps], f[block], k[block])
        for t in reversed(range(n)):
            modrelu_back(dhs[first + t + 1], zs[first + t], f[t], k[t], a[t], u, out=dz[t])
            chain.backward(dz[t], dy1[t], dy2[t], out=dWh[t])
            dhs[first + t] += dWh[t]
        for domega, y, dy_t in zip(domegas, (hs, y1, y2), (dWh, dy1, dy2)):
            domega += (y[steps].conj() * dy_t[block]).imag.sum(axis=(0, 1))
        for dv, y, dy_t, v, w in zip(dvs, (y1, y2), (dy1, dy2), chain.v, chain.w):
            add_reflection(dv, flat(y[steps]), flat(dy_t[block]), v, w)
        db += xp.where(f[block] > 0, a[block] / r[steps], 0).sum(axis=(0, 1))
        rows = flat(pairs(dz[block]))
        dV += flat(xs[steps]).T @ rows
        xp.matmul(rows, V_T, out=flat(dx[steps]))

    domegas[1] = domegas[1][chain.permutation]                               # it was summed before P
    gradients = (split(dV.view(zs.dtype)), *domegas, *split(dvs), db)
    return unpack(dx.transpose(1, 0, 2), packing), split(dhs[0]), gradients


def slopes(b, r, f, k):
    """f = max(1 + b / r, 0); k = b / r^3 where f > 0, else 0."""
    xp = array_module(r)
    xp.divide(b, r, out=k)
    xp.add(k, 1, out=f)
    xp.maximum(f, 0, out=f)
    k /= r
    k /= r
    k *= f > 0


def modrelu_back(dh, z, f, k, a, u, out):
    """out = dz = f dh - k a z, a = Re(conj(z) dh). a and the scratch u are written too."""
    xp = array_module(z)
    xp.conjugate(z, out=u)
    u *= dh
    a[...] = u.real
    k *= a
    xp.multiply(z, k, out=u)
    xp.multiply(dh, f, out=out)
    out -= u


def add_reflection(dv, y, dy, v, w):
    """dv += (2 / s) (conj(p) dy - conj(q) y) + (4 i / s^2) Im(conj(q) p) v, summed over the rows, s = |v|^2.

    y = R z and dy (n, h); p = v* y, q = v* dy. (`reflection_backward` computes it from z.)
    """
    p, q = y @ w, dy @ w                                                     # with the factor 2 / s
    dv += p.conj() @ dy - q.conj() @ y + 1j * (q.conj() @ p).imag * v


def upstream_of(dy, dh, cache):
    """(T+1, B, h): the gradient that enters at each h_t from outside: dy, and dh at each sample's last real step."""
    hs, packing = cache.hs, cache.packing
    xp, B = array_module(hs=hs, dy=dy, dh=dh), hs.shape[1]
    dhs = zeros(hs.shape, hs.dtype, xp) if dy is None else empty(hs.shape, hs.dtype, xp)
    if dy is not None:
        dhs[0] = 0
        join(pack(dy, packing).transpose(1, 0, 2), dhs[1:])
    if dh is not None and packing is None:
        dhs[-1] += joined(dh)
    elif dh is not None:
        dhs[packing.lengths, xp.arange(B)] += joined(dh)                     # rows of a sample are distinct
    return dhs


# ---- layouts ---------------------------------------------------------------------------------------------


def complex_dtype(dtype):
    """The complex dtype whose parts have this real dtype. Raises TypeError for float16, which has none."""
    if np.dtype(dtype).itemsize < 4:
        raise TypeError(f"URNN: x and the parameters have dtype {dtype}; expected float32 or wider, as there are no "
                        "complex numbers of half precision")
    return np.result_type(dtype, 1j)


def join(halves, z):
    """Write [Re | Im] (..., 2h) into z (..., h)."""
    h = z.shape[-1]
    z.real[...], z.imag[...] = halves[..., :h], halves[..., h:]


def joined(halves):
    """[Re | Im] (..., 2h) as complex numbers (..., h)."""
    *front, width = halves.shape
    z = empty((*front, width // 2), complex_dtype(halves.dtype), array_module(halves))
    join(halves, z)
    return z


def split(z):
    """z (..., h) as [Re | Im] (..., 2h), a copy."""
    *front, h = z.shape
    halves = empty((*front, 2 * h), z.real.dtype, array_module(z))
    halves[..., :h], halves[..., h:] = z.real, z.imag
    return halves


def pairs(z):
    """A view of z (..., h), contiguous, as real numbers (..., 2h), alternating Re and Im."""
    return z.view(z.real.dtype)


def flat(array):
    """(n, B, h) -> (n B, h), a view."""
    n, B, h = array.shape
    return array.reshape(n * B, h)


def rows_of(v, B):
    """(h,) -> (B, h): v for every sample."""
    rows = empty((B, len(v)), v.dtype, array_module(v))
    rows[...] = v
    return rows
