"""What a numeric gradient cannot see: the contract between forward, cache and backward. Each rule yields sentences."""

import numpy as np

from minigrad.backend import array_module
from minigrad.gradcheck.under_test import ContractError, host, is_array, is_float_array
from minigrad.layer import Layer
from minigrad.parameter import Parameter
from minigrad.tree import tree_leaves, tree_map

SAME = 1e-11                       # of the largest gradient: room for sums in another order
FACTOR = -3000.0                   # of dy: no power of two, so that single precision shows; large, as clipping is


# ---- what a call may have written ------------------------------------------------------------------------

def attributes(owner, path="", seen=()):
    """Yield (dotted path, value) of all that a layer holds; a Parameter, and what is no Layer, as an object."""
    if id(owner) in seen:
        return
    if isinstance(owner, list | tuple):
        items = enumerate(owner)
    elif isinstance(owner, dict):
        items = owner.items()
    elif isinstance(owner, Layer) or not path:
        items = getattr(owner, "__dict__", {}).items()
    else:
        yield path, owner
        return
    for key, value in items:
        yield from attributes(value, f"{path}.{key}" if path else str(key), (*seen, id(owner)))


class Watch:
    """Remembers, and tells with `written()`, what has been written of a layer, its arguments and some trees."""

    def __init__(self, layer, **trees):
        self.layer, self.trees = layer, trees
        self.before = {what: host(value).copy() if is_array(value) else value for what, value in self.all()}

    def all(self):
        arrays = {**{f"the parameter {name}": p.value for name, p in self.layer.parameters.items()},
                  **{f"its input {name}": value for name, value in self.layer.arguments.items() if name != "rng"},
                  **self.trees}
        yield from ((what, leaf) for what, leaf in tree_leaves(arrays) if is_array(leaf))
        yield from ((f"the layer's attribute {path}", value) for path, value in attributes(self.layer.layer))

    def written(self):
        after = dict(self.all())
        return [what for what in {**self.before, **after} if what not in self.before or what not in after
                or not _same(self.before[what], after[what])]


def _same(before, after):
    if isinstance(before, np.ndarray):
        return is_array(after) and np.array_equal(before, host(after), equal_nan=before.dtype.kind == "f")
    return before is after or (isinstance(before, int | float | str) and before == after)


def snapshot(tree):
    """Copies of a tree's arrays."""
    return [host(leaf).copy() for _, leaf in tree_leaves(tree) if is_array(leaf)]


# ---- forward ---------------------------------------------------------------------------------------------

def check_forward(layer):
    """Purity: nothing written, the same answer twice, double precision kept. Returns out, cache, problems."""
    watch = Watch(layer)
    out, cache = layer.forward()
    problems = [f"forward edits {what}; it must write neither its inputs nor the layer" for what in watch.written()]
    problems += strays(layer)
    if not all(map(_same, snapshot(out), snapshot(layer.forward()[0]))):
        problems.append("forward is not repeatable: two calls with the same inputs and equally seeded rng differ")
    for name, leaf in [*tree_leaves(out, "output"), *tree_leaves(cache, "cache")]:
        if is_float_array(leaf) and leaf.dtype.itemsize < 8:
            problems.append(f"{name} is {leaf.dtype} for float64 inputs and parameters: lower precision inside")
    return out, cache, problems


def strays(layer):
    """Parameters in an attribute's attributes that `named_parameters` does not find, since no Layer holds them."""
    known = {id(parameter) for parameter in layer.parameters.values()}
    for path, value in attributes(layer.layer):
        for name, inner in {} if isinstance(value, type) else getattr(value, "__dict__", {}).items():
            if isinstance(inner, Parameter) and id(inner) not in known:
                yield (f"the Parameter {path}.{name} is held by a {type(value).__name__}, which is no Layer: it is "
                       "neither checked nor trained")


# ---- backward --------------------------------------------------------------------------------------------

