"""How many threads NumPy's BLAS gets: to be said before NumPy is imported, so nothing here imports it."""

import json
import os
import sys
from pathlib import Path

VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def asked_for(argv):
    """The N of `--threads N`; without it that of the run in `--resume DIR` (sums are grouped by thread, so another
    count would give other last bits); else 1, the safe choice on a shared machine."""
    threads = value_of("--threads", argv)
    folder = value_of("--resume", argv)
    if threads is None and folder is not None:
        try:
            threads = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["settings"]["threads"]
        except (OSError, ValueError, KeyError, TypeError):
            threads = None                                       # what is wrong there is said when the run is opened
    return int(threads) if str(threads).isdigit() and int(threads) > 0 else 1


def value_of(flag, argv):
    """The word after a flag, or behind its equals sign; None without the flag."""
    for n, word in enumerate(argv):
        if word == flag and n + 1 < len(argv):
            return argv[n + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def set_blas_threads(count):
    """Put the count into the environment; too late, and left alone, once NumPy has been imported."""
    if "numpy" not in sys.modules:
        os.environ.update(dict.fromkeys(VARIABLES, str(count)))
