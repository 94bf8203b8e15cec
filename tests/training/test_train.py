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
from helpers import assert_identical, flat

from minigrad import Layer, clipping
from minigrad.data import Batches, adding_problem
from minigrad.layers import LSTM, RRALSTM, URNN, Linear
from minigrad.losses import mean_squared_error
from minigrad.optim import SGD, Adadelta, Adam, RAdam
from minigrad.schedules import WarmupCosine
from minigrad.tensors import CheckpointError, load_tensors
from minigrad.training import Interrupted, NonFiniteError, Trainer, read_log, trainer as trainer_module
from models.regressor import SequenceRegressor
from tasks import adding, frame

ROOT = Path(__file__).resolve().parents[2]
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
    model.backward(mean_squared_error.backward(1.0, loss_cache), cache)
    return loss


def make_trainer(out, step=forward_backward, model=None, optimizer=None, **keywords):
    data = make_data()
    model = model or Linear(3, 1, rng=0)
    optimizer = optimizer or Adam(model.parameters(), lr=0.05)

    def evaluate(model, step):
        return {"mse": float(mean_squared_error.forward(model(data[0]), data[1])[0])}
    settings = {"out": out, "best": "mse", "log_every": 5, "eval_every": 10, "quiet": True, **keywords}
    return Trainer(model, optimizer, Batches(data, 8, seed=1), step, evaluate, **settings)


def without_seconds(path):
    columns, rows = read_log(path)
    assert "seconds" in columns
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def tensors(path):
    return {name: (array.dtype, array.tobytes()) for name, array in load_tensors(path)[0].items()}


# ---- the run folder --------------------------------------------------------------------------------------

def test_a_run_writes_log_and_checkpoints(tmp_path):
    trainer = make_trainer(tmp_path, config={"lr": 0.05})
    assert trainer.train(25) is None
    columns, rows = read_log(tmp_path / "log.csv")
    assert columns == ["step", "seconds", "lr", "loss", "grad_norm", "mse"]
    assert [row["step"] for row in rows] == [0, 5, 10, 15, 20, 25]
    assert [row["step"] for row in rows if row["mse"] is not None] == [0, 10, 20, 25]
    assert rows[-1]["mse"] < rows[0]["mse"]
    state, meta = load_tensors(tmp_path / "last.safetensors")
    assert {"W", "b", "optimizer.m.W", "optimizer.v.b"} <= set(state)
    assert meta["step"] == 25
    assert meta["data_order"] == {"seed": 1, "epoch": 5, "batch": 0}
    assert load_tensors(tmp_path / "best.safetensors")[1]["step"] == trainer.best["step"]


def test_evaluations_where_epochs_end_and_what_the_progress_shows(tmp_path, capsys):
    trainer = make_trainer(tmp_path, eval_every=4, eval_epochs=True, progress_metrics=("loss",), quiet=False)
    per_epoch = trainer.batches.per_epoch
    trainer.train(2 * per_epoch + 1)
    evaluated = [row["step"] for row in trainer.log.rows if row["mse"] is not None]
    assert evaluated == sorted({*range(0, 2 * per_epoch + 1, 4), per_epoch, 2 * per_epoch, 2 * per_epoch + 1})
    assert per_epoch % 4
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert not any("mse" in line for line in lines)


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


def test_the_norm_is_computed_once_a_step(tmp_path, monkeypatch):
    """Clipping by norm needs it again only after clipping by value."""
    calls, grad_norm = [], clipping.grad_norm
    for module in (clipping, trainer_module):
        monkeypatch.setattr(module, "grad_norm", lambda parameters: calls.append(0) or grad_norm(parameters))
    for clip, expected in [({"clip_norm": 0.1}, 5), ({"clip_value": 0.1}, 5),
                           ({"clip_norm": 0.1, "clip_value": 1}, 10)]:
        calls.clear()
        out = tmp_path / "-".join(clip)
        out.mkdir()
        make_trainer(out, **clip).train(5)
        assert len(calls) == expected


@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
def test_a_bad_threshold_is_named(tmp_path, name):
    for value in (-1, np.nan, "1"):
        with pytest.raises(ValueError, match=f"Trainer: {name} is .*; expected a number in"):
            make_trainer(tmp_path, **{name: value})


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
    assert load_tensors(tmp_path / "last.safetensors")[1]["step"] == 20


# ---- the schedule ----------------------------------------------------------------------------------------

