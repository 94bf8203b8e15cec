"""What every task has from tasks/frame: its flags, run folder, resume, errors and exit statuses.

They are tried on the cheapest task, adding; at the end a table over all tasks holds what each of them must do.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from task_runs import SMALL, ran, refused

from minigrad.backend import gpu_problem
from minigrad.kernels import KernelError
from minigrad.tensors import load_tensors, save_tensors
from minigrad.training import read_log
from tasks import adding, frame
from tasks.frame.flags import settings_of
from tasks.frame.run import _tell_once
from tasks.frame.run_folder import open_run_folder

pytestmark = pytest.mark.usefixtures("quick_figures")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("adding") / "run"
    assert frame.run(adding.TASK, [*SMALL, "--steps", "10", "--quiet", "--out", str(out)]) == 0
    return out


@pytest.fixture
def finished(ten_steps, tmp_path):
    """A copy of the folder of a run that took its 10 steps, at tmp_path / "run"."""
    return Path(shutil.copytree(ten_steps, tmp_path / "run"))


# ---- runs ------------------------------------------------------------------------------------------------

@pytest.mark.figures
def test_a_run_writes_what_the_help_says(tmp_path, capsys):
    status, out, _ = ran(capsys, adding.TASK, *SMALL, "--steps", 20, "--out", tmp_path / "run")
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
    status, _, _ = ran(capsys, adding.TASK, *SMALL, "--steps", 10, "--compare", "rra,lstm", "--out", tmp_path / "run")
    assert status == 0
    assert (tmp_path / "run/figure4.png").stat().st_size > 1000
    rra, lstm = (json.loads((tmp_path / f"run/{name}/result.json").read_text()) for name in ("rra", "lstm"))
    assert rra["baseline"] == lstm["baseline"]
    assert not (tmp_path / "run/lstm/figure7.png").exists()
    again, _, _ = ran(capsys, adding.TASK, "--resume", tmp_path / "run", "--steps", 20)
    assert again == 0
    assert load_tensors(tmp_path / "run/lstm/last.safetensors")[1]["step"] == 20


def test_a_part_of_a_comparison_can_be_resumed_alone(tmp_path, capsys):
    ran(capsys, adding.TASK, *SMALL, "--steps", 10, "--compare", "rra,lstm", "--out", tmp_path / "run")
    status, _, err = ran(capsys, adding.TASK, "--resume", tmp_path / "run/lstm", "--steps", 20)
    assert status == 0, err
    assert load_tensors(tmp_path / "run/lstm/last.safetensors")[1]["step"] == 20


def test_a_damaged_config_of_a_part_is_one_line(tmp_path, capsys):
    ran(capsys, adding.TASK, *SMALL, "--steps", 10, "--compare", "rra,lstm", "--out", tmp_path / "run")
    (tmp_path / "run/lstm/config.json").write_text("{")
    status, _, err = ran(capsys, adding.TASK, "--resume", tmp_path / "run", "--steps", 20)
    *progress, last = err.splitlines()                           # rra goes on before it
    assert status == 2
    assert len(progress) <= 1
    assert last.endswith("lstm: no run there: config.json is missing or damaged")
    assert (tmp_path / "run/lstm/config.json").read_text() == "{"


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
    (["--model", "lstm"], "--window has no meaning with lstm; it is of rra, rnn-residual, rnn-attention"),
    (["--compare", "lstm,rwa", "--normalize", "sum"], "--window has no meaning with lstm, rwa"),
])
def test_bad_flags(tmp_path, capsys, argv, sentence):
    refused(capsys, sentence, adding.TASK, *SMALL, *argv, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU is there")
def test_no_gpu(tmp_path, capsys):
    status, _, err = ran(capsys, adding.TASK, "--device", "gpu", "--out", tmp_path / "run")
    assert status == 2
    assert err.startswith("error: device 'gpu' was asked for, but ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU is there")
def test_a_run_of_a_gpu_resumed_without_one(finished, capsys):
    config, before = finished / "config.json", (finished / "last.safetensors").read_bytes()
    config.write_text(config.read_text().replace('"device": "cpu",', '"device": "gpu",'))
    refused(capsys, f"; with --device cpu the run in {finished} continues without one", adding.TASK, "--resume", finished,
            "--steps", 30)
    assert (finished / "last.safetensors").read_bytes() == before
    assert ran(capsys, adding.TASK, "--resume", finished, "--steps", 30, "--device", "cpu")[0] == 0


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU is there")
def test_auto_says_why_it_is_the_cpu(tmp_path, capsys):
    _tell_once.cache_clear()
    status, out, _ = ran(capsys, adding.TASK, *SMALL, "--steps", 1, "--device", "auto", "--out", tmp_path / "run")
    assert (status, out.count("--device auto: the CPU; CuPy ")) == (0, 1)


def test_a_kernel_that_does_not_compile_is_one_line(tmp_path, capsys):
    def fails(*arguments):
        raise KernelError("the GPU kernels of lstm.cu could not be compiled for float32 (a cause)")
    status, _, err = ran(capsys, dataclasses.replace(adding.TASK, step=fails), *SMALL, "--steps", 5, "--quiet", "--out", tmp_path / "run")
    assert (status, err) == (2, "error: the GPU kernels of lstm.cu could not be compiled for float32 (a cause)\n")


def test_a_folder_that_is_not_empty_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    refused(capsys, "is not empty; nothing was written", adding.TASK, *SMALL, "--steps", 5, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unwritable_folder_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("a file where a folder should be")
    status, _, err = ran(capsys, adding.TASK, *SMALL, "--steps", 5, "--out", tmp_path / "file" / "run")
    assert status == 2
    assert err.startswith("error: --out ")
    assert len(err.splitlines()) == 1


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(finished, capsys, monkeypatch):
    before = (finished / "last.safetensors").read_bytes()

    def no_space(path, content):
        raise OSError(28, "No space left on device", str(path))
    monkeypatch.setattr("minigrad.tensors.write_atomically", no_space)
    refused(capsys, "No space left on device", adding.TASK, "--resume", finished, "--steps", 20, "--quiet")
    assert (finished / "last.safetensors").read_bytes() == before


def test_two_runs_in_one_second_have_folders_of_their_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    for _ in range(3):
        assert ran(capsys, adding.TASK, *SMALL, "--steps", 1, "--quiet")[0] == 0
    names = {path.name for path in (tmp_path / "runs/adding").iterdir()}
    assert names == {"20260101-000000", "20260101-000000-2", "20260101-000000-3"}


def test_resume_with_bad_folders_and_files(finished, tmp_path, capsys):
    refused(capsys, "no run there", adding.TASK, "--resume", tmp_path / "nothing")
    refused(capsys, "--hidden 7 differs from the run in", adding.TASK, "--resume", finished, "--steps", 20, "--hidden", 7)
    last = (finished / "last.safetensors").read_bytes()
    for damaged in (last[:len(last) // 2], last[:20], b"", b"\0" * 100):
        (finished / "last.safetensors").write_bytes(damaged)
        status, _, err = ran(capsys, adding.TASK, "--resume", finished, "--steps", 20)
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
    refused(capsys, "error: ", adding.TASK, "--resume", finished)
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


@pytest.mark.parametrize("meta", [
    {"step": "a"}, {"step": -5}, {"step": 30.5}, {"step": 1000}, {"seconds": None}, {"best": None}, {"best": {}},
    {"config": None}, {"optimizer": {"name": "Adam", "steps": "x"}}, {"optimizer": 3}, {"data_order": {}}], ids=str)
def test_a_checkpoint_with_a_damaged_header_is_one_line(finished, capsys, meta):
    state, whole = load_tensors(finished / "last.safetensors")
    save_tensors(finished / "last.safetensors", state, {**whole, **meta})
    log = (finished / "log.csv").read_bytes()
    refused(capsys, "error: ", adding.TASK, "--resume", finished, "--steps", 20)
    assert (finished / "log.csv").read_bytes() == log


@pytest.mark.parametrize("damage", [
    lambda text: text.replace("test_mse", "mse"), lambda text: text.replace("step,", "", 1),
    lambda text: text.replace("seconds,", "seconds,more,", 1), lambda text: text.splitlines()[0] + "\n",
    lambda text: text[:-1], lambda text: text.replace("\n10,", "\n,"), lambda text: text + "garbage\n"])
def test_a_damaged_log_is_one_line(finished, capsys, damage):
    damaged = damage((finished / "log.csv").read_text())
    (finished / "log.csv").write_text(damaged)
    refused(capsys, "error: ", adding.TASK, "--resume", finished, "--steps", 20)
    assert (finished / "log.csv").read_text() == damaged


def test_a_missing_checkpoint_is_not_a_fresh_start(finished, capsys):
    (finished / "last.safetensors").unlink()
    log = (finished / "log.csv").read_bytes()
    refused(capsys, "last.safetensors: missing, but log.csv goes beyond step 0", adding.TASK, "--resume", finished, "--steps", 20)
    assert (finished / "log.csv").read_bytes() == log


def test_fewer_steps_than_taken_are_refused(finished, capsys):
    refused(capsys, "5 are asked for, but the run in", adding.TASK, "--resume", finished, "--steps", 5)
    assert ran(capsys, adding.TASK, "--resume", finished)[0] == 0      # and it is still a run of 10 steps


def test_a_refused_resume_changes_nothing(finished, capsys):
    (finished / "last.safetensors").write_bytes(b"damaged")
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    assert ran(capsys, adding.TASK, "--resume", finished, "--steps", 20)[0] == 2
    (finished / "last.safetensors").unlink()
    (finished / "log.csv").write_text("garbage")
    refused(capsys, "error: ", adding.TASK, "--resume", finished, "--steps", 20)
    assert (finished / "config.json").read_bytes() == before["config.json"]
    assert (finished / "result.json").read_bytes() == before["result.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fcntl: folders are not locked there")
def test_a_folder_that_another_run_writes_is_refused(finished, capsys):
    settings = settings_of(adding.TASK, ["--resume", str(finished)])
    _, hold = open_run_folder("adding", settings)
    refused(capsys, "is being written by another run; nothing was changed", adding.TASK, "--resume", finished, "--steps", 20)
    del hold
    assert ran(capsys, adding.TASK, "--resume", finished, "--steps", 20)[0] == 0
    resumed_with = json.loads((finished / "config.json").read_text())["resumed_with"]
    assert len(resumed_with) == 1                                # the refused ones changed nothing


@pytest.mark.parametrize("flags", [["-S", "100000000000"], ["--train-size", "1000000000000"], ["-K", "100000000000"]])
def test_sizes_beyond_memory_are_one_line(tmp_path, capsys, flags):
    refused(capsys, "not enough memory for these sizes", adding.TASK, *SMALL, *flags, "--steps", 1, "--out", tmp_path / "run")


@pytest.mark.slow
def test_closed_streams_do_not_end_a_run(tmp_path):
    for n, closing in enumerate(["2>&-", "2>&1 >/dev/null | head -n 1"]):
        out = tmp_path / str(n)
        command = f"{shlex.quote(sys.executable)} {ROOT / 'tasks/adding.py'} {' '.join(SMALL)} --steps 60 --out {out}"
        subprocess.run(f"{command} {closing}", shell=True, timeout=60, check=False, stdout=subprocess.DEVNULL)
        assert load_tensors(out / "last.safetensors")[1]["step"] == 60


def test_resume_with_a_checkpoint_of_another_model(finished, tmp_path, capsys):
    ran(capsys, adding.TASK, *SMALL[:2], *SMALL[4:], "--steps", 10, "--model", "lstm", "--out", tmp_path / "b")
    foreign = (tmp_path / "b/last.safetensors").read_bytes()
    (finished / "last.safetensors").write_bytes(foreign)
    refused(capsys, "model is 'lstm'; this run has 'rra'", adding.TASK, "--resume", finished, "--steps", 20)
    assert (finished / "last.safetensors").read_bytes() == foreign


@pytest.mark.figures
def test_divergence_is_one_line_and_exit_status_1(tmp_path, capsys):
    status, _, err = ran(capsys, adding.TASK, *SMALL, "--steps", 300, "--optimizer", "sgd", "--lr", 1e12, "--clip-norm", 0,
                         "--quiet", "--out", tmp_path / "run")
    assert status == 1
    assert re.match(r"stopped: step \d+: .* is not finite", err)
    assert len(err.splitlines()) == 1
    assert (tmp_path / "run/figure4.png").exists()


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
    code = ("import dataclasses, sys; from tasks import adding, frame\n"
            "def data(settings): raise KeyboardInterrupt\n"
            "sys.exit(frame.run(dataclasses.replace(adding.TASK, data=data), []))")
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
