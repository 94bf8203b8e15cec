"""Keep finished runs in docs/results/, and make tables and figures from them.

    python -m tasks.frame.results keep runs/adding/... --as rra-K10-seed0      a run to docs/results/adding: JSON, CSV
    python -m tasks.frame.results table docs/results/adding                    a Markdown table of what is kept there
    python -m tasks.frame.results figure docs/results/adding FILE.png NAME...  the curves of those named, or of all;
                                                                               those that differ in the seed are a group

What is kept of a run: its settings, what it ran on (command, commit, versions, processor, threads), its result, and the
evaluations of its log (with --whole-log all of it). Checkpoints are not. `figure --x seconds` draws over time instead
of iterations, `figure --y grad_norm` another column of the log. How a task's runs are shown, its `TASK.shown` says.
"""

import importlib
import json
import shlex
import sys
from pathlib import Path

from minigrad.tensors import CheckpointError, write_atomically
from minigrad.training import RunLog, read_log
from tasks.frame.figures import draw_runs
from tasks.frame.flags import OneLineParser, changed
from tasks.frame.run import exit_status
from tasks.frame.run_folder import UsageError, read_config

ROOT = Path(__file__).resolve().parents[2]
HIDDEN_FLAGS = ("--out", "--quiet", "--threads", "--data", "--sts")
WITH_A_VALUE = ("--out", "--threads", "--data", "--sts")


# ---- the task of a run -----------------------------------------------------------------------------------

def task_of(command):
    """The Task in whose script a command ran. Raises UsageError where there is none of that name."""
    words = shlex.split(command)
    name = words[2].removeprefix("tasks.") if words[1] == "-m" else Path(words[1]).stem
    try:
        return importlib.import_module(f"tasks.{name}").TASK
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the command {command!r} is of no task: there is no tasks/{name}.py with a TASK") from error


def describe(task, settings):
    """What a run was, but for its seed: "RRA, K = 5", and what else differs from the task's defaults or the paper's."""
    aside = {task.variant, *task.shown.in_label}
    aside |= {key for key, names in task.flags_of.items() if settings.get(task.variant) not in names}
    words = [task.label_of({**task.defaults, **settings})]       # a run may be older than a setting
    words += ["the paper's setting"] if settings.get("paper") else []
    for key in changed(settings, task.defaults, task.paper):
        if key not in aside:
            value, name = settings[key], key.replace("_", " ")
            shown = f"{value:g}" if isinstance(value, float) else value
            words.append(name if value is True else f"{name} {shown}")
    return ", ".join(words)


def metric_cells(task):
    """The columns of a table where the task names none."""
    curve = task.curve_of(None)
    return {f"{curve.y_label} at the end": lambda kept: f"{kept['result'][curve.metric]:.4g}",
            "best": lambda kept: f"{kept['result']['best']['value']:.4g}",
            "steps": lambda kept: f"{kept['result']['steps']:,}"}


# ---- keeping ---------------------------------------------------------------------------------------------

