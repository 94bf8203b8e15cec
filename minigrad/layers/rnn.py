"""The plain recurrent networks: RNN, its shortcuts over time, and IRNN.

RNN takes the steps that lead to RRALSTM (Wang 2017, arXiv 1709.03714, equations 3 to 5, reconstructed from its text):

    h_t = tanh(x_t W + h_{t-1} U + b)                           (3)   the recurrent network
          ... + h_{t-k}  or  h_{t-k} W_f                        (4)   residual: a shortcut over k steps
          ... + sum_{i=1}^{k-1} w_hat_i h_{t-i-1}               (5)   residual attention to h_{t-2} ... h_{t-k}

In (3) h_t depends on h_{t-k} only through k tanhs and k products with U, and its gradient passes through all of them.
(4) adds a path around them, outside the tanh; with W_f = 0 it reduces to (3). (5) learns which of the recent states the
path starts from, with k-1 weights that all units share and that sum to 1. RRALSTM (minigrad/layers/rra.py) adds the sum
of (5) inside an LSTM's output: h_t = o_t tanh(c_t + a_t).

In (4) and (5) h_t has no bound: a shortcut of weight 1 adds up over the steps.

IRNN (Le, Jaitly and Hinton 2015, arXiv 1504.00941) uses relu instead of tanh and starts from the identity matrix, so
that it keeps its state at first.

Derivation of the backward: docs/derivations/rnn.md.
"""

import math

from minigrad.backend import array_module
from minigrad.check import check_choice, check_count, check_number
from minigrad.fast import rnn as fast_rnn
from minigrad.initializers import GATE_BLOCKS, gate_blocks, generator, identity, normal, uniform, zeros
from minigrad.layers.recurrent import Recurrent
from minigrad.layers.rra import NORMALIZERS, check_sum, normalize_weights, rra_attention, rra_attention_backward
from minigrad.parameter import Parameter

SHORTCUTS = ("identity", "linear")


