"""What the tasks that classify share: a step, the evaluation, the attention weights' figure.

A curve needs many evaluations and the whole test set takes long: so each evaluation takes a fixed random part of it,
and the end of every epoch, and of the run, the whole.
"""

from minigrad.backend import asnumpy, to_device
from minigrad.layers import RRALSTM, Bidirectional
from minigrad.losses import softmax_cross_entropy
from models.cells import SETTINGS
from tasks.frame.cell_flags import add_cell_flags, cell_label
from tasks.frame.figures import draw_attention_weights
from tasks.frame.flags import changed, steps_of, whole
from tasks.frame.run_folder import UsageError

DEFAULTS = {**SETTINGS, "model": "rra", "eps": None}


def add_flags(group, defaults):
    """The flags that both tasks have."""
    add_cell_flags(group, defaults)
    group.add_argument("--eval-size", type=whole(1), help="test examples of an evaluation within an epoch (default "
                                                          f"{defaults['eval_size']:,})")


def forward_backward(model, batch, rng):
    """One training step's loss and gradients; batch: the model's inputs (x, or ids and mask), then the labels."""
    *inputs, labels = batch
    logits, cache = model.forward(*inputs, rng=rng)
    loss, loss_cache = softmax_cross_entropy.forward(logits, labels)
    model.backward(softmax_cross_entropy.backward(1.0, loss_cache), cache)
    return loss


# ---- evaluation ------------------------------------------------------------------------------------------

def right_share(model, batches, device):
    """The share of examples that the model classifies rightly; batches: (inputs ..., labels)."""
    right = count = 0
    for batch in batches:
        *inputs, labels = to_device(batch, device)
        right = right + (model(*inputs).argmax(axis=1) == labels).sum()      # on a GPU it stays there
        count += len(labels)
    return float(right) / count


class Evaluation:
    """evaluate(model, step): {metric: on a part of the test set, metric_all: on the whole, w_hat_k ...}.

    part, every   functions that yield batches of the part and of the whole test set
    per_epoch     steps; the whole is gone through where an epoch ends, and at the run's last step: elsewhere it is None
    metric        "test_accuracy" or "test_error", as shares
    """

    def __init__(self, settings, part, every, per_epoch, metric, device):
        self.part, self.every, self.per_epoch = part, every, per_epoch
        self.last = steps_of(settings, per_epoch)
        self.metric, self.device = metric, device

    def __call__(self, model, step):
        whole_set = step > 0 and (step % self.per_epoch == 0 or step == self.last)
        figures = {self.metric: self._share(model, self.part()),
                   f"{self.metric}_all": self._share(model, self.every()) if whole_set else None}
        for name, weights in attention_of(model).items():
            figures.update({f"{name}_{k}": float(w) for k, w in enumerate(weights, 1)})
        return figures

    def _share(self, model, batches):
        share = right_share(model, batches, self.device)
        return share if self.metric == "test_accuracy" else 1 - share


def trainer_keywords(metric):
    return {"eval_epochs": True, "progress_metrics": (metric, f"{metric}_all")}



def require_an_end(run, metric):
    """Raise UsageError where a resumed run would end at an evaluation that it has made already, on a part."""
    rows = run.trainer.log.rows
    if rows and rows[-1]["step"] == run.steps and rows[-1][f"{metric}_all"] is None:
        raise UsageError(f"--steps: {run.steps} are asked for, but the run in {run.trainer.out} stands there already, "
                         "within an epoch; expected more")


def attention_of(model):
    """{column: normalised attention weights (K,) on the host} of the model's RRA cells; {} for other models."""
    cell = getattr(model, "classifier", model).cell
    cells = {"w_hat": cell}
    if isinstance(cell, Bidirectional):
        cells = {"w_hat": cell.forward_layer, "w_hat_backward": cell.backward_layer}
    return {name: asnumpy(layer.attention_weights()[0]) for name, layer in cells.items()
            if isinstance(layer, RRALSTM) and len(layer.w.value)}


# ---- what came out ---------------------------------------------------------------------------------------

def result_of(run, metric, record):
    """A run's own part of result.json; `record` is what is kept of the data."""
    per_epoch = run.trainer.batches.per_epoch
    return {"epochs": run.trainer.step / per_epoch, "data": record,
            "per_epoch": [[step / per_epoch, value] for step, value in run.trainer.log.column(f"{metric}_all")]}


def summary_of(run, result, metric):
    return (f"{cell_label(run.settings)}: {metric.replace('_', ' ')} {result[metric]:.2%} after {result['epochs']:.3g} "
            f"epochs ({result['steps']:,} iterations); best {result['best']['value']:.2%} at "
            f"{result['best']['step']:,}; {run.trainer.seconds:.0f} s")


def draw_attention(run):
    """figure7.png, for RRA; reading both ways, another one for the half that reads from the end."""
    log, settings = run.trainer.log, run.settings
    for prefix, words in (("w_hat", ""), ("w_hat_backward", ", reading from the end")):
        weights = {int(column.removeprefix(f"{prefix}_")): log.column(column) for column in log.columns
                   if column.removeprefix(f"{prefix}_").isdecimal()}
        if weights:
            path = run.trainer.out / f"figure7{prefix.removeprefix('w_hat').replace('_', '-')}.png"
            draw_attention_weights(path, weights, settings["offset"], "RRA's attention weights over training, "
                                                                      f"K = {settings['window']}{words}")


def setting_of(settings, defaults, paper):
    """What a figure says of it: "the paper's setting" for --paper with nothing but model, K, bias and seed changed."""
    if not settings["paper"]:
        return settings["optimizer"]
    if set(changed(settings, defaults, paper)) <= {"model", "window", "forget_bias", "test_size"}:
        return "the paper's setting"
    return f"{settings['optimizer']}, after the paper's setting"


def columns(metric):
    """Of the table of kept runs."""
    words = metric.replace("_", " ")
    return {f"{words} at the end": lambda kept: f"{kept['result'][metric]:.2%}",
            "epochs": lambda kept: f"{kept['result']['epochs']:.3g}",
            "best, by the test set itself": lambda kept: (
                f"{kept['result']['best']['value']:.2%}" if "best" in kept["result"] else "")}
