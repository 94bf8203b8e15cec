"""What all tasks share: flags, the run folder, one-line errors and exit statuses.

Exit status: 0 done; 1 the run stopped on NaN, Inf or an undefined formula; 2 bad input, or a file or disk that fails;
130 interrupted (saved).

Import this module before NumPy: `--threads` must be in the environment when NumPy's BLAS is loaded.
"""

import sys

from tasks.threads import asked_for, set_blas_threads

set_blas_threads(asked_for(sys.argv))

import argparse  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import shlex  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from minigrad import optim  # noqa: E402
from minigrad.backend import DeviceError, resolve_device  # noqa: E402
from minigrad.checkpoint import CheckpointError, write_atomically  # noqa: E402
from minigrad.train import FREE_SETTINGS, Interrupted  # noqa: E402

OPTIMIZERS = {"sgd": optim.SGD, "momentum": optim.Momentum, "adadelta": optim.Adadelta, "rmsprop": optim.RMSprop,
              "adam": optim.Adam, "adamw": optim.AdamW}


class UsageError(ValueError):
    """Bad input to a task: one line, exit status 2."""


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


def parser_for(task, description):
    """A parser with the flags that every task has; defaults come from `settings_of`, so that a flag that was given can
    be told from one that was not."""
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
    shared.add_argument("--out", help="run folder (default runs/TASK/TIME); a non-empty one is refused")
    shared.add_argument("--resume", metavar="DIR", help="go on with the run in DIR, with its own settings")
    shared.add_argument("--eval-every", type=whole(1), help="iterations between evaluations")
    shared.add_argument("--quiet", action="store_true", default=None, help="print results and errors only")
    return parser


SHARED_DEFAULTS = {"device": "cpu", "seed": 0, "steps": None, "epochs": None, "clip_norm": 0.0, "clip_value": 0.0,
                   "dtype": "float32", "threads": 1, "out": None, "resume": None, "quiet": False}


def settings_of(parser, argv, defaults):
    """{setting: value}: what is given on the command line, else the resumed run's, else the default.

    `defaults` is a dict, or a function of what is given that returns one.
    Raises UsageError for a flag that contradicts the resumed run, CheckpointError for a folder that is no run.
    """
    given = _given(parser, argv)
    if "resume" not in given:
        return {**SHARED_DEFAULTS, **(defaults(given) if callable(defaults) else defaults), **given}
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
        problem = f"{missing[0]} is missing"
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


def make_optimizer(settings, parameters):
    """The optimizer that `settings` name, with its lr and eps if they are given.

    Raises UsageError for an unknown one, and for an eps where the optimizer has none.
    """
    name = settings["optimizer"]
    if name not in OPTIMIZERS:
        raise UsageError(f"--optimizer is {name!r}; expected one of {', '.join(OPTIMIZERS)}")
    given = {key: settings[key] for key in ("lr", "eps") if settings.get(key) is not None}
    if "eps" in given and name in ("sgd", "momentum"):
        raise UsageError(f"--eps is {given['eps']}, but the optimizer {name} has no eps")
    return OPTIMIZERS[name](parameters, **given)


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


# ---- the run folder --------------------------------------------------------------------------------------

def open_run_folder(task, settings):
    """(folder, hold): the run's folder with config.json in it, and an object to keep while the run writes there.

    Raises UsageError for a folder that is not empty, cannot be written, or is being written by another run.
    """
    try:
        if settings["resume"]:
            out = Path(settings["resume"])
            hold = _hold(out)
            before = json.loads((out / "config.json").read_text(encoding="utf-8"))
            resumed = [*before.get("resumed_with", []), environment()["command"]]
            write_config(out, settings, {"ran_on": before.get("ran_on", {}), "resumed_with": resumed})
            return out, hold
        out = Path(settings["out"]) if settings["out"] else _new_folder(Path("runs") / task)
        if out.is_file():
            raise UsageError(f"--out {out} is a file; expected a folder that is empty or not there yet")
        out.mkdir(parents=True, exist_ok=True)
        hold = _hold(out)
        if any(out.iterdir()):
            instead = f", or --resume {out}" if (out / "config.json").exists() else ""
            raise UsageError(f"--out {out} is not empty; nothing was written. Give another folder{instead}")
        write_config(out, settings)
    except OSError as error:
        where = f"--out {settings['out']}" if settings["out"] else "the folder runs"
        raise UsageError(f"{where} cannot be written ({error.strerror})") from error
    return out, hold


def _new_folder(parent):
    """parent/TIME, made, with a number behind it when another run began in the same second."""
    now = time.strftime("%Y%m%d-%H%M%S")
    for name in itertools.chain([now], (f"{now}-{n}" for n in itertools.count(2))):
        try:
            (parent / name).mkdir(parents=True)
        except FileExistsError:
            continue
        return parent / name


def _hold(folder):
    """An open lock on the folder, let go when it is closed or the process ends. Windows has none: None."""
    try:
        import fcntl
    except ImportError:
        return None
    hold = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{folder} is being written by another run; nothing was changed") from None
    return _Held(hold)


class _Held:
    """Closes a file descriptor when it goes."""

    def __init__(self, descriptor):
        self.descriptor = descriptor

    def __del__(self):
        os.close(self.descriptor)


def write_config(out, settings, about=None):
    """config.json: the settings, and what they ran on (that part is for the reader; resume does not need it)."""
    text = json.dumps({"settings": settings, **(about or {"ran_on": environment()})}, indent=1)
    write_atomically(Path(out) / "config.json", text.encode("utf-8"))


def read_config(out):
    """The settings of a run. Raises CheckpointError when there is no run in the folder."""
    path = Path(out) / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{out}: no run there: {path.name} is missing or damaged") from error


def environment():
    """Command, commit, versions and processor: what a measured figure depends on."""
    return {"command": shlex.join(["python", *sys.argv]), "commit": _commit(), "python": platform.python_version(),
            "numpy": np.__version__, "cpu": _cpu(), "cores": os.cpu_count(),
            "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "unset"), "date": time.strftime("%Y-%m-%d")}


def _commit():
    try:
        answer = subprocess.run(["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"],
                                capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()


def _cpu():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# ---- running ---------------------------------------------------------------------------------------------

def run(main, argv=None):
    """Call `main(argv)` and turn what ends a run into one line and an exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):                       # a name that a terminal cannot show must not end a run
            stream.reconfigure(errors="backslashreplace")
    try:
        main(sys.argv[1:] if argv is None else argv)
    except (UsageError, CheckpointError, DeviceError) as error:
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
    """The device to compute on. Raises DeviceError when a GPU was asked for and there is none."""
    return resolve_device(settings["device"])
