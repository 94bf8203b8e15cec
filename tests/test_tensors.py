"""Tensors in a file: exact round trips, atomic writes, damaged files, files of another model."""

import json
import math
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import save

from minigrad import Sequential
from minigrad.layers import Linear
from minigrad.tensors import (
    FORMAT,
    CheckpointError,
    fill_exactly,
    load_tensors,
    save_tensors,
    write_atomically,
)

META = {"step": 7, "seconds": 0.1 + 0.2, "big": 2**127 + 1, "none": None, "text": "ψ→\n\"", "nested": {"a": [1, 2.5]}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "last.safetensors"


def failing(error):
    def fail(*arguments, **keywords):
        raise error
    return fail


# ---- round trips -----------------------------------------------------------------------------------------


def arrays_of_all_kinds():
    rng = np.random.default_rng(0)
    kinds = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
             "bool", "complex64"]
    arrays = {f"{kind} {shape}": (10 * rng.standard_normal(shape)).astype("int8").astype(kind)
              for kind in kinds for shape in [(3, 4), (1,), (2, 0, 3), (0,)]}
    arrays.update({f"{kind} scalar": np.array(3, kind) for kind in kinds})
    whole = rng.standard_normal((4, 6))
    arrays.update({"transposed": whole.T, "strided": whole[::2, ::-3], "fortran": np.asfortranarray(whole),
                   "broadcast": np.broadcast_to(whole[0], (3, 6)), "big endian": whole.astype(">f8"),
                   "odd values": np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324, np.pi])})
    return arrays


def test_arrays_round_trip_bit_for_bit(path):
    arrays = arrays_of_all_kinds()
    kept = {name: array.copy() for name, array in arrays.items()}
    save_tensors(path, arrays, META)
    tensors, meta = load_tensors(path)
    assert meta == META
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        native = array.astype(array.dtype.newbyteorder("="))
        assert tensors[name].dtype == native.dtype, name
        assert tensors[name].shape == array.shape, name
        assert tensors[name].tobytes() == native.tobytes(), name
        np.testing.assert_array_equal(array, kept[name])


def test_no_tensors_and_a_string_path(path):
    save_tensors(str(path), {}, {})
    assert load_tensors(str(path)) == ({}, {})


def test_what_was_loaded_outlives_the_file(path):
    save_tensors(path, {"W": np.arange(5.0)}, {})
    tensors, _ = load_tensors(path)
    save_tensors(path, {"W": np.zeros(5)}, {})
    path.unlink()
    np.testing.assert_array_equal(tensors["W"], np.arange(5.0))
    tensors["W"][...] = 1                                        # and is the caller's own


@pytest.mark.parametrize("meta", [{"loss": math.nan}, {"loss": [math.inf]}, {"rng": {"a": -math.inf}}])
def test_meta_that_json_does_not_know_is_refused(path, meta):
    save_tensors(path, {}, {"step": 1})
    with pytest.raises(ValueError, match="Out of range float values"):
        save_tensors(path, {}, meta)
    with pytest.raises(TypeError):
        save_tensors(path, {}, {"array": np.zeros(3)})
    assert load_tensors(path) == ({}, {"step": 1})


# ---- atomic writes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_a_failing_write_leaves_the_old_file_whole(path, monkeypatch, owner, name):
    save_tensors(path, {"W": np.arange(5.0)}, {"step": 1})
    old = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            save_tensors(path, {"W": np.zeros(5)}, {"step": 2})
    assert path.read_bytes() == old
    assert [p.name for p in path.parent.iterdir()] == [path.name]            # nothing half-written is left
    save_tensors(path, {"W": np.zeros(5)}, {"step": 2})
    assert load_tensors(path)[1] == {"step": 2}


def test_a_process_killed_while_writing_leaves_the_old_file_whole(path, monkeypatch):
    """What stands beside at that moment is overwritten by the next write."""
    write_atomically(path, b"old")
    seen = []
    monkeypatch.setattr(os, "fsync", lambda number: seen.append((path.read_bytes(), beside.stat().st_size)))
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(b"the rest of a run that was killed, longer than what follows")
    write_atomically(path, b"new")
    assert seen == [(b"old", 3)]
    assert path.read_bytes() == b"new"
    assert not beside.exists()


def test_an_unknown_dtype_leaves_the_old_file_whole(path):
    write_atomically(path, b"old")
    with pytest.raises(Exception, match="dtype"):
        save_tensors(path, {"W": np.zeros(3, "complex128")}, {})
    assert path.read_bytes() == b"old"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_what_is_no_file_is_left_alone(path):
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(path, b"new")
    assert path.is_fifo()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        save_tensors(tmp_path / "none" / "last.safetensors", {}, {})


# ---- damaged files ---------------------------------------------------------------------------------------


def assert_refused(path, sentence=""):
    with pytest.raises(CheckpointError) as error:
        load_tensors(path)
    assert str(error.value).startswith(f"checkpoint {path}: ")
    assert sentence in str(error.value)


