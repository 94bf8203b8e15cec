"""tasks/bench.py --device gpu: the rows in turn, each guarded, the report written after every one of them.

A row that fails becomes a note, and the others go on. What is measured: bench_gpu_rows.py; how: bench_gpu_measure.py;
against what: bench_gpu_peers.py; the floors, and --estimate: bench_gpu_costs.py.
"""

import contextlib
import functools
import json
import time

from minigrad import kernels
from minigrad.backend import one_line
from minigrad.tensors import write_atomically
from tasks.bench import gpu_measure as bench_gpu_measure, gpu_peers as bench_gpu_peers, gpu_report as bench_gpu_report
from tasks.bench.gpu_costs import (
    ASSUMED,
    COSTS,
    FULL_GPU,
    PART,
    SIZES,
    epoch_of,
    estimates,
    floor_ms,
    launches_ms,
)
from tasks.bench.gpu_measure import CupyClock, GpuTiming, HostClock, TimeIsUp, TorchClock, measure, release, time_limit
from tasks.bench.gpu_rows import COMPILED, ROWS
from tasks.bench.measure import verdict
from tasks.bench.peers import compared
from tasks.frame.common import tell
from tasks.frame.run_folder import UsageError, environment

OUR_LSTM = "minigrad's LSTM"
TARGETS = {("SRU recurrence", "floor"): 2.0, ("LSTM", bench_gpu_peers.CUDNN): 2.0, ("RRALSTM", OUR_LSTM): 1.5,
           ("SRUpp", bench_gpu_peers.EAGER): 0.2}                            # (row, side): ratio to it at most
EPOCH_SECONDS = 60                 # at most, of the MNIST step
COMPILE_SECONDS = 60               # that torch.compile may take for one side


class Clock:
    """How long the bench has gone on, and whether --seconds are over."""

    def __init__(self, seconds):
        self.seconds, self.began = seconds, time.monotonic()

    def is_over(self):
        return self.seconds is not None and time.monotonic() - self.began >= self.seconds

    def left(self, most):
        return most if self.seconds is None else min(most, self.seconds - (time.monotonic() - self.began))


def main(settings):
    """Measure, print row by row, write; raises ArithmeticError where a row of minigrad's failed or a peer differs."""
    report = begin(settings)
    budget = Clock(settings["seconds"])
    peers, note = peers_of(report)
    if note:
        report["notes"].append(note)
    begun(report, budget, "the card's rates", functools.partial(add_rates, report, settings))
    tell(bench_gpu_report.head_of(report))
    asked_for = [name for name in ROWS if PART[name] in settings["only"]]
    for name in asked_for:
        row_of(report, name, settings, peers, budget)
        save(report, settings)
    for name in [name for name in COMPILED if name in asked_for and peers]:  # at the end: compiling takes its time
        compiled_row_of(report, name, settings, peers, budget)
        save(report, settings)
    report["elapsed_s"] = time.monotonic() - budget.began
    if settings["out"]:
        written(bench_gpu_report.draw, report, settings["out"])
    save(report, settings)
    tell(bench_gpu_report.foot_of(report))
    problems = [f"{len(report[key])} {what}" for key, what in (
        ("failed", "of minigrad's own rows failed"), ("differing", "peers differ from minigrad")) if report[key]]
    if problems:
        raise ArithmeticError(f"{' and '.join(problems)} (above)")


def begin(settings):
    """The report, with nothing measured."""
    card = {**bench_gpu_measure.the_card(), "kernels": kernels.available()}
    return {"settings": settings, "environment": {**environment(), **card}, "rates": None, "sizes": {}, "table": [],
            "floors": {}, "notes": [], "failed": [], "differing": []}


def peers_of(report):
    """((torch, device, clock) or None, a line that says why not)."""
    torch, device, line = bench_gpu_peers.on_a_gpu()
    if torch is None:
        return None, line
    report["environment"]["torch"] = line
    return (torch, device, TorchClock(torch) if device == "cuda" else HostClock()), None


