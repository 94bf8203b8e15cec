"""Parameter: an array that is learned, and the gradient that the layers add into."""

from minigrad.backend import array_module


class Parameter:
    """A learned array.

    value   the array; layers read it, optimizers write it in place
    grad    same shape, dtype and device; layers add (+=) into it, `zero_grad()` fills it with zeros in place
    name    the paper's symbol ("W"); the dotted name within a model comes from `Layer.named_parameters`

    Tying two weights is sharing one Parameter object: it is found, stepped and saved once.

    Raises TypeError when value is not an array of floating-point numbers.
    """

    def __init__(self, value, name="parameter"):
        xp = array_module(**{name: value})
        if value.dtype.kind != "f":
            raise TypeError(f"{name} has dtype {value.dtype}; expected floating-point numbers")
        self.value = value
        self.grad = xp.zeros_like(value)
        self.name = name

    def zero_grad(self):
        self.grad[...] = 0

    def __repr__(self):
        return f"Parameter({self.name}, shape={self.value.shape}, dtype={self.value.dtype})"
