"""A byte-level language model with SRU, SRU++ or LSTM (Lei 2021, arXiv 2102.12459).

    python tasks/char_lm.py                             SRU++ on enwik8, 8 minutes of one core
    python tasks/char_lm.py --data FILE                 on any text: plain, .gz, or the one file of a .zip
    python tasks/char_lm.py --compare                   SRU, projected SRU, SRU++, LSTM at equal parameters, 22 minutes
    python tasks/char_lm.py --compare srupp,sru-proj    two of them
    python tasks/char_lm.py --resume runs/char_lm/...   go on with a run that was stopped
    python tasks/char_lm.py --generate 500 --prompt "The " --checkpoint runs/char_lm/...
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

from tasks.frame.common import (  # first: it sets the number of BLAS threads
    clip_settings,
    device_of,
    go_on,
    make_optimizer,
    names_to_compare,
    number,
    parser_for,
    run,
    say,
    schedule_of,
    settings_of,
    steps_of,
    whole,
)

# isort: split
import codecs
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minigrad.backend import asnumpy, to_device
from minigrad.data import DataError, Streams, Vocabulary, data_folder, find_enwik8, read_text, split_90_5_5
from minigrad.losses import softmax_cross_entropy
from minigrad.tensors import CheckpointError, fill_exactly, load_tensors, write_atomically
from minigrad.training.checkpoint import model_tensors
from minigrad.training.trainer import Trainer
from models.srupp_lm import LAYERS, build, count_parameters, width_for
from tasks.frame.figures import draw_curves
from tasks.frame.run_folder import UsageError, open_run_folder, read_config, write_config

LABELS = {"sru": "SRU", "sru-proj": "projected SRU", "srupp": "SRU++", "lstm": "LSTM"}
DEFAULTS = {
    "data": None, "layer": "srupp", "compare": None, "width": 256, "ratio": 4, "layers": 4, "lstm_layers": 2,
    "heads": 1, "unroll": 128, "memory": None, "window": None, "attention_every": 1, "attention_last": None,
    "no_layer_norm": False, "highway_bias": -2.0, "dropout": 0.0, "attention_dropout": 0.0, "batch_size": 16,
    "optimizer": "radam", "lr": 6e-3, "schedule": "cosine", "warmup": None, "clip_norm": 1.0,
    "eval_every": 250, "valid_bytes": 100_000}
STEPS = 3000
LOG_EVERY = 10
TOLERANCE = 0.03                                    # of the number of parameters, in a comparison
STREAMS = 32                                        # read side by side in an evaluation
WITH_GENERATE = {"generate", "prompt", "temperature", "checkpoint", "seed", "device", "threads", "quiet"}


def parse(argv):
    """The settings of this run; see `--help`."""
    parser = parser_for("char_lm", __doc__, data="a text, or a folder with enwik8 (default $MINIGRAD_DATA, then "
                                                 "~/.cache/minigrad)")
    own = parser.add_argument_group("of this task")
    own.add_argument("--layer", choices=LAYERS, help="default srupp; sru-proj is SRU++ without its attention")
    own.add_argument("--compare", metavar="A,B", nargs="?", const=",".join(LAYERS),
                     help="train several at the number of parameters that srupp has at --width (alone: all four)")
    own.add_argument("--width", type=whole(1), help="d (default 256)")
    own.add_argument("--ratio", type=whole(1), help="sru-proj, srupp: d / d', d' the inner width (default 4)")
    own.add_argument("--layers", type=whole(1), help="sru, sru-proj, srupp (default 4)")
    own.add_argument("--lstm-layers", type=whole(1), help="lstm (default 2)")
    own.add_argument("--heads", type=whole(1), help="srupp (default 1)")
    own.add_argument("--unroll", type=whole(1), help="bytes of a training step and stream (default 128)")
    own.add_argument("--memory", type=whole(0), help="srupp: earlier inputs a layer keeps (default: as --unroll)")
    own.add_argument("--window", type=whole(1), help="srupp: steps that a step sees, itself one (default: all it has)")
    own.add_argument("--attention-every", type=whole(1), help="srupp: attention in each N-th layer (default 1)")
    own.add_argument("--attention-last", type=whole(0), help="srupp: attention in the last N layers")
    own.add_argument("--no-layer-norm", action="store_true", default=None,
                     help="sru-proj, srupp: without the layer norm before W_o")
    own.add_argument("--highway-bias", type=number(), help="not lstm: first value (default -2)")
    own.add_argument("--dropout", type=number(0), help="default 0")
    own.add_argument("--attention-dropout", type=number(0), help="srupp (default 0)")
    own.add_argument("--weight-decay", type=number(0), help="default 0.1 with radam and adamw, else 0")
    own.add_argument("--schedule", choices=["cosine", "constant"], help="of the learning rate (default cosine, to 0)")
    own.add_argument("--warmup", type=whole(0), help="steps of growing learning rate (default 1/20 of all)")
    own.add_argument("--valid-bytes", type=whole(1),
                     help="of the validation part in the evaluations during training (default 100,000)")
    other = parser.add_argument_group("to write a text instead of training")
    other.add_argument("--generate", metavar="N", type=whole(1), help="write N bytes with the model of --checkpoint")
    other.add_argument("--checkpoint", metavar="FILE", help="a checkpoint, or the folder of a run (its best one)")
    other.add_argument("--prompt", metavar="TEXT", help="what the model reads first (default: a new line)")
    other.add_argument("--temperature", type=number(0), help="0: always the likeliest byte (default 1)")
    given = {key for key, value in vars(parser.parse_args(argv)).items() if value is not None}
    settings = settings_of(parser, argv, lambda given: {
        **DEFAULTS, "weight_decay": 0.1 if given.get("optimizer", "radam") in ("radam", "adamw") else 0.0})
    _require_fitting(given, settings)
    return settings


def _require_fitting(given, settings):
    """Raise UsageError for flags that contradict one another."""
    if "generate" in given:
        foreign = sorted(given - WITH_GENERATE)
        if foreign:
            raise UsageError(f"--{foreign[0].replace('_', '-')} has no meaning with --generate: the model is the "
                             "checkpoint's")
        if "checkpoint" not in given:
            raise UsageError("--generate needs --checkpoint FILE, a checkpoint or the folder of a run")
        return
    for flag in ("checkpoint", "prompt", "temperature"):
        if flag in given:
            raise UsageError(f"--{flag} has a meaning only with --generate N")
    if settings["attention_last"] is not None and settings["attention_every"] != 1:
        raise UsageError(f"--attention-every {settings['attention_every']} and --attention-last "
                         f"{settings['attention_last']} were both given; expected one of them")
    names = names_of(settings)
    inner = settings["width"] // settings["ratio"]
    if inner < 1 and (settings["compare"] or set(names) & {"sru-proj", "srupp"}):
        raise UsageError(f"--ratio is {settings['ratio']}, larger than --width, {settings['width']}; expected d' = "
                         "--width / --ratio of at least 1")
    if inner % settings["heads"] and (settings["compare"] or "srupp" in names):
        raise UsageError(f"--heads is {settings['heads']}; expected a divisor of d' = --width / --ratio = {inner}")


def names_of(settings):
    """The layers to train."""
    return [settings["layer"]] if settings["compare"] is None else names_to_compare(settings["compare"], LAYERS)


# ---- the text --------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """A text in symbols."""

    path: Path
    vocabulary: Vocabulary
    ids: np.ndarray             # (N,) of the whole
    parts: tuple                # training, validation, test: [(begin, end)]
    sha256: str

    def record(self):
        """What is kept of it with a result."""
        return {"name": self.path.name, "bytes": len(self.ids), "symbols": len(self.vocabulary),
                "split": [end - begin for begin, end in self.parts], "sha256": self.sha256}


def open_text(settings):
    """The text that --data or the data folder gives. Raises DataError or UsageError when there is none to be had."""
    given = settings["data"]
    if given is not None and not Path(given).exists():
        raise UsageError(f"--data {given}: there is no such file or folder")
    folder = data_folder(given)
    path = folder if folder.is_file() else find_enwik8(folder, settings["quiet"])
    data = read_text(path)
    try:
        lengths = [len(part) for part in split_90_5_5(data)]
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    ends = np.cumsum(lengths).tolist()
    vocabulary = Vocabulary.of(data)
    return Text(path.absolute(), vocabulary, vocabulary.encode(data), tuple(zip([0, *ends], ends)),
                hashlib.sha256(data).hexdigest())


def describe(text):
    """One line about a text and its parts."""
    train, valid, test = (f"{end - begin:,}" for begin, end in text.parts)
    part = " (a beginning of enwik8: its figures are not those of the whole)"
    return (f"{text.path}{part if text.path.name.startswith('enwik8.first') else ''}: {len(text.ids):,} bytes, "
            f"{len(text.vocabulary)} different ones; {train} for training, {valid} for validation, {test} for the test")


# ---- the models ------------------------------------------------------------------------------------------

def sizes(name, settings, width):
    """Keywords of `build` and `count_parameters` on which the number of parameters depends."""
    return {"layers": settings["lstm_layers" if name == "lstm" else "layers"],
            "projection": width // settings["ratio"], "attention_every": settings["attention_every"],
            "attention_last": settings["attention_last"], "layer_norm": not settings["no_layer_norm"]}


def size(name, settings, vocab, width):
    """The number of parameters."""
    return count_parameters(name, vocab, width, **sizes(name, settings, width))


def build_model(settings, name, vocab, window=None):
    """The model of the layer `name`; a `window` given here takes the place of --window."""
    memory = settings["memory"]
    if memory is None and settings["window"] is None:
        memory = settings["unroll"]                 # with a window: as many as it shows, the layer's own choice
    own = {key: settings[key] for key in ("heads", "highway_bias", "dropout", "attention_dropout", "dtype")}
    return build(name, vocab, settings["width"], memory=memory, window=window or settings["window"],
                 rng=np.random.default_rng([settings["seed"], 1]), **own, **sizes(name, settings, settings["width"]))


def plan(settings, vocab):
    """[(layer, its settings)] to train: in a comparison each as wide as has SRU++'s number of parameters at --width.

    Raises UsageError where that cannot be met within 3 %.
    """
    if settings["compare"] is None:
        return [(settings["layer"], settings)]
    expected, planned = size("srupp", settings, vocab, settings["width"]), []
    for name in names_of(settings):
        # Only SRU++ and its projected form need d' to be whole, and SRU++ alone to be divided by the heads.
        grain = {"srupp": {"ratio": settings["ratio"], "heads": settings["heads"]},
                 "sru-proj": {"ratio": settings["ratio"]}}.get(name, {"ratio": 1})
        width = settings["width"] if name == "srupp" else width_for(
            name, expected, vocab, **sizes(name, settings, settings["width"]), **grain)
        count = size(name, settings, vocab, width)
        if abs(count - expected) > TOLERANCE * expected:
            raise UsageError(f"--compare: {name} has {count:,} parameters at its best width, {width}; expected "
                             f"{expected:,}, SRU++'s at --width {settings['width']}, within {TOLERANCE:.0%} (a larger "
                             "--width comes nearer)")
        planned.append((name, {**settings, "layer": name, "width": width, "compare": None}))
    return planned


def table(planned, vocab):
    """The widths and sizes in a comparison, as lines."""
    rows = [("layer", "layers", "d", "d'", "parameters")]
    for name, own in planned:
        inner = own["width"] // own["ratio"] if name in ("sru-proj", "srupp") else "-"
        rows.append((name, sizes(name, own, own["width"])["layers"], own["width"], inner,
                     f"{size(name, own, vocab, own['width']):,}"))
    return "\n".join(f"{row[0]:10}" + "".join(f"{cell!s:>11}" for cell in row[1:]) for row in rows)


# ---- training --------------------------------------------------------------------------------------------

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


def evaluation(text, settings, device):
    """f(model) -> {"valid_bpc": of the first --valid-bytes, and alpha of each layer that has attention}."""
    begin, end = text.parts[1]
    end = min(end, begin + settings["valid_bytes"])

    def evaluate(model):
        figures = {"valid_bpc": bits_per_character(model, text.ids, begin, end, settings["unroll"], device)}
        for n, layer in enumerate(model.layers.layers, 1):
            if hasattr(layer, "alpha"):
                figures[f"alpha_{n}"] = float(layer.alpha.value[0])
        return figures
    return evaluate


def streams_of(text, settings):
    begin, end = text.parts[0]
    return Streams(text.ids[begin:end], settings["batch_size"], settings["unroll"], settings["seed"])


def train_one(name, settings, text, out, steps):
    """Train one model in its folder; returns its log and writes result.json and the figures."""
    device = device_of(settings)
    model = build_model(settings, name, len(text.vocabulary)).to_device(device)
    record = text.record()
    config = {**settings, "text": {key: record[key] for key in ("bytes", "sha256")},
              "vocabulary": text.vocabulary.values.tolist()}
    trainer = Trainer(
        model, make_optimizer(settings, model.parameters()), streams_of(text, settings), forward_backward,
        evaluation(text, settings, device), out=out, best="valid_bpc", config=config, seed=settings["seed"],
        device=device, log_every=LOG_EVERY, eval_every=settings["eval_every"], quiet=settings["quiet"],
        schedule=schedule_of(settings, steps), carried=model.initial_state(settings["batch_size"]),
        **clip_settings(settings))
    go_on(trainer, settings, name, steps)
    say(settings, f"{name}: d = {settings['width']}, {parameter_count(model):,} parameters, {steps:,} steps of "
                  f"{settings['batch_size'] * settings['unroll']:,} bytes")
    try:
        trainer.train(steps)
    finally:
        if trainer.log.rows:
            figures_of(name, settings, trainer.log, out)
    report(name, settings, trainer, text, device)
    return trainer.log


def parameter_count(model):
    return sum(parameter.value.size for parameter in model.parameters())


def report(name, settings, trainer, text, device):
    """Score the best checkpoint on the whole validation and test parts; keep that in result.json, and print it."""
    model, path = trainer.model, trainer.out / "best.safetensors"
    take_parameters(model, load_tensors(path)[0], path)
    valid, test = (bits_per_character(model, text.ids, *part, settings["unroll"], device) for part in text.parts[1:])
    bytes_a_second = trainer.step * settings["batch_size"] * settings["unroll"] / max(trainer.seconds, 1e-9)
    result = {"layer": name, "width": settings["width"], "parameters": parameter_count(model), "steps": trainer.step,
              "metric": "valid_bpc", "valid_bpc": valid, "test_bpc": test, "best": trainer.best, "text": text.record(),
              "seconds": round(trainer.seconds, 1), "bytes_per_second": round(bytes_a_second)}
    write_atomically(trainer.out / "result.json", f"{json.dumps(result, indent=1)}\n".encode())
    print(f"{name}: {valid:.3f} bits per character on validation, {test:.3f} on test (best checkpoint, step "
          f"{trainer.best['step']:,} of {trainer.step:,}); {result['parameters']:,} parameters; {trainer.seconds:.0f} s"
          f", {bytes_a_second:,.0f} bytes/s", flush=True)


def take_parameters(model, tensors, path):
    """Fill the model from a training checkpoint, leaving aside what only the trainer needs."""
    fill_exactly(model.named_arrays(), model_tensors(tensors), path)


# ---- figures ---------------------------------------------------------------------------------------------

def label(name, settings):
    return f"{LABELS[name]}, d = {settings['width']}"


def curve(log, x="step"):
    """[(step or seconds, validation BPC)] without the untrained model's, which would squash the figure."""
    return [(row[x], row["valid_bpc"]) for row in log.rows if row["step"] and row["valid_bpc"] is not None]


