"""What an object holds: its attributes, its Parameters, and the Parameters that nobody finds there."""

from collections import deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

from minigrad.layer import Layer
from minigrad.parameter import Parameter

CLOSED = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType, np.ndarray, np.generic, np.dtype, str, bytes,
          int, float, complex, type(None))             # nothing of the layer's own is looked for in these
NEITHER = "it is neither checked nor trained"


def members(owner):
    """{name: value} of an object's attributes, those in __slots__ too."""
    found = dict(getattr(owner, "__dict__", {}))
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{kind.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__dict__", "__weakref__") and hasattr(owner, name):
                found.setdefault(name, getattr(owner, name))
    return found


def parameters_of(layer):
    """(name, Parameter) of a layer, or of any other object that holds Parameters as a layer does."""
    if not isinstance(layer, Layer):
        held, layer = members(layer), Layer()
        vars(layer).update(held)
    return layer.named_parameters()


def strays(layer):
    """A sentence for each Parameter below a layer that `named_parameters` does not find, since no Layer holds it."""
    known = [parameter for _, parameter in parameters_of(layer)]
    return [_stray(path, holder) for path, parameter, holder in _below(layer)
            if all(parameter is not other for other in known)]


def _stray(path, holder):
    if isinstance(holder, Layer):
        return f"the Parameter {path} is held where {type(holder).__name__}.named_parameters does not look: {NEITHER}"
    return f"the Parameter {path} is held by a {type(holder).__name__}, which is no Layer: {NEITHER}"


def _below(layer):
    """Yield (dotted path, Parameter, the object that holds it) of all below a layer, each object visited once."""
    waiting, seen = [("", layer, layer)], {}
    while waiting:
        path, value, holder = waiting.pop()
        if (isinstance(value, CLOSED) and value is not layer) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Parameter):
            yield path, value, holder
            continue
        if not isinstance(value, dict | list | tuple):
            holder = value
        waiting += [(f"{path}.{key}" if path else str(key), item, holder) for key, item in reversed(_items(value))]


def _items(value):
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(enumerate(value))
    return list((value if isinstance(value, dict) else members(value)).items())
