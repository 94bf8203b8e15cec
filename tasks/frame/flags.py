"""The command line of a task: its flags, and the settings that come of them, of a resumed run and of the defaults."""

import argparse
import functools
import math
from pathlib import Path

from minigrad import optim, schedules
from minigrad.tensors import CheckpointError
from minigrad.training import FREE_SETTINGS
from tasks.frame.run_folder import UsageError, read_config

OPTIMIZERS = {
    "sgd": optim.SGD, "momentum": optim.Momentum, "adadelta": optim.Adadelta, "rmsprop": optim.RMSprop,
    # As in the deeplearning.net tutorial: E[g^2], E[g] and v of Graves 2013, 1e-4 inside the root.
    "rmsprop-centred": functools.partial(optim.RMSprop, lr=1e-4, rho=0.95, momentum=0.9, centred=True, eps=1e-4,
                                         eps_inside=True),
    "adam": optim.Adam, "adamw": optim.AdamW, "radam": optim.RAdam}
OF_AN_OPTIMIZER = ("lr", "eps", "weight_decay")          # defaults that another optimizer does not take over
SHARED_DEFAULTS = {"device": "cpu", "seed": 0, "steps": None, "epochs": None, "clip_norm": 0.0, "clip_value": 0.0,
                   "dtype": "float32", "threads": 1, "out": None, "resume": None, "quiet": False}


# ---- flags -----------------------------------------------------------------------------------------------