def training_curve(log):
    """[(step, training BPC)] at the evaluations: the mean since the last one."""
    points, losses = [], []
    for row in log.rows:
        losses += [] if row["loss"] is None else [row["loss"]]
        if row["step"] and row["valid_bpc"] is not None:
            points.append((row["step"], sum(losses) / len(losses) / math.log(2)))
            losses = []
    return points


def figures_of(name, settings, log, out):
    """bpc.png, grad_norm.png, and where there is attention alpha.png."""
    series = {"validation": curve(log), "training, mean since the evaluation before": training_curve(log)}
    draw_curves(out / "bpc.png", series, title=label(name, settings), x_label="iteration",
                y_label="bits per character")
    alphas = {f"layer {c.removeprefix('alpha_')}": log.column(c) for c in log.columns if c.startswith("alpha_")}
    if alphas:
        draw_curves(out / "alpha.png", alphas, title=f"{label(name, settings)}: weight of attention",
                    x_label="iteration", y_label=r"$\alpha$")
    norm, clip = log.column("grad_norm"), settings["clip_norm"]
    draw_curves(out / "grad_norm.png", {"global norm before clipping": norm}, title=label(name, settings),
                x_label="iteration", y_label="gradient norm", log_y=True,
                horizontal=(clip, f"clipped at {clip:g}") if clip else None)