def check_backward(layer, cache):
    """Nothing written but gradients, those added in place; repeatable; linear in dy; blind to other uses.

    Returns gradients, problems.
    """
    watch = Watch(layer, **{"dy, the gradient handed to it": layer.dout, "its cache": cache})
    arrays = {name: p.grad for name, p in layer.parameters.items()}
    gradients = layer.backward(cache)
    problems = [f"backward edits {what}; it must write nothing but the parameters' gradients"
                for what in watch.written()]
    for name, array in arrays.items():
        if layer.parameters[name].grad is not array:
            problems.append(f"the gradient array of {name} is replaced by another one; expected += into the same array")
    for name, gradient in gradients.items():
        if gradient.dtype != np.float64:
            problems.append(f"the gradient of {name} is {gradient.dtype} for float64 inputs: lower precision inside")
    rules = [_twice, _linear, _two_uses] + ([_none_is_zero] if getattr(layer.layer, "recurrent", False) else [])
    for rule in rules:
        problems += rule(layer, cache, gradients)
    return gradients, problems


def _differ(layer, expected, got, factor=1.0):
    """The names whose gradients differ from `factor` times the expected ones."""
    expected = {name: host(gradient) * factor for name, gradient in expected.items()}
    sizes = [np.abs(a[np.isfinite(a)]).max(initial=0.0) for a in expected.values()]
    room = max(SAME * max(sizes, default=0.0), abs(factor) * layer.floor)
    return [name for name, a in expected.items()
            if not np.allclose(a, host(got[name]), rtol=0, atol=room, equal_nan=True)]


def _twice(layer, cache, gradients):
    again = layer.collect(layer.layer.backward(layer.dout, cache))       # without zeroing: parameters must double
    for name in _differ(layer, gradients, again):
        if name in layer.inputs:
            yield f"the gradient of {name} differs when backward runs twice on one cache"
    for name in _differ(layer, gradients, again, 2.0):
        if name in layer.parameters:
            yield f"the gradient of {name} does not double when backward runs twice: assigned (=), not added (+=)?"


def _linear(layer, cache, gradients):
    for name in _differ(layer, gradients, layer.backward(cache, _times(FACTOR, layer.dout)), FACTOR):
        yield (f"the gradient of {name} is not linear in the upstream gradient: {FACTOR:g} dy does not give {FACTOR:g} "
               "times as much (clipped, or rounded to lower precision?)")


def _two_uses(layer, cache, gradients):
    """forward a, forward b, backward a: a's gradients must not have changed; and the same the other way round."""
    out, cache = layer.forward()
    before = snapshot([out, cache])
    _, other_cache = layer.forward(other=True)
    if not all(map(_same, before, snapshot([out, cache]))):
        yield "a later forward writes into what an earlier one returned"
    for sentence in ("backward reads what a later forward left elsewhere, not its own cache",
                     "backward depends on a backward that ran before it"):
        names = _differ(layer, gradients, layer.backward(cache))
        if names:
            yield f"{sentence} (gradient of {', '.join(names)})"
        layer.backward(other_cache)


def _none_is_zero(layer, cache, gradients):
    """A recurrent layer: backward returns a pair, and None in the upstream pair (dy, dstate) means zero."""
    returned = layer.layer.backward(layer.dout, cache)
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        yield "backward of a recurrent layer must return the pair (dx, dstate0), for state=None too"
    if not isinstance(layer.dout, tuple | list) or len(layer.dout) != 2:
        yield "forward of a recurrent layer must return ((y, state), cache)"
        return
    dy, dstate = layer.dout
    cases = [("dy", (None, dstate), (_times(0.0, dy), dstate)), ("dstate", (dy, None), (dy, _times(0.0, dstate)))]
    for n, (name, leaf) in enumerate(tree_leaves(dstate, "dstate")):
        cases.append((name, (dy, _replaced(dstate, n, None)), (dy, _replaced(dstate, n, leaf * 0))))
    for name, with_none, with_zero in cases:
        expected = layer.backward(cache, with_zero)
        try:
            wrong = _differ(layer, expected, layer.backward(cache, with_none))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, ContractError) as error:
            yield f"backward fails when {name} is None, which means zero ({type(error).__name__}: {error})"
            continue
        if wrong:
            yield f"{name} = None must mean zero, but gives other gradients of {', '.join(wrong)}"


def _times(factor, tree):
    return tree_map(lambda leaf: array_module(leaf).asarray(factor * leaf), tree)


def _replaced(tree, position, value):
    """The tree with its leaf number `position` replaced."""
    count = iter(range(len(list(tree_leaves(tree)))))
    return tree_map(lambda leaf: value if next(count) == position else leaf, tree)
