"""gradcheck: is backward the derivative of forward, and if not, where does it differ?

    from minigrad import gradcheck
    report = gradcheck(layer, (x,), {"mask": mask})
    assert report.ok, report

or, from a shell: python -m minigrad.gradcheck minigrad.layers:LSTM --shape 3,7,4 --set d=4 --set h=5

The numeric side is central differences in float64 of L = sum <dout, outputs>, with a random upstream gradient dout
(all-ones sees nothing after layer norm or softmax; single precision cannot see below 1e-3), over every input and every
parameter. Small noise is added to the parameters during the check: a gain of 1 or a bias of 0 hides faults.
It also checks the layer contract (minigrad/gradcheck/rules.py): no input is edited, gradients are added and not
assigned, no state is hidden between forward and backward, nothing is computed in lower precision.
"""

import numpy as np

from minigrad.backend import array_module, asnumpy
from minigrad.check import check_choice, check_number
from minigrad.gradcheck import numeric
from minigrad.gradcheck.layer_under_test import NUDGE, ContractError, LayerUnderTest
from minigrad.gradcheck.report import Report, Row, relative_error
from minigrad.gradcheck.rules import check_backward, check_forward
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

    Floating-point inputs are copied to float64; the layer's parameters are restored afterwards.
    A kink (ReLU at 0) is named in `notes`, not called an error, if the analytic value is a subgradient there; the
    check is then repeated, in directions, near it. Where eps leaves forward's domain (a logarithm's) the numeric value
    is not finite and counts as wrong: take a smaller eps. If the outputs are not finite at the inputs themselves,
    nothing is compared.
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
    report = _check(layer, inputs, keywords, mode, tolerances, seed)
    loops = _fast_layers(layer)
    try:
        for inner in loops:
            inner.fast = False
        if loops:
            report.plain = _check(layer, inputs, keywords, "direction", tolerances, seed)
    finally:
        for inner in loops:
            inner.fast = True
    return report


def _fast_layers(layer):
    """The layer and its descendants whose `fast` is True, each once: those that run a fast loop."""
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
    with LayerUnderTest(layer, inputs, keywords or {}, seed) as tested:
        try:
            if not any(tensor.size for tensor in tested.tensors.values()):
                raise ContractError("nothing to compare: no floating-point input and no parameter")
            out, cache = check_forward(report, tested)
            tested.draw_upstream(out)
            gradients = check_backward(report, tested, cache)
        except ContractError as error:
            report.problems.append(str(error))
            return report
        (_every_entry if mode == "full" else _directions)(report, tested, gradients, tolerances)
        if any(row.kinks for row in report.rows):
            _near_the_kinks(report, tested, tolerances)
    return report


def _every_entry(report, tested, gradients, tolerances):
    """Add a Row for each tensor, from all its entries."""
    for name, tensor in tested.tensors.items():
        if not tensor.size:
            continue
        analytic = asnumpy(gradients[name]).ravel()
        lines = [numeric.entry(tested, tensor, n, tolerances) for n in range(tensor.size)]
        verdicts = numeric.compare(lines, analytic)
        worst = numeric.worst(verdicts)
        index = tuple(int(i) for i in np.unravel_index(worst, tensor.shape))
        size = max(abs(v.numeric) for v in verdicts)
        row = _add(report, name, tensor.shape, verdicts, index, float(analytic[worst]), verdicts[worst].numeric,
                   numeric.rounded(lines, analytic, verdicts, [size] * len(lines)))
        row.errors = np.array([np.nan if v.status == "kink" else v.error for v in verdicts]).reshape(tensor.shape)
        row.bad = row.errors > 1


def _directions(report, tested, gradients, tolerances):
    """Add a Row for each tensor, and one for all together, from random directions."""
    tensors = {name: tensor for name, tensor in tested.tensors.items() if tensor.size}
    for title, names in {**{name: [name] for name in tensors}, "all together": list(tensors)}.items():
        arrays, grads = [tensors[name] for name in names], [gradients[name] for name in names]
        lines, analytic, sizes = zip(*[_random_line(tested, arrays, grads, tolerances) for _ in range(DIRECTIONS)])
        verdicts = numeric.compare(lines, analytic)
        worst = numeric.worst(verdicts)
        found = "a direction", analytic[worst], verdicts[worst].numeric
        if len(names) == 1 and verdicts[worst].error > 1:
            found = _wrong_entry(tested, arrays[0], grads[0], tolerances) or found
        shape = arrays[0].shape if len(names) == 1 else (sum(array.size for array in arrays),)
        rounded = numeric.rounded(lines, analytic, verdicts, sizes) if len(names) == 1 else 0.0
        _add(report, title, shape, verdicts, *found, rounded)


