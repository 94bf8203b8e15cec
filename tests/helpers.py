"""Small functions that several test files use."""

import numpy as np

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
