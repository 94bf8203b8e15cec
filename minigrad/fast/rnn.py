"""The fast time loop of RNN and IRNN. Their equations: `cell` in minigrad/layers/rnn.py.

Every form is

    m_t = f(x_t W + h_{t-1} U + b)          f: tanh or relu
    h_t = m_t + F                           F: nothing, h_{t-k}, h_{t-k} W_f, or sum_i w_hat[i-1] h_{t-i-1}

What makes it fast (docs/derivations/rnn.md, section 6): time is the first axis; the input product is one product before
the loop and each weight's gradient one product after it, so that one product is left in a step; `hs` holds the past
before the sequence and the sequence in one array, row P + t being h_t, so that a shortcut reads rows of it and a window
is a slice, never a copy. Without F the activations are written straight into hs, and dz over dh.
"""

from typing import Any, NamedTuple

from minigrad.backend import array_module
from minigrad.memory import empty, matmul, zeros
from minigrad.packing import Packing, last_states, pack, states_upstream, unpack


class RNNCache(NamedTuple):
    """What backward reads. T steps, P rows of past; everything time first."""

    x1: Any         # (T, B, d+1)   [x_t, 1]
    m: Any          # (T, B, h)     f(.); the same memory as the rows of hs where there is no F
    hs: Any         # (P+T, B, h)   row P + t is h_t
    packing: Packing | None


# ---- f ---------------------------------------------------------------------------------------------------
# f of a step's z (B, h), in place; u (B, h) is scratch memory. A 0-d array is faster than a Python number.


class Tanh:
    """m = tanh(z). Backward: dz = dh (1 - m^2)."""

    def __init__(self, u):
        self.xp, self.slope, self.one = array_module(u), u, array_module(u).ones((), u.dtype)

    def forward(self, z):
        self.xp.tanh(z, out=z)

    def backward(self, dh, m, dz):
        self.xp.multiply(m, m, out=self.slope)
        self.xp.subtract(self.one, self.slope, out=self.slope)
        self.xp.multiply(dh, self.slope, out=dz)


class Relu:
    """m = max(z, 0). Backward: dz = dh [m > 0]; at z = 0 it is 0."""

    def __init__(self, u):
        self.xp, self.zero = array_module(u), array_module(u).zeros((), u.dtype)

    def forward(self, z):
        self.xp.maximum(z, self.zero, out=z)

    def backward(self, dh, m, dz):
        self.xp.multiply(dh, m > self.zero, out=dz)


# ---- F ---------------------------------------------------------------------------------------------------
# forward    F of the state in a row of hs
# backward   the gradient of the state in a row of dhs through the F of later states, or None; the first P rows, the
#            past, have no F
# Both may write into `out` (B, h) and return it.


class Lag:
    """F = h_{t-k} W_f, or h_{t-k} itself where W_f is None (equation 4)."""

    def __init__(self, k, W_f=None):
        self.k, self.W_f = k, W_f

    def forward(self, hs, row, out):
        h = hs[row - self.k]
        return h if self.W_f is None else array_module(h).matmul(h, self.W_f, out=out)

    def backward(self, dhs, row, P, out):
        """dh_{t+k} W_f^T."""
        if row + self.k >= len(dhs):
            return None
        dh = dhs[row + self.k]
        return dh if self.W_f is None else array_module(dh).matmul(dh, self.W_f.T, out=out)

    def weight_gradient(self, hs, dhs):
        """dW_f = sum_t h_{t-k}^T dh_t, or None."""
        if self.W_f is not None:
            return _rows(hs[:len(hs) - self.k]).T @ _rows(dhs[self.k:])


class Window:
    """F = sum_{i=1}^{k-1} w_hat[i-1] h_{t-i-1} (equation 5), w_hat[0] the weight of the newest, h_{t-2}."""

    def __init__(self, w_hat):
        xp = array_module(w_hat)
        self.newest_first = xp.ascontiguousarray(w_hat[None])                # (1, k-1)
        self.oldest_first = xp.ascontiguousarray(w_hat[None, ::-1])

    def forward(self, hs, row, out):
        window = hs[row - 1 - self.oldest_first.shape[1]:row - 1]
        return _weighted(self.oldest_first, window, out)

    def backward(self, dhs, row, P, out):
        """sum_i w_hat[i-1] dh_{t+i+1}, over the steps that exist."""
        first = row + 2
        start, stop = max(first, P), min(first + self.newest_first.shape[1], len(dhs))
        if start >= stop:
            return None
        return _weighted(self.newest_first[:, start - first:stop - first], dhs[start:stop], out)

    def weight_gradient(self, hs, dhs):
        """dw_hat[i-1] = sum_t <dh_t, h_{t-i-1}> over samples and units; a window is in the cache while it is read."""
        n = self.oldest_first.shape[1]
        flat_hs, flat_dhs = _flat(hs), _flat(dhs)
        dw_hat = zeros((n, 1), hs.dtype, array_module(hs))                   # oldest first, as the window's rows
        for row in range(n + 1, len(hs)):
            dw_hat += flat_hs[row - 1 - n:row - 1] @ flat_dhs[row][:, None]
        return dw_hat[::-1, 0]