def test_the_schedule_sets_the_lr_of_each_step_and_the_log_shows_it(tmp_path):
    used = []

    class Watching(Adadelta):                                    # every optimizer has an lr
        def step(self):
            used.append(self.lr)
            super().step()
    model, schedule = Linear(3, 1, rng=0), WarmupCosine(0.5, 6, 20, 0.1)
    trainer = make_trainer(tmp_path, model=model, optimizer=Watching(model.parameters()), schedule=schedule)
    trainer.train(23)
    assert used == [schedule(step) for step in range(23)]
    logged = [(row["step"], row["lr"]) for row in read_log(tmp_path / "log.csv")[1]]
    assert logged == [(0, schedule(0)), *((step, schedule(step - 1)) for step in (5, 10, 15, 20, 23))]


@pytest.mark.parametrize("value", [-0.1, np.nan, np.inf, None])
def test_a_bad_lr_of_a_schedule_is_named_with_its_step(tmp_path, value):
    trainer = make_trainer(tmp_path, schedule=lambda step: value if step == 7 else 0.1)
    with pytest.raises(ValueError, match=r"Trainer: the schedule's lr of step 7 is .*; expected a number in \[0, inf"):
        trainer.train(20)


class Killed(BaseException):
    """Stands in for SIGKILL: nothing is saved any more."""


def killed_at(when, inner):
    """forward_backward that ends the run at one step."""
    def step(*arguments):
        if step.taken == when:
            raise Killed
        step.taken += 1
        return inner(*arguments)
    step.taken = 0
    return step


def assert_resumes_exactly(tmp_path, make, step, first, last=45):
    """make(out, step) -> a trainer: killed before step `first` (it was saved before) and resumed = never stopped."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    make(tmp_path / "whole", step).train(last)
    with pytest.raises(Killed):
        make(tmp_path / "parts", killed_at(first, step)).train(last)
    resumed = make(tmp_path / "parts", step)
    assert resumed.resume_if_begun()
    assert resumed.step <= first
    resumed.train(last)
    for name in ("last", "best"):
        file = f"{name}.safetensors"
        assert tensors(tmp_path / "parts" / file) == tensors(tmp_path / "whole" / file)
    assert without_seconds(tmp_path / "parts/log.csv") == without_seconds(tmp_path / "whole/log.csv")


@pytest.mark.parametrize("first", [0, 3, 17])
def test_a_killed_run_with_a_schedule_resumes_exactly(tmp_path, first):
    def make(out, step):
        model = Linear(3, 1, rng=0)
        return make_trainer(out, step, model=model, optimizer=RAdam(model.parameters(), weight_decay=0.1),
                            schedule=WarmupCosine(0.05, 12, 40, 0.001))
    assert_resumes_exactly(tmp_path, make, forward_backward, first)


# ---- a carried state -------------------------------------------------------------------------------------

class Tracker(Layer):
    """y_t = h_t W + b of an LSTM's h_t, with the state going in and out."""

    def __init__(self):
        self.cell, self.readout = LSTM(2, 5, rng=0), Linear(5, 1, rng=1)

    def forward(self, x, state=None, rng=None):
        (hs, state), cell_cache = self.cell.forward(x, state=state)
        y, readout_cache = self.readout.forward(hs)
        return (y, state), (cell_cache, readout_cache)

    def backward(self, upstream, cache):
        dy, dstate = upstream
        cell_cache, readout_cache = cache
        return self.cell.backward((self.readout.backward(dy, readout_cache), dstate), cell_cache)


class Stream:
    """Four sequences of 96 numbers, read 6 at a time, again and again; the target is a running mean."""

    segments = 16

    def __init__(self):
        self.x = np.random.default_rng(0).standard_normal((4, 96, 2)).astype("float32")
        self.target = (self.x[:, :, :1].cumsum(axis=1) / np.arange(1, 97)[:, None]).astype("float32")

    def __getitem__(self, step):
        n = step % self.segments * 6
        return self.x[:, n:n + 6], self.target[:, n:n + 6]

    def begins(self, step):
        return step % self.segments == 0


def truncated_step(model, batch, rng, state):
    """One segment; the gradient stops at its beginning. Beside (h, c) the state has a number and a boolean array."""
    x, target = batch
    lstm_state, last, started = state
    (y, new), cache = model.forward(x, lstm_state)
    loss, loss_cache = mean_squared_error.forward(y, target)
    model.backward((mean_squared_error.backward(1.0, loss_cache), None), cache)
    return loss, (new, last + x[0, 0, :1], started | True)


def initial_state(h=5):
    return (np.zeros((4, h), "float32"), np.zeros((4, h), "float32")), np.zeros(1, "float32"), np.zeros(4, bool)