def begun(report, budget, what, work):
    """Do the work unless the time is over; whether it was begun and went well. A failure becomes a note."""
    if budget.is_over():
        report["notes"].append(f"{what}: not reached in {budget.seconds:g} s")
        return None
    try:
        work()
    except Exception as error:     # each library has errors of its own, and the next row is another matter
        report["notes"].append(f"{what} failed: {type(error).__name__}: {one_line(error)}")
        return False
    finally:
        give_back(report)
    return True


def give_back(report):
    """`release`, which after a fault of the card fails as everything does."""
    try:
        release()
    except Exception as error:
        report["notes"].append(f"memory could not be given back: {one_line(error)}")


def add_rates(report, settings):
    report["rates"] = bench_gpu_measure.rates(settings)


def estimate(settings):
    """--estimate: print, and write with --json, what the rows would take at assumed rates."""
    assumed = settings["rates"] or ASSUMED
    rows = estimates(settings, assumed)
    tell(bench_gpu_report.estimate_text(rows, settings, assumed))
    save({"settings": settings, "assumed": dict(zip(("copy_tb_s", "product_tflop_s", "launch_us"), assumed)),
          "estimates": rows}, settings)


# ---- a row -----------------------------------------------------------------------------------------------

def row_of(report, name, settings, peers, budget):
    """Measure a row and its peers, put both into the report and print them."""
    first = len(report["table"])
    went_well = begun(report, budget, name, functools.partial(add_row, report, name, settings, peers, budget))
    if went_well is False and name not in report["floors"]:
        report["failed"].append(name)
    if len(report["table"]) > first:
        tell("\n".join([bench_gpu_report.sides_of(report, name, first), *bench_gpu_report.floor_of(report, name), ""]))


def add_row(report, name, settings, peers, budget):
    row = ROWS[name](settings)
    report["sizes"][name] = row.size
    compare = row.peers and peers
    expected = row.expected() if compare else None                           # before anything is timed
    ours = measure(row.ours.call, CupyClock(), settings["repeats"])
    add(report, name, "minigrad", "", ours)
    add_floor(report, name, ours, settings)
    if name == "RRALSTM":
        add_our_lstm(report, ours, settings)
    if compare:
        begun(report, budget, f"what {name} is compared with", functools.partial(
            add_eager, report, row, ours, expected, settings, peers, budget))


def add_eager(report, row, ours, expected, settings, peers, budget):
    torch, device, _ = peers
    sides = row.peers(torch, device)
    checks = sides if row.steps is None else row.peers(torch, device, steps=row.steps)
    add_peers(report, ours, zip(sides, checks), expected, settings, peers, budget)


def compiled_row_of(report, name, settings, peers, budget):
    """The same work by torch.compile, beside what was measured of minigrad's."""
    first, ours = len(report["table"]), timing_of(report, name)
    if ours is None:
        return
    begun(report, budget, f"{name} by {bench_gpu_peers.COMPILED}", functools.partial(
        add_compiled, report, name, ours, settings, peers, budget))
    if len(report["table"]) > first:
        tell(bench_gpu_report.sides_of(report, name, first) + "\n")


def add_compiled(report, name, ours, settings, peers, budget):
    row, (torch, device, _) = ROWS[name](settings), peers
    sides = row.peers(torch, device, bench_gpu_peers.COMPILED)
    add_peers(report, ours, zip(sides, sides), row.expected(), settings, peers, budget)


def timing_of(report, name):
    """GpuTiming of minigrad's side of a row, None where it was not measured."""
    for row in report["table"]:
        if (row["layer"], row["side"]) == (name, "minigrad"):
            return GpuTiming(*(row[key] for key in GpuTiming._fields))
    return None


def add(report, name, side, way, timing, more=None):
    report["table"].append({"layer": name, "side": side, "way": way, **timing._asdict(), **(more or {})})


