"""Layer: the contract of every layer. Sequential and Residual: layers made of layers.

    y, cache = layer.forward(x, ..., mask=None, rng=None)    # pure: writes neither the layer nor its inputs
    dx       = layer.backward(dy, cache)                     # adds (+=) into Parameter.grad
    y        = layer(x, ...)                                 # the cache is dropped

The cache is all that passes from forward to backward. Two uses of a layer give two caches, which can be used in any
order, so shared layers, tied weights and truncated backpropagation through time need no special care.
`rng=None` means evaluation: no random numbers are drawn.
"""

import numpy as np

from minigrad.backend import on_host, to_device
from minigrad.parameter import Parameter
from minigrad.tensors import fill_exactly, load_tensors, save_tensors


class Layer:
    """Base of all layers. A subclass sets its Parameters and layers as attributes and writes forward and backward.

    buffers   the names of its arrays that are not learned: they are moved and saved with the Parameters
    """

    buffers = ()

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
        """Yield (name, value) of the Parameters and Layers in attributes, or in lists, tuples and dicts there."""
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

    def count_parameters(self):
        """The number of learned numbers, a shared Parameter counted once."""
        return sum(parameter.value.size for parameter in self.parameters())

    def named_buffers(self):
        """Yield (dotted name, array) of the `buffers` of this layer and its sublayers; a shared layer's come once."""
        seen = set()
        for prefix, layer in _layers(self):
            if id(layer) not in seen:
                seen.add(id(layer))
                for name in layer.buffers:
                    yield prefix + name, getattr(layer, name)

    def named_arrays(self):
        """{dotted name: array} of the Parameters' values and the buffers, the arrays themselves."""
        return {**{name: parameter.value for name, parameter in self.named_parameters()}, **dict(self.named_buffers())}

    def add_gradients(self, **gradients):
        """Add each gradient to the Parameter of that name: `add_gradients(W=dW, b=db)`."""
        for name, gradient in gradients.items():
            getattr(self, name).grad += gradient

    def save(self, path):
        """Write the Parameters' values and the buffers to a safetensors file."""
        save_tensors(path, self.named_arrays())

    def load(self, path):
        """Fill the Parameters and buffers, in place, from a file of `save`; returns the layer.

        Every name, shape and dtype must match; else CheckpointError names one that does not, and nothing is changed.
        """
        fill_exactly(self.named_arrays(), load_tensors(path)[0], path)
        return self

    def validate(self):
        """Raise ArithmeticError if the parameters have values for which the formula is undefined.

        A layer with such values overrides this, and also calls it in forward if the arrays are on the host. On a
        GPU, where reading a value means waiting, the trainer calls it at log intervals.
        """
        for _, child in self.children():
            if isinstance(child, Layer):
                child.validate()

    def to_device(self, device):
        """Move all Parameters and buffers to 'cpu' or 'gpu', keeping the Parameter objects; returns the layer."""
        for parameter in self.parameters():
            parameter.value, parameter.grad = to_device((parameter.value, parameter.grad), device)
        for _, layer in _layers(self):
            for name in layer.buffers:
                setattr(layer, name, to_device(getattr(layer, name), device))
        return self

    def astype(self, dtype):
        """Convert every Parameter to a floating-point dtype, keeping the Parameter objects; returns the layer."""
        if np.dtype(dtype).kind != "f":
            raise TypeError(f"astype: dtype is {dtype!r}; expected a floating-point dtype")
        for parameter in self.parameters():
            parameter.value, parameter.grad = parameter.value.astype(dtype), parameter.grad.astype(dtype)
        return self

    def settings(self):
        """{name: value} of the attributes that are numbers, strings or flags: `repr` shows them after the shapes."""
        return {name: value for name, value in vars(self).items()
                if not name.startswith("_") and isinstance(value, bool | int | float | str)}

    def __repr__(self):
        shapes = [f"{name} {child.value.shape}" for name, child in self.children() if isinstance(child, Parameter)]
        own = ", ".join(shapes + [f"{name}={value!r}" for name, value in self.settings().items()])
        inner = [f"{name}: {child!r}" for name, child in self.children() if isinstance(child, Layer)]
        if not inner:
            return f"{type(self).__name__}({own})"
        lines = "\n".join([own, *inner] if own else inner).replace("\n", "\n    ")
        return f"{type(self).__name__}(\n    {lines}\n)"


def summary(layer):
    """A table of the Parameters, one a line (name, shape, dtype, count), and their total, as text."""
    rows = [(name, str(parameter.value.shape), str(parameter.value.dtype), f"{parameter.value.size:,}")
            for name, parameter in layer.named_parameters()]
    rows.append(("total", "", "", f"{layer.count_parameters():,}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(f"{name:<{a}}  {shape:<{b}}  {dtype:<{c}}  {count:>{d}}"
                     for (name, shape, dtype, count), (a, b, c, d) in ((row, widths) for row in rows))


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
    """(dotted prefix, layer) of the layer and all its sublayers; a shared one comes once for each place."""
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


def validate_on_host(layer, array):
    """Call `layer.validate()` if the array is on the host, where that needs no synchronisation."""
    if on_host(array):
        layer.validate()


class Sequential(Layer):
    """y = f_n(... f_2(f_1(x))): layers one after another. All get the same mask and rng.

    x is the first layer's input, y the last one's output. Backward calls the layers' backwards, last one first.

    Raises TypeError if one is not a Layer, and for a recurrent layer (use `Stack`, which carries states).
    """

    def __init__(self, *layers):
        _refuse_recurrent("Sequential", layers, "use minigrad.layers.Stack, which carries their states")
        self.layers = list(layers)

    def forward(self, x, mask=None, rng=None):
        caches = []
        for layer in self.layers:
            x, cache = layer.forward(x, mask=mask, rng=rng)
            caches.append(cache)
        return x, caches

    def backward(self, dy, cache):
        for layer, layer_cache in zip(reversed(self.layers), reversed(cache)):
            dy = layer.backward(dy, layer_cache)
        return dy


class Residual(Layer):
    """y = x + f(x). Backward: dx = dy + df/dx^T dy. The inner layer must keep the shape of x.

    Raises ValueError if it does not, TypeError for a recurrent layer or if it is not a Layer.
    """

    def __init__(self, layer):
        _refuse_recurrent("Residual", [layer], "add the shortcut around its y instead")
        self.layer = layer

    def forward(self, x, mask=None, rng=None):
        f, cache = self.layer.forward(x, mask=mask, rng=rng)
        if f.shape != x.shape:
            raise ValueError(f"Residual: the inner layer maps {x.shape} to {f.shape}; expected the same shape")
        return x + f, cache

    def backward(self, dy, cache):
        return dy + self.layer.backward(dy, cache)


def _refuse_recurrent(owner, layers, instead):
    for layer in layers:
        if not isinstance(layer, Layer):
            raise TypeError(f"{owner}: got a {type(layer).__name__}; expected layers")
        if getattr(layer, "recurrent", False):
            raise TypeError(f"{owner}: {type(layer).__name__} is recurrent and returns a state; {instead}")
