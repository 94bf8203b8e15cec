"""How many threads NumPy's BLAS gets: to be said before NumPy is imported, so nothing here imports it."""

import os
import sys

VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def asked_for(argv):
    """The N of `--threads N`; 1, the safe choice on a shared machine, where it is not there or not a count."""
    threads = "1"
    for n, word in enumerate(argv):
        if word == "--threads" and n + 1 < len(argv):
            threads = argv[n + 1]
        elif word.startswith("--threads="):
            threads = word.partition("=")[2]
    return int(threads) if threads.isdigit() and int(threads) > 0 else 1


def set_blas_threads(count):
    """Put the count into the environment; too late, and left alone, once NumPy has been imported."""
    if "numpy" not in sys.modules:
        os.environ.update(dict.fromkeys(VARIABLES, str(count)))
