"""MNIST: 70,000 handwritten digits (LeCun, Cortes, Burges), as images and as sequences of pixels."""

import json
import math
from typing import NamedTuple

import numpy as np

from minigrad.backend import array_module
from minigrad.check import check_count
from minigrad.data.files import FORMS, DataError, Official, data_folder, find_file, official_file, read_unpacked
from minigrad.tensors import write_atomically

ADDRESS = "https://ossci-datasets.s3.amazonaws.com/mnist"
FILES = {name: Official(name, f"{ADDRESS}/{name}.gz", size, f"sha256:{checksum}") for name, size, checksum in (
    ("train-images-idx3-ubyte", 47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    ("train-labels-idx1-ubyte", 60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    ("t10k-images-idx3-ubyte", 7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    ("t10k-labels-idx1-ubyte", 10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"))}
SIDE = 28                                                        # pixels
DTYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}
PERMUTATION = "minigrad-permutation-1"


class Mnist(NamedTuple):
    """Images 0 ... 255, dark 0, and their digits 0 ... 9; n is 60,000 and 10,000."""

    train_images: np.ndarray        # (n, 28, 28) uint8
    train_labels: np.ndarray        # (n,) uint8
    test_images: np.ndarray
    test_labels: np.ndarray


# ---- files -----------------------------------------------------------------------------------------------

def read_idx(path, rank=None):
    """The uint8 array of an IDX file, plain or .gz; with `rank` axes, if that is given.

    Four bytes 0, 0, the dtype's code, the number of axes; the axes' lengths, four bytes each, most significant first;
    the numbers in row-major order. Raises DataError, one line, for a file that is missing, damaged, not an IDX file, of
    another dtype or rank, and for one with fewer or more bytes than its header says.
    """
    data = read_unpacked(path)
    came, axes = data[:4].hex(" "), f"{rank:02x}" if rank else "01 to 03"
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in DTYPES or (data[3] != rank if rank else not data[3]):
        raise DataError(f"{path}: begins with the bytes {came or 'of an empty file'}; expected 00 00 08 {axes}, an IDX "
                        "file of uint8")
    if DTYPES[data[2]] != "uint8":
        raise DataError(f"{path}: holds {DTYPES[data[2]]} (code {data[2]:02x}); expected uint8 (code 08)")
    begin = 4 + 4 * data[3]
    if len(data) < begin:
        raise DataError(f"{path}: ends within its header, after {len(data)} of {begin} bytes")
    shape = tuple(np.frombuffer(data, ">u4", data[3], offset=4).tolist())
    if len(data) - begin != math.prod(shape):
        raise DataError(f"{path}: {len(data) - begin:,} bytes after the header; expected "
                        f"{' x '.join(map(str, shape))} = {math.prod(shape):,}")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)


def read_mnist(folder=None, quiet=False, *, official=True):
    """Mnist from its four files, plain or .gz, under a data folder (None: `data_folder`'s).

    official    each must be the published one, and is downloaded if it is missing; False: files of the same format
                with any number of images, nothing is downloaded

    Raises DataError, one line: as `official_file` and `read_idx` do, for images that are not 28 x 28, for labels that
    are not 0 ... 9, and if there are not as many labels as images.
    """
    folder = data_folder(folder)
    arrays = []
    for half in ("train", "t10k"):
        images_path, labels_path = (_path(f"{half}-{kind}-ubyte", folder, quiet, official)
                                    for kind in ("images-idx3", "labels-idx1"))
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if images.shape[1:] != (SIDE, SIDE):
            raise DataError(f"{images_path}: the images are {images.shape[1]} x {images.shape[2]}; expected "
                            f"{SIDE} x {SIDE}")
        if len(images) != len(labels) or not len(images):
            raise DataError(f"{labels_path}: {len(labels):,} labels for the {len(images):,} images of "
                            f"{images_path.name}; expected one each, and at least one")
        if labels.max() > 9:
            at = int((labels > 9).argmax())
            raise DataError(f"{labels_path}: label {at + 1} is {labels[at]}; expected 0 ... 9")
        arrays += [images, labels]
    return Mnist(*arrays)


def _path(name, folder, quiet, official):
    if official:
        return official_file(FILES[name], folder, quiet)
    path = find_file([name + form for form in FORMS], folder)
    if path is None:
        raise DataError(f"{name} is neither in {folder} nor one folder below")
    return path


# ---- sequences -------------------------------------------------------------------------------------------

def as_sequences(images, *, rows=False, stride=1, order=None, dtype="float32"):
    """(n, L, d) in [0, 1]: images (n, H, W) uint8 as sequences for a recurrent network.

    rows      False: pixel by pixel, left to right, then top to bottom: L = H W (784), d = 1
              True: one row per step: L = H (28), d = W (28)
    stride    k: the image is first reduced, each pixel the mean of k x k: L = (H / k) (W / k)
    order     (L,): step t is the original step order[t], the same for all images (permuted MNIST; Le et al. 2015)

    Raises ValueError for rows with a stride, a stride that does not divide H and W, and an order that is not a
    permutation of the L steps.
    """
    if images.ndim != 3 or images.dtype != np.uint8:
        raise ValueError(f"as_sequences: images is {images.dtype} {images.shape}; expected uint8 (n, H, W)")
    check_count("as_sequences", "stride", stride)
    n, H, W = images.shape
    if H % stride or W % stride:
        raise ValueError(f"as_sequences: stride is {stride}; expected one that divides {H} and {W}")
    if rows and stride != 1:
        raise ValueError(f"as_sequences: stride is {stride} with rows; expected 1")
    xp, scale = array_module(images), 255 * stride**2
    if stride > 1:
        images = images.reshape(n, H // stride, stride, W // stride, stride).sum((2, 4))     # (n, H/k, W/k)
    sequences = images if rows else images.reshape(n, H * W // stride**2, 1)                 # (n, L, d)
    if order is not None:
        sequences = sequences[:, xp.asarray(_checked("as_sequences: order", order, sequences.shape[1]))]
    sequences = sequences.astype(dtype)
    sequences /= scale
    return sequences


def permutation(L, seed):
    """(L,) int64: the fixed random order of permuted MNIST, a function of the seed alone."""
    check_count("permutation", "L", L)
    return np.random.default_rng(seed).permutation(L)


def save_permutation(path, order, seed):
    """Write an order and the seed it was made from as JSON, so that all models use the same."""
    order = _checked("save_permutation: order", order, len(order)).tolist()
    text = json.dumps({"format": PERMUTATION, "seed": int(seed), "length": len(order), "order": order})
    write_atomically(path, f"{text}\n".encode())


def load_permutation(path, L):
    """(L,) int64 of `save_permutation`.

    Raises DataError, one line, for a file that is missing, damaged, or not a permutation of 0 ... L-1.
    """
    data = read_unpacked(path)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged, or no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != PERMUTATION:
        raise DataError(f"{path}: is no {PERMUTATION}, as save_permutation writes it")
    try:
        return _checked(f"{path}: the order", content.get("order"), L)
    except ValueError as error:
        raise DataError(str(error)) from error


def _checked(name, order, L):
    """The order as (L,) int64; ValueError if it is not a permutation of 0 ... L-1."""
    try:
        array = np.asarray(order)
    except ValueError as error:                     # lists of different lengths
        raise ValueError(f"{name} is no plain list; expected {L} whole numbers") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} is {array.dtype} {array.shape}; expected {L} whole numbers")
    if len(array) != L:
        raise ValueError(f"{name} has {len(array)} steps; expected {L}")
    if not np.array_equal(np.sort(array), np.arange(L)):
        raise ValueError(f"{name} is no permutation; expected each of 0 ... {L - 1} once")
    return array.astype(np.int64)
