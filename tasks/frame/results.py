"""Keep finished runs in docs/results/, and make the README's tables and figures from them.

    python tasks/results.py keep runs/adding/... --as rra-K10-seed0     a run into docs/results/adding/: JSON and CSV
    python tasks/results.py table docs/results/adding                   a Markdown table of what is kept there
    python tasks/results.py figure docs/results/adding FILE.png NAME... the test curves of those named, all if none are;
                                                                        runs that differ in the seed are one group

What is kept of a run: its settings, what it ran on (command, commit, versions, processor, threads), its result, and the
evaluations of its log (with --whole-log all of it). Checkpoints are not. `figure --x seconds` draws over time instead
of iterations, `figure --y grad_norm` another column of the log.
"""

from tasks.frame.common import SHARED_DEFAULTS, OneLineParser, run

# isort: split
import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from minigrad.tensors import CheckpointError, write_atomically
from minigrad.training.runlog import RunLog, read_log
from models.cells import label
from tasks import char_lm, imdb, imdb_linear, pixel_mnist, tsdae
from tasks.frame.figures import draw_runs
from tasks.frame.run_folder import UsageError, read_config

ROOT = Path(__file__).resolve().parent.parent
HIDDEN_FLAGS = ("--out", "--quiet", "--threads", "--data", "--sts")
WITH_A_VALUE = ("--out", "--threads", "--data", "--sts")


# ---- what differs between tasks --------------------------------------------------------------------------


class Kind(NamedTuple):
    """How the kept runs of a task are shown; `kept` is a run's JSON."""

    metric: str                 # the column of the log that its evaluations have
    y_label: str
    columns: tuple              # of the table, but for run, command and wall time
    cells: Callable             # cells(kept) -> [str], one a column
    note: str                   # under the table
    describe: Callable          # describe(settings) -> what a run was, but for its seed
    title: Callable             # title(kept) -> the figure's
    baseline: Callable = lambda kept: None


def adding_cells(kept):
    result = kept["result"]
    step = result["beats_baseline_at"]
    beats = "not" if step is None else f"{step:,}" + ("" if result["beats_baseline_confirmed"] else " *")
    return [beats, f"{result['test_mse']:.4f} at {result['steps']:,}"]


def adding_title(kept):
    settings = kept["settings"]
    how = "the paper's setting" if settings["paper"] else settings["optimizer"]
    return f"Adding problem, S = {settings['length']}, {how}"


def describe_adding(settings):
    """What a run was, but for its seed: "RRA, K = 10, forget bias 1"."""
    words = [label(settings["model"], settings["window"])]
    if settings["model"] in ("rra", "lstm"):
        words.append(f"forget bias {settings['forget_bias']:g}")
    if settings["offset"] != 2 and settings["model"] == "rra":
        words.append(f"offset {settings['offset']}")
    if settings["init"] != "orthogonal":
        words.append(f"{settings['init']} initialisation")
    if settings["paper"] and settings["lr"] is not None:
        words.append(f"step size {settings['lr']:g}")
    return ", ".join(words)


def char_lm_cells(kept):
    result = kept["result"]
    return [char_lm.LABELS[result["layer"]], str(result["width"]), f"{result['parameters']:,}",
            f"{result['valid_bpc']:.3f}", f"{result['test_bpc']:.3f}", f"{result['steps']:,}"]


def describe_char_lm(settings):
    """What a run was, but for its seed: "SRU++, d = 256", and what else differs from the defaults."""
    layer = settings["layer"]
    words, keys = [char_lm.label(layer, settings)], ["unroll", "batch_size", "optimizer", "lr", "schedule", "dropout"]
    keys += ["lstm_layers"] if layer == "lstm" else ["layers", "highway_bias"]
    if layer == "srupp":
        keys += ["heads", "memory", "window", "attention_every", "attention_last", "attention_dropout"]
    for key in keys:
        if settings[key] != char_lm.DEFAULTS[key]:
            words.append(f"{key.replace('_', ' ')} {settings[key]}")
    if settings["clip_norm"] != char_lm.DEFAULTS["clip_norm"]:
        words.append(f"clipped at {settings['clip_norm']:g}" if settings["clip_norm"] else "no clipping")
    return ", ".join(words)


