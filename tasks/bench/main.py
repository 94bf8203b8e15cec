"""How fast the recurrent layers and the models are: minigrad beside PyTorch and JAX, and beside the products alone.

    python tasks/bench.py                        the tables of the README, some minutes on 2 cores
    python tasks/bench.py --json bench.json --out bench.png
    python tasks/bench.py --quick                small sizes, some seconds: does everything run and agree?
    python tasks/bench.py --only srupp           some of rra, lstm, rnns, srupp, tsdae, imdb
    python tasks/bench.py --rows-only            the layers beside their peers, without the tables of cost
    python tasks/bench.py -S 400 --hidden 256    another size (targets are judged at the default size only)
    python tasks/bench.py --device gpu --json bench.json --out bench.png --seconds 240       on a GPU: see below
    python tasks/bench.py --estimate             what its rows cost by their sizes: no GPU is needed, nothing measured

Forward + backward in float32, with the gradients of x and of all parameters, all sides in this one process: RRALSTM
against the same equations in PyTorch eager and in jax.jit(lax.scan), LSTM against torch.nn.LSTM; IRNN, RWA and URNN
("rnns") against their equations in PyTorch eager, IRNN against torch.nn.RNN as well; SRUpp against its equations in
PyTorch eager and the official module (pip install sru==3.0.0.dev6; it compiles C++ when it is imported). Of TSDAE a
whole training step (forward, backward, AdamW), and the embeddings of sentences of ids; of IMDB a whole training step of
the classifier with RRALSTM (ids, mask, forward, backward, Adadelta), and its RRALSTM alone ("IMDB RRALSTM"): against
the same in PyTorch eager. A peer that is not installed is left out, with a line that says so. Before anything is timed,
every peer must give minigrad's outputs and gradients, learned first states among them (over the first 100 steps of
RRALSTM, LSTM, IRNN and RWA, 25 of URNN; a training step: also how far every parameter moves); one that does not gets no
figure, and the exit status is 1.

Each side runs in alternating blocks with a pause before, at 1 and at 2 BLAS threads, and counts with its minimum over
at least 15 calls; a ratio is judged "unsteady" when the median of either side exceeds twice its minimum: measure
again on a quieter machine. The floor is the layer's matrix products alone, of URNN with its Fourier transforms.

With --device gpu other rows at larger sizes, in the order of their importance (--only: sru, lstm, rra, srupp,
attention, tsdae, mnist): the two launches of SRU's recurrence, LSTM beside cuDNN's, RRALSTM, SRU and SRU++ beside
PyTorch eager and torch.compile, softmax attention, a training step of TSDAE, and one of tasks/pixel_mnist.py --paper
with RRA, by which an epoch is told. Times are medians between CUDA events; the card's rates (a copy, a float32 product,
a launch) are measured first, and the floor is what bytes and flops of a row take at these. A row that fails is noted
and the others go on; nothing is begun after --seconds; --json is rewritten after every row. Exit status 1: a row of
minigrad's own failed, or a peer differs.

Expect: the table, the floor's parts, bytes a step and unit, cost over S, B and K and, for SRU and SRU++, over L; what a
byte costs an SRU++ model at the beginning and at the end of a text; with --json all of it as one file. On a GPU:
the card, its rates, and a block of lines a row.
"""

import os
import sys

from tasks.frame.threads import set_blas_threads

THREADS = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
set_blas_threads(max(THREADS))     # NumPy's BLAS can be limited later, not extended; tasks.frame.common starts it with 1

import json  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import numpy as np  # noqa: E402, F401 - before tasks.frame.common

