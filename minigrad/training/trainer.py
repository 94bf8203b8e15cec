"""The training loop that serves every task: run folder, log, checkpoints, exact resume, clean ends.

A run is a function of its configuration: the examples of a step and its random numbers depend on (seed, step) alone,
so a run that is killed anywhere and resumed ends in the same numbers, bit for bit, as one never stopped.
"""

import contextlib
import math
import signal
import threading
import time
from pathlib import Path

import numpy as np

from minigrad.backend import array_module, asnumpy, on_host, step_generator, to_device
from minigrad.check import check_count, check_number
from minigrad.clipping import clip_grad_norm, clip_grad_value, grad_norm, shrink_gradients
from minigrad.tensors import CheckpointError, fill_exactly, load_tensors, save_tensors
from minigrad.training.progress import Progress
from minigrad.training.runlog import RunLog
from minigrad.tree import tree_leaves, tree_map

# What a resumed run may change without becoming another run.
FREE_SETTINGS = ("steps", "epochs", "target", "device", "threads", "quiet", "out", "resume", "data", "sts", "jobs")

LOGGED = ("step", "seconds", "lr", "loss", "grad_norm")             # columns of log.csv; the evaluation's follow


class NonFiniteError(ArithmeticError):
    """NaN or Inf appeared in training."""


class Interrupted(Exception):
    """The run was asked to stop (Ctrl-C or SIGTERM) and has saved its state."""


