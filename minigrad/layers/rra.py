"""RRALSTM: the LSTM with recurrent residual attention (Wang 2017, arXiv 1709.03714, equations 7 to 10).

Derivation of the backward: docs/derivations/rra.md.
"""

from minigrad.backend import array_module
from minigrad.check import check_choice, check_count
from minigrad.fast import lstm as fast_lstm
from minigrad.functional import softmax, sum_normalize
from minigrad.initializers import generator, uniform
from minigrad.layers.lstm import gate_parameters, lstm_gates, lstm_gates_backward
from minigrad.layers.recurrent import Recurrent
from minigrad.parameter import Parameter

NORMALIZERS = {"sum": sum_normalize, "softmax": softmax}
SMALLEST_SUM = 1e-6                # of |sum w| relative to sum |w|

# ---- the equations of the window, which RNN shares -------------------------------------------------------


def rra_attention(past, w_hat):
    """Equation 9: a_t = sum_k w_hat[k-1] h_{t-k-offset+1}, k = 1 ... K.

    past (B, P, h), oldest first, past[:, -1] = h_{t-1}; with P = K+offset-1 its first K states are the window,
    the oldest of them weighted by w_hat[K-1].
    """
    K = len(w_hat)
    return sum(w_hat[k - 1] * past[:, K - k] for k in range(1, K + 1))


def rra_attention_backward(da, past, w_hat):
    """dpast[:, K-k] = w_hat[k-1] da;  dw_hat[k-1] = <da, past[:, K-k]> (over batch and units)."""
    xp, K = array_module(past), len(w_hat)
    dpast, dw_hat = xp.zeros_like(past), xp.zeros_like(w_hat)
    for k in range(1, K + 1):
        dpast[:, K - k] = w_hat[k - 1] * da
        dw_hat[k - 1] = (da * past[:, K - k]).sum()
    return dpast, dw_hat


# ---- the weights' normalisation, which RNN shares --------------------------------------------------------


def normalize_weights(w, normalize, dtype=None):
    """(w_hat (K,), the normaliser's cache), computed in w's dtype or a wider one; no cache for K = 0."""
    w = w if dtype is None else w.astype(dtype, copy=False)
    return NORMALIZERS[normalize].forward(w) if len(w) else (w, None)


def check_sum(layer, w, normalize):
    """Raise ArithmeticError when |sum w| <= 1e-6 sum |w|: the normaliser would divide by almost zero."""
    if normalize != "sum" or not len(w):
        return
    total, size = float(w.sum()), float(abs(w).sum())
    if abs(total) <= SMALLEST_SUM * size:
        raise ArithmeticError(
            f"{layer}: the attention weights w sum to {total:.3g} while their sizes sum to {size:.3g}, and "
            "normalize='sum' divides by that sum; use normalize='softmax', or a smaller learning rate")


# ---- the layer -------------------------------------------------------------------------------------------


