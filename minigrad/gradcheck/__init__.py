"""gradcheck: is this backward the derivative of that forward, and if not, where not?

    from minigrad import gradcheck
    report = gradcheck(layer, (x,), {"mask": mask})
    assert report.ok, report

or, from a shell: python -m minigrad.gradcheck minigrad.layers:LSTM --shape 3,7,4 --set d=4 --set h=5

The numeric side is central differences in float64 of L = sum <dout, outputs>, with a random upstream gradient dout
(all-ones is blind behind layer norm and softmax; single precision cannot see below 1e-3), over every input and every
parameter. Parameters are moved by a little noise for the time of the check: a gain of 1 or a bias of 0 hides faults.
Besides, the layer contract is checked (minigrad/gradcheck/rules.py): nothing edited, gradients added and not
assigned, nothing hidden between forward and backward, nothing in lower precision.
"""

import numpy as np

from minigrad.backend import array_module, asnumpy
from minigrad.check import check_choice, check_number
from minigrad.gradcheck import numeric
from minigrad.gradcheck.probe import ContractError, Probe
from minigrad.gradcheck.report import Report, Row, relative_error
from minigrad.gradcheck.rules import check_backward, check_forward

__all__ = ["Report", "Row", "gradcheck"]
DIRECTIONS = 3


def gradcheck(layer, inputs, keywords=None, *, mode="full", eps=1e-5, rtol=1e-6, atol=1e-8, seed=0):
    """Compare a layer's backward with central differences of its forward; returns a Report.

    layer       a Layer, or any object with forward and backward in the same contract (a loss, a function's namespace)
    inputs      tuple of arrays for forward's positional arguments
    keywords    dict of further arguments: mask, state, ...; `rng` may be a seed or a Generator, and every call gets
                an equally seeded one, so that a layer that draws random numbers can be checked
    mode        "full": every entry of every tensor; "direction": random directions through each tensor and through
                all together, for whole models (a tensor that fails is searched for its worst entry)
    eps, rtol, atol     entries agree when |a - n| <= atol + rtol max(|a|, |n|)
    seed        of the upstream gradient, the noise and the directions

    Floating-point inputs are copied to float64; the layer's parameters are as before afterwards.
    A kink (ReLU at 0) is named in `notes`, not called an error, if the analytic value is a subgradient there.
    Raises ValueError for a wrong mode or tolerance, TypeError for inputs that do not fit forward.
    """
    check_choice("gradcheck", "mode", mode, ("full", "direction"))
    check_number("gradcheck", "eps", eps, 0, open_low=True)
    check_number("gradcheck", "rtol", rtol, 0)
    check_number("gradcheck", "atol", atol, 0)
    if not isinstance(inputs, tuple | list):
        raise TypeError(f"gradcheck: inputs is a {type(inputs).__name__}; expected a tuple of arrays")
    report = Report(type(layer).__name__ if not isinstance(layer, type) else layer.__name__, mode)
    with Probe(layer, inputs, keywords or {}, seed) as probe:
        out, cache, problems = check_forward(probe)
        report.problems += problems
        probe.draw_upstream(out)
        if not probe.flat_dout:
            report.problems.append("forward returns no floating-point output")
            return report
        try:
            gradients, problems = check_backward(probe, cache)
        except ContractError as error:
            report.problems.append(str(error))
            return report
        report.problems += problems
        compare = _every_entry if mode == "full" else _directions
        report.rows += compare(probe, gradients, (eps, rtol, atol))
    report.notes += _notes(report.rows)
    return report


