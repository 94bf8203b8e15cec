"""The fast time loop of RWA. Its equations: `cell` in minigrad/layers/rwa.py.

    u_t = x_t W_u + b_u;   g_t = [x_t, h_{t-1}] W_g + b_g;   a_t = [x_t, h_{t-1}] W_a
    z_t = u_t tanh(g_t);   p_t = sigma(a_t - l_{t-1})
    r_t = r_{t-1} + p_t (z_t - r_{t-1});   l_t = logaddexp(l_{t-1}, a_t);   h_t = tanh(r_t)

What makes it fast (docs/derivations/rwa.md, section 5):

* l is carried as m + log D, m the largest score so far. With e = exp(a - m), p = e / (D + e), the next D is
  (D + e) / max(e, 1) and the next m is max(m, a): one exponential a step and no logarithm;
* u and the x parts of g and a are one product a block of steps, and so are the weights' gradients, while the block is
  in the processor's cache; the blocks of W_g and W_a for h are one batched product a step;
* time is the first axis of each: `uqp` is (3, T, B, h), so that what a step reads and writes are contiguous blocks;
* m, D and r are overwritten at each step: backward reads u (1 - tanh^2 g) and z_t - r_t instead. Only with a mask,
  where samples end at different steps, are they kept.
"""

import math
from typing import Any, NamedTuple

from minigrad.backend import array_module
from minigrad.memory import empty, zeros
from minigrad.packing import Packing, pack, unpack

BLOCK = 5                          # steps whose u, g, a are one product; the same for du, dg, da


class RWACache(NamedTuple):
    """What backward reads; everything time first."""

    x1: Any         # (T, B, d+1)   [x_t, 1]
    uqp: Any        # (3, T, B, h)  u (1 - q^2), q = tanh g, p
    beyond: Any     # (T, B, h)     z_t - r_t = (1 - p_t) (z_t - r_{t-1})
    hs: Any         # (T+1, B, h)   row t + 1 is h_t
    packing: Packing | None


# ---- forward ---------------------------------------------------------------------------------------------


def loop_forward(x, h, r, l, mask, W_u, b_u, W_g, b_g, W_a):
    """Run the cell over a sequence.

    x (B, L, d); h, r, l (B, h), l = -inf before the first step; mask (B, L) or None. The weights' dtype is that of x
    and the Parameters together.
    Returns y (B, L, h), (h, r, l) after each sample's last real step, cache.
    """
    xp = array_module(x=x, h=h, r=r, l=l, mask=mask, W_u=W_u)
    packing, dtype = Packing.of(mask), W_u.dtype
    (B, T, d), width = x.shape, W_u.shape[1]

    x1, W1 = empty((T, B, d + 1), dtype, xp), _input_weights(W_u, b_u, W_g, b_g, W_a)
    x1[..., :d], x1[..., d] = pack(x, packing).transpose(1, 0, 2), 1
    U = _stacked([W_g[d:], W_a[d:]])                                         # (2, h, h)
    uqp, hs, beyond, mDr, ga, limits = (
        empty((*front, B, width), dtype, xp) for front in [(3, T), (T + 1,), (T,), (3,), (2,), (2,)])
    hs[0] = h
    mDr[0], mDr[1], mDr[2] = l, 1, r
    limits[0], limits[1] = 0.9 * math.log(xp.finfo(dtype).max), 1            # full arrays: faster than numbers
    kept = None if packing is None else empty((T + 1, *mDr.shape), dtype, xp)
    if kept is not None:
        kept[0] = mDr

    for t in range(T):
        if t % BLOCK == 0:
            steps = slice(t, min(t + BLOCK, T))
            rows = (steps.stop - t) * B
            xp.matmul(x1[steps].reshape(rows, d + 1), W1, out=uqp[:, steps].reshape(3, rows, width))
        xp.matmul(hs[t], U, out=ga)
        _cell_forward(xp, ga, uqp[:, t], beyond[t], mDr, hs[t + 1], limits)
        if kept is not None:
            kept[t + 1] = mDr

    y = unpack(hs[1:].transpose(1, 0, 2), packing)
    if packing is None:
        h, (m, D, r) = hs[T].copy(), mDr
    else:
        ends, sample = packing.lengths, xp.arange(B)
        h, (m, D, r) = hs[ends, sample], (kept[ends, n, sample] for n in range(3))
    return y, (h, r.copy(), m + xp.log(D)), RWACache(x1, uqp, beyond, hs, packing)


def _cell_forward(xp, ga, uqp, z, mDr, h, limits):
    """One step, from the parts of u, g and a that h_{t-1} (`ga`) and x_t (in `uqp`) give; m, D and r are updated.

    Writes h, in uqp u (1 - q^2), q = tanh g, p, and in z z - r. a - m is clipped where exp would overflow: there
    p = 1 and D = 1 anyway, to the last bit; m = -inf is no special case.
    """
    (g, a), (u, q, p), (m, D, r), (largest, ones) = ga, uqp, mDr, limits
    e = p
    xp.add(g, q, out=q)
    xp.tanh(q, out=q)
    xp.add(a, p, out=a)
    xp.subtract(a, m, out=e)
    xp.minimum(e, largest, out=e)
    xp.exp(e, out=e)
    xp.maximum(m, a, out=m)
    xp.add(D, e, out=D)
    xp.maximum(e, ones, out=a)
    xp.divide(e, D, out=p)
    xp.divide(D, a, out=D)
    xp.multiply(u, q, out=z)
    xp.subtract(z, r, out=g)
    xp.multiply(g, p, out=g)
    xp.add(r, g, out=r)                                                      # r + p (z - r)
    xp.tanh(r, out=h)
    xp.multiply(z, q, out=g)
    xp.subtract(u, g, out=u)
    xp.subtract(z, r, out=z)


