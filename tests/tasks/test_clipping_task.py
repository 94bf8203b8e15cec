"""tasks/clipping.py: the cliff's gradient and its trajectories; the table as a user runs it, and with bad input."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minigrad.backend import gpu_problem
from tasks import adding, clipping
from tasks.frame.common import run

ROOT = Path(__file__).resolve().parents[2]
TINY = ["-S", "6", "--hidden", "4", "--train-size", "40", "--test-size", "20", "--batch-size", "5", "--steps", "12",
        "--seeds", "2", "--log-every", "4", "--lr", "20", "--clip-norm", "0.01", "--clip-value", "0.005"]
TABLE = [*TINY, "--only", "table"]


def ran(capsys, *argv):
    """(exit status, stdout, stderr) of the task in this process."""
    try:
        status = run(clipping.main, [str(word) for word in argv])
    except SystemExit as end:                                # argparse
        status = end.code
    out, err = capsys.readouterr()
    return status, out, err


def runs_in(folder):
    return json.loads((folder / "runs.json").read_text(encoding="utf-8"))


# ---- the cliff -------------------------------------------------------------------------------------------

def gradient(w, b):
    w, b = np.array([w]), np.array([b])
    E, cache = clipping.cliff_forward(w, b)
    return float(E[0]), *(float(g[0]) for g in clipping.cliff_backward(cache))


@pytest.mark.parametrize(("w", "b"), [(5.2, -2.3), (4.2, -2.07), (4.0, -2.0), (4.0, -2.6), (-3.0, 1.0), (0.0, 0.0)])
def test_the_gradient_is_that_of_central_differences(w, b):
    eps = 1e-6
    _, dw, db = gradient(w, b)
    assert dw == pytest.approx((gradient(w + eps, b)[0] - gradient(w - eps, b)[0]) / (2 * eps), rel=1e-6, abs=1e-9)
    assert db == pytest.approx((gradient(w, b + eps)[0] - gradient(w, b - eps)[0]) / (2 * eps), rel=1e-6, abs=1e-9)


def test_the_formula_written_out():
    x = 0.5
    for _ in range(50):
        x = 4.3 / (1 + math.exp(-x)) - 2.2
    E, _ = clipping.cliff_forward(np.array([4.3]), np.array([-2.2]))
    assert float(E[0]) == pytest.approx((1 / (1 + math.exp(-x)) - 0.7)**2, rel=1e-12)


def test_an_entry_is_a_model_of_its_own():
    w, b = np.meshgrid([4.2, 5.0], [-2.5, -2.0, -1.5])
    E, cache = clipping.cliff_forward(w, b)
    dw, db = clipping.cliff_backward(cache)
    for at in np.ndindex(w.shape):
        assert (E[at], dw[at], db[at]) == pytest.approx(gradient(w[at], b[at]), rel=1e-12)


def test_there_is_a_wall():
    b = np.linspace(-2.7, -2.5, 20_001)
    E, cache = clipping.cliff_forward(np.full_like(b, 5.0), b)
    norms = np.hypot(*clipping.cliff_backward(cache))
    wall = norms.argmax()
    below, above = wall - 500, wall + 500                        # 0.005 to either side
    assert norms[wall] > 300 * max(norms[below], norms[above])
    assert E[below] > 0.25
    assert E[above] < 0.03


@pytest.fixture(scope="module")
def paths():
    return {variant: clipping.descend(variant) for variant in clipping.VARIANTS}


def test_without_clipping_the_wall_throws_it_far_away_for_good(paths):
    at = clipping.thrown(paths["none"])
    before, after = paths["none"][at], paths["none"][at + 1]
    assert before.norm > 20
    assert math.hypot(after.w - before.w, after.b - before.b) == pytest.approx(clipping.CLIFF["lr"] * before.norm)
    assert math.hypot(after.w - before.w, after.b - before.b) > 10
    assert paths["none"][-1].norm < 1e-6                         # flat there: it does not come back
    assert paths["none"][-1].error == pytest.approx(0.09, abs=1e-4)


@pytest.mark.parametrize("variant", ["value", "norm"])
def test_clipped_it_stays_beside_the_wall_and_goes_down(paths, variant):
    points = paths[variant]
    assert clipping.thrown(points) is None
    assert max(point.norm for point in points) > 20              # it meets the same wall
    assert sum(point.error for point in points[-20:]) / 20 < 0.05
    assert any(point.clipped for point in points)
    assert not any(point.clipped for point in points[:clipping.shared_steps(paths)])


def test_by_norm_the_direction_is_kept_and_by_value_it_is_not(paths):
    n = clipping.shared_steps(paths)
    move = {variant: np.subtract(points[n + 1][:2], points[n][:2]) for variant, points in paths.items()}
    unit = {variant: step / np.linalg.norm(step) for variant, step in move.items()}
    assert unit["norm"] == pytest.approx(unit["none"], abs=1e-9)
    assert np.linalg.norm(move["norm"]) == pytest.approx(clipping.CLIFF["lr"] * clipping.CLIFF["threshold"])
    assert unit["value"] == pytest.approx([math.sqrt(0.5)] * 2)
    assert unit["none"] @ unit["value"] < 0.98
    for points in paths.values():
        assert [point[:4] for point in points[:n + 1]] == [point[:4] for point in paths["none"][:n + 1]]


def test_the_picture_says_where_the_thrown_one_went(paths, tmp_path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axes = FigureCanvasAgg(Figure()).figure.add_subplot()
    clipping.draw_surface(axes, paths)
    at = clipping.thrown(paths["none"])
    there = paths["none"][at + 1]
    text, = (text for text in axes.texts if "thrown" in text.get_text())
    assert f"({there.w:.1f}, {there.b:.1f})" in text.get_text()
    assert clipping.in_frame(text.xy)


def test_only_the_cliff(tmp_path, capsys):
    status, out, _ = ran(capsys, "--only", "cliff", "--out", tmp_path / "run", "--quiet")
    assert status == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "cliff.csv", "cliff.png", "result.json"}
    assert "no clipping: thrown off at step" in out
    assert out.count("stays by the wall") == 2


# ---- the table -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of a tiny table, run to its end."""
    folder = tmp_path_factory.mktemp("table") / "run"
    assert run(clipping.main, [*TABLE, "--out", str(folder), "--quiet"]) == 0
    return folder


