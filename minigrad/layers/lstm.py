"""LSTM: long short-term memory (Hochreiter and Schmidhuber 1997; forget gate of Gers et al. 2000; no peepholes).

Gate order i, f, o, g. Derivation of the backward: docs/derivations/lstm.md.
"""

import math

from minigrad.backend import array_module, sigmoid
from minigrad.check import check_count, check_number
from minigrad.fast import lstm as fast_lstm
from minigrad.initializers import gate_blocks, zeros
from minigrad.layers.recurrent import Recurrent
from minigrad.parameter import Parameter

# ---- the equations of the gates, which RRALSTM shares ----------------------------------------------------


def lstm_gates(x, h, W, U, b):
    """i, f, o = sigma(.), g = tanh(.) of x W + h U + b. x (B, d), h (B, h) -> four (B, h)."""
    z_i, z_f, z_o, z_g = array_module(x).split(x @ W + h @ U + b, 4, axis=1)
    return sigmoid(z_i), sigmoid(z_f), sigmoid(z_o), array_module(x).tanh(z_g)


def lstm_gates_backward(di, df, do, dg, x, h, gates, W, U):
    """Through the nonlinearities and the products: dx, dh, (dW, dU, db)."""
    i, f, o, g = gates
    dz = array_module(x).concatenate(
        [di * i * (1 - i), df * f * (1 - f), do * o * (1 - o), dg * (1 - g * g)], axis=1)   # (B, 4h)
    return dz @ W.T, dz @ U.T, (x.T @ dz, h.T @ dz, dz.sum(axis=0))


# ---- the layer -------------------------------------------------------------------------------------------


class LSTM(Recurrent):
    """h_t = o_t tanh(c_t), c_t = f_t c_{t-1} + i_t g_t, over a sequence.

    W (d, 4h), U (h, 4h), b (4h,), gates in the order i, f, o, g. `init` names the initialiser of W and U
    (minigrad.initializers.GATE_BLOCKS; default: every gate block orthogonal); b is zero except for the forget
    gate's `forget_bias` (Gers et al. 2000; Jozefowicz et al. 2015 recommend 1).

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (h, c)), cache; state (h, c), each (B, h).
    The dtype is that of x and the parameters together. `rng` has no effect.
    fast=False runs `cell` and `cell_backward` step by step; the default is the loop of minigrad/fast/lstm.py.

    Raises ValueError for wrong settings or shapes, TypeError for wrong dtypes or a mix of devices.
    """

    weights = ("W", "U", "b")

    # ---- the equations: they run with fast=False; the fast form is minigrad/fast/lstm.py -----------------

    def cell(self, x, state, W, U, b):
        """One step:

            z_i, z_f, z_o, z_g = x W + h U + b
            i, f, o = sigma(z_i), sigma(z_f), sigma(z_o)      g = tanh(z_g)
            c' = f c + i g
            h' = o tanh(c')

        x (B, d), state (h, c), each (B, h) -> (h', (h', c')), cache.
        """
        h, c = state
        i, f, o, g = lstm_gates(x, h, W, U, b)
        c_new = f * c + i * g
        q = array_module(x).tanh(c_new)
        h_new = o * q
        return (h_new, (h_new, c_new)), (x, state, (i, f, o, g), q)

    def cell_backward(self, upstream, cache, W, U, b):
        """The step's gradients, from the bottom line up: dx, (dh, dc), (dW, dU, db)."""
        dy, (dh_new, dc_new) = upstream
        x, (h, c), (i, f, o, g), q = cache
        dh_new = dh_new + dy
        do = dh_new * q
        dc_new = dc_new + dh_new * o * (1 - q * q)
        di, df, dg, dc = dc_new * g, dc_new * c, dc_new * i, dc_new * f
        dx, dh, gradients = lstm_gates_backward(di, df, do, dg, x, h, (i, f, o, g), W, U)
        return dx, (dh, dc), gradients

    def state_shapes(self, B):
        h = self.U.value.shape[0]
        return {"h": (B, h), "c": (B, h)}

    # ---- parameters, and the fast loop -------------------------------------------------------------------

    def __init__(self, d, h, forget_bias=1.0, *, init="orthogonal", fast=True, rng=None, dtype=None):
        self.W, self.U, self.b = gate_parameters("LSTM", d, h, forget_bias, init, rng, dtype)
        self.fast = fast

    def fast_forward(self, x, state, mask, weights):
        h, c = state
        y, past, c, cache = fast_lstm.loop_forward(x, h[:, None], c, mask, *weights)    # (B, 1, h): the past is h_{t-1}
        return y, (past[:, 0], c), cache

    def fast_backward(self, dy, dstate, cache, weights):
        (dh, dc), (W, U, _) = dstate, weights
        dpast = None if dh is None else dh[:, None]
        dx, dpast, dc, dW, dU, db, _ = fast_lstm.loop_backward(dy, dpast, dc, cache, W, U)
        return dx, (dpast[:, 0], dc), (dW, dU, db)


def gate_parameters(layer, d, h, forget_bias, init, rng, dtype):
    """W (d, 4h), U (h, 4h) and b (4h,) of an LSTM, initialised; b is zero except for the forget gate's."""
    check_count(layer, "d", d)
    check_count(layer, "h", h)
    check_number(layer, "forget_bias", forget_bias, -math.inf, open_low=True, open_high=True)
    W, U = gate_blocks(init, rng, d, h, dtype)
    b = zeros((4 * h,), dtype)
    b[h:2 * h] = forget_bias
    return Parameter(W, "W"), Parameter(U, "U"), Parameter(b, "b")
