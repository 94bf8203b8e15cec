"""The plain recurrent networks: RNN, its shortcuts over time, and IRNN.

RNN takes the steps that lead to RRALSTM (Wang 2017, arXiv 1709.03714, equations 3 to 5, rebuilt from the paper's text):

    h_t = tanh(x_t W + h_{t-1} U + b)                           (3)   the recurrent network
          ... + h_{t-k}  or  h_{t-k} W_f                        (4)   residual: a shortcut over k steps
          ... + sum_{i=1}^{k-1} w_hat_i h_{t-i-1}               (5)   residual attention: h_{t-2} ... h_{t-k}, weighed

In (3) all that h_t knows of h_{t-k} has come through k tanhs and k products with U, and so has every gradient. (4)
adds a way around them, outside the tanh; with W_f = 0 it is (3) again. (5) learns which of the last states the way
starts from, with k-1 numbers that all units share and that sum to 1. RRALSTM (minigrad/layers/rra.py) puts the sum of
(5) into an LSTM's output: h_t = o_t tanh(c_t + a_t).

In (4) and (5) h_t has no bound: a shortcut of weight 1 adds up over the steps.

IRNN (Le, Jaitly and Hinton 2015, arXiv 1504.00941) has relu for tanh and starts from the identity matrix, so that it
begins by keeping its state.

Derivation of the backward: docs/derivations/rnn.md.
"""

import math

from minigrad.backend import array_module
from minigrad.check import check_choice, check_count, check_number
from minigrad.fast.rnn import Lag, Relu, Tanh, Window, loop_backward, loop_forward
from minigrad.initializers import GATE_BLOCKS, gate_blocks, generator, identity, normal, uniform, zeros
from minigrad.layer import validate_on_host
from minigrad.layers.recurrent import Recurrent
from minigrad.layers.rra import NORMALIZERS, check_sum, normalize_weights, rra_attention, rra_attention_backward
from minigrad.parameter import Parameter

SHORTCUTS = ("identity", "linear")

# ---- the equations ---------------------------------------------------------------------------------------


def rnn_step(x, h, W, U, b):
    """One step of (3): h' = tanh(x W + h U + b). x (B, d), h (B, h) -> h', cache."""
    h_new = array_module(x).tanh(x @ W + h @ U + b)
    return h_new, (x, h, h_new)


def rnn_step_backward(dh_new, cache, W, U):
    """dz = dh' (1 - h'^2), then the products: (dx, dh), (dW, dU, db)."""
    x, h, h_new = cache
    dz = dh_new * (1 - h_new * h_new)
    return (dz @ W.T, dz @ U.T), (x.T @ dz, h.T @ dz, dz.sum(axis=0))


def residual_step(x, past, W, U, b, W_f=None, w_hat=None):
    """One step of (4), or of (5) when w_hat (k-1,) is given: h_t = tanh(x W + h_{t-1} U + b) + F.

    past (B, k, h), oldest first, past[:, -1] = h_{t-1}. F = past[:, 0], times W_f where given; with w_hat the weighted
    sum of all but the newest state, w_hat[0] weighing h_{t-2} (`rra_attention`). Returns past', cache; h_t is
    past'[:, -1].
    """
    xp = array_module(x)
    m, cache = rnn_step(x, past[:, -1], W, U, b)
    if w_hat is not None:
        F = rra_attention(past, w_hat)
    else:
        F = past[:, 0] if W_f is None else past[:, 0] @ W_f
    return xp.concatenate([past[:, 1:], (m + F)[:, None]], axis=1), (cache, past)


def residual_step_backward(dpast_new, cache, W, U, W_f=None, w_hat=None):
    """(dx, dpast), (dW, dU, db) and dW_f or dw_hat, if there is one. dm = dF = dh_t: both terms get all of it."""
    rnn_cache, past = cache
    xp, dh_new, last = array_module(past), dpast_new[:, -1], ()
    (dx, dh), gradients = rnn_step_backward(dh_new, rnn_cache, W, U)
    dpast = xp.zeros_like(past)
    if w_hat is not None:
        dpast, dw_hat = rra_attention_backward(dh_new, past, w_hat)
        last = (dw_hat,)
    elif W_f is not None:
        dpast[:, 0] = dh_new @ W_f.T
        last = (past[:, 0].T @ dh_new,)
    else:
        dpast[:, 0] = dh_new
    dpast[:, 1:] += dpast_new[:, :-1]                                        # the states that moved up by one place
    dpast[:, -1] += dh
    return (dx, dpast), gradients + last