# isort: split
from minigrad.tensors import write_atomically  # noqa: E402
from tasks.bench import (  # noqa: E402
    flags as bench_flags,
    gpu as bench_gpu,
    imdb as bench_imdb,
    measure as bench_measure,
    peers as bench_peers,
    report as bench_report,
    rnns as bench_rnns,
    rnns_peers as bench_rnns_peers,
    srupp as bench_srupp,
    srupp_peers as bench_srupp_peers,
    tsdae as bench_tsdae,
)
from tasks.bench.flags import FULL, QUICK  # noqa: E402, F401
from tasks.bench.peers import compared  # noqa: E402
from tasks.frame.common import run  # noqa: E402
from tasks.frame.run_folder import UsageError, environment  # noqa: E402

D = 2                                                # width of x, as in the adding problem
CHECKED = {"adding": 100, "IRNN": 100, "RWA": 100, "URNN": 25, "srupp": 512}          # steps compared, at most
LONG_BATCH = 16                                      # of the table over S, at most
PEERS = [*bench_peers.PEERS, *bench_rnns_peers.PEERS, *bench_srupp_peers.PEERS]
TARGETS = {                                          # (layer, side): ratio of minigrad to it at most, and the aim
    ("RRALSTM", "PyTorch eager"): (0.55, 0.42), ("RRALSTM", "jax.jit(lax.scan)"): (0.35, None),
    ("RRALSTM", "floor"): (2.0, None), ("LSTM", "torch.nn.LSTM"): (1.3, 1.1), ("LSTM", "floor"): (1.7, None),
    ("IRNN", "PyTorch eager"): (0.4, None), ("IRNN", "torch.nn.RNN"): (None, None), ("IRNN", "floor"): (None, None),
    ("RWA", "PyTorch eager"): (0.4, None), ("RWA", "floor"): (None, None),
    ("URNN", "PyTorch eager"): (1.0, None), ("URNN", "floor"): (None, None),
    ("SRUpp", "PyTorch eager"): (0.55, 0.45), ("SRUpp", "official module"): (0.4, None),
    ("SRUpp", "floor"): (None, None), ("TSDAE step", "PyTorch eager"): (1.2, 0.8),
    ("TSDAE step", "floor"): (None, None), ("TSDAE encode", "PyTorch eager"): (1.0, None),
    ("IMDB step", "PyTorch eager"): (0.5, None), ("IMDB step", "floor"): (None, None),
    ("IMDB RRALSTM", "PyTorch eager"): (0.5, None), ("IMDB RRALSTM", "floor"): (None, None)}
TARGET_SIZE = {"adding": ("batch_size", "length", "hidden", "window"), "srupp": ("srupp_size",),
               **dict.fromkeys(bench_rnns.NAMES, ("batch_size", "length", "hidden")),
               **dict.fromkeys((bench_imdb.STEP, bench_imdb.LAYER), ("imdb_size",)),
               "TSDAE step": ("tsdae_size",), "TSDAE encode": ("tsdae_size", "tsdae_encoded")}


def parse(argv):
    """The settings of this measurement; see `--help`."""
    return bench_flags.parse(argv, __doc__)


# ---- what is measured ------------------------------------------------------------------------------------

class Family(NamedTuple):
    """Layers that are measured at one size and have one floor."""

    name: str               # adding, srupp, or that of its one layer
    size: str               # in words
    layers: list
    x: Any
    dy: Any
    products: dict          # of the floor: {name: function}
    floor: str = bench_measure.PRODUCTS


def families(settings):
    """The families that --only asks for."""
    B, S, h, K = (settings[name] for name in TARGET_SIZE["adding"])
    L, batch, d, p = settings["srupp_size"]
    recurrent = [name for part, name in (("rra", "RRALSTM"), ("lstm", "LSTM")) if part in settings["only"]]
    asked_for = []
    if recurrent:
        asked_for.append(Family(
            "adding", f"B={B} S={S} d={D} h={h} K={K}", [bench_measure.make_layer(name, D, h, K) for name in recurrent],
            *bench_measure.upstream_and_input(B, S, D, h), bench_measure.floor_products(B, S, D, h)))
    for name in bench_rnns.NAMES if "rnns" in settings["only"] else []:
        asked_for.append(Family(
            name, f"B={B} S={S} d={D} h={h}", [bench_rnns.make_layer(name, D, h)],
            *bench_rnns.upstream_and_input(name, B, S, D, h), bench_rnns.floor_products(name, B, S, D, h),
            bench_rnns.FLOORS.get(name, bench_measure.PRODUCTS)))
    if "srupp" in settings["only"]:
        asked_for.append(Family(
            "srupp", f"L={L} B={batch} d=h={d} d'={p}", [bench_srupp.make_srupp(d, p)],
            *bench_srupp.upstream_and_input(L, batch, d), bench_srupp.floor_products(L, batch, d, p)))
    return asked_for


