"""The bench on a GPU: the rows in turn, each guarded, the report written after every one of them.

A row that fails becomes a note, and the others go on. What is measured: gpu_rows.py; how: gpu_measure.py; compared with
what: gpu_peers.py.
"""

import contextlib
import json
import time

from minigrad import kernels
from minigrad.backend import one_line
from minigrad.tensors import write_atomically
from tasks.bench import gpu_measure, gpu_peers, gpu_report
from tasks.bench.flags import FULL_GPU
from tasks.bench.gpu_measure import CupyClock, GpuTiming, TimeIsUp, TorchClock, measure, release, time_limit
from tasks.bench.gpu_rows import COMPILED, ROWS
from tasks.bench.measure import verdict
from tasks.bench.peers import EAGER, TOLERANCE, compared
from tasks.frame import tell
from tasks.frame.run_folder import UsageError, environment

OUR_LSTM = "minigrad's LSTM"
PART = {"SRU recurrence": "sru", "LSTM": "lstm", "RRALSTM": "rra", "SRU": "sru", "SRUpp": "srupp",
        "attention": "attention", "TSDAE step": "tsdae", "MNIST step": "mnist"}
SIZES = {"SRU recurrence": ("sru_size",), "LSTM": ("lstm_size",), "RRALSTM": ("lstm_size", "window"),
         "SRU": ("sru_size",), "SRUpp": ("srupp_size",), "attention": ("attention_size",),
         "TSDAE step": ("tsdae_size",), "MNIST step": ("mnist_size", "window")}
TARGETS = {("SRU recurrence", "floor"): 2.0, ("LSTM", gpu_peers.CUDNN): 2.0, ("RRALSTM", OUR_LSTM): 1.5,
           ("SRUpp", EAGER): 0.2}                                            # (row, side): ratio to it at most
EPOCH_IMAGES, EPOCH_SECONDS = 60_000, 60         # of the MNIST step, at most
COMPILE_SECONDS = 60               # that torch.compile may take for one side


def main(settings):
    """Measure, print row by row, write; raises ArithmeticError where a row of minigrad's failed or a peer differs."""
    bench = Bench(settings)
    bench.attempt("the card's rates", bench.add_rates)
    tell(gpu_report.head_of(bench.report))
    asked_for = [name for name in ROWS if PART[name] in settings["only"]]
    for name in asked_for:
        bench.row(name)
    for name in [name for name in COMPILED if name in asked_for and bench.torch]:      # last: compiling takes its time
        bench.row(name, gpu_peers.COMPILED)
    bench.finish()


def written(write, *arguments):
    try:
        write(*arguments)
    except OSError as error:
        raise UsageError(f"the report cannot be written ({error})") from error


