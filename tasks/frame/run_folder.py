"""The folder of a run: made or refused, held by one run at a time, with config.json in it."""

import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

from minigrad.backend import device_name
from minigrad.tensors import CheckpointError, write_atomically
from minigrad.training import FREE_SETTINGS

OF_A_CALL = ("out", "resume")                        # settings that config.json keeps as they were at first


class UsageError(ValueError):
    """Bad input to a task: one line, exit status 2."""


def open_run_folder(task, settings):
    """(folder, hold): the run's folder with config.json in it, and an object to keep while the run writes there.

    Raises UsageError for a folder that is not empty, cannot be written, or is being written by another run.
    """
    try:
        if settings["resume"]:
            out = Path(settings["resume"])
            return out, _hold(out)
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
    """parent/TIME, made; -2, -3 ... is added when another run began in the same second."""
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


def write_config(out, settings):
    """config.json: the settings, and what they ran on (that part is for the reader; resume does not need it)."""
    where = device_name(settings.get("device", "cpu"))
    write_json(Path(out) / "config.json", {"settings": settings, "ran_on": {**environment(), "device": where}})


def note_resumed(out, settings):
    """Bring config.json up to date once a run really goes on: the settings that a resumed run may change, and how.

    Raises CheckpointError when it is missing or damaged.
    """
    config = _read_config(out)
    config["settings"].update((key, settings[key]) for key in FREE_SETTINGS if key in settings and key not in OF_A_CALL)
    config["resumed_with"] = [*config.get("resumed_with", []), environment()["command"]]
    write_json(Path(out) / "config.json", config)


def write_json(path, content):
    """JSON with one value on a line, written atomically."""
    write_atomically(path, f"{json.dumps(content, indent=1)}\n".encode())


def read_config(out):
    """The settings of a run. Raises CheckpointError when there is no run in the folder."""
    return _read_config(out)["settings"]


def _read_config(out):
    path = Path(out) / "config.json"
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
        return {**config, "settings": dict(config["settings"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{out}: no run there: {path.name} is missing or damaged") from error


def environment():
    """Command, commit, versions and processor: what a measured figure depends on."""
    return {"command": shlex.join(["python", *sys.argv]), "commit": _commit(), "python": platform.python_version(),
            "numpy": np.__version__, "cpu": _cpu(), "cores": os.cpu_count(),
            "blas_threads": _blas_threads(), "date": time.strftime("%Y-%m-%d")}


def _blas_threads():
    counts = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return str(max(counts)) if counts else "unknown"


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
