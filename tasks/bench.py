"""How fast the recurrent layers are: minigrad beside PyTorch and JAX, and beside the matrix products alone.

    python tasks/bench.py                        the table of the README, some minutes on 2 cores
    python tasks/bench.py --json bench.json --out bench.png
    python tasks/bench.py --quick                small sizes, some seconds: does everything run and agree?
    python tasks/bench.py -S 400 --hidden 256    another size (targets are judged at the default size only)

Forward + backward in float32, with the gradients of x and of all parameters, all sides in this one process: RRALSTM
against the same equations in PyTorch eager and in jax.jit(lax.scan), LSTM against torch.nn.LSTM. A peer that is not
installed is left out, with a line that says so. Before anything is timed, every peer must give minigrad's outputs and
gradients (over the first 100 steps); one that does not gets no figure, and the exit status is 1.

Each side runs in alternating blocks with a pause before, at 1 and at 2 BLAS threads, and counts with its minimum over
at least 15 calls; a ratio is judged "unsteady" when the median of either side exceeds twice its minimum: measure
again on a quieter machine. The floor is the layer's matrix products alone.

Expect: the table, the floor's parts, bytes a step and unit, cost over S, B and K; with --json all of it as one file.
"""

import os
import sys

from tasks.threads import set_blas_threads

THREADS = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
set_blas_threads(max(THREADS))     # NumPy's BLAS can be limited later, not extended; tasks.common starts it with 1

import argparse  # noqa: E402
import json  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402, F401 - before tasks.common

# isort: split
from minigrad.backend import resolve_device  # noqa: E402
from minigrad.checkpoint import write_atomically  # noqa: E402
from tasks import bench_measure, bench_peers  # noqa: E402
from tasks.common import OneLineParser, run, whole  # noqa: E402
from tasks.figures import COLOURS, new_figure, save  # noqa: E402
from tasks.run_folder import UsageError, environment  # noqa: E402

FULL = {"batch_size": 50, "length": 100, "hidden": 128, "window": 10, "repeats": 15, "pause": 0.25, "cost_repeats": 5,
        "over_S": [100, 200, 400, 800, 1600, 3200], "over_B": [10, 20, 40, 80, 160], "over_K": [5, 10, 20, 40, 80]}
QUICK = {"batch_size": 4, "length": 12, "hidden": 16, "window": 3, "repeats": 3, "pause": 0.01, "cost_repeats": 3,
         "over_S": [10, 20, 40], "over_B": [2, 4, 8], "over_K": [2, 4, 8]}
D = 2                                                # width of x, as in the adding problem
CHECKED = 100                                        # steps over which the peers are compared with minigrad, at most
LONG_BATCH = 16                                      # of the table over S, at most
TARGETS = {                                          # (layer, side): ratio of minigrad to it at most, and the aim
    ("RRALSTM", "PyTorch eager"): (0.55, 0.42), ("RRALSTM", "jax.jit(lax.scan)"): (0.35, None),
    ("RRALSTM", "floor"): (2.0, None), ("LSTM", "torch.nn.LSTM"): (1.3, 1.1), ("LSTM", "floor"): (1.7, None)}
TARGET_SIZE = ("batch_size", "length", "hidden", "window")


# ---- flags -----------------------------------------------------------------------------------------------

