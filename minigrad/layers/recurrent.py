"""What all recurrent layers share: their contract, masks by packing, and Stack.

    (y, state), cache = forward(x, state=None, mask=None, rng=None)
    dx, dstate0       = backward((dy, dstate), cache)

x (B, L, d), y (B, L, h). A state is all that a continued call needs. dy, dstate, and any entry of dstate may be
None, meaning zero. A masked step is as if it were not there: y and dx are 0 at it and the state stays as it is.

Step by step, for generation: `stepping = layer.begin(state)`, then `y, stepping = layer.step(x, stepping)` with
x (B, d) and y (B, h); the outputs are those of forward over the whole sequence.
"""

from typing import Any, NamedTuple

from minigrad.backend import array_module, on_host, zeros
from minigrad.check import check_mask, check_rank_and_width, check_shape, check_state
from minigrad.layer import Layer


class Recurrent(Layer):
    """Base of the recurrent layers. `layer(x, ...)` returns (y, state)."""

    recurrent = True

    def forward(self, x, state=None, mask=None, rng=None):
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def begin(self, state=None):
        """What `step` starts from: after a forward's state, or at the beginning."""
        return state

    def step(self, x, stepping=None):
        """(y (B, h), what the next step starts from) for one input x (B, d) of each sample."""
        (y, state), _ = self.forward(x[:, None], state=stepping)
        return y[:, 0], state

    def zero_state(self, batch):
        """The state before a sequence, written out: zeros on the parameters' device, in their dtype."""
        value = self.parameters()[0].value
        return tuple(zeros(shape, value.dtype, array_module(value)) for shape in self._state_shapes(batch).values())

    def columns(self):
        """(columns of y that are read from the left, all columns of y)."""
        first, *_ = self.zero_state(1)                                       # (1, h), as wide as y
        return first.shape[-1], first.shape[-1]

    def check_input(self, x, mask, d):
        """Raise unless x is floating point (B, L, d) and mask, if any, boolean (B, L)."""
        name = type(self).__name__
        check_rank_and_width(name, "x", x, 3, d)
        if mask is not None:
            check_mask(name, mask, x.shape[:2])

    def split_state(self, state, state_shapes):
        """The entries of a state, None for each when there is none. Raises ValueError or TypeError for a wrong one."""
        if state is None:
            return (None,) * len(state_shapes)
        check_state(type(self).__name__, state, state_shapes)
        return state

    def check_upstream(self, upstream, y_shape, state_shapes):
        """(dy, dstate with None for what is missing) from what was handed to backward.

        Raises TypeError when it is not a pair, ValueError for a wrong shape (nothing is broadcast).
        """
        name, (dy, dstate) = type(self).__name__, split_upstream(upstream)
        if dy is not None:
            check_shape(name, "dy", dy, y_shape)
        if dstate is None:
            return dy, (None,) * len(state_shapes)
        check_state(name, dstate, state_shapes, "dstate")
        return dy, dstate


def split_upstream(upstream):
    """(dy, dstate) from what was handed to backward. Raises TypeError when it is not such a pair."""
    if not isinstance(upstream, tuple | list) or len(upstream) != 2:
        raise TypeError(f"backward got a {type(upstream).__name__}; expected the pair (dy, dstate), None meaning zero")
    return upstream


# ---- masks -----------------------------------------------------------------------------------------------
# A time loop with a mask in every step is slow and hard to read. Instead each sample's real steps are moved to
# the left, the loop runs as if there were no mask, and what it did beyond a sample's length is never looked at.


class Packing(NamedTuple):
    """Where each sample's real steps are: slot t of the packed sequence is step order[b, t] of the given one."""

    order: Any      # (B, L) integer; None where every sample's real steps are on the left already
    inverse: Any    # (B, L) integer: step t of the given sequence is slot inverse[b, t]; None as well
    lengths: Any    # (B,) integer: the number of real steps
    mask: Any       # (B, L) boolean, as given

    @classmethod
    def of(cls, mask):
        """None for no mask."""
        if mask is None:
            return None
        xp, L = array_module(mask=mask), mask.shape[1]
        if on_host(mask) and not (mask[:, 1:] > mask[:, :-1]).any():         # padded on the right: nothing to move
            return cls(None, None, mask.sum(axis=1), mask)
        order = xp.argsort(xp.where(mask, 0, L) + xp.arange(L), axis=1)      # distinct keys: stable by construction
        return cls(order, xp.argsort(order, axis=1), mask.sum(axis=1), mask)


def pack(x, packing):
    """(B, L, d) with the real steps on the left and zeros behind them; x itself when packing is None."""
    if packing is None:
        return x
    xp = array_module(x)
    real = xp.where(packing.mask[:, :, None], x, 0)              # NaN in a masked step ends here
    return real if packing.order is None else real[xp.arange(len(x))[:, None], packing.order]


def unpack(y, packing):
    """The inverse of `pack`: every step back at its place, zeros at the masked ones."""
    if packing is None:
        return y
    xp = array_module(y)
    spread = y if packing.inverse is None else y[xp.arange(len(y))[:, None], packing.inverse]
    return xp.where(packing.mask[:, :, None], spread, 0)


# ---- several layers --------------------------------------------------------------------------------------


