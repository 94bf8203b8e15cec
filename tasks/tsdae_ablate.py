"""The ablation of tasks/tsdae.py: one run for each value of noise, ratio, pooling and tying, then a table and a figure.

    python tasks/tsdae_ablate.py                             all of them, 17 runs
    python tasks/tsdae_ablate.py --groups ratio --jobs 2     one of them, two runs at a time
    python tasks/tsdae_ablate.py --resume runs/tsdae/...     make the runs that are missing

All flags of tasks/tsdae.py are taken too. What TSDAE's authors found on STS-B dev: deletion, with 0.6 of the words
deleted, the output at [CLS], encoder and decoder tied (Wang et al. 2021, section 7; the values of their table were not
at hand).

Expect: a folder for each run in runs/tsdae/TIME, and ablation.md, ablation.json, ablation.png.
"""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from minigrad.data import data_folder
from minigrad.tensors import CheckpointError, write_atomically
from minigrad.training import Interrupted
from tasks import frame, tsdae, tsdae_figures
from tasks.frame import UsageError, say, whole
from tasks.frame.flags import defaults_of, settings_of
from tasks.frame.run_folder import open_run_folder, write_json
from tasks.tsdae import LAST

BASE = "base"                                        # as the settings have it: by default deletion, [CLS], tied
GROUPS = {
    "ratio": {f"ratio-{ratio:g}": {"ratio": ratio} for ratio in (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)},
    "noise": {noise: {"noise": noise} for noise in ("delete", "swap", "mask", "replace", "add")},
    "pooling": {f"{pooling}-pooling": {"pooling": pooling} for pooling in ("cls", "mean", "max")},
    "tie": {"tied": {"no_tie": False}, "not-tied": {"no_tie": True}}}
VALUES = ("dev", "test", "best", "loss")             # of a row of the table; all but `best` of the last step
NOT_OF_A_RUN = ("out", "resume", "quiet", "groups", "jobs")


def names_of(groups):
    """The groups in --groups A,B. Raises UsageError for one that there is not, or that comes twice."""
    names = groups.replace(" ", "").split(",")
    for name in names:
        if name not in GROUPS:
            raise UsageError(f"--groups has {name!r}; expected names among {', '.join(GROUPS)}")
        if names.count(name) > 1:
            raise UsageError(f"--groups names {name!r} twice; expected each once")
    return names


def variants(settings):
    """{name: what it changes}, what the settings have themselves coming once, as "base"."""
    found = {BASE: {}}
    for group in names_of(settings["groups"]):
        for name, change in GROUPS[group].items():
            if any(settings[key] != value for key, value in change.items()):
                found[name] = change
    return found


def main(argv):
    """Run every variant in a folder of its own, --jobs at a time, each as a command that can be repeated alone."""
    settings = settings_of(TASK, argv)
    frame.device_of(settings)
    corpus = tsdae.open_corpus(settings)            # before anything is written
    settings["data"] = str(Path(settings["data"] or data_folder()).absolute())
    if not corpus.sts:
        raise UsageError("an ablation compares scores on the STS Benchmark; expected --sts FOLDER, not none")
    out, hold = open_run_folder("tsdae", settings)
    planned = variants(settings)
    say(settings, f"writing to {out}: {len(planned)} runs, {', '.join(planned)}")
    waiting = [name for name in planned if not (out / name / "result.json").exists()]
    running, before = {}, signal.signal(signal.SIGTERM, signal.default_int_handler)      # the runs must end too
    try:
        while waiting or running:
            while waiting and len(running) < settings["jobs"]:
                name = waiting.pop(0)
                running[name] = subprocess.Popen(           # Ctrl-C is for this process alone, which tells them once
                    command_of({**settings, **planned[name]}, out / name), stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, text=True, start_new_session=True)
            for name, process in list(running.items()):
                if process.poll() is not None:
                    finish(settings, out, name, running.pop(name))
            time.sleep(0.2)
    except KeyboardInterrupt:
        for process in running.values():            # they save and end, as this one does
            process.terminate()
            process.communicate()
        raise Interrupted(f"stopped; the runs that were going are saved: continue with --resume {out}") from None
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running.values():
            process.kill()
            process.communicate()
    results = {name: json.loads((out / name / "result.json").read_text(encoding="utf-8")) for name in planned}
    show(settings, {name: {**settings, **planned[name]} for name in planned}, results, out)
    del hold