def carrying_trainer(out, step=truncated_step, batches=None, **keywords):
    model, stream = Tracker(), Stream()

    def evaluate(model, step):
        return {"mse": float(mean_squared_error.forward(model.forward(stream.x)[0][0], stream.target)[0])}
    settings = {"out": out, "best": "mse", "log_every": 5, "eval_every": 10, "quiet": True,
                "initial_state": initial_state(), **keywords}
    return Trainer(model, RAdam(model.parameters(), lr=0.05), batches or stream, step, evaluate, **settings)


CARRIED = ["carried.0.0", "carried.0.1", "carried.1", "carried.2"]


def test_a_state_is_carried_from_step_to_step(tmp_path):
    came, went = [], []

    def recording(model, batch, rng, state):
        came.append(state)
        loss, state = truncated_step(model, batch, rng, state)
        went.append(state)
        return loss, state
    trainer = carrying_trainer(tmp_path, recording)
    trainer.train(40)
    for step in range(40):
        expected = initial_state() if step in (0, 16, 32) else went[step - 1]
        assert_identical(came[step], expected)
        assert [leaf.dtype for leaf in flat(came[step])] == [leaf.dtype for leaf in flat(expected)]
    assert all(leaf.any() for leaf in flat(came[16 + 1]))        # zeros come only where a pass begins
    state, _ = load_tensors(tmp_path / "last.safetensors")
    assert [name for name in sorted(state) if name.startswith("carried")] == CARRIED
    assert_identical(tuple(state[name] for name in CARRIED), flat(went[-1]))
    assert trainer.log.rows[-1]["loss"] < trainer.log.rows[1]["loss"]


@pytest.mark.parametrize("first", [3, 16, 44])
def test_a_killed_run_with_a_carried_state_resumes_exactly(tmp_path, first):
    def make(out, step):
        return carrying_trainer(out, step, clip_norm=0.5, schedule=WarmupCosine(0.02, 12, 45))
    assert_resumes_exactly(tmp_path, make, truncated_step, first)


def test_the_order_of_a_state_in_memory_makes_no_difference_to_a_resumed_run(tmp_path):
    """A sum over memory has other last bits in another order; a resumed run finds its state in C order."""
    def step(model, batch, rng, state):
        return state.sum(), np.asfortranarray(rng.standard_normal((9, 70), "float32"))

    def make(out, step):
        return make_trainer(out, step, initial_state=np.zeros((9, 70), "float32"))
    assert_resumes_exactly(tmp_path, make, step, first=12)


def test_a_state_handed_in_is_not_written_to_by_resume(tmp_path):
    carrying_trainer(tmp_path).train(10)
    mine = initial_state()
    resumed = carrying_trainer(tmp_path, initial_state=mine)
    resumed.resume()
    assert all(leaf.any() for leaf in flat(resumed.state))
    assert_identical(mine, initial_state())


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda s: ((s[0][0][:, :4], s[0][1]), *s[1:]), r"carried.0.0 .* is float32 \(4, 4\); expected float32 \(4, 5\)"),
    (lambda s: ((s[0][0], s[0][1].astype("float64")), *s[1:]), r"carried.0.1 .* is float64 \(4, 5\); expected float32"),
    (lambda s: (*s[:2], s[2].astype("int64")), r"carried.2 .* is int64 \(4,\); expected bool \(4,\)"),
    (lambda s: s[:2], r"carried.2 .* is nothing; expected bool \(4,\)"),
    (lambda s: (s[0], None, s[2]), r"carried.1 .* is nothing; expected float32 \(1,\)"),
    (lambda s: (*s, s[2]), r"carried.3 .* is bool \(4,\); expected nothing"),
    (lambda s: (s[0][0], *s[1:]), r"carried.0.0 .* is nothing; expected float32 \(4, 5\)")])
def test_a_new_state_that_does_not_fit_is_named(tmp_path, change, sentence):
    def changing(*arguments):
        loss, state = truncated_step(*arguments)
        return loss, change(state) if trainer.step == at else state
    for at in (0, 7):
        out = tmp_path / str(at)
        out.mkdir()
        trainer = carrying_trainer(out, changing)
        with pytest.raises(ValueError, match=f"Trainer: {sentence}"):
            trainer.train(20)
        assert trainer.step == at


def test_resume_refuses_another_carried_state(tmp_path):
    carrying_trainer(tmp_path).train(10)
    for carried, sentence in [
            (initial_state(6), r"carried.0.0 is float32 \(4, 5\); this model has float32 \(4, 6\)"),
            ((*initial_state()[:2], np.zeros(4)), r"carried.2 is bool \(4,\); this model has float64 \(4,\)"),
            ((*initial_state(), np.zeros(4)), "carried.3 is missing"),
            (initial_state()[:2], "carried.2 is not known to this model"),
            (None, "carried.0.0 is not known to this model")]:
        resumed = carrying_trainer(tmp_path, initial_state=carried)
        before = resumed.model.cell.W.value.copy()
        with pytest.raises(CheckpointError, match=f"last.safetensors: {sentence}"):
            resumed.resume()
        np.testing.assert_array_equal(resumed.model.cell.W.value, before)
        assert resumed.step == 0


