"""tasks/adding.py: what is its own."""

import numpy as np
import pytest
from task_runs import SMALL, ran

from minigrad.tensors import load_tensors
from tasks import adding
from tasks.frame.flags import settings_of

TASK = adding.TASK
pytestmark = pytest.mark.usefixtures("quick_figures")


def test_data_and_common_weights_are_the_same_for_every_model():
    settings = settings_of(TASK, [*SMALL, "--seed", "3"])
    (x, target), (x_test, _) = adding.generate(settings)
    assert not np.array_equal(x[:20], x_test)
    np.testing.assert_array_equal(x, adding.generate(settings)[0][0])
    rra, lstm = (dict(adding.build({**settings, "model": name}).named_parameters()) for name in ("rra", "lstm"))
    for name in ("cell.W", "cell.U", "cell.b", "readout.W"):
        np.testing.assert_array_equal(rra[name].value, lstm[name].value)
    assert target.shape == (60, 1)


def test_paper_setting():
    settings = settings_of(TASK, ["--paper"])
    assert settings["steps"] == 8_000
    assert settings["optimizer"] == "adadelta"
    assert (settings["lr"], settings["clip_norm"], settings["forget_bias"], settings["target"]) == (None, 0, 0, None)
    assert (settings["hidden"], settings["batch_size"], settings["length"]) == (128, 50, 100)
    assert (settings["train_size"], settings["test_size"], settings["eval_every"]) == (100_000, 10_000, 200)
    assert settings_of(TASK, ["--paper", "--forget-bias", "1"])["forget_bias"] == 1


def test_steps_switch_the_target_off_unless_one_is_given():
    assert settings_of(TASK, [])["target"] == 0.01
    assert settings_of(TASK, ["--steps", "5"])["target"] is None
    assert settings_of(TASK, ["--steps", "5", "--target", "0.1"])["target"] == 0.1


@pytest.mark.figures
def test_a_target_ends_the_run(tmp_path, capsys):
    status, out, _ = ran(capsys, TASK, *SMALL, "--target", 100, "--out", tmp_path / "run")
    assert status == 0
    assert "is below the target 100" in out
    assert load_tensors(tmp_path / "run/last.safetensors")[1]["step"] == 0


def test_a_run_that_stopped_on_its_target_goes_on_when_told_to(tmp_path, capsys):
    ran(capsys, TASK, *SMALL, "--target", 100, "--out", tmp_path / "run")
    for flags, step in [(["--steps", 20], 20), (["--epochs", 5], 40)]:
        status, _, err = ran(capsys, TASK, "--resume", tmp_path / "run", *flags)
        assert status == 0, err
        assert load_tensors(tmp_path / "run/last.safetensors")[1]["step"] == step


def test_the_figures_show_every_offset_and_no_untrained_model(tmp_path, monkeypatch, capsys):
    drawn = {}
    monkeypatch.setattr("tasks.frame.figures.draw_runs", lambda path, groups, **_: drawn.update({path.name: groups}))
    assert ran(capsys, TASK, *SMALL, "--steps", 30, "--offset", 1, "--out", tmp_path / "run")[0] == 0
    assert list(drawn["figure7.png"]) == ["$h_{t-1}$", "$h_{t-2}$", "$h_{t-3}$"]
    curve, = drawn["figure4.png"]["RRA, K = 3"]
    assert [step for step, _ in curve] == [10, 20, 30]


def test_stacked_layers_epochs_and_other_optimizers(tmp_path, capsys):
    status, out, _ = ran(capsys, TASK, *SMALL, "--epochs", 2, "--layers", 2, "--optimizer", "rmsprop", "--lr", 1e-3,
                         "--clip-value", 1, "--dtype", "float64", "--normalize", "softmax", "--offset", 1, "--out",
                         tmp_path / "run")
    assert status == 0, out
    state, meta = load_tensors(tmp_path / "run/last.safetensors")
    assert meta["step"] == 2 * (60 // 7)
    assert state["cell.layers.1.W"].shape == (6, 24)
    assert state["cell.layers.1.W"].dtype == np.float64


@pytest.mark.parametrize(("values", "step", "confirmed"), [
    ([.2] + [.1] * 5, 1, True),
    ([.2] + [.1] * 4, 1, False),
    ([.1] * 4 + [.2] + [.1] * 5, 5, True),
    ([.1] * 4 + [.2], None, False),
    ([.16, .159, .1591, .158, .1, .1, .1, .1], 3, True),     # 0.95 / 6 = 0.15833
])
def test_when_a_model_beats_the_baseline(values, step, confirmed):
    points = list(enumerate(values))
    assert adding.beats_baseline(points, 1 / 6) == (step, confirmed)
