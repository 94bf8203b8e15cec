"""A layer under test: its tensors in float64, its outputs, and the gradients that its backward claims."""

import copy
import inspect
from types import ModuleType

import numpy as np

from minigrad.backend import array_module, asnumpy
from minigrad.layer import Layer
from minigrad.parameter import Parameter
from minigrad.tree import tree_leaves, tree_map

CONSTANTS = ("mask", "memory_mask", "rng", "target", "targets")     # arguments that have no gradient
JITTER = 0.1
ROUNDINGS = 10 * 2.0**-52
NUDGE = 1e-3                       # a hundred times eps


class ContractError(Exception):
    """What forward or backward returned does not have the structure that the contract asks for."""


def is_array(leaf):
    """Whether it is an array of NumPy or CuPy, or a NumPy scalar; not any object with a dtype (a type, for example)."""
    if isinstance(leaf, np.generic):
        return True
    try:
        return hasattr(leaf, "dtype") and array_module(leaf) is not None
    except TypeError:
        return False


def is_float_array(leaf):
    return is_array(leaf) and leaf.dtype.kind == "f"


def host(array):
    """The array, or a NumPy scalar as a 0-d array, on the host."""
    return np.asarray(array) if isinstance(array, np.generic) else asnumpy(array)


# ---- what a layer holds ----------------------------------------------------------------------------------

def find_parameters(layer):
    """(name, Parameter) of a layer, or of any other object that holds Parameters as a layer does."""
    if not isinstance(layer, Layer):
        held, layer = _members(layer), Layer()
        vars(layer).update(held)
    return layer.named_parameters()


def held(owner, path="", seen=None):
    """Yield (dotted path, value) of everything that a layer holds, at any depth: Parameters, arrays, settings."""
    seen = {} if seen is None else seen
    members = {} if isinstance(owner, Parameter) or is_array(owner) else _members(owner)
    if not members:
        yield path, owner
    elif id(owner) not in seen:
        seen[id(owner)] = owner
        for key, value in members.items():
            yield from held(value, f"{path}.{key}" if path else str(key), seen)


def _members(owner):
    if isinstance(owner, dict):
        return owner
    if isinstance(owner, list | tuple | set | frozenset):
        return dict(enumerate(owner))
    if isinstance(owner, ModuleType | type):
        return {}
    found = dict(getattr(owner, "__dict__", {}))
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{kind.__name__.lstrip('_')}{slot}" if private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(owner, name):
                found[name] = getattr(owner, name)
    return found


# ---- the layer -------------------------------------------------------------------------------------------