def tsdae_cells(kept):
    settings, result = kept["settings"], kept["result"]
    scores = result["scores"]
    return [describe_tsdae(settings), *(f"{scores['TSDAE'][part][0]:.3f}" for part in ("dev", "test")),
            f"{scores['TSDAE, whitened']['test'][0]:.3f}", f"{scores['untrained encoder']['test'][0]:.3f}",
            f"{result['held_out_loss']:.2f}", f"{result['steps']:,}"]


def describe_tsdae(settings):
    """What a run was, but for its seed: "delete 0.6, cls, tied", and what else differs from the defaults."""
    words = [f"{settings['noise']} {settings['ratio']:g}", settings["pooling"]]
    words.append("untied" if settings["no_tie"] else "tied")
    for key in tsdae.DESCRIBED:
        if settings.get(key, tsdae.DEFAULTS[key]) != tsdae.DEFAULTS[key]:        # a run may be older than a setting
            words.append(f"{key.replace('_', ' ')} {settings[key]}")
    return ", ".join(words)


def classify_cells(kept):
    result, metric = kept["result"], "test_error" if "test_error" in kept["result"] else "test_accuracy"
    best = result.get("best", {}).get("value")
    return [describe_classify(kept["settings"]), f"{result[metric]:.2%}", f"{result['epochs']:.3g}",
            "" if best is None else f"{best:.2%}"]


def describe_classify(settings):
    """What a run was, but for its seed: "RRA, K = 5", and what else differs from the task's defaults or the paper's."""
    task = pixel_mnist if "stride" in settings else imdb
    usual = {**SHARED_DEFAULTS, **task.DEFAULTS, **(task.PAPER if settings["paper"] else {})}
    name = settings["model"]
    words = [name.upper() if name in imdb_linear.MODELS else label(name, settings["window"])]
    words += [key for key in ("permuted", "rows") if settings.get(key)]
    words += ["the paper's setting"] if settings["paper"] else []
    for key in ("stride", "hidden", "embedding", "vocab", "readout", "dropout", "max_length", "batch_size", "optimizer",
                "rmsprop", "lr", "eps", "clip_norm", "clip_value", "forget_bias", "offset", "normalize", "init",
                "train_size", "test_size", "permutation_seed", "permutation"):
        if key in usual and settings[key] not in (usual[key], None):
            words.append(f"{key.replace('_', ' ')} {settings[key]}")
    return ", ".join(words)


def pixel_mnist_title(kept):
    data = kept["result"]["data"]
    part, all_of_them = data["part"], data["test"]
    return f"MNIST, {data['what']}\n{kept['settings']['hidden']} units; {part:,} of {all_of_them:,} test images"


def imdb_title(kept):
    part, all_of_them = kept["result"]["data"]["part"], kept["result"]["data"]["test"]
    return f"IMDB, {kept['settings']['hidden']} units; {part:,} of {all_of_them:,} test reviews"


CLASSIFIED = ("what", "{} at the end", "epochs", "best, by the test set itself")
KINDS = {
    "imdb": Kind("test_error", "test error", tuple(text.format("test error") for text in CLASSIFIED), classify_cells,
                 "on all test reviews", describe_classify, imdb_title),
    "pixel_mnist": Kind("test_accuracy", "test accuracy", tuple(text.format("test accuracy") for text in CLASSIFIED),
                        classify_cells, "on all test images", describe_classify, pixel_mnist_title),
    "adding": Kind("test_mse", "test MSE", ("beats the baseline at", "test MSE at the end"), adding_cells,
                   "\\* fewer than four evaluations followed", describe_adding, adding_title,
                   lambda kept: kept["result"]["baseline"]),
    "char_lm": Kind("valid_bpc", "validation, bits per character",
                    ("layer", "d", "parameters", "validation BPC", "test BPC", "steps"), char_lm_cells,
                    "BPC of the best checkpoint on the whole of both parts", describe_char_lm,
                    lambda kept: kept["result"]["text"]["name"]),
    "tsdae": Kind("dev_spearman", "STS dev, Spearman",
                  ("what", "dev", "test", "test, whitened", "test, untrained", "held-out loss", "steps"), tsdae_cells,
                  "Spearman of the best checkpoint by dev", describe_tsdae,
                  lambda kept: kept["result"]["corpus"]["sts"]["dev"])}


