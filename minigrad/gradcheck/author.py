"""Errors out of the author's code, for the command: which method raised what, and on which line, in one line."""

import inspect
import traceback
from pathlib import Path

HERE = Path(__file__).parent
METHODS = ("__init__", "forward", "backward")


def describe(error, target=None):
    """One line for an exception that came through `target`, the checked class.

    `Gate.backward raises ValueError: ... (gates.py, line 14)`, or without a place if the author's code did not raise.
    """
    frames = traceback.extract_tb(error.__traceback__)
    entered = next((n for n in range(1, len(frames)) if frames[n].name in METHODS
                    and _ours(frames[n - 1]) and not _ours(frames[n])), None)
    text = one_line(error)
    if target is None or entered is None:
        known = isinstance(error, ValueError | TypeError | OSError) and text
        return text if known else f"{type(error).__name__}: {text}".rstrip(": ")
    inner = frames[entered:]
    place = ([frame for frame in inner if frame.filename == _file(target)] or inner[:1])[-1]
    what = f"{type(error).__name__}: {text}".rstrip(": ")
    return (f"{target.__name__}.{inner[0].name} raises {what} "
            f"({Path(place.filename).name}, line {place.lineno})")


def one_line(error):
    return " ".join(str(error).split())


def _ours(frame):
    return Path(frame.filename).parent == HERE


def _file(target):
    try:
        return inspect.getfile(target)
    except (TypeError, OSError):
        return None
