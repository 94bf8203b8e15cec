"""Recurrent: what all recurrent layers share, and the plain time loop.

    (y, state), cache = forward(x, state=None, mask=None, rng=None)
    dx, dstate0       = backward((dy, dstate), cache)

x (B, L, d), y (B, L, h). A state is all that the next call needs to continue a sequence. dy, dstate and any entry of
dstate may be None, meaning zero. A masked step is skipped: y and dx are 0 there and the state does not change.

A subclass writes one step, with the same contract, and is a complete layer (minigrad/layers/gru.py is an example):

    weights                              the names of its Parameters, in the order of the cell's arguments; the first
                                         has d rows
    state_shapes(B)                      {name: shape} of the state's entries
    cell(x, state, *weights)             (y, state'), cache      x (B, d), y (B, h)
    cell_backward((dy, dstate'), cache, *weights)      dx, dstate, gradients of the weights in their order

It may also define `initial_state`, if that is not zero; `cell_weights`, to compute weights from the Parameters once per
sequence; `draw`, to draw random numbers once per sequence; `fast_forward` and `fast_backward`, a faster loop
(minigrad/fast) with the same results as the plain one. With `fast=False` the equations run as written.

Step by step, for generation: `stepping = layer.begin(state)`, then `y, stepping = layer.step(x, stepping)` with
x (B, d) and y (B, h); the outputs are those of forward over the whole sequence.
"""

from typing import Any, NamedTuple

from minigrad.backend import array_module
from minigrad.check import check_mask, check_rank_and_width, check_shape, check_state, check_tuple
from minigrad.layer import Layer, validate_on_host
from minigrad.memory import zeros


class RecurrentCache(NamedTuple):
    """What backward reads."""

    loop: Any           # the cache of the plain loop (a PlainCache) or of the fast one
    weights: tuple      # the cell's arguments
    made: Any           # the cache of `cell_weights`
    y_shape: tuple      # (B, L, h)
    started: bool       # from `initial_state`: no state was given
    fast: bool          # which of the two loops ran


class PlainCache(NamedTuple):
    """What the plain loop's backward reads."""

    cells: list         # of each step
    mask: Any           # (B, L) or None
    x_shape: tuple      # (B, L, d)
    y_shape: tuple      # (B, L, h)
    state: tuple        # the last one, for shapes and dtypes


