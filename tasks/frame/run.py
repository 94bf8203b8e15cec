"""`run(TASK)`: from the command line of a task to its run folder, and from what ends a run to an exit status.

Exit status: 0 done; 1 the run stopped on NaN, Inf or an undefined formula; 2 bad input, or a file or disk that fails;
130 interrupted (saved).
"""

import functools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from threadpoolctl import threadpool_limits

from minigrad import kernels
from minigrad.backend import DeviceError, gpu_problem, require_working
from minigrad.data import DataError, data_folder
from minigrad.kernels import KernelError
from minigrad.tensors import CheckpointError
from minigrad.training import Interrupted, RunLog, Trainer
from tasks.frame.figures import Curve, draw_comparison, draw_curve
from tasks.frame.flags import (
    OneLineParser,
    clip_settings,
    make_optimizer,
    schedule_of,
    settings_of,
    steps_of,
    variants_of,
    whole,
)
from tasks.frame.run_folder import UsageError, note_resumed, open_run_folder, read_config, write_config, write_json

# ---- what a task says of itself --------------------------------------------------------------------------

class Run(NamedTuple):
    """One model's training, as a task's functions are given it."""

    settings: dict              # of this model: with its variant's name, without `compare`
    data: Any                   # what the task's `data` returned
    trainer: Trainer            # its model, log, step, best, seconds, out
    steps: int                  # the last step
    device: str


class Command(NamedTuple):
    """Something else that a task can do: `python tasks/NAME.py COMMAND ...`."""

    help: str                   # the first line says what it does
    flags: Callable             # flags(parser)
    run: Callable               # run(settings), the flags as a dict


class Shown(NamedTuple):
    """How the runs of a task that are kept in docs/results are shown; `kept` is one's JSON (see results.py)."""

    columns: dict | None = None         # {header: cell(kept) -> str} of the table; None: the curve's metric
    what: bool = True                   # with a column that says what differs from the defaults
    note: str = ""                      # below the table
    in_label: tuple = ()                # settings that the variant's label has already


@dataclass(frozen=True, kw_only=True)
class Task:
    """An experiment: `sys.exit(run(TASK))` is its command line. Only the first eight entries are required.

    A `variant` is one of the models that a task compares; settings[task.variant] is its name.
    """

    name: str                   # of its script, tasks/NAME.py, and of its folder runs/NAME
    description: str            # its --help: what it is, how to run it, what to expect
    defaults: dict              # {setting: value}: batch_size, optimizer, lr, eval_every, steps or epochs; its flags'
    model: Callable             # model(settings, data) -> a Layer, on the CPU
    batches: Callable           # batches(settings, data) -> what Trainer takes
    step: Callable              # step(model, batch, rng) -> loss: one forward and backward
    evaluation: Callable        # evaluation(settings, data, device) -> evaluate(model, step) -> {name: float}
    curve: Curve | Callable     # the evaluation's number that chooses `best`, and its figure; or curve(data)
    data: Callable = lambda settings: None                       # data(settings): read or made once
    flags: Callable = lambda group: None                         # flags(group): its own, as argparse has them
    check: Callable = lambda settings, given: None               # raises UsageError for settings that do not fit
    reads: str | None = None                                     # what --data is, for a task that reads some
    found: Callable = lambda data: None                          # the path that --resume is to read, if not --data's
    paper: dict | None = None                                    # {setting: value} that --paper changes
    variant: str = "model"                                       # the flag that chooses a variant
    variants: tuple = ()                                         # the names it takes; --compare takes several
    flags_of: dict = field(default_factory=dict)                 # {setting: the variants that it has a meaning for}
    label: Callable | None = None                                # label(settings) -> a variant's name in figures
    plan: Callable | None = None                                 # plan(settings, data) -> [settings] to train
    describe: Callable = lambda settings, data: ""               # lines about the data, printed at the beginning
    optimizer: Callable = lambda settings, model: make_optimizer(settings, model.parameters())
    trainer: Callable = lambda settings, data, model: {}         # further keywords of Trainer
    started: Callable = lambda settings, data, out: None         # once the folder is there: keep what belongs to it
    resumed: Callable = lambda run: None                         # raises UsageError where a resumed run cannot continue
    stop: Callable = lambda run: None                            # after an evaluation: a reason to end, or None
    result: Callable = lambda run: {}                            # its own part of result.json
    summary: Callable | None = None                              # summary(run, result) -> what is printed at the end
    figures: Callable = lambda run: None                         # figures besides the curve's
    compare: Callable = lambda settings, runs, out: None         # runs: [(settings, log)]; further figures
    shown: Shown = field(default_factory=Shown)                  # how kept runs are shown
    out_of_memory: Callable = lambda settings, data: ""          # what to do then, added to the error
    commands: dict = field(default_factory=dict)                 # {name: Command}

    def curve_of(self, data):
        """The Curve, where it depends on the data."""
        return self.curve if isinstance(self.curve, Curve) else self.curve(data)

    def label_of(self, settings):
        """What a variant is called in figures and lines."""
        return self.label(settings) if self.label else settings.get(self.variant, self.name)


