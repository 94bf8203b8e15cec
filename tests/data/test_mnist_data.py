"""minigrad.data.mnist: IDX files, what is refused of them, the four files, and images as sequences."""

import gzip
import hashlib
import json
import struct

import numpy as np
import pytest
from helpers import one_line
from hypothesis import given, settings, strategies as st

from minigrad.data import mnist
from minigrad.data.files import DataError, Official
from minigrad.data.mnist import (
    FILES,
    as_sequences,
    load_permutation,
    permutation,
    read_idx,
    read_mnist,
    save_permutation,
)

LABELS, IMAGES = "labels-idx1-ubyte", "images-idx3-ubyte"


def idx(array, code=8):
    """The bytes of an IDX file."""
    array = np.asarray(array, np.uint8)
    return bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path


def made(n=3, m=2, seed=0):
    """{name: array} of the four files."""
    rng = np.random.default_rng(seed)
    return {f"{half}-{kind}": rng.integers(0, 256 if kind == IMAGES else 10, (k, 28, 28) if kind == IMAGES else k)
            for half, k in (("train", n), ("t10k", m)) for kind in (IMAGES, LABELS)}


# ---- IDX -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["a-ubyte", "a.idx3-ubyte.gz"])
@pytest.mark.parametrize("shape", [(3,), (4, 2, 3), (0, 28, 28), (300, 1, 1)])
def test_what_was_written_is_read(tmp_path, name, shape):
    array = np.random.default_rng(0).integers(0, 256, shape)
    path = write(tmp_path / name, idx(array))
    for rank in (None, len(shape)):
        got = read_idx(path, rank)
        assert (got.dtype, got.shape) == (np.uint8, shape)
        np.testing.assert_array_equal(got, array)


GOOD = idx(np.arange(24).reshape(2, 3, 4))


@pytest.mark.parametrize(("content", "sentence"), [
    (b"", "begins with the bytes of an empty file; expected 00 00 08 03"),
    (GOOD[:3], "begins with the bytes 00 00 08; expected 00 00 08 03"),
    (b"\x89PNG" + GOOD[4:], "begins with the bytes 89 50 4e 47; expected 00 00 08 03, an IDX file of uint8"),
    (b"\x1f\x8b" + GOOD[2:], "begins with the bytes 1f 8b 08 03"),
    (GOOD[:3] + b"\1" + GOOD[4:], "begins with the bytes 00 00 08 01; expected 00 00 08 03"),
    (GOOD[:2] + b"\x0a\3" + GOOD[4:], "begins with the bytes 00 00 0a 03"),
    (GOOD[:2] + b"\x0d\3" + GOOD[4:], r"holds float32 .code 0d.; expected uint8 .code 08"),
    (GOOD[:4], "ends within its header, after 4 of 16 bytes"), (GOOD[:15], "ends within its header, after 15 of 16"),
    (GOOD[:-1], "23 bytes after the header; expected 2 x 3 x 4 = 24"),
    (GOOD[:16], "0 bytes after the header; expected 2 x 3 x 4 = 24"),
    (GOOD + b"x", "25 bytes after the header; expected 2 x 3 x 4 = 24"),
    (GOOD[:4] + b"\xff" * 12 + GOOD[16:], "24 bytes after the header; expected 4294967295 x 4294967295 x 4294967295")])
@pytest.mark.parametrize("name", ["a-ubyte", "a-ubyte.gz"])
def test_a_wrong_file_is_one_line(tmp_path, name, content, sentence):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=f"{name}: {sentence}") as error:
        read_idx(path, 3)
    one_line(error)


def test_any_rank_but_none(tmp_path):
    with pytest.raises(DataError, match="begins with the bytes 00 00 08 00; expected 00 00 08 01 to 03"):
        read_idx(write(tmp_path / "a", b"\0\0\x08\0x"))


@pytest.mark.parametrize("change", [lambda packed: packed[:-4], lambda packed: packed[:12], lambda packed: b"x" * 30,
                                    lambda packed: packed[:-6] + b"\0\0" + packed[-4:]])
def test_a_damaged_gz_is_one_line(tmp_path, change):
    path = write(tmp_path / "a.gz", GOOD)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=r"a.gz: damaged, or no .gz file") as error:
        read_idx(path)
    one_line(error)
    with pytest.raises(DataError, match="none: there is no such file"):
        read_idx(tmp_path / "none")