def judged(name, side, ours, theirs, settings):
    """What a ratio says; theirs: a GpuTiming, or milliseconds."""
    ratio, at_most = ours.ms / getattr(theirs, "ms", theirs), TARGETS.get((name, side))
    steady = ours.steady and getattr(theirs, "steady", True)
    return {"ratio": ratio, "at_most": at_most, "verdict": verdict(ratio, at_most, not_judged(name, settings), steady)}


def not_judged(name, settings):
    """Why a row's targets do not apply, or None."""
    return "another size" if any(settings[key] != FULL_GPU[key] for key in SIZES[name]) else None


def add_floor(report, name, ours, settings):
    """The row's floor and launches, with their ratios; of the MNIST step the epoch."""
    cost, rates = COSTS[name](settings), report["rates"]
    floor = {**cost._asdict(), "ms": None, "launches_ms": None}
    if rates:
        ms = floor_ms(cost, rates["copy_tb_s"], rates["product_tflop_s"])
        floor.update(ms=ms, **judged(name, "floor", ours, ms, settings))
        if report["environment"]["kernels"]:                                 # else there are others, and more
            floor["launches_ms"] = launches_ms(cost, (rates["kernel_us"] + rates["dot_us"]) / 2)
    if name == "MNIST step":
        steps, seconds = epoch_of(settings, ours.ms)
        floor["epoch"] = {"steps": steps, "seconds": seconds, "at_most": EPOCH_SECONDS, "verdict": verdict(
            seconds, EPOCH_SECONDS, not_judged(name, settings), ours.steady)}
    report["floors"][name] = floor


def add_our_lstm(report, ours, settings):
    """RRALSTM beside the LSTM of the same size, which was measured before."""
    theirs = timing_of(report, "LSTM")
    if theirs is None:
        report["notes"].append("RRALSTM is judged by minigrad's LSTM, which was not measured; --only lstm,rra does")
    else:
        add(report, "RRALSTM", OUR_LSTM, "", theirs, judged("RRALSTM", OUR_LSTM, ours, theirs, settings))


# ---- its peers -------------------------------------------------------------------------------------------

def add_peers(report, ours, sides, expected, settings, peers, budget):
    """Every (way of a peer, the same to be checked) that gives minigrad's numbers; of a peer the quickest is judged."""
    timings = []
    for side, check in sides:
        begun(report, budget, in_words(side), functools.partial(
            try_peer, report, side, check, expected, timings, settings, peers, budget))
    for side, timing in timings:
        quickest = min(other.ms for of, other in timings if of.name == side.name)
        judgement = judged(side.layer, side.name, ours, timing, settings) if timing.ms == quickest else None
        add(report, side.layer, side.name, side.way, timing, judgement)


def in_words(side):
    return f"{side.layer} by {side.name} ({side.way})"


def try_peer(report, side, check, expected, timings, settings, peers, budget):
    """Compare one way with minigrad and time it; what differs, or is not compiled in time, is noted and not timed."""
    torch, _, clock = peers
    tolerances = bench_gpu_peers.TOLERANCES
    tolerance = tolerances.get(side.name, tolerances.get(side.layer))
    compiles = side.name == bench_gpu_peers.COMPILED
    limit = budget.left(COMPILE_SECONDS)
    try:
        with time_limit(limit) if compiles else contextlib.nullcontext():
            agree, differing = compared({side.layer: expected}, [side], [check], tolerance)
    except TimeIsUp:
        bench_gpu_measure.reset_compiler(torch)
        report["notes"].append(f"{in_words(side)}: not compiled in {limit:.0f} s")
        return
    report["differing"] += differing
    if agree:
        timings.append((side, measure(side.call, clock, settings["repeats"])))


# ---- files -----------------------------------------------------------------------------------------------

def save(report, settings):
    """The JSON file, whole after every row: a run that is killed has left what it measured."""
    if settings["json"]:
        written(write_atomically, settings["json"], (json.dumps(report, indent=1) + "\n").encode("utf-8"))


def written(write, *arguments):
    try:
        write(*arguments)
    except OSError as error:
        raise UsageError(f"the report cannot be written ({error})") from error
