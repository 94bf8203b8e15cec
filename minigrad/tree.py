"""Nested structures of arrays: the states, caches and gradients that layers exchange.

A tree is an array, None, a scalar, or a tuple, NamedTuple, list or dict of trees.
"""


def tree_map(function, tree):
    """The same structure with `function` applied to every leaf; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        items = [tree_map(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return function(tree)


def tree_leaves(tree, name=""):
    """Yield (name, leaf) for every leaf that is not None, depth first; names are dotted paths below `name`."""
    if tree is None:
        return
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, tuple | list):
        items = zip(getattr(tree, "_fields", range(len(tree))), tree)
    else:
        yield name, tree
        return
    for key, item in items:
        yield from tree_leaves(item, f"{name}.{key}" if name else str(key))
