"""What all tasks share: flags, the run folder, one-line errors and exit statuses.

Exit status: 0 done; 1 the run stopped on NaN, Inf or an undefined formula; 2 bad input, or a file or disk that fails;
130 interrupted (saved).

Import this module before NumPy: `--threads` must be in the environment when NumPy's BLAS is loaded.
"""

import sys

from tasks.frame.threads import asked_for, set_blas_threads

set_blas_threads(asked_for(sys.argv))

import argparse  # noqa: E402
import functools  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

from minigrad import kernels, optim, schedules  # noqa: E402
from minigrad.backend import DeviceError, gpu_problem, require_working  # noqa: E402
from minigrad.data import DataError  # noqa: E402
from minigrad.kernels import KernelError  # noqa: E402
from minigrad.tensors import CheckpointError  # noqa: E402
from minigrad.training.runlog import RunLog  # noqa: E402
from minigrad.training.trainer import FREE_SETTINGS, Interrupted  # noqa: E402
from tasks.frame.run_folder import UsageError, note_resumed, read_config, write_config  # noqa: E402

OPTIMIZERS = {"sgd": optim.SGD, "momentum": optim.Momentum, "adadelta": optim.Adadelta, "rmsprop": optim.RMSprop,
              "adam": optim.Adam, "adamw": optim.AdamW, "radam": optim.RAdam}


# ---- flags -----------------------------------------------------------------------------------------------