def test_a_run_that_diverges_is_counted_and_ends_nothing(whole_run):
    result = json.loads((whole_run / "result.json").read_text(encoding="utf-8"))
    none, value, norm = result["table"]
    assert (none["variant"], none["seeds"], none["diverged"]) == ("none", 2, 2)
    assert (value["diverged"], norm["diverged"]) == (0, 0)
    assert none["median_test_mse"] is None
    assert norm["median_test_mse"] > 0
    assert none["clipped_share"] == 0
    assert norm["clipped_share"] > 0.5
    names = {path.name for path in whole_run.iterdir()}
    assert names == {"config.json", "runs.json", "log.csv", "table.md", "result.json", "losses.png"}
    assert "| no clipping | 2 | 2 | " in (whole_run / "table.md").read_text(encoding="utf-8")


def test_the_log_has_rows_of_every_run(whole_run):
    head, *rows = (whole_run / "log.csv").read_text(encoding="utf-8").splitlines()
    assert head == "variant,seed,step,loss,grad_norm"
    assert [row.split(",")[2] for row in rows if row.startswith("norm,1,")] == ["1", "2", "3", "4", "8", "12"]
    for one in runs_in(whole_run):
        ends = [row for row in rows if row.startswith(f"{one['variant']},{one['seed']},")][-1]
        assert int(ends.split(",")[2]) == (one["diverged_at"] or 12)


def test_diverged_is_not_finite_or_ten_times_the_first_loss():
    assert clipping.divergence(10.0, 1.0) is None
    assert "above 10 times its first value" in clipping.divergence(10.1, 1.0)
    for loss in (math.nan, math.inf):
        assert clipping.divergence(loss, 1.0) == f"the loss is {loss}"


@pytest.mark.parametrize("variant", list(clipping.VARIANTS))
def test_a_loss_that_is_not_finite_is_counted(variant):
    settings = clipping.parse([*TINY, "--lr", "1e30", "--clip-norm", "1e30", "--clip-value", "1e30"])
    one = clipping.train_run(settings, 0, variant, clipping.generate(settings, 0), 12)
    assert one["diverged_at"] == 2
    assert one["why"] in ("the loss is inf", "the loss is nan")
    json.dumps(one, allow_nan=False)