# ---- the command line ------------------------------------------------------------------------------------

def run(task, argv=None):
    """A task's command line: runs it and returns the exit status."""
    return exit_status(functools.partial(main, task), argv)


def main(task, argv):
    """Train what the command line asks for, or do one of the task's other commands."""
    if argv and argv[0] in task.commands:
        other_command(task, argv)
        return
    settings = settings_of(task, argv)
    with blas_threads(settings["threads"]):          # before data and weights are made with them
        device_of(settings)                                      # raises before anything slow is done, or written
        try:
            data = task.data(settings)
            plan, steps = planned(task, settings, data)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if task.reads:                                           # so that --resume finds it from any folder
            settings["data"] = str(Path(task.found(data) or settings["data"] or data_folder()).absolute())
        if about := task.describe(settings, data):
            say(settings, about)
        out, hold = open_run_folder(task.name, settings)
        say(settings, f"writing to {out}")
        task.started(settings, data, out)
        try:
            if settings.get("compare") is None:
                train(task, plan[0], data, out, steps)
            else:
                compare(task, settings, plan, data, out, steps)
        except MemoryError as error:
            raise MemoryError(f"{error}{task.out_of_memory(settings, data)}") from error
        del hold
    say(settings, f"figures: {', '.join(str(path) for path in sorted(out.rglob('*.png')))}")


def planned(task, settings, data):
    """([settings of each model to train], steps). Raises ValueError where something does not fit."""
    if task.plan:
        plan = task.plan(settings, data)
    else:
        plan = [{**settings, **({task.variant: name, "compare": None} if task.variants else {})}
                for name in variants_of(task, settings)]
    per_epoch = task.batches(settings, data).per_epoch
    steps = steps_of(settings, per_epoch)
    if settings["resume"] and "schedule" in settings:
        require_same_schedule(settings, steps, steps_of(read_config(settings["resume"]), per_epoch))
    for own in plan:
        optimizer = task.optimizer(own, task.model(own, data))
        schedule_of(own, steps, optimizer.lr)
    return plan, steps


def require_same_schedule(settings, steps, before):
    """Raise UsageError where a resumed run's learning rates would become others by another number of steps."""
    if steps != before and not (settings["schedule"] == "constant" and settings["warmup"] is not None):
        raise UsageError(f"--steps: {steps:,} are asked for, but the run in {settings['resume']} is one of {before:,}, "
                         "which its learning rate depends on; expected the same number (or --schedule constant and "
                         "--warmup from the beginning)")


def parser_of_command(task, name):
    """The parser of `python tasks/TASK.py NAME ...`."""
    parser = OneLineParser(f"python tasks/{task.name}.py {name}", task.commands[name].help)
    task.commands[name].flags(parser)
    parser.add_argument("--device", choices=["cpu", "gpu", "auto"], default="cpu", help="default cpu")
    parser.add_argument("--threads", type=whole(1), default=1, help="BLAS threads (default 1)")
    parser.add_argument("--quiet", action="store_true", help="print results and errors only")
    return parser


def other_command(task, argv):
    name, *arguments = argv
    settings = vars(parser_of_command(task, name).parse_args(arguments))
    with blas_threads(settings["threads"]):
        try:
            task.commands[name].run(settings)
        except BrokenPipeError:                                  # the reader has enough: `| head`
            nobody_reads()


# ---- training --------------------------------------------------------------------------------------------

def train(task, settings, data, out, steps):
    """Train one model in its folder, resumed if asked for; writes result.json and the figures. Returns its Run."""
    device, curve = device_of(settings), task.curve_of(data)
    model = task.model(settings, data).to_device(device)
    optimizer, own = task.optimizer(settings, model), task.trainer(settings, data, model)
    trainer = Trainer(
        model, optimizer, task.batches(settings, data), task.step, task.evaluation(settings, data, device), out=out,
        config={**settings, **own.pop("config", {})}, seed=settings["seed"], device=device, quiet=settings["quiet"],
        eval_every=settings["eval_every"], schedule=schedule_of(settings, steps, optimizer.lr),
        best=curve.best or curve.metric, maximize=curve.maximize, **own, **clip_settings(settings))
    run = Run(settings, data, trainer, steps, device)
    resume(task, run)
    say(settings, f"{task.label_of(settings)}: {model.count_parameters():,} parameters, {steps:,} steps")
    try:
        reason = trainer.train(steps, lambda log: task.stop(run))
    finally:
        if trainer.log.rows:
            draw_curve(task, run)
            task.figures(run)
    report(task, run, reason)
    return run


