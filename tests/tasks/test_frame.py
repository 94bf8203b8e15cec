"""What every task has from tasks/frame: its flags, run folder, resume, errors and exit statuses.

They are tried on the cheapest task, adding; at the end a table over all tasks holds what each of them must do.
"""

import dataclasses
import functools
import gc
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import content, write_images, write_reviews
from task_runs import SMALL, ran, refused

from minigrad import Parameter
from minigrad.backend import gpu_problem
from minigrad.data.imdb import read_imdb
from minigrad.data.mnist import read_mnist
from minigrad.kernels import KernelError
from minigrad.layers import IRNN
from minigrad.tensors import load_tensors, save_tensors
from minigrad.training import read_log
from tasks import adding, char_lm, frame, imdb, pixel_mnist, tsdae
from tasks.frame import make_optimizer, run_folder
from tasks.frame.flags import settings_of
from tasks.frame.run import _tell_once
from tasks.frame.run_folder import open_run_folder

TASK = adding.TASK                                # the cheapest
pytestmark = pytest.mark.usefixtures("quick_figures")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("adding") / "run"
    assert frame.run(TASK, [*SMALL, "--steps", "10", "--quiet", "--out", str(out)]) == 0
    return out


@pytest.fixture
def finished(ten_steps, tmp_path):
    """A copy of the folder of a run that took its 10 steps, at tmp_path / "run"."""
    return Path(shutil.copytree(ten_steps, tmp_path / "run"))


# ---- runs ------------------------------------------------------------------------------------------------

@pytest.mark.figures
def test_a_run_writes_what_the_help_says(tmp_path, capsys):
    status, out, _ = ran(capsys, TASK, *SMALL, "--steps", 20, "--out", tmp_path / "run")
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
    status, _, _ = ran(capsys, TASK, *SMALL, "--steps", 10, "--compare", "rra,lstm", "--out", tmp_path / "run")
    assert status == 0
    assert (tmp_path / "run/figure4.png").stat().st_size > 1000
    rra, lstm = (json.loads((tmp_path / f"run/{name}/result.json").read_text()) for name in ("rra", "lstm"))
    assert rra["baseline"] == lstm["baseline"]
    assert not (tmp_path / "run/lstm/figure7.png").exists()
    again, _, _ = ran(capsys, TASK, "--resume", tmp_path / "run", "--steps", 20)
    assert again == 0
    assert load_tensors(tmp_path / "run/lstm/last.safetensors")[1]["step"] == 20


def test_a_part_of_a_comparison_can_be_resumed_alone(tmp_path, capsys):
    ran(capsys, TASK, *SMALL, "--steps", 10, "--compare", "rra,lstm", "--out", tmp_path / "run")
    status, _, err = ran(capsys, TASK, "--resume", tmp_path / "run/lstm", "--steps", 20)
    assert status == 0, err
    assert load_tensors(tmp_path / "run/lstm/last.safetensors")[1]["step"] == 20


