"""The trainer: what a run writes, exact resume after a real kill, and how a run ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from minigrad.checkpoint import CheckpointError, load_checkpoint
from minigrad.data import Batches
from minigrad.layers import RRALSTM, Linear
from minigrad.losses import mean_squared_error
from minigrad.optim import SGD, Adam
from minigrad.runlog import read_log
from minigrad.train import Interrupted, NonFiniteError, Trainer
from models.regressor import SequenceRegressor

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["-S", "8", "-K", "3", "--hidden", "6", "--train-size", "60", "--test-size", "20", "--batch-size", "7",
         "--eval-every", "10", "--steps", "47"]


def make_data(n=40):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 3)).astype("float32")
    return x, (x @ rng.standard_normal((3, 1))).astype("float32")


def forward_backward(model, batch, rng):
    x, target = batch
    y, cache = model.forward(x, rng=rng)
    loss, loss_cache = mean_squared_error.forward(y, target)
    model.backward(mean_squared_error.backward(loss_cache), cache)
    return loss


def make_trainer(out, step=forward_backward, model=None, optimizer=None, **keywords):
    data = make_data()
    model = model or Linear(3, 1, rng=0)
    optimizer = optimizer or Adam(model.parameters(), lr=0.05)

    def evaluate(model):
        return {"mse": float(mean_squared_error.forward(model(data[0]), data[1])[0])}
    settings = {"out": out, "best": "mse", "log_every": 5, "eval_every": 10, "quiet": True, **keywords}
    return Trainer(model, optimizer, Batches(data, 8, seed=1), step, evaluate, **settings)


def without_seconds(path):
    columns, rows = read_log(path)
    assert "seconds" in columns
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def tensors(path):
    return {name: (array.dtype, array.tobytes()) for name, array in load_checkpoint(path)[0].items()}


# ---- the run folder --------------------------------------------------------------------------------------

def test_a_run_writes_log_and_checkpoints(tmp_path):
    trainer = make_trainer(tmp_path, config={"lr": 0.05})
    assert trainer.train(25) is None
    columns, rows = read_log(tmp_path / "log.csv")
    assert columns == ["step", "seconds", "lr", "loss", "grad_norm", "mse"]
    assert [row["step"] for row in rows] == [0, 5, 10, 15, 20, 25]
    assert [row["step"] for row in rows if row["mse"] is not None] == [0, 10, 20, 25]
    assert rows[-1]["mse"] < rows[0]["mse"]
    state, meta = load_checkpoint(tmp_path / "last.safetensors")
    assert {"W", "b", "optimizer.m.W", "optimizer.v.b"} <= set(state)
    assert meta["step"] == 25
    assert meta["data_order"] == {"seed": 1, "epoch": 5, "batch": 0}
    assert load_checkpoint(tmp_path / "best.safetensors")[1]["step"] == trainer.best["step"]


def test_the_logged_loss_is_the_mean_since_the_last_row(tmp_path):
    losses = []

    def recording(model, batch, rng):
        losses.append(float(forward_backward(model, batch, rng)))
        return losses[-1] + np.zeros((), "float32")
    trainer = make_trainer(tmp_path, recording)
    trainer.train(15)
    logged = [row["loss"] for row in trainer.log.rows[1:]]
    np.testing.assert_allclose(logged, [np.mean(losses[n:n + 5]) for n in (0, 5, 10)], rtol=1e-6)


def test_clipping_bounds_the_gradient_that_the_optimizer_sees(tmp_path):
    norms = []

    class Watching(SGD):
        def step(self):
            norms.append(float(np.sqrt(sum((p.grad**2).sum() for p in self.parameters))))
            super().step()
    model = Linear(3, 1, rng=0)
    trainer = make_trainer(tmp_path, model=model, optimizer=Watching(model.parameters(), lr=0.01), clip_norm=0.1)
    trainer.train(5)
    assert max(norms) <= 0.1 * (1 + 1e-6)
    assert trainer.log.rows[-1]["grad_norm"] > 0.1          # the norm before clipping is what is logged


def test_clipping_by_value_bounds_every_entry(tmp_path):
    largest = []

    class Watching(SGD):
        def step(self):
            largest.append(max(abs(p.grad).max() for p in self.parameters))
            super().step()
    model = Linear(3, 1, rng=0)
    trainer = make_trainer(tmp_path, model=model, optimizer=Watching(model.parameters(), lr=0.01), clip_value=0.05)
    trainer.train(5)
    assert max(largest) <= 0.05
    assert trainer.log.rows[-1]["grad_norm"] > 0.1


def test_every_step_has_its_own_random_numbers(tmp_path):
    drawn = []

    def drawing(model, batch, rng):
        drawn.append(rng.random())
        return forward_backward(model, batch, rng)
    make_trainer(tmp_path, drawing, seed=3).train(6)
    assert len(set(drawn)) == 6
    assert drawn == [np.random.default_rng(np.random.SeedSequence(3, spawn_key=(step,))).random() for step in range(6)]


def test_an_early_stop_is_asked_after_each_evaluation(tmp_path):
    trainer = make_trainer(tmp_path)
    reason = trainer.train(100, stop=lambda log: "enough" if log.rows[-1]["step"] >= 20 else None)
    assert reason == "enough"
    assert trainer.step == 20
    assert load_checkpoint(tmp_path / "last.safetensors")[1]["step"] == 20


# ---- resume ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("first", [10, 13, 25, 40])
def test_a_continued_run_equals_one_never_stopped(tmp_path, first):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    make_trainer(tmp_path / "whole", clip_norm=0.5).train(45)
    interrupted = make_trainer(tmp_path / "parts", clip_norm=0.5)
    interrupted.train(first)
    resumed = make_trainer(tmp_path / "parts", clip_norm=0.5)
    resumed.resume()
    assert resumed.step == first
    resumed.train(45)
    assert tensors(tmp_path / "parts/last.safetensors") == tensors(tmp_path / "whole/last.safetensors")


KILLER = """
    import os, signal, sys
    from pathlib import Path
    from minigrad.data import Batches
    from tasks import adding
    from tasks.common import run
    where, when, argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "step":
        take = Batches.__getitem__
        Batches.__getitem__ = lambda self, step: die() if step == when else take(self, step)
    else:
        replace, calls = Path.replace, []
        def dying(self, target):
            if Path(target).name == where:
                calls.append(target)
                if len(calls) == when:
                    die()
            return replace(self, target)
        Path.replace = dying
    sys.exit(run(adding.main, argv))
