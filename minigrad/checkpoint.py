"""Checkpoints: one file, tensors in safetensors, everything else as JSON in its header. Nothing is ever unpickled.

A file is written beside its place, flushed to the disk, and then moved there: at every moment the old or the new one
is whole.
"""

import errno
import json
import os
from pathlib import Path
from zlib import crc32

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from minigrad.backend import array_module, asnumpy

FORMAT = "minigrad-1"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or of another model."""


def write_atomically(path, content):
    """Write bytes to `path` so that it holds the old or the new content at every moment, also when killed.

    Raises OSError, and leaves it alone, where it is no file: a folder, a device.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    beside = path.with_name(f"{path.name}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)                           # there only if something failed: a full disk


def save_checkpoint(path, tensors, meta):
    """Write {name: array} and a JSON-able `meta` to one file, atomically. Arrays may live on either device."""
    arrays = {name: asnumpy(array).copy(order="C") for name, array in tensors.items()}
    header = {"format": FORMAT, "meta": json.dumps(meta, allow_nan=False)}
    write_atomically(path, save(arrays, metadata=header))


def load_checkpoint(path):
    """({name: NumPy array}, meta). Raises CheckpointError for a file that is missing, damaged or not a checkpoint."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path}: there is no such file")
    try:
        with safe_open(str(path), framework="np") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"checkpoint {path}: format is {header.get('format')!r}; expected {FORMAT!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator there
        return tensors, json.loads(header["meta"])
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"checkpoint {path}: damaged or not a safetensors file ({error})") from error


def model_tensors(tensors):
    """{name: array} of a training checkpoint without what only the trainer needs."""
    return {name: array for name, array in tensors.items()
            if not name.startswith(("optimizer.", "trainer.", "carried."))}


def constants_of(layer):
    """{dotted name: CRC-32} of a layer's arrays that are not learned: a checkpoint tells by it if they are the same."""
    return {name: crc32(asnumpy(array).tobytes()) for name, array in layer.named_constants()}


def require_constants(layer, meta, path):
    """Raise CheckpointError unless the layer has the constants of the model that was saved, which its seed decides."""
    ours, saved = constants_of(layer), meta.get("constants", {})
    for name in sorted(set(ours) & set(saved)):
        if ours[name] != saved[name]:
            raise CheckpointError(f"checkpoint {path}: {name} is not this model's, which was made from another seed or "
                                  "by another version of NumPy")


def load_parameters(named_parameters, tensors, path="checkpoint"):
    """Fill parameters, in place, from {name: array}; every name, shape and dtype must fit.

    Nothing is written before all of them do. Raises CheckpointError that names the key which does not fit.
    """
    named = dict(named_parameters)
    fill_exactly({name: parameter.value for name, parameter in named.items()}, tensors, path)


def fill_exactly(arrays, tensors, path):
    """Copy {name: array} into the arrays of the same names, checking all of them first."""
    for name, array in arrays.items():
        if name not in tensors:
            raise CheckpointError(f"checkpoint {path}: {name} is missing; it is of another model or optimizer")
        came = tensors[name]
        if came.shape != array.shape or came.dtype != array.dtype:
            raise CheckpointError(f"checkpoint {path}: {name} is {came.dtype} {came.shape}; this model has "
                                  f"{array.dtype} {array.shape}")
    unknown = sorted(set(tensors) - set(arrays))
    if unknown:
        raise CheckpointError(f"checkpoint {path}: {unknown[0]} is not known to this model or optimizer")
    for name, array in arrays.items():
        array[...] = array_module(array).asarray(tensors[name])