def command_of(settings, folder):
    """The command line of one run: the settings that are not the defaults."""
    defaults = defaults_of(tsdae.TASK, {})
    command = [sys.executable, str(Path(__file__).with_name("tsdae.py"))]
    if (folder / "config.json").exists():
        return [*command, "--quiet", "--resume", str(folder)]
    for key, value in settings.items():
        if key in NOT_OF_A_RUN or value is None or value is False or value == defaults.get(key):
            continue
        flag = "--" + key.replace("_", "-")
        command.append(flag if value is True else f"{flag}={value}")
    return [*command, "--quiet", "--out", str(folder)]


def finish(settings, out, name, process):
    """Say how a run ended. Raises what it ended with."""
    _, errors = process.communicate()
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        raise UsageError(f"the run {out / name} ended: {last[0].removeprefix('error: ')}")
    try:
        result = json.loads((out / name / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{out / name}: result.json is missing or damaged") from error
    dev, test = ("{:.3f}".format(result["scores"][LAST][part][0]) for part in ("dev", "test"))
    say(settings, f"{name}: Spearman {dev} on dev, {test} on test; {result['seconds']:.0f} s")


# ---- the table -------------------------------------------------------------------------------------------

def group_of(settings):
    """Which group a run belongs to, by how it differs from deletion, [CLS], tied."""
    if settings["noise"] != "delete":
        return "noise"
    if settings["pooling"] != "cls":
        return "pooling"
    return "tie" if settings["no_tie"] else "ratio"


def rows_of(settings, results):
    """[{"group", "label", "ratio", "dev", "test", ...}] of {name: settings} and {name: result}."""
    rows = []
    for name, own in settings.items():
        label = {"noise": f"{own['noise']} {own['ratio']:g}", "pooling": f"{own['pooling']} pooling",
                 "tie": "not tied", "ratio": f"delete {own['ratio']:g}"}[group_of(own)]
        scores = results[name]["scores"]
        rows.append({"group": group_of(own), "label": label, "ratio": own["ratio"],
                     **{part: [scores[LAST][part][0]] for part in ("dev", "test")},
                     "best": [scores["TSDAE"]["test"][0]], "loss": [results[name]["last_loss"]]})
    return rows


def merged(rows):
    """The rows with the same label as one, with the values of all its seeds."""
    found = {}
    for row in rows:
        kept = found.setdefault(row["label"], {**row, **{key: [] for key in VALUES}})
        for key in VALUES:
            kept[key] += row[key]
    return list(found.values())


def table(rows):
    """A Markdown table of rows."""
    lines = ["| | dev | test | test, best checkpoint by dev | loss on held-out sentences |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [", ".join(f"{value:.3f}" for value in row[key]) for key in VALUES]
        lines.append(f"| {row['label']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def show(settings, of_runs, results, out):
    """Print the table, keep it as ablation.md and ablation.json, draw ablation.png."""
    rows = merged(rows_of(of_runs, results))
    name = next(iter(results.values()))["corpus"]["sts"]["test"]
    steps = next(iter(results.values()))["steps"]
    text = f"Spearman after {steps:,} steps, {name}, seed {settings['seed']}\n\n{table(rows)}\n"
    write_atomically(out / "ablation.md", text.encode())
    write_json(out / "ablation.json", rows)
    tsdae_figures.draw_ablation(rows, out / "ablation.png", name)
    print(text, end="", flush=True)
    say(settings, f"figures: {out / 'ablation.png'}")


# ---- the command -----------------------------------------------------------------------------------------

def flags(group):
    tsdae.flags(group)
    group.add_argument("--groups", metavar="A,B", help=f"some of {', '.join(GROUPS)} (default: all)")
    group.add_argument("--jobs", type=whole(1), help="runs at a time (default 1)")


def check(settings, given):
    tsdae.check(settings, given)
    names_of(settings["groups"])


TASK = dataclasses.replace(tsdae.TASK, name="tsdae_ablate", description=__doc__, flags=flags, check=check, commands={},
                           defaults={**tsdae.DEFAULTS, "groups": ",".join(GROUPS), "jobs": 1})

if __name__ == "__main__":
    sys.exit(frame.exit_status(main))
