"""The training loop that serves every task: log, checkpoints, exact resume, clean ends.

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
from minigrad.tensors import save_tensors
from minigrad.training import run_state
from minigrad.training.progress import Progress
from minigrad.training.runlog import RunLog
from minigrad.tree import tree_leaves, tree_map

LOGGED = run_state.LOGGED


class NonFiniteError(ArithmeticError):
    """NaN or Inf appeared in training."""


class Interrupted(Exception):
    """The run was asked to stop (Ctrl-C or SIGTERM) and has saved its state."""


class Trainer:
    """Trains a model and writes log.csv, last.safetensors and best.safetensors in a folder.

    model               a Layer
    optimizer           over its parameters
    batches             batches[step] -> tuple of arrays, for example minigrad.data.Batches
    forward_backward    f(model, batch, rng) -> loss, a 0-d array; runs forward and backward
    evaluate            f(model, step) -> {name: float}, the same names each time
    out                 the folder; must exist
    best                the metric (a name of `evaluate`'s) minimised to choose `best`, or maximised with `maximize`
    config              JSON-able settings, kept in each checkpoint; a resumed run must have the same, but for
                        run_state.FREE_SETTINGS
    clip_norm, clip_value   clipping by global norm, by value (first the value, then the norm); None: not
    seed, device        of the steps' random numbers, and where the batches go
    eval_epochs         evaluate at the end of each epoch too, wherever that falls; `batches` must have position(step)
    progress_metrics    the names of `evaluate`'s that the progress line shows; None: `best`
    schedule            schedule(step) -> the lr of the step about to be taken, counting from 0: a function of the step
                        alone (minigrad.schedules); None: the optimizer's lr stays
    initial_state       for truncated backpropagation through time: a tree of arrays on the model's device, the state
                        given to the first step (usually zeros). forward_backward is then f(model, batch, rng, state) ->
                        (loss, new_state), and the next step is given new_state, which must have the names, shapes and
                        dtypes of `initial_state`; or all zeros (False), if `batches` has a method begins(step) and that
                        says True. The state is part of each checkpoint

    Raises ValueError or TypeError for a bad setting; `train` does for a new state that does not fit.
    """

    # ---- one step ----------------------------------------------------------------------------------------

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
        self.step, self.state = self.step + 1, state
        self.tally[0] += loss
        self.tally[1] += 1
        self.tally[2] = norm
        self.seconds = time.monotonic() - self._began

    def _forward_backward(self, batch, rng):
        """(loss, the state for the next step)."""
        if self.state is None:
            return self.forward_backward(self.model, batch, rng), None
        state = self.state
        if hasattr(self.batches, "begins") and self.batches.begins(self.step):
            state = tree_map(lambda array: array_module(array).zeros_like(array), state)
        result = self.forward_backward(self.model, batch, rng, state)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"Trainer: forward_backward returned a {type(result).__name__}; expected a pair (loss, new "
                            "state), since there is an initial_state")
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

    # ---- the run -----------------------------------------------------------------------------------------

    def __init__(self, model, optimizer, batches, forward_backward, evaluate, *, out, best, config=None,
                 clip_norm=None, clip_value=None, seed=0, device="cpu", log_every=50, eval_every=200, quiet=False,
                 schedule=None, initial_state=None, maximize=False, eval_epochs=False, progress_metrics=None):
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
        self.maximize, self.eval_epochs, self.progress_metrics = maximize, eval_epochs, progress_metrics or (best,)
        self.log = RunLog(self.out / "log.csv")
        self.named = dict(model.named_parameters())
        self.step, self.seconds = 0, 0.0
        self.best = {"value": None, "step": None}
        first = next(iter(self.named.values())).value
        self.tally = array_module(first).zeros((3,), "float64")   # since the last row: losses, steps; newest norm
        array_module(parameters=first, **dict(tree_leaves(initial_state, "initial_state")))
        self.state = tree_map(lambda array: array.copy(), initial_state)     # resume fills these arrays
        self.progress = None
        self._interrupted = False

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
            with _StopSignals(self._on_signal), np.errstate(all="ignore"):   # non-finite values are looked for below
                while self._continues(steps, reason):
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
            raise Interrupted(f"stopped at step {self.step} of {steps}; the state is saved in {self.out}: continue "
                              f"with --resume {self.out}")
        return reason

    def _continues(self, steps, reason):
        """Until the last step has been taken and evaluated (a run can be stopped between the two)."""
        if reason or self._interrupted:
            return False
        return self.step < steps or self.log.rows[-1]["step"] < self.step

    # ---- what is written ---------------------------------------------------------------------------------

    def _first_row(self):
        figures = self.evaluate(self.model, self.step)
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
        figures = self.evaluate(self.model, self.step) if evaluates else {}
        self.log.append({**row, **figures})
        chosen = [(name, value) for name, value in figures.items() if name in self.progress_metrics]
        progress.update(self.step, {**dict(chosen), "loss": row["loss"], "|g|": norm}, line=evaluates)
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
            save_tensors(self.out / "best.safetensors", *run_state.contents(self))
        save_tensors(self.out / "last.safetensors", *run_state.contents(self))

    def _improves(self, value):
        best = self.best["value"]
        return best is None or (value > best if self.maximize else value < best)

    def resume(self):
        """Continue from last.safetensors of the folder: `run_state.resume`."""
        run_state.resume(self)

    def resume_if_begun(self):
        """`resume` where there is a checkpoint: `run_state.resume_if_begun`."""
        return run_state.resume_if_begun(self)

    # ---- what ends a run ---------------------------------------------------------------------------------

    def _require_fitting(self, state):
        """A new state must have the names, shapes and dtypes of the initial one. No values are read."""
        old, new = dict(tree_leaves(self.state, "carried")), dict(tree_leaves(state, "carried"))
        array_module(parameters=self.tally, **new)
        for name in [*old, *new]:
            expected, came = (f"{tree[name].dtype} {tree[name].shape}" if name in tree else "nothing"
                              for tree in (old, new))
            if came != expected:
                raise ValueError(f"Trainer: {name} of the state that forward_backward returned is {came}; "
                                 f"expected {expected}")

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
        for name, array in run_state.tensors(self).items():
            if not array_module(array).isfinite(array).all():
                raise NonFiniteError(f"step {self.step}: {name} is not finite; {self._kept()}")

    def _kept(self):
        last = self.out / "last.safetensors"
        return f"the last good checkpoint is kept in {last}" if last.exists() else "no checkpoint had been written yet"

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
