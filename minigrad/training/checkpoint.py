"""What a training checkpoint holds besides the model, and how a model is read from one."""

from zlib import crc32

from minigrad.backend import asnumpy
from minigrad.tensors import CheckpointError, fill_exactly, load_tensors

TRAINER_KEYS = ("optimizer.", "trainer.", "carried.")


def model_tensors(tensors):
    """{name: array} of a training checkpoint without what only the trainer needs."""
    return {name: array for name, array in tensors.items() if not name.startswith(TRAINER_KEYS)}


def load_model(layer, path):
    """Fill the layer's Parameters and buffers, in place, from a training checkpoint or a file of `layer.save`.

    Returns the file's meta. Raises CheckpointError, naming the key, before anything is changed.
    """
    tensors, meta = load_tensors(path)
    tensors = model_tensors(tensors)
    for name, array in layer.named_buffers():                    # files of older versions keep a CRC-32 of each alone
        if name not in tensors and name in meta.get("constants", {}):
            if meta["constants"][name] != crc32(asnumpy(array).tobytes()):
                raise CheckpointError(f"checkpoint {path}: {name} is not this model's, which was made from another "
                                      "seed or by another version of NumPy")
            tensors[name] = asnumpy(array)
    fill_exactly(layer.named_arrays(), tensors, path)
    return meta