"""


def run_adding(argv, code="import sys; from tasks import adding; from tasks.common import run; "
                          "sys.exit(run(adding.main, sys.argv[1:]))"):
    return subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code), *argv], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that is never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = run_adding([*SMALL, "--out", str(out), "--quiet"])
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
@pytest.mark.parametrize(("where", "when"), [
    ("step", 3), ("step", 10), ("step", 26), ("step", 46), ("last.safetensors", 1), ("last.safetensors", 3),
    ("best.safetensors", 2), ("log.csv", 1)])
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, whole, where, when):
    """SIGKILL at a step, or in the middle of writing a checkpoint."""
    out = tmp_path / "run"
    killed = run_adding([where, str(when), *SMALL, "--out", str(out), "--quiet"], KILLER)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_adding(["--resume", str(out), "--quiet"])
    assert resumed.returncode == 0, resumed.stderr
    assert tensors(out / "last.safetensors") == tensors(whole / "last.safetensors")
    assert tensors(out / "best.safetensors") == tensors(whole / "best.safetensors")
    assert without_seconds(out / "log.csv") == without_seconds(whole / "log.csv")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_run_killed_from_outside_resumes(tmp_path, whole):
    out = tmp_path / "run"
    argv = [*SMALL[:-1], "4000", "--out", str(out)]
    process = subprocess.Popen([sys.executable, str(ROOT / "tasks/adding.py"), *argv], stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:                          # plain lines, since this is no terminal
            if line.startswith("step 30/"):
                break
    finally:
        process.kill()
        process.communicate()
    resumed = run_adding(["--resume", str(out), "--quiet", "--steps", "4000"])
    assert resumed.returncode == 0, resumed.stderr
    at_47 = run_adding([*SMALL[:-1], "4000", "--out", str(tmp_path / "other"), "--quiet"])
    assert at_47.returncode == 0
    assert tensors(out / "last.safetensors") == tensors(tmp_path / "other/last.safetensors")


def test_resume_refuses_what_does_not_fit(tmp_path):
    make_trainer(tmp_path, config={"lr": 0.05, "model": "a", "steps": 10}).train(10)

    def resumed(**keywords):
        make_trainer(tmp_path, **{"config": {"lr": 0.05, "model": "a", "steps": 99}, **keywords}).resume()
    resumed()
    with pytest.raises(CheckpointError, match=r"last.safetensors: model is 'a'; this run has 'b'"):
        resumed(config={"lr": 0.05, "model": "b"})
    with pytest.raises(CheckpointError, match=r"lr is 0.05; this run has None"):
        resumed(config={"model": "a"})
    other = Linear(3, 1, rng=0)
    with pytest.raises(CheckpointError, match=r"optimizer is 'Adam'; this run has 'SGD'"):
        resumed(optimizer=SGD(other.parameters()), model=other)
    wider = Linear(3, 2, rng=0)
    with pytest.raises(CheckpointError, match=r"W is float32 \(3, 1\); this model has float32 \(3, 2\)"):
        resumed(model=wider, optimizer=Adam(wider.parameters()))
    double = Linear(3, 1, rng=0, dtype="float64")
    with pytest.raises(CheckpointError, match=r"W is float32 \(3, 1\); this model has float64"):
        resumed(model=double, optimizer=Adam(double.parameters()))
    cell = SequenceRegressor(RRALSTM(3, 2, 1), 2)
    with pytest.raises(CheckpointError, match=r"cell.W is missing"):
        resumed(model=cell, optimizer=Adam(cell.parameters()))


def test_resume_refuses_another_seed(tmp_path):
    make_trainer(tmp_path, seed=1).train(5)
    with pytest.raises(CheckpointError, match="random_numbers' seed is 1; this run has 2"):
        make_trainer(tmp_path, seed=2).resume()


def test_best_is_the_smallest_and_is_remembered_by_a_resumed_run(tmp_path):
    values = {0: 9.0, 10: 3.0, 20: 5.0, 30: 4.0, 40: 2.0}

    def trainer():
        made = make_trainer(tmp_path)
        made.evaluate = lambda model: {"mse": values[made.step]}
        return made
    first = trainer()
    first.train(20)
    assert first.best == {"value": 3.0, "step": 10}
    second = trainer()
    second.resume()
    assert second.seconds >= first.seconds
    second.train(30)
    assert load_checkpoint(tmp_path / "best.safetensors")[1]["step"] == 10
    second.train(40)
    assert load_checkpoint(tmp_path / "best.safetensors")[1]["step"] == 40


def test_a_run_that_was_stopped_at_its_last_step_is_still_evaluated(tmp_path):
    """Ctrl-C at step 13, and then no more is asked for than these 13 steps."""
    def interrupted(model, batch, rng):
        if trainer.step == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return forward_backward(model, batch, rng)
    (tmp_path / "whole").mkdir()
    make_trainer(tmp_path / "whole").train(13)
    trainer = make_trainer(tmp_path, interrupted)
    with pytest.raises(Interrupted):
        trainer.train(20)
    resumed = make_trainer(tmp_path)
    assert resumed.resume_if_begun()
    resumed.train(13)
    assert without_seconds(tmp_path / "log.csv") == without_seconds(tmp_path / "whole/log.csv")
    assert tensors(tmp_path / "last.safetensors") == tensors(tmp_path / "whole/last.safetensors")


@pytest.mark.parametrize("content", [None, "", "foo\n", "a,b\n1,2\n"])
def test_a_damaged_log_is_named_before_anything_is_changed(tmp_path, content):
    make_trainer(tmp_path).train(10)
    (tmp_path / "log.csv").unlink()
    if content is not None:
        (tmp_path / "log.csv").write_text(content)
    resumed = make_trainer(tmp_path)
    before = resumed.model.W.value.copy()
    with pytest.raises(CheckpointError, match=r"log .*log.csv: missing or damaged"):
        resumed.resume()
    np.testing.assert_array_equal(resumed.model.W.value, before)


def test_best_must_be_something_that_evaluate_returns(tmp_path):
    with pytest.raises(ValueError, match="best is 'accuracy'; expected one of evaluate's, mse"):
        make_trainer(tmp_path, best="accuracy").train(5)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_number_of_threads(tmp_path):
    """Sums are grouped by thread: another count would give other last bits."""
    out = tmp_path / "run"
    script = [sys.executable, str(ROOT / "tasks/adding.py")]
    code = "import os, tasks.common; print(os.environ['OPENBLAS_NUM_THREADS'])"
    subprocess.run([*script, *SMALL, "--threads", "2", "--quiet", "--out", str(out)], check=True, timeout=60,
                   stdout=subprocess.DEVNULL)
    for argv, threads in [(["--resume", str(out)], "2"), ([f"--resume={out}"], "2"), (["--resume", "nowhere"], "1"),
                          (["--resume", str(out), "--threads", "1"], "1"), ([], "1"), (["--threads", "x"], "1")]:
        done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == threads, argv


# ---- how a run ends --------------------------------------------------------------------------------------

def poisoned(at, value, where):
    """forward_backward that puts a value into a gradient (or the loss) at one step."""
    count = [0]

    def step(model, batch, rng):
        loss = forward_backward(model, batch, rng)
        count[0] += 1
        if count[0] == at:
            if where == "loss":
                return loss * value
            getattr(model, where).grad[0] = value
        return loss
    return step


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("where", "named"), [("b", "the gradient of b"), ("W", "the gradient of W"),
                                              ("loss", "the loss")])
def test_nan_stops_the_run_and_names_step_and_tensor(tmp_path, value, where, named):
    trainer = make_trainer(tmp_path, poisoned(13, value, where), clip_norm=None if where == "W" else 1.0,
                           clip_value=1.0 if where == "W" else None)
    with pytest.raises(NonFiniteError, match=rf"step 13: {named} is not finite.*good checkpoint is kept in .*last"):
        trainer.train(30)
    state, meta = load_checkpoint(tmp_path / "last.safetensors")
    assert meta["step"] == 10
    assert all(np.isfinite(array).all() for array in state.values())
    values = dict(trainer.model.named_parameters())
    assert all(np.isfinite(p.value).all() for p in values.values())      # stopped before the step was taken


def test_non_finite_parameters_are_never_saved_over_a_good_checkpoint(tmp_path):
    class Poison(SGD):
        def update(self, theta, g):
            super().update(theta, g)
            if self.steps == 20:
                theta[...] = np.inf
    model = Linear(3, 1, rng=0)
    trainer = make_trainer(tmp_path, model=model, optimizer=Poison(model.parameters(), lr=0.01))
    with pytest.raises(NonFiniteError, match=r"step 20: W is not finite; the last good checkpoint is kept"):
        trainer.train(30)
    assert load_checkpoint(tmp_path / "last.safetensors")[1]["step"] == 10


@pytest.mark.parametrize("at", [0, 20])
def test_an_evaluation_that_is_not_finite_stops_the_run(tmp_path, at):
    trainer = make_trainer(tmp_path)
    trainer.evaluate = lambda model: {"mse": np.nan if trainer.step == at else 1.0}
    with pytest.raises(NonFiniteError, match=f"step {at}: mse is nan"):
        trainer.train(30)


def test_a_formula_that_becomes_undefined_is_named_with_its_step(tmp_path):
    """Where forward does not look (on a GPU), the trainer does at log intervals."""
    trainer = make_trainer(tmp_path)

    def validate():
        if trainer.step == 15:
            raise ArithmeticError("w sums to 0")
    trainer.model.validate = validate
    with pytest.raises(NonFiniteError, match="step 15: w sums to 0; the last good checkpoint is kept"):
        trainer.train(30)


def test_an_undefined_formula_stops_the_run(tmp_path):
    model = SequenceRegressor(RRALSTM(3, 2, 2, rng=0), 2, rng=0)
    model.cell.w.value[...] = [1, -1]

    def on_sequences(model, batch, rng):
        return forward_backward(model, (batch[0][:, None], batch[1]), rng)
    trainer = make_trainer(tmp_path, on_sequences, model=model)
    trainer.evaluate = lambda model: {"mse": 1.0}
    with pytest.raises(NonFiniteError, match=r"step 1: RRALSTM: the attention weights w sum to 0 .*checkpoint is kept"):
        trainer.train(3)


def test_ctrl_c_saves_and_ends(tmp_path):
    def interrupted(model, batch, rng):
        loss = forward_backward(model, batch, rng)
        if trainer.step == 13:
            os.kill(os.getpid(), signal.SIGINT)
        return loss
    trainer = make_trainer(tmp_path, interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"stopped at step 14 of 45; the state is saved in"):
        trainer.train(45)
    assert signal.getsignal(signal.SIGINT) is before
    (tmp_path / "whole").mkdir()
    make_trainer(tmp_path / "whole").train(45)
    resumed = make_trainer(tmp_path)
    resumed.resume()
    assert resumed.step == 14
    resumed.train(45)
    assert tensors(tmp_path / "last.safetensors") == tensors(tmp_path / "whole/last.safetensors")
    assert without_seconds(tmp_path / "log.csv") == without_seconds(tmp_path / "whole/log.csv")


def test_ctrl_c_in_the_last_evaluation_is_not_lost(tmp_path):
    trainer = make_trainer(tmp_path)
    inner = trainer.evaluate

    def evaluate(model):
        if trainer.step == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return inner(model)
    trainer.evaluate = evaluate
    with pytest.raises(Interrupted, match="stopped at step 20 of 20"):
        trainer.train(20)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    def twice(model, batch, rng):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return forward_backward(model, batch, rng)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, twice).train(20)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_task_cleanly(tmp_path, number):
    out = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-W", "error", str(ROOT / "tasks/adding.py"), *SMALL[:-1], "100000",
                                "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if line.startswith("step 30/"):
                break
        process.send_signal(getattr(signal, number))
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "the state is saved in" in stderr
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["settings"]["hidden"] == 6
    assert load_checkpoint(out / "last.safetensors")[1]["step"] >= 30
    assert (out / "figure4.png").stat().st_size > 1000