class Stack(Recurrent):
    """Recurrent layers one above the other: the y of each is the x of the next.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h of the last layer), state), cache; state is the
    tuple of the layers' states. Every layer is given the same mask and the one rng.

    Raises TypeError for a layer that is not recurrent, ValueError for a state of the wrong length.
    """

    def __init__(self, *layers):
        for layer in layers:
            if not getattr(layer, "recurrent", False):
                raise TypeError(f"Stack: got a {type(layer).__name__}; expected recurrent layers")
        if not layers:
            raise TypeError("Stack: got no layer; expected at least one recurrent layer")
        self.layers = list(layers)

    def forward(self, x, state=None, mask=None, rng=None):
        states = self._split(state, "state")
        new_states, caches = [], []
        for layer, layer_state in zip(self.layers, states):
            (x, new_state), cache = layer.forward(x, state=layer_state, mask=mask, rng=rng)
            new_states.append(new_state)
            caches.append(cache)
        return (x, tuple(new_states)), (caches,)

    def backward(self, upstream, cache):
        caches, = cache
        dy, dstate = split_upstream(upstream)
        dstates, dstates0 = self._split(dstate, "dstate"), []
        for layer, layer_cache, layer_dstate in zip(self.layers[::-1], caches[::-1], dstates[::-1]):
            dy, dstate0 = layer.backward((dy, layer_dstate), layer_cache)
            dstates0.append(dstate0)
        return dy, tuple(dstates0[::-1])

    def begin(self, state=None):
        return tuple(layer.begin(layer_state) for layer, layer_state in zip(self.layers, self._split(state, "state")))

    def step(self, x, stepping=None):
        after = []
        for layer, layer_stepping in zip(self.layers, self._split(stepping, "stepping")):
            x, layer_stepping = layer.step(x, layer_stepping)
            after.append(layer_stepping)
        return x, tuple(after)

    def zero_state(self, batch):
        return tuple(layer.zero_state(batch) for layer in self.layers)

    def columns(self):
        return self.layers[-1].columns()

    def _split(self, state, name):
        if state is None:
            return (None,) * len(self.layers)
        if not isinstance(state, tuple | list) or len(state) != len(self.layers):
            came = f"{len(state)} entries" if isinstance(state, tuple | list) else type(state).__name__
            raise ValueError(f"Stack: {name} is {came}; expected a tuple of {len(self.layers)}, one a layer")
        return tuple(state)


class Bidirectional(Recurrent):
    """y = [y_forward | y_backward]: one layer reads the sequence as it is, the other one from its end.

    A layer passes masked steps by as if they were not there; so the whole sequence is turned round, mask and all, and
    each sample is read from its own last real step. One layer may serve both directions (its gradients add up).

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h_forward + h_backward), state), cache; state is
    (the forward layer's, the backward layer's, the latter standing before the sequence's first step).
    A sequence cannot be cut into segments, nor read step by step: the backward layer starts at the end.

    Raises TypeError for a layer that is not recurrent.
    """

    def __init__(self, forward_layer, backward_layer):
        for name, layer in (("forward_layer", forward_layer), ("backward_layer", backward_layer)):
            if not getattr(layer, "recurrent", False):
                raise TypeError(f"Bidirectional: {name} is a {type(layer).__name__}; expected a recurrent layer")
        self.forward_layer, self.backward_layer = forward_layer, backward_layer

    def forward(self, x, state=None, mask=None, rng=None):
        xp = array_module(x=x, mask=mask)
        state_f, state_b = _pair(state, "state")
        (y_f, state_f), cache_f = self.forward_layer.forward(x, state=state_f, mask=mask, rng=rng)
        (y_b, state_b), cache_b = self.backward_layer.forward(
            x[:, ::-1], state=state_b, mask=None if mask is None else mask[:, ::-1], rng=rng)
        y = xp.concatenate([y_f, y_b[:, ::-1]], axis=2)
        return (y, (state_f, state_b)), (cache_f, cache_b, (y.shape, y_f.shape[2]))

    def backward(self, upstream, cache):
        """dx is the sum of both layers' dx, the backward one's turned round."""
        cache_f, cache_b, (y_shape, h_f) = cache
        dy, dstate = split_upstream(upstream)
        dstate_f, dstate_b = _pair(dstate, "dstate")
        dy_f = dy_b = None
        if dy is not None:
            check_shape("Bidirectional", "dy", dy, y_shape)
            dy_f, dy_b = dy[..., :h_f], dy[:, ::-1, h_f:]
        dx_f, dstate_f = self.forward_layer.backward((dy_f, dstate_f), cache_f)
        dx_b, dstate_b = self.backward_layer.backward((dy_b, dstate_b), cache_b)
        return dx_f + dx_b[:, ::-1], (dstate_f, dstate_b)

    def step(self, x, stepping=None):
        raise TypeError("Bidirectional: a sequence cannot be read step by step: the backward layer starts at its end")

    def zero_state(self, batch):
        return self.forward_layer.zero_state(batch), self.backward_layer.zero_state(batch)

    def columns(self):
        (_, h_f), (_, h_b) = self.forward_layer.columns(), self.backward_layer.columns()
        return h_f, h_f + h_b


def _pair(state, name):
    if state is None:
        return None, None
    if not isinstance(state, tuple | list) or len(state) != 2:
        came = f"{len(state)} entries" if isinstance(state, tuple | list) else type(state).__name__
        raise ValueError(f"Bidirectional: {name} is {came}; expected a pair, (forward, backward)")
    return tuple(state)
