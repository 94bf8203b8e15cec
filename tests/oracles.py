"""Slow, plain sequences: the cells' own equations (lstm_step, rra_step), one step after another, masks included.

What the fast loop must equal.
"""

import numpy as np

from minigrad.layers import RRALSTM
from minigrad.layers.lstm import lstm_step, lstm_step_backward
from minigrad.layers.rra import rra_step, rra_step_backward


def step_functions(layer):
    """(forward, backward) of one step on the state (past or h, c)."""
    W, U, b = (p.value for p in (layer.W, layer.U, layer.b))
    if not isinstance(layer, RRALSTM):
        return (lambda x, h, c: lstm_step(x, h, c, W, U, b),
                lambda dh, dc, cache: lstm_step_backward(dh, dc, cache, W, U))
    w_hat, _ = layer.attention_weights()
    w_hat = np.zeros(0) if w_hat is None else w_hat
    return (lambda x, past, c: rra_step(x, past, c, W, U, b, w_hat),
            lambda dpast, dc, cache: rra_step_backward(dpast, dc, cache, W, U, w_hat))


def newest(h_or_past):
    """h_t from (B, h), or from past (B, P, h)."""
    return h_or_past if h_or_past.ndim == 2 else h_or_past[:, -1]


def choose(real, new, old):
    """new where the sample's step is real, old elsewhere."""
    return np.where(real.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def plain_forward(layer, x, state, mask):
    """(y, state), caches: a loop over time with the mask in every step."""
    forward, _ = step_functions(layer)
    (first, c), ys, caches = state, [], []
    for t in range(x.shape[1]):
        real = mask[:, t]
        (new_first, new_c), cache = forward(np.where(real[:, None], x[:, t], 0), first, c)
        first, c = choose(real, new_first, first), choose(real, new_c, c)
        ys.append(choose(real, newest(new_first), 0))
        caches.append(cache)
    return (np.stack(ys, axis=1), (first, c)), caches


def plain_backward(layer, dy, dstate, mask, caches):
    """dx, dstate0, [dW, dU, db(, dw_hat)]: the steps' own backward, last step first."""
    _, backward = step_functions(layer)
    (dfirst, dc), dxs, totals = dstate, [], None
    for t in reversed(range(dy.shape[1])):
        real = mask[:, t]
        dnew = dfirst.copy()
        newest(dnew)[...] += dy[:, t]
        dnew, dnew_c = choose(real, dnew, 0), choose(real, dc, 0)
        (dx, dold, dold_c), weights = backward(dnew, dnew_c, caches[t])
        dfirst, dc = choose(real, dold, dfirst), choose(real, dold_c, dc)
        dxs.insert(0, choose(real, dx, 0))
        totals = weights if totals is None else [a + b for a, b in zip(totals, weights)]
    return np.stack(dxs, axis=1), (dfirst, dc), list(totals)
