"""A byte-level language model with SRU, SRU++ or LSTM (Lei 2021, arXiv 2102.12459).

    python tasks/char_lm.py                             SRU++ on enwik8, 8 minutes of one core
    python tasks/char_lm.py --data FILE                 on any text: plain, .gz, or the one file of a .zip
    python tasks/char_lm.py --compare                   SRU, projected SRU, SRU++, LSTM at equal parameters, 22 minutes
    python tasks/char_lm.py --compare srupp,sru-proj    two of them
    python tasks/char_lm.py --resume runs/char_lm/...   continue a run that was stopped
    python tasks/char_lm.py generate 500 --prompt "The " --checkpoint runs/char_lm/...
                                                        500 bytes from a trained model, one after another

The model reads a text byte by byte and says how likely each next byte is. Its score is the bits per character (BPC):
the mean of -log2 of the probability it gave to the byte that came. The first 90 % of the text are for training, 5 % for
validation, 5 % for the test. In training --batch-size places of the text are read side by side, --unroll bytes a step;
the state, and in SRU++ the memory of earlier inputs, is handed on from step to step, the gradient is not.

Data: --data, else $MINIGRAD_DATA, else ~/.cache/minigrad. In a folder the task looks for enwik8, enwik8.gz or
enwik8.zip, there and one folder below; then for a beginning of it (enwik8.firstN, .gz), which it says; where neither is
there it fetches enwik8.zip.

Defaults: SRU++ of 4 layers, d = 256, d' = 64, 402,000 parameters (for 200 different bytes), batches of 16 x 128 bytes,
RAdam with learning rate 6e-3, warm-up, cosine to 0 and weight decay 0.1, global norm clipped at 1.

Expect: 7.9 bits at first (a little worse than all bytes alike), 3.0 after 500 steps, 2.6 after 1,500, 2.3 at the end
(3,000 steps), on the first 4.15 MB of enwik8. A run folder (runs/char_lm/TIME) with config.json, log.csv, bpc.png,
alpha.png (the weight of attention in each layer), grad_norm.png, last and best checkpoints, result.json: validation and
test BPC of the best checkpoint, whole parts. With --compare a folder for each, and bpc.png and bpc-time.png of all.
"""

import math
import sys
from pathlib import Path

import numpy as np

from minigrad.backend import to_device
from minigrad.data import Streams, open_text
from minigrad.losses import softmax_cross_entropy
from minigrad.training import load_model
from models.srupp_lm import LABELS, LAYERS, SETTINGS, TAKEN_BY, model_of, size_of, sizes, width_for
from tasks import char_lm_generate, frame
from tasks.frame import UsageError, number, whole
from tasks.frame.figures import draw_curves, draw_norm, mean_between
from tasks.frame.flags import variants_of

DEFAULTS = {
    **SETTINGS, "batch_size": 16, "optimizer": "radam", "lr": 6e-3, "weight_decay": 0.1, "schedule": "cosine",
    "warmup": None, "clip_norm": 1.0, "eval_every": 250, "valid_bytes": 100_000, "steps": 3000}
LOG_EVERY = 10
TOLERANCE = 0.03                                    # of the number of parameters, in a comparison
STREAMS = 32                                        # read side by side in an evaluation


def flags(group):
    add = group.add_argument
    add("--width", type=whole(1), help="d (default 256)")
    add("--ratio", type=whole(1), help="sru-proj, srupp: d / d', d' the inner width (default 4)")
    add("--layers", type=whole(1), help="sru, sru-proj, srupp (default 4)")
    add("--lstm-layers", type=whole(1), help="lstm (default 2)")
    add("--heads", type=whole(1), help="srupp (default 1)")
    add("--unroll", type=whole(1), help="bytes of a training step and stream (default 128)")
    add("--memory", type=whole(0), help="srupp: earlier inputs a layer keeps (default: as --unroll)")
    add("--window", type=whole(1), help="srupp: steps that a step sees, itself one (default: all it has)")
    add("--attention-every", type=whole(1), help="srupp: attention in each N-th layer (default 1)")
    add("--attention-last", type=whole(0), help="srupp: attention in the last N layers")
    add("--no-layer-norm", action="store_true", default=None, help="sru-proj, srupp: without the layer norm before W_o")
    add("--highway-bias", type=number(), help="not lstm: first value (default -2)")
    add("--dropout", type=number(0), help="default 0")
    add("--attention-dropout", type=number(0), help="srupp (default 0)")
    add("--valid-bytes", type=whole(1), help="of the validation part, in evaluations during training (default 100,000)")


