"""What a numeric gradient cannot see: the contract between forward, cache and backward. Each rule yields sentences."""

import numpy as np

from minigrad.backend import asnumpy
from minigrad.gradcheck.probe import is_float_array
from minigrad.tree import tree_leaves, tree_map

SAME = 1e-12                       # relative: room for a device whose sums are not repeatable to the last bit


def snapshot(tree):
    """{path: host copy} of every array in a tree; objects that are not arrays are left out."""
    return {name: asnumpy(leaf).copy() for name, leaf in tree_leaves(tree) if hasattr(leaf, "dtype")}


def changed(before, after):
    """The first path at which two snapshots differ, or None."""
    for name, array in before.items():
        if name not in after or not np.array_equal(array, after[name], equal_nan=array.dtype.kind == "f"):
            return name
    return None


def check_forward(probe):
    """Purity: nothing edited, the same answer twice, double precision kept. Returns out, cache, problems."""
    problems = []
    before = snapshot([probe.arguments, probe.tensors])
    out, cache = probe.forward()
    if changed(before, snapshot([probe.arguments, probe.tensors])):
        name = changed(before, snapshot([probe.arguments, probe.tensors])).partition(".")[2]
        problems.append(f"forward edits its input or parameter {name}")
    first = snapshot(out)
    if changed(first, snapshot(probe.forward()[0])):
        problems.append("forward is not repeatable: two calls with the same inputs and equally seeded rng differ")
    for name, leaf in tree_leaves(out, "output"):
        if is_float_array(leaf) and leaf.dtype != np.float64:
            problems.append(f"{name} is {leaf.dtype} for float64 inputs and parameters: lower precision inside")
    return out, cache, problems


def check_backward(probe, cache):
    """dy and cache untouched, repeatable, adding, linear in dy, blind to later forwards. Returns gradients, problems."""
    problems = []
    before = snapshot([probe.dout, cache])
    gradients = probe.backward(cache)
    after = changed(before, snapshot([probe.dout, cache]))
    if after:
        what = "dy, the gradient handed to it" if after.startswith("0.") or after == "0" else "its cache"
        problems.append(f"backward edits {what}")
    for name, gradient in gradients.items():
        if gradient.dtype != np.float64:
            problems.append(f"the gradient of {name} is {gradient.dtype} for float64 inputs: lower precision inside")
    problems += _twice(probe, cache, gradients)
    problems += _zero(probe, cache)
    problems += _two_uses(probe, gradients)
    return gradients, problems


def _differs(a, b, scale=1.0):
    a, b = asnumpy(a) * scale, asnumpy(b)
    return not np.allclose(a, b, rtol=SAME, atol=SAME * max(1.0, np.abs(b).max(initial=0.0)), equal_nan=True)


def _twice(probe, cache, gradients):
    returned = probe.layer.backward(probe.dout, cache)               # without zeroing: parameters must double
    for name, again in probe.collect(returned).items():
        if name in probe.parameters and _differs(gradients[name], again, 2.0):
            yield f"the gradient of {name} does not double when backward runs twice: assigned (=), not added (+=)?"
        elif name not in probe.parameters and _differs(gradients[name], again):
            yield f"the gradient of {name} differs when backward runs twice on one cache"


def _zero(probe, cache):
    for name, gradient in probe.backward(cache, tree_map(lambda leaf: leaf * 0, probe.dout)).items():
        if asnumpy(gradient).any():
            yield f"a zero upstream gradient gives a non-zero gradient of {name}"


def _two_uses(probe, gradients):
    """forward a, forward b, backward a: a's gradients must not have changed; and the same the other way round."""
    _, cache = probe.forward()
    kept = {name: tensor.copy() for name, tensor in probe.inputs.items()}
    for tensor in probe.inputs.values():
        tensor[...] = tensor + 0.5
    _, other_cache = probe.forward()
    for name, tensor in probe.inputs.items():
        tensor[...] = kept[name]
    yield from _same(probe, gradients, cache, "backward reads what a later forward left behind, not its own cache")
    probe.backward(other_cache)
    yield from _same(probe, gradients, cache, "backward depends on a backward that ran before it")


def _same(probe, gradients, cache, sentence):
    for name, again in probe.backward(cache).items():
        if _differs(gradients[name], again):
            yield f"{sentence} (gradient of {name})"
            return
