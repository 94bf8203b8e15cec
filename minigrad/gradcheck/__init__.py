"""gradcheck: is this backward the derivative of that forward, and if not, where not?

    from minigrad import gradcheck
    report = gradcheck(layer, (x,), {"mask": mask})
    assert report.ok, report

or, from a shell: python -m minigrad.gradcheck minigrad.layers:LSTM --shape 3,7,4 --set d=4 --set h=5

The numeric side is central differences in float64 of L = sum <dout, outputs>, with a random upstream gradient dout
(all-ones is blind after layer norm and softmax; single precision cannot see below 1e-3), over every input and every
parameter. Parameters are moved by a little noise for the time of the check: a gain of 1 or a bias of 0 hides faults.
The layer contract is checked too (minigrad/gradcheck/rules.py): nothing edited, gradients added and not assigned,
nothing hidden between forward and backward, nothing in lower precision.
"""

import numpy as np

from minigrad.backend import array_module, asnumpy
from minigrad.check import check_choice, check_number
from minigrad.gradcheck import numeric
from minigrad.gradcheck.report import Report, Row
from minigrad.gradcheck.rules import check_backward, check_forward
from minigrad.gradcheck.under_test import NUDGE, ContractError, LayerUnderTest
from minigrad.layer import Layer

__all__ = ["Report", "Row", "gradcheck"]
DIRECTIONS = 3


def gradcheck(layer, inputs, keywords=None, *, mode="full", eps=1e-5, rtol=1e-6, atol=1e-8, seed=0):
    """Compare a layer's backward with central differences of its forward; returns a Report.

    layer       a Layer, or any object with forward and backward in the same contract (a loss, a function's namespace)
    inputs      tuple of arrays for forward's positional arguments
    keywords    dict of further arguments: mask, state, ...; `rng` may be a seed or a Generator, and every call gets
                an equally seeded one, so that a layer that draws random numbers can be checked
    mode        "full": every entry of every tensor; "direction": random directions through each tensor and through
                all together, for whole models (a tensor that fails is searched for a wrong entry; an error in one of
                n entries counts 1/sqrt(n) of what it does in full mode)
    eps         step of the differences (times |x| at an entry x larger than 1)
    rtol, atol  entries agree when |a - n| <= atol + rtol max(|a|, |n|); atol counts at most 1 % of the tensor's largest
                slope, so that a tensor of tiny gradients is compared too
    seed        of the upstream gradient, the noise and the directions

    A layer with `fast` set, or with such layers in it, is checked a second time with fast=False, in directions: the
    report says which of the two forms is wrong.

    Floating-point inputs are copied to float64; the layer's parameters are as before afterwards.
    A kink (ReLU at 0) is named in `notes`, not called an error, if the analytic value is a subgradient there; the
    check is then repeated, in directions, at a point nearby. An output that is not finite at the inputs themselves is a
    problem, and nothing is compared.
    Raises ValueError for a wrong mode or tolerance, TypeError for inputs that do not fit forward.
    """
    check_choice("gradcheck", "mode", mode, ("full", "direction"))
    check_number("gradcheck", "eps", eps, 0, open_low=True)
    check_number("gradcheck", "rtol", rtol, 0)
    check_number("gradcheck", "atol", atol, 0)
    if not isinstance(inputs, tuple | list):
        raise TypeError(f"gradcheck: inputs is a {type(inputs).__name__}; expected a tuple of arrays")
    if not isinstance(keywords, dict | None):
        raise TypeError(f"gradcheck: keywords is a {type(keywords).__name__}; expected a dict of forward's arguments")
    tolerances = numeric.Tolerances(eps, rtol, atol)
    report = _check(layer, inputs, keywords or {}, mode, tolerances, seed)
    loops = _fast_layers(layer)
    if loops:
        for inner in loops:
            inner.fast = False
        try:
            report.plain = _check(layer, inputs, keywords or {}, "direction", tolerances, seed)
        finally:
            for inner in loops:
                inner.fast = True
    return report


def _fast_layers(layer):
    """The layer and those in it whose `fast` is True, each once: they have a fast loop and run it."""
    found, waiting = {}, [layer]
    while waiting:
        layer = waiting.pop()
        if isinstance(layer, Layer) and id(layer) not in found:
            found[id(layer)] = layer
            waiting += [child for _, child in layer.children()]
    return [layer for layer in found.values() if getattr(layer, "fast", False) is True]


def _check(layer, inputs, keywords, mode, tolerances, seed):
    """The Report on one form of a layer."""
    report = Report(type(layer).__name__ if not isinstance(layer, type) else layer.__name__, mode)
    with LayerUnderTest(layer, inputs, keywords, seed) as tested:
        try:
            gradients = _check_rules(report, tested)
        except ContractError as error:
            report.problems.append(str(error))
            return report
        (_every_entry if mode == "full" else _directions)(report, tested, gradients, tolerances)
        if any(row.kinks for row in report.rows):
            _next_to_the_kinks(report, tested, tolerances)
    return report


def _check_rules(report, layer):
    """The gradients that backward claims; what breaks the contract goes into the report."""
    if not any(tensor.size for tensor in layer.tensors.values()):
        raise ContractError("nothing to compare: no floating-point input and no parameter")
    out, cache, problems = check_forward(layer)
    report.problems += problems
    layer.draw_upstream(out)
    gradients, problems = check_backward(layer, cache)
    report.problems += problems
    return gradients


