"""log.csv: numbers come back as they were, a log is cut back to a step, damaged files are refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minigrad.training.runlog import RunLog, read_log


def cut_back(log, step):
    log.read(step)
    log.write()


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
    cut_back(log, 10**9)
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
    cut_back(other, 30)
    assert log.path.read_bytes() == b"".join(lines[:5])
    assert [row["step"] for row in other.rows] == [0, 10, 20, 30]
    assert other.columns == log.columns
    other.append({"step": 40, "loss": 40 / 7})
    assert log.path.read_bytes() == b"".join(lines[:6])
    cut_back(other, -1)
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
        cut_back(resumed, 99)
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
        cut_back(RunLog(path), 5)
    assert path.read_text(encoding="utf-8") == content


def test_column_names_are_quoted_where_they_must_be(tmp_path):
    log = RunLog(tmp_path / "log.csv")
    log.start(["step", "loss, mean", 'the "best"', "σ"])
    log.append({"step": 1, "loss, mean": 0.5, 'the "best"': 2, "σ": 3.5})
    assert read_log(log.path) == (log.columns, log.rows)
