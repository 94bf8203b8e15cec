"""tasks/adding.py: as a user runs it, and with bad input."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minigrad.backend import gpu_problem
from minigrad.kernels import KernelError
from minigrad.tensors import load_tensors, save_tensors
from minigrad.training.runlog import read_log
from tasks import adding
from tasks.frame.common import _tell_once, run
from tasks.frame.run_folder import open_run_folder

pytestmark = pytest.mark.usefixtures("quick_figures")

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["-S", "8", "-K", "3", "--hidden", "6", "--train-size", "60", "--test-size", "20", "--batch-size", "7",
         "--eval-every", "10"]


def ran(capsys, *argv):
    """(exit status, stdout, stderr) of the task in this process."""
    try:
        status = run(adding.main, [str(word) for word in argv])
    except SystemExit as end:                                # argparse
        status = end.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("adding") / "run"
    assert run(adding.main, [*SMALL, "--steps", "10", "--quiet", "--out", str(out)]) == 0
    return out


@pytest.fixture
def finished(ten_steps, tmp_path):
    """A copy of the folder of a run that took its 10 steps, at tmp_path / "run"."""
    return Path(shutil.copytree(ten_steps, tmp_path / "run"))


# ---- runs ------------------------------------------------------------------------------------------------

@pytest.mark.figures
def test_a_run_writes_what_the_help_says(tmp_path, capsys):
    status, out, _ = ran(capsys, *SMALL, "--steps", 20, "--out", tmp_path / "run")
    assert status == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "log.csv", "figure4.png", "figure7.png", "result.json", "last.safetensors",
                     "best.safetensors"}
    assert re.search(r"rra: test MSE [\d.e-]+ at step 20; ", out)
    config = json.loads((tmp_path / "run/config.json").read_text(encoding="utf-8"))
    assert {"command", "commit", "numpy", "cpu", "blas_threads"} <= set(config["ran_on"])
    assert config["ran_on"]["device"] == "cpu"
    columns, rows = read_log(tmp_path / "run/log.csv")
    assert [c for c in columns if c.startswith("w_hat")] == ["w_hat_1", "w_hat_2", "w_hat_3"]
    assert sum(rows[-1][f"w_hat_{k}"] for k in (1, 2, 3)) == pytest.approx(1, abs=1e-5)


@pytest.mark.figures
def test_compare_trains_both_on_the_same_data(tmp_path, capsys):
    status, _, _ = ran(capsys, *SMALL, "--steps", 10, "--compare", "rra,lstm", "--out", tmp_path / "run")
    assert status == 0
    assert (tmp_path / "run/figure4.png").stat().st_size > 1000
    rra, lstm = (json.loads((tmp_path / f"run/{name}/result.json").read_text()) for name in ("rra", "lstm"))
    assert rra["baseline"] == lstm["baseline"]
    assert not (tmp_path / "run/lstm/figure7.png").exists()
    again, _, _ = ran(capsys, "--resume", tmp_path / "run", "--steps", 20)
    assert again == 0
    assert load_tensors(tmp_path / "run/lstm/last.safetensors")[1]["step"] == 20


def test_data_and_common_weights_are_the_same_for_every_model():
    settings = adding.parse([*SMALL, "--seed", "3"])
    (x, target), (x_test, _) = adding.generate(settings)
    assert not np.array_equal(x[:20], x_test)
    np.testing.assert_array_equal(x, adding.generate(settings)[0][0])
    rra, lstm = (dict(adding.build(settings, name).named_parameters()) for name in ("rra", "lstm"))
    for name in ("cell.W", "cell.U", "cell.b", "readout.W"):
        np.testing.assert_array_equal(rra[name].value, lstm[name].value)
    assert target.shape == (60, 1)


def test_paper_setting():
    settings = adding.parse(["--paper"])
    assert settings["optimizer"] == "adadelta"
    assert (settings["lr"], settings["clip_norm"], settings["forget_bias"], settings["target"]) == (None, 0, 0, None)
    assert (settings["hidden"], settings["batch_size"], settings["length"]) == (128, 50, 100)
    assert (settings["train_size"], settings["test_size"], settings["eval_every"]) == (100_000, 10_000, 200)
    assert adding.parse(["--paper", "--forget-bias", "1"])["forget_bias"] == 1


def test_steps_switch_the_target_off_unless_one_is_given():
    assert adding.parse([])["target"] == 0.01
    assert adding.parse(["--steps", "5"])["target"] is None
    assert adding.parse(["--steps", "5", "--target", "0.1"])["target"] == 0.1


@pytest.mark.figures
def test_a_target_ends_the_run(tmp_path, capsys):
    status, out, _ = ran(capsys, *SMALL, "--target", 100, "--out", tmp_path / "run")
    assert status == 0
    assert "is below the target 100" in out
    assert load_tensors(tmp_path / "run/last.safetensors")[1]["step"] == 0


def test_a_run_that_stopped_on_its_target_goes_on_when_told_to(tmp_path, capsys):
    ran(capsys, *SMALL, "--target", 100, "--out", tmp_path / "run")
    for flags, step in [(["--steps", 20], 20), (["--epochs", 5], 40)]:
        status, _, err = ran(capsys, "--resume", tmp_path / "run", *flags)
        assert status == 0, err
        assert load_tensors(tmp_path / "run/last.safetensors")[1]["step"] == step


def test_a_part_of_a_comparison_can_be_resumed_alone(tmp_path, capsys):
    ran(capsys, *SMALL, "--steps", 10, "--compare", "rra,lstm", "--out", tmp_path / "run")
    status, _, err = ran(capsys, "--resume", tmp_path / "run/lstm", "--steps", 20)
    assert status == 0, err
    assert load_tensors(tmp_path / "run/lstm/last.safetensors")[1]["step"] == 20


def test_a_damaged_config_of_a_part_is_one_line(tmp_path, capsys):
    ran(capsys, *SMALL, "--steps", 10, "--compare", "rra,lstm", "--out", tmp_path / "run")
    (tmp_path / "run/lstm/config.json").write_text("{")
    status, _, err = ran(capsys, "--resume", tmp_path / "run", "--steps", 20)
    *progress, last = err.splitlines()                           # rra goes on before it
    assert status == 2
    assert len(progress) <= 1
    assert last.endswith("lstm: no run there: config.json is missing or damaged")
    assert (tmp_path / "run/lstm/config.json").read_text() == "{"


def test_the_figures_show_every_offset_and_no_untrained_model(tmp_path, monkeypatch, capsys):
    drawn = {}
    monkeypatch.setattr("tasks.frame.figures.draw_runs", lambda path, groups, **_: drawn.update({path.name: groups}))
    assert ran(capsys, *SMALL, "--steps", 30, "--offset", 1, "--out", tmp_path / "run")[0] == 0
    assert list(drawn["figure7.png"]) == ["$h_{t-1}$", "$h_{t-2}$", "$h_{t-3}$"]
    curve, = drawn["figure4.png"]["RRA, K = 3"]
    assert [step for step, _ in curve] == [10, 20, 30]


def test_stacked_layers_epochs_and_other_optimizers(tmp_path, capsys):
    status, out, _ = ran(capsys, *SMALL, "--epochs", 2, "--layers", 2, "--optimizer", "rmsprop", "--lr", 1e-3,
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


# ---- bad input: one line, exit status 2, nothing written -------------------------------------------------

@pytest.mark.parametrize(("argv", "sentence"), [
    (["-S", "1"], "argument -S/--length: '1'; expected a whole number of at least 2"),
    (["-K", "-1"], "argument -K/--window: '-1'; expected a whole number of at least 0"),
    (["--offset", "3"], "argument --offset: invalid choice: 3"),
    (["--hidden", "many"], "argument --hidden: 'many'; expected a whole number"),
    (["--lr", "nan"], "argument --lr: 'nan'; expected a finite number"),
    (["--optimizer", "adma"], "--optimizer is 'adma'; expected one of sgd, momentum, adadelta"),
    (["--model", "gru"], "argument --model: invalid choice: 'gru'"),
    (["--compare", "rra,gru"], "--compare has 'gru'; expected names among rra, lstm"),
    (["--compare", "rra,rra"], "--compare names 'rra' twice"),
    (["--model", "lstm", "--compare", "rra"], "--compare has no meaning with --model lstm"),
    (["--batch-size", "61", "--train-size", "60"], "batch_size is 61, larger than the data (60 examples)"),
    (["--steps", "5", "--epochs", "1"], "--steps and --epochs were both given"),
    (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    (["--forget-bias", "nan"], "argument --forget-bias: 'nan'; expected a finite number"),
    (["--unknown"], "unrecognized arguments: --unknown"),
])
def test_bad_flags(tmp_path, capsys, argv, sentence):
    status, _, err = ran(capsys, *SMALL, *argv, "--out", tmp_path / "run")
    assert status == 2
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU is there")
def test_no_gpu(tmp_path, capsys):
    status, _, err = ran(capsys, "--device", "gpu", "--out", tmp_path / "run")
    assert status == 2
    assert err.startswith("error: device 'gpu' was asked for, but ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU is there")
def test_a_run_of_a_gpu_resumed_without_one(finished, capsys):
    config, before = finished / "config.json", (finished / "last.safetensors").read_bytes()
    config.write_text(config.read_text().replace('"device": "cpu",', '"device": "gpu",'))
    status, _, err = ran(capsys, "--resume", finished, "--steps", 30)
    assert (status, err.count("\n")) == (2, 1)
    assert err.endswith(f"; with --device cpu the run in {finished} goes on without one\n")
    assert (finished / "last.safetensors").read_bytes() == before
    assert ran(capsys, "--resume", finished, "--steps", 30, "--device", "cpu")[0] == 0


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU is there")
def test_auto_says_why_it_is_the_cpu(tmp_path, capsys):
    _tell_once.cache_clear()
    status, out, _ = ran(capsys, *SMALL, "--steps", 1, "--device", "auto", "--out", tmp_path / "run")
    assert (status, out.count("--device auto: the CPU; CuPy ")) == (0, 1)


def test_a_kernel_that_does_not_compile_is_one_line(tmp_path, capsys, monkeypatch):
    def fails(*arguments):
        raise KernelError("the GPU kernels of lstm.cu could not be compiled for float32 (a cause)")
    monkeypatch.setattr(adding, "forward_backward", fails)
    status, _, err = ran(capsys, *SMALL, "--steps", 5, "--quiet", "--out", tmp_path / "run")
    assert (status, err) == (2, "error: the GPU kernels of lstm.cu could not be compiled for float32 (a cause)\n")


def test_a_folder_that_is_not_empty_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    status, _, err = ran(capsys, *SMALL, "--steps", 5, "--out", tmp_path)
    assert status == 2
    assert "is not empty; nothing was written" in err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unwritable_folder_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("a file where a folder should be")
    status, _, err = ran(capsys, *SMALL, "--steps", 5, "--out", tmp_path / "file" / "run")
    assert status == 2
    assert err.startswith("error: --out ")
    assert len(err.splitlines()) == 1


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(finished, capsys, monkeypatch):
    before = (finished / "last.safetensors").read_bytes()

    def no_space(path, content):
        raise OSError(28, "No space left on device", str(path))
    monkeypatch.setattr("minigrad.checkpoint.write_atomically", no_space)
    status, _, err = ran(capsys, "--resume", finished, "--steps", 20, "--quiet")
    assert (status, err.count("\n")) == (2, 1)
    assert "No space left on device" in err
    assert (finished / "last.safetensors").read_bytes() == before


def test_two_runs_in_one_second_have_folders_of_their_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    for _ in range(3):
        assert ran(capsys, *SMALL, "--steps", 1, "--quiet")[0] == 0
    names = {path.name for path in (tmp_path / "runs/adding").iterdir()}
    assert names == {"20260101-000000", "20260101-000000-2", "20260101-000000-3"}


def test_resume_with_bad_folders_and_files(finished, tmp_path, capsys):
    status, _, err = ran(capsys, "--resume", tmp_path / "nothing")
    assert (status, len(err.splitlines())) == (2, 1)
    assert "no run there" in err
    status, _, err = ran(capsys, "--resume", finished, "--steps", 20, "--hidden", 7)
    assert (status, len(err.splitlines())) == (2, 1)
    assert "--hidden 7 differs from the run in" in err
    last = (finished / "last.safetensors").read_bytes()
    for damaged in (last[:len(last) // 2], last[:20], b"", b"\0" * 100):
        (finished / "last.safetensors").write_bytes(damaged)
        status, _, err = ran(capsys, "--resume", finished, "--steps", 20)
        assert (status, len(err.splitlines())) == (2, 1)
        assert "last.safetensors: damaged or not a safetensors file" in err
        assert (finished / "last.safetensors").read_bytes() == damaged


@pytest.mark.parametrize("change", [
    {"settings": 5}, {"settings": {}}, {"settings": None}, {"hidden": None}, {"compare": 5}, {"optimizer": ["a"]},
    {"dtype": "int32"}, {"device": "foo"}, {"eval_every": 0}, {"steps": "a"}, {"layers": 0}, {"batch_size": 0},
    {"model": "foo"}, {"length": 10.5}, {"quiet": "yes"}, {"surprise": 1}], ids=str)
def test_a_damaged_config_is_one_line(finished, capsys, change):
    config = json.loads((finished / "config.json").read_text())
    config.update(change) if "settings" in change else config["settings"].update(change)
    (finished / "config.json").write_text(json.dumps(config))
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    status, _, err = ran(capsys, "--resume", finished)
    assert (status, len(err.splitlines())) == (2, 1), err
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


def edited(path, **changes):
    """Rewrite a checkpoint with other meta."""
    state, meta = load_tensors(path)
    save_tensors(path, state, {**meta, **changes})


@pytest.mark.parametrize("meta", [
    {"step": "a"}, {"step": -5}, {"step": 30.5}, {"step": 1000}, {"seconds": None}, {"best": None}, {"best": {}},
    {"config": None}, {"optimizer": {"name": "Adam", "steps": "x"}}, {"optimizer": 3}, {"data_order": {}}], ids=str)
def test_a_checkpoint_with_a_damaged_header_is_one_line(finished, capsys, meta):
    edited(finished / "last.safetensors", **meta)
    log = (finished / "log.csv").read_bytes()
    status, _, err = ran(capsys, "--resume", finished, "--steps", 20)
    assert (status, len(err.splitlines())) == (2, 1), err
    assert (finished / "log.csv").read_bytes() == log


@pytest.mark.parametrize("damage", [
    lambda text: text.replace("test_mse", "mse"), lambda text: text.replace("step,", "", 1),
    lambda text: text.replace("seconds,", "seconds,more,", 1), lambda text: text.splitlines()[0] + "\n",
    lambda text: text[:-1], lambda text: text.replace("\n10,", "\n,"), lambda text: text + "garbage\n"])
def test_a_damaged_log_is_one_line(finished, capsys, damage):
    damaged = damage((finished / "log.csv").read_text())
    (finished / "log.csv").write_text(damaged)
    status, _, err = ran(capsys, "--resume", finished, "--steps", 20)
    assert (status, len(err.splitlines())) == (2, 1), err
    assert (finished / "log.csv").read_text() == damaged


def test_a_missing_checkpoint_is_not_a_fresh_start(finished, capsys):
    (finished / "last.safetensors").unlink()
    log = (finished / "log.csv").read_bytes()
    status, _, err = ran(capsys, "--resume", finished, "--steps", 20)
    assert (status, len(err.splitlines())) == (2, 1), err
    assert "last.safetensors: missing, but log.csv goes beyond step 0" in err
    assert (finished / "log.csv").read_bytes() == log


def test_fewer_steps_than_taken_are_refused(finished, capsys):
    status, _, err = ran(capsys, "--resume", finished, "--steps", 5)
    assert status == 2
    assert "5 are asked for, but the run in" in err
    assert ran(capsys, "--resume", finished)[0] == 0      # and it is still a run of 10 steps


def test_a_refused_resume_changes_nothing(finished, capsys):
    (finished / "last.safetensors").write_bytes(b"damaged")
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    assert ran(capsys, "--resume", finished, "--steps", 20)[0] == 2
    (finished / "last.safetensors").unlink()
    (finished / "log.csv").write_text("garbage")
    status, _, err = ran(capsys, "--resume", finished, "--steps", 20)
    assert (status, len(err.splitlines())) == (2, 1)
    assert (finished / "config.json").read_bytes() == before["config.json"]
    assert (finished / "result.json").read_bytes() == before["result.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fcntl: folders are not locked there")
def test_a_folder_that_another_run_writes_is_refused(finished, capsys):
    settings = adding.parse(["--resume", str(finished)])
    _, hold = open_run_folder("adding", settings)
    status, _, err = ran(capsys, "--resume", finished, "--steps", 20)
    assert status == 2
    assert "is being written by another run; nothing was changed" in err
    del hold
    assert ran(capsys, "--resume", finished, "--steps", 20)[0] == 0
    resumed_with = json.loads((finished / "config.json").read_text())["resumed_with"]
    assert len(resumed_with) == 1                                # the refused ones changed nothing


@pytest.mark.parametrize("flags", [["-S", "100000000000"], ["--train-size", "1000000000000"], ["-K", "100000000000"]])
def test_sizes_beyond_memory_are_one_line(tmp_path, capsys, flags):
    status, _, err = ran(capsys, *SMALL, *flags, "--steps", 1, "--out", tmp_path / "run")
    assert (status, len(err.splitlines())) == (2, 1), err
    assert "not enough memory for these sizes" in err


@pytest.mark.slow
def test_closed_streams_do_not_end_a_run(tmp_path):
    for n, closing in enumerate(["2>&-", "2>&1 >/dev/null | head -n 1"]):
        out = tmp_path / str(n)
        command = f"{shlex.quote(sys.executable)} {ROOT / 'tasks/adding.py'} {' '.join(SMALL)} --steps 60 --out {out}"
        subprocess.run(f"{command} {closing}", shell=True, timeout=60, check=False, stdout=subprocess.DEVNULL)
        assert load_tensors(out / "last.safetensors")[1]["step"] == 60


def test_resume_with_a_checkpoint_of_another_model(finished, tmp_path, capsys):
    ran(capsys, *SMALL, "--steps", 10, "--model", "lstm", "--out", tmp_path / "b")
    foreign = (tmp_path / "b/last.safetensors").read_bytes()
    (finished / "last.safetensors").write_bytes(foreign)
    status, _, err = ran(capsys, "--resume", finished, "--steps", 20)
    assert (status, len(err.splitlines())) == (2, 1)
    assert "model is 'lstm'; this run has 'rra'" in err
    assert (finished / "last.safetensors").read_bytes() == foreign


@pytest.mark.figures
def test_divergence_is_one_line_and_exit_status_1(tmp_path, capsys):
    status, _, err = ran(capsys, *SMALL, "--steps", 300, "--optimizer", "sgd", "--lr", 1e12, "--clip-norm", 0,
                         "--quiet", "--out", tmp_path / "run")
    assert status == 1
    assert re.match(r"stopped: step \d+: .* is not finite", err)
    assert len(err.splitlines()) == 1
    assert (tmp_path / "run/figure4.png").exists()


# ---- as a program ----------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("how", [[str(ROOT / "tasks/adding.py")], ["-m", "tasks.adding"]], ids=["script", "module"])
def test_from_any_folder(tmp_path, how):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "7"}
    done = subprocess.run([sys.executable, "-W", "error", *how, *SMALL, "--steps", "5", "--threads", "2"], cwd=tmp_path,
                          env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    folder, = (tmp_path / "runs/adding").iterdir()
    ran_on = json.loads((folder / "config.json").read_text(encoding="utf-8"))["ran_on"]
    assert ran_on["blas_threads"] == "2"


@pytest.mark.slow
def test_an_interrupt_before_training_is_one_line(tmp_path):
    code = ("import tasks.adding as a; from tasks.frame.common import run\n"
            "def generate(settings): raise KeyboardInterrupt\n"
            "a.generate = generate\nimport sys; sys.exit(run(a.main, []))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr == "interrupted outside of training; what had been saved is kept\n"


@pytest.mark.slow
def test_a_reader_who_goes_away_does_not_end_the_run(tmp_path):
    """python tasks/adding.py ... | head -1"""
    command = [sys.executable, str(ROOT / "tasks/adding.py"), *SMALL, "--steps", "20", "--compare", "lstm,rra", "--out",
               str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 0, err
    assert (tmp_path / "run/rra/result.json").exists()