def _every_entry(probe, gradients, tolerances):
    """A Row for each tensor, from all its entries."""
    _, rtol, atol = tolerances
    for name, tensor in probe.tensors.items():
        analytic = asnumpy(gradients[name]).ravel()
        judged = [numeric.entry(probe, tensor, n, tolerances).judge(float(a)) for n, a in enumerate(analytic)]
        statuses, slopes = np.array([s for s, _ in judged], "U5"), np.array([n for _, n in judged], float)
        bad, kinks = statuses == "wrong", statuses == "kink"
        with np.errstate(invalid="ignore"):
            errors = np.abs(analytic - slopes) / (atol + rtol * np.maximum(np.abs(analytic), np.abs(slopes)))
        errors[~np.isfinite(errors)] = np.inf
        if not errors.size:
            continue
        worst = int(np.argmax(np.where(kinks, -1.0, errors)))
        shape = tensor.shape
        yield Row(name, shape, "wrong" if bad.any() else "kink" if kinks.any() else "ok", int(bad.sum()),
                  int(kinks.sum()), analytic.size, tuple(int(i) for i in np.unravel_index(worst, shape)),
                  float(analytic[worst]), float(slopes[worst]),
                  float(relative_error(analytic[worst:worst + 1], slopes[worst:worst + 1])[0]),
                  errors.reshape(shape), bad.reshape(shape))


def _directions(probe, gradients, tolerances):
    """A Row for each tensor, and one for all together, from random directions."""
    tensors = {name: tensor for name, tensor in probe.tensors.items() if tensor.size}
    groups = {name: [name] for name in tensors}
    groups["all together"] = list(tensors)
    for title, names in groups.items():
        arrays = [tensors[name] for name in names]
        slopes = [_along(probe, arrays, [gradients[name] for name in names], tolerances) for _ in range(DIRECTIONS)]
        wrong = [s for s in slopes if s[0] == "wrong"]
        status, analytic, slope = max(slopes, key=lambda s: (s[0] == "wrong", abs(s[1] - s[2])))
        index = "a direction"
        if wrong and len(names) == 1:
            index, analytic, slope = _worst_entry(probe, arrays[0], gradients[names[0]], tolerances)
        kinks = sum(s[0] == "kink" for s in slopes)
        yield Row(title, arrays[0].shape if len(names) == 1 else (sum(a.size for a in arrays),),
                  "wrong" if wrong else "kink" if kinks else status, len(wrong), kinks, DIRECTIONS, index, analytic,
                  slope, float(relative_error(np.array([analytic]), np.array([slope]))[0]))


def _along(probe, tensors, gradients, tolerances):
    """(status, analytic, numeric) along one random unit direction; no component is small, so none is overlooked."""
    vectors = [probe.random.uniform(0.5, 1.0, t.shape) * probe.random.choice([-1.0, 1.0], t.shape) for t in tensors]
    norm = np.sqrt(sum((v * v).sum() for v in vectors))
    vectors = [array_module(t).asarray(v / norm) for t, v in zip(tensors, vectors)]
    analytic = sum(float((g * v).sum()) for g, v in zip(gradients, vectors))
    status, slope = numeric.direction(probe, tensors, vectors, tolerances).judge(analytic)
    return status, analytic, slope


def _worst_entry(probe, tensor, gradient, tolerances):
    """Halve the tensor, each time keeping the half along which the slopes differ more, down to one entry."""
    low, high = 0, tensor.size
    signs = probe.random.choice([-1.0, 1.0], tensor.size)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = max([(low, middle), (middle, high)],
                        key=lambda part: _difference(probe, tensor, gradient, signs, part, tolerances))
    analytic = float(gradient.reshape(-1)[low])
    slope = numeric.entry(probe, tensor, low, tolerances).central(tolerances[0])
    return tuple(int(i) for i in np.unravel_index(low, tensor.shape)), analytic, slope


def _difference(probe, tensor, gradient, signs, part, tolerances):
    vector = np.zeros(tensor.size)
    vector[slice(*part)] = signs[slice(*part)]
    vector = array_module(tensor).asarray(vector.reshape(tensor.shape))
    slope = numeric.direction(probe, [tensor], [vector], tolerances).central(tolerances[0])
    difference = abs(float((gradient * vector).sum()) - slope)
    return difference if np.isfinite(difference) else np.inf


def _notes(rows):
    for row in rows:
        if row.kinks:
            yield (f"{row.name}: {row.kinks} of {row.checked} lie at or beside a kink (the slopes to the left and to "
                   "the right differ); the analytic value is a subgradient there")
