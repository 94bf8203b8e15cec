"""Keep finished runs in docs/results/, and make the README's tables and figures from them.

    python tasks/results.py keep runs/adding/... --as rra-K10-seed0     a run into docs/results/adding/: JSON and CSV
    python tasks/results.py table docs/results/adding                   a Markdown table of what is kept there
    python tasks/results.py figure docs/results/adding FILE.png NAME... the test curves of those named, all if none are;
                                                                        runs that differ in the seed are one group

What is kept of a run: its settings, what it ran on (command, commit, versions, processor, threads), its result, and the
evaluations of its log. Checkpoints are not.
"""

from tasks.common import OneLineParser, run

# isort: split
import argparse
import json
import shlex
import sys
from pathlib import Path

from minigrad.checkpoint import CheckpointError, write_atomically
from minigrad.runlog import RunLog, read_log
from tasks.figures import draw_runs
from tasks.run_folder import UsageError, read_config

ROOT = Path(__file__).resolve().parent.parent
HIDDEN_FLAGS = ("--out", "--quiet", "--threads")


def keep(folder, name):
    """Copy a finished run to docs/results/TASK/NAME.json and NAME.csv; returns the JSON's path.

    Raises UsageError for a name that is taken or no name, CheckpointError for a folder that is no finished run.
    """
    folder = Path(folder)
    if Path(name).name != name:
        raise UsageError(f"--as is {name!r}; expected a plain name")
    if not (ROOT / "docs").is_dir():
        raise UsageError(f"{ROOT} has no docs folder; results are kept in a clone of the project")
    if read_config(folder)["compare"]:
        raise UsageError(f"{folder} is a comparison; keep the runs in its folders, {read_config(folder)['compare']}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        columns, rows = read_log(folder / "log.csv")
        ran_on = {**config["ran_on"], "command": short(config["ran_on"]["command"])}
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} is not a finished run ({error})") from error
    ran_on["resumed_with"] = [short(command) for command in config.get("resumed_with", [])]
    place = ROOT / "docs/results" / Path(shlex.split(ran_on["command"])[1]).stem
    if (place / f"{name}.json").exists():
        raise UsageError(f"{place / name}.json is there already; nothing was written")
    place.mkdir(parents=True, exist_ok=True)
    log = RunLog(place / f"{name}.csv")
    log.start(columns)
    for row in rows:
        if row["test_mse"] is not None:
            log.append(row)
    text = json.dumps({"result": result, "ran_on": ran_on, "settings": config["settings"]}, indent=1)
    write_atomically(place / f"{name}.json", f"{text}\n".encode())
    return place / f"{name}.json"


def short(command):
    """The command as a reader would type it: from the project's root, without where it was written."""
    words, kept, skip = shlex.split(command), [], False
    for word in words:
        flag = word.partition("=")[0]
        if skip or flag in HIDDEN_FLAGS:
            skip = not skip and flag in ("--out", "--threads") and "=" not in word
            continue
        kept.append(f"tasks/{Path(word).name}" if word.endswith(".py") else word)
    return shlex.join(kept)


def kept_runs(place, names=None):
    """{name: kept JSON} in a docs/results folder, by name. Raises UsageError for a name that is not there."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(place).glob("*.json"))}
    missing = [name for name in names or () if name not in found]
    if missing or not found:
        raise UsageError(f"{place} has no kept run {missing[0] if missing else ''}".rstrip())
    return {name: found[name] for name in names or found}


def table(place):
    """A Markdown table of the kept runs."""
    lines = ["| run | command | beats the baseline at | test MSE at the end | wall time |", "|---|---|---|---|---|"]
    for name, kept in kept_runs(place).items():
        result = kept["result"]
        step = result["beats_baseline_at"]
        beats = "not" if step is None else f"{step:,}" + ("" if result["beats_baseline_confirmed"] else " *")
        lines.append(f"| {name} | `{kept['ran_on']['command']}` | {beats} | {result['test_mse']:.4f} at "
                     f"{result['steps']:,} | {result['seconds'] / 60:.1f} min |")
    return "\n".join([*lines, "", "\\* fewer than four evaluations followed"])


def figure(place, path, names):
    """The test curves of the kept runs; runs that differ in the seed alone share a colour and a mean."""
    groups, baselines = {}, []
    for name, kept in kept_runs(place, names).items():
        _, rows = read_log(Path(place) / f"{name}.csv")
        settings = kept["settings"]
        baselines.append(kept["result"]["baseline"])
        points = [(row["step"], row["test_mse"]) for row in rows if row["step"]]
        groups.setdefault(describe(settings), []).append(points)
    groups = {f"{name}, {len(runs)} seeds" if len(runs) > 1 else name: runs for name, runs in groups.items()}
    baseline = sum(baselines) / len(baselines)           # each seed has a test set of its own
    how = "the paper's setting" if settings["paper"] else settings["optimizer"]
    draw_runs(path, groups, title=f"Adding problem, S = {settings['length']}, {how}", x_label="iteration",
              y_label="test MSE", horizontal=(baseline, f"always 1: {baseline:.3f}"))


def describe(settings):
    """What a run was, but for its seed: "RRA, K = 10, forget bias 1"."""
    words = [f"RRA, K = {settings['window']}" if settings["model"] == "rra" else settings["model"].upper(),
             f"forget bias {settings['forget_bias']:g}"]
    if settings["offset"] != 2 and settings["model"] == "rra":
        words.append(f"offset {settings['offset']}")
    if settings["init"] != "orthogonal":
        words.append(f"{settings['init']} initialisation")
    if settings["paper"] and settings["lr"] is not None:
        words.append(f"step size {settings['lr']:g}")
    return ", ".join(words)


def main(argv):
    parser = OneLineParser(prog="python tasks/results.py", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("keep", help="copy a finished run into docs/results")
    one.add_argument("folder", help="the run's folder")
    one.add_argument("--as", dest="name", required=True, help="its name there")
    commands.add_parser("table", help="a Markdown table").add_argument("place", help="a folder of kept runs")
    picture = commands.add_parser("figure", help="the test curves as PNG")
    picture.add_argument("place", help="a folder of kept runs")
    picture.add_argument("path", help="the PNG to write")
    picture.add_argument("names", nargs="*", help="of kept runs (default: all)")
    given = parser.parse_args(argv)
    if given.command == "keep":
        print(keep(given.folder, given.name))
    elif given.command == "table":
        print(table(given.place))
    else:
        figure(given.place, given.path, given.names or None)


if __name__ == "__main__":
    sys.exit(run(main))