# ---- generating ------------------------------------------------------------------------------------------

def checkpoint_path(given):
    """The file that --checkpoint names, in a run's folder the best checkpoint."""
    path = Path(given)
    if not path.is_dir():
        return path
    if not (path / "best.safetensors").is_file():
        inside = sorted(best.parent.name for best in path.glob("*/best.safetensors"))
        raise UsageError(f"--checkpoint {path}: there is no best.safetensors in it"
                         + (f"; expected one of its folders {', '.join(inside)}" if inside else ""))
    return path / "best.safetensors"


def restore(path):
    """(model, vocabulary) of a checkpoint of this task. Raises CheckpointError for another or a damaged one."""
    tensors, meta = load_tensors(path)
    try:
        config = {**DEFAULTS, **meta["config"]}     # settings that are younger than the checkpoint have their default
        name, vocabulary = meta["config"]["layer"], Vocabulary(config["vocabulary"])
        # In training a step saw at most the memory and its own segment; here it sees no more.
        most = config["unroll"] + (config["unroll"] if config["memory"] is None else config["memory"])
        model = build_model(config, name, len(vocabulary), window=config["window"] or most)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"checkpoint {path}: not one of tasks/char_lm.py, or damaged ({what})") from error
    take_parameters(model, tensors, path)
    return model, vocabulary


