"""A dict of arrays in one safetensors file, with JSON in its header. Nothing is ever unpickled.

A file is written to a temporary file, synced, then renamed, so that there is always a complete file, old or new. Its
header holds the SHA-256 of the arrays and the JSON, which is checked when the file is read.
"""

import errno
import hashlib
import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from minigrad.backend import array_module, asnumpy

FORMAT = "minigrad-1"


class CheckpointError(ValueError):
    """A file that is missing, damaged, or from another model."""


def write_atomically(path, content):
    """Write bytes to `path` so that it always holds the old or the new content, even if the process is killed.

    Raises OSError, and changes nothing, if `path` is not a regular file: a folder, a device.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    temporary = path.with_name(f"{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)                           # exists only after a failure: a full disk


def save_tensors(path, tensors, meta=None):
    """Write {name: array} and a JSON-able `meta` to one file, atomically. Arrays may be on either device.

    Raises OSError as `write_atomically`, ValueError for NaN or infinity in `meta`.
    """
    arrays = {name: asnumpy(array).astype(array.dtype.newbyteorder("="), order="C") for name, array in tensors.items()}
    header = {"format": FORMAT, "meta": json.dumps(meta or {}, allow_nan=False)}
    write_atomically(path, save(arrays, metadata={**header, "sha256": _digest(arrays, header["meta"])}))


def load_tensors(path):
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
        meta = json.loads(header["meta"])
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"checkpoint {path}: damaged or not a safetensors file ({error})") from error
    if header.get("sha256") not in (None, _digest(tensors, header["meta"])):  # files of older versions have none
        raise CheckpointError(f"checkpoint {path}: damaged: its content does not have the SHA-256 in its header")
    return tensors, meta


def _digest(arrays, meta):
    digest = hashlib.sha256(meta.encode("utf-8"))
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def fill_exactly(arrays, tensors, path):
    """Copy `tensors` into the `arrays` of the same names, both {name: array}.

    Raises CheckpointError, with nothing copied, for a missing or unknown name or another shape or dtype.
    """
    for name, array in arrays.items():
        if name not in tensors:
            raise CheckpointError(f"checkpoint {path}: {name} is missing; it is of another model or optimizer")
        loaded = tensors[name]
        if loaded.shape != array.shape or loaded.dtype != array.dtype:
            raise CheckpointError(f"checkpoint {path}: {name} is {loaded.dtype} {loaded.shape}; this model has "
                                  f"{array.dtype} {array.shape}")
    unknown = sorted(set(tensors) - set(arrays))
    if unknown:
        raise CheckpointError(f"checkpoint {path}: {unknown[0]} is not known to this model or optimizer")
    for name, array in arrays.items():
        array[...] = array_module(array).asarray(tensors[name])