class LayerUnderTest:
    """Holds float64 copies of a layer's inputs and, while it is entered (`with`), of its parameters.

    tensors     {name: array} of everything that has a gradient: inputs by argument name, parameters by dotted name
    dout        the random upstream gradient: the checked scalar is L = sum <dout, outputs>
    flat_dout   the same as one vector on the host; `size` is the norm of <dout, outputs>
    floor       the rounding error allowed in any gradient, however small the gradient is
    """

    def __init__(self, layer, inputs, keywords, seed):
        self.layer, self.random = layer, np.random.default_rng(seed)
        self.signature = inspect.signature(layer.forward)
        bound = self.signature.bind(*inputs, **keywords)
        bound.apply_defaults()
        self.rng = bound.arguments.get("rng")
        self.arguments = {name: value if name == "rng" else tree_map(_to_float64, value)
                          for name, value in bound.arguments.items()}
        self.inputs = {name: leaf for argument in self.slots(required=True)
                       for name, leaf in tree_leaves(self.arguments[argument], argument) if is_float_array(leaf)}
        self.parameters = dict(find_parameters(layer))
        self.dout = None

    def __enter__(self):
        """Convert the parameters to float64 and move them off special values (a gain of 1, a bias of 0 hide faults)."""
        self.kept = {name: (p.value, p.grad) for name, p in self.parameters.items()}
        for p in self.parameters.values():
            xp = array_module(p.value)
            value = xp.array(p.value, dtype="float64", order="C")
            value += JITTER * xp.asarray(self.random.standard_normal(value.shape))
            p.value, p.grad = value, xp.zeros_like(value)
        return self

    def __exit__(self, *error):
        for name, p in self.parameters.items():
            p.value, p.grad = self.kept[name]

    @property
    def tensors(self):
        return {**self.inputs, **{name: p.value for name, p in self.parameters.items()}}

    def slots(self, required=False):
        """The arguments that have a slot in what backward returns; unless `required`, those left at None too."""
        names = [name for name in self.arguments if name not in CONSTANTS]
        with_arrays = [n for n in names if any(is_float_array(leaf) for _, leaf in tree_leaves(self.arguments[n]))]
        return with_arrays if required else [n for n in names if n in with_arrays or self.arguments[n] is None]

    def nudge(self):
        """Move every tensor a little, off the kinks."""
        for tensor in self.tensors.values():
            tensor += NUDGE * array_module(tensor).asarray(self.random.standard_normal(tensor.shape))

    # ---- the layer's answers -----------------------------------------------------------------------------

    def forward(self, other=False):
        """(output tree, cache), every call with an equally seeded generator; `other`: with other inputs and seed."""
        arguments = {name: tree_map(_another, value) for name, value in self.arguments.items() if name != "rng"} \
            if other else dict(self.arguments)
        if self.rng is not None:
            fresh = isinstance(self.rng, int | np.integer)
            arguments["rng"] = np.random.default_rng(self.rng) if fresh else copy.deepcopy(self.rng)
            if other:
                arguments["rng"].random()
        bound = inspect.BoundArguments(self.signature, arguments)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):      # what is not finite is reported
            answer = self.layer.forward(*bound.args, **bound.kwargs)
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise ContractError(f"forward returned {_kind(answer)}; expected the pair (y, cache)")
        return tree_map(lambda leaf: np.asarray(leaf) if isinstance(leaf, np.generic) else leaf, answer[0]), answer[1]

    def outputs(self):
        """The floating-point outputs, as one new vector on the host."""
        leaves = [asnumpy(leaf).ravel() for _, leaf in tree_leaves(self.forward()[0]) if is_float_array(leaf)]
        return np.concatenate(leaves)

    def draw_upstream(self, out):
        """A random gradient for every floating-point output; None for the others."""
        self.dout = tree_map(lambda leaf: _normal_like(self.random, leaf) if is_float_array(leaf) else None, out)
        leaves = [asnumpy(leaf).ravel() for _, leaf in tree_leaves(self.dout)]
        if not sum(leaf.size for leaf in leaves):
            raise ContractError("forward returns no floating-point output")
        self.flat_dout = np.concatenate(leaves)
        with np.errstate(invalid="ignore", over="ignore"):
            self.size = float(np.linalg.norm(self.flat_dout * self.outputs()))
        self.floor = ROUNDINGS * min(self.size, float(np.linalg.norm(self.flat_dout)))
        if not np.isfinite(self.outputs()).all():
            moved = f" (the parameters moved by about {JITTER:g})" if self.parameters else ""
            raise ContractError(f"forward's output is not finite at these inputs{moved}: nothing to compare there")

    def backward(self, cache, dout=None):
        """{name: gradient} from zeroed gradients. Raises ContractError for a wrong structure or shape."""
        for p in self.parameters.values():
            p.grad[...] = 0
        return self.collect(self.layer.backward(self.dout if dout is None else dout, cache))

    def collect(self, returned):
        """{name: gradient} of what backward returned and of what it added into the parameters (copies)."""
        gradients = self._input_gradients(returned)
        gradients.update((name, p.grad) for name, p in self.parameters.items())
        for name, tensor in self.tensors.items():
            gradient = gradients.get(name)
            if gradient is None:
                raise ContractError(f"backward returned no gradient for {name}")
            if not is_array(gradient):
                raise ContractError(f"the gradient of {name} is {_kind(gradient)}; expected an array")
            if gradient.shape != tensor.shape:
                raise ContractError(f"the gradient of {name} has shape {gradient.shape}; expected {tensor.shape}")
        return {name: array_module(tensor).array(gradients[name]) for name, tensor in self.tensors.items()}

    def _input_gradients(self, returned):
        required, slots = self.slots(required=True), self.slots()
        every = [name for name in self.arguments if name not in CONSTANTS]       # ids too, whose gradient is None
        if not required and returned is None:
            return {}
        grads = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        names = next((names for names in (slots, every) if len(names) == len(grads)), required)
        if len(grads) != len(names):
            raise ContractError(f"backward returned {len(grads)} gradients; expected one for each of "
                                f"{', '.join(required) or 'no array input'}")
        found = {}
        for argument, gradient in zip(names, grads):
            if argument in required:
                found.update(tree_leaves(gradient, argument))
        return found


def _to_float64(leaf):
    if not is_float_array(leaf):
        return leaf.copy() if is_array(leaf) else leaf
    return array_module(leaf).array(leaf, dtype="float64", order="C")


def _another(leaf):
    """An array of the same kind and shape with other values in it, integers still in their range."""
    if not is_array(leaf):
        return leaf
    return leaf + 0.5 if is_float_array(leaf) else array_module(leaf).flip(leaf).copy()


def _normal_like(random, leaf):
    return array_module(leaf).asarray(random.standard_normal(leaf.shape)).astype(leaf.dtype)


def _kind(answer):
    size = f" of {len(answer)}" if isinstance(answer, tuple | list) else ""
    return f"a {type(answer).__name__}{size}"