def test_a_carried_state_that_is_not_finite_is_never_saved(tmp_path):
    def poisoned(*arguments):
        loss, ((h, c), last, started) = truncated_step(*arguments)
        return loss, ((h, c), last + np.float32(np.inf if trainer.step == 19 else 0), started)
    trainer = carrying_trainer(tmp_path, poisoned)
    with pytest.raises(NonFiniteError, match=r"step 20: carried.1 is not finite; the last good checkpoint is kept"):
        trainer.train(30)
    assert load_tensors(tmp_path / "last.safetensors")[1]["step"] == 10


# ---- resume ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("first", [10, 13])
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
    from tasks import adding, frame
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
    sys.exit(frame.run(adding.TASK, argv))
"""


def run_adding(*argv):
    """The task, in this process: nothing kills it."""
    assert frame.run(adding.TASK, [*map(str, argv), "--quiet"]) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that is never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run_adding(*SMALL, "--out", out)
    return out


@pytest.mark.slow
@pytest.mark.usefixtures("quick_figures")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
@pytest.mark.parametrize(("where", "when"), [
    ("step", 26), ("step", 46), ("last.safetensors", 1), ("last.safetensors", 3), ("best.safetensors", 2)])
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, whole, where, when):
    """SIGKILL at a step, or in the middle of writing a checkpoint."""
    out = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(KILLER), where, str(when), *SMALL,
                             "--out", str(out), "--quiet"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run_adding("--resume", out)
    assert tensors(out / "last.safetensors") == tensors(whole / "last.safetensors")
    assert tensors(out / "best.safetensors") == tensors(whole / "best.safetensors")
    assert without_seconds(out / "log.csv") == without_seconds(whole / "log.csv")


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


def test_buffers_are_resumed(tmp_path):
    """uRNN's permutation is not learned: a model of another seed takes the checkpoint's."""
    x, target = adding_problem(40, 6, 0)

    def trainer(seed):
        model = SequenceRegressor(URNN(2, 6, rng=seed), 12, rng=0)
        return Trainer(model, Adam(model.parameters()), Batches((x, target), 8, seed=0), adding.forward_backward,
                       lambda model, step: {"mse": 0.0}, out=tmp_path, best="mse", quiet=True)
    first, other = trainer(0), trainer(1)
    first.train(2)
    other.resume()
    np.testing.assert_array_equal(other.model.cell.permutation, first.model.cell.permutation)


def test_resume_refuses_another_seed(tmp_path):
    make_trainer(tmp_path, seed=1).train(5)
    with pytest.raises(CheckpointError, match="random_numbers' seed is 1; this run has 2"):
        make_trainer(tmp_path, seed=2).resume()


def test_best_is_the_smallest_and_is_remembered_by_a_resumed_run(tmp_path):
    values = {0: 9.0, 10: 3.0, 20: 5.0, 30: 4.0, 40: 2.0}

    def trainer():
        made = make_trainer(tmp_path)
        made.evaluate = lambda model, step: {"mse": values[made.step]}
        return made
    first = trainer()
    first.train(20)
    assert first.best == {"value": 3.0, "step": 10}
    second = trainer()
    second.resume()
    assert second.seconds >= first.seconds
    second.train(30)
    assert load_tensors(tmp_path / "best.safetensors")[1]["step"] == 10
    second.train(40)
    assert load_tensors(tmp_path / "best.safetensors")[1]["step"] == 40


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
    state, meta = load_tensors(tmp_path / "last.safetensors")
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
    assert load_tensors(tmp_path / "last.safetensors")[1]["step"] == 10


@pytest.mark.parametrize("at", [0, 20])
def test_an_evaluation_that_is_not_finite_stops_the_run(tmp_path, at):
    trainer = make_trainer(tmp_path)
    trainer.evaluate = lambda model, step: {"mse": np.nan if trainer.step == at else 1.0}
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
    trainer.evaluate = lambda model, step: {"mse": 1.0}
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

    def evaluate(model, step):
        if trainer.step == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return inner(model, step)
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
    assert load_tensors(out / "last.safetensors")[1]["step"] >= 30
    assert (out / "figure4.png").stat().st_size > 1000
