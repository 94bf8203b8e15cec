"""Parameter: a learned array and its gradient, into which layers add."""

from minigrad.backend import array_module


class Parameter:
    """A learned array.

    value   the array; layers read it, optimizers write it in place
    grad    same shape, dtype and device; layers add (+=) into it, `zero_grad()` fills it with zeros in place
    name    the paper's symbol ("W"); the dotted name within a model comes from `Layer.named_parameters`

    Two weights are tied by sharing one Parameter object: it is listed, updated and saved once.

    Raises TypeError if value is not an array of floating-point numbers.
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


def unique_parameters(parameters, owner):
    """The parameters as a list, a shared one once.

    Raises TypeError if one is not a Parameter, ValueError if there are none (a generator can be consumed only once).
    """
    if not hasattr(parameters, "__iter__"):
        raise TypeError(f"{owner}: got a single {type(parameters).__name__}; expected an iterable of Parameters, "
                        "layer.parameters() for example")
    unique = {}
    for parameter in parameters:
        if not isinstance(parameter, Parameter):
            raise TypeError(f"{owner}: got a {type(parameter).__name__} among the parameters; expected Parameters")
        unique[id(parameter)] = parameter
    if not unique:
        raise ValueError(f"{owner}: got no parameters (a generator is empty once it has been walked); "
                         "expected layer.parameters()")
    return list(unique.values())