def whole(least):
    """An argparse type: a whole number of at least `least`."""
    def parse(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least {least}")
        return value
    return parse


def number(low=None, open_low=False, below=None):
    """An argparse type: a finite number, from `low` up, smaller than `below`."""
    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        too_low = low is not None and (value < low or (open_low and value == low))
        if not math.isfinite(value) or too_low or (below is not None and value >= below):
            bound = "" if low is None else f" {'above' if open_low else 'of at least'} {low}"
            bound += "" if below is None else f" and below {below}"
            raise argparse.ArgumentTypeError(f"{text!r}; expected a finite number{bound}")
        return value
    return parse


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors: one line, without the usage text."""

    def __init__(self, prog, description, **options):
        super().__init__(prog=prog, description=description, **{
            "allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message):
        raise UsageError(message)


def given_on(parser, argv):
    """{setting: value} of the flags on the command line, without those that are not there."""
    return {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}


def parser_of(task):
    """A task's parser: the flags that every task has, then its own. No flag has a default here (see `settings_of`)."""
    parser = OneLineParser(f"python tasks/{task.name}.py", task.description)
    shared = parser.add_argument_group("of every task")
    shared.add_argument("--device", choices=["cpu", "gpu", "auto"], help="default cpu")
    shared.add_argument("--seed", type=whole(0), help="default 0")
    shared.add_argument("--steps", type=whole(1), help="iterations")
    shared.add_argument("--epochs", type=number(0, open_low=True), help="as --steps, in passes over the data")
    shared.add_argument("--batch-size", type=whole(1))
    shared.add_argument("--optimizer", help=f"{', '.join(OPTIMIZERS)}; one that is not the task's default starts with "
                                            f"its own {', '.join(OF_AN_OPTIMIZER).replace('_', ' ')}")
    shared.add_argument("--lr", type=number(0), help="learning rate")
    shared.add_argument("--clip-norm", type=number(0), help="clip the gradient's global norm; 0: do not")
    shared.add_argument("--clip-value", type=number(0), help="clip every entry of the gradient; 0: do not")
    shared.add_argument("--dtype", choices=["float32", "float64"], help="default float32")
    shared.add_argument("--threads", type=whole(1), help="BLAS threads (default 1)")
    if task.reads:
        shared.add_argument("--data", metavar="PATH", help=task.reads)
    shared.add_argument("--out", help="run folder (default runs/TASK/TIME); a non-empty one is refused")
    shared.add_argument("--resume", metavar="DIR", help="continue the run in DIR, with its own settings")
    shared.add_argument("--eval-every", type=whole(1), help="iterations between evaluations")
    shared.add_argument("--quiet", action="store_true", default=None, help="print results and errors only")
    own = parser.add_argument_group("of this task")
    if task.variants:
        own.add_argument(f"--{task.variant}", choices=task.variants, metavar="NAME",
                         help=f"{', '.join(task.variants)} (default {task.defaults[task.variant]})")
        own.add_argument("--compare", metavar="A,B", nargs="?", const=",".join(task.variants),
                         help="train several on the same data (alone: all)")
    if task.paper is not None:
        own.add_argument("--paper", action="store_true", default=None, help="the paper's setting, see above")
    if "eps" in task.defaults:
        own.add_argument("--eps", type=number(0, open_low=True), help="the optimizer's eps")
    if "weight_decay" in task.defaults:
        own.add_argument("--weight-decay", type=number(0), help=f"default {task.defaults['weight_decay']}")
    if "schedule" in task.defaults:
        own.add_argument("--schedule", choices=["cosine", "constant"], help="of the lr (default cosine, to 0)")
        own.add_argument("--warmup", type=whole(0), help="steps of growing learning rate (default 1/20 of all)")
    task.flags(own)
    return parser


# ---- settings --------------------------------------------------------------------------------------------

def settings_of(task, argv):
    """{setting: value}: what is given on the command line, else the resumed run's, else the default.

    Raises UsageError for flags that contradict the resumed run or each other, or that the chosen variants do not have,
    CheckpointError for a folder that is no run.
    """
    parser = parser_of(task)
    given = given_on(parser, argv)
    refuse(task, given)
    settings = merged(task, parser, given)
    task.check(settings, given)
    variants_of(task, settings)
    if settings["optimizer"] not in OPTIMIZERS:
        raise UsageError(f"--optimizer is {settings['optimizer']!r}; expected one of {', '.join(OPTIMIZERS)}")
    return settings


def refuse(task, given):
    """Raise UsageError for flags that contradict each other, and for those of another variant than the chosen one."""
    if "steps" in given and "epochs" in given:
        raise UsageError("--steps and --epochs were both given; expected one of them")
    if task.variants and task.variant in given and "compare" in given:
        raise UsageError(f"--compare has no meaning with --{task.variant} {given[task.variant]}; expected one of "
                         "the two")
    if not task.variants or "resume" in given or ("compare" in given and task.plan):     # a plan may need any of them
        return
    chosen = variants_of(task, {**task.defaults, **given})
    for key, variants in task.flags_of.items():
        if key in given and not set(chosen) & set(variants):
            flag = key.replace("_", "-")
            raise UsageError(f"--{flag} has no meaning with {', '.join(chosen)}; it belongs to {', '.join(variants)}")


def defaults_of(task, given):
    """The task's defaults, or the paper's; another optimizer that is given has its own lr, eps and weight decay."""
    defaults = {**SHARED_DEFAULTS, "compare": None, "paper": False, "data": None, **task.defaults}
    for key, there in (("compare", task.variants), ("paper", task.paper is not None), ("data", task.reads)):
        if not there:
            del defaults[key]
    if "paper" in given:
        defaults.update(task.paper)
    if given.get("optimizer", defaults["optimizer"]) != defaults["optimizer"]:
        defaults.update((key, None) for key in OF_AN_OPTIMIZER if key in defaults)
    if {"steps", "epochs"} & set(given):
        defaults.update(steps=None, epochs=None)
    return defaults


def merged(task, parser, given):
    """The settings of `settings_of`, before the task has checked them."""
    if "resume" not in given:
        return {**defaults_of(task, given), **given}
    if not given["resume"]:
        raise UsageError("--resume is empty; expected the folder of a run")
    saved = saved_settings(parser, given["resume"], defaults_of(task, given))
    for key, value in given.items():
        if key not in FREE_SETTINGS and saved.get(key) != value:
            flag = "--" + key.replace("_", "-")
            raise UsageError(f"{flag} {value} differs from the run in {given['resume']}, which has "
                             f"{saved.get(key)!r}; a resumed run keeps its settings")
    if "out" in given and Path(given["out"]) != Path(given["resume"]):
        raise UsageError("--out and --resume name different folders; --resume continues in its own")
    if {"steps", "epochs"} & set(given):
        saved.update(steps=None, epochs=None)
    return {**saved, **given, "out": given["resume"]}


def saved_settings(parser, folder, expected):
    """The settings in a run's config.json, each put through its flag's own checks. Raises CheckpointError."""
    saved = read_config(folder)
    problem = None
    missing = [key for key in expected if key not in saved]
    if missing:
        problem = f"{missing[0]} is missing, or it is a run of another task"
    else:
        argv = [f"--{key.replace('_', '-')}" if value is True else f"--{key.replace('_', '-')}={value}"
                for key, value in saved.items() if value is not None and value is not False]
        try:
            again = {**dict.fromkeys(saved), **given_on(parser, argv)}
            differing = [key for key in saved if (again[key] or None) != (saved[key] or None)]
            if differing:
                problem = f"{differing[0]} is {saved[differing[0]]!r}"
        except UsageError as error:
            problem = str(error)
    if problem:
        raise CheckpointError(f"{Path(folder) / 'config.json'}: damaged: {problem}")
    return saved


def variants_of(task, settings):
    """The variants to train: one, or those of --compare. Raises UsageError for an unknown one, or one given twice."""
    if not task.variants:
        return [task.name]
    if settings.get("compare") is None:
        return [settings[task.variant]]
    names = settings["compare"].replace(" ", "").split(",")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--compare names {name!r} twice; expected each once")
        if name not in task.variants:
            raise UsageError(f"--compare has {name!r}; expected names among {', '.join(task.variants)}")
    return names


def changed(settings, defaults, paper=None):
    """[setting] that differ from the defaults, with --paper from the paper's; not what a resumed run may change."""
    usual = {**SHARED_DEFAULTS, **defaults, **((paper or {}) if settings.get("paper") else {})}
    aside = (*FREE_SETTINGS, "seed", "eval_every", "eval_size", "compare", "paper")
    return [key for key, value in usual.items() if key not in aside and settings.get(key) not in (None, value)]


# ---- what the settings name ------------------------------------------------------------------------------

def make_optimizer(settings, parameters, no_decay=()):
    """The optimizer of the settings, with its lr, eps and weight_decay if they are given.

    Raises UsageError for an eps where the optimizer has none.
    """
    name = settings["optimizer"]
    given = {key: settings[key] for key in OF_AN_OPTIMIZER if settings.get(key) is not None}
    if "eps" in given and name in ("sgd", "momentum"):
        raise UsageError(f"--eps is {given['eps']}, but the optimizer {name} has no eps")
    return OPTIMIZERS[name](parameters, **given, no_decay=no_decay)


def clip_settings(settings):
    """Keywords for Trainer: 0 means no clipping."""
    return {"clip_norm": settings["clip_norm"] or None, "clip_value": settings["clip_value"] or None}


def steps_of(settings, per_epoch):
    """The number of iterations that --steps or --epochs ask for."""
    return settings["steps"] or max(1, round(settings["epochs"] * per_epoch))


def schedule_of(settings, steps, lr):
    """The learning rate over a run of `steps` steps: lr after --warmup steps, then constant or half a cosine to 0.

    Without --warmup it lasts a twentieth of the steps. None for a task without a schedule. Raises UsageError for one
    longer than the run.
    """
    if "schedule" not in settings:
        return None
    warmup = steps // 20 if settings["warmup"] is None else settings["warmup"]
    if warmup > steps:
        raise UsageError(f"--warmup is {warmup:,}; expected at most the number of steps, {steps:,}")
    if settings["schedule"] == "constant":
        return schedules.Constant(lr, warmup)
    return schedules.WarmupCosine(lr, warmup, steps)