def whole(least):
    """An argparse type: a whole number of at least `least`."""
    def parse(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least {least}")
        return value
    return parse


def number(low=None, open_low=False):
    """An argparse type: a finite number, from `low` up."""
    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        too_low = low is not None and (value < low or (open_low and value == low))
        if not math.isfinite(value) or too_low:
            bound = "" if low is None else f" {'above' if open_low else 'of at least'} {low}"
            raise argparse.ArgumentTypeError(f"{text!r}; expected a finite number{bound}")
        return value
    return parse


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors: one line, no usage text before it."""

    def error(self, message):
        raise UsageError(message)


def parser_for(task, description, data=None):
    """A parser with the flags that every task has; defaults come from `settings_of`, so that a flag that was given can
    be told from one that was not. `data` says what --data is, for a task that reads some."""
    parser = OneLineParser(prog=f"python tasks/{task}.py", description=description,
                           formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    shared = parser.add_argument_group("shared by all tasks")
    shared.add_argument("--device", choices=["cpu", "gpu", "auto"], help="where to compute (default cpu)")
    shared.add_argument("--seed", type=whole(0), help="of data, initialisation and batches (default 0)")
    shared.add_argument("--steps", type=whole(1), help="iterations")
    shared.add_argument("--epochs", type=number(0, open_low=True), help="as --steps, in passes over the data")
    shared.add_argument("--batch-size", type=whole(1))
    shared.add_argument("--lr", type=number(0), help="learning rate")
    shared.add_argument("--optimizer", help=", ".join(OPTIMIZERS))
    shared.add_argument("--clip-norm", type=number(0), help="clip the gradient's global norm; 0: do not")
    shared.add_argument("--clip-value", type=number(0), help="clip every entry of the gradient; 0: do not")
    shared.add_argument("--dtype", choices=["float32", "float64"], help="default float32")
    shared.add_argument("--threads", type=whole(1), help="BLAS threads (default 1)")
    if data is not None:
        shared.add_argument("--data", metavar="PATH", help=data)
    shared.add_argument("--out", help="run folder (default runs/TASK/TIME); a non-empty one is refused")
    shared.add_argument("--resume", metavar="DIR", help="go on with the run in DIR, with its own settings")
    shared.add_argument("--eval-every", type=whole(1), help="iterations between evaluations")
    shared.add_argument("--quiet", action="store_true", default=None, help="print results and errors only")
    return parser


SHARED_DEFAULTS = {"device": "cpu", "seed": 0, "steps": None, "epochs": None, "clip_norm": 0.0, "clip_value": 0.0,
                   "dtype": "float32", "threads": 1, "out": None, "resume": None, "quiet": False}


def settings_of(parser, argv, defaults):
    """{setting: value}: what is given on the command line, else the resumed run's, else the default.

    `defaults` is a function of what is given that returns the task's own.
    Raises UsageError for a flag that contradicts the resumed run, CheckpointError for a folder that is no run.
    """
    given = _given(parser, argv)
    for flag in ("model", "layer"):
        if flag in given and "compare" in given:
            raise UsageError(f"--compare has no meaning with --{flag} {given[flag]}; expected one of the two")
    if "resume" not in given:
        return {**SHARED_DEFAULTS, **defaults(given), **given}
    if not given["resume"]:
        raise UsageError("--resume is empty; expected the folder of a run")
    saved = _saved_settings(parser, given["resume"], {**SHARED_DEFAULTS, **defaults(given)})
    for key, value in given.items():
        if key not in FREE_SETTINGS and saved.get(key) != value:
            flag = "--" + key.replace("_", "-")
            raise UsageError(f"{flag} {value} differs from the run in {given['resume']}, which has "
                             f"{saved.get(key)!r}; a resumed run keeps its settings")
    if "out" in given and Path(given["out"]) != Path(given["resume"]):
        raise UsageError("--out and --resume name different folders; --resume goes on in its own")
    for one, other in (("steps", "epochs"), ("epochs", "steps")):        # the new one takes the place of the old
        if one in given and other not in given:
            saved[other] = None
    return {**saved, **given, "out": given["resume"]}


def _given(parser, argv):
    return {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}


def _saved_settings(parser, folder, expected):
    """The settings in a run's config.json, each put through its flag's own checks. Raises CheckpointError."""
    saved = read_config(folder)
    problem = None
    missing = [key for key in expected if key not in saved]
    if missing:
        problem = f"{missing[0]} is missing, or it is a run of another task"
    else:
        argv = [f"--{key.replace('_', '-')}" if value is True else f"--{key.replace('_', '-')}={value}"
                for key, value in saved.items() if value is not None and value is not False]
        try:
            again = {**dict.fromkeys(saved), **_given(parser, argv)}
            differing = [key for key in saved if (again[key] or None) != (saved[key] or None)]
            if differing:
                problem = f"{differing[0]} is {saved[differing[0]]!r}"
        except UsageError as error:
            problem = str(error)
    if problem:
        raise CheckpointError(f"{Path(folder) / 'config.json'}: damaged: {problem}")
    return saved


def make_optimizer(settings, parameters, no_decay=()):
    """The optimizer that `settings` name, with its lr, eps and weight_decay if they are given.

    Raises UsageError for an unknown one, and for an eps where the optimizer has none.
    """
    name = settings["optimizer"]
    if name not in OPTIMIZERS:
        raise UsageError(f"--optimizer is {name!r}; expected one of {', '.join(OPTIMIZERS)}")
    given = {key: settings[key] for key in ("lr", "eps", "weight_decay") if settings.get(key) is not None}
    if "eps" in given and name in ("sgd", "momentum"):
        raise UsageError(f"--eps is {given['eps']}, but the optimizer {name} has no eps")
    return OPTIMIZERS[name](parameters, **given, no_decay=no_decay)


def clip_settings(settings):
    """Keywords for Trainer: 0 means no clipping."""
    return {"clip_norm": settings["clip_norm"] or None, "clip_value": settings["clip_value"] or None}


def steps_of(settings, per_epoch, default):
    """The number of iterations that --steps or --epochs ask for. Raises UsageError for both."""
    if settings["steps"] is not None and settings["epochs"] is not None:
        raise UsageError("--steps and --epochs were both given; expected one of them")
    if settings["epochs"] is not None:
        return max(1, round(settings["epochs"] * per_epoch))
    return settings["steps"] or default


def schedule_of(settings, steps):
    """The learning rate over a run of `steps` steps: --lr after --warmup steps, then constant or half a cosine to 0.

    Without --warmup it lasts a twentieth of the steps. Raises UsageError for one longer than the run.
    """
    warmup = steps // 20 if settings["warmup"] is None else settings["warmup"]
    if warmup > steps:
        raise UsageError(f"--warmup is {warmup:,}; expected at most the number of steps, {steps:,}")
    if settings["schedule"] == "constant":
        return schedules.Constant(settings["lr"], warmup)
    return schedules.WarmupCosine(settings["lr"], warmup, steps)


def names_to_compare(names, choices):
    """The names in --compare's "A,B". Raises UsageError for one that is not among the choices, or comes twice."""
    names = names.replace(" ", "").split(",")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--compare names {name!r} twice; expected each model once")
        if name not in choices:
            raise UsageError(f"--compare has {name!r}; expected names among {', '.join(choices)}")
    return names


def train_in_turn(names, settings, out, train):
    """Train models one after another, each in its own folder, by train(name, folder): ({name: its RunLog}, stopped).

    One that diverges does not keep the others from being trained: its name is in `stopped`, for `require_none`.
    """
    logs, stopped = {}, []
    for name in names:
        folder = out / name
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():
            write_config(folder, {**settings, "model": name, "compare": None})
        try:
            train(name, folder)
        except ArithmeticError as error:
            print(f"{name} stopped: {error}", file=sys.stderr, flush=True)
            stopped.append(name)
        logs[name] = RunLog(folder / "log.csv")
        logs[name].read(math.inf)
    return logs, stopped


def require_none(stopped):
    """Raise ArithmeticError, once everything that could be made has been, when some of the models were stopped."""
    if stopped:
        raise ArithmeticError(f"{', '.join(stopped)} diverged (above); the others were trained to their end")


# ---- running ---------------------------------------------------------------------------------------------

def go_on(trainer, settings, name, steps):
    """With --resume: let the trainer go on where its folder's run stopped, say so, and note it in config.json.

    Raises UsageError for fewer steps than have been taken, CheckpointError as Trainer.resume does.
    """
    if not settings["resume"] or not trainer.resume_if_begun():
        return
    if steps < trainer.step:
        raise UsageError(f"--steps: {steps} are asked for, but the run in {trainer.out} is at {trainer.step}")
    for folder in {trainer.out, Path(settings["resume"])}:               # of a comparison, the whole's too
        note_resumed(folder, settings)
    say(settings, f"{name}: goes on from step {trainer.step}")


def say(settings, text):
    """Print a line unless --quiet."""
    if not settings["quiet"]:
        tell(text)


def tell(text):
    """Print a line; where nobody reads any more (`| head -1`) the run goes on without a word."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(main, argv=None):
    """Call `main(argv)` and turn what ends a run into one line and an exit status."""
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


def device_of(settings):
    """The device to compute on. Raises DeviceError when a GPU was asked for and there is none, or none that works,
    KernelError when the switch of the kernels is neither on nor off."""
    try:
        device = require_working(settings["device"])
    except DeviceError as error:
        if not settings.get("resume"):
            raise
        raise DeviceError(f"{error}; with --device cpu the run in {settings['resume']} goes on without one") from error
    if device == "gpu":
        kernels.available()                         # raises where their switch says neither yes nor no
    if (settings["device"], device) == ("auto", "cpu") and not settings.get("quiet"):
        _tell_once(f"--device auto: the CPU; {gpu_problem()}")
    return device


@functools.cache
def _tell_once(text):
    tell(text)