def test_a_formula_that_becomes_undefined_is_counted(monkeypatch):
    def undefined(model, batch, rng):
        raise ArithmeticError("the weights sum to 0")

    settings = clipping.parse([*TINY, "--model", "rra"])
    monkeypatch.setattr(adding, "forward_backward", undefined)
    one = clipping.train_run(settings, 0, "norm", clipping.generate(settings, 0), 12)
    assert (one["diverged_at"], one["why"], one["test_mse"]) == (1, "the weights sum to 0", None)


def test_all_variants_start_from_the_same_weights_and_see_the_same_batches(monkeypatch):
    seen, plain = [], adding.forward_backward

    def recording(model, batch, rng):
        seen[-1].append(([p.value.copy() for p in model.parameters()], batch))
        return plain(model, batch, rng)

    monkeypatch.setattr(adding, "forward_backward", recording)
    settings = clipping.parse([*TINY, "--lr", "0.1"])
    data = clipping.generate(settings, 3)
    for variant in clipping.VARIANTS:
        seen.append([])
        clipping.train_run(settings, 3, variant, data, 12)
    for other in seen[1:]:
        for a, b in zip(seen[0][0][0], other[0][0]):
            np.testing.assert_array_equal(a, b)
        assert len(other) == len(seen[0]) == 12
        for (_, (x, target)), (_, (x_other, target_other)) in zip(seen[0], other):
            np.testing.assert_array_equal(x, x_other)
            np.testing.assert_array_equal(target, target_other)
    assert any((a != b).any() for a, b in zip(seen[0][-1][0], seen[2][-1][0]))    # and clipping acts


def test_the_model_is_that_of_the_adding_task():
    settings = clipping.parse([*TINY, "--seed", "3"])
    theirs = adding.build({**adding.DEFAULTS, **settings}, "lstm")
    for a, b in zip(clipping.build(settings, 3).parameters(), theirs.parameters()):
        np.testing.assert_array_equal(a.value, b.value)


def test_clip_says_the_norm_before_and_whether_it_acts():
    from minigrad import Parameter

    def parameters():
        p = Parameter(np.zeros(2), "W")
        p.grad += [3, 4]
        return [p]

    for variant, threshold, acts, left in [("none", None, False, [3, 4]), ("norm", 5.0, False, [3, 4]),
                                           ("norm", 1.0, True, [0.6, 0.8]), ("value", 4.0, False, [3, 4]),
                                           ("value", 3.5, True, [3, 3.5])]:
        ours = parameters()
        assert clipping.clip(variant, ours, threshold) == (5.0, acts)
        assert ours[0].grad == pytest.approx(left)


# ---- resume ----------------------------------------------------------------------------------------------