def check(settings, given):
    if settings["attention_last"] is not None and settings["attention_every"] != 1:
        raise UsageError(f"--attention-every {settings['attention_every']} and --attention-last "
                         f"{settings['attention_last']} were both given; expected one of them")
    names, inner = variants_of(TASK, settings), settings["width"] // settings["ratio"]
    if inner < 1 and (settings["compare"] or set(names) & {"sru-proj", "srupp"}):
        raise UsageError(f"--ratio is {settings['ratio']}, larger than --width, {settings['width']}; expected d' = "
                         "--width / --ratio of at least 1")
    if inner % settings["heads"] and (settings["compare"] or "srupp" in names):
        raise UsageError(f"--heads is {settings['heads']}; expected a divisor of d' = --width / --ratio = {inner}")


# ---- the models ------------------------------------------------------------------------------------------

def plan(settings, text):
    """[settings of each layer] to train: in a comparison each as wide as has SRU++'s number of parameters at --width.

    Raises UsageError where that cannot be met within 3 %.
    """
    if settings["compare"] is None:
        return [settings]
    vocab, planned = len(text.vocabulary), []
    expected = size_of({**settings, "layer": "srupp"}, vocab)
    for name in variants_of(TASK, settings):
        own = {**settings, "layer": name, "compare": None}
        # Only SRU++ and its projected form need d' to be whole, and SRU++ alone to be divided by the heads.
        grain = {"srupp": {"ratio": settings["ratio"], "heads": settings["heads"]},
                 "sru-proj": {"ratio": settings["ratio"]}}.get(name, {"ratio": 1})
        if name != "srupp":
            own["width"] = width_for(name, expected, vocab, **sizes(own), **grain)
        count = size_of(own, vocab)
        if abs(count - expected) > TOLERANCE * expected:
            raise UsageError(f"--compare: {name} has {count:,} parameters at its best width, {own['width']}; expected "
                             f"{expected:,}, SRU++'s at --width {settings['width']}, within {TOLERANCE:.0%} (a larger "
                             "--width comes nearer)")
        planned.append(own)
    return planned


def describe(settings, text):
    """A line about the text; in a comparison the widths and sizes."""
    if settings["compare"] is None:
        return text.describe()
    rows = [("layer", "layers", "d", "d'", "parameters")]
    for own in plan(settings, text):
        inner = own["width"] // own["ratio"] if own["layer"] in ("sru-proj", "srupp") else "-"
        count = size_of(own, len(text.vocabulary))
        rows.append((own["layer"], sizes(own)["layers"], own["width"], inner, f"{count:,}"))
    lines = [f"{row[0]:10}" + "".join(f"{cell!s:>11}" for cell in row[1:]) for row in rows]
    return "\n".join([text.describe(), *lines])


# ---- training --------------------------------------------------------------------------------------------

def streams_of(settings, text):
    begin, end = text.parts[0]
    return Streams(text.ids[begin:end], settings["batch_size"], settings["unroll"], settings["seed"])


def forward_backward(model, batch, rng, state):
    """One training step's loss and gradients, and the state for the next step."""
    x, y = batch
    (logits, state), cache = model.forward(x, state=state, rng=rng)
    loss, loss_cache = softmax_cross_entropy.forward(logits, y)
    model.backward((softmax_cross_entropy.backward(1.0, loss_cache), None), cache)
    return loss, state


