"""tasks/results.py: what is kept of a run, and the tables and figures made from it."""

import json

import pytest

from minigrad.runlog import read_log
from tasks import adding, results
from tasks.common import run


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A tiny run, kept under a root of its own."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr("sys.argv", ["/somewhere/tasks/adding.py", "-S", "8", "--out", "x y", "--seed", "0", "--quiet"])
    out = tmp_path / "run"
    assert run(adding.main, ["-S", "8", "-K", "2", "--hidden", "4", "--train-size", "50", "--test-size", "10",
                             "--batch-size", "5", "--steps", "60", "--eval-every", "10", "--out", str(out)]) == 0
    return results.keep(out, "tiny")


def test_a_kept_run_says_what_it_was(kept, capsys):
    content = json.loads(kept.read_text(encoding="utf-8"))
    assert content["ran_on"]["command"] == "python tasks/adding.py -S 8 --seed 0"
    assert content["settings"]["hidden"] == 4
    assert content["result"]["steps"] == 60
    _, rows = read_log(kept.with_suffix(".csv"))
    assert [row["step"] for row in rows] == [0, 10, 20, 30, 40, 50, 60]
    capsys.readouterr()
    assert run(results.main, ["table", str(kept.parent)]) == 0
    assert "| tiny | `python tasks/adding.py -S 8 --seed 0` | " in capsys.readouterr().out
    picture = kept.parent / "all.png"
    assert run(results.main, ["figure", str(kept.parent), str(picture), "tiny"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_kept_result_is_never_overwritten(kept, tmp_path, capsys):
    before = kept.read_bytes()
    assert run(results.main, ["keep", str(tmp_path / "run"), "--as", "tiny"]) == 2
    assert "is there already; nothing was written" in capsys.readouterr().err
    assert kept.read_bytes() == before
    (tmp_path / "run/log.csv").write_text("step\nx\n")
    assert run(results.main, ["keep", str(tmp_path / "run"), "--as", "other"]) == 2
    assert "is not a finished run" in capsys.readouterr().err
    assert not (kept.parent / "other.json").exists()


@pytest.mark.parametrize(("argv", "sentence"), [
    (["keep", "nowhere", "--as", "../x"], "--as is '../x'; expected a plain name"),
    (["table", "nowhere"], "nowhere has no kept run"),
    (["keep", "nowhere", "--as", "x"], "nowhere: no run there"),
])
def test_what_is_missing_is_said_in_one_line(capsys, argv, sentence):
    assert run(results.main, argv) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert len(err.splitlines()) == 1
