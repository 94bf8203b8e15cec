"""Writing a text with a trained language model, one byte after another: `python tasks/char_lm.py generate N ...`."""

import codecs
import sys
import time
from pathlib import Path

import numpy as np

from minigrad.backend import asnumpy, to_device
from minigrad.data import Vocabulary
from minigrad.tensors import CheckpointError, load_tensors
from minigrad.training import load_model
from models.srupp_lm import SETTINGS, model_of
from tasks.frame import Command, UsageError, device_of, number, whole


def flags(parser):
    parser.add_argument("count", metavar="N", type=whole(1), help="how many bytes to write")
    parser.add_argument("--checkpoint", metavar="FILE", required=True, help="a checkpoint, or a run's folder: its best")
    parser.add_argument("--prompt", metavar="TEXT", help="what the model reads first (default: a new line)")
    parser.add_argument("--temperature", type=number(0), default=1.0, help="0: always the likeliest byte (default 1)")
    parser.add_argument("--seed", type=whole(0), default=0, help="default 0")


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
    _, meta = load_tensors(path)
    try:
        config = {**SETTINGS, **meta["config"], "layer": meta["config"]["layer"]}     # it may be older than a setting
        vocabulary = Vocabulary(config["vocabulary"])
        # In training a step saw at most the memory and its own segment; here it sees no more.
        most = config["unroll"] + (config["unroll"] if config["memory"] is None else config["memory"])
        model = model_of(config, len(vocabulary), window=config["window"] or most)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"checkpoint {path}: not one of tasks/char_lm.py, or damaged ({what})") from error
    load_model(model, path)
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
    """Yield one byte after another, as ints, that follow a prompt (bytes); the same ones for the same seed."""
    rng, stepping = np.random.default_rng([seed, 2]), model.begin()
    for symbol in vocabulary.encode(prompt):
        logits, stepping = model.step(to_device(np.array([symbol], np.int64), device), stepping)
    while True:
        symbol = sample(logits[0], temperature, rng)
        yield int(vocabulary.values[symbol])
        logits, stepping = model.step(to_device(np.array([symbol], np.int64), device), stepping)


def write_text(settings):
    """Print --prompt and the N bytes that follow it, each as it comes."""
    device = device_of(settings)
    model, vocabulary = restore(checkpoint_path(settings["checkpoint"]))
    prompt = settings["prompt"]
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
    bytes_ = generate(model.to_device(device), vocabulary, prompt, settings["temperature"], settings["seed"],
                      device)
    for _ in range(settings["count"]):
        show(decoder.decode(bytes([next(bytes_)])))
    show(decoder.decode(b"", True) + "\n")
    if not settings["quiet"]:
        seconds = time.monotonic() - began
        print(f"{settings['count']:,} bytes in {seconds:.1f} s, {settings['count'] / seconds:,.0f} bytes/s",
              file=sys.stderr)


def show(text):
    print(text, end="", flush=True)


COMMAND = Command("Write N bytes with the model of a checkpoint, one after another.", flags, write_text)
