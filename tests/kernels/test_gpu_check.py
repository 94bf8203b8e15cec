"""tests/gpu_check.sh with played stages: what is kept, what the summary says, when it ends; its figures."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_check_figures as figures
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "gpu_check.sh"
KEPT = ["bench.json", "bench.png", "bench.txt", "environment.txt", "mnist.csv", "mnist.png", "summary.txt", "tests.txt"]
PLAYS = "GPU_CHECK_PLAYS"

# Stands for Python: plays a stage as $GPU_CHECK_PLAYS says, and hands the rest to the real one.
STUB = '''
import json, os, signal, sys, time
from pathlib import Path

arguments = sys.argv[1:]
place = next((name for name, word in {"gpu": "-c", "environment": "describe", "tests": "pytest",
                                      "bench": "tasks/bench", "mnist": "tasks/pixel_mnist.py"}.items()
              if word in arguments), None)
if place is None:
    os.execv(sys.executable, [sys.executable, *arguments])
plays = json.loads(os.environ["GPU_CHECK_PLAYS"]).get(place, "passes")

def given(flag):
    return Path(arguments[arguments.index(flag) + 1])

if place == "gpu":
    print("a warning of a library", file=sys.stderr)
    print("problem:", plays if plays != "passes" else None)
elif place == "environment":
    print("card: a card", "Python: 3", "cupy: 14", "commit: c0ffee", sep="\\n")
elif place == "tests":
    print("tests/test_a.py::test_one PASSED [ 50%]", flush=True)
    if plays == "passes":
        print("===== 2 passed, 7 deselected in 0.10s =====")
elif place == "bench":
    assert int(given("--seconds").name) >= 0
    row = {"layer": "LSTM", "side": "cuDNN", "verdict": "met"}
    given("--json").write_text(json.dumps({"table": [row, {**row, "layer": "SRU", "verdict": "missed"}]}))
    given("--out").write_bytes(b"PNG")
elif place == "mnist":
    given("--out").mkdir()
    log, columns = given("--out") / "log.csv", "step,seconds,test_accuracy"
    log.write_text(columns + "\\n0,0.0,0.1\\n")
    (given("--out") / "figure5.png").write_bytes(b"PNG")
    if plays == "until interrupted":
        log.write_text(columns + "\\n0,0.0,0.1\\n50,9.0,\\n100,11.5,\\n150,14.0,0.2\\n200,20.0,\\n250,22.5,\\n")
        signal.signal(signal.SIGINT, lambda *_: (print("stopped; the state is saved"), sys.exit(130)))
if plays == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if plays in ("hangs", "deaf", "until interrupted"):
    print("hangs", flush=True)
    time.sleep(60)
if plays == "fails":
    print(f"{place}: a reason")
    sys.exit(3)
'''


class Check:
    """A run of the script in the background: its $OUT, and, once it has ended, what came out of it."""

    def __init__(self, folder, plays, *flags, images=True):
        self.out, self.temporary, data, stub = (folder / name for name in ("out", "tmp", "mnist", "python"))
        self.temporary.mkdir(parents=True)
        data.mkdir()
        if images:
            (data / "train-images-idx3-ubyte.gz").touch()
        (folder / "stub.py").write_text(STUB, encoding="utf-8")
        stub.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/stub.py" "$@"\n', encoding="utf-8")
        stub.chmod(0o755)
        environment = {**os.environ, "PYTHON": str(stub), "OUT": "out", "TMPDIR": str(self.temporary),
                       PLAYS: json.dumps(plays)}
        self.began = time.monotonic()
        self.process = subprocess.Popen(["bash", str(SCRIPT), "--data", "mnist", "--grace", "1", *flags], cwd=folder,
                                        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ended(self):
        """Wait for it, once; the exit status."""
        try:
            self.text, _ = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        self.seconds = time.monotonic() - self.began
        return self.process.returncode

    def summary(self):
        """{stage: its line}, and the first line as ""."""
        first, *lines = (self.out / "summary.txt").read_text("utf-8").splitlines()
        return {"": first, **{line.split()[0]: " ".join(line.split()[1:]) for line in lines}}

    def kept(self):
        return sorted(path.name for path in self.out.iterdir())


LIMITS = ("--limits", "3,3,3")


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """All at once: most of their time they sleep."""
    if shutil.which("timeout") is None:
        pytest.skip("there is no GNU timeout")
    folder = tmp_path_factory.mktemp("gpu_check")
    return {
        "all passes": Check(folder / "a", {"mnist": "until interrupted"}, *LIMITS),
        "all goes wrong": Check(folder / "b", {"environment": "fails", "tests": "hangs", "bench": "deaf",
                                               "mnist": "fails"}, *LIMITS),
        "too little time": Check(folder / "c", {"tests": "deaf"}, "--total", "10", images=False),
        "stopped": Check(folder / "d", {"bench": "deaf"}),
        "early": Check(folder / "e", {"bench": "fails", "mnist": "hangs"}, *LIMITS),
        "no GPU": Check(folder / "f", {"gpu": "CuPy is installed but this machine has no CUDA device"}),
    }


@pytest.mark.slow
def test_all_passes(checks):
    check = checks["all passes"]
    assert check.ended() == 0, check.text
    summary = check.summary()
    assert "all passed" in summary[""]
    assert summary["environment"].startswith("passed")
    assert "a card, Python 3, CuPy 14, commit c0ffee" in summary["environment"]
    assert summary["tests"].endswith("s 2 passed")
    assert summary["bench"].endswith("2 rows: 1 met, 1 missed; missed: SRU / cuDNN")
    assert summary["mnist"].startswith("passed")
    assert "250 iterations in 22.5 s" in summary["mnist"]
    assert "training alone 20.00 a second, an epoch of 1,200: 60.0 s; test accuracy 20.00%" in summary["mnist"]
    assert check.kept() == KEPT
    assert not list(check.temporary.iterdir())
    assert "PASSED" in (check.out / "tests.txt").read_text("utf-8")


@pytest.mark.slow
def test_all_goes_wrong(checks):
    """Every stage fails in its way, none keeps the next from being run."""
    check = checks["all goes wrong"]
    assert check.ended() == 1
    summary = check.summary()
    assert "not all passed" in summary[""]
    assert summary["environment"].startswith("failed (3)")
    assert summary["tests"].startswith("ran out of time")
    assert summary["tests"].endswith("0 failed, 0 error, 1 passed, then cut off")
    assert summary["bench"].startswith("ran out of time")
    assert "2 rows: 1 met, 1 missed" in summary["bench"]
    assert summary["mnist"].startswith("failed (3)")
    assert summary["mnist"].endswith("last line: mnist: a reason")
    assert check.kept() == KEPT
    assert not list(check.temporary.iterdir())


@pytest.mark.slow
def test_what_is_left_is_the_limit(checks):
    check = checks["too little time"]
    assert check.ended() == 1
    summary = check.summary()
    assert summary["tests"].startswith("ran out of time")
    assert summary["mnist"].startswith("failed 0 s no MNIST files in ")
    assert summary["bench"].startswith("no time left")
    assert check.seconds < 10 + 60                               # the figures, where other things run too


@pytest.mark.slow
def test_a_run_that_logged_nothing_has_not_passed(checks):
    check = checks["early"]
    assert check.ended() == 1
    assert check.summary()["bench"].startswith("failed (3)")
    assert check.summary()["mnist"].startswith("ran out of time")


@pytest.mark.slow
def test_a_signal_ends_it_and_the_summary_is_true(checks):
    check = checks["stopped"]
    deadline = time.monotonic() + 60
    while not (check.out / "bench.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    check.process.send_signal(signal.SIGTERM)
    assert check.ended() == 128 + signal.SIGTERM
    summary = check.summary()
    assert "stopped by a signal" in summary[""]
    assert summary["tests"].startswith("passed")
    assert "not ended" in summary["bench"]
    assert summary["mnist"] == "not begun"
    assert not list(check.temporary.iterdir())


@pytest.mark.slow
def test_without_a_gpu_it_is_one_line(checks):
    check = checks["no GPU"]
    assert check.ended() == 2
    assert check.text == "error: CuPy is installed but this machine has no CUDA device; nothing was run\n"
    assert not check.out.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "says"), [
    (["--limits", "1,x,3"], "a limit in --limits is 'x'; expected a whole number of seconds"),
    (["--limits", "1,2"], "a limit in --limits is ''; expected a whole number of seconds"),
    (["--total", "-3"], "--total is '-3'; expected a whole number of seconds"), (["--data"], "--data needs a value"),
    (["--grace", "08"], "--grace is '08'; expected a whole number of seconds"),
    (["--total", "9" * 20], f"--total is '{'9' * 20}'; expected a whole number of seconds"),
    (["--data", ""], "--data is ''; expected a folder"),
    (["--data", "/no such"], "--data is '/no such'; expected a folder"),
    (["--fast"], "--fast is no flag of gpu_check.sh; see --help")])
def test_a_wrong_flag_is_one_line(flags, says):
    done = subprocess.run(["bash", str(SCRIPT), *flags], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {says}\n")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value", "says"), [
    ("PYTHON", "/proc/none", "expected a Python that can be run"),
    ("OUT", __file__, "expected a folder that can be written"),
    ("OUT", "/proc/none", "expected a folder that can be written"),
    ("TMPDIR", "/proc/none", "expected a folder that can be written")])
def test_a_wrong_variable_is_one_line(name, value, says, checks):
    stub = checks["no GPU"].out.parent / "python"
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, env={
        **os.environ, PLAYS: "{}", "OUT": "", "PYTHON": str(stub), name: value})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {name} is '{value}'; {says}")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_help_and_syntax():
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    done = subprocess.run(["bash", str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for word in ("--data", "--limits", "--total", "--grace", "Exit status", *KEPT):
        assert word in done.stdout
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", str(SCRIPT)]).returncode == 0


# ---- figures ---------------------------------------------------------------------------------------------

def shown(capsys, *argv):
    figures.main(*map(str, argv))
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(("text", "says"), [
    ("a PASSED\n== 2 failed, 3 passed, 9 deselected, 1 error in 0.12s (0:00:02) ==", "2 failed, 3 passed, 1 error"),
    ("a PASSED [ 1%]\nb FAILED [ 2%]\nc PASS", "1 failed, 0 error, 1 passed, then cut off"),
    ("No module named pytest", "no figures: no test was run")])
def test_figures_of_tests(text, says, tmp_path, capsys):
    (tmp_path / "tests.txt").write_text(text, encoding="utf-8")
    assert shown(capsys, "tests", tmp_path / "tests.txt") == says


def test_figures_of_a_bench(tmp_path, capsys):
    report = {"table": [{"layer": "LSTM", "side": "cuDNN", "verdict": "met"}, {
        "layer": "MNIST step", "side": "minigrad", "epoch": {"seconds": 70.5, "verdict": "missed"}}],
        "failed": ["SRU"], "notes": ["torch 2", "LSTM: not reached in 9 s"]}
    (tmp_path / "bench.json").write_text(json.dumps(report), encoding="utf-8")
    assert shown(capsys, "bench", tmp_path / "bench.json") == (
        "2 rows: 1 met, 1 missed; missed: MNIST step / epoch; failed: SRU; not reached: LSTM")
    (tmp_path / "bench.json").write_text('{"table": []}', encoding="utf-8")
    assert shown(capsys, "bench", tmp_path / "bench.json") == "0 rows"


def test_figures_of_files_that_are_not_there_or_cut_off(tmp_path, capsys):
    for what in ("environment", "tests", "bench", "mnist"):
        assert shown(capsys, what, tmp_path / "none").startswith("no figures (FileNotFoundError")
    (tmp_path / "cut").write_text("{", encoding="utf-8")
    for what in ("environment", "bench", "mnist"):
        assert shown(capsys, what, tmp_path / "cut").startswith("no figures (")


def test_figures_of_a_run_of_its_first_row(tmp_path, capsys):
    (tmp_path / "log.csv").write_text("step,seconds,test_accuracy\n0,0.0,0.1\n", encoding="utf-8")
    assert shown(capsys, "mnist", tmp_path / "log.csv").startswith("0 iterations in 0.0 s")