def irnn_step(x, h, V, W, b):
    """One step of IRNN: h' = max(0, x V + h W + b). x (B, d), h (B, h) -> h', cache."""
    h_new = array_module(x).maximum(x @ V + h @ W + b, 0)
    return h_new, (x, h, h_new)


def irnn_step_backward(dh_new, cache, V, W):
    """da = dh' [h' > 0], then the products: (dx, dh), (dV, dW, db). At a = 0 exactly the derivative is 0."""
    x, h, h_new = cache
    da = array_module(x).where(h_new > 0, dh_new, 0)
    return (da @ V.T, da @ W.T), (x.T @ da, h.T @ da, da.sum(axis=0))


# ---- the layers ------------------------------------------------------------------------------------------


class RNN(Recurrent):
    """h_t = tanh(x_t W + h_{t-1} U + b) (+ F) over a sequence: equations 3 to 5 of the module's docstring.

    residual    None: (3). k >= 1: (4), a shortcut from h_{t-k}; with attention k >= 2
    shortcut    of (4): "identity", F = h_{t-k}, or "linear", F = h_{t-k} W_f
    attention   (5): F = sum_i w_hat[i-1] h_{t-i-1}, i = 1 ... k-1; w_hat is w (k-1,), normalised
    normalize   of (5): "sum", w / sum w (the paper), or "softmax"
    init        how W, U and W_f start (minigrad.initializers.GATE_BLOCKS): "glorot" is Glorot uniform for W, orthogonal
                for U and W_f

    W (d, h), U (h, h), b (h,) zero at first; W_f (h, h) with shortcut="linear", starting as U does; w (k-1,) with
    attention, uniform in [0, 1), w[0] weighing the newest of its states, h_{t-2}.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), state), cache. state (h,), h (B, h); with
    residual=k (past,), past (B, k, h), oldest first, past[:, -1] = h_{t-1}. States before the sequence are zeros.
    The dtype is that of x and the parameters together. Nothing is drawn: rng has no effect.

    Raises ValueError for wrong settings or shapes, TypeError for wrong dtypes or a mix of devices, ArithmeticError
    (`validate`) where the sum of w has come too near to zero to divide by.
    """

    def __init__(self, d, h, residual=None, shortcut="identity", attention=False, *, normalize="sum", init="glorot",
                 rng=None, dtype=None):
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

    def attention_weights(self, dtype=None):
        """(w_hat (k-1,), the normaliser's cache), in w's dtype or a wider one; (None, None) without attention."""
        return normalize_weights(self.w.value, self.normalize, dtype) if self.attention else (None, None)

    def validate(self):
        """Raise ArithmeticError when |sum w| <= 1e-6 sum |w|: the normaliser would divide by nearly nothing."""
        if self.attention:
            check_sum("RNN", self.w.value, self.normalize)

    def forward(self, x, state=None, mask=None, rng=None):
        W, U, b = self.W.value, self.U.value, self.b.value
        xp = array_module(x=x, W=W, mask=mask)
        self.check_input(x, mask, W.shape[0])
        validate_on_host(self, x)
        past, = self.split_state(state, self.state_shapes(x.shape[0]))
        dtype = xp.result_type(x.dtype, W.dtype)
        w_hat, w_cache = self.attention_weights(dtype)
        y, past, cache = loop_forward(
            x, self._rows(past), mask, W, U, b, Tanh, self.residual or 1, self._F(w_hat, dtype))
        return (y, (past if self.residual else past[:, 0],)), (cache, w_hat, w_cache)

    def backward(self, upstream, cache):
        """Backpropagation through time (`loop_backward`): dx (B, L, d) and dstate0 = (dh,) or (dpast,)."""
        loop_cache, w_hat, w_cache = cache
        dy, (dpast,) = self.check_upstream(
            upstream, loop_cache.y_shape, self.state_shapes(loop_cache.y_shape[0]))
        dx, dpast, dW, dU, db, dF = loop_backward(
            dy, self._rows(dpast), loop_cache, self.W.value, self.U.value, Tanh, self._F(w_hat, loop_cache.hs.dtype))
        self.W.grad += dW
        self.U.grad += dU
        self.b.grad += db
        if self.attention:
            self.w.grad += NORMALIZERS[self.normalize].backward(dF, w_cache)
        elif dF is not None:
            self.W_f.grad += dF
        return dx, (dpast if self.residual else dpast[:, 0],)

    def _rows(self, h_or_past):
        """A state (B, h) or (B, k, h) as the loop's past (B, P, h)."""
        return h_or_past if self.residual or h_or_past is None else h_or_past[:, None]

    def _F(self, w_hat, dtype):
        """The shortcut for the loop; None for (3)."""
        if self.residual is None:
            return None
        if self.attention:
            return Window(w_hat)
        return Lag(self.residual, self.W_f.value.astype(dtype, copy=False) if self.shortcut == "linear" else None)

    def state_shapes(self, B):
        h = self.U.value.shape[0]
        return {"past": (B, self.residual, h)} if self.residual else {"h": (B, h)}