def _input_weights(W_u, b_u, W_g, b_g, W_a):
    """(3, d+1, h): what [x_t, 1] is multiplied by in u, g and a."""
    d, h = W_u.shape
    W1 = zeros((3, d + 1, h), W_u.dtype, array_module(W_u))
    W1[0, :d], W1[1, :d], W1[2, :d] = W_u, W_g[:d], W_a[:d]
    W1[0, d], W1[1, d] = b_u, b_g
    return W1


# ---- backward --------------------------------------------------------------------------------------------


def loop_backward(dy, dh, dr, dl, cache, W_u, W_g, W_a):
    """Backpropagation through time.

    With G_t the gradient that reaches h_t from outside, the later steps add

        dh_t = G_t + dg_{t+1} U_g^T + da_{t+1} U_a^T;      dr_t += dh_t (1 - h_t^2)
        dz = p dr_t;   du = dz tanh g;   dg = dz u (1 - tanh^2 g)
        da = p (dl_t + (z - r_t) dr_t)
        dr_{t-1} = dr_t - dz;   dl_{t-1} = dl_t - da

    (U_g, U_a the rows of W_g, W_a for h). Returns dx, (dh0, dr0, dl0), (dW_u, db_u, dW_g, db_g, dW_a).
    """
    x1, uqp, beyond, hs, packing = cache
    xp, dtype, (T, B, h), d = array_module(hs=hs, dy=dy), hs.dtype, beyond.shape, W_u.shape[0]

    dys = None if dy is None else pack(dy, packing).transpose(1, 0, 2)
    ends = _ends((dh, dr, dl), cache)                                        # (T+1 or 1, 3, B, h)
    U_T = _stacked([W_g[d:].T, W_a[d:].T])                                   # (2, h, h)
    W_T = _stacked([W_u.T, W_g[:d].T, W_a[:d].T])                            # (3, h, d)
    duga, dx = empty((3, BLOCK, B, h), dtype, xp), empty((T, B, d), dtype, xp)
    dU, dW1 = zeros((2, h, h), dtype, xp), zeros((3, d + 1, h), dtype, xp)
    dh_ga, scratch = empty((2, B, h), dtype, xp), empty((3, B, h), dtype, xp)
    scratch[2] = 1

    dstate = ends[-1]                                                        # dh, dr, dl
    for t in range(T - 1, -1, -1):
        if dys is not None:
            dstate[0] += dys[t]
        _cell_backward(xp, dstate, uqp[:, t], beyond[t], hs[t + 1], duga[:, t % BLOCK], scratch)
        xp.matmul(duga[1:, t % BLOCK], U_T, out=dh_ga)
        xp.add(dh_ga[0], dh_ga[1], out=dstate[0])
        if packing is not None:
            dstate += ends[t]
        if t % BLOCK == 0:
            steps = slice(t, min(t + BLOCK, T))
            rows = (steps.stop - t) * B
            flat = duga[:, :steps.stop - t].reshape(3, rows, h)
            dU += xp.matmul(hs[steps].reshape(rows, h).T, flat[1:])
            dW1 += xp.matmul(x1[steps].reshape(rows, d + 1).T, flat)
            xp.matmul(flat, W_T).sum(axis=0, out=dx[steps].reshape(rows, d))

    weights = (dW1[0, :d], dW1[0, d], xp.concatenate([dW1[1, :d], dU[0]]), dW1[1, d],
               xp.concatenate([dW1[2, :d], dU[1]]))
    return unpack(dx.transpose(1, 0, 2), packing), tuple(gradient.copy() for gradient in dstate), weights


def _cell_backward(xp, dstate, uqp, beyond, h, duga, scratch):
    """Through one step's equations, from the bottom up. Writes du, dg, da; dr and dl become those before it."""
    (dh, dr, dl), (u_slope, q, p), (du, dg, da), (dz, product, ones) = dstate, uqp, duga, scratch
    xp.multiply(h, h, out=product)
    xp.subtract(ones, product, out=product)
    xp.multiply(product, dh, out=product)
    xp.add(dr, product, out=dr)                                              # dr += dh (1 - h^2)
    xp.multiply(p, dr, out=dz)
    xp.multiply(dz, q, out=du)
    xp.multiply(dz, u_slope, out=dg)
    xp.multiply(beyond, dr, out=da)
    xp.add(da, dl, out=da)
    xp.multiply(da, p, out=da)
    xp.subtract(dr, dz, out=dr)
    xp.subtract(dl, da, out=dl)


def _ends(dstate, cache):
    """The final state's gradient where it enters: (1, 3, B, h), or with a mask (T+1, 3, B, h), row t for samples of t
    real steps."""
    (T, B, h), packing = cache.beyond.shape, cache.packing
    xp = array_module(cache.beyond, *dstate)
    ends = zeros((1 if packing is None else T + 1, 3, B, h), cache.beyond.dtype, xp)
    last, sample = (-1, slice(None)) if packing is None else (packing.lengths, xp.arange(B))
    for n, gradient in enumerate(dstate):
        if gradient is not None:
            ends[last, n, sample] = gradient
    return ends


def _stacked(blocks):
    """The blocks one after another, contiguous and aligned as `empty` is: a product of unaligned ones is slower."""
    stack = empty((len(blocks), *blocks[0].shape), blocks[0].dtype, array_module(*blocks))
    for n, block in enumerate(blocks):
        stack[n] = block
    return stack
