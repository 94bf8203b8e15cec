"""SRU++: attention inside a simple recurrent unit (Lei 2021, arXiv 2102.12459).

Derivation of the backward: docs/derivations/srupp.md.
"""

import math
from typing import Any, NamedTuple

from minigrad.backend import array_module
from minigrad.check import check_choice, check_count, check_mask, check_number, check_rank_and_width, check_shape
from minigrad.fast.sru import RecurrenceCache, recurrence_backward, recurrence_forward, time_first
from minigrad.functional import softmax_attention
from minigrad.initializers import generator, glorot_uniform, zeros
from minigrad.layers.dropout import Dropout
from minigrad.layers.norm import LayerNorm
from minigrad.layers.recurrent import Recurrent, split_upstream
from minigrad.layers.sru import ACTIVATIONS, highway_scale, recurrence_parameters, sru_step, variational_mask
from minigrad.layers.srupp_memory import KeysAndValues, Memory, next_memory, next_memory_backward
from minigrad.memory import empty, matmul
from minigrad.packing import Packing, pack, unpack
from minigrad.parameter import Parameter

# ---- the equations ---------------------------------------------------------------------------------------


def srupp_attention(x, W_q, W_k, W_v, alpha):
    """R = Q + alpha A, for one sequence and one head, as written (in row vectors):

        Q = x W_q      K = Q W_k      V = Q W_v      A = softmax(Q K^T / sqrt(d') + causal mask) V

    x (B, L, d) -> R (B, L, d'), cache. Keys and values are made from Q, so W_k and W_v are (d', d').
    At alpha = 0, where it starts, R = Q: U = Q W_o is a factorised linear map of x, and the layer an SRU.
    """
    Q = x @ W_q
    A, attention_cache = softmax_attention.forward(Q, Q @ W_k, Q @ W_v, causal=True)
    return Q + alpha * A, (x, Q, A, attention_cache)


def srupp_attention_backward(dR, cache, W_q, W_k, W_v, alpha):
    """dx, (dW_q, dW_k, dW_v, dalpha). Q is used four times: as itself, as query, and for keys and values."""
    x, Q, A, attention_cache = cache
    dQ, dK, dV = softmax_attention.backward(alpha * dR, attention_cache)
    dQ = dR + dQ + dK @ W_k.T + dV @ W_v.T
    dW_q, dW_k, dW_v = (
        (rows.swapaxes(1, 2) @ drows).sum(axis=0) for rows, drows in ((x, dQ), (Q, dK), (Q, dV)))
    return dQ @ W_q.T, (dW_q, dW_k, dW_v, (dR * A).sum())


# ---- the layer -------------------------------------------------------------------------------------------


class SRUppCache(NamedTuple):
    """What backward reads. T steps, M slots of memory."""

    xs: Any                     # (T, B, d)      the input, packed, time first
    zs: Any                     # (T, B, d)      what W_q maps: xs, or its layer norm
    memory: Memory
    taken: Any                  # which rows went into the next memory
    Q: Any                      # (B, M+T, d')   of memory and segment
    A: Any                      # (B, T, d') or None
    caches: tuple               # of input norm, attention, norm, dropout, output norm
    recurrence: RecurrenceCache
    packing: Packing | None