def bits_per_character(model, ids, begin, end, unroll, device="cpu"):
    """BPC of ids[begin:end]: each byte is predicted once, from the bytes before it.

    The part is read in STREAMS streams side by side, `unroll` bytes at a time with carried state. Each stream first
    reads, uncounted, the bytes before its own (up to `unroll`), so that cutting the part up costs next to nothing.
    """
    streams = min(STREAMS, end - begin)
    length, before = -(-(end - begin) // streams), min(unroll, begin - 1)
    places = begin - before + np.arange(streams)[:, None] * length + np.arange(before + length)      # of the targets
    counted = (places < end) & (np.arange(before + length) >= before)
    places = np.minimum(places, end - 1)
    state, nats = model.initial_state(streams), 0.0
    for n in range(0, before + length, unroll):
        columns = slice(n, n + unroll)
        x, y, mask = to_device((ids[places[:, columns] - 1].astype(np.int64), ids[places[:, columns]].astype(np.int64),
                                counted[:, columns]), device)
        logits, state = model(x, state=state)
        nats += float(softmax_cross_entropy.forward(logits, y, mask)[0]) * int(counted[:, columns].sum())
    return nats / (end - begin) / math.log(2)


def evaluation(settings, text, device):
    """f(model, step) -> {"valid_bpc": of the first --valid-bytes, and alpha of each layer that has attention}."""
    begin, end = text.parts[1]
    end = min(end, begin + settings["valid_bytes"])

    def evaluate(model, step):
        figures = {"valid_bpc": bits_per_character(model, text.ids, begin, end, settings["unroll"], device)}
        for n, layer in enumerate(model.layers.layers, 1):
            if hasattr(layer, "alpha"):
                figures[f"alpha_{n}"] = float(layer.alpha.value[0])
        return figures
    return evaluate


def trainer(settings, text, model):
    record = text.record()
    config = {"text": {key: record[key] for key in ("bytes", "sha256")}, "vocabulary": text.vocabulary.values.tolist()}
    return {"config": config, "log_every": LOG_EVERY, "initial_state": model.initial_state(settings["batch_size"])}


# ---- what came out ---------------------------------------------------------------------------------------

def result(run):
    """The best checkpoint, scored on the whole validation and test parts."""
    settings, text, trainer = run.settings, run.data, run.trainer
    load_model(trainer.model, trainer.out / "best.safetensors")
    valid, test = (bits_per_character(trainer.model, text.ids, *part, settings["unroll"], run.device)
                   for part in text.parts[1:])
    bytes_a_second = trainer.step * settings["batch_size"] * settings["unroll"] / max(trainer.seconds, 1e-9)
    return {"width": settings["width"], "metric": "valid_bpc", "valid_bpc": valid, "test_bpc": test,
            "text": text.record(), "bytes_per_second": round(bytes_a_second)}


def summary(run, result):
    return (f"{result['layer']}: {result['valid_bpc']:.3f} bits per character on validation, {result['test_bpc']:.3f} "
            f"on test (best checkpoint, step {result['best']['step']:,} of {result['steps']:,}); "
            f"{result['parameters']:,} parameters; {run.trainer.seconds:.0f} s, {result['bytes_per_second']:,} bytes/s")


def label(settings):
    return f"{LABELS[settings['layer']]}, d = {settings['width']}"


def title(settings):
    if settings["compare"] is None:
        return label(settings)
    return f"Validation on {Path(settings['data']).name}, equal numbers of parameters"


def figures(run):
    """grad_norm.png, and where there is attention alpha.png."""
    log, out = run.trainer.log, run.trainer.out
    alphas = {f"layer {c.removeprefix('alpha_')}": log.column(c) for c in log.columns if c.startswith("alpha_")}
    if alphas:
        draw_curves(out / "alpha.png", alphas, title=f"{label(run.settings)}: weight of attention",
                    x_label="iteration", y_label=r"$\alpha$")
    draw_norm(run, label(run.settings))


def compare(settings, runs, out):
    """bpc-time.png, over seconds."""
    curves = {label(own): [(row["seconds"], row["valid_bpc"]) for row in log.rows
                           if row["step"] and row["valid_bpc"] is not None] for own, log in runs}
    draw_curves(out / "bpc-time.png", curves, x_label="seconds", y_label="bits per character", title=title(settings))


TASK = frame.Task(
    name="char_lm", description=__doc__, defaults=DEFAULTS, flags=flags, check=check,
    reads="a text, or a folder with enwik8 (default $MINIGRAD_DATA, then ~/.cache/minigrad)",
    variant="layer", variants=LAYERS, flags_of=TAKEN_BY, label=label, plan=plan,
    data=lambda settings: open_text(settings["data"], settings["quiet"]), found=lambda text: text.path,
    describe=describe, model=lambda settings, text: model_of(settings, len(text.vocabulary)), batches=streams_of,
    step=forward_backward, evaluation=evaluation, trainer=trainer,
    curve=frame.Curve("valid_bpc", "bits per character", title, "bpc.png", more=lambda log: {
        "training, mean since the evaluation before": [
            (step, nats / math.log(2)) for step, nats in mean_between(log, "loss", "valid_bpc")]}),
    result=result, summary=summary, figures=figures, compare=compare,
    shown=frame.Shown(what=False, in_label=("width",), note="BPC of the best checkpoint, whole parts", columns={
        "layer": lambda kept: LABELS[kept["result"]["layer"]], "d": lambda kept: str(kept["result"]["width"]),
        "parameters": lambda kept: f"{kept['result']['parameters']:,}",
        "validation BPC": lambda kept: f"{kept['result']['valid_bpc']:.3f}",
        "test BPC": lambda kept: f"{kept['result']['test_bpc']:.3f}",
        "steps": lambda kept: f"{kept['result']['steps']:,}"}),
    commands={"generate": char_lm_generate.COMMAND})

if __name__ == "__main__":
    sys.exit(frame.run(TASK))
