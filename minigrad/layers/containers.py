"""Containers of recurrent layers: Stack, one after another; Bidirectional, one in each direction."""

from minigrad.backend import array_module
from minigrad.check import check_shape
from minigrad.layers.recurrent import Recurrent, split_state, split_upstream

DIRECTIONS = ("forward", "backward")


class Stack(Recurrent):
    """Recurrent layers in sequence: the y of each is the x of the next.

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h of the last layer), state), cache; state is the
    tuple of the layers' states. All layers get the same mask and rng.

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
        return (x, tuple(new_states)), caches

    def backward(self, upstream, cache):
        dy, dstate = split_upstream(upstream)
        dstates, dstates0 = self._split(dstate, "dstate"), []
        for layer, layer_cache, layer_dstate in zip(self.layers[::-1], cache[::-1], dstates[::-1]):
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

    def initial_state(self, batch, dtype=None):
        return tuple(layer.initial_state(batch, dtype) for layer in self.layers)

    def columns(self):
        return self.layers[-1].columns()

    def _split(self, state, name):
        return split_state("Stack", name, state, [f"layer {n}" for n in range(len(self.layers))])


class Bidirectional(Recurrent):
    """y = [y_forward | y_backward]: one layer reads the sequence forwards, the other backwards.

    A layer skips masked steps, so the whole sequence is reversed together with its mask, and each sample is read
    starting at its own last real step. One layer may serve both directions (its gradients add up).

    forward(x (B, L, d), state=None, mask=None, rng=None) -> (y (B, L, h_forward + h_backward), state), cache; state is
    (the forward layer's, the backward layer's); the backward layer ends at the sequence's first step. A sequence cannot
    be divided into segments or read step by step, since the backward layer starts at its end.

    Raises TypeError for a layer that is not recurrent.
    """

    def __init__(self, forward_layer, backward_layer):
        for name, layer in (("forward_layer", forward_layer), ("backward_layer", backward_layer)):
            if not getattr(layer, "recurrent", False):
                raise TypeError(f"Bidirectional: {name} is a {type(layer).__name__}; expected a recurrent layer")
        self.forward_layer, self.backward_layer = forward_layer, backward_layer

    def forward(self, x, state=None, mask=None, rng=None):
        xp = array_module(x=x, mask=mask)
        state_f, state_b = split_state("Bidirectional", "state", state, DIRECTIONS)
        (y_f, state_f), cache_f = self.forward_layer.forward(x, state=state_f, mask=mask, rng=rng)
        (y_b, state_b), cache_b = self.backward_layer.forward(
            x[:, ::-1], state=state_b, mask=None if mask is None else mask[:, ::-1], rng=rng)
        y = xp.concatenate([y_f, y_b[:, ::-1]], axis=2)
        return (y, (state_f, state_b)), (cache_f, cache_b, (y.shape, y_f.shape[2]))

    def backward(self, upstream, cache):
        """dx is the sum of both layers' dx, the backward layer's reversed."""
        cache_f, cache_b, (y_shape, h_f) = cache
        dy, dstate = split_upstream(upstream)
        dstate_f, dstate_b = split_state("Bidirectional", "dstate", dstate, DIRECTIONS)
        dy_f = dy_b = None
        if dy is not None:
            check_shape("Bidirectional", "dy", dy, y_shape)
            dy_f, dy_b = dy[..., :h_f], dy[:, ::-1, h_f:]
        dx_f, dstate_f = self.forward_layer.backward((dy_f, dstate_f), cache_f)
        dx_b, dstate_b = self.backward_layer.backward((dy_b, dstate_b), cache_b)
        return dx_f + dx_b[:, ::-1], (dstate_f, dstate_b)

    def step(self, x, stepping=None):
        raise TypeError("Bidirectional: a sequence cannot be read step by step: the backward layer starts at its end")

    def initial_state(self, batch, dtype=None):
        return self.forward_layer.initial_state(batch, dtype), self.backward_layer.initial_state(batch, dtype)

    def columns(self):
        (_, h_f), (_, h_b) = self.forward_layer.columns(), self.backward_layer.columns()
        return h_f, h_f + h_b