@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes longer than the runs."""
    monkeypatch.setattr(clipping, "draw_losses", lambda *args: None)


def same_table(one, other):
    for name in ("table.md", "log.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_resume_makes_what_is_missing_and_gives_the_same_table(whole_run, tmp_path, capsys, monkeypatch, undrawn):
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    kept = [one for one in runs_in(folder) if (one["variant"], one["seed"]) not in {("norm", 0), ("none", 1)}]
    (folder / "runs.json").write_text(json.dumps(kept), encoding="utf-8")
    made, plain = [], clipping.train_run
    monkeypatch.setattr(clipping, "train_run", lambda *args: made.append(args[1:3]) or plain(*args))
    assert ran(capsys, "--resume", folder)[0] == 0
    assert made == [(0, "norm"), (1, "none")]
    same_table(folder, whole_run)


def test_an_interrupt_keeps_what_is_done(whole_run, tmp_path, capsys, monkeypatch, undrawn):
    calls, plain = [], clipping.train_run

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(clipping, "train_run", interrupted)
    status, _, err = ran(capsys, *TABLE, "--out", tmp_path / "run", "--quiet")
    assert (status, len(err.splitlines())) == (130, 1), err
    assert "2 of 6 runs are done and kept" in err
    assert len(runs_in(tmp_path / "run")) == 2
    assert ran(capsys, "--resume", tmp_path / "run", "--quiet")[0] == 0
    same_table(tmp_path / "run", whole_run)


def test_a_run_killed_before_its_first_result_starts_again(whole_run, tmp_path, capsys, undrawn):
    (tmp_path / "run").mkdir()
    shutil.copy(whole_run / "config.json", tmp_path / "run/config.json")
    assert ran(capsys, "--resume", tmp_path / "run", "--quiet")[0] == 0
    same_table(tmp_path / "run", whole_run)


@pytest.mark.parametrize(("flags", "says"), [
    (["--lr", "0.3"], "--lr 0.3 differs"), (["--seeds", "3"], "--seeds 3 differs"), (["--steps", "13"], "--steps 13"),
    (["--epochs", "2"], "--steps None differs"), (["--only", "cliff"], "--only cliff differs"),
    (["--out", "elsewhere"], "name different folders")])
def test_resume_refuses_other_settings(whole_run, capsys, flags, says):
    before = {path.name: path.read_bytes() for path in whole_run.iterdir()}
    status, _, err = ran(capsys, "--resume", whole_run, *flags)
    assert (status, len(err.splitlines())) == (2, 1), err
    assert says in err
    assert {path.name: path.read_bytes() for path in whole_run.iterdir()} == before


@pytest.mark.parametrize("damage", [
    lambda text: text[:-20], lambda text: "{}", lambda text: "[3]", lambda text: text.replace('"norm"', '"other"'),
    lambda text: text.replace('"seed": 1', '"seed": 0'), lambda text: text.replace('"steps": 12', '"steps": "12"'),
    lambda text: text.replace('"curve": [[', '"curve": [["x", '),
    lambda text: text.replace('"test_mse": 0', '"test_mse": null, "x": 0')],
    ids=["cut", "object", "number", "variant", "twice", "text", "curve", "more"])
def test_damaged_results_are_one_line(whole_run, tmp_path, capsys, damage):
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    (folder / "runs.json").write_text(damage((folder / "runs.json").read_text(encoding="utf-8")), encoding="utf-8")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    status, _, err = ran(capsys, "--resume", folder)
    assert (status, len(err.splitlines())) == (2, 1), err
    assert "runs.json: damaged" in err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# ---- bad input -------------------------------------------------------------------------------------------

BAD = [
    (["--seeds", "0"], "--seeds"), (["--only", "wall"], "--only"), (["--lr", "nan"], "--lr"),
    (["--optimizer", "adam"], "--optimizer is 'adam'; expected sgd"), (["--eval-every", "5"], "--eval-every is 5"),
    (["--clip-norm", "0"], "--clip-norm is 0; expected a threshold above 0"), (["--clip-value", "-1"], "--clip-value"),
    (["--only", "cliff", "--lr", "0.1"], "--lr is of the table"), (["--batch-size", "50"], "batch_size is 50"),
    (["--only", "cliff", "--dtype", "float64"], "--dtype is of the table"), (["-S", "1"], "-S"),
    (["--steps", "5", "--epochs", "1"], "--steps and --epochs were both given"), (["--fast"], "--fast"),
    (["--resume", "nowhere"], "no run there")]


@pytest.mark.parametrize(("flags", "says"), BAD, ids=[" ".join(flags) for flags, _ in BAD])
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(tmp_path)
    status, _, err = ran(capsys, "--train-size", "40", *flags) if "cliff" not in flags else ran(capsys, *flags)
    assert (status, len(err.splitlines())) == (2, 1), err
    assert says in err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
def test_no_gpu_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, _, err = ran(capsys, *TINY, "--device", "gpu")
    assert (status, len(err.splitlines())) == (2, 1), err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_empty_is_refused(whole_run, capsys):
    status, _, err = ran(capsys, *TABLE, "--out", whole_run)
    assert (status, len(err.splitlines())) == (2, 1)
    assert f"--resume {whole_run}" in err


# ---- as a program ----------------------------------------------------------------------------------------

@pytest.mark.slow
def test_as_a_script(tmp_path):
    done = subprocess.run([sys.executable, "-W", "error", ROOT / "tasks/clipping.py", *TINY], cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    folder, = (tmp_path / "runs/clipping").iterdir()
    assert {"cliff.png", "losses.png", "table.md", "log.csv"} <= {path.name for path in folder.iterdir()}
    assert "| by norm | 2 | 0 | " in done.stdout
    assert "no clipping, seed 1: diverged at step " in done.stderr
