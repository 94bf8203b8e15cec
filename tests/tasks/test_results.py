"""tasks/frame/results.py: what is kept of a run, and the tables and figures made from it."""

import json

import pytest

from minigrad.training import read_log
from tasks import adding, char_lm, imdb, pixel_mnist, tsdae
from tasks.frame import exit_status, figures, results, run
from tasks.frame.flags import settings_of


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A tiny run, kept under a root of its own."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr("sys.argv", ["/somewhere/tasks/adding.py", "-S", "8", "--out", "x y", "--seed", "0", "--quiet"])
    out = tmp_path / "run"
    assert run(adding.TASK, ["-S", "8", "-K", "2", "--hidden", "4", "--train-size", "50", "--test-size", "10",
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
    assert exit_status(results.main, ["table", str(kept.parent)]) == 0
    assert "| tiny | `python tasks/adding.py -S 8 --seed 0` | " in capsys.readouterr().out
    picture = kept.parent / "all.png"
    assert exit_status(results.main, ["figure", str(kept.parent), str(picture), "tiny"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_kept_result_is_never_overwritten(kept, tmp_path, capsys):
    before = kept.read_bytes()
    assert exit_status(results.main, ["keep", str(tmp_path / "run"), "--as", "tiny"]) == 2
    assert "is there already; nothing was written" in capsys.readouterr().err
    assert kept.read_bytes() == before
    (tmp_path / "run/log.csv").write_text("step\nx\n")
    assert exit_status(results.main, ["keep", str(tmp_path / "run"), "--as", "other"]) == 2
    assert "is not a finished run" in capsys.readouterr().err
    assert not (kept.parent / "other.json").exists()


def test_a_result_that_the_log_has_left_behind_is_not_kept(kept, tmp_path, capsys):
    with (tmp_path / "run/log.csv").open("a") as log:            # as a resumed run does before it is killed
        log.write(",".join(["70", *[""] * (len(read_log(tmp_path / "run/log.csv")[0]) - 1)]) + "\n")
    assert exit_status(results.main, ["keep", str(tmp_path / "run"), "--as", "other"]) == 2
    assert "result.json is of step 60, log.csv ends at 70" in capsys.readouterr().err
    assert not (kept.parent / "other.json").exists()


def test_a_damaged_kept_run_is_one_line(kept, capsys):
    (kept.parent / "bad.json").write_text("{")
    assert exit_status(results.main, ["table", str(kept.parent)]) == 2
    err = capsys.readouterr().err
    assert ("bad.json: damaged, or no JSON" in err, err.count("\n")) == (True, 1)


@pytest.mark.parametrize(("argv", "sentence"), [
    (["keep", "nowhere", "--as", "../x"], "--as is '../x'; expected a plain name"),
    (["keep", "nowhere", "--as", ""], "--as is ''; expected a plain name"),
    (["keep", "nowhere", "--as", ".."], "--as is '..'; expected a plain name"),
    (["table", "nowhere"], "nowhere has no kept run"),
    (["keep", "nowhere", "--as", "x"], "nowhere: no run there"),
])
def test_what_is_missing_is_said_in_one_line(capsys, argv, sentence):
    assert exit_status(results.main, argv) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert len(err.splitlines()) == 1


# ---- another task ----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def text_runs(tmp_path_factory):
    """Folders of a comparison of two layers, and of one of them with another seed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "a text.txt").write_bytes(b"some words, said again and again; " * 30)
    small = ["--width", "64", "--batch-size", "2", "--unroll", "5", "--steps",
             "20", "--eval-every", "10", "--quiet", "--data", str(folder / "a text.txt")]
    with pytest.MonkeyPatch.context() as patch:
        for seed, which in (("0", ["--compare", "srupp,lstm", "--layers", "1", "--lstm-layers", "1"]), (
                "1", ["--layer", "srupp", "--layers", "1"])):
            flags = [*which, "--seed", seed]
            patch.setattr("sys.argv", ["/x/tasks/char_lm.py", *flags, "--data=x y/z", "--data", "x y/z", "--quiet"])
            assert run(char_lm.TASK, [*small, *flags, "--out", str(folder / seed)]) == 0
    return folder


@pytest.fixture
def kept_text_runs(tmp_path, monkeypatch, text_runs):
    """The folder where they are kept."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    results.keep(text_runs / "0/srupp", "srupp-seed0")
    results.keep(text_runs / "0/lstm", "lstm-seed0", whole_log=True)
    return results.keep(text_runs / "1", "srupp-seed1").parent


def test_runs_of_the_language_model_are_kept_and_shown(kept_text_runs, text_runs, tmp_path, capsys, monkeypatch):
    assert kept_text_runs == tmp_path / "docs/results/char_lm"
    assert [row["step"] for row in read_log(kept_text_runs / "srupp-seed0.csv")[1]] == [0, 10, 20]
    assert read_log(kept_text_runs / "lstm-seed0.csv") == read_log(text_runs / "0/lstm/log.csv")
    capsys.readouterr()
    assert exit_status(results.main, ["table", str(kept_text_runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("| run | command | layer | d | parameters | validation BPC | test BPC | steps | wall time |")
    kept = json.loads((kept_text_runs / "srupp-seed1.json").read_text(encoding="utf-8"))["result"]
    assert lines[-3] == (
        "| srupp-seed1 | `python tasks/char_lm.py --layer srupp --layers 1 --seed 1 --data 'a text.txt'` | SRU++ | "
        f"64 | {kept['parameters']:,} | {kept['valid_bpc']:.3f} | {kept['test_bpc']:.3f} | 20 | 0.0 min |")
    drawn = {}
    monkeypatch.setattr(results, "draw_runs", lambda path, groups, **how: drawn.update(groups=groups, how=how))
    assert exit_status(results.main, ["figure", str(kept_text_runs), "x.png", "--x", "seconds"]) == 0
    assert list(drawn["groups"]) == ["LSTM, d = 27, lstm layers 1, unroll 5, batch size 2",
                                     "SRU++, d = 64, layers 1, unroll 5, batch size 2, 2 seeds"]
    assert drawn["how"]["title"] == "SRU++, d = 64"


@pytest.mark.parametrize(("task", "argv", "words"), [
    (adding, [], "RRA, K = 10"), (adding, ["--paper"], "RRA, K = 10, the paper's setting"),
    (adding, ["--paper", "--forget-bias", "1", "--lr", "3"], "RRA, K = 10, the paper's setting, forget bias 1, lr 3"),
    (imdb, ["--optimizer", "rmsprop-centred"], "RRA, K = 5, optimizer rmsprop-centred"),
    (imdb, ["--model", "birra", "-K", "20", "--test-size", "100"], "bidirectional RRA, K = 20, test size 100"),
    (pixel_mnist, ["--model", "irnn", "--permuted", "--rows"], "IRNN, permuted, rows"),
    (char_lm, ["--heads", "2", "--attention-last", "1", "--clip-norm", "0"],
     "SRU++, d = 256, clip norm 0, heads 2, attention last 1"),
    (char_lm, ["--layer", "sru", "--width", "166"], "SRU, d = 166"),
    (tsdae, ["--no-tie", "--lr", "1e-3"], "TSDAE, delete 0.3, cls, not tied, lr 0.001")])
def test_what_a_run_was(task, argv, words):
    assert results.describe(task.TASK, settings_of(task.TASK, argv)) == words


@pytest.mark.parametrize(("runs", "seeds", "words"), [(1, 1, ""), (3, 3, ", 3 seeds"), (3, 2, ", 3 runs")])
def test_runs_that_differ_in_more_than_the_seed_are_not_called_seeds(runs, seeds, words):
    assert results.how_many(runs, seeds) == words


def test_other_columns_over_seconds(kept_text_runs, tmp_path, capsys):
    path = tmp_path / "a.png"
    for flags in (["--x", "seconds"], ["--y", "grad_norm"], ["--y", "alpha_1", "--x", "seconds"]):
        argv = ["figure", str(kept_text_runs), str(path), "srupp-seed0", "srupp-seed1", *flags]
        assert exit_status(results.main, argv) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
    assert exit_status(results.main, ["figure", str(kept_text_runs), str(path), "--y", "alpha_1"]) == 2
    assert "--y is 'alpha_1'; expected a column of lstm-seed0's log: step, seconds, " in capsys.readouterr().err


def test_the_mean_of_runs_whose_x_differ(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axes, x, y, **how: lines.append((list(x), list(y))))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda axes, **how: None)
    runs = {"a": [[(1.0, 4), (2.0, 2)], [(3.0, 6), (5.0, 4), (9.0, 1)]]}
    figures.draw_runs(tmp_path / "a.png", runs, title="", x_label="", y_label="", in_step=False)
    assert lines[-1] == ([2.0, 3.5], [5.0, 3.0])


def test_a_comparison_is_kept_in_parts(kept_text_runs, text_runs, capsys):
    assert exit_status(results.main, ["keep", str(text_runs / "0"), "--as", "both"]) == 2
    assert "is a comparison; keep the runs in its folders, srupp,lstm" in capsys.readouterr().err