def measure_all(settings):
    """The whole report, as one JSON-able dict."""
    threads, limit, note = bench_measure.blas_threads(THREADS)
    report = {"settings": settings, "environment": environment(), "sizes": {}, "notes": [note] if note else [],
              "differing": [], "table": [], "ways": [], "floor": {}, "memory": {}, "cost": [], "stepping": None}
    for family in families(settings):
        add_rows(report, family, settings, threads, limit)
    for part, module in (("tsdae", bench_tsdae), ("imdb", bench_imdb)):
        if part in settings["only"]:
            add_works(report, module, settings, threads, limit)
    report["notes"] = list(dict.fromkeys(report["notes"]))
    if settings["rows_only"]:
        return report
    if "rra" in settings["only"]:
        report["cost"] += costs(settings, threads, limit)
    if "srupp" in settings["only"]:
        report["cost"] += bench_srupp.costs(settings, threads, limit)
        report["stepping"] = bench_srupp.stepping(settings, limit(threads[0]))
    return report


def add_rows(report, family, settings, threads, limit):
    """Measure a family beside its peers and put it into the report."""
    layers, x, dy = family.layers, family.x, family.dy
    for layer in layers:
        name = type(layer).__name__
        report["memory"][name] = bench_measure.bytes_per_step(layer, x, dy, bench_rnns.COLUMNS.get(name, 1))
    sides = [bench_measure.our_side(layer, x, dy, threads, limit) for layer in layers]
    peers, notes = bench_peers.peers(PEERS, layers, x, dy, THREADS)
    peers, differing = agreeing(family, peers)
    report["notes"] += notes
    report["differing"] += differing
    add_measured(report, family, [type(layer).__name__ for layer in layers], sides + peers, settings, threads, limit)


def add_works(report, module, settings, threads, limit):
    """Measure a module's works (a training step, encoding ...) beside PyTorch's."""
    works, notes = module.works(settings, threads, limit, THREADS)
    report["notes"] += notes
    for work in works:
        ours, = work.sides
        peers, differing = compared({work.name: ours.result()}, work.peers, work.peers)
        report["differing"] += differing
        rows = add_measured(report, work, [work.name], [ours, *peers], settings, threads, limit)
        for row in rows if work.sentences else []:
            row["per_second"] = 1e3 * work.sentences / row["ms"]


def add_measured(report, measured, layers, sides, settings, threads, limit):
    """Time these sides of a family or a work, whose `layers` they are by name, and its floor; the rows of the table."""
    repeats, pause = settings["repeats"], settings["pause"]
    timings, floor = bench_measure.measure(sides, repeats, pause), None
    if measured.products:
        floor_parts, floor = bench_measure.measure_floor(measured.products, threads, limit, repeats, pause)
        report["floor"][measured.name] = {"ms": floor.ms, "parts": {name: timing._asdict()
                                                                    for name, timing in floor_parts.items()}}
    report["sizes"][measured.name] = {"size": measured.size, "layers": layers}
    floor = floor and (measured.floor, floor)
    rows = table(layers, sides, timings, floor, differs_from_target_size(settings, measured.name))
    report["table"] += rows
    report["ways"] += [{"layer": side.layer, "side": side.name, "way": side.way, **timing._asdict()}
                       for side, timing in zip(sides, timings)]
    return rows