class SRUpp(Recurrent):
    """SRU++: an SRU whose products come from attention: U = layernorm(Q + alpha A) W_o (`srupp_attention`, `sru_step`).

    Q = x W_q;  K = Q W_k;  V = Q W_v;  A = softmax(Q K^T / sqrt(e)) V, a head being e = d' / heads wide;
    then f_t, r_t, c_t, h_t of U as in SRU.

    W_q (d, d'), W_k, W_v (d', d'), alpha (1,) from 0, norm.gain, norm.bias (d',), W_o (d', k h) with columns
    candidate | forget | reset (| highway when d != h), v_f, v_r, b_f, b_r (h,). With d = h and attention these are
    d d' + 2 d'^2 + 3 d d' + 4 d + 2 d' + 1 numbers.

    projection      d', the width of the attention
    causal          step t attends to the steps up to t alone; else to all of its segment
    attention       False: U = layernorm(x W_q) W_o, the projected SRU (no W_k, W_v, alpha)
    window          step t sees t-window+1 ... t only (with causal)
    memory          slots of the memory that is carried in the state: the newest rows that W_q mapped. Default:
                    window - 1; all of them without a window; none if not causal
    detach_memory   the memory is a constant: no gradient goes into it (truncated backpropagation through time)
    layer_norm      False: U = (Q + alpha A) W_o
    cell_norm       a second layer norm: "pre", of the layer's input (the highway keeps the raw x), or "post", of h
    dropout         of the rows that W_o maps; attention_dropout: of the attention weights; recurrent_dropout: as in SRU
    highway_bias, rescale, activation, v_range     as in SRU

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h), (c, memory, memory_mask)), cache.
    State: c (B, h); memory (B, M, d), newest last, the inputs before W_q; memory_mask (B, M) boolean, True where a slot
    is real. A state of any M is taken; the one returned has `memory` slots. dstate is (dc, dmemory, None). The dtype is
    that of x and the parameters together.

    Raises ValueError for wrong settings or shapes, TypeError for wrong dtypes or a mix of devices.
    """

    def __init__(self, d, h, projection, heads=1, causal=True, attention=True, window=None, layer_norm=True,
                 highway_bias=-2.0, *, memory=None, detach_memory=False, cell_norm=None, dropout=0.0,
                 attention_dropout=0.0, recurrent_dropout=0.0, rescale=False, activation="identity", v_range=1.0,
                 rng=None, dtype=None):
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
        self.W_o.value *= math.sqrt(1 - dropout)                             # keeps U's variance, as the official code
        self.output_norm = LayerNorm(h, dtype=dtype) if cell_norm == "post" else None
        self.drop = Dropout(dropout)
        self.heads, self.causal, self.attention, self.window = heads, causal, attention, window
        self.memory = self._slots(memory)
        self.detach_memory, self.attention_dropout = detach_memory, float(attention_dropout)
        self.recurrent_dropout, self.activation = float(recurrent_dropout), activation
        self.scale = highway_scale(rescale, highway_bias, k)

    def _slots(self, memory):
        """Slots of memory in the state; None: as many as there are steps."""
        if not self.attention:
            return 0
        if memory is not None:
            return memory
        return 0 if not self.causal else None if self.window is None else self.window - 1

    # ---- forward and backward ----------------------------------------------------------------------------

    def forward(self, x, state=None, mask=None, rng=None):
        W_q = self.W_q.value
        xp = array_module(x=x, W_q=W_q, mask=mask)
        self.check_input(x, mask, W_q.shape[0])
        c, memory = self._split_state(state, x)
        packing, dtype = Packing.of(mask), xp.result_type(x.dtype, W_q.dtype)
        xs = time_first(pack(x.astype(dtype, copy=False), packing))
        zs, input_cache = (xs, None) if self.input_norm is None else self.input_norm.forward(xs)
        T, B, d = xs.shape
        if self.attention:
            memory = Memory(xp.zeros((B, 0, d), dtype), None, None) if memory is None else Memory.of(
                memory[0].astype(dtype, copy=False), memory[1])
            Q = self._queries(zs, memory)                                    # (B, M+T, d')
            A, attention_cache = self._attend(Q, T, memory, packing, rng)
            R = Q[:, Q.shape[1] - T:] + self.alpha.value * A
            *new_memory, taken = next_memory(memory, zs, packing, self.memory)
        else:
            Q = matmul(zs, W_q).transpose(1, 0, 2)
            memory = Memory(xp.zeros((B, 0, d), dtype) if memory is None else memory[0], None, None)
            A, attention_cache, R, taken = None, None, Q, None
            new_memory = xp.zeros((B, 0, d), dtype), xp.zeros((B, 0), bool)
        N, norm_cache = (R, None) if self.norm is None else self.norm.forward(R)
        N, drop_cache = self.drop.forward(N, rng=rng)
        hs, c, recurrence = recurrence_forward(
            N.transpose(1, 0, 2), xs, c, self._weights(), scale=self.scale, activation=self.activation,
            m=variational_mask(rng, self.recurrent_dropout, (B, len(self.v_f.value)), xs),
            lengths=None if packing is None else packing.lengths)
        hs, output_cache = (hs, None) if self.output_norm is None else self.output_norm.forward(hs)
        caches = input_cache, attention_cache, norm_cache, drop_cache, output_cache
        return (unpack(hs.transpose(1, 0, 2), packing), (c, *new_memory)), SRUppCache(
            xs, zs, memory, taken, Q, A, caches, recurrence, packing)

    def backward(self, upstream, cache):
        """dx (B, L, d) and dstate0 = (dc, dmemory, None); dmemory is None (zero) if it is detached."""
        xs, zs, memory, taken, Q, A, caches, recurrence, packing = cache
        input_cache, attention_cache, norm_cache, drop_cache, output_cache = caches
        (T, B, _), h, slots = xs.shape, len(self.v_f.value), 0 if taken is None else self._slots_after(cache)
        dy, dc, dmemory = self._check_upstream(upstream, (B, T, h), slots)
        dhs = None if dy is None else time_first(pack(dy, packing))
        if self.output_norm is not None and dhs is not None:
            dhs = self.output_norm.backward(dhs, output_cache)
        (dn, dx, dc), (dW_o, *rest) = recurrence_backward(
            dhs, dc, recurrence, self._weights(), scale=self.scale, activation=self.activation)
        for parameter, gradient in zip((self.W_o, self.v_f, self.v_r, self.b_f, self.b_r), (dW_o, *rest)):
            parameter.grad += gradient
        dR = self.drop.backward(dn.transpose(1, 0, 2), drop_cache)
        if self.norm is not None:
            dR = self.norm.backward(dR, norm_cache)
        dQ = self._attend_backward(dR, Q, A, attention_cache) if self.attention else dR      # (B, M+T, d')
        dzs, dmemory0 = self._queries_backward(dQ, zs, memory)
        if self.attention and not self.detach_memory:
            if dmemory is not None:
                dkept, dnew = next_memory_backward(dmemory, taken, memory.z.shape[1], T)
                dmemory0 += dkept
                dzs += dnew.transpose(1, 0, 2)
            dmemory0 = memory.spread(dmemory0)
        elif not self.detach_memory:
            dmemory0 = array_module(dzs).zeros_like(memory.z)                # it was not looked at
        dxs = dzs if self.input_norm is None else self.input_norm.backward(dzs, input_cache)
        if dx is not None:
            dxs += dx
        return unpack(dxs.transpose(1, 0, 2), packing), (dc, dmemory0, None)

    def _queries(self, zs, memory):
        """Q (B, M+T, d') = [memory ; z] W_q."""
        W_q, (T, B, _), M = self.W_q.value, zs.shape, memory.z.shape[1]
        if not M:
            return matmul(zs, W_q).transpose(1, 0, 2)
        Q = empty((B, M + T, W_q.shape[1]), zs.dtype, array_module(zs))
        Q[:, :M], Q[:, M:] = matmul(memory.z, W_q), matmul(zs, W_q).transpose(1, 0, 2)
        return Q

    def _queries_backward(self, dQ, zs, memory):
        """dz (T, B, d) and dmemory (B, M, d) (None where none is wanted); adds W_q's gradient."""
        (T, B, d), W_q = zs.shape, self.W_q
        M = dQ.shape[1] - T
        dqs = time_first(dQ[:, M:])
        width = W_q.value.shape[1]
        dW_q = zs.reshape(T * B, d).T @ dqs.reshape(T * B, width)
        if M:
            dW_q += memory.z.reshape(B * M, d).T @ dQ[:, :M].reshape(B * M, width)
        W_q.grad += dW_q
        if self.detach_memory:
            return matmul(dqs, W_q.value.T), None
        return matmul(dqs, W_q.value.T), matmul(dQ[:, :M], W_q.value.T)

    def _attend(self, Q, T, memory, packing, rng):
        """A (B, T, d') of the last T of the queries Q (B, M+T, d') over the keys and values of all."""
        xp, (B, both, width) = array_module(Q), Q.shape
        q = self._heads(Q[:, both - T:])
        k, v = (self._heads(matmul(Q, W.value)) for W in (self.W_k, self.W_v))
        A, cache = softmax_attention.forward(
            q, k, v, mask=self._key_mask(xp, B, T, memory, packing), causal=self.causal, window=self.window,
            dropout=self.attention_dropout, rng=rng)
        return A.transpose(0, 2, 1, 3).reshape(B, T, width), cache

    def _attend_backward(self, dR, Q, A, attention_cache):
        """dQ (B, M+T, d') of R = Q + alpha A: Q is itself, the query, and what keys and values are made of."""
        (B, T, width), both, alpha = dR.shape, Q.shape[1], self.alpha
        alpha.grad += (dR * A).sum()
        dq, dk, dv = softmax_attention.backward(self._heads(dR * alpha.value), attention_cache)
        dq, dk, dv = (part.transpose(0, 2, 1, 3).reshape(B, part.shape[2], width) for part in (dq, dk, dv))
        rows = Q.reshape(B * both, width)
        self.W_k.grad += rows.T @ dk.reshape(B * both, width)
        self.W_v.grad += rows.T @ dv.reshape(B * both, width)
        dQ = matmul(dk, self.W_k.value.T)
        dQ += matmul(dv, self.W_v.value.T)
        dQ[:, both - T:] += dR
        dQ[:, both - T:] += dq
        return dQ

    def _heads(self, rows):
        """(B, n, d') -> (B, heads, n, e)."""
        B, n, width = rows.shape
        return rows.reshape(B, n, self.heads, width // self.heads).transpose(0, 2, 1, 3)

    def _key_mask(self, xp, B, T, memory, packing):
        """(B, 1, 1, M+T), True where a key is real; None where all are. Causal: no real query sees a step behind it."""
        ends_matter = packing is not None and not self.causal
        if memory.mask is None and not ends_matter:
            return None
        before = xp.ones((B, memory.z.shape[1]), bool) if memory.mask is None else memory.mask
        now = xp.arange(T) < packing.lengths[:, None] if ends_matter else xp.ones((B, T), bool)
        return xp.concatenate([before, now], axis=1)[:, None, None]

    def _weights(self):
        return tuple(parameter.value for parameter in (self.W_o, self.v_f, self.v_r, self.b_f, self.b_r))

    # ---- state -------------------------------------------------------------------------------------------

    def initial_state(self, batch, dtype=None):
        """c and an empty memory of `memory` slots (none where the memory grows)."""
        W_q = self.W_q.value
        xp, slots = array_module(W_q), self.memory or 0
        return (xp.zeros((batch, len(self.v_f.value)), W_q.dtype),
                xp.zeros((batch, slots, W_q.shape[0]), W_q.dtype), xp.zeros((batch, slots), bool))

    def _split_state(self, state, x=None):
        """c or None, and (memory, memory_mask) or None. Raises ValueError or TypeError for a wrong state."""
        if state is None:
            return None, None
        if not isinstance(state, tuple | list) or len(state) != 3:
            came = f"{len(state)} entries" if isinstance(state, tuple | list) else type(state).__name__
            raise ValueError(f"SRUpp: state is {came}; expected a tuple (c, memory, memory_mask)")
        c, memory, memory_mask = state
        for name, array in (("c", c), ("memory", memory), ("memory_mask", memory_mask)):
            if not hasattr(array, "dtype"):
                raise TypeError(f"SRUpp: state's {name} is {array!r}; expected an array")
        B, d = len(c if x is None else x), self.W_q.value.shape[0]
        array_module(x=x, c=c, memory=memory, memory_mask=memory_mask)
        check_shape("SRUpp", "state's c", c, (B, len(self.v_f.value)))
        check_rank_and_width("SRUpp", "state's memory", memory, 3, d)
        if len(memory) != B:
            raise ValueError(f"SRUpp: state's memory has shape {memory.shape}; expected a batch of {B}, as x has")
        check_mask("SRUpp", memory_mask, memory.shape[:2], "state's memory_mask")
        return c, (memory, memory_mask)

    def _slots_after(self, cache):
        M, T = cache.memory.z.shape[1], len(cache.xs)
        return M + T if self.memory is None else self.memory

    def _check_upstream(self, upstream, y_shape, slots):
        """dy, dc, dmemory, each None for zero. Raises as Recurrent.check_upstream does."""
        dy, dstate = split_upstream(upstream)
        if dy is not None:
            check_shape("SRUpp", "dy", dy, y_shape)
        if dstate is None:
            return dy, None, None
        if not isinstance(dstate, tuple | list) or len(dstate) != 3:
            came = f"{len(dstate)} entries" if isinstance(dstate, tuple | list) else type(dstate).__name__
            raise ValueError(f"SRUpp: dstate is {came}; expected a tuple (dc, dmemory, None)")
        dc, dmemory, _ = dstate
        if dc is not None:
            check_shape("SRUpp", "dstate's c", dc, (y_shape[0], y_shape[2]))
        if dmemory is not None:
            check_shape("SRUpp", "dstate's memory", dmemory, (y_shape[0], slots, self.W_q.value.shape[0]))
        return dy, dc, dmemory

    # ---- step by step ------------------------------------------------------------------------------------

    def begin(self, state=None):
        """(c, KeysAndValues of the memory) for `step`; (None, None) at the beginning."""
        if state is None:
            return None, None
        c, memory = self._split_state(state)
        if not self.attention or not memory[0].shape[1]:
            return c, None
        memory = Memory.of(*memory)
        Q = memory.z @ self.W_q.value
        keys, values = (self._heads(Q @ W.value) for W in (self.W_k, self.W_v))
        return c, KeysAndValues(keys, values, memory.mask, self.window)

    def step(self, x, stepping=None):
        """(y (B, h), stepping) for one input x (B, d): what forward gives for the whole sequence, in evaluation.

        The keys and values of earlier steps are kept, so that a step costs one query over what it sees: the window, or
        without one all steps since `begin` (`memory` bounds what a state carries from segment to segment, not this).
        Raises TypeError where the layer is not causal.
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
            q, key, value = (self._heads(rows[:, None]) for rows in (Q, Q @ self.W_k.value, Q @ self.W_v.value))
            seen = KeysAndValues(key, value, None, self.window) if seen is None else \
                seen.append(key[:, :, 0], value[:, :, 0])
            R = Q + self.alpha.value * seen.attend(q).transpose(0, 2, 1, 3).reshape(Q.shape)
        N = R if self.norm is None else self.norm(R)
        W_o, *rest = self._weights()
        u = N @ W_o
        c = array_module(u).zeros((len(x), len(self.v_f.value)), u.dtype) if c is None else c
        (h, c), _ = sru_step(u, x, c, *rest, self.scale, self.activation)
        return h if self.output_norm is None else self.output_norm(h), (c, seen)