class RNN(Recurrent):
    """h_t = tanh(x_t W + h_{t-1} U + b) (+ F) over a sequence: equations 3 to 5 of the module's docstring.

    residual    None: (3). k >= 1: (4), a shortcut from h_{t-k}; with attention k >= 2
    shortcut    of (4): "identity", F = h_{t-k}, or "linear", F = h_{t-k} W_f
    attention   (5): F = sum_i w_hat[i-1] h_{t-i-1}, i = 1 ... k-1; w_hat is w (k-1,), normalised
    normalize   of (5): "sum", w / sum w (the paper), or "softmax"
    init        initialiser of W, U and W_f (minigrad.initializers.GATE_BLOCKS): "glorot" is Glorot uniform for W,
                orthogonal for U and W_f

    W (d, h), U (h, h), b (h,) zero at first; W_f (h, h) with shortcut="linear", initialised as U; w (k-1,) with
    attention, uniform in [0, 1), w[0] the weight of the newest of its states, h_{t-2}.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), state), cache. state (h,), h (B, h); with
    residual=k (past,), past (B, k, h), oldest first, past[:, -1] = h_{t-1}. States before the sequence are zeros.
    The dtype is that of x and the parameters together. `rng` has no effect.
    fast=False runs `cell` and `cell_backward` step by step; the default is the loop of minigrad/fast/rnn.py.

    Raises ValueError for wrong settings or shapes, TypeError for wrong dtypes or a mix of devices, ArithmeticError
    (`validate`) if the sum of w is too close to zero to divide by.
    """

    # ---- the equations: they run with fast=False; the fast form is minigrad/fast/rnn.py ------------------

    def cell(self, x, state, W, U, b, F_weights=None):
        """One step:

            h_t = tanh(x W + h_{t-1} U + b) + F

            F = 0                                                (3)
                h_{t-k}  or  h_{t-k} W_f                         (4)
                sum_i w_hat[i-1] h_{t-i-1}                       (5)

        x (B, d), state (h_{t-1},) or (past (B, k, h),); F_weights is W_f (h, h) or w_hat (k-1,), if there are any
        -> (h_t, state'), cache.
        """
        xp, past = array_module(x), self._as_past(*state)
        m = h_new = xp.tanh(x @ W + past[:, -1] @ U + b)
        if self.attention:
            h_new = m + rra_attention(past, F_weights)
        elif self.shortcut == "linear":
            h_new = m + past[:, 0] @ F_weights
        elif self.residual:
            h_new = m + past[:, 0]
        past_new = xp.concatenate([past[:, 1:], h_new[:, None]], axis=1)
        return (h_new, self._as_state(past_new)), (x, past, m)

    def cell_backward(self, upstream, cache, W, U, b, F_weights=None):
        """The step's gradients: dx, (dh,) or (dpast,), (dW, dU, db, dW_f or dw_hat). tanh(.) and F both get dh_t."""
        dy, dstate = upstream
        x, past, m = cache
        dpast_new = self._as_past(*dstate)
        dh_new = dpast_new[:, -1] + dy
        dpast, dF_weights = array_module(x).zeros_like(past), ()
        if self.attention:
            dpast, *dF_weights = rra_attention_backward(dh_new, past, F_weights)
        elif self.shortcut == "linear":
            dpast[:, 0], dF_weights = dh_new @ F_weights.T, (past[:, 0].T @ dh_new,)
        elif self.residual:
            dpast[:, 0] = dh_new
        dpast[:, 1:] += dpast_new[:, :-1]                                    # the states that moved by one place
        dz = dh_new * (1 - m * m)
        dpast[:, -1] += dz @ U.T
        return dz @ W.T, self._as_state(dpast), (x.T @ dz, past[:, -1].T @ dz, dz.sum(axis=0), *dF_weights)

    def _as_past(self, h_or_past):
        """A state's entry, (B, h) or (B, k, h), as (B, P, h): P = k, or 1 without a shortcut."""
        return h_or_past if self.residual else h_or_past[:, None]

    def _as_state(self, past):
        """(B, P, h) as the state."""
        return (past if self.residual else past[:, 0],)

    @property
    def weights(self):
        of_F = ("w",) if self.attention else ("W_f",) if self.shortcut == "linear" else ()
        return ("W", "U", "b", *of_F)

    def state_shapes(self, B):
        h = self.U.value.shape[0]
        return {"past": (B, self.residual, h)} if self.residual else {"h": (B, h)}

    # ---- the normalised weights --------------------------------------------------------------------------

    def cell_weights(self, dtype):
        """W, U, b, and W_f or w_hat (k-1,), which is w normalised."""
        weights, made = super().cell_weights(dtype)
        if self.attention:
            w_hat, made = self.attention_weights(dtype)
            weights = (*weights[:3], w_hat)
        return weights, made

    def cell_weights_backward(self, gradients, made):
        """With attention dw from dw_hat, through the normaliser."""
        if self.attention:
            *gradients, dw_hat = gradients
            gradients = (*gradients, NORMALIZERS[self.normalize].backward(dw_hat, made))
        super().cell_weights_backward(gradients, made)

    def attention_weights(self, dtype=None):
        """(w_hat (k-1,), the normaliser's cache), in w's dtype or a wider one."""
        return normalize_weights(self.w.value, self.normalize, dtype)

    def validate(self):
        """Raise ArithmeticError when |sum w| <= 1e-6 sum |w|: the normaliser would divide by almost zero."""
        if self.attention:
            check_sum("RNN", self.w.value, self.normalize)

    # ---- parameters, and the fast loop -------------------------------------------------------------------

    def __init__(self, d, h, residual=None, shortcut="identity", attention=False, *, normalize="sum", init="glorot",
                 fast=True, rng=None, dtype=None):
        check_count("RNN", "d", d)
        check_count("RNN", "h", h)
        _check_form(residual, shortcut, attention)
        check_choice("RNN", "normalize", normalize, NORMALIZERS)
        rng = generator(rng)
        W, U = gate_blocks(init, rng, d, h, dtype, count=1)
        self.W, self.U, self.b = Parameter(W, "W"), Parameter(U, "U"), Parameter(zeros((h,), dtype), "b")
        if shortcut == "linear":
            _, like_U = GATE_BLOCKS[init]
            self.W_f = Parameter(like_U(rng, (h, h), dtype=dtype), "W_f")
        if attention:
            self.w = Parameter(uniform(rng, (residual - 1,), dtype=dtype), "w")
        self.residual, self.shortcut, self.attention, self.normalize = residual, shortcut, attention, normalize
        self.fast = fast

    def fast_forward(self, x, state, mask, weights):
        W, U, b, *F_weights = weights
        y, past, cache = fast_rnn.loop_forward(
            x, self._as_past(*state), mask, W, U, b, fast_rnn.Tanh, self._fast_F(*F_weights))
        return y, self._as_state(past), cache

    def fast_backward(self, dy, dstate, cache, weights):
        W, U, _, *F_weights = weights
        dpast, = dstate
        dx, dpast, *gradients = fast_rnn.loop_backward(
            dy, None if dpast is None else self._as_past(dpast), cache, W, U, fast_rnn.Tanh, self._fast_F(*F_weights))
        return dx, self._as_state(dpast), gradients[:len(weights)]

    def _fast_F(self, F_weights=None):
        """F for the fast loop; None for (3)."""
        if self.residual is None:
            return None
        return fast_rnn.Window(F_weights) if self.attention else fast_rnn.Lag(self.residual, F_weights)