class Bench:
    """The report so far, the time that is left, and PyTorch, if it finds the GPU."""

    def __init__(self, settings):
        self.settings, self.began = settings, time.monotonic()
        self.torch, self.device, line = gpu_peers.on_a_gpu()
        self.clock = self.torch and TorchClock(self.torch)
        card = {**gpu_measure.the_card(), "kernels": kernels.available(), "torch": line}
        self.report = {"settings": settings, "environment": {**environment(), **card}, "rates": None, "sizes": {},
                       "table": [], "notes": [] if self.torch else [line], "failed": [], "differing": []}

    def left(self):
        """Seconds that are left; None without --seconds."""
        seconds = self.settings["seconds"]
        return None if seconds is None else seconds - (time.monotonic() - self.began)

    def attempt(self, what, work, *arguments):
        """Do the work unless the time is over. True if it was done, False if it failed, None if it was not begun."""
        left = self.left()
        if left is not None and left <= 0:
            self.report["notes"].append(f"{what}: not reached in {self.settings['seconds']:g} s")
            return None
        try:
            work(*arguments)
        except Exception as error:     # each library has errors of its own, and the next row is another matter
            self.report["notes"].append(f"{what} failed: {type(error).__name__}: {one_line(error)}")
            return False
        finally:
            try:
                release()
            except Exception as error:                   # after a fault of the card this fails as everything does
                self.report["notes"].append(f"memory could not be released: {one_line(error)}")
        return True

    def add_rates(self):
        self.report["rates"] = gpu_measure.rates(self.settings)

    # ---- a row -------------------------------------------------------------------------------------------

    def row(self, name, peer=EAGER):
        """Measure a row and its peers, or the compiled peers of one that was measured; print and save the report."""
        first = len(self.report["table"])
        if peer == EAGER:
            if self.attempt(name, self.add_row, name) is False and self.timing_of(name) is None:
                self.report["failed"].append(name)
        elif self.timing_of(name):
            self.attempt(f"{name} by {peer}", lambda: self.add_peers(ROWS[name](self.settings), peer))
        if len(self.report["table"]) > first:
            tell(gpu_report.row_text(self.report, name, self.report["table"][first:]))
        self.save()

    def add_row(self, name):
        row = ROWS[name](self.settings)
        self.report["sizes"][name] = row.size
        compare = row.peers and self.torch
        expected = row.expected() if compare else None                       # before anything is timed
        ours = measure(row.ours.call, CupyClock(), self.settings["repeats"])
        self.add(name, "minigrad", "", ours)
        if name == "MNIST step":
            self.add_epoch(ours)
        self.add_floor(row, ours)
        if name == "RRALSTM":
            theirs = self.timing_of("LSTM")
            if theirs:
                self.add(name, OUR_LSTM, "", theirs, ours)
            else:
                self.report["notes"].append("RRALSTM is judged by minigrad's LSTM, which was not measured; "
                                            "--only lstm,rra does")
        if compare:
            self.attempt(f"what {name} is compared with", self.add_peers, row, EAGER, expected)

    def add_floor(self, row, ours):
        """What the row's bytes and flops take at the card's rates: the larger of the two."""
        rates = self.report["rates"]
        if rates:
            ms = 1e-9 * max(row.bytes / rates["copy_tb_s"], row.flops / rates["product_tflop_s"])
            way = f"{row.bytes / 1e9:.3g} GB, {row.flops / 1e9:.4g} GFLOP"
            self.add(row.name, "floor", way, GpuTiming(ms, ms, 0.0, 0), ours)

    def add_epoch(self, ours):
        """The seconds of an epoch of such steps."""
        seconds = EPOCH_IMAGES // self.settings["mnist_size"][0] * ours.ms / 1e3
        self.report["table"][-1]["epoch"] = {"seconds": seconds, "at_most": EPOCH_SECONDS, "verdict": verdict(
            seconds, EPOCH_SECONDS, self.not_judged("MNIST step"), ours.steady)}

    def timing_of(self, name):
        """GpuTiming of minigrad's side of a row, None where it was not measured."""
        for row in self.report["table"]:
            if (row["layer"], row["side"]) == (name, "minigrad"):
                return GpuTiming(*(row[key] for key in GpuTiming._fields))
        return None

    def add(self, name, side, way, timing, ours=None):
        """A line of the table; with a ratio where `ours` is given."""
        judged = self.judged(name, side, ours, timing) if ours else {}
        self.report["table"].append({"layer": name, "side": side, "way": way, **timing._asdict(), **judged})

    def judged(self, name, side, ours, theirs):
        ratio, at_most = ours.ms / theirs.ms, TARGETS.get((name, side))
        return {"ratio": ratio, "at_most": at_most,
                "verdict": verdict(ratio, at_most, self.not_judged(name), ours.steady and theirs.steady)}

    def not_judged(self, name):
        """Why a row's targets do not apply, or None."""
        return "another size" if any(self.settings[key] != FULL_GPU[key] for key in SIZES[name]) else None

    # ---- its peers ---------------------------------------------------------------------------------------

    def add_peers(self, row, name, expected=None):
        """Every way of a peer that gives minigrad's numbers; of each peer the fastest way is judged."""
        how = (self.torch, self.device, *([name] if name == gpu_peers.COMPILED else []))
        sides, timings = row.peers(*how), []
        checks = sides if row.steps is None or name == gpu_peers.COMPILED else row.peers(*how, steps=row.steps)
        expected = expected or row.expected()
        for side, check in zip(sides, checks):
            self.attempt(in_words(side), self.try_peer, side, check, expected, timings)
        for side, timing in timings:
            fastest = min(other.ms for of, other in timings if of.name == side.name)
            self.add(row.name, side.name, side.way, timing, self.timing_of(row.name) if timing.ms == fastest else None)

    def try_peer(self, side, check, expected, timings):
        """Compare one way with minigrad and time it; one that differs, or is not compiled in time, is noted."""
        tolerance = gpu_peers.TOLERANCES.get(side.row, TOLERANCE)
        left = self.left()
        limit = COMPILE_SECONDS if left is None else min(COMPILE_SECONDS, left)
        try:
            with time_limit(limit) if side.name == gpu_peers.COMPILED else contextlib.nullcontext():
                agree, differing = compared(expected, [side], [check], tolerance)
        except TimeIsUp:
            gpu_measure.reset_compiler()
            self.report["notes"].append(f"{in_words(side)}: not compiled in {limit:.0f} s")
            return
        self.report["differing"] += differing
        if agree:
            timings.append((side, measure(side.call, self.clock, self.settings["repeats"])))

    # ---- files -------------------------------------------------------------------------------------------

    def save(self):
        """The JSON file, whole after every row: a run that is killed has left what it measured."""
        if self.settings["json"]:
            written(write_atomically, self.settings["json"], (json.dumps(self.report, indent=1) + "\n").encode("utf-8"))

    def finish(self):
        report = self.report
        report["elapsed_s"] = time.monotonic() - self.began
        if self.settings["out"]:
            written(gpu_report.draw, report, self.settings["out"])
        self.save()
        tell("\n".join(dict.fromkeys([*report["notes"], *report["differing"]])) or "nothing was left out")
        problems = [f"{len(report[key])} {what}" for key, what in (
            ("failed", "of minigrad's own rows failed"), ("differing", "peers differ from minigrad")) if report[key]]
        if problems:
            raise ArithmeticError(f"{' and '.join(problems)} (above)")


def in_words(side):
    return f"{side.row} by {side.name} ({side.way})"
