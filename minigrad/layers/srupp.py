"""SRU++: attention inside a simple recurrent unit (Lei 2021, arXiv 2102.12459).

Derivation of the backward: docs/derivations/srupp.md.
"""

import math
from typing import Any, NamedTuple

from minigrad.backend import array_module
from minigrad.check import (
    check_choice,
    check_count,
    check_mask,
    check_number,
    check_rank_and_width,
    check_shape,
    check_state,
    check_tuple,
)
from minigrad.fast import sru as fast_sru
from minigrad.fast.sru import time_first
from minigrad.functional import plain_attention, softmax_attention
from minigrad.initializers import generator, glorot_uniform, zeros
from minigrad.layers.attention import join_heads, split_heads
from minigrad.layers.dropout import Dropout
from minigrad.layers.norm import LayerNorm
from minigrad.layers.recurrent import Recurrent, split_upstream
from minigrad.layers.sru import (
    ACTIVATIONS,
    highway_scale,
    recurrence_parameters,
    sru_cell,
    sru_cell_backward,
    variational_mask,
)
from minigrad.layers.srupp_memory import KeysAndValues, Memory, next_memory, next_memory_backward
from minigrad.memory import empty, matmul
from minigrad.packing import Packing, pack, unpack
from minigrad.parameter import Parameter

# ---- the layer -------------------------------------------------------------------------------------------


class AttentionCache(NamedTuple):
    """What `_attend_backward` reads. T steps, M slots of memory."""

    zs: Any                     # (T, B, d)      the input of W_q: the packed input or its layer norm, time first
    memory: Memory
    Q: Any                      # (B, M+T, d')   of memory and segment
    A: Any                      # (B, T, d')
    scores: Any                 # the cache of softmax_attention or plain_attention


class SRUppCache(NamedTuple):
    """What backward reads: the cache of each part, in forward's order."""

    y_shape: tuple
    packing: Packing | None
    input_norm: Any
    attention: Any              # AttentionCache; without attention its zs and memory only
    taken: Any                  # which rows went into the next memory
    norm: Any
    drop: Any
    recurrence: Any
    output_norm: Any
    fast: bool


STATE = ("c", "memory", "memory_mask")