def _check_form(residual, shortcut, attention):
    """Raise ValueError unless the three settings of RNN name one of the forms."""
    check_choice("RNN", "shortcut", shortcut, SHORTCUTS)
    if attention and shortcut == "linear":
        raise ValueError("RNN: shortcut is 'linear' with attention=True; expected 'identity': the attention's "
                         "states have no W_f")
    if residual is not None:
        check_count("RNN", "residual", residual, least=2 if attention else 1)
    elif attention:
        raise ValueError("RNN: residual is None with attention=True; expected k, at least 2: the attention is over "
                         "h_{t-2} ... h_{t-k}")
    elif shortcut == "linear":
        raise ValueError("RNN: residual is None with shortcut='linear'; expected k, at least 1: the shortcut comes "
                         "from h_{t-k}")


class IRNN(Recurrent):
    """h_t = max(0, x_t V + h_{t-1} W + b) over a sequence (Le et al. 2015, arXiv 1504.00941).

    V (d, h) ~ N(0, input_std^2), W (h, h) the identity, b (h,) zero: at first the network adds up its small inputs; a
    state without negative entries stays exactly as it was while x is 0.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (h,)), cache; state: h (B, h). h_t has
    no bound. The dtype is that of x and the parameters together. `rng` has no effect.
    fast=False runs `cell` and `cell_backward` step by step; the default is the loop of minigrad/fast/rnn.py.

    Raises ValueError for wrong settings or shapes, TypeError for wrong dtypes or a mix of devices.
    """

    weights = ("V", "W", "b")

    # ---- the equations: they run with fast=False; the fast form is minigrad/fast/rnn.py ------------------

    def cell(self, x, state, V, W, b):
        """One step: h' = max(0, x V + h W + b). x (B, d), state (h,), h (B, h) -> (h', (h',)), cache."""
        h, = state
        h_new = array_module(x).maximum(x @ V + h @ W + b, 0)
        return (h_new, (h_new,)), (x, h, h_new)

    def cell_backward(self, upstream, cache, V, W, b):
        """With a = x V + h W + b: da = dh' [h' > 0], 0 at a = 0; then dx, (dh,), (dV, dW, db)."""
        dy, (dh_new,) = upstream
        x, h, h_new = cache
        da = array_module(x).where(h_new > 0, dh_new + dy, 0)
        return da @ V.T, (da @ W.T,), (x.T @ da, h.T @ da, da.sum(axis=0))

    def state_shapes(self, B):
        return {"h": (B, self.W.value.shape[0])}

    # ---- parameters, and the fast loop -------------------------------------------------------------------

    def __init__(self, d, h, *, input_std=0.001, fast=True, rng=None, dtype=None):
        check_count("IRNN", "d", d)
        check_count("IRNN", "h", h)
        check_number("IRNN", "input_std", input_std, 0, math.inf, open_high=True)
        self.V = Parameter(normal(rng, (d, h), input_std, dtype), "V")
        self.W, self.b = Parameter(identity(h, dtype), "W"), Parameter(zeros((h,), dtype), "b")
        self.fast = fast

    def fast_forward(self, x, state, mask, weights):
        h, = state
        y, past, cache = fast_rnn.loop_forward(x, h[:, None], mask, *weights, fast_rnn.Relu)
        return y, (past[:, 0],), cache

    def fast_backward(self, dy, dstate, cache, weights):
        (dh,), (V, W, _) = dstate, weights
        dpast = None if dh is None else dh[:, None]
        dx, dpast, dV, dW, db, _ = fast_rnn.loop_backward(dy, dpast, cache, V, W, fast_rnn.Relu)
        return dx, (dpast[:, 0],), (dV, dW, db)