@settings(max_examples=40, deadline=None)
@given(content=st.binary(max_size=24) | st.binary(max_size=24).map(lambda more: b"\0\0\x08" + more))
def test_any_bytes_are_an_array_or_one_line(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    why = ""
    try:
        array = read_idx(path)
        assert array.dtype == np.uint8
    except DataError as error:
        why = str(error)
    assert "\n" not in why


# ---- the four files --------------------------------------------------------------------------------------

def write_all(folder, arrays, packed=True):
    for k, (name, array) in enumerate(arrays.items()):
        write(folder / (f"{name}.gz" if packed and k % 2 == 0 else name), idx(array))
    return folder


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", ["", "mnist"])
def test_four_files(tmp_path, packed, below, monkeypatch):
    arrays = made()
    write_all(tmp_path / below, arrays, packed)
    monkeypatch.setenv("MINIGRAD_DATA", str(tmp_path))
    for folder in (tmp_path, None):
        data = read_mnist(folder, quiet=True, official=False)
        assert [array.shape for array in data] == [(3, 28, 28), (3,), (2, 28, 28), (2,)]
        for got, expected in zip(data, arrays.values()):
            assert got.dtype == np.uint8
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("name", "array", "sentence"), [
    ("t10k-labels-idx1-ubyte", np.zeros(3), "t10k-labels-idx1-ubyte: 3 labels for the 2 images of t10k-im"),
    ("train-images-idx3-ubyte", np.zeros((3, 28, 27)), "the images are 28 x 27; expected 28 x 28"),
    ("train-labels-idx1-ubyte", np.array([1, 10, 9]), "label 2 is 10; expected 0 ... 9"),
    ("train-labels-idx1-ubyte", np.zeros((3, 28, 28)), "begins with the bytes 00 00 08 03; expected 00 00 08 01"),
    ("t10k-images-idx3-ubyte", np.zeros(2), "begins with the bytes 00 00 08 01; expected 00 00 08 03")])
def test_files_that_do_not_fit_are_refused(tmp_path, name, array, sentence):
    write_all(tmp_path, {**made(), name: array}, packed=False)
    with pytest.raises(DataError, match=sentence) as error:
        read_mnist(tmp_path, official=False)
    one_line(error)


def test_no_images_and_a_missing_file(tmp_path):
    write_all(tmp_path, made(n=0), packed=False)
    with pytest.raises(DataError, match="train-labels-idx1-ubyte: 0 labels for the 0 images"):
        read_mnist(tmp_path, official=False)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte is neither in .* nor one folder below"):
        read_mnist(tmp_path, official=False)


def test_official_files_are_checked_and_fetched(tmp_path, monkeypatch):
    arrays = made()
    write_all(tmp_path / "there", arrays, packed=False)
    for name in arrays:
        write(tmp_path / f"there/{name}.gz", idx(arrays[name]))
    monkeypatch.setattr(mnist, "FILES", {name: Official(
        name, (tmp_path / f"there/{name}.gz").as_uri(), len(idx(array)),
        f"sha256:{hashlib.sha256(idx(array)).hexdigest()}") for name, array in arrays.items()})
    data = read_mnist(tmp_path / "new", quiet=True)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(f"{name}.gz" for name in arrays)
    np.testing.assert_array_equal(data.test_labels, arrays["t10k-labels-idx1-ubyte"])
    other = {**arrays, "train-labels-idx1-ubyte": (arrays["train-labels-idx1-ubyte"] + 1) % 10}
    write_all(tmp_path / "other", other)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte: its sha256 is .*; that of the official"):
        read_mnist(tmp_path / "other", quiet=True)
    read_mnist(tmp_path / "other", quiet=True, official=False)