def _add(report, name, shape, verdicts, index, analytic, slope, rounded):
    """Add a Row, and what there is to say about it; returns the Row."""
    wrong = sum(v.status == "wrong" for v in verdicts)
    kinks = sum(v.status in ("kink", "near") for v in verdicts)
    row = Row(name, shape, "wrong" if wrong else "kink" if kinks else "ok", wrong, kinks, len(verdicts), index,
              analytic, slope, relative_error(analytic, slope))
    report.rows.append(row)
    if np.isfinite(row.analytic) and not np.isfinite(row.numeric):
        report.notes.append(f"{row.name}: forward is not finite nearer than eps to the inputs: take a smaller eps")
    if rounded and row.wrong < row.checked / 2:
        report.problems.append(f"the gradient of {row.name} agrees only to {rounded:.0e} of its size, where double "
                               "precision does better: single precision inside?")
    if row.kinks:
        report.notes.append(f"{row.name}: {row.kinks} of {row.checked} lie at a kink (the slopes to the left and to "
                            "the right differ, the analytic value is a subgradient) or nearer to one than eps")
    return row


def _random_line(tested, tensors, gradients, tolerances):
    """(line, analytic slope, its size) of a random unit direction without small components, so that none is missed."""
    signs = [_signs(tested, tensor) for tensor in tensors]
    norm = np.sqrt(sum((s * s).sum() for s in signs))
    vectors = [array_module(t).asarray(s / norm * numeric.steps(asnumpy(t))) for t, s in zip(tensors, signs)]
    terms = [g * v for g, v in zip(gradients, vectors)]
    size = np.sqrt(sum(float((term * term).sum()) for term in terms))
    return numeric.direction(tested, tensors, vectors, tolerances), sum(float(term.sum()) for term in terms), size


def _signs(tested, tensor):
    return tested.random.uniform(0.5, 1.0, tensor.shape) * tested.random.choice([-1.0, 1.0], tensor.shape)


def _wrong_entry(tested, tensor, gradient, tolerances):
    """Halve the tensor, each time keeping the half that is more wrong. (index, analytic, numeric) of the entry that is
    left, or None if that one is not wrong by itself."""
    signs, steps = _signs(tested, tensor).ravel(), numeric.steps(asnumpy(tensor)).ravel()
    flat = asnumpy(gradient).ravel()

    def verdict(low, high):
        vector = np.zeros(tensor.size)
        vector[low:high] = signs[low:high] / np.linalg.norm(signs[low:high]) * steps[low:high]
        analytic = float((flat[low:high] * vector[low:high]).sum())
        vector = array_module(tensor).asarray(vector.reshape(tensor.shape))
        return numeric.compare([numeric.direction(tested, [tensor], [vector], tolerances)], [analytic])[0]

    low, high = 0, tensor.size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = max([(low, middle), (middle, high)], key=lambda part: verdict(*part).error)
    entry, = numeric.compare([numeric.entry(tested, tensor, low, tolerances)], [float(flat[low])])
    index = tuple(int(i) for i in np.unravel_index(low, tensor.shape))
    return (index, float(flat[low]), entry.numeric) if entry.status == "wrong" else None


def _near_the_kinks(report, tested, tolerances):
    """At a kink a gradient need only be a subgradient; near it there is the gradient itself."""
    tested.nudge()
    near = Report(report.layer, "direction")
    _directions(near, tested, tested.backward(tested.forward()[1]), tolerances)
    report.problems += [f"near the kinks (everything moved by about {NUDGE:g}) the gradient of {row.name} is wrong "
                        f"at {row.index}: analytic {row.analytic:.9e}, numeric {row.numeric:.9e}"
                        for row in near.rows if row.status == "wrong"]