def sample(logits, temperature, rng):
    """The symbol (an int) drawn from softmax(logits / temperature); at 0 the likeliest."""
    logits = asnumpy(logits).astype("float64")
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / temperature
    cumulative = np.exp(scaled).cumsum()
    return min(int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")), len(logits) - 1)


def generate(model, vocabulary, prompt, temperature, seed, device="cpu"):
    """Yield one byte after another, as ints, behind a prompt (bytes); the same ones for the same seed."""
    rng, stepping = np.random.default_rng([seed, 2]), model.begin()
    for symbol in vocabulary.encode(prompt):
        logits, stepping = model.step(to_device(np.array([symbol], np.int64), device), stepping)
    while True:
        symbol = sample(logits[0], temperature, rng)
        yield int(vocabulary.values[symbol])
        logits, stepping = model.step(to_device(np.array([symbol], np.int64), device), stepping)


def write_text(settings):
    """Print --prompt and the --generate N bytes behind it, each as it comes."""
    device = device_of(settings)
    model, vocabulary = restore(checkpoint_path(settings["checkpoint"]))
    prompt = settings.get("prompt")
    if prompt is None:
        prompt = "\n" if 10 in vocabulary.values else chr(vocabulary.values[0])
    prompt = prompt.encode("utf-8", "surrogateescape")
    if not prompt:
        raise UsageError("--prompt is empty; expected at least one byte")
    try:
        vocabulary.encode(prompt)
    except ValueError as error:
        raise UsageError(f"--prompt: {error} that the model was trained on") from error
    decoder, began = codecs.getincrementaldecoder("utf-8")("replace"), time.monotonic()
    show("" if settings["quiet"] else decoder.decode(prompt))
    bytes_ = generate(model.to_device(device), vocabulary, prompt, settings.get("temperature", 1.0), settings["seed"],
                      device)
    for _ in range(settings["generate"]):
        show(decoder.decode(bytes([next(bytes_)])))
    show(decoder.decode(b"", True) + "\n")
    if not settings["quiet"]:
        seconds = time.monotonic() - began
        print(f"{settings['generate']:,} bytes in {seconds:.1f} s, {settings['generate'] / seconds:,.0f} bytes/s",
              file=sys.stderr)


def show(text):
    print(text, end="", flush=True)


# ---- the command -----------------------------------------------------------------------------------------

def main(argv):
    settings = parse(argv)
    if settings.get("generate"):
        try:
            write_text(settings)
        except BrokenPipeError:                     # the reader has enough: `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    device_of(settings)                             # before anything is written
    text = open_text(settings)
    settings["data"] = str(text.path)               # so that --resume finds the same one
    vocab = len(text.vocabulary)
    try:                                            # nor is anything written for settings that do not fit
        steps = steps_of(settings, streams_of(text, settings).per_epoch, STEPS)
        planned = plan(settings, vocab)
        schedule_of(settings, steps)
        for name, own in planned:
            make_optimizer(own, build_model(own, name, vocab).parameters())
    except ValueError as error:
        raise UsageError(str(error)) from error
    require_same_schedule(settings, text, steps)
    say(settings, describe(text))
    if settings["compare"] is not None:
        say(settings, table(planned, vocab))
    out, hold = open_run_folder("char_lm", settings)
    say(settings, f"writing to {out}")
    if settings["compare"] is None:
        train_one(settings["layer"], settings, text, out, steps)
    else:
        compare(planned, settings, text, out, steps)
    del hold
    say(settings, f"figures: {', '.join(str(path) for path in sorted(Path(out).rglob('*.png')))}")


def require_same_schedule(settings, text, steps):
    """Raise UsageError where a resumed run's learning rates would become others by another number of steps."""
    if not settings["resume"] or (settings["schedule"] == "constant" and settings["warmup"] is not None):
        return
    before = steps_of(read_config(settings["resume"]), streams_of(text, settings).per_epoch, STEPS)
    if steps != before:
        raise UsageError(f"--steps: {steps:,} are asked for, but the run in {settings['resume']} is one of {before:,}, "
                         "by which its learning rate goes; expected the same number (or --schedule constant and "
                         "--warmup from the beginning)")


def compare(planned, settings, text, out, steps):
    """Train the models one after another, each in its own folder, then draw them together."""
    logs = {}
    for name, own in planned:
        folder = out / name
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():
            write_config(folder, own)
        logs[label(name, own)] = train_one(name, own, text, folder, steps)
    for file, x, x_label in (("bpc.png", "step", "iteration"), ("bpc-time.png", "seconds", "seconds")):
        draw_curves(out / file, {name: curve(log, x) for name, log in logs.items()}, x_label=x_label,
                    y_label="bits per character", title=f"Validation on {text.path.name}, equal numbers of parameters")


if __name__ == "__main__":
    sys.exit(run(main))