class Trainer:
    """Trains a model and keeps its run folder: log.csv, last.safetensors, best.safetensors.

    model               a Layer
    optimizer           over its parameters
    batches             batches[step] -> tuple of arrays, for example minigrad.data.Batches
    forward_backward    f(model, batch, rng) -> loss, a 0-d array; runs forward and backward
    evaluate            f(model) -> {name: float}, the same names each time
    out                 the run folder; must exist
    best                the name in `evaluate`'s result whose smallest value decides which checkpoint is `best`, its
                        largest with `largest`
    config              JSON-able settings, kept in each checkpoint; a resumed run must have the same
    clip_norm, clip_value   clipping by global norm, by value (first the value, then the norm); None: not
    seed, device        of the steps' random numbers, and where the batches go
    eval_epochs         evaluate at the end of each epoch too, wherever that falls; `batches` must have position(step)
    shown               the names in `evaluate`'s result that the progress shows; None: `best`
    schedule            schedule(step) -> the lr of the step about to be taken, counting from 0: a function of the step
                        alone (minigrad.schedules); None: the optimizer's lr stays
    carried             for truncated backpropagation through time: a tree of arrays on the model's device, the state
                        given to the first step (usually zeros). forward_backward is then f(model, batch, rng, state) ->
                        (loss, new_state), and the next step is given new_state, which must have the names, shapes and
                        dtypes of `carried`; or all zeros (False), if `batches` has a method begins(step) and that says
                        True. The state is part of each checkpoint

    Raises ValueError or TypeError for a bad setting; `train` does for a new state that does not fit.
    """

    def __init__(self, model, optimizer, batches, forward_backward, evaluate, *, out, best, config=None,
                 clip_norm=None, clip_value=None, seed=0, device="cpu", log_every=50, eval_every=200, quiet=False,
                 schedule=None, carried=None, largest=False, eval_epochs=False, shown=None):
        check_count("Trainer", "log_every", log_every)
        check_count("Trainer", "eval_every", eval_every)
        for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if value is not None:
                check_number("Trainer", name, value, 0)
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.forward_backward, self.evaluate = forward_backward, evaluate
        self.out, self.best_name, self.config = Path(out), best, config or {}
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.seed, self.device, self.quiet = seed, device, quiet
        self.log_every, self.eval_every, self.schedule = log_every, eval_every, schedule
        self.largest, self.eval_epochs, self.shown = largest, eval_epochs, shown or (best,)
        self.log = RunLog(self.out / "log.csv")
        self.named = dict(model.named_parameters())
        self.step, self.seconds = 0, 0.0
        self.best = {"value": None, "step": None}
        first = next(iter(self.named.values())).value
        self.tally = array_module(first).zeros((3,), "float64")   # since the last row: losses, steps; newest norm
        array_module(parameters=first, **dict(tree_leaves(carried, "carried")))
        self.carried = tree_map(lambda array: array.copy(), carried)         # resume fills these arrays
        self.progress = None
        self._interrupted = False

    # ---- the loop ----------------------------------------------------------------------------------------

    def train(self, steps, stop=None):
        """Train up to step `steps`; `stop(log)` is asked after each evaluation and may return a reason to end.

        Returns that reason, or None. Raises NonFiniteError, naming the step and the tensor, or what `validate`
        says (the last good checkpoint stays), and Interrupted after Ctrl-C or SIGTERM, the state being saved.
        """
        if not self.log.columns:
            self._first_row()
            self.save()
        self.progress = progress = Progress(self.step, steps, self.quiet)
        self._began = time.monotonic() - self.seconds
        reason = stop(self.log) if stop else None
        saved = self.step
        try:
            with self._signals(), np.errstate(all="ignore"):                 # non-finite values are looked for below
                while self._goes_on(steps, reason):
                    if self.step < steps:
                        self._one_step()
                    if self._log_row(progress, last=self.step >= steps):
                        self.save()
                        saved = self.step
                        reason = stop(self.log) if stop else None
            if saved != self.step:
                self.save()
        finally:
            progress.close()
        if self._interrupted:
            raise Interrupted(f"stopped at step {self.step} of {steps}; the state is saved in {self.out}: go on with "
                              f"--resume {self.out}")
        return reason

    def _goes_on(self, steps, reason):
        """Until the last step has been taken and evaluated (a run can be stopped between the two)."""
        if reason or self._interrupted:
            return False
        return self.step < steps or self.log.rows[-1]["step"] < self.step

    def _one_step(self):
        batch = to_device(self.batches[self.step], self.device)
        rng = step_generator(self.seed, self.step, self.device)
        self.optimizer.zero_grad()
        with self._naming_the_step(self.step + 1):
            loss, state = self._forward_backward(batch, rng)
        norm = grad_norm(self.named.values())
        if on_host(norm) or (self.step + 1) % self.log_every == 0:           # on a GPU looking means waiting
            self._require_finite(loss, norm)                                 # before clipping, which would hide Inf
        if self.clip_value is not None:
            clip_grad_value(self.named.values(), self.clip_value)
            if self.clip_norm is not None:
                clip_grad_norm(self.named.values(), self.clip_norm)
        elif self.clip_norm is not None:
            shrink_gradients(self.named.values(), self.clip_norm, norm)      # the norm is known already
        self.optimizer.lr = self._lr(self.step)
        self.optimizer.step()
        self.step, self.carried = self.step + 1, state
        self.tally[0] += loss
        self.tally[1] += 1
        self.tally[2] = norm
        self.seconds = time.monotonic() - self._began

    def _forward_backward(self, batch, rng):
        """(loss, the state for the next step)."""
        if self.carried is None:
            return self.forward_backward(self.model, batch, rng), None
        state = self.carried
        if hasattr(self.batches, "begins") and self.batches.begins(self.step):
            state = tree_map(lambda array: array_module(array).zeros_like(array), state)
        result = self.forward_backward(self.model, batch, rng, state)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"Trainer: forward_backward returned a {type(result).__name__}; expected a pair (loss, new "
                            "state), since a state is carried")
        loss, state = result
        self._require_fitting(state)
        # A resumed run finds its arrays in C order, and the order can change the last bits of a product.
        return loss, tree_map(lambda array: array_module(array).asarray(array, order="C"), state)

    def _lr(self, step):
        """The learning rate of a step, counting from 0."""
        if self.schedule is None:
            return self.optimizer.lr
        lr = self.schedule(step)
        check_number("Trainer", f"the schedule's lr of step {step}", lr, 0, open_high=True)
        return float(lr)

    @contextlib.contextmanager
    def _naming_the_step(self, step):
        """A model's `validate` knows neither the step nor what is kept of the run."""
        try:
            yield
        except ArithmeticError as error:
            raise NonFiniteError(f"step {step}: {error}; {self._kept()}") from error

    # ---- what is written ---------------------------------------------------------------------------------

    def _first_row(self):
        figures = self.evaluate(self.model)
        if self.best_name not in figures:
            raise ValueError(f"Trainer: best is {self.best_name!r}; expected one of evaluate's, {', '.join(figures)}")
        self.log.start([*LOGGED, *figures])
        self.log.append({"step": 0, "seconds": 0.0, "lr": self._lr(0), **figures})

    def _log_row(self, progress, last):
        """A row at log and evaluation intervals and at the end; True when it holds an evaluation."""
        evaluates = last or self.step % self.eval_every == 0 or (
            self.eval_epochs and self.batches.position(self.step)[1] == 0)
        if not evaluates and self.step % self.log_every:
            progress.update(self.step)
            return False
        total, count, norm = asnumpy(self.tally).tolist()
        self.tally[...] = 0
        with self._naming_the_step(self.step):
            self.model.validate()
        row = {"step": self.step, "seconds": round(self.seconds, 3), "lr": self._lr(self.step - 1),
               "loss": total / max(count, 1), "grad_norm": norm}
        figures = self.evaluate(self.model) if evaluates else {}
        self.log.append({**row, **figures})
        shown = [(name, value) for name, value in figures.items() if name in self.shown]
        progress.update(self.step, {**dict(shown), "loss": row["loss"], "|g|": norm}, line=evaluates)
        return evaluates

    def save(self):
        """Write `best` if the newest evaluation is the best so far, then `last`; nothing if a value is not finite."""
        self._require_finite_parameters()
        evaluated = self.log.rows[-1]
        value = evaluated.get(self.best_name) if evaluated["step"] == self.step else None
        if value is not None and not math.isfinite(value):
            raise NonFiniteError(f"step {self.step}: {self.best_name} is {value}; {self._kept()}")
        if value is not None and self._improves(value):
            self.best = {"value": value, "step": self.step}
            save_tensors(self.out / "best.safetensors", *self._state())
        save_tensors(self.out / "last.safetensors", *self._state())

    def _improves(self, value):
        best = self.best["value"]
        return best is None or (value > best if self.largest else value < best)

    def _tensors(self):
        """{name: array}, the arrays themselves, of all that a resumed run needs."""
        names = {id(parameter): name for name, parameter in self.named.items()}
        tensors = self.model.named_arrays()
        for slot, arrays in self.optimizer.accumulators.items():
            for parameter, array in zip(self.optimizer.parameters, arrays):
                tensors[f"optimizer.{slot}.{names[id(parameter)]}"] = array
        return {**tensors, **dict(tree_leaves(self.carried, "carried")), "trainer.tally": self.tally}

    def _state(self):
        epoch, batch = self.batches.position(self.step) if hasattr(self.batches, "position") else (None, None)
        logged = self.log.rows[-1]["step"] if self.log.rows else None
        meta = {"step": self.step, "logged": logged, "seconds": self.seconds, "best": self.best, "config": self.config,
                "optimizer": {"name": type(self.optimizer).__name__, "steps": self.optimizer.steps},
                "random_numbers": {"seed": self.seed, "step": self.step},
                "data_order": {"seed": getattr(self.batches, "seed", None), "epoch": epoch, "batch": batch}}
        return self._tensors(), meta

    def resume(self):
        """Go on from last.safetensors of the run folder.

        Raises CheckpointError, naming the key, when it is not of this model, optimizer, seed and configuration, and
        when the log does not reach the checkpoint; nothing is changed then.
        """
        path = self.out / "last.safetensors"
        tensors, meta = load_tensors(path)
        try:
            step, seconds, best, taken = self._fitting(meta, path)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"checkpoint {path}: {error} is missing or wrong; it is no training run's") from error
        log = RunLog(self.log.path)
        log.read(step)
        reached = log.rows[-1]["step"] if log.rows else None
        if reached != meta.get("logged") or {*LOGGED, self.best_name} - set(log.columns):
            raise CheckpointError(f"log {log.path}: its rows end at step {reached}, its columns are "
                                  f"{', '.join(log.columns)}; the checkpoint was written at row {meta.get('logged')}")
        fill_exactly(self._tensors(), tensors, path)
        log.write()
        self.log, self.step, self.seconds, self.best, self.optimizer.steps = log, step, seconds, best, taken

    def resume_if_begun(self):
        """`resume` where the folder holds a checkpoint; False where the run was killed before its first.

        Raises CheckpointError when the checkpoint is missing although the log goes on.
        """
        if (self.out / "last.safetensors").exists():
            self.resume()
            return True
        log, last = RunLog(self.log.path), self.out / "last.safetensors"
        if log.path.exists():
            log.read(math.inf)
        if any(row["step"] for row in log.rows):
            raise CheckpointError(f"checkpoint {last}: missing, but log.csv goes beyond step 0")
        return False

    def _fitting(self, meta, path):
        """(step, seconds, best, the optimizer's steps) of a checkpoint that is this run's."""
        ours = self._state()[1]
        self._require_same("optimizer", meta["optimizer"]["name"], ours["optimizer"]["name"], path)
        for key in sorted(set(meta["config"]) | set(self.config)):
            if key not in FREE_SETTINGS:
                self._require_same(key, meta["config"].get(key), self.config.get(key), path)
        for key in ("random_numbers", "data_order"):
            self._require_same(f"{key}' seed", meta[key]["seed"], ours[key]["seed"], path)
        step, taken = meta["step"], meta["optimizer"]["steps"]
        for name, value in (("step", step), ("optimizer.steps", taken)):
            if type(value) is not int or value < 0:
                raise CheckpointError(f"checkpoint {path}: {name} is {value!r}; expected a whole number")
        best = {"value": meta["best"]["value"], "step": meta["best"]["step"]}
        return step, float(meta["seconds"]), best, taken

    @staticmethod
    def _require_same(key, came, expected, path):
        if came != expected:
            raise CheckpointError(f"checkpoint {path}: {key} is {came!r}; this run has {expected!r}")

    def _require_fitting(self, state):
        """A new state must be as the carried one is: names, shapes, dtypes. Only these are looked at, no values."""
        old, new = dict(tree_leaves(self.carried, "carried")), dict(tree_leaves(state, "carried"))
        array_module(parameters=self.tally, **new)
        for name in [*old, *new]:
            expected, came = (f"{tree[name].dtype} {tree[name].shape}" if name in tree else "nothing"
                              for tree in (old, new))
            if came != expected:
                raise ValueError(f"Trainer: {name} of the state that forward_backward returned is {came}; "
                                 f"expected {expected}")

    # ---- what ends a run ---------------------------------------------------------------------------------

    def _require_finite(self, loss, norm):
        if math.isfinite(float(loss)) and math.isfinite(float(norm)):
            return
        for name, parameter in self.named.items():
            if not array_module(parameter.grad).isfinite(parameter.grad).all():
                at = f"the gradient of {name}"
                break
        else:
            at = "the loss"
        raise NonFiniteError(f"step {self.step + 1}: {at} is not finite (loss {float(loss):.4g}, gradient norm "
                             f"{float(norm):.4g}); {self._kept()}")

    def _require_finite_parameters(self):
        for name, array in self._tensors().items():
            if not array_module(array).isfinite(array).all():
                raise NonFiniteError(f"step {self.step}: {name} is not finite; {self._kept()}")

    def _kept(self):
        last = self.out / "last.safetensors"
        return f"the last good checkpoint is kept in {last}" if last.exists() else "no checkpoint had been written yet"

    def _signals(self):
        return _StopSignals(self._on_signal)

    def _on_signal(self, number, frame):
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True


class _StopSignals:
    """Within it SIGINT and SIGTERM call `handler` (in the main thread; elsewhere signals cannot be handled)."""

    def __init__(self, handler):
        self.handler, self.before = handler, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.handler)

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)
