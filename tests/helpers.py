"""Small functions that several test files use."""

import json

import numpy as np

from minigrad.checkpoint import load_checkpoint
from minigrad.runlog import read_log
from minigrad.tree import tree_leaves, tree_map


def run_forward(layer, x, keywords):
    """forward, with an int `rng` turned into a fresh generator."""
    keywords = dict(keywords)
    if isinstance(keywords.get("rng"), int):
        keywords["rng"] = np.random.default_rng(keywords["rng"])
    return layer.forward(x, **keywords)


def upstream(out, seed=7):
    """A random gradient for the output tree."""
    rng = np.random.default_rng(seed)
    return tree_map(lambda a: rng.standard_normal(a.shape).astype(a.dtype), out)


def flat(tree):
    return [leaf for _, leaf in tree_leaves(tree)]


def floats(tree):
    """The floating-point leaves."""
    return [leaf for leaf in flat(tree) if leaf.dtype.kind == "f"]


def newest(tree, like):
    """The tree with its memories, which may be longer, cut to as many of their newest slots as those of `like` have."""
    if isinstance(tree, tuple | list):
        return tuple(newest(a, b) for a, b in zip(tree, like))
    return tree if tree is None or tree.ndim < 2 else tree[:, tree.shape[1] - like.shape[1]:]


def snapshot(tree):
    return [leaf.copy() for leaf in flat(tree) if hasattr(leaf, "copy")]


def assert_close(got, expected, tolerance=1e-12):
    got, expected = flat(got), flat(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_identical(got, expected):
    got, expected = flat(got), flat(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        np.testing.assert_array_equal(a, b)


def grads(layer):
    return [p.grad.copy() for p in layer.parameters()]


def all_gradients(layer, x, keywords, dout):
    """(out, what backward returns, parameter gradients), from zeroed gradients."""
    out, cache = run_forward(layer, x, keywords)
    layer.zero_grad()
    returned = layer.backward(dout, cache)
    return out, returned, grads(layer)


# ---- the folder of a run ---------------------------------------------------------------------------------

def result(folder):
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def content(folder):
    """What a run is, without the seconds: {file: tensors}, the log, the result."""
    tensors = {name: load_checkpoint(folder / f"{name}.safetensors") for name in ("last", "best")}
    _, rows = read_log(folder / "log.csv")
    return ({name: ({key: value.tobytes() for key, value in found.items()}, meta["step"], meta["best"])
             for name, (found, meta) in tensors.items()},
            [{key: value for key, value in row.items() if key != "seconds"} for row in rows],
            {key: value for key, value in result(folder).items() if key != "seconds"})
