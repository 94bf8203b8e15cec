"""What a numeric gradient cannot see: the contract between forward, cache and backward. Each rule yields sentences."""

import numpy as np

from minigrad.backend import array_module
from minigrad.gradcheck.layer_under_test import ContractError, held, host, is_array, is_float_array
from minigrad.parameter import Parameter
from minigrad.tree import tree_leaves, tree_map

SAME = 1e-11                       # of the largest gradient: room for sums in another order
FACTOR = -3000.0                   # of dy: no power of two, so that single precision shows; large, as clipping is


# ---- what a call may have written ------------------------------------------------------------------------

def snapshot(tree):
    """{path: host copy} of every array in a tree; objects that are not arrays are left out."""
    return {name: host(leaf).copy() for name, leaf in tree_leaves(tree) if is_array(leaf)}


def changed(before, after):
    """The paths at which two snapshots differ."""
    return [name for name, array in before.items() if name not in after
            or not np.array_equal(array, after[name], equal_nan=array.dtype.kind == "f")]


class Watch:
    """Detects writes: `written()` names what has changed in the arguments, the layer and the given trees."""

    def __init__(self, tested, **trees):
        self.tested, self.trees = tested, trees
        self.arrays, self.held = self._arrays(), self._held()

    def _arrays(self):
        named = {f"the parameter {name}": parameter.value for name, parameter in self.tested.parameters.items()}
        named.update({f"its input {argument}": value for argument, value in self.tested.arguments.items()
                      if argument != "rng"})
        return snapshot({**named, **self.trees})

    def _held(self):
        return {path: (value, host(value).copy() if is_array(value) else None)
                for path, value in held(self.tested.layer)}

    def written(self):
        yield from changed(self.arrays, self._arrays())
        now = self._held()
        for path in {**self.held, **now}:
            (value, kept), (new, new_kept) = self.held.get(path, (None, None)), now.get(path, (None, None))
            equal = value is new or (isinstance(value, int | float | str) and type(value) is type(new) and value == new)
            if not equal or (kept is not None and changed({"": kept}, {"": new_kept})):
                yield f"the layer's attribute {path}"


def strays(tested):
    """A sentence for each Parameter that the layer holds and `named_parameters` does not find."""
    known = [id(parameter) for parameter in tested.parameters.values()]
    for path, value in held(tested.layer):
        if isinstance(value, Parameter) and id(value) not in known:
            known.append(id(value))
            yield (f"the Parameter {path} is held by an object that is no Layer, or in a set: it is neither checked "
                   "nor trained")


# ---- forward ---------------------------------------------------------------------------------------------

def check_forward(report, tested):
    """Purity: nothing written, the same answer twice, double precision kept. Returns out, cache."""
    watch = Watch(tested)
    out, cache = tested.forward()
    problems = report.problems
    problems += [f"forward edits {what}; it must write neither its inputs nor the layer" for what in watch.written()]
    problems += strays(tested)
    first = snapshot(out)
    if changed(first, snapshot(tested.forward()[0])):
        problems.append("forward is not repeatable: two calls with the same inputs and equally seeded rng differ")
    for name, leaf in [*tree_leaves(out, "output"), *tree_leaves(cache, "cache")]:
        if is_float_array(leaf) and leaf.dtype.itemsize < 8:
            problems.append(f"{name} is {leaf.dtype} for float64 inputs and parameters: lower precision inside")
    return out, cache


# ---- backward --------------------------------------------------------------------------------------------

def check_backward(report, tested, cache):
    """Nothing written but gradients, those added in place; repeatable; linear in dy; independent of other uses.

    Returns the gradients.
    """
    watch = Watch(tested, **{"dy, the gradient handed to it": tested.dout, "its cache": cache})
    arrays = {name: p.grad for name, p in tested.parameters.items()}
    gradients = tested.backward(cache)
    problems = report.problems
    problems += [f"backward edits {what}; it must write nothing but the parameters' gradients"
                for what in watch.written()]
    for name, array in arrays.items():
        if tested.parameters[name].grad is not array:
            problems.append(f"the gradient array of {name} is replaced by another one; expected += into the same array")
    for name, gradient in gradients.items():
        if gradient.dtype != np.float64:
            problems.append(f"the gradient of {name} is {gradient.dtype} for float64 inputs: lower precision inside")
    rules = [_twice, _linear, _two_uses] + ([_none_is_zero] if getattr(tested.layer, "recurrent", False) else [])
    for rule in rules:
        problems += rule(tested, cache, gradients)
    return gradients


def _differ(tested, expected, got, factor=1.0):
    """The names whose gradients differ from `factor` times the expected ones."""
    expected = {name: host(gradient) * factor for name, gradient in expected.items()}
    sizes = [np.abs(a[np.isfinite(a)]).max(initial=0.0) for a in expected.values()]
    room = max(SAME * max(sizes, default=0.0), abs(factor) * tested.floor)
    return [name for name, a in expected.items()
            if not np.allclose(a, host(got[name]), rtol=0, atol=room, equal_nan=True)]


def _twice(tested, cache, gradients):
    returned = tested.layer.backward(tested.dout, cache)                # without zeroing: parameters must double
    again = tested.collect(returned)
    for name in _differ(tested, gradients, again):
        if name in tested.inputs:
            yield f"the gradient of {name} differs when backward runs twice on one cache"
    for name in _differ(tested, gradients, again, 2.0):
        if name in tested.parameters:
            yield f"the gradient of {name} does not double when backward runs twice: assigned (=), not added (+=)?"


def _linear(tested, cache, gradients):
    for name in _differ(tested, gradients, tested.backward(cache, _times(FACTOR, tested.dout)), FACTOR):
        yield (f"the gradient of {name} is not linear in the upstream gradient: {FACTOR:g} dy does not give {FACTOR:g} "
               "times as much (clipped, or rounded to lower precision?)")


def _two_uses(tested, cache, gradients):
    """forward a, forward b, backward a: a's gradients must not have changed; and the same the other way round."""
    out, cache = tested.forward()
    before = snapshot([out, cache])
    _, other_cache = tested.forward(other=True)
    if changed(before, snapshot([out, cache])):
        yield "a later forward writes into what an earlier one returned"
    for sentence in ("backward reads what a later forward stored, not its own cache",
                     "backward depends on a backward that ran before it"):
        names = _differ(tested, gradients, tested.backward(cache))
        if names:
            yield f"{sentence} (gradient of {', '.join(names)})"
        tested.backward(other_cache)


def _none_is_zero(tested, cache, gradients):
    """A recurrent layer: backward returns a pair, and None in the upstream pair (dy, dstate) means zero."""
    returned = tested.layer.backward(tested.dout, cache)
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        yield "backward of a recurrent layer must return the pair (dx, dstate0), for state=None too"
    if not isinstance(tested.dout, tuple | list) or len(tested.dout) != 2:
        yield "forward of a recurrent layer must return ((y, state), cache)"
        return
    dy, dstate = tested.dout
    cases = [("dy", (None, dstate), (_times(0.0, dy), dstate)), ("dstate", (dy, None), (dy, _times(0.0, dstate)))]
    for n, (name, leaf) in enumerate(tree_leaves(dstate, "dstate")):
        cases.append((name, (dy, _replaced(dstate, n, None)), (dy, _replaced(dstate, n, leaf * 0))))
    for name, with_none, with_zero in cases:
        expected = tested.backward(cache, with_zero)
        try:
            wrong = _differ(tested, expected, tested.backward(cache, with_none))
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
