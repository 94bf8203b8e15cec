"""The figures in the summary of tests/gpu_check.sh: `python tests/support/gpu_check_figures.py WHAT [FILE]`.

    describe             the machine, in lines: card, driver, versions, commit
    environment FILE     of those lines: card and versions
    tests FILE           of pytest's output, also of one that was cut off: passed, failed
    bench FILE           of the bench's JSON: rows by verdict; which missed, failed or were not reached
    mnist FILE           of a run's log.csv: iterations a second, seconds an epoch of 1,200, test accuracy
"""

import importlib.metadata
import itertools
import json
import platform
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

from minigrad.backend import card, gpu_problem
from minigrad.training.runlog import read_log
from tasks.frame.run_folder import environment as ran_on

EPOCH = 1200                                                     # iterations: 60,000 images in batches of 50
SMI = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]


def describe(path=None):
    """Lines "name: value"."""
    import cupy

    try:
        smi = subprocess.run(SMI, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        smi = f"unknown ({type(error).__name__})"
    runtime, here = cupy.cuda.runtime, ran_on()
    found = card()
    lines = {
        "card": found["name"], "nvidia-smi (card, driver, memory)": smi,
        "compute capability": f"{found['major']}.{found['minor']}", "multiprocessors": found["multiProcessorCount"],
        "memory": f"{found['totalGlobalMem'] / 2**30:.0f} GiB",
        "CUDA of driver, of runtime": f"{runtime.driverGetVersion()}, {runtime.runtimeGetVersion()}",
        "Python": platform.python_version(), **{name: version_of(name) for name in ("numpy", "scipy", "torch")},
        "cupy": cupy.__version__, "gpu_problem": gpu_problem(), "commit": here["commit"],
        "processor": f"{here['cpu']}, {here['cores']} cores", "system": platform.platform(), "date": here["date"]}
    return "\n".join(f"{key}: {value}" for key, value in lines.items())


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def environment(path):
    """The card and the versions, of the lines that `describe` wrote."""
    lines = dict(line.split(": ", 1) for line in path.read_text("utf-8").splitlines() if ": " in line)
    return f"{lines['card']}, Python {lines['Python']}, CuPy {lines['cupy']}, commit {lines['commit']}"


def tests(path):
    """pytest's last line; where there is none, what the lines of the tests say."""
    text = path.read_text("utf-8", "replace")
    ends = re.findall(r"^=+ (.*\d+ (?:passed|failed|errors?|skipped).*) in [\d.]+s.*=+$", text, re.MULTILINE)
    if ends:
        return re.sub(r", \d+ deselected", "", ends[-1])
    count = Counter(re.findall(r" (PASSED|FAILED|ERROR|SKIPPED)\b", text))
    if not count:
        return "no figures: no test was run"
    return ", ".join(f"{count[word]} {word.lower()}" for word in ("FAILED", "ERROR", "PASSED")) + ", then cut off"


def bench(path):
    """How many lines have which verdict; which have "missed", which rows failed or were not reached in the time."""
    report = json.loads(path.read_text("utf-8"))
    lines = [(f"{row['layer']} / {row['side']}", row["verdict"]) for row in report["table"] if "verdict" in row]
    lines += [(f"{row['layer']} / epoch", row["epoch"]["verdict"]) for row in report["table"] if "epoch" in row]
    words = ", ".join(f"{n} {verdict}" for verdict, n in sorted(Counter(verdict for _, verdict in lines).items()))
    more = {"missed": [name for name, verdict in lines if verdict == "missed"], "failed": report.get("failed", []),
            "not reached": [note.split(": ")[0] for note in report.get("notes", []) if ": not reached" in note]}
    return "; ".join([f"{len(lines)} rows" + (f": {words}" if words else ""),
                      *(f"{key}: {', '.join(names)}" for key, names in more.items() if names)])


def mnist(path):
    """The rate of training alone, the median over the rows between evaluations, and with the evaluations."""
    _, rows = read_log(path)
    last = rows[-1]
    alone = [(row["seconds"] - before["seconds"]) / (row["step"] - before["step"])
             for before, row in itertools.pairwise(rows) if before["test_accuracy"] is None]
    words = f"{last['step']:,} iterations in {last['seconds']:.1f} s, evaluations included"
    if alone:
        each = statistics.median(alone)
        words += f"; training alone {1 / each:.2f} a second, an epoch of {EPOCH:,}: {EPOCH * each:.1f} s"
    accuracies = [row["test_accuracy"] for row in rows if row["test_accuracy"] is not None]
    return words + (f"; test accuracy {accuracies[-1]:.2%} (a part of the test set)" if accuracies else "")


def main(what, file=None):
    """Print the figures; where there are none, one line that says why."""
    try:
        print({"describe": describe, "environment": environment, "tests": tests, "bench": bench, "mnist": mnist}[what](
            Path(file) if file else None))
    except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError) as error:
        if what == "describe":
            raise
        print(f"no figures ({type(error).__name__}: {error})".replace("\n", " "))


if __name__ == "__main__":
    main(*sys.argv[1:])
