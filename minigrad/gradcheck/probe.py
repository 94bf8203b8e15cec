"""A layer under test: its tensors in float64, its outputs, and the gradients that its backward claims."""

import copy
import inspect

import numpy as np

from minigrad.backend import array_module, asnumpy
from minigrad.layer import Layer
from minigrad.tree import tree_leaves, tree_map

CONSTANTS = ("mask", "memory_mask", "rng", "target", "targets")     # arguments that have no gradient
JITTER = 0.1


class ContractError(Exception):
    """backward's answer does not have the structure that the contract asks for."""


def is_float_array(leaf):
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and leaf.dtype.kind == "f"


class Probe:
    """Holds float64 copies of a layer's inputs and, while it is entered (`with`), of its parameters.

    tensors     {name: array} of everything that has a gradient: inputs by argument name, parameters by dotted name
    dout        the random upstream gradient: the checked scalar is L = sum <dout, outputs>
    """

    def __init__(self, layer, inputs, keywords, seed):
        self.layer, self.random = layer, np.random.default_rng(seed)
        self.signature = inspect.signature(layer.forward)
        bound = self.signature.bind(*inputs, **keywords)
        bound.apply_defaults()
        self.rng = bound.arguments.get("rng")
        self.arguments = {name: value if name == "rng" else tree_map(_to_float64, value)
                          for name, value in bound.arguments.items()}
        self.parameters = dict(layer.named_parameters()) if isinstance(layer, Layer) else {}
        self.dout = None

    def __enter__(self):
        """Convert the parameters to float64 and move them off special values (a gain of 1, a bias of 0 hide faults)."""
        self.kept = {name: (p.value, p.grad) for name, p in self.parameters.items()}
        for p in self.parameters.values():
            noise = array_module(p.value).asarray(self.random.standard_normal(p.value.shape))
            p.value = p.value.astype("float64") + JITTER * noise
            p.grad = array_module(p.value).zeros_like(p.value)
        self.inputs = {name: leaf for argument in self.slots(required=True)
                       for name, leaf in tree_leaves(self.arguments[argument], argument) if is_float_array(leaf)}
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

    # ---- the layer's answers -----------------------------------------------------------------------------

    def forward(self):
        """(output tree, cache), every call with an equally seeded generator."""
        arguments = dict(self.arguments)
        if self.rng is not None:
            fresh = isinstance(self.rng, int | np.integer)
            arguments["rng"] = np.random.default_rng(self.rng) if fresh else copy.deepcopy(self.rng)
        bound = self.signature.bind_partial()
        bound.arguments.update(arguments)
        return self.layer.forward(*bound.args, **bound.kwargs)

    def outputs(self):
        """The floating-point outputs, flat, on the host."""
        return [asnumpy(leaf).flatten() for _, leaf in tree_leaves(self.forward()[0]) if is_float_array(leaf)]

    def draw_upstream(self, out):
        """A random gradient for every floating-point output; None for the others."""
        self.dout = tree_map(lambda leaf: _normal_like(self.random, leaf) if is_float_array(leaf) else None, out)
        self.flat_dout = [asnumpy(leaf).ravel() for _, leaf in tree_leaves(self.dout)]

    def backward(self, cache, dout=None):
        """{name: gradient} from zeroed gradients. Raises ContractError for a wrong structure or shape."""
        self.zero_grad()
        return self.collect(self.layer.backward(self.dout if dout is None else dout, cache))

    def zero_grad(self):
        for p in self.parameters.values():
            p.grad[...] = 0

    def collect(self, returned):
        """{name: gradient} of what backward returned and of what it added into the parameters (copies)."""
        gradients = self._input_gradients(returned)
        gradients.update((name, p.grad) for name, p in self.parameters.items())
        for name, tensor in self.tensors.items():
            gradient = gradients.get(name)
            if gradient is None:
                raise ContractError(f"backward returned no gradient for {name}")
            if gradient.shape != tensor.shape:
                raise ContractError(f"the gradient of {name} has shape {gradient.shape}; expected {tensor.shape}")
        return {name: gradients[name].copy() for name in self.tensors}

    def _input_gradients(self, returned):
        required, slots = self.slots(required=True), self.slots()
        if not required and returned is None:
            return {}
        grads = tuple(returned) if isinstance(returned, tuple | list) and not hasattr(returned, "dtype") else (returned,)
        names = slots if len(grads) == len(slots) else required
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
        return leaf.copy() if hasattr(leaf, "dtype") else leaf
    return array_module(leaf).array(leaf, dtype="float64", order="C")


def _normal_like(random, leaf):
    return array_module(leaf).asarray(random.standard_normal(leaf.shape)).astype(leaf.dtype)
