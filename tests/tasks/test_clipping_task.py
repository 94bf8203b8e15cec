"""tasks/clipping.py: the cliff's gradient and its trajectories; the table as a user runs it, and with bad input."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minigrad.training import Interrupted
from tasks import adding, clipping, clipping_cliff as cliff, clipping_table as table
from tasks.clipping_variants import VARIANTS, clip
from tasks.frame import exit_status
from tasks.frame.flags import given_on

ROOT = Path(__file__).resolve().parents[2]
TINY = ["-S", "6", "--hidden", "4", "--train-size", "40", "--test-size", "20", "--batch-size", "5", "--steps", "12",
        "--seeds", "2", "--log-every", "4", "--lr", "20", "--clip-norm", "0.01", "--clip-value", "0.005"]
TABLE = ["table", *TINY]
SETTINGS = {**clipping.DEFAULTS, **given_on(clipping.parser_of(clipping.PARTS), TINY)}


def runs_in(folder):
    return json.loads((folder / "runs.json").read_text(encoding="utf-8"))


# ---- the cliff -------------------------------------------------------------------------------------------

def gradient(w, b):
    w, b = np.array([w]), np.array([b])
    E, cache = cliff.cliff_forward(w, b)
    return float(E[0]), *(float(g[0]) for g in cliff.cliff_backward(cache))


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
    E, _ = cliff.cliff_forward(np.array([4.3]), np.array([-2.2]))
    assert float(E[0]) == pytest.approx((1 / (1 + math.exp(-x)) - 0.7)**2, rel=1e-12)


def test_an_entry_is_a_model_of_its_own():
    w, b = np.meshgrid([4.2, 5.0], [-2.5, -2.0, -1.5])
    E, cache = cliff.cliff_forward(w, b)
    dw, db = cliff.cliff_backward(cache)
    for at in np.ndindex(w.shape):
        assert (E[at], dw[at], db[at]) == pytest.approx(gradient(w[at], b[at]), rel=1e-12)


def test_there_is_a_wall():
    b = np.linspace(-2.7, -2.5, 20_001)
    E, cache = cliff.cliff_forward(np.full_like(b, 5.0), b)
    norms = np.hypot(*cliff.cliff_backward(cache))
    wall = norms.argmax()
    below, above = wall - 500, wall + 500                        # 0.005 to either side
    assert norms[wall] > 300 * max(norms[below], norms[above])
    assert E[below] > 0.25
    assert E[above] < 0.03


@pytest.fixture(scope="module")
def paths():
    return {variant: cliff.descend(variant) for variant in VARIANTS}


def test_without_clipping_the_wall_throws_it_far_away_for_good(paths):
    at = cliff.thrown(paths["none"])
    before, after = paths["none"][at], paths["none"][at + 1]
    assert before.norm > 20
    assert math.hypot(after.w - before.w, after.b - before.b) == pytest.approx(cliff.CLIFF["lr"] * before.norm)
    assert math.hypot(after.w - before.w, after.b - before.b) > 10
    assert paths["none"][-1].norm < 1e-6                         # flat there: it does not come back
    assert paths["none"][-1].error == pytest.approx(0.09, abs=1e-4)


@pytest.mark.parametrize("variant", ["value", "norm"])
def test_clipped_it_stays_by_the_wall_and_goes_down(paths, variant):
    points = paths[variant]
    assert cliff.thrown(points) is None
    assert max(point.norm for point in points) > 20              # it meets the same wall
    assert sum(point.error for point in points[-20:]) / 20 < 0.05
    assert any(point.clipped for point in points)
    assert not any(point.clipped for point in points[:cliff.shared_steps(paths)])


def test_by_norm_the_direction_is_kept_and_by_value_it_is_not(paths):
    n = cliff.shared_steps(paths)
    move = {variant: np.subtract(points[n + 1][:2], points[n][:2]) for variant, points in paths.items()}
    unit = {variant: step / np.linalg.norm(step) for variant, step in move.items()}
    assert unit["norm"] == pytest.approx(unit["none"], abs=1e-9)
    assert np.linalg.norm(move["norm"]) == pytest.approx(cliff.CLIFF["lr"] * cliff.CLIFF["threshold"])
    assert unit["value"] == pytest.approx([math.sqrt(0.5)] * 2)
    assert unit["none"] @ unit["value"] < 0.98
    for points in paths.values():
        assert [point[:4] for point in points[:n + 1]] == [point[:4] for point in paths["none"][:n + 1]]


def test_the_picture_says_where_the_thrown_one_went(paths, tmp_path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axes = FigureCanvasAgg(Figure()).figure.add_subplot()
    cliff.draw_surface(axes, paths)
    at = cliff.thrown(paths["none"])
    there = paths["none"][at + 1]
    text, = (text for text in axes.texts if "thrown" in text.get_text())
    assert f"({there.w:.1f}, {there.b:.1f})" in text.get_text()
    assert cliff.in_frame(text.xy)


def ran(capsys, *argv):
    """(exit status, stdout, stderr) of the task in this process."""
    status = exit_status(clipping.main, [str(word) for word in argv])
    return status, *capsys.readouterr()


def test_only_the_cliff(tmp_path, capsys):
    status, out, _ = ran(capsys, "cliff", "--out", tmp_path / "run", "--quiet")
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
    assert exit_status(clipping.main, [*TABLE, "--out", str(folder), "--quiet"]) == 0
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
    assert table.divergence(10.0, 1.0) is None
    assert "above 10 times its first value" in table.divergence(10.1, 1.0)
    for loss in (math.nan, math.inf):
        assert table.divergence(loss, 1.0) == f"the loss is {loss}"


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_loss_that_is_not_finite_is_counted(variant):
    settings = {**SETTINGS, "lr": 1e30, "clip_norm": 1e30, "clip_value": 1e30}
    one = table.train_run(settings, 0, variant, table.generate(settings, 0), 12)
    assert one["diverged_at"] == 2
    assert one["why"] in ("the loss is inf", "the loss is nan")
    json.dumps(one, allow_nan=False)


def test_a_formula_that_becomes_undefined_is_counted(monkeypatch):
    def undefined(model, batch, rng):
        raise ArithmeticError("the weights sum to 0")

    settings = {**SETTINGS, "model": "rra"}
    monkeypatch.setattr(adding, "forward_backward", undefined)
    one = table.train_run(settings, 0, "norm", table.generate(settings, 0), 12)
    assert (one["diverged_at"], one["why"], one["test_mse"]) == (1, "the weights sum to 0", None)


def test_all_variants_start_from_the_same_weights_and_see_the_same_batches(monkeypatch):
    seen, plain = [], adding.forward_backward

    def recording(model, batch, rng):
        seen[-1].append(([p.value.copy() for p in model.parameters()], batch))
        return plain(model, batch, rng)

    monkeypatch.setattr(adding, "forward_backward", recording)
    settings = {**SETTINGS, "lr": 0.1}
    data = table.generate(settings, 3)
    for variant in VARIANTS:
        seen.append([])
        table.train_run(settings, 3, variant, data, 12)
    for other in seen[1:]:
        for a, b in zip(seen[0][0][0], other[0][0]):
            np.testing.assert_array_equal(a, b)
        assert len(other) == len(seen[0]) == 12
        for (_, (x, target)), (_, (x_other, target_other)) in zip(seen[0], other):
            np.testing.assert_array_equal(x, x_other)
            np.testing.assert_array_equal(target, target_other)
    assert any((a != b).any() for a, b in zip(seen[0][-1][0], seen[2][-1][0]))    # and clipping acts


def test_the_model_is_that_of_the_adding_task():
    settings = {**SETTINGS, "seed": 3}
    theirs = adding.build({**adding.DEFAULTS, **settings})
    for a, b in zip(table.build(settings, 3).parameters(), theirs.parameters()):
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
        assert clip(variant, ours, threshold) == (5.0, acts)
        assert ours[0].grad == pytest.approx(left)


def test_an_interrupt_keeps_what_is_done(tmp_path, monkeypatch):
    calls, plain = [], table.train_run

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*args)
    monkeypatch.setattr(table, "train_run", interrupted)
    with pytest.raises(Interrupted, match="2 of 6 runs are done and kept"):
        table.table(tmp_path, {**SETTINGS, "quiet": True})
    assert len(runs_in(tmp_path)) == 2


# ---- bad input -------------------------------------------------------------------------------------------

BAD = [
    ("--seeds 0", "--seeds"), ("wall", "unrecognized arguments: wall"), ("--lr nan", "--lr"), ("-S 1", "-S"),
    ("--clip-norm 0", "argument --clip-norm: '0'; expected a finite number above 0"),
    ("--clip-value -1", "--clip-value"), ("cliff --lr 0.1", "unrecognized arguments: --lr 0.1"),
    ("table --batch-size 50 --train-size 40", "batch_size is 50"),
    ("-K 4", "--window has no meaning with lstm"), ("--resume nowhere", "unrecognized arguments: --resume nowhere")]


@pytest.mark.parametrize(("flags", "says"), BAD)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(tmp_path)
    status, _, err = ran(capsys, *flags.split())
    assert (status, len(err.splitlines())) == (2, 1), err
    assert says in err
    assert not list(tmp_path.iterdir())


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