def resume(task, run):
    """With --resume: continue where the folder's run stopped, say so, and note it in config.json.

    Raises UsageError for fewer steps than have been taken, CheckpointError as Trainer.resume does.
    """
    settings, trainer = run.settings, run.trainer
    if not settings["resume"] or not trainer.resume_if_begun():
        return
    if run.steps < trainer.step:
        raise UsageError(f"--steps: {run.steps} are asked for, but the run in {trainer.out} is at {trainer.step}")
    for folder in {trainer.out, Path(settings["resume"])}:               # of a comparison, the whole's too
        note_resumed(folder, settings)
    task.resumed(run)
    say(settings, f"{task.label_of(settings)}: continues from step {trainer.step}")


def report(task, run, reason):
    """Keep what came out in result.json, and print it."""
    trainer, curve = run.trainer, task.curve_of(run.data)
    result = {**({task.variant: run.settings[task.variant]} if task.variants else {}), "steps": trainer.step,
              curve.metric: trainer.log.column(curve.best or curve.metric)[-1][1], "best": trainer.best,
              "parameters": trainer.model.count_parameters(), "seconds": round(trainer.seconds, 1), **task.result(run)}
    write_json(trainer.out / "result.json", result)
    if task.summary:
        text = task.summary(run, result)
    else:
        text = (f"{task.label_of(run.settings)}: {curve.y_label} {result[curve.metric]:.4g} at step {trainer.step:,}; "
                f"best {trainer.best['value']:.4g} at {trainer.best['step']:,}; {trainer.seconds:.0f} s")
    tell(text + (f"; stopped: {reason}" if reason else ""))


def compare(task, whole_settings, plan, data, out, steps):
    """Train the models one after another, each in its own folder, then draw them together.

    One that diverges does not keep the others from being trained; at the end it raises ArithmeticError.
    """
    runs, stopped = [], []
    for settings in plan:
        folder = out / settings[task.variant]
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():
            write_config(folder, settings)
        try:
            train(task, settings, data, folder, steps)
        except ArithmeticError as error:
            print(f"{folder.name} stopped: {error}", file=sys.stderr, flush=True)
            stopped.append(folder.name)
        log = RunLog(folder / "log.csv")
        log.read(math.inf)
        runs.append((settings, log))
    draw_comparison(task, whole_settings, runs, data, out)
    task.compare(whole_settings, runs, out)
    if stopped:
        raise ArithmeticError(f"{', '.join(stopped)} diverged (above); the others were trained to their end")


# ---- how it ends -----------------------------------------------------------------------------------------

def exit_status(main, argv=None):
    """Call `main(argv)` and turn what ends it into one line and an exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):                       # a name that a terminal cannot show must not end a run
            stream.reconfigure(errors="backslashreplace")
    try:
        main(sys.argv[1:] if argv is None else argv)
    except (UsageError, CheckpointError, DataError, DeviceError, KernelError) as error:
        return _end(f"error: {error}", 2)
    except ArithmeticError as error:
        return _end(f"stopped: {error}", 1)
    except Interrupted as error:
        return _end(str(error), 130)
    except MemoryError as error:
        return _end(f"error: not enough memory for these sizes ({error})", 2)
    except OSError as error:                                     # a full disk, a folder that went away
        return _end(f"error: {error}", 2)
    except KeyboardInterrupt:
        return _end("interrupted outside of training; what had been saved is kept", 130)
    return 0


def _end(line, status):
    print(line, file=sys.stderr)
    return status


def say(settings, text):
    """Print a line unless --quiet."""
    if not settings["quiet"]:
        tell(text)


def tell(text):
    """Print a line; where nobody reads any more (`| head -1`) the run goes on without a word."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nobody_reads()


def nobody_reads():
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def blas_threads(count):
    """A context in which NumPy's BLAS has `count` threads. Sums are grouped by thread: another count gives other last
    bits. Not on a BLAS that threadpoolctl does not know (Apple's Accelerate), which goes by VECLIB_MAXIMUM_THREADS."""
    return threadpool_limits(limits=count, user_api="blas")


def device_of(settings):
    """The device to compute on. Raises DeviceError when a GPU was asked for and there is none, or none that works,
    KernelError when the switch of the kernels is neither on nor off."""
    try:
        device = require_working(settings["device"])
    except DeviceError as error:
        if not settings.get("resume"):
            raise
        sentence = f"{error}; with --device cpu the run in {settings['resume']} continues without one"
        raise DeviceError(sentence) from error
    if device == "gpu":
        kernels.available()                         # raises where their switch says neither yes nor no
    if (settings["device"], device) == ("auto", "cpu") and not settings.get("quiet"):
        _tell_once(f"--device auto: the CPU; {gpu_problem()}")
    return device


@functools.cache
def _tell_once(text):
    tell(text)