def agreeing(family, peers):
    """(the peers that give minigrad's outputs and gradients, a line for each that does not).

    They are compared over the first steps (CHECKED): RRALSTM at its first random weights is chaotic, and over some
    hundred steps the float32 rounding of each side grows until they have little in common (so does each side's distance
    to float64); URNN's grows faster, where modReLU turns a z near zero.
    """
    checked, steps = peers, CHECKED[family.name]
    x, dy = family.x[:, :steps], family.dy[:, :steps]
    if x.shape[1] < family.x.shape[1]:
        checked, _ = bench_peers.peers(PEERS, family.layers, x, dy, THREADS)
    ours = [bench_measure.our_side(layer, x, dy, (), None) for layer in family.layers]
    return compared({side.layer: side.result() for side in ours}, peers, checked)


def differs_from_target_size(settings, family):
    """Why a family's targets do not apply, or None."""
    if any(settings[name] != FULL[name] for name in TARGET_SIZE[family]):
        return "another size"
    return f"under {FULL['repeats']} calls" if settings["repeats"] < FULL["repeats"] else None


def table(layers, sides, timings, floor, not_judged):
    """Rows: minigrad's layer, its peers each at its fastest way, a floor (its name, timing) if any; with ratios."""
    rows = []
    for layer in layers:
        ways = [(side, timing) for side, timing in zip(sides, timings) if side.layer == layer]
        (_, ours), *_ = ways
        best = {}
        for side, timing in ways:
            if side.name not in best or timing.ms < best[side.name][1].ms:
                best[side.name] = side.way, timing
        if floor:
            best["floor"] = floor
        for name, (way, timing) in best.items():
            row = {"layer": layer, "side": name, "way": way, **timing._asdict()}
            rows.append(row if name == "minigrad" else {**row, **judge(layer, name, ours, timing, not_judged)})
    return rows


def judge(layer, name, ours, theirs, not_judged):
    """The ratio of minigrad's time to another's, its target, and the verdict."""
    ratio, (at_most, aim) = ours.ms / theirs.ms, TARGETS[layer, name]
    verdict = bench_measure.verdict(ratio, at_most, not_judged, ours.steady and theirs.steady)
    return {"ratio": ratio, "at_most": at_most, "aim": aim, "verdict": verdict}


def costs(settings, threads, limit):
    """RRALSTM's cost over S (with a smaller batch), over B and over K, at one BLAS thread."""
    sizes = {"S": settings["length"], "B": settings["batch_size"], "d": D, "h": settings["hidden"],
             "K": settings["window"]}
    over_S = {**sizes, "B": min(sizes["B"], LONG_BATCH)}

    def make(size):
        B, S, d, h, K = (size[name] for name in ("B", "S", "d", "h", "K"))
        return bench_measure.make_layer("RRALSTM", d, h, K), *bench_measure.upstream_and_input(B, S, d, h)
    return [bench_measure.measure_cost("RRALSTM", axis, settings[f"over_{axis}"], fixed, make, threads, limit,
                                       settings["cost_repeats"], settings["pause"] / 5)
            for axis, fixed in [("S", over_S), ("B", sizes), ("K", sizes)]]


def main(argv):
    settings = parse(argv)
    if settings["device"] == "gpu":
        (bench_gpu.estimate if settings["estimate"] else bench_gpu.main)(settings)
        return
    report = measure_all(settings)
    print(bench_report.text_of(report))
    try:
        if settings["json"]:
            write_atomically(settings["json"], (json.dumps(report, indent=1) + "\n").encode("utf-8"))
        if settings["out"]:
            bench_report.draw(report, settings["out"])
    except OSError as error:
        raise UsageError(f"the report cannot be written ({error})") from error
    if report["differing"]:
        raise ArithmeticError(f"{len(report['differing'])} peers differ from minigrad (above)")


if __name__ == "__main__":
    sys.exit(run(main))
