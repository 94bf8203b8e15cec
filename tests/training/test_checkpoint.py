"""Checkpoints and log.csv: exact round trips, atomic writes, damaged files, files of another model."""

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
from minigrad.training.runlog import RunLog, read_log

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
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert_refused(path, "damaged or not a safetensors file")
    path.write_bytes(whole + b"\0")
    assert_refused(path, "damaged")
    path.write_bytes(whole)
    assert load_tensors(path)[1] == META


def test_a_flipped_byte_is_an_error_of_the_checkpoint_or_none(path):
    """There is no checksum over the values; but whatever the header says, no other error comes out."""
    save_tensors(path, {"W": np.arange(5.0), "b": np.zeros((2, 3), "float32")}, META)
    whole, refused = bytearray(path.read_bytes()), 0
    for n in range(len(whole)):
        damaged = whole.copy()
        damaged[n] ^= (1, 4, 16, 128)[n % 4]
        path.write_bytes(damaged)
        try:
            load_tensors(path)
        except CheckpointError:
            refused += 1
    assert refused > len(whole) // 3


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


# ---- log.csv ---------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path):
    log = RunLog(tmp_path / "log.csv")
    log.start(["step", "loss", "test_mse"])
    return log


def test_rows_are_in_the_file_at_once(log):
    log.append({"step": 0, "test_mse": 0.25})
    log.append({"step": 50, "loss": 0.125})
    assert log.path.read_text(encoding="utf-8") == "step,loss,test_mse\n0,,0.25\n50,0.125,\n"
    assert log.rows == [{"step": 0, "loss": None, "test_mse": 0.25}, {"step": 50, "loss": 0.125, "test_mse": None}]
    assert read_log(log.path) == (log.columns, log.rows)
    assert log.column("loss") == [(50, 0.125)]


ODD = [0, -3, 10**20, 0.1, 1 / 3, -2.5, -0.0, 1e-5, 1e-05, 1e16, 1e300, 5e-324, -1e-7, math.inf, -math.inf, 3.0]


@pytest.mark.parametrize("number", [*ODD, math.nan])
def test_numbers_come_back_as_they_were(log, number):
    log.append({"step": 1, "loss": number})
    came = read_log(log.path)[1][0]["loss"]
    assert type(came) is type(number)
    assert repr(came) == repr(number)


@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.one_of(st.floats(), st.integers(), st.none()), min_size=1, max_size=6))
def test_any_numbers_come_back(numbers, tmp_path_factory):
    log = RunLog(tmp_path_factory.getbasetemp() / "any.csv")
    log.start(["step", "value"])
    for step, number in enumerate(numbers):
        log.append({"step": step, "value": number})
    assert repr(read_log(log.path)[1]) == repr(log.rows)
    log.cut_back(10**9)
    assert [repr(row["value"]) for row in log.rows] == [repr(number) for number in numbers]


def test_numpy_scalars_are_written_as_plain_numbers(log):
    log.append({"step": np.int64(3), "loss": np.float32(0.1), "test_mse": np.array(0.1)})
    assert log.path.read_text(encoding="utf-8").splitlines()[1] == "3,0.10000000149011612,0.1"
    assert read_log(log.path)[1] == log.rows == [{"step": 3, "loss": float(np.float32(0.1)), "test_mse": 0.1}]


def test_cut_back_keeps_the_rows_up_to_the_step(log):
    for step in range(0, 60, 10):
        log.append({"step": step, "loss": step / 7, "test_mse": math.nan if step == 20 else None})
    lines = log.path.read_bytes().splitlines(keepends=True)
    other = RunLog(log.path)
    other.cut_back(30)
    assert log.path.read_bytes() == b"".join(lines[:5])
    assert [row["step"] for row in other.rows] == [0, 10, 20, 30]
    assert other.columns == log.columns
    other.append({"step": 40, "loss": 40 / 7})
    assert log.path.read_bytes() == b"".join(lines[:6])
    other.cut_back(-1)
    assert log.path.read_bytes() == lines[0]
    assert other.rows == []


def test_a_last_line_cut_off_in_writing_is_left_out(log):
    for step in (1, 2, 3):
        log.append({"step": step, "loss": 0.125 * step, "test_mse": -1.5})
    whole = log.path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(ends[0], len(whole) + 1):
        log.path.write_bytes(whole[:length])
        rows = read_log(log.path)[1]
        assert [row["step"] for row in rows] == [1, 2, 3][:sum(end <= length for end in ends) - 1]
        assert all(row["test_mse"] == -1.5 for row in rows)
        resumed = RunLog(log.path)
        resumed.cut_back(99)
        resumed.append({"step": 9})
        assert [row["step"] for row in read_log(log.path)[1]] == [*(row["step"] for row in rows), 9]


def test_start_begins_anew(log):
    log.append({"step": 1})
    log.start(["step", "other"])
    assert log.rows == []
    assert log.path.read_text(encoding="utf-8") == "step,other\n"


def test_an_unknown_column_is_refused_and_nothing_written(log):
    with pytest.raises(ValueError, match="accuracy is not a column; the columns are"):
        log.append({"step": 1, "accuracy": 0.5})
    assert log.rows == []
    assert log.path.read_text(encoding="utf-8") == "step,loss,test_mse\n"


@pytest.mark.parametrize("content", ["", "\n", "step", "loss,step\n1,2\n", "1,2\n"])
def test_what_is_no_log_is_refused(tmp_path, content):
    path = tmp_path / "log.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="not a run's log"):
        read_log(path)
    with pytest.raises(ValueError, match="not a run's log"):
        RunLog(path).cut_back(5)
    assert path.read_text(encoding="utf-8") == content


def test_column_names_are_quoted_where_they_must_be(tmp_path):
    log = RunLog(tmp_path / "log.csv")
    log.start(["step", "loss, mean", 'the "best"', "σ"])
    log.append({"step": 1, "loss, mean": 0.5, 'the "best"': 2, "σ": 3.5})
    assert read_log(log.path) == (log.columns, log.rows)