class SRUpp(Recurrent):
    """SRU++: an SRU whose products come from attention: U = layernorm(Q + alpha A) W_o.

    Q = x W_q;  K = Q W_k;  V = Q W_v;  A = softmax(Q K^T / sqrt(e)) V in each head, e = d' / heads;
    then f_t, r_t, c_t, h_t from U as in SRU.

    W_q (d, d'), W_k, W_v (d', d'), alpha (1,) zero at first, norm.gain, norm.bias (d',), W_o (d', k h) with columns
    candidate | forget | reset (| highway when d != h), v_f, v_r, b_f, b_r (h,). With d = h and attention these are
    d d' + 2 d'^2 + 3 d d' + 4 d + 2 d' + 1 numbers.

    projection      d', the width of the attention
    causal          step t attends to the steps up to t only; else to its whole segment
    attention       False: U = layernorm(x W_q) W_o, the projected SRU (no W_k, W_v, alpha)
    window          step t sees t-window+1 ... t only (with causal)
    memory          slots of the memory in the state, which holds the latest inputs of W_q. Default: window - 1; without
                    a window all of them; if not causal none
    detach_memory   the memory gets no gradient (truncated backpropagation through time)
    layer_norm      False: U = (Q + alpha A) W_o
    cell_norm       a second layer norm: "pre", of the layer's input (the highway keeps the raw x), or "post", of h
    dropout         of the input of W_o; attention_dropout: of the attention weights; recurrent_dropout: as in SRU
    highway_bias, rescale, activation, v_range     as in SRU

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (c, memory, memory_mask)), cache.
    State: c (B, h); memory (B, M, d), newest last, the inputs before W_q; memory_mask (B, M) boolean, True where a slot
    is real. Any M is accepted; the returned state has `memory` slots. dstate is (dc, dmemory, None). The dtype is
    that of x and the parameters together.
    fast=False runs `cell` and `cell_backward` step by step and `plain_attention`; the default is minigrad/fast/sru.py
    and `softmax_attention`.

    Raises ValueError for wrong settings or shapes, TypeError for wrong dtypes or a mix of devices.
    """

    weights = ("W_o", "v_f", "v_r", "b_f", "b_r")        # of the recurrence

    # ---- the equations of the recurrence: they run with fast=False; the fast form is minigrad/fast/sru.py -

    def cell(self, rows, state, W_o, v_f, v_r, b_f, b_r, m=None):
        """One step: u = n W_o, then `sru_cell`. rows (B, d'+d) are [n | x]: n is computed from R = Q + alpha A."""
        p = len(W_o)
        n, x = rows[:, :p], rows[:, p:]
        (h, c), cache = sru_cell(n @ W_o, x, *state, v_f, v_r, b_f, b_r, self.scale, self.activation, m)
        return (h, (c,)), (rows, cache)

    def cell_backward(self, upstream, cache, W_o, v_f, v_r, b_f, b_r):
        """The step's gradients: [dn | dx], (dc,), (dW_o, dv_f, dv_r, db_f, db_r)."""
        (dy, (dc,)), (rows, cache) = upstream, cache
        (du, dx, dc), sums = sru_cell_backward(dy, dc, cache, v_f, v_r, self.scale)
        xp, p = array_module(du), len(W_o)
        dx = xp.zeros_like(rows[:, p:]) if dx is None else dx
        return xp.concatenate([du @ W_o.T, dx], axis=1), (dc,), (rows[:, :p].T @ du, *sums)

    # ---- parameters --------------------------------------------------------------------------------------

    def __init__(self, d, h, projection, heads=1, causal=True, attention=True, window=None, layer_norm=True,
                 highway_bias=-2.0, *, memory=None, detach_memory=False, cell_norm=None, dropout=0.0,
                 attention_dropout=0.0, recurrent_dropout=0.0, rescale=False, activation="identity", v_range=1.0,
                 fast=True, rng=None, dtype=None):
        for name, value in (("d", d), ("h", h), ("projection", projection), ("heads", heads)):
            check_count("SRUpp", name, value)
        if projection % heads:
            raise ValueError(f"SRUpp: projection is {projection} and heads {heads}; expected a projection that the "
                             "heads divide")
        if window is not None:
            check_count("SRUpp", "window", window)
            if not causal:
                raise ValueError("SRUpp: window is given and causal is False; expected causal=True with a window")
        if memory is not None:
            check_count("SRUpp", "memory", memory, least=0)
        check_choice("SRUpp", "cell_norm", cell_norm, (None, "pre", "post"))
        check_choice("SRUpp", "activation", activation, ACTIVATIONS)
        for name, p in (("dropout", dropout), ("attention_dropout", attention_dropout),
                        ("recurrent_dropout", recurrent_dropout)):
            check_number("SRUpp", name, p, 0, 1, open_high=True)
        rng, k = generator(rng), 3 if d == h else 4
        self.input_norm = LayerNorm(d, dtype=dtype) if cell_norm == "pre" else None
        self.W_q = Parameter(glorot_uniform(rng, (d, projection), dtype), "W_q")
        if attention:
            W_kv = glorot_uniform(rng, (projection, 2 * projection), dtype)  # as one matrix: bound sqrt(6 / 3d')
            self.W_k = Parameter(W_kv[:, :projection].copy(), "W_k")
            self.W_v = Parameter(W_kv[:, projection:].copy(), "W_v")
            self.alpha = Parameter(zeros((1,), dtype), "alpha")
        self.norm = LayerNorm(projection, dtype=dtype) if layer_norm else None
        self.W_o, self.v_f, self.v_r, self.b_f, self.b_r = recurrence_parameters(
            "SRUpp", projection, h, k, highway_bias, v_range, rng, dtype)
        self.W_o.name = "W_o"
        self.W_o.value *= math.sqrt(1 - dropout)                             # keeps U's variance, as in Lei's code
        self.output_norm = LayerNorm(h, dtype=dtype) if cell_norm == "post" else None
        self.drop = Dropout(dropout)
        self.heads, self.causal, self.attention, self.window = heads, causal, attention, window
        self.memory = self._slots(memory)
        self.detach_memory, self.attention_dropout = detach_memory, float(attention_dropout)
        self.recurrent_dropout, self.activation = float(recurrent_dropout), activation
        self.scale, self.fast = highway_scale(rescale, highway_bias, k), fast

    def _slots(self, memory):
        """The number of memory slots in the state; None: one for every step so far."""
        if not self.attention:
            return 0
        if memory is not None:
            return memory
        return 0 if not self.causal else None if self.window is None else self.window - 1

    # ---- forward and backward ----------------------------------------------------------------------------

    def forward(self, x, state=None, mask=None, rng=None):
        W_q, h = self.W_q.value, len(self.v_f.value)
        xp = array_module(x=x, W_q=W_q, mask=mask)
        self.check_input(x, mask, W_q.shape[0])
        dtype, packing = xp.result_type(x.dtype, W_q.dtype), Packing.of(mask)
        c, memory = self._split_state(state, x, dtype)

        xs = time_first(pack(x.astype(dtype, copy=False), packing))          # (T, B, d)
        zs, input_norm = _through(self.input_norm, xs)
        R, attention = self._attend(zs, memory, packing, rng)                # (B, T, d')
        *new_memory, taken = next_memory(memory, zs, packing, self.memory)
        N, norm = _through(self.norm, R)
        N, drop = self.drop.forward(N, rng=rng)
        m = variational_mask(rng, self.recurrent_dropout, (len(x), h), xp, dtype)
        hs, c, recurrence = self._recur(N, xs, c, m, packing)                # (T, B, h)
        hs, output_norm = _through(self.output_norm, hs)
        y = unpack(hs.transpose(1, 0, 2), packing)
        return (y, (c, *new_memory)), SRUppCache(
            y.shape, packing, input_norm, attention, taken, norm, drop, recurrence, output_norm, self.fast)

    def backward(self, upstream, cache):
        """dx (B, L, d) and dstate0 = (dc, dmemory, None); dmemory is None (zero) if it is detached."""
        y_shape, packing, input_norm, attention, taken, norm, drop, recurrence, output_norm, fast = cache
        dy, dc, dmemory = self._check_upstream(upstream, y_shape, attention)
        dhs = None if dy is None else time_first(pack(dy, packing))

        if dhs is not None:
            dhs = _through_backward(self.output_norm, dhs, output_norm)
        dN, dx, dc = self._recur_backward(dhs, dc, recurrence, fast)
        dR = _through_backward(self.norm, self.drop.backward(dN, drop), norm)
        dzs, dmemory0 = self._attend_backward(dR, attention, fast)
        if not self.detach_memory:
            dzs, dmemory0 = self._memory_backward(dzs, dmemory0, dmemory, taken, attention)
        dxs = _through_backward(self.input_norm, dzs, input_norm)
        if dx is not None:
            dxs += dx
        return unpack(dxs.transpose(1, 0, 2), packing), (dc, dmemory0, None)

    # ---- attention ---------------------------------------------------------------------------------------

    def _attend(self, zs, memory, packing, rng):
        """R (B, T, d') of the segment zs (T, B, d), and its cache; z = [memory ; zs], Q_T the last T rows of Q:

            Q = z W_q      K = Q W_k      V = Q W_v      A = softmax(Q_T K^T / sqrt(e) + mask) V      R = Q_T + alpha A

        At alpha = 0, its initial value, and without attention R = Q_T: the layer is an SRU with a factorised W.
        """
        T, B, _ = zs.shape
        if not self.attention:
            return matmul(zs, self.W_q.value).transpose(1, 0, 2), AttentionCache(zs, memory, None, None, None)
        xp, Q = array_module(zs), self._queries(zs, memory)                  # (B, M+T, d')
        both = Q.shape[1]
        q = split_heads(Q[:, both - T:], self.heads)
        k, v = (split_heads(matmul(Q, W.value), self.heads) for W in (self.W_k, self.W_v))
        attention = softmax_attention if self.fast else plain_attention
        A, scores = attention.forward(
            q, k, v, mask=self._key_mask(xp, B, T, memory, packing), causal=self.causal, window=self.window,
            dropout=self.attention_dropout, rng=rng)
        A = join_heads(A)
        return Q[:, both - T:] + self.alpha.value * A, AttentionCache(zs, memory, Q, A, scores)

    def _attend_backward(self, dR, cache, fast):
        """dzs (T, B, d), and dmemory (B, M, d) or None. Q has four uses: in R, as query, for keys, for values."""
        zs, memory, Q, A, scores = cache
        if not self.attention:
            return self._queries_backward(dR, zs, memory)
        (B, T, width), both, alpha = dR.shape, Q.shape[1], self.alpha
        alpha.grad += (dR * A).sum()
        attention = softmax_attention if fast else plain_attention
        dq, dk, dv = map(join_heads, attention.backward(split_heads(dR * alpha.value, self.heads), scores))
        rows = Q.reshape(B * both, width)
        self.add_gradients(W_k=rows.T @ dk.reshape(B * both, width), W_v=rows.T @ dv.reshape(B * both, width))
        dQ = matmul(dk, self.W_k.value.T)
        dQ += matmul(dv, self.W_v.value.T)
        dQ[:, both - T:] += dR
        dQ[:, both - T:] += dq
        return self._queries_backward(dQ, zs, memory)

    def _queries(self, zs, memory):
        """Q (B, M+T, d') = [memory ; z] W_q."""
        W_q, (T, B, _), M = self.W_q.value, zs.shape, memory.z.shape[1]
        if not M:
            return matmul(zs, W_q).transpose(1, 0, 2)
        Q = empty((B, M + T, W_q.shape[1]), zs.dtype, array_module(zs))
        Q[:, :M], Q[:, M:] = matmul(memory.z, W_q), matmul(zs, W_q).transpose(1, 0, 2)
        return Q

    def _queries_backward(self, dQ, zs, memory):
        """dz (T, B, d) and dmemory (B, M, d) (None if detached); adds W_q's gradient."""
        (T, B, d), W_q = zs.shape, self.W_q
        M = dQ.shape[1] - T
        dqs, width = time_first(dQ[:, M:]), W_q.value.shape[1]
        dW_q = zs.reshape(T * B, d).T @ dqs.reshape(T * B, width)
        if M:
            dW_q += memory.z.reshape(B * M, d).T @ dQ[:, :M].reshape(B * M, width)
        W_q.grad += dW_q
        dmemory = None if self.detach_memory else matmul(dQ[:, :M], W_q.value.T)
        return matmul(dqs, W_q.value.T), dmemory

    def _key_mask(self, xp, B, T, memory, packing):
        """(B, 1, 1, M+T), True where a key is real; None where all are. Causal: no real query sees a later step."""
        ends_matter = packing is not None and not self.causal
        if memory.mask is None and not ends_matter:
            return None
        before = xp.ones((B, memory.z.shape[1]), bool) if memory.mask is None else memory.mask
        now = xp.arange(T) < packing.lengths[:, None] if ends_matter else xp.ones((B, T), bool)
        return xp.concatenate([before, now], axis=1)[:, None, None]

    # ---- recurrence --------------------------------------------------------------------------------------

    def _recur(self, N, xs, c, m, packing):
        """hs (T, B, h), the last c (B, h) and the cache of the recurrence. N (B, T, d'), xs (T, B, d)."""
        if self.fast:
            return fast_sru.recurrence_forward(
                N.transpose(1, 0, 2), xs, c, self._weights(), scale=self.scale, activation=self.activation, m=m,
                lengths=None if packing is None else packing.lengths)
        xp, T = array_module(N), len(xs)
        real = None if packing is None else xp.arange(T) < packing.lengths[:, None]
        rows = xp.concatenate([N, xs.transpose(1, 0, 2)], axis=2)            # as `cell` takes them
        y, (c,), cache = self.plain_forward(rows, (c,), real, self._weights(), m=m)
        return y.transpose(1, 0, 2), c, cache

    def _recur_backward(self, dhs, dc, cache, fast):
        """dN (B, T, d'), dx (T, B, d) through the highway or None, and dc; adds the weights' gradients."""
        if fast:
            (dn, dx, dc), gradients = fast_sru.recurrence_backward(
                dhs, dc, cache, self._weights(), scale=self.scale, activation=self.activation)
            dN = dn.transpose(1, 0, 2)
        else:
            dy, p = None if dhs is None else dhs.transpose(1, 0, 2), len(self.W_o.value)
            drows, (dc,), gradients = self.plain_backward(dy, (dc,), cache, self._weights())
            dN, dx = drows[:, :, :p], drows[:, :, p:].transpose(1, 0, 2)
        self.add_gradients(**dict(zip(self.weights, gradients, strict=True)))
        return dN, dx, dc

    def _weights(self):
        return tuple(getattr(self, name).value for name in self.weights)

    # ---- state -------------------------------------------------------------------------------------------

    def state_shapes(self, B):
        """Of c, the memory and its mask: `memory` slots, or none if the memory grows."""
        slots, d = self.memory or 0, self.W_q.value.shape[0]
        return {"c": (B, len(self.v_f.value)), "memory": (B, slots, d), "memory_mask": (B, slots)}

    def initial_state(self, batch, dtype=None):
        """c zero, and an empty memory."""
        W_q, shapes = self.W_q.value, self.state_shapes(batch)
        xp, dtype = array_module(W_q), dtype or W_q.dtype
        return (xp.zeros(shapes["c"], dtype), xp.zeros(shapes["memory"], dtype), xp.zeros(shapes["memory_mask"], bool))

    def _split_state(self, state, x, dtype=None):
        """(c, Memory) of a state; for None zeros and an empty memory. Raises as Recurrent.forward does."""
        xp, B, d = array_module(self.W_q.value), len(x), self.W_q.value.shape[0]
        if state is None:
            return xp.zeros((B, len(self.v_f.value)), dtype), Memory(xp.zeros((B, 0, d), dtype), None, None)
        check_tuple("SRUpp", "state", state, STATE)
        check_state("SRUpp", state[:2], {"c": (B, len(self.v_f.value)), "memory": (B, None, d)})
        c, z, z_mask = state
        array_module(x=x, c=c, memory=z, memory_mask=z_mask)
        check_mask("SRUpp", z_mask, z.shape[:2], "state's memory_mask")
        if not self.attention:
            return c, Memory(z, None, None)
        return c, Memory.of(z if dtype is None else z.astype(dtype, copy=False), z_mask)

    def _check_upstream(self, upstream, y_shape, attention):
        """dy, dc, dmemory, each None for zero. Raises as Recurrent.check_upstream does."""
        (T, _, d), M, (B, _, h) = attention.zs.shape, attention.memory.z.shape[1], y_shape
        slots = M + T if self.memory is None else self.memory
        dy, (dc, dmemory, _) = split_upstream(upstream, "SRUpp", STATE)
        if dy is not None:
            check_shape("SRUpp", "dy", dy, y_shape)
        check_state("SRUpp", (dc, dmemory), {"c": (B, h), "memory": (B, slots, d)}, "dstate")
        return dy, dc, dmemory

    def _memory_backward(self, dzs, dmemory0, dmemory, taken, attention):
        """dzs and the gradient of the memory given to forward, each with its part of dmemory, the next memory's."""
        memory = attention.memory
        if not self.attention:
            return dzs, array_module(dzs).zeros_like(memory.z)               # it was not read
        if dmemory is not None:
            dkept, dnew = next_memory_backward(dmemory, taken, memory.z.shape[1], len(dzs))
            dmemory0 += dkept
            dzs += dnew.transpose(1, 0, 2)
        return dzs, memory.spread(dmemory0)

    # ---- step by step ------------------------------------------------------------------------------------

    def begin(self, state=None):
        """(c, KeysAndValues of the memory) for `step`; (None, None) at the beginning."""
        if state is None:
            return None, None
        check_tuple("SRUpp", "state", state, STATE)
        check_state("SRUpp", state[:1], {"c": (None, len(self.v_f.value))})
        c, memory = self._split_state(state, state[0])
        if not self.attention or not memory.z.shape[1]:
            return c, None
        Q = memory.z @ self.W_q.value
        keys, values = (split_heads(Q @ W.value, self.heads) for W in (self.W_k, self.W_v))
        return c, KeysAndValues(keys, values, memory.mask, self.window)

    def step(self, x, stepping=None):
        """(y (B, h), stepping) for one input x (B, d); in evaluation the y are those of forward over the sequence.

        The keys and values of earlier steps are kept, so that a step costs one query over those it sees: the window, or
        without one all steps since `begin` (`memory` limits the state passed from segment to segment, not this).
        Raises TypeError if the layer is not causal.
        """
        if not self.causal and self.attention:
            raise TypeError("SRUpp: causal is False; a sequence can be read step by step only if it is True")
        check_rank_and_width("SRUpp", "x", x, 2, self.W_q.value.shape[0])
        c, seen = (None, None) if stepping is None else stepping
        if c is not None and len(c) != len(x):
            raise ValueError(f"SRUpp: x has shape {x.shape}; expected a batch of {len(c)}, as in the steps before")
        z = x if self.input_norm is None else self.input_norm(x)
        Q = R = z @ self.W_q.value                                           # (B, d')
        if self.attention:
            q, key, value = (split_heads(rows[:, None], self.heads)
                             for rows in (Q, Q @ self.W_k.value, Q @ self.W_v.value))
            seen = KeysAndValues(key, value, None, self.window) if seen is None else \
                seen.append(key[:, :, 0], value[:, :, 0])
            R = Q + self.alpha.value * join_heads(seen.attend(q))[:, 0]
        N = R if self.norm is None else self.norm(R)
        W_o, *rest = self._weights()
        u = N @ W_o
        c = array_module(u).zeros((len(x), len(self.v_f.value)), u.dtype) if c is None else c
        (h, c), _ = sru_cell(u, x, c, *rest, self.scale, self.activation)
        return h if self.output_norm is None else self.output_norm(h), (c, seen)


def _through(norm, x):
    """norm.forward(x), or x itself where there is no norm."""
    return (x, None) if norm is None else norm.forward(x)


def _through_backward(norm, dy, cache):
    return dy if norm is None else norm.backward(dy, cache)