class RRALSTM(Recurrent):
    """h_t = o_t tanh(c_t + a_t) over a sequence: an LSTM whose residual attends to earlier states.

    a_t = sum_k w_hat[k-1] h_{t-k-offset+1} is a weighted sum over a window of K earlier states; w_hat is w (K,),
    normalised: `normalize="sum"`, w / sum w (the paper), or "softmax". offset=2 is the paper's (h_{t-2} ...
    h_{t-K-1}), offset=1 that of the author's code (h_{t-1} ... h_{t-K}); any whole number from 1 up is allowed.
    w[0] is the weight of the newest state in the window. States before the sequence are zero. K = 0 is the LSTM, with
    no normaliser.

    W (d, 4h), U (h, 4h), b (4h,), gates in the order i, f, o, g, initialised as LSTM's; w (K,) uniform in [0, 1).

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (past, c)), cache; state: past (B, P, h)
    with P = max(1, K+offset-1), oldest first, past[:, -1] = h_{t-1}; c (B, h). The dtype is that of x and the
    parameters together. `rng` has no effect.
    fast=False runs `cell` and `cell_backward` step by step; the default is the loop of minigrad/fast/lstm.py.

    Raises ValueError for wrong settings or shapes, TypeError for wrong dtypes or a mix of devices, ArithmeticError
    (`validate`) if the sum of w is too close to zero to divide by.
    """

    weights = ("W", "U", "b", "w")

    # ---- the equations: they run with fast=False; the fast form is minigrad/fast/lstm.py -----------------

    def cell(self, x, state, W, U, b, w_hat):
        """One step:

            z_i, z_f, z_o, z_g = x W + h_{t-1} U + b
            i, f, o = sigma(z_i), sigma(z_f), sigma(z_o)      g = tanh(z_g)               (7)
            c_t = f c_{t-1} + i g                                                         (8)
            a_t = sum_k w_hat[k-1] h_{t-k-offset+1}                                       (9)
            h_t = o tanh(c_t + a_t)                                                       (10)

        x (B, d), state (past (B, P, h), oldest first, c (B, h)), w_hat (K,) -> (h_t, (past', c_t)), cache.
        The gates see only x_t and h_{t-1}, and a_t is not written into c_t.
        """
        past, c = state
        xp = array_module(x)
        i, f, o, g = lstm_gates(x, past[:, -1], W, U, b)
        c_new = f * c + i * g
        q = xp.tanh(c_new + rra_attention(past, w_hat))
        h_new = o * q
        past_new = xp.concatenate([past[:, 1:], h_new[:, None]], axis=1)
        return (h_new, (past_new, c_new)), (x, state, (i, f, o, g), q)

    def cell_backward(self, upstream, cache, W, U, b, w_hat):
        """The step's gradients, from the bottom line up: dx, (dpast, dc), (dW, dU, db, dw_hat)."""
        dy, (dpast_new, dc_new) = upstream
        x, (past, c), (i, f, o, g), q = cache
        dh_new = dy + dpast_new[:, -1]
        do, ds = dh_new * q, dh_new * o * (1 - q * q)                        # ds: of c_t + a_t
        dpast, dw_hat = rra_attention_backward(ds, past, w_hat)
        dpast[:, 1:] += dpast_new[:, :-1]                                    # the states that moved by one place
        dc_new = dc_new + ds
        di, df, dg, dc = dc_new * g, dc_new * c, dc_new * i, dc_new * f
        dx, dh, gradients = lstm_gates_backward(di, df, do, dg, x, past[:, -1], (i, f, o, g), W, U)
        dpast[:, -1] += dh
        return dx, (dpast, dc), (*gradients, dw_hat)

    def state_shapes(self, B):
        K, h = len(self.w.value), self.U.value.shape[0]
        return {"past": (B, max(1, K + self.offset - 1), h), "c": (B, h)}

    # ---- the normalised weights --------------------------------------------------------------------------

    def cell_weights(self, dtype):
        """W, U, b and w_hat (K,), which is w normalised."""
        (W, U, b, _), _ = super().cell_weights(dtype)
        w_hat, made = self.attention_weights(dtype)
        return (W, U, b, w_hat), made

    def cell_weights_backward(self, gradients, made):
        """w.grad += (dw_hat - <w_hat, dw_hat>) / sum w; under softmax w_hat (dw_hat - <w_hat, dw_hat>)."""
        dW, dU, db, dw_hat = gradients
        self.add_gradients(W=dW, U=dU, b=db)
        if made is not None:
            self.w.grad += NORMALIZERS[self.normalize].backward(dw_hat, made)

    def attention_weights(self, dtype=None):
        """(w_hat (K,), the normaliser's cache), computed in w's dtype or a wider one; no cache for K = 0."""
        return normalize_weights(self.w.value, self.normalize, dtype)

    def validate(self):
        """Raise ArithmeticError when |sum w| <= 1e-6 sum |w|: the normaliser would divide by almost zero."""
        check_sum("RRALSTM", self.w.value, self.normalize)

    # ---- parameters, and the fast loop -------------------------------------------------------------------

    def __init__(self, d, h, K, offset=2, normalize="sum", forget_bias=1.0, *, init="orthogonal", fast=True,
                 rng=None, dtype=None):
        check_count("RRALSTM", "K", K, least=0)
        check_count("RRALSTM", "offset", offset)
        check_choice("RRALSTM", "normalize", normalize, NORMALIZERS)
        rng = generator(rng)
        self.W, self.U, self.b = gate_parameters("RRALSTM", d, h, forget_bias, init, rng, dtype)
        self.w = Parameter(uniform(rng, (K,), dtype=dtype), "w")
        self.offset, self.normalize, self.fast = int(offset), normalize, fast

    def fast_forward(self, x, state, mask, weights):
        (past, c), (W, U, b, w_hat) = state, weights
        w_hat = w_hat if len(w_hat) else None
        y, past, c, cache = fast_lstm.loop_forward(x, past, c, mask, W, U, b, w_hat, self.offset)
        return y, (past, c), cache

    def fast_backward(self, dy, dstate, cache, weights):
        (dpast, dc), (W, U, _, w_hat) = dstate, weights
        w_hat = w_hat if len(w_hat) else None
        dx, dpast, dc, *gradients = fast_lstm.loop_backward(dy, dpast, dc, cache, W, U, w_hat, self.offset)
        return dx, (dpast, dc), gradients
