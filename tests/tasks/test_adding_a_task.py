"""The example of docs/adding_a_task.md: it runs as it stands there, and its runs can be kept."""

import sys
import types
from pathlib import Path

import pytest
from helpers import content, result
from task_runs import ran, refused

from tasks.frame import exit_status, results

pytestmark = pytest.mark.usefixtures("quick_figures")

PAGE = Path(__file__).resolve().parents[2] / "docs/adding_a_task.md"


@pytest.fixture
def first(monkeypatch):
    """tasks/first.py, as a module."""
    _, code, _ = PAGE.read_text(encoding="utf-8").replace("```python\n", "```").split("```")
    module = types.ModuleType("tasks.first")
    exec(compile(code, "tasks/first.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "tasks.first", module)
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    return module.TASK


SMALL = ["-S", "4", "--hidden", "5", "--batch-size", "20", "--eval-every", "10", "--quiet"]


def test_the_example_trains_resumes_and_compares(first, tmp_path, capsys):
    assert ran(capsys, first, *SMALL, "--steps", 40, "--out", tmp_path / "whole")[0] == 0
    assert ran(capsys, first, *SMALL, "--steps", 20, "--out", tmp_path / "parts")[0] == 0
    assert ran(capsys, first, "--resume", tmp_path / "parts", "--steps", 40)[0] == 0
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert ran(capsys, first, *SMALL, "--steps", 10, "--compare", "--out", tmp_path / "both")[0] == 0
    assert {result(tmp_path / "both" / name)["steps"] for name in ("lstm", "gru")} == {10}
    refused(capsys, "--hidden: '0'", first, "--hidden", 0)
    assert "The first number" in ran(capsys, first, "--help")[1]


def test_its_runs_are_kept_and_shown(first, tmp_path, capsys, monkeypatch):
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["tasks/first.py", "--seed", "1"])
    assert ran(capsys, first, *SMALL, "--steps", 40, "--seed", 1, "--out", tmp_path / "run")[0] == 0
    place = results.keep(tmp_path / "run", "lstm-seed1").parent
    assert place == tmp_path / "docs/results/first"
    assert exit_status(results.main, ["table", str(place)]) == 0
    table = capsys.readouterr().out
    assert "| run | command | what | test MSE at the end | best | steps | wall time |" in table
    assert "| lstm-seed1 | `python tasks/first.py --seed 1` | lstm, length 4, hidden 5, batch size 20 | " in table
    assert exit_status(results.main, ["figure", str(place), str(tmp_path / "x.png")]) == 0