def test_a_file_cut_off_anywhere_is_refused(path):
    save_tensors(path, {"W": np.arange(5.0), "b": np.zeros((2, 3), "float32")}, META)
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 7), len(whole) - 1):
        path.write_bytes(whole[:length])
        assert_refused(path, "damaged or not a safetensors file")
    path.write_bytes(whole + b"\0")
    assert_refused(path, "damaged")
    path.write_bytes(whole)
    assert load_tensors(path)[1] == META


def test_a_flipped_byte_is_refused_or_changes_nothing(path):
    """It changes nothing where it hides the digest itself: a file of an older version has none."""
    tensors = {"W": np.arange(3.0), "b": np.zeros((2, 2), "float32")}
    save_tensors(path, tensors, {"step": 1, "text": "ψ"})
    whole, refused = bytearray(path.read_bytes()), 0
    for n in range(len(whole)):
        damaged = whole.copy()
        damaged[n] ^= (1, 4, 16, 128)[n % 4]
        path.write_bytes(damaged)
        try:
            got, meta = load_tensors(path)
        except CheckpointError:
            refused += 1
        else:
            assert meta == {"step": 1, "text": "ψ"}
            assert {name: (array.dtype, array.tobytes()) for name, array in got.items()} == {
                name: (array.dtype, array.tobytes()) for name, array in tensors.items()}
    assert refused > 0.9 * len(whole)


@settings(max_examples=30, deadline=None)
@given(content=st.binary(max_size=200))
def test_garbage_is_refused(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    path.write_bytes(content)
    assert_refused(path)


def test_text_a_pickle_and_an_archive_are_refused(path):
    for content in (b"step,loss\n1,0.5\n", pickle.dumps({"W": [1.0]}), b"PK\x03\x04" * 9):
        path.write_bytes(content)
        assert_refused(path, "damaged or not a safetensors file")


def test_safetensors_of_others_are_refused(path):
    for metadata, came in ((None, "None"), ({"format": "pt"}, "'pt'"), ({"format": "minigrad-0"}, "'minigrad-0'")):
        path.write_bytes(save({"W": np.zeros(3)}, metadata=metadata))
        assert_refused(path, f"format is {came}; expected '{FORMAT}'")
    header = json.dumps({"W": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))     # a dtype that NumPy does not know
    assert_refused(path, "format is None")


def test_our_format_without_our_meta_is_refused(path):
    for extra in ({}, {"meta": "{"}, {"meta": ""}):
        path.write_bytes(save({"W": np.zeros(3)}, metadata={"format": FORMAT, **extra}))
        assert_refused(path, "damaged")


def test_a_missing_file_or_a_folder_is_refused(path):
    assert_refused(path, "there is no such file")
    assert_refused(path.parent, "there is no such file")


# ---- filling a model -------------------------------------------------------------------------------------


def model(width=4, seed=0):
    return Sequential(Linear(3, width, rng=seed), Linear(width, 2, rng=seed + 1))


def tensors_of(layer):
    return {name: p.value.copy() for name, p in layer.named_parameters()}


def test_parameters_are_filled_in_place(path):
    source, target = model(seed=0), model(seed=5)
    save_tensors(path, {name: p.value for name, p in source.named_parameters()}, {})
    arrays = [p.value for p in target.parameters()]
    fill_exactly(target.named_arrays(), load_tensors(path)[0], path)
    for p, array, original in zip(target.parameters(), arrays, source.parameters()):
        assert p.value is array
        np.testing.assert_array_equal(p.value, original.value)


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda t: t.pop("layers.1.b"), "layers.1.b is missing"),
    (lambda t: t.update({"layers.1.b": np.zeros(3, "float32")}), "layers.1.b is float32 (3,); this model has float32"),
    (lambda t: t.update({"layers.1.b": np.zeros((1, 2), "float32")}), "layers.1.b is float32 (1, 2)"),
    (lambda t: t.update({"layers.1.b": np.zeros(2)}), "layers.1.b is float64 (2,); this model has float32 (2,)"),
    (lambda t: t.update({"layers.2.W": np.zeros(2)}), "layers.2.W is not known to this model"),
])
def test_what_does_not_fit_is_named_and_nothing_is_written(change, sentence):
    target, tensors = model(seed=5), tensors_of(model(seed=0))
    before = tensors_of(target)
    change(tensors)
    with pytest.raises(CheckpointError) as error:
        fill_exactly(target.named_arrays(), tensors, "runs/last.safetensors")
    assert str(error.value).startswith("checkpoint runs/last.safetensors: ")
    assert sentence in str(error.value)
    for name, p in target.named_parameters():
        np.testing.assert_array_equal(p.value, before[name])


def test_fill_exactly_fills_scalars_empty_arrays_and_views():
    whole = np.zeros((4, 4))
    arrays = {"scalar": np.array(0.0), "empty": np.zeros((0, 2)), "view": whole[::2, 1]}
    fill_exactly(arrays, {"scalar": np.array(2.0), "empty": np.zeros((0, 2)), "view": np.array([3.0, 4.0])}, "here")
    assert arrays["scalar"] == 2
    np.testing.assert_array_equal(whole[:, 1], [3, 0, 4, 0])