def _every_entry(report, layer, gradients, tolerances):
    """Add a Row for each tensor, from all its entries."""
    for name, tensor in layer.tensors.items():
        if tensor.size:
            analytic = asnumpy(gradients[name]).ravel()
            lines = [numeric.entry(layer, tensor, n, tolerances) for n in range(tensor.size)]
            verdicts = numeric.compare(lines, analytic)
            worst = numeric.worst(verdicts)
            size = max(abs(v.numeric) for v in verdicts)
            rounded = numeric.rounded(lines, analytic, verdicts, [size] * len(lines))
            row = _add(report, name, tensor.shape, verdicts, rounded,
                       (_index(tensor, worst), float(analytic[worst]), verdicts[worst].numeric))
            row.errors = np.reshape([np.nan if v.status == "kink" else v.error for v in verdicts], tensor.shape)


def _directions(report, layer, gradients, tolerances):
    """Add a Row for each tensor, and one for all together, from random directions."""
    tensors = {name: tensor for name, tensor in layer.tensors.items() if tensor.size}
    groups = {name: [name] for name in tensors} | ({"all together": list(tensors)} if len(tensors) > 1 else {})
    for title, names in groups.items():
        arrays, grads = [tensors[name] for name in names], [gradients[name] for name in names]
        lines, analytic, sizes = zip(*[_random_line(layer, arrays, grads, tolerances) for _ in range(DIRECTIONS)])
        verdicts = numeric.compare(lines, analytic)
        worst = numeric.worst(verdicts)
        found, rounded, shape = ("a direction", analytic[worst], verdicts[worst].numeric), 0.0, arrays[0].shape
        if len(names) > 1:
            shape = (sum(array.size for array in arrays),)
        else:
            rounded = numeric.rounded(lines, analytic, verdicts, sizes)
            if verdicts[worst].error > 1:
                found = _wrong_entry(layer, arrays[0], grads[0], tolerances) or found
        _add(report, title, shape, verdicts, rounded, found)


def _index(tensor, position):
    return tuple(int(i) for i in np.unravel_index(position, tensor.shape))


def _add(report, name, shape, verdicts, rounded, found):
    """Add a Row, and the notes and problems that go with it, to the report; returns the Row."""
    wrong = sum(v.status == "wrong" for v in verdicts)
    kinks = sum(v.status in ("kink", "beside") for v in verdicts)
    row = Row(name, shape, wrong, kinks, len(verdicts), *found)
    report.rows.append(row)
    if wrong and not np.isfinite(row.numeric):
        report.notes.append(f"{name}: forward's output is not finite within eps of these inputs; try a smaller eps")
    if rounded and wrong < len(verdicts) / 2:
        report.problems.append(f"the gradient of {name} agrees only to {rounded:.0e} of its size, where double "
                               "precision does better: single precision inside?")
    if kinks:
        report.notes.append(f"{name}: {kinks} of {len(verdicts)} lie at a kink (the slopes to the left and to "
                            "the right differ, the analytic value is a subgradient) or nearer to one than eps")
    return row


def _random_line(layer, tensors, gradients, tolerances):
    """(line, analytic slope, its size) of a random unit direction; no component is small, so none is overlooked."""
    signs = [_signs(layer, tensor) for tensor in tensors]
    norm = np.sqrt(sum((s * s).sum() for s in signs))
    vectors = [array_module(t).asarray(s / norm * numeric.steps(asnumpy(t))) for t, s in zip(tensors, signs)]
    terms = [g * v for g, v in zip(gradients, vectors)]
    size = np.sqrt(sum(float((term * term).sum()) for term in terms))
    return numeric.direction(layer, tensors, vectors, tolerances), sum(float(term.sum()) for term in terms), size


def _signs(layer, tensor):
    return layer.random.uniform(0.5, 1.0, tensor.shape) * layer.random.choice([-1.0, 1.0], tensor.shape)


def _wrong_entry(layer, tensor, gradient, tolerances):
    """Halve the tensor, each time keeping the half that is more wrong. (index, analytic, numeric) of the entry that is
    left, or None if that one is not wrong by itself."""
    signs, steps = _signs(layer, tensor).ravel(), numeric.steps(asnumpy(tensor)).ravel()
    flat = asnumpy(gradient).ravel()

    def error(part):
        vector = np.zeros(tensor.size)
        vector[slice(*part)] = signs[slice(*part)] / np.linalg.norm(signs[slice(*part)]) * steps[slice(*part)]
        analytic = float((flat * vector)[slice(*part)].sum())
        vector = array_module(tensor).asarray(vector.reshape(tensor.shape))
        return numeric.compare([numeric.direction(layer, [tensor], [vector], tolerances)], [analytic])[0].error

    low, high = 0, tensor.size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = max([(low, middle), (middle, high)], key=error)
    entry, = numeric.compare([numeric.entry(layer, tensor, low, tolerances)], [float(flat[low])])
    return (_index(tensor, low), float(flat[low]), entry.numeric) if entry.status == "wrong" else None


def _next_to_the_kinks(report, layer, tolerances):
    """At a kink there is only a subgradient to hold a gradient to; next to it, the gradient itself."""
    layer.nudge()
    nearby = Report(report.layer, "direction")
    _directions(nearby, layer, layer.backward(layer.forward()[1]), tolerances)
    report.problems += [f"next to the kinks (everything moved by about {NUDGE:g}) the gradient of {row.name} is wrong "
                        f"at {row.index}: analytic {row.analytic:.9e}, numeric {row.numeric:.9e}"
                        for row in nearby.rows if row.status == "wrong"]