def test_a_damaged_config_of_a_part_is_one_line(tmp_path, capsys):
    ran(capsys, TASK, *SMALL, "--steps", 10, "--compare", "rra,lstm", "--out", tmp_path / "run")
    (tmp_path / "run/lstm/config.json").write_text("{")
    status, _, err = ran(capsys, TASK, "--resume", tmp_path / "run", "--steps", 20)
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
    (["--model", "lstm"], "--window has no meaning with lstm; it belongs to rra, rnn-residual, rnn-attention"),
    (["--compare", "lstm,rwa", "--normalize", "sum"], "--window has no meaning with lstm, rwa"),
])
def test_bad_flags(tmp_path, capsys, argv, sentence):
    refused(capsys, sentence, TASK, *SMALL, *argv, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU is there")
def test_no_gpu(tmp_path, capsys):
    status, _, err = ran(capsys, TASK, "--device", "gpu", "--out", tmp_path / "run")
    assert status == 2
    assert err.startswith("error: device 'gpu' was asked for, but ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU is there")
def test_a_run_of_a_gpu_resumed_without_one(finished, capsys):
    config, before = finished / "config.json", (finished / "last.safetensors").read_bytes()
    config.write_text(config.read_text().replace('"device": "cpu",', '"device": "gpu",'))
    refused(capsys, f"; with --device cpu the run in {finished} continues without one", TASK, "--resume", finished,
            "--steps", 30)
    assert (finished / "last.safetensors").read_bytes() == before
    assert ran(capsys, TASK, "--resume", finished, "--steps", 30, "--device", "cpu")[0] == 0


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU is there")
def test_auto_says_why_it_is_the_cpu(tmp_path, capsys):
    _tell_once.cache_clear()
    status, out, _ = ran(capsys, TASK, *SMALL, "--steps", 1, "--device", "auto", "--out", tmp_path / "run")
    assert (status, out.count("--device auto: the CPU; CuPy ")) == (0, 1)


def test_a_kernel_that_does_not_compile_is_one_line(tmp_path, capsys):
    def fails(*arguments):
        raise KernelError("the GPU kernels of lstm.cu could not be compiled for float32 (a cause)")
    status, _, err = ran(capsys, dataclasses.replace(TASK, step=fails), *SMALL, "--steps", 5, "--quiet", "--out",
                         tmp_path / "run")
    assert (status, err) == (2, "error: the GPU kernels of lstm.cu could not be compiled for float32 (a cause)\n")


def test_a_folder_that_is_not_empty_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    refused(capsys, "is not empty; nothing was written", TASK, *SMALL, "--steps", 5, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unwritable_folder_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("a file where a folder should be")
    status, _, err = ran(capsys, TASK, *SMALL, "--steps", 5, "--out", tmp_path / "file" / "run")
    assert status == 2
    assert err.startswith("error: --out ")
    assert len(err.splitlines()) == 1


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(finished, capsys, monkeypatch):
    before = (finished / "last.safetensors").read_bytes()

    def no_space(path, content):
        raise OSError(28, "No space left on device", str(path))
    monkeypatch.setattr("minigrad.tensors.write_atomically", no_space)
    refused(capsys, "No space left on device", TASK, "--resume", finished, "--steps", 20, "--quiet")
    assert (finished / "last.safetensors").read_bytes() == before


def test_two_runs_in_one_second_have_folders_of_their_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    for _ in range(3):
        assert ran(capsys, TASK, *SMALL, "--steps", 1, "--quiet")[0] == 0
    names = {path.name for path in (tmp_path / "runs/adding").iterdir()}
    assert names == {"20260101-000000", "20260101-000000-2", "20260101-000000-3"}


def test_resume_with_bad_folders_and_files(finished, tmp_path, capsys):
    refused(capsys, "no run there", TASK, "--resume", tmp_path / "nothing")
    refused(capsys, "--hidden 7 differs from the run in", TASK, "--resume", finished, "--steps", 20, "--hidden", 7)
    last = (finished / "last.safetensors").read_bytes()
    for damaged in (last[:len(last) // 2], last[:20], b"", b"\0" * 100):
        (finished / "last.safetensors").write_bytes(damaged)
        status, _, err = ran(capsys, TASK, "--resume", finished, "--steps", 20)
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
    refused(capsys, "error: ", TASK, "--resume", finished)
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


@pytest.mark.parametrize("meta", [
    {"step": "a"}, {"step": -5}, {"step": 30.5}, {"step": 1000}, {"seconds": None}, {"best": None}, {"best": {}},
    {"config": None}, {"optimizer": {"name": "Adam", "steps": "x"}}, {"optimizer": 3}, {"data_order": {}}], ids=str)
def test_a_checkpoint_with_a_damaged_header_is_one_line(finished, capsys, meta):
    state, whole = load_tensors(finished / "last.safetensors")
    save_tensors(finished / "last.safetensors", state, {**whole, **meta})
    log = (finished / "log.csv").read_bytes()
    refused(capsys, "error: ", TASK, "--resume", finished, "--steps", 20)
    assert (finished / "log.csv").read_bytes() == log


@pytest.mark.parametrize("damage", [
    lambda text: text.replace("test_mse", "mse"), lambda text: text.replace("step,", "", 1),
    lambda text: text.replace("seconds,", "seconds,more,", 1), lambda text: text.splitlines()[0] + "\n",
    lambda text: text[:-1], lambda text: text.replace("\n10,", "\n,"), lambda text: text + "garbage\n"])
def test_a_damaged_log_is_one_line(finished, capsys, damage):
    damaged = damage((finished / "log.csv").read_text())
    (finished / "log.csv").write_text(damaged)
    refused(capsys, "error: ", TASK, "--resume", finished, "--steps", 20)
    assert (finished / "log.csv").read_text() == damaged


def test_a_missing_checkpoint_is_not_a_fresh_start(finished, capsys):
    (finished / "last.safetensors").unlink()
    log = (finished / "log.csv").read_bytes()
    refused(capsys, "last.safetensors: missing, but log.csv goes beyond step 0", TASK, "--resume", finished)
    assert (finished / "log.csv").read_bytes() == log


def test_fewer_steps_than_taken_are_refused(finished, capsys):
    refused(capsys, "5 are asked for, but the run in", TASK, "--resume", finished, "--steps", 5)
    assert ran(capsys, TASK, "--resume", finished)[0] == 0      # and it is still a run of 10 steps


def test_a_refused_resume_changes_nothing(finished, capsys):
    (finished / "last.safetensors").write_bytes(b"damaged")
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    assert ran(capsys, TASK, "--resume", finished, "--steps", 20)[0] == 2
    (finished / "last.safetensors").unlink()
    (finished / "log.csv").write_text("garbage")
    refused(capsys, "error: ", TASK, "--resume", finished, "--steps", 20)
    assert (finished / "config.json").read_bytes() == before["config.json"]
    assert (finished / "result.json").read_bytes() == before["result.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fcntl: folders are not locked there")
def test_a_folder_that_another_run_writes_is_refused(finished, capsys):
    settings = settings_of(TASK, ["--resume", str(finished)])
    _, hold = open_run_folder("adding", settings)
    refused(capsys, "is being written by another run; nothing was changed", TASK, "--resume", finished, "--steps", 20)
    del hold
    assert ran(capsys, TASK, "--resume", finished, "--steps", 20)[0] == 0
    resumed_with = json.loads((finished / "config.json").read_text())["resumed_with"]
    assert len(resumed_with) == 1                                # the refused ones changed nothing


@pytest.mark.parametrize("flags", [["-S", "100000000000"], ["--train-size", "1000000000000"], ["-K", "100000000000"]])
def test_sizes_beyond_memory_are_one_line(tmp_path, capsys, flags):
    refused(capsys, "not enough memory for these sizes", TASK, *SMALL, *flags, "--steps", 1, "--out", tmp_path / "run")


@pytest.mark.slow
def test_closed_streams_do_not_end_a_run(tmp_path):
    for n, closing in enumerate(["2>&-", "2>&1 >/dev/null | head -n 1"]):
        out = tmp_path / str(n)
        command = f"{shlex.quote(sys.executable)} {ROOT / 'tasks/adding.py'} {' '.join(SMALL)} --steps 60 --out {out}"
        subprocess.run(f"{command} {closing}", shell=True, timeout=60, check=False, stdout=subprocess.DEVNULL)
        assert load_tensors(out / "last.safetensors")[1]["step"] == 60


def test_resume_with_a_checkpoint_of_another_model(finished, tmp_path, capsys):
    ran(capsys, TASK, *SMALL[:2], *SMALL[4:], "--steps", 10, "--model", "lstm", "--out", tmp_path / "b")
    foreign = (tmp_path / "b/last.safetensors").read_bytes()
    (finished / "last.safetensors").write_bytes(foreign)
    refused(capsys, "model is 'lstm'; this run has 'rra'", TASK, "--resume", finished, "--steps", 20)
    assert (finished / "last.safetensors").read_bytes() == foreign


@pytest.mark.figures
def test_divergence_is_one_line_and_exit_status_1(tmp_path, capsys):
    status, _, err = ran(capsys, TASK, *SMALL, "--steps", 300, "--optimizer", "sgd", "--lr", 1e12, "--clip-norm", 0,
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


# ---- every task ------------------------------------------------------------------------------------------

LABELLED = ["--hidden", "4", "--eval-size", "6", "--batch-size", "5", "--eval-every", "3"]
RUNS = {                                                         # {name: (task, a small run of 11 steps, --data)}
    "adding": (adding, [*SMALL[:-2], "--eval-every", "3", "--clip-value", "0.1"], None),
    "pixel_mnist": (pixel_mnist, [*LABELLED, "--stride", "7", "--model", "urnn", "--permuted", "--dropout", "0.4"],
                    lambda folder: write_images(folder, 30, 20)),
    "imdb": (imdb, [*LABELLED, "--embedding", "3", "--vocab", "30", "--model", "birnn-attention", "-K", "3",
                    "--max-length", "6"], lambda folder: write_reviews(folder, 24)),
    "char_lm": (char_lm, ["--width", "16", "--layers", "2", "--batch-size", "3", "--unroll", "7", "--eval-every", "3",
                          "--dropout", "0.2"], lambda folder: write_text(folder, 9)),
    "tsdae": (tsdae, ["--width", "8", "--heads", "2", "--layers", "1", "--vocab", "60", "--buckets", "9",
                      "--batch-size", "4", "--sts", "none", "--dropout", "0.1", "--eval-every", "3"],
              lambda folder: write_text(folder, 60)),
}


def write_text(folder, lines):
    words = np.random.default_rng(0).choice(["the", "of", "and", "a", "fast", "river", "sings"], (lines, 360 // lines))
    (folder / "text.txt").write_text("\n".join(" ".join(line) + " ." for line in words), encoding="utf-8")
    return folder / "text.txt"


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_resumed_is_as_never_stopped(name, tmp_path, capsys, monkeypatch):
    """As if killed at step 7, later than the checkpoint."""
    task, flags, make = RUNS[name]
    monkeypatch.setattr(pixel_mnist, "read_mnist", functools.partial(read_mnist, official=False))
    monkeypatch.setattr(imdb, "read_imdb", functools.partial(read_imdb, cache=False, count=None))
    (tmp_path / "data").mkdir()
    flags = [*flags, *(["--data", make(tmp_path / "data")] if make else []), "--steps", 11, "--quiet"]
    calls = []

    def stops(*arguments):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return task.TASK.step(*arguments)
    status, _, err = ran(capsys, task.TASK, *flags, "--out", tmp_path / "whole")
    assert status == 0, err
    assert ran(capsys, dataclasses.replace(task.TASK, step=stops), *flags, "--out", tmp_path / "parts")[0] == 130
    gc.collect()                                                 # the lock, held by the frames of what was interrupted
    step = load_tensors(tmp_path / "parts/last.safetensors")[1]["step"]
    assert 0 < step < 7
    if name == "imdb":                                           # an evaluation on a part of the test set is no end
        refused(capsys, "stands there already, within an epoch", task.TASK, "--resume", tmp_path / "parts", "--steps",
                step)
    status, _, err = ran(capsys, task.TASK, "--resume", tmp_path / "parts", "--steps", 11)
    assert status == 0, err
    without_rates = lambda kept: {key: value for key, value in kept.items() if "_per_second" not in key}
    (*whole, kept), (*parts, other) = content(tmp_path / "whole"), content(tmp_path / "parts")
    assert whole == parts
    assert without_rates(kept) == without_rates(other)


def test_a_comparison_goes_on_when_one_diverges(tmp_path, capsys):
    def diverging(model, batch, rng):
        loss = TASK.step(model, batch, rng)
        if isinstance(model.cell, IRNN):
            model.cell.V.grad[...] = np.inf
        return loss
    status, _, err = ran(capsys, dataclasses.replace(TASK, step=diverging), *SMALL[:2], *SMALL[4:], "--steps", 8,
                         "--compare", "irnn,lstm", "--out", tmp_path / "run")
    assert status == 1
    assert re.search(r"^irnn stopped: step 1: the gradient of cell.V is not finite", err, re.MULTILINE)
    assert "stopped: irnn diverged (above); the others were trained to their end" in err
    assert (tmp_path / "run/lstm/result.json").exists()
    assert (tmp_path / "run/figure4.png").exists()


SCRIPTS = sorted(path.stem for path in (ROOT / "tasks").glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


def test_the_scripts():
    assert set(RUNS) < set(SCRIPTS)
    for path in (ROOT / "tasks").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 250, path


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_help_says_what_it_is_how_to_run_it_and_what_to_expect(name, capsys, monkeypatch):
    for argv, status in (["--help"], 0), (["--unknown"], 2):
        for run in (lambda: runpy.run_path(str(ROOT / f"tasks/{name}.py"), run_name="__main__"),
                    lambda: runpy.run_module(f"tasks.{name}", run_name="__main__")):
            monkeypatch.setattr("sys.argv", [f"tasks/{name}.py", *argv])
            with pytest.raises(SystemExit) as end:
                run()
            out, err = capsys.readouterr()
            assert end.value.code == status
            if status:
                assert (err.count("\n"), err[:7]) == (1, "error: ")
            else:
                assert f"    python tasks/{name}.py" in out
                assert "Expect: " in out


@pytest.mark.parametrize(("task", "argv", "expected"), [
    (adding, [], ("adam", 2e-3)), (adding, ["--optimizer", "adadelta"], ("adadelta", None)),
    (adding, ["--paper", "--optimizer", "adam"], ("adam", None)), (char_lm, ["--optimizer", "adamw"], ("adamw", None)),
    (pixel_mnist, ["--paper"], ("rmsprop", 1e-3)), (tsdae, ["--optimizer", "sgd", "--lr", "0.1"], ("sgd", 0.1)),
    (imdb, ["--optimizer", "rmsprop-centred"], ("rmsprop-centred", None))])
def test_another_optimizer_starts_with_its_own_settings(task, argv, expected):
    settings = settings_of(task.TASK, argv)
    assert (settings["optimizer"], settings["lr"]) == expected


def test_the_centred_rmsprop_is_the_tutorials():
    names = ("lr", "rho", "momentum", "centred", "eps", "eps_inside")
    for given, expected in (({}, [1e-4, 0.95, 0.9, True, 1e-4, True]),
                            ({"lr": 1e-3, "eps": 1e-6}, [1e-3, 0.95, 0.9, True, 1e-6, True])):
        optimizer = make_optimizer({"optimizer": "rmsprop-centred", **given}, [Parameter(np.zeros(2))])
        assert [getattr(optimizer, name) for name in names] == expected


def test_threads_are_set_for_the_run_alone(tmp_path, capsys):
    seen = []

    def looking(model, batch, rng):
        seen.append(run_folder.environment()["blas_threads"])
        return TASK.step(model, batch, rng)
    before = run_folder.environment()["blas_threads"]
    watched = dataclasses.replace(TASK, step=looking)
    ran(capsys, watched, *SMALL, "--steps", 1, "--threads", 2, "--quiet", "--out", tmp_path / "run")
    ran(capsys, watched, "--resume", tmp_path / "run", "--steps", 2)         # sums are grouped by thread: it keeps them
    ran(capsys, watched, "--resume", tmp_path / "run", "--steps", 3, "--threads", 1)
    assert seen == ["2", "2", "1"]
    assert run_folder.environment()["blas_threads"] == before