def _weighted(weights, states, out):
    """out (B, h) = weights (1, n) times states (n, B, h)."""
    array_module(out).matmul(weights, _flat(states), out=out.reshape(1, out.size))
    return out


def _flat(states):
    """(n, B, h) -> (n, B h)."""
    n, B, h = states.shape
    return states.reshape(n, B * h)


def _rows(states):
    """(n, B, h) -> (n B, h)."""
    n, B, h = states.shape
    return states.reshape(n * B, h)


# ---- forward and backward --------------------------------------------------------------------------------


def loop_forward(x, past, mask, W, U, b, f, F=None):
    """Run a cell over a sequence.

    x (B, L, d); past (B, P, h), oldest first, P = 1 without F and k with it; mask (B, L) or None; f Tanh or Relu; F
    None, a Lag or a Window. The weights' dtype is that of x and the Parameters together.
    Returns y (B, L, h), the past after the last real step (B, P, h), cache.
    """
    xp = array_module(x=x, past=past, mask=mask, W=W)
    packing, dtype = Packing.of(mask), W.dtype
    (B, T, _), (_, P, h) = x.shape, past.shape
    hs, u = empty((P + T, B, h), dtype, xp), empty((B, h), dtype, xp)
    f = f(u)
    hs[:P] = past.transpose(1, 0, 2)
    m = hs[P:] if F is None else empty((T, B, h), dtype, xp)
    x1 = _input_product(pack(x, packing), W, b, m)
    real = None if packing is None else (xp.arange(T)[:, None] < packing.lengths)[:, :, None]          # (T, B, 1)

    for t in range(T):
        m_t, row = m[t], P + t
        xp.matmul(hs[row - 1], U, out=u)
        xp.add(m_t, u, out=m_t)
        f.forward(m_t)
        if F is not None:
            xp.add(m_t, F.forward(hs, row, u), out=hs[row])
        if real is not None:
            hs[row] *= real[t]                           # relu and F can grow without bound: stop at the last real step

    y = unpack(hs[P:].transpose(1, 0, 2), packing)
    return y, last_states(hs, P, packing), RNNCache(x1, m, hs, packing)


def _input_product(x, W, b, out):
    """x1 (T, B, d+1), [x_t, 1]; x W + b into out (T, B, h)."""
    xp, (B, T, d) = array_module(x), x.shape
    x1, W1 = empty((T, B, d + 1), out.dtype, xp), empty((d + 1, len(b)), out.dtype, xp)
    x1[..., :d], x1[..., d] = x.transpose(1, 0, 2), 1
    W1[:d], W1[d] = W, b
    xp.matmul(_rows(x1), W1, out=_rows(out))
    return x1


def loop_backward(dy, dpast, cache, W, U, f, F=None):
    """Backpropagation through time.

    With G_t the gradient that reaches h_t from outside,

        dh_t = G_t + dz_{t+1} U^T + the gradient through the F of later steps;     dm_t = dh_t;     dz_t = dm_t f'(z_t)

    Returns dx, dpast0, dW, dU, db, and the gradient of F's weights (None where it has none).
    """
    x1, m, hs, packing = cache
    xp, dtype, (T, B, h), d = array_module(hs), hs.dtype, m.shape, W.shape[0]
    P = len(hs) - T
    dhs, u = states_upstream(dy, dpast, hs, P, packing), empty((B, h), dtype, xp)
    f = f(u)
    dz = dhs[P:] if F is None else empty((T, B, h), dtype, xp)
    U_T = xp.ascontiguousarray(U.T)

    for row in range(P + T - 1, -1, -1):
        dh, t = dhs[row], row - P
        if 0 <= t + 1 < T:
            xp.matmul(dz[t + 1], U_T, out=u)
            xp.add(dh, u, out=dh)
        through_F = None if F is None else F.backward(dhs, row, P, u)
        if through_F is not None:
            xp.add(dh, through_F, out=dh)
        if t >= 0:
            f.backward(dh, m[t], dh if F is None else dz[t])     # one view: CuPy copies an array that overlaps out

    dU = _rows(hs[P - 1:P - 1 + T]).T @ _rows(dz)
    dW1 = _rows(x1).T @ _rows(dz)
    dF = None if F is None else F.weight_gradient(hs, dhs)
    dx = matmul(dz, W.T)
    dpast0 = dhs[:P].transpose(1, 0, 2).copy()                               # not a view that keeps all of dhs
    return unpack(dx.transpose(1, 0, 2), packing), dpast0, dW1[:d], dU, dW1[d], dF