def test_the_real_test_labels(real_data):
    path = real_data("t10k-labels-idx1-ubyte.gz")
    labels = read_idx(path, 1)
    assert np.bincount(labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert len(idx(labels)) == FILES["t10k-labels-idx1-ubyte"].size
    assert f"sha256:{hashlib.sha256(idx(labels)).hexdigest()}" == FILES["t10k-labels-idx1-ubyte"].checksum
    assert [file.url.rpartition("/")[2] for file in FILES.values()] == [f"{name}.gz" for name in FILES]
    assert FILES["train-images-idx3-ubyte"].size == 16 + 60_000 * 784


# ---- sequences -------------------------------------------------------------------------------------------

def images_of(n=2, H=4, W=6, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, H, W)).astype(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
def test_pixel_by_pixel(dtype, stride, ordered):
    images = images_of()
    steps = [[np.mean([images[n, i * stride + a, j * stride + b] for a in range(stride) for b in range(stride)]) / 255
              for i in range(4 // stride) for j in range(6 // stride)] for n in range(2)]
    order = permutation(24 // stride**2, 5) if ordered else None
    if ordered:
        steps = [[row[t] for t in order] for row in steps]
    x = as_sequences(images, stride=stride, order=order, dtype=dtype)
    assert (x.shape, x.dtype) == ((2, 24 // stride**2, 1), dtype)
    np.testing.assert_allclose(x[..., 0], steps, rtol=1e-6 if dtype == "float32" else 1e-14)


@pytest.mark.parametrize("order", [None, [2, 0, 3, 1]])
def test_row_by_row(order):
    images = images_of()
    x = as_sequences(images, rows=True, order=order, dtype="float64")
    assert x.shape == (2, 4, 6)
    np.testing.assert_array_equal(x, images[:, order or slice(None)] / 255)


def test_mnists_own_size_and_range():
    images = np.zeros((2, 28, 28), np.uint8)
    images[1] = 255
    for stride, L in ((1, 784), (2, 196), (4, 49), (7, 16), (14, 4), (28, 1)):
        x = as_sequences(images, stride=stride)
        assert (x.shape, x.dtype) == ((2, L, 1), np.float32)
        assert x[0].max() == 0
        assert x[1].min() == x[1].max() == 1
    assert as_sequences(images[:0]).shape == (0, 784, 1)
    assert as_sequences(images, rows=True).shape == (2, 28, 28)


@pytest.mark.parametrize(("more", "sentence"), [
    ({"rows": True, "stride": 2}, "stride is 2 with rows; expected 1"),
    ({"stride": 3}, "stride is 3; expected one that divides 4 and 6"), ({"stride": 4}, "stride is 4; expected"),
    ({"stride": 0}, "stride is 0; expected a whole number of at least 1"), ({"stride": 2.0}, "stride is 2.0"),
    ({"order": np.arange(23)}, "order has 23 steps; expected 24"),
    ({"stride": 2, "order": np.arange(24)}, "order has 24 steps; expected 6"),
    ({"rows": True, "order": np.arange(24)}, "order has 24 steps; expected 4"),
    ({"order": np.zeros(24, int)}, "order is no permutation; expected each of 0 ... 23 once"),
    ({"order": np.arange(1, 25)}, "order is no permutation"), ({"order": np.arange(24.0)}, "order is float64"),
    ({"order": np.arange(24)[:, None]}, r"order is int64 .24, 1.; expected 24 whole numbers")])
def test_bad_sequences_are_refused(more, sentence):
    with pytest.raises(ValueError, match=f"as_sequences: {sentence}"):
        as_sequences(images_of(), **more)


@pytest.mark.parametrize("images", [np.zeros((2, 28, 28)), np.zeros((28, 28), np.uint8)])
def test_what_are_no_images(images):
    with pytest.raises(ValueError, match=r"as_sequences: images is .*; expected uint8 .n, H, W"):
        as_sequences(images)


# ---- the permutation -------------------------------------------------------------------------------------

def test_a_permutation_is_of_its_seed():
    order = permutation(784, 3)
    assert sorted(order.tolist()) == list(range(784))
    np.testing.assert_array_equal(order, permutation(784, 3))
    assert (order != permutation(784, 4)).mean() > .9
    with pytest.raises(ValueError, match="permutation: L is 0"):
        permutation(0, 3)


def test_a_saved_permutation_is_read(tmp_path):
    path = tmp_path / "order.json"
    save_permutation(path, permutation(49, np.int64(7)), np.int64(7))
    got = load_permutation(path, 49)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, permutation(49, 7))
    assert json.loads(path.read_text())["seed"] == 7
    with pytest.raises(ValueError, match="save_permutation: order is no permutation"):
        save_permutation(path, [0, 0], 7)
    np.testing.assert_array_equal(load_permutation(path, 49), got)


def saved(order, **more):
    return json.dumps({"format": "minigrad-permutation-1", "seed": 1, "length": 3, "order": order, **more})


@pytest.mark.parametrize(("text", "sentence"), [
    ("", "damaged, or no JSON"), (saved([2, 0, 1])[:-5], "damaged, or no JSON"), ("\udcff", "damaged, or no JSON"),
    ("[" * 10**5, "damaged, or no JSON"), ("[2, 0, 1]", "is no minigrad-permutation-1"), ("{}", "is no"),
    (saved([2, 0, 1], format="x"), "is no minigrad-permutation-1"),
    (saved([1, 0]), "the order has 2 steps; expected 3"),
    (saved([2, 0, 1, 3]), "the order has 4 steps; expected 3"), (saved([0, 1, 1]), "the order is no permutation"),
    (saved([3, 2, 1]), "the order is no permutation"), (saved([0, 1, -2]), "the order is no permutation"),
    (saved([0, 1, 2.5]), "the order is float64"), (saved(["0", "1", "2"]), "the order is <U1"),
    (saved(None), "the order is object"),
    (saved([True, False, True]), "the order is bool"), (saved([0, 1, 10**30]), "the order is object"),
    (saved([[0], [1, 2]]), "order.json: the order is no plain list; expected 3"),
    (saved({"0": 1}), "the order is object")])
def test_a_wrong_permutation_file_is_one_line(tmp_path, text, sentence):
    path = tmp_path / "order.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=sentence) as error:
        load_permutation(path, 3)
    assert one_line(error)
    with pytest.raises(DataError, match=r"none.json: there is no such file"):
        load_permutation(tmp_path / "none.json", 3)