class Recurrent(Layer):
    """Base of the recurrent layers. `layer(x, ...)` returns (y, state)."""

    recurrent = True
    weights = ()
    fast = False        # a layer with a fast loop sets it in its constructor

    # ---- one step ----------------------------------------------------------------------------------------

    def cell(self, x, state, *weights):
        raise NotImplementedError(f"{type(self).__name__} has no cell")

    def cell_backward(self, upstream, cache, *weights):
        raise NotImplementedError(f"{type(self).__name__} has no cell_backward")

    def state_shapes(self, B):
        raise NotImplementedError(f"{type(self).__name__} has no state_shapes")

    # ---- what a subclass may define ----------------------------------------------------------------------

    def initial_state(self, batch, dtype=None):
        """The state before a sequence: zeros on the parameters' device, in their dtype or the one given."""
        value = self.parameters()[0].value
        return tuple(zeros(shape, dtype or value.dtype, array_module(value))
                     for shape in self.state_shapes(batch).values())

    def initial_state_backward(self, dstate0):
        """Add the gradients of the Parameters that `initial_state` is computed from."""

    def cell_weights(self, dtype):
        """(the cell's weights, a cache): by default the Parameters' values, in the sequence's dtype."""
        return tuple(getattr(self, name).value.astype(dtype, copy=False) for name in self.weights), None

    def cell_weights_backward(self, gradients, made):
        """Add to the Parameters' gradients, from those of the weights that `cell_weights` returned."""
        self.add_gradients(**dict(zip(self.weights, gradients, strict=True)))

    def draw(self, rng, x):
        """{name: value}: random numbers of the sequence, keyword arguments of the cell. rng is None in evaluation."""
        return {}

    # ---- forward and backward ----------------------------------------------------------------------------

    def forward(self, x, state=None, mask=None, rng=None):
        """(y (B, L, h), state), cache, from x (B, L, d), a state, mask (B, L) boolean: True at real steps.

        Raises ValueError for wrong shapes, TypeError for wrong dtypes or a mix of devices.
        """
        first = getattr(self, self.weights[0]).value
        xp = array_module(**{"x": x, self.weights[0]: first, "mask": mask})
        self.check_input(x, mask, first.shape[0])
        validate_on_host(self, x)
        dtype, started = xp.result_type(x.dtype, first.dtype), state is None
        if started:
            state = self.initial_state(len(x), dtype)
        else:
            check_state(type(self).__name__, state, self.state_shapes(len(x)))
        weights, made = self.cell_weights(dtype)
        loop = self.fast_forward if self.fast else self.plain_forward
        y, state, cache = loop(x, state, mask, weights, **self.draw(rng, x))
        return (y, state), RecurrentCache(cache, weights, made, y.shape, started, self.fast)

    def backward(self, upstream, cache):
        """Backpropagation through time: dx (B, L, d) and dstate0, of the structure of the state."""
        loop_cache, weights, made, y_shape, started, fast = cache
        dy, dstate = self.check_upstream(upstream, y_shape, self.state_shapes(y_shape[0]))
        loop = self.fast_backward if fast else self.plain_backward
        dx, dstate0, gradients = loop(dy, dstate, loop_cache, weights)
        self.cell_weights_backward(gradients, made)
        if started:
            self.initial_state_backward(dstate0)
        return dx, dstate0

    def plain_forward(self, x, state, mask, weights, **draws):
        """The cell, step by step. At a masked step y is 0 and the state does not change."""
        xp, T = array_module(x), x.shape[1]
        dtype = xp.result_type(x.dtype, weights[0].dtype)
        x, state = x.astype(dtype, copy=False), tuple(entry.astype(dtype) for entry in state)    # state: a copy
        if mask is not None:
            x = xp.where(mask[:, :, None], x, 0)                             # NaN in a masked step ends here
        ys, caches = [], []
        for t in range(T):
            (y, after), cache = self.cell(x[:, t], state, *weights, **draws)
            if t == 0:
                shapes = {name: entry.shape for name, entry in zip(self.state_shapes(len(x)), state)}
                check_state(f"{type(self).__name__}.cell", after, shapes, "the new state")
            if mask is not None:
                y, after = _select(mask[:, t], y, 0), tuple(_select(mask[:, t], a, b) for a, b in zip(after, state))
            state = after
            ys.append(y)
            caches.append(cache)
        y = xp.stack(ys, axis=1) if T else xp.zeros((len(x), 0, self.columns()[1]), dtype)
        return y, tuple(entry.copy() for entry in state), PlainCache(caches, mask, x.shape, y.shape, state)

    def plain_backward(self, dy, dstate, cache, weights):
        """The cell's backward, from the last step to the first; the weights' gradients are summed over the steps."""
        caches, mask, x_shape, y_shape, state = cache
        xp, T = array_module(weights[0]), len(caches)
        dx = xp.zeros(x_shape, state[0].dtype)
        dstate = tuple(xp.zeros_like(entry) if d is None else d.astype(entry.dtype) for d, entry in zip(dstate, state))
        totals = [xp.zeros_like(weight) for weight in weights]
        no_dy = xp.zeros((y_shape[0], y_shape[2]), state[0].dtype)
        for t in range(T - 1, -1, -1):
            dy_t, dlater = no_dy if dy is None else dy[:, t], dstate
            if mask is not None:
                dy_t, dlater = _select(mask[:, t], dy_t, 0), tuple(_select(mask[:, t], d, 0) for d in dlater)
            dx_t, dbefore, gradients = self.cell_backward((dy_t, dlater), caches[t], *weights)
            check_tuple(f"{type(self).__name__}.cell_backward", "the weights' gradients", gradients, self.weights)
            if mask is not None:
                dx_t = _select(mask[:, t], dx_t, 0)
                dbefore = tuple(_select(mask[:, t], a, b) for a, b in zip(dbefore, dstate))
            dx[:, t], dstate = dx_t, dbefore
            totals = [total + gradient for total, gradient in zip(totals, gradients)]
        return dx, tuple(d.copy() for d in dstate), totals

    # ---- step by step ------------------------------------------------------------------------------------

    def begin(self, state=None):
        """The `stepping` of the first `step`: after a state that forward returned, or at the start of a sequence."""
        return state

    def step(self, x, stepping=None):
        """(y (B, h), the next step's `stepping`) for one input x (B, d) of each sample."""
        (y, state), _ = self.forward(x[:, None], state=stepping)
        return y[:, 0], state

    def columns(self):
        """(the number of y's columns computed from left to right, the number of all its columns)."""
        first, *_ = self.state_shapes(1).values()                            # (..., h), as wide as y
        return first[-1], first[-1]

    # ---- checks ------------------------------------------------------------------------------------------

    def check_input(self, x, mask, d):
        """Raise unless x is floating point (B, L, d) and mask, if any, boolean (B, L)."""
        name = type(self).__name__
        check_rank_and_width(name, "x", x, 3, d)
        if mask is not None:
            check_mask(name, mask, x.shape[:2])

    def check_upstream(self, upstream, y_shape, state_shapes):
        """(dy, dstate) from backward's argument, dstate a tuple with None for zero.

        Raises TypeError when it is not a pair, ValueError for a wrong shape (nothing is broadcast).
        """
        name, (dy, dstate) = type(self).__name__, split_upstream(upstream)
        if dy is not None:
            check_shape(name, "dy", dy, y_shape)
        if dstate is None:
            return dy, (None,) * len(state_shapes)
        check_state(name, dstate, state_shapes, "dstate")
        return dy, dstate


def split_upstream(upstream, owner=None, entries=None):
    """(dy, dstate) from backward's argument; with `entries`, the state's names, dstate is a tuple with None for zero.

    Raises TypeError when it is not such a pair, ValueError for a dstate of another length.
    """
    if not isinstance(upstream, tuple | list) or len(upstream) != 2:
        raise TypeError(f"backward got a {type(upstream).__name__}; expected the pair (dy, dstate), None meaning zero")
    dy, dstate = upstream
    return dy, dstate if entries is None else split_state(owner, "dstate", dstate, entries)


def split_state(owner, name, state, entries):
    """The entries of a state or dstate, None for each when there is none. Raises ValueError for a wrong number."""
    if state is None:
        return (None,) * len(entries)
    check_tuple(owner, name, state, entries)
    return tuple(state)


def _select(real, a, b):
    """a (B, ...) for the samples where `real` (B,) is True, else b."""
    return array_module(a).where(real.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