def task_of(command):
    """The task's name in a command as it is kept."""
    return Path(shlex.split(command)[1]).stem


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
    if config.get("ablate"):
        raise UsageError(f"{folder} is an ablation; keep the runs in its folders")
    compared = config.get("compare")
    if compared:
        raise UsageError(f"{folder} is a comparison; keep the runs in its folders, {compared}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        columns, rows = read_log(folder / "log.csv")
        ran_on = {**config["ran_on"], "command": short(config["ran_on"]["command"])}
        metric = KINDS[task_of(ran_on["command"])].metric
        if rows[-1]["step"] != result["steps"]:                  # it was resumed and has not come to its end
            raise ValueError(f"result.json is of step {result['steps']}, log.csv ends at {rows[-1]['step']}")
        if "text" in result:                                     # found under --data, or without it
            ran_on["command"] += f" --data {shlex.quote(result['text']['name'])}"
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{folder} is not a finished run ({error})") from error
    ran_on["resumed_with"] = [short(command) for command in config.get("resumed_with", [])]
    place = ROOT / "docs/results" / task_of(ran_on["command"])
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

def kind_of(runs):
    """The Kind of the task that all of the kept runs are of."""
    return KINDS[task_of(next(iter(runs.values()))["ran_on"]["command"])]


def table(place):
    """A Markdown table of the kept runs."""
    runs = kept_runs(place)
    kind = kind_of(runs)
    columns = ["run", "command", *kind.columns, "wall time"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, kept in runs.items():
        cells = [name, f"`{kept['ran_on']['command']}`", *kind.cells(kept), f"{kept['result']['seconds'] / 60:.1f} min"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", kind.note])


def figure(place, path, names, x="step", y=None):
    """The curves of the kept runs; runs that differ in the seed alone share a colour and a mean.

    y: a column of their logs, by default the evaluations'. Raises UsageError for one that a run has not.
    """
    runs = kept_runs(place, names)
    kind, groups, seeds = kind_of(runs), {}, {}
    y = y or kind.metric
    for name, kept in runs.items():
        columns, rows = read_log(Path(place) / f"{name}.csv")
        if y not in columns:
            raise UsageError(f"--y is {y!r}; expected a column of {name}'s log: {', '.join(columns)}")
        points = [(row[x], row[y]) for row in rows if row["step"] and row[y] is not None]
        group = kind.describe(kept["settings"])
        groups.setdefault(group, []).append(points)
        seeds.setdefault(group, set()).add(kept["settings"]["seed"])
    groups = {f"{name}{how_many(len(curves), len(seeds[name]))}": curves for name, curves in groups.items()}
    baselines = [kind.baseline(kept) for kept in runs.values() if y == kind.metric and kind.baseline(kept) is not None]
    horizontal = None
    if baselines:                                                # each seed has a test set of its own
        baseline = sum(baselines) / len(baselines)
        horizontal = (baseline, f"always 1: {baseline:.3f}")
    draw_runs(path, groups, title=kind.title(list(runs.values())[-1]), x_label={"step": "iteration"}.get(x, x),
              y_label=kind.y_label if y == kind.metric else y.replace("_", " "), horizontal=horizontal,
              log_y=y == "grad_norm", in_step=x == "step")


def how_many(runs, seeds):
    """", 3 seeds"; ", 3 runs" where some have the same seed: they differ in something else, the commit say."""
    return "" if runs == 1 else f", {runs} {'seeds' if runs == seeds else 'runs'}"


def main(argv):
    parser = OneLineParser(prog="python tasks/results.py", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
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
    sys.exit(run(main))
