"""Layer: the contract that everything here keeps; Sequential and Residual: layers made of layers.

    y, cache = layer.forward(x, ..., mask=None, rng=None)    # pure: writes neither the layer nor its inputs
    dx       = layer.backward(dy, cache)                     # adds (+=) into Parameter.grad
    y        = layer(x, ...)                                 # the cache is dropped

The cache is the only thing that passes from forward to backward. Two uses of a layer are two caches, in any
order; so shared layers, tied weights and truncated backpropagation through time need no special care.
`rng=None` means evaluation: a layer that draws random numbers then draws none.
"""

import numpy as np

from minigrad.backend import on_host, to_device
from minigrad.parameter import Parameter


class Layer:
    """Base of all layers. A subclass sets its Parameters and layers as attributes and writes forward and backward.

    constants   the names of its arrays that are not learned: they go where the Parameters go
    """

    constants = ()

    def forward(self, x, mask=None, rng=None):
        """Return (y, cache)."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, dy, cache):
        """Add the parameters' gradients into .grad and return the gradient of each array input."""
        raise NotImplementedError(f"{type(self).__name__} has no backward")

    def __call__(self, *inputs, **keywords):
        y, _ = self.forward(*inputs, **keywords)
        return y

    def children(self):
        """Yield (name, value) of the Parameters and Layers held in attributes, and in lists, tuples and dicts there."""
        yield from _walk(vars(self))

    def named_parameters(self):
        """Yield (dotted name, Parameter) in attribute order; a shared Parameter comes once, under its first name."""
        yield from _named_parameters(self, "", set())

    def parameters(self):
        """The Parameters, each once."""
        return [parameter for _, parameter in self.named_parameters()]

    def zero_grad(self):
        """Fill every gradient with zeros, in place."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def named_constants(self):
        """Yield (dotted name, array) of the `constants` of this layer and of those in it: what is not learned."""
        for prefix, layer in _layers(self):
            for name in layer.constants:
                yield prefix + name, getattr(layer, name)

    def validate(self):
        """Raise ArithmeticError where the parameters have reached values at which the formula is undefined.

        A layer with such values overrides this and also calls it in forward when the arrays are on the host;
        on a GPU, where looking means waiting, the trainer calls it at log intervals.
        """
        for _, child in self.children():
            if isinstance(child, Layer):
                child.validate()

    def to_device(self, device):
        """Move all Parameters and `constants` to 'cpu' or 'gpu', keeping the Parameter objects; returns the layer."""
        for parameter in self.parameters():
            parameter.value, parameter.grad = to_device((parameter.value, parameter.grad), device)
        for _, layer in _layers(self):
            for name in layer.constants:
                setattr(layer, name, to_device(getattr(layer, name), device))
        return self

    def astype(self, dtype):
        """Convert every Parameter to a floating-point dtype, keeping the Parameter objects; returns the layer."""
        if np.dtype(dtype).kind != "f":
            raise TypeError(f"astype: dtype is {dtype!r}; expected a floating-point dtype")
        for parameter in self.parameters():
            parameter.value, parameter.grad = parameter.value.astype(dtype), parameter.grad.astype(dtype)
        return self

    def __repr__(self):
        shapes = ", ".join(f"{name} {parameter.value.shape}" for name, parameter in self.named_parameters())
        return f"{type(self).__name__}({shapes})"


def named_parameters(layer):
    """`layer.named_parameters()`."""
    return layer.named_parameters()


def _walk(items):
    for name, value in items.items():
        if isinstance(value, Parameter | Layer):
            yield str(name), value
        elif isinstance(value, dict):
            for inner, child in _walk(value):
                yield f"{name}.{inner}", child
        elif isinstance(value, list | tuple):
            for inner, child in _walk(dict(enumerate(value))):
                yield f"{name}.{inner}", child


def _layers(layer, prefix=""):
    """(dotted prefix, layer) of the layer and of all layers in it; a shared one comes once for each of its places."""
    yield prefix, layer
    for name, child in layer.children():
        if isinstance(child, Layer):
            yield from _layers(child, f"{prefix}{name}.")


def _named_parameters(layer, prefix, seen):
    for name, child in layer.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if isinstance(child, Parameter):
            yield prefix + name, child
        else:
            yield from _named_parameters(child, f"{prefix}{name}.", seen)


def looks_at_values(layer, array):
    """Call `layer.validate()` when the array is on the host, where it costs no waiting."""
    if on_host(array):
        layer.validate()


class Sequential(Layer):
    """y = f_n(... f_2(f_1(x))): layers one after another. Each is given the same mask and the one rng.

    x and y as the first layer takes and the last one gives them. Backward runs through the layers' own, last one first.

    Raises TypeError for something that is not a Layer, and for a recurrent layer (`Stack` carries states).
    """

    def __init__(self, *layers):
        _refuse_recurrent("Sequential", layers, "use minigrad.layers.Stack, which carries their states")
        self.layers = list(layers)

    def forward(self, x, mask=None, rng=None):
        caches = []
        for layer in self.layers:
            x, cache = layer.forward(x, mask=mask, rng=rng)
            caches.append(cache)
        return x, (caches,)

    def backward(self, dy, cache):
        caches, = cache
        for layer, layer_cache in zip(reversed(self.layers), reversed(caches)):
            dy = layer.backward(dy, layer_cache)
        return dy


class Residual(Layer):
    """y = x + f(x). Backward: dx = dy + df/dx^T dy. The inner layer must keep the shape of x.

    Raises ValueError when it does not, TypeError for a recurrent layer or something that is not a Layer.
    """

    def __init__(self, layer):
        _refuse_recurrent("Residual", [layer], "add the shortcut around its y instead")
        self.layer = layer

    def forward(self, x, mask=None, rng=None):
        f, cache = self.layer.forward(x, mask=mask, rng=rng)
        if f.shape != x.shape:
            raise ValueError(f"Residual: the inner layer maps {x.shape} to {f.shape}; expected the same shape")
        return x + f, (cache,)

    def backward(self, dy, cache):
        layer_cache, = cache
        return dy + self.layer.backward(dy, layer_cache)


def _refuse_recurrent(owner, layers, instead):
    for layer in layers:
        if not isinstance(layer, Layer):
            raise TypeError(f"{owner}: got a {type(layer).__name__}; expected layers")
        if getattr(layer, "recurrent", False):
            raise TypeError(f"{owner}: {type(layer).__name__} is recurrent and returns a state; {instead}")