def parse(argv):
    """The settings of this measurement; see `--help`."""
    parser = OneLineParser(prog="python tasks/bench.py", description=__doc__, allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "gpu", "auto"], default="cpu", help="default cpu")
    parser.add_argument("--batch-size", type=whole(1), help="default 50")
    parser.add_argument("-S", "--length", type=whole(2), help="steps of a sequence (default 100)")
    parser.add_argument("--hidden", type=whole(1), help="units (default 128)")
    parser.add_argument("-K", "--window", type=whole(1), help="states attended to (default 10)")
    parser.add_argument("--repeats", type=whole(1), help="calls a side, at least (default 15)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    parser.add_argument("--json", metavar="FILE", help="write everything there too")
    parser.add_argument("--out", metavar="FILE", help="draw the table there, as PNG")
    given = {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}
    for flag in ("json", "out"):
        path = Path(given.get(flag, "."))
        if flag in given and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
            raise UsageError(f"--{flag} {path} cannot be written; expected a file in a folder that is there")
    return {"json": None, "out": None, **(QUICK if given["quick"] else FULL), **given}


# ---- what is measured ------------------------------------------------------------------------------------

def measure_all(settings):
    """The whole report, as one JSON-able dict."""
    B, S, h, K = (settings[name] for name in TARGET_SIZE)
    threads, limit, note = bench_measure.blas_threads(THREADS)
    notes = [note] if note else []
    x, dy = bench_measure.upstream_and_input(B, S, D, h)
    layers = [bench_measure.make_layer(name, D, h, K) for name in ("RRALSTM", "LSTM")]
    memory = {type(layer).__name__: bench_measure.bytes_per_step(layer, x, dy) for layer in layers}
    ours = {type(layer).__name__: bench_measure.our_side(layer, x, dy, threads, limit) for layer in layers}
    peers, peer_notes = bench_peers.peers(*layers, x, dy, THREADS)
    peers, differing = agreeing(layers, x, dy, peers)
    sides = [*ours.values(), *peers]
    timings = bench_measure.measure(sides, settings["repeats"], settings["pause"])
    parts, floor = bench_measure.measure_floor(B, S, D, h, threads, limit, settings["repeats"], settings["pause"])
    return {"settings": settings, "environment": environment(), "notes": notes + peer_notes, "differing": differing,
            "table": table(sides, timings, floor, differs_from_target_size(settings)),
            "ways": [{"layer": s.layer, "side": s.name, "way": s.way, **t._asdict()} for s, t in zip(sides, timings)],
            "floor": {"ms": floor.ms, "parts": {name: timing._asdict() for name, timing in parts.items()}},
            "memory": memory, "cost": costs(settings, threads, limit)}


def agreeing(layers, x, dy, peers):
    """(the peers that give minigrad's outputs and gradients, a line for each that does not).

    Compared over the first 100 steps: RRALSTM at its first random weights is chaotic, and over some hundred steps the
    float32 rounding of each side grows until they have little in common (so does each side's distance to float64).
    """
    agree, differing, checked, length = [], [], peers, x.shape[1]
    x, dy = x[:, :CHECKED], dy[:, :CHECKED]
    if x.shape[1] < length:
        checked, _ = bench_peers.peers(*layers, x, dy, THREADS)
    expected = {type(layer).__name__: bench_measure.our_side(layer, x, dy, (), None).result() for layer in layers}
    for side, check in zip(peers, checked):
        name, distance = bench_peers.difference(expected[side.layer], check.result())
        if distance <= bench_peers.TOLERANCE:
            agree.append(side)
        else:
            differing.append(f"{side.layer} by {side.name} ({side.way}) differs from minigrad and is not measured: "
                             f"{name} by {distance:.1e} of its largest entry; at most {bench_peers.TOLERANCE:.0e} "
                             "expected")
    return agree, differing


def differs_from_target_size(settings):
    """Why the targets do not apply, or None."""
    if any(settings[name] != FULL[name] for name in TARGET_SIZE):
        return "another size"
    return f"under {FULL['repeats']} calls" if settings["repeats"] < FULL["repeats"] else None


def table(sides, timings, floor, not_judged):
    """Rows: minigrad's layer, its peers each at its fastest way, the floor; ratios are minigrad's time to theirs."""
    rows = []
    for layer in ("RRALSTM", "LSTM"):
        ways = [(side, timing) for side, timing in zip(sides, timings) if side.layer == layer]
        (_, ours), *_ = ways
        best = {}
        for side, timing in ways:
            if side.name not in best or timing.ms < best[side.name][1].ms:
                best[side.name] = side.way, timing
        for name, (way, timing) in {**best, "floor": ("matrix products alone", floor)}.items():
            row = {"layer": layer, "side": name, "way": way, **timing._asdict()}
            rows.append(row if name == "minigrad" else {**row, **judge(layer, name, ours, timing, not_judged)})
    return rows


def judge(layer, name, ours, theirs, not_judged):
    """The ratio of minigrad's time to another's, its target, and the verdict."""
    ratio, (at_most, aim) = ours.ms / theirs.ms, TARGETS[layer, name]
    if not_judged:
        verdict = f"not judged ({not_judged})"
    elif not (ours.steady and theirs.steady):
        verdict = "unsteady"
    else:
        verdict = "met" if ratio <= at_most else "missed"
    return {"ratio": ratio, "at_most": at_most, "aim": aim, "verdict": verdict}


def costs(settings, threads, limit):
    """RRALSTM's cost over S (with a smaller batch), over B and over K, at one BLAS thread."""
    sizes = {"S": settings["length"], "B": settings["batch_size"], "d": D, "h": settings["hidden"],
             "K": settings["window"]}
    over_S = {**sizes, "B": min(sizes["B"], LONG_BATCH)}
    return [bench_measure.measure_cost(axis, settings[f"over_{axis}"], fixed, threads, limit,
                                       settings["cost_repeats"], settings["pause"] / 5)
            for axis, fixed in [("S", over_S), ("B", sizes), ("K", sizes)]]


# ---- what is shown ---------------------------------------------------------------------------------------

def text_of(report):
    """The report as lines of text."""
    settings = report["settings"]
    lines = ["B={batch_size} S={length} d={d} h={hidden} K={window}, float32, forward + backward, best of at least "
             "{repeats} calls".format(d=D, **settings), *report["notes"], *report["differing"], "",
             f"{'':60}{'ms':>9}  {'threads':8}{'ratio':>6}{'at most':>9}{'aim':>6}  verdict"]
    for row in report["table"]:
        name = row["side"] + (f" ({row['way']})" if row["way"] else "")
        line = f"{row['layer']:10}{name:50}{row['ms']:9.2f}  {row['threads']!s:8}"
        if "ratio" in row:
            line += f"{row['ratio']:6.2f}{row['at_most']:9.2f}{row['aim'] or '':>6}  {row['verdict']}"
        lines.append(line.rstrip())
    parts = ", ".join(f"{name} {part['ms']:.2f}" for name, part in report["floor"]["parts"].items())
    lines += ["", f"floor: {report['floor']['ms']:.2f} ms = {parts}", ""]
    for layer, memory in report["memory"].items():
        lines.append(f"{layer}: bytes a step, sample and unit: cache {memory['cache_bytes']:.1f}, "
                     f"peak of forward + backward {memory['peak_bytes']:.1f}")
    for cost in report["cost"]:
        lines += cost_lines(cost)
    return "\n".join(lines)


def cost_lines(cost):
    """One table of cost against size."""
    axis, fixed = cost["axis"], " ".join(f"{name}={size}" for name, size in cost["fixed"].items())
    lines = ["", f"RRALSTM over {axis} ({fixed}, one thread)",
             f"{axis:>7}{'ms':>11}{'us a step':>12}{'bytes a step, sample and unit: cache':>40}{'peak':>9}"]
    lines += [f"{row[axis]:7}{row['ms']:11.2f}{row['us_per_step']:12.1f}{row['cache_bytes']:40.1f}"
              f"{row['peak_bytes']:9.1f}" for row in cost["rows"]]
    return [*lines, f"line {cost['start_ms']:.3g} ms + {cost['slope_ms']:.3g} ms x {axis}: farthest point off by "
            f"{100 * cost['farthest']:.0f} %: {'linear' if cost['linear'] else 'NOT linear'} "
            f"(at most {100 * bench_measure.STRAIGHT:.0f} %)"]


def draw(report, path):
    """A bar a row of the table, in the colour of its layer."""
    rows = report["table"][::-1]
    figure, axes = new_figure(8.0, 3.6)
    colours = dict(zip(("RRALSTM", "LSTM"), COLOURS))
    bars = axes.barh([f"{row['layer']}, {row['side']}" for row in rows], [row["ms"] for row in rows],
                     color=[colours[row["layer"]] for row in rows])
    axes.margins(x=0.1)
    axes.bar_label(bars, [f"{row['ms']:.1f}" for row in rows], padding=3, fontsize=8)
    axes.set(xlabel="ms, forward + backward", title="B={batch_size}, S={length}, h={hidden}, K={window}".format(
        **report["settings"]))
    save(figure, path)


def main(argv):
    settings = parse(argv)
    if resolve_device(settings["device"]) == "gpu":
        raise UsageError("bench measures on the CPU only, so far; use --device cpu")
    report = measure_all(settings)
    print(text_of(report))
    try:
        if settings["json"]:
            write_atomically(settings["json"], (json.dumps(report, indent=1) + "\n").encode("utf-8"))
        if settings["out"]:
            draw(report, settings["out"])
    except OSError as error:
        raise UsageError(f"the report cannot be written ({error})") from error
    if report["differing"]:
        raise ArithmeticError(f"{len(report['differing'])} peers differ from minigrad (above)")


if __name__ == "__main__":
    sys.exit(run(main))