def _check_form(residual, shortcut, attention):
    """Raise ValueError unless the three settings of RNN name one of the forms."""
    check_choice("RNN", "shortcut", shortcut, SHORTCUTS)
    if attention and shortcut == "linear":
        raise ValueError("RNN: shortcut is 'linear' with attention=True; expected 'identity': the states that the "
                         "attention weighs have no W_f")
    if residual is not None:
        check_count("RNN", "residual", residual, least=2 if attention else 1)
    elif attention:
        raise ValueError("RNN: residual is None with attention=True; expected k, at least 2: the attention weighs "
                         "h_{t-2} ... h_{t-k}")
    elif shortcut == "linear":
        raise ValueError("RNN: residual is None with shortcut='linear'; expected k, at least 1: the shortcut comes "
                         "from h_{t-k}")


class IRNN(Recurrent):
    """h_t = max(0, x_t V + h_{t-1} W + b) over a sequence (`irnn_step` is the cell; Le et al. 2015, arXiv 1504.00941).

    V (d, h) ~ N(0, input_std^2), W (h, h) the identity, b (h,) zero: at first the network adds up its faint inputs and
    keeps what it has; a state without negative entries is copied exactly while x is 0.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (h,)), cache; state: h (B, h). Nothing
    bounds h_t. The dtype is that of x and the parameters together. Nothing is drawn: rng has no effect.

    Raises ValueError for wrong settings or shapes, TypeError for wrong dtypes or a mix of devices.
    """

    def __init__(self, d, h, *, input_std=0.001, rng=None, dtype=None):
        check_count("IRNN", "d", d)
        check_count("IRNN", "h", h)
        check_number("IRNN", "input_std", input_std, 0, math.inf, open_high=True)
        self.V = Parameter(normal(rng, (d, h), input_std, dtype), "V")
        self.W, self.b = Parameter(identity(h, dtype), "W"), Parameter(zeros((h,), dtype), "b")

    def forward(self, x, state=None, mask=None, rng=None):
        V, W, b = self.V.value, self.W.value, self.b.value
        array_module(x=x, V=V, mask=mask)
        self.check_input(x, mask, V.shape[0])
        h, = self.split_state(state, self.state_shapes(x.shape[0]))
        y, past, cache = loop_forward(x, None if h is None else h[:, None], mask, V, W, b, Relu)
        return (y, (past[:, 0],)), (cache,)

    def backward(self, upstream, cache):
        """da_t = dh_t [h_t > 0] (0 at a_t = 0), dh_{t-1} += da_t W^T: dx (B, L, d) and dstate0 = (dh,)."""
        loop_cache, = cache
        dy, (dh,) = self.check_upstream(upstream, loop_cache.y_shape, self.state_shapes(loop_cache.y_shape[0]))
        dx, dpast, dV, dW, db, _ = loop_backward(
            dy, None if dh is None else dh[:, None], loop_cache, self.V.value, self.W.value, Relu)
        self.V.grad += dV
        self.W.grad += dW
        self.b.grad += db
        return dx, (dpast[:, 0],)

    def state_shapes(self, B):
        return {"h": (B, self.W.value.shape[0])}
