"""The bench: on the CPU every row is checked, timed side by side with its peers, and judged; on a GPU see gpu.py."""

import itertools
import json

from minigrad.tensors import write_atomically
from tasks.bench import gpu, imdb, layers, measure, report, srupp, tsdae
from tasks.bench.flags import FULL, parse
from tasks.bench.peers import EAGER, compared
from tasks.frame.run_folder import UsageError, environment

TARGETS = {                                          # (row, side): ratio of minigrad's time to its at most, and the aim
    ("RRALSTM", EAGER): (0.55, 0.42), ("RRALSTM", "jax.jit(lax.scan)"): (0.35, None),
    ("LSTM", "torch.nn.LSTM"): (1.3, 1.1), ("IRNN", EAGER): (0.4, None), ("RWA", EAGER): (0.4, None),
    ("URNN", EAGER): (1.0, None), ("SRUpp", EAGER): (0.55, 0.45), ("SRUpp", "official module"): (0.4, None),
    ("TSDAE step", EAGER): (1.2, 0.8), ("TSDAE encode", EAGER): (1.0, None),
    ("IMDB step", EAGER): (0.5, None), ("IMDB RRALSTM", EAGER): (0.5, None)}
LAYER_SIZE = ("batch_size", "length", "hidden")
TARGET_SIZE = {"RRALSTM": (*LAYER_SIZE, "window"), **dict.fromkeys(("LSTM", "IRNN", "RWA", "URNN"), LAYER_SIZE),
               "SRUpp": ("srupp_size",), "TSDAE step": ("tsdae_size",), "TSDAE encode": ("tsdae_size", "tsdae_encoded"),
               "IMDB step": ("imdb_size",), "IMDB RRALSTM": ("imdb_size",)}


def main(argv, description=None):
    settings = parse(argv, description)
    if settings["device"] == "gpu":
        gpu.main(settings)
        return
    found = measure_all(settings)
    print(report.text_of(found))
    try:
        if settings["json"]:
            write_atomically(settings["json"], (json.dumps(found, indent=1) + "\n").encode("utf-8"))
        if settings["out"]:
            report.draw(found, settings["out"])
    except OSError as error:
        raise UsageError(f"the report cannot be written ({error})") from error
    if found["differing"]:
        raise ArithmeticError(f"{len(found['differing'])} peers differ from minigrad (above)")


def measure_all(settings):
    """The whole report, as one JSON-able dict."""
    only = settings["only"]
    found = {"settings": settings, "environment": environment(), "sizes": {}, "notes": [], "differing": [],
             "table": [], "ways": [], "memory": {}, "cost": [], "stepping": None}
    if measure.threadpool_limits is None:
        found["notes"].append("threadpoolctl cannot be imported: minigrad is measured at the number of BLAS threads "
                              "that is set")
    for work in itertools.chain(layers.works(settings), tsdae.works(settings) if "tsdae" in only else (),
                                imdb.works(settings) if "imdb" in only else ()):
        add_work(found, work, settings)
    found["notes"] = list(dict.fromkeys(found["notes"]))
    if not settings["rows_only"]:
        found["cost"] += layers.costs(settings) if "rra" in only else []
        if "srupp" in only:
            found["cost"] += srupp.costs(settings)
            found["stepping"] = srupp.stepping(settings)
    return found


def add_work(found, work, settings):
    """Compare the peers with minigrad, time those that agree, and put both into the report."""
    ours, checked = work.checked or (work.ours, work.peers)
    peers, differing = compared(ours.result(), work.peers, checked)
    sides = [work.ours, *peers]
    timings = measure.measure(sides, settings["repeats"], settings["pause"])
    found["sizes"][work.name] = work.size
    found["notes"] += work.notes
    found["differing"] += differing
    found["ways"] += [{"layer": side.row, "side": side.name, "way": side.way, **timing._asdict()}
                      for side, timing in zip(sides, timings)]
    found["table"] += rows_of(work, sides, timings, not_judged(work.name, settings))
    if work.bytes:
        found["memory"][work.name] = work.bytes


def rows_of(work, sides, timings, not_judged):
    """minigrad's line and one for each peer, at its fastest way, with the ratio to it."""
    best = {}
    for side, timing in zip(sides, timings):
        if side.name not in best or timing.ms < best[side.name][1].ms:
            best[side.name] = side.way, timing
    rows, (_, ours) = [], best["minigrad"]
    for name, (way, timing) in best.items():
        row = {"layer": work.name, "side": name, "way": way, **timing._asdict()}
        if work.sentences:
            row["per_second"] = 1e3 * work.sentences / timing.ms
        rows.append(row if name == "minigrad" else {**row, **judge(work.name, name, ours, timing, not_judged)})
    return rows


def judge(row, side, ours, theirs, not_judged):
    """The ratio of minigrad's time to another's, its target, and the verdict."""
    ratio, (at_most, aim) = ours.ms / theirs.ms, TARGETS.get((row, side), (None, None))
    verdict = measure.verdict(ratio, at_most, not_judged, ours.steady and theirs.steady)
    return {"ratio": ratio, "at_most": at_most, "aim": aim, "verdict": verdict}


def not_judged(row, settings):
    """Why a row's targets do not apply, or None."""
    if any(settings[name] != FULL[name] for name in TARGET_SIZE[row]):
        return "another size"
    return f"under {FULL['repeats']} calls" if settings["repeats"] < FULL["repeats"] else None
