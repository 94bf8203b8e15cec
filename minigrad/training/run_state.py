"""What a run needs to continue exactly, as it stands in a checkpoint: written by `contents`, read back by `resume`."""

import math

from minigrad.tensors import CheckpointError, fill_exactly, load_tensors
from minigrad.training.runlog import RunLog
from minigrad.tree import tree_leaves

# What a resumed run may change without becoming another run.
FREE_SETTINGS = ("steps", "epochs", "target", "device", "threads", "quiet", "out", "resume", "data", "sts", "jobs")

LOGGED = ("step", "seconds", "lr", "loss", "grad_norm")             # columns of log.csv; the evaluation's follow


def tensors(trainer):
    """{name: array}, the arrays themselves: parameters, buffers, the optimizer's accumulators, the carried state."""
    names = {id(parameter): name for name, parameter in trainer.named.items()}
    found = trainer.model.named_arrays()
    for slot, arrays in trainer.optimizer.accumulators.items():
        for parameter, array in zip(trainer.optimizer.parameters, arrays):
            found[f"optimizer.{slot}.{names[id(parameter)]}"] = array
    return {**found, **dict(tree_leaves(trainer.state, "carried")), "trainer.tally": trainer.tally}


def contents(trainer):
    """(tensors, meta) of a checkpoint."""
    batches, step = trainer.batches, trainer.step
    epoch, batch = batches.position(step) if hasattr(batches, "position") else (None, None)
    meta = {"step": step, "logged": trainer.log.rows[-1]["step"] if trainer.log.rows else None,
            "seconds": trainer.seconds, "best": trainer.best, "config": trainer.config,
            "optimizer": {"name": type(trainer.optimizer).__name__, "steps": trainer.optimizer.steps},
            "random_numbers": {"seed": trainer.seed, "step": step},
            "data_order": {"seed": getattr(batches, "seed", None), "epoch": epoch, "batch": batch}}
    return tensors(trainer), meta


def resume(trainer):
    """Continue from last.safetensors of the run's folder.

    Raises CheckpointError, naming the key, when it is not of this model, optimizer, seed and configuration, and
    when the log does not reach the checkpoint; nothing is changed then.
    """
    path = trainer.out / "last.safetensors"
    found, meta = load_tensors(path)
    try:
        step, seconds, best, taken = _fitting(trainer, meta, path)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path}: {error} is missing or wrong; it is no training run's") from error
    log = RunLog(trainer.log.path)
    log.read(step)
    reached = log.rows[-1]["step"] if log.rows else None
    if reached != meta.get("logged") or {*LOGGED, trainer.best_name} - set(log.columns):
        raise CheckpointError(f"log {log.path}: its rows end at step {reached}, its columns are "
                              f"{', '.join(log.columns)}; the checkpoint was written at row {meta.get('logged')}")
    fill_exactly(tensors(trainer), found, path)
    log.write()
    trainer.log, trainer.step, trainer.seconds, trainer.best = log, step, seconds, best
    trainer.optimizer.steps = taken


def resume_if_begun(trainer):
    """`resume` where the folder holds a checkpoint; False where the run was killed before its first.

    Raises CheckpointError when the checkpoint is missing although the log has rows of later steps.
    """
    last = trainer.out / "last.safetensors"
    if last.exists():
        resume(trainer)
        return True
    log = RunLog(trainer.log.path)
    if log.path.exists():
        log.read(math.inf)
    if any(row["step"] for row in log.rows):
        raise CheckpointError(f"checkpoint {last}: missing, but log.csv goes beyond step 0")
    return False


def _fitting(trainer, meta, path):
    """(step, seconds, best, the optimizer's steps) of a checkpoint that is this run's."""
    ours = contents(trainer)[1]
    _require_same("optimizer", meta["optimizer"]["name"], ours["optimizer"]["name"], path)
    for key in sorted(set(meta["config"]) | set(trainer.config)):
        if key not in FREE_SETTINGS:
            _require_same(key, meta["config"].get(key), trainer.config.get(key), path)
    for key in ("random_numbers", "data_order"):
        _require_same(f"{key}' seed", meta[key]["seed"], ours[key]["seed"], path)
    step, taken = meta["step"], meta["optimizer"]["steps"]
    for name, value in (("step", step), ("optimizer.steps", taken)):
        if type(value) is not int or value < 0:
            raise CheckpointError(f"checkpoint {path}: {name} is {value!r}; expected a whole number")
    best = {"value": meta["best"]["value"], "step": meta["best"]["step"]}
    return step, float(meta["seconds"]), best, taken


def _require_same(key, came, expected, path):
    if came != expected:
        raise CheckpointError(f"checkpoint {path}: {key} is {came!r}; this run has {expected!r}")
