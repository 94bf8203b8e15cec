"""Small functions that several test files use."""

import gzip
import json
import struct

import numpy as np

from minigrad.tensors import load_tensors
from minigrad.training.runlog import read_log
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


def one_line(error):
    """The text of a caught error, which is one line."""
    text, = str(error.value).splitlines()
    return text


# ---- made data -------------------------------------------------------------------------------------------

def write_images(folder, train, test):
    """MNIST's four files with made images: noise, and a bright spot that says which digit it is. Returns the folder."""
    rng = np.random.default_rng(0)
    for half, count in (("train", train), ("t10k", test)):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        images = rng.integers(0, 50, (count, 28, 28)).astype(np.uint8)
        for image, digit in zip(images, labels):
            image[7 * (digit // 4):7 * (digit // 4) + 7, 7 * (digit % 4):7 * (digit % 4) + 7] += 200
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{half}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes(), 1))
    return folder


def write_reviews(folder, size):
    """aclImdb with made reviews, `size` in each half, of two to twelve words. Returns the folder.

    A positive one has "good" in it twice, a negative one "bad".
    """
    rng = np.random.default_rng(0)
    for half in ("train", "test"):
        for kind, word, rating in (("neg", "bad", 2), ("pos", "good", 9)):
            place = folder / "aclImdb" / half / kind
            place.mkdir(parents=True)
            for n in range(size // 2):
                words = [f"word{k}" for k in rng.integers(0, 40, rng.integers(0, 11))]
                (place / f"{n}_{rating}.txt").write_text(" ".join(rng.permutation([*words, word, word])))
    return folder


# ---- the folder of a run ---------------------------------------------------------------------------------

def result(folder):
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def content(folder):
    """What a run is, without the seconds: {file: tensors}, the log, the result."""
    tensors = {name: load_tensors(folder / f"{name}.safetensors") for name in ("last", "best")}
    _, rows = read_log(folder / "log.csv")
    return ({name: ({key: value.tobytes() for key, value in found.items()}, meta["step"], meta["best"])
             for name, (found, meta) in tensors.items()},
            [{key: value for key, value in row.items() if key != "seconds"} for row in rows],
            {key: value for key, value in result(folder).items() if key != "seconds"})
