"""Using a trained sentence encoder: `python tasks/tsdae.py encode FILE ...`."""

import io
import sys
import warnings
from pathlib import Path

import numpy as np

from minigrad.data import DataError
from minigrad.data.files import read_lines
from minigrad.tensors import write_atomically
from models.tsdae import TSDAE
from tasks import tsdae_score
from tasks.frame import Command, UsageError, device_of, say, whole


def flags(parser):
    parser.add_argument("file", metavar="FILE", help="a text, one sentence a line")
    parser.add_argument("--checkpoint", metavar="FILE", required=True, help="a checkpoint, or a run's folder: its best")
    parser.add_argument("--out", metavar="FILE.npy", help="write the vectors there")
    parser.add_argument("--nearest", metavar="TEXT", help="print the lines that are nearest to this sentence")
    parser.add_argument("--top", type=whole(1), help="how many of them (default 10)")


def read_all(path):
    """[str]: every line of a file, so that row n is line n. Raises DataError for an empty one, naming it."""
    lines = read_lines(path)
    if "" in lines:
        raise DataError(f"{path}, line {lines.index('') + 1}: empty; expected a sentence on every line: each gets "
                        "a vector")
    return lines


def use_encoder(settings):
    """Write the vectors of a file's lines, print those nearest to a sentence."""
    if settings["out"] is None and settings["nearest"] is None:
        raise UsageError("encode needs --out FILE.npy, for the vectors, or --nearest TEXT, or both")
    if settings["top"] and settings["nearest"] is None:
        raise UsageError("--top has a meaning only with --nearest TEXT")
    device, out = device_of(settings), settings["out"]
    if out is not None and Path(out).exists():
        raise UsageError(f"--out {out} is there already; nothing was written")
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {Path(out).parent}")
    query = settings["nearest"]
    if query is not None and not query.strip():
        raise UsageError(f"--nearest is {query!r}; expected a sentence")
    lines = read_all(settings["file"])
    model = TSDAE.load(settings["checkpoint"], device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vectors = model.encode(lines)
        of_query = None if query is None else model.encode([query])
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"warning: {text}", file=sys.stderr)
    if out is not None:
        content = io.BytesIO()
        np.save(content, vectors)
        write_atomically(out, content.getvalue())
        say(settings, f"{out}: {vectors.shape[0]:,} x {vectors.shape[1]} float32, row n the n-th line of "
                      f"{settings['file']}")
    if query is not None:
        similarity = tsdae_score.cosines(vectors, of_query)
        for n in np.argsort(-similarity, kind="stable")[:settings["top"] or 10]:
            print(f"{similarity[n]:.3f}  {lines[n]}")


COMMAND = Command("Embed each line of a file with the model of a checkpoint.", flags, use_encoder)
