"""LSTM: long short-term memory (Hochreiter and Schmidhuber 1997; forget gate of Gers et al. 2000; no peepholes).

Gate order i, f, o, g. Derivation of the backward: docs/derivations/lstm.md.
"""

import math

from minigrad.backend import array_module, sigmoid
from minigrad.check import check_count, check_number
from minigrad.initializers import gate_blocks, zeros
from minigrad.layers.lstm_loop import loop_backward, loop_forward
from minigrad.layers.recurrent import Recurrent
from minigrad.parameter import Parameter

# ---- the equations ---------------------------------------------------------------------------------------


def lstm_gates(x, h, W, U, b):
    """i, f, o = sigma(.), g = tanh(.) of x W + h U + b. x (B, d), h (B, h) -> four (B, h)."""
    z_i, z_f, z_o, z_g = array_module(x).split(x @ W + h @ U + b, 4, axis=1)
    return sigmoid(z_i), sigmoid(z_f), sigmoid(z_o), array_module(x).tanh(z_g)


def lstm_gates_backward(di, df, do, dg, x, h, gates, W, U):
    """Through the nonlinearities and the products: dx, dh, dW, dU, db."""
    i, f, o, g = gates
    dz = array_module(x).concatenate(
        [di * i * (1 - i), df * f * (1 - f), do * o * (1 - o), dg * (1 - g * g)], axis=1)   # (B, 4h)
    return dz @ W.T, dz @ U.T, x.T @ dz, h.T @ dz, dz.sum(axis=0)


def lstm_step(x, h, c, W, U, b):
    """One step, as written:

        i, f, o = sigma(x W + h U + b)      g = tanh(x W + h U + b)
        c' = f c + i g
        h' = o tanh(c')

    x (B, d), h and c (B, h) -> (h', c'), cache.
    """
    i, f, o, g = lstm_gates(x, h, W, U, b)
    c_new = f * c + i * g
    q = array_module(x).tanh(c_new)
    return (o * q, c_new), (x, h, c, (i, f, o, g), q)


def lstm_step_backward(dh_new, dc_new, cache, W, U):
    """The step's gradients, line by line from the bottom up: (dx, dh, dc), (dW, dU, db)."""
    x, h, c, (i, f, o, g), q = cache
    do = dh_new * q
    dc_new = dc_new + dh_new * o * (1 - q * q)
    di, df, dg, dc = dc_new * g, dc_new * c, dc_new * i, dc_new * f
    dx, dh, dW, dU, db = lstm_gates_backward(di, df, do, dg, x, h, (i, f, o, g), W, U)
    return (dx, dh, dc), (dW, dU, db)


def gate_parameters(layer, d, h, forget_bias, init, rng, dtype):
    """W (d, 4h), U (h, 4h) and b (4h,) of a gated layer at the start; b is zero but for the forget gate's."""
    check_count(layer, "d", d)
    check_count(layer, "h", h)
    check_number(layer, "forget_bias", forget_bias, -math.inf, open_low=True, open_high=True)
    W, U = gate_blocks(init, rng, d, h, dtype)
    b = zeros((4 * h,), dtype)
    b[h:2 * h] = forget_bias
    return Parameter(W, "W"), Parameter(U, "U"), Parameter(b, "b")


# ---- the layer -------------------------------------------------------------------------------------------


class LSTM(Recurrent):
    """h_t = o_t tanh(c_t), c_t = f_t c_{t-1} + i_t g_t, over a sequence (`lstm_step` is the cell).

    W (d, 4h), U (h, 4h), b (4h,), gates in the order i, f, o, g. `init` names how W and U start
    (minigrad.initializers.GATE_BLOCKS; default: every gate block orthogonal); b is zero but for the forget
    gate's `forget_bias` (Gers et al. 2000; Jozefowicz et al. 2015 recommend 1).

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (h, c)), cache; state (h, c), each (B, h).
    The dtype is that of x and the parameters together. Nothing is drawn: rng has no effect.

    Raises ValueError for wrong shapes, TypeError for wrong dtypes or a mix of devices.
    """

    def __init__(self, d, h, forget_bias=1.0, *, init="orthogonal", rng=None, dtype=None):
        self.W, self.U, self.b = gate_parameters("LSTM", d, h, forget_bias, init, rng, dtype)

    def forward(self, x, state=None, mask=None, rng=None):
        W, U, b = self.W.value, self.U.value, self.b.value
        array_module(x=x, W=W, mask=mask)
        self.check_input(x, mask, W.shape[0])
        h, c = self.split_state(state, self._state_shapes(x.shape[0]))
        past = None if h is None else h[:, None]                             # (B, 1, h): an LSTM's past is h_{t-1}
        y, past, c, cache = loop_forward(x, past, c, mask, W, U, b)
        return (y, (past[:, 0], c)), (cache,)

    def backward(self, upstream, cache):
        """Backpropagation through time (`loop_backward`): dx (B, L, d) and dstate0 = (dh, dc)."""
        loop_cache, = cache
        dy, (dh, dc) = self.check_upstream(upstream, loop_cache.y_shape, self._state_shapes(loop_cache.y_shape[0]))
        dpast = None if dh is None else dh[:, None]
        dx, dpast, dc, dW, dU, db, _ = loop_backward(dy, dpast, dc, loop_cache, self.W.value, self.U.value)
        self.W.grad += dW
        self.U.grad += dU
        self.b.grad += db
        return dx, (dpast[:, 0], dc)

    def _state_shapes(self, B):
        h = self.U.value.shape[0]
        return {"h": (B, h), "c": (B, h)}