def keep(folder, name, whole_log=False):
    """Copy a finished run to docs/results/TASK/NAME.json and NAME.csv; returns the JSON's path.

    Raises UsageError for a name that is taken or no name, CheckpointError for a folder that is no finished run.
    """
    folder = Path(folder)
    if Path(name).name != name or not name.strip("."):
        raise UsageError(f"--as is {name!r}; expected a plain name")
    if not (ROOT / "docs").is_dir():
        raise UsageError(f"{ROOT} has no docs folder; results are kept in a clone of the project")
    config = read_config(folder)
    compared = config.get("compare")
    if compared:
        raise UsageError(f"{folder} is a comparison; keep the runs in its folders, {compared}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        columns, rows = read_log(folder / "log.csv")
        ran_on = {**config["ran_on"], "command": short(config["ran_on"]["command"])}
        task = task_of(ran_on["command"])
        metric = task.curve_of(None).metric
        if rows[-1]["step"] != result["steps"]:                  # it was resumed and has not come to its end
            raise ValueError(f"result.json is of step {result['steps']}, log.csv ends at {rows[-1]['step']}")
        if "text" in result:                                     # found under --data, or without it
            ran_on["command"] += f" --data {shlex.quote(result['text']['name'])}"
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{folder} is not a finished run ({error})") from error
    ran_on["resumed_with"] = [short(command) for command in config.get("resumed_with", [])]
    place = ROOT / "docs/results" / task.name
    if (place / f"{name}.json").exists():
        raise UsageError(f"{place / name}.json is there already; nothing was written")
    place.mkdir(parents=True, exist_ok=True)
    log = RunLog(place / f"{name}.csv")
    log.start(columns)
    for row in rows:
        if whole_log or row[metric] is not None:
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
            skip = not skip and flag in WITH_A_VALUE and "=" not in word
            continue
        kept.append(f"tasks/{Path(word).name}" if word.endswith(".py") else word)
    return shlex.join(kept)


def kept_runs(place, names=None):
    """{name: kept JSON} in a docs/results folder, by name. Raises UsageError for a name not there, and for no JSON."""
    found = {}
    for path in sorted(Path(place).glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path}: damaged, or no JSON ({error})") from error
    missing = [name for name in names or () if name not in found]
    if missing or not found:
        raise UsageError(f"{place} has no kept run {missing[0] if missing else ''}".rstrip())
    return {name: found[name] for name in names or found}


# ---- showing ---------------------------------------------------------------------------------------------

def task_of_all(runs):
    return task_of(next(iter(runs.values()))["ran_on"]["command"])


def table(place):
    """A Markdown table of the kept runs."""
    runs = kept_runs(place)
    task = task_of_all(runs)
    what = {"what": lambda kept: describe(task, kept["settings"])} if task.shown.what else {}
    cells = {**what, **(task.shown.columns or metric_cells(task))}
    columns = ["run", "command", *cells, "wall time"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, kept in runs.items():
        row = [name, f"`{kept['ran_on']['command']}`", *(cell(kept) for cell in cells.values()),
               f"{kept['result']['seconds'] / 60:.1f} min"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", task.shown.note]).rstrip()


def figure(place, path, names, x="step", y=None):
    """The curves of the kept runs; runs that differ in the seed alone share a colour and a mean.

    y: a column of their logs, by default the evaluations'. Raises UsageError for one that a run has not.
    """
    runs = kept_runs(place, names)
    task, groups, seeds = task_of_all(runs), {}, {}
    curve = task.curve_of(None)
    y = y or curve.metric
    for name, kept in runs.items():
        columns, rows = read_log(Path(place) / f"{name}.csv")
        if y not in columns:
            raise UsageError(f"--y is {y!r}; expected a column of {name}'s log: {', '.join(columns)}")
        points = [(row[x], row[y]) for row in rows if row["step"] and row[y] is not None]
        group = describe(task, kept["settings"])
        groups.setdefault(group, []).append(points)
        seeds.setdefault(group, set()).add(kept["settings"]["seed"])
    groups = {f"{name}{how_many(len(curves), len(seeds[name]))}": curves for name, curves in groups.items()}
    baselines = [kept["result"]["baseline"] for kept in runs.values() if "baseline" in kept["result"]]
    horizontal = None
    if baselines and y == curve.metric:                          # each seed has a test set of its own
        baseline = sum(baselines) / len(baselines)
        horizontal = (baseline, f"{curve.baseline_name}: {baseline:.3f}")
    newest = {**task.defaults, **list(runs.values())[-1]["settings"]}
    draw_runs(path, groups, title=curve.title(newest), x_label={"step": "iteration"}.get(x, x),
              y_label=curve.y_label if y == curve.metric else y.replace("_", " "), horizontal=horizontal,
              log_y=y == "grad_norm", in_step=x == "step")


def how_many(runs, seeds):
    """", 3 seeds"; ", 3 runs" where some have the same seed: they differ in something else, the commit say."""
    return "" if runs == 1 else f", {runs} {'seeds' if runs == seeds else 'runs'}"


def main(argv):
    parser = OneLineParser("python -m tasks.frame.results", __doc__)
    commands = parser.add_subparsers(dest="command", required=True,
                                     parser_class=lambda **options: OneLineParser(description=None, **options))
    one = commands.add_parser("keep", help="copy a finished run into docs/results")
    one.add_argument("folder", help="the run's folder")
    one.add_argument("--as", dest="name", required=True, help="its name there")
    one.add_argument("--whole-log", action="store_true", help="with the log's rows between the evaluations")
    commands.add_parser("table", help="a Markdown table").add_argument("place", help="a folder of kept runs")
    picture = commands.add_parser("figure", help="the test curves as PNG")
    picture.add_argument("place", help="a folder of kept runs")
    picture.add_argument("path", help="the PNG to write")
    picture.add_argument("names", nargs="*", help="of kept runs (default: all)")
    picture.add_argument("--x", choices=["step", "seconds"], default="step", help="default step")
    picture.add_argument("--y", metavar="COLUMN", help="of the logs (default: the evaluations')")
    given = parser.parse_args(argv)
    if given.command == "keep":
        print(keep(given.folder, given.name, given.whole_log))
    elif given.command == "table":
        print(table(given.place))
    else:
        figure(given.place, given.path, given.names or None, given.x, given.y)


if __name__ == "__main__":
    sys.exit(exit_status(main))
