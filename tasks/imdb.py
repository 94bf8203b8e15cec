"""Sentiment of film reviews: RRA, LSTM and others on IMDB (Wang 2017, section 4.3, Figures 6 and 7, Table 2).

    python tasks/imdb.py                                 RRA, K = 5, two epochs
    python tasks/imdb.py --model birra                   the same, reading both ways
    python tasks/imdb.py --paper --compare rra,lstm      the paper's setting, 15 epochs
    python tasks/imdb.py --resume runs/imdb/...          continue a run that was stopped
    python tasks/imdb.py predict "I loved it." --checkpoint runs/imdb/...
                                                         the sentiment of a text, or of each line of a file
    python tasks/imdb_linear.py bow                      a linear classifier of the words, seconds; or lsa

25,000 labelled reviews to train on and 25,000 to test on (Maas et al. 2011), no others: about 280 words each, 10,000
different ones. A review's words become vectors, a recurrent layer reads them, the mean of its outputs over the review
goes through dropout into a softmax over negative and positive.

Data: --data, else $MINIGRAD_DATA, else ~/.cache/minigrad: the unpacked folder aclImdb, or aclImdb_v1.tar.gz as it is,
there or one folder below; fetched where there is none. It is read once, in some seconds, and then kept in one file in
~/.cache/minigrad.

Stated in the paper: 10,000 words, embedding and units 128, batches of 16, Adadelta, K = 5, 10, 20, about 15 epochs. The
rest is the deeplearning.net tutorial's, from which its settings come: Adadelta without a learning rate, the mean over
time, dropout 0.5, no clipping, biases 0. The defaults are these, except forget bias 1 and 2 epochs. Not the
tutorial's are the first values of embedding and readout (there 0.01 U[0, 1) and 0.01 N(0, 1)), the tokeniser, that a
batch's reviews are of like length, and that reviews are read whole (there none above 100 words is trained on).

Expect: the test error falls below 20 % within the first epoch; a run folder (runs/imdb/TIME) with config.json, log.csv,
figure6.png (test error against iteration), figure7.png (RRA's attention weights), last and best checkpoints (best by
the test error, for there is no validation set: the result to quote is the last one), result.json.
"""

import hashlib
import os
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from minigrad.backend import asnumpy, to_device
from minigrad.data import DataError
from minigrad.data.files import read_lines
from minigrad.data.imdb import read_imdb
from minigrad.data.reviews import SPECIAL, LengthBatches, chosen, encode_review, in_order, top_words
from minigrad.data.sentences import padded
from minigrad.functional import softmax
from minigrad.tensors import CheckpointError, load_tensors
from minigrad.training import load_model
from models.cells import BOTH_WAYS, CELLS, build_cell, taken_by
from models.classifier import POOLINGS, TextClassifier
from tasks import frame
from tasks.frame import UsageError, classify, number, whole
from tasks.frame.cell_flags import cell_label, cell_settings

MODELS = (*CELLS, *BOTH_WAYS)
DEFAULTS = {
    **classify.DEFAULTS, "window": 5, "hidden": 128, "embedding": 128, "vocab": 10_000, "pooling": "mean",
    "dropout": 0.5, "max_length": 0, "batch_size": 16, "optimizer": "adadelta", "lr": None, "eval_every": 250,
    "eval_size": 2000, "train_size": 0, "test_size": 0, "epochs": 2}
PAPER = {"forget_bias": 0.0, "epochs": 15}
METRIC = "test_error"
SENTIMENTS = ("negative", "positive")
EVALUATED = 64                                      # reviews at a time, where nothing is trained
READS = "the folder with aclImdb or its archive, or one of them (default $MINIGRAD_DATA, then ~/.cache/minigrad)"


def flags(group):
    classify.add_flags(group, DEFAULTS)
    group.add_argument("--embedding", type=whole(1), help="width of a word's vector (default 128)")
    group.add_argument("--vocab", type=whole(1), help="most frequent words that are known (default 10,000)")
    group.add_argument("--pooling", choices=POOLINGS, help="what the classifier reads: the mean over time (default) "
                                                           "or the last output")
    group.add_argument("--dropout", type=number(0, below=1), help="of what it reads (default 0.5)")
    group.add_argument("--max-length", type=whole(0), help="the first so many words of a review are read; 0: all "
                                                           "(default)")
    group.add_argument("--train-size", type=whole(0), help="reviews to train on, at random; 0: all (default)")
    group.add_argument("--test-size", type=whole(0), help="reviews to test on, at random; 0: all (default)")


# ---- data ------------------------------------------------------------------------------------------------

class Parts(NamedTuple):
    """The reviews of a run."""

    train: Any                  # Reviews
    test: Any
    words: list                 # those that are known, after the special ones


def open_reviews(settings):
    """The reviews with --vocab words; a random part of them where one is asked for."""
    imdb = read_imdb(settings["data"], quiet=settings["quiet"])
    vocab, parts = settings["vocab"] + len(SPECIAL), []
    for name, reviews in (("train", imdb.train), ("test", imdb.test)):
        size, most = settings[f"{name}_size"], len(reviews.labels)
        if size > most:
            raise UsageError(f"--{name}-size is {size:,}; expected at most {most:,}")
        seed = settings["seed"] if name == "train" else 0        # every seed has the same test set
        parts.append(top_words(random_part(reviews, size or most, seed), vocab))
    return Parts(*parts, imdb.words[:vocab])


def random_part(reviews, size, seed):
    """`size` of the reviews, the same ones for the same seed; all of them as they are."""
    n = len(reviews.labels)
    return reviews if size >= n else chosen(reviews, np.random.default_rng([seed, 12]).permutation(n)[:size])


def batches(settings, data):
    return LengthBatches(data.train, settings["batch_size"], settings["seed"], longest=settings["max_length"] or None)


def describe(settings, data):
    train, test = data.train, data.test
    unknown, lengths = (train.tokens == 1).mean(), np.diff(train.offsets)
    lines = [f"{len(train.labels):,} reviews to train on, {len(test.labels):,} to test on; {lengths.mean():.0f} words "
             f"each, at most {lengths.max():,}; {len(data.words) - len(SPECIAL):,} words are known, {unknown:.1%} of "
             "the text is not"]
    if settings["max_length"]:
        cut = (np.diff(test.offsets) > settings["max_length"]).sum()
        lines.append(f"of {batches(settings, data).cut:,} training reviews only the first {settings['max_length']:,} "
                     f"words are read, of {cut:,} test reviews as well")
    return "\n".join(lines)


# ---- training --------------------------------------------------------------------------------------------

def build(settings, data=None):
    """The model; embedding and classifier start the same for all of one width."""
    seed = settings["seed"]
    cell, width = build_cell(settings["model"], settings["embedding"], settings["hidden"],
                             rng=np.random.default_rng([seed, 1]), **cell_settings(settings))
    return TextClassifier(settings["vocab"] + len(SPECIAL), settings["embedding"], cell, width, 2,
                          pooling=settings["pooling"], dropout=settings["dropout"], dtype=settings["dtype"],
                          rng=np.random.default_rng([seed, 2]))


def evaluation(settings, data, device):
    longest = settings["max_length"] or None
    by_length = lambda reviews: lambda: (batch[:3] for batch in in_order(reviews, EVALUATED, longest))
    part = by_length(random_part(data.test, settings["eval_size"], 0))
    return classify.Evaluation(settings, part, by_length(data.test), batches(settings, data).per_epoch, METRIC, device)


def trainer(settings, data, model):
    return {"config": {"dictionary": dictionary(data), "reviews": crc32(data.train.tokens), "words": data.words},
            **classify.trainer_keywords(METRIC)}


def dictionary(data):
    digest = hashlib.sha256("\n".join(data.words).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{len(data.words):,} (sha256 {digest[:16]}...)"


def out_of_memory(settings, data):
    longest = max(int(np.diff(part.offsets).max()) for part in (data.train, data.test))
    return (f"; the longest review has {longest:,} words, --batch-size is {settings['batch_size']}: --max-length N "
            "reads the first N words of each")


def title(settings):
    part, test = settings["eval_size"], settings["test_size"] or 25_000
    return (f"IMDB, {settings['hidden']} units, {classify.setting_of(settings, DEFAULTS, PAPER)}; {min(part, test):,} "
            f"of {test:,} test reviews")


def result(run):
    data = run.data
    return classify.result_of(run, METRIC, {
        "train": len(data.train.labels), "test": len(data.test.labels), "words": dictionary(data),
        "part": min(run.settings["eval_size"], len(data.test.labels)), "cut": run.trainer.batches.cut,
        "mean_length": round(float(np.diff(data.train.offsets).mean()), 1)})


# ---- using a trained model -------------------------------------------------------------------------------

def predict_flags(parser):
    parser.add_argument("text", metavar="TEXT", help="the sentiment of a text, or of each line of a file")
    parser.add_argument("--checkpoint", metavar="FILE", required=True, help="a checkpoint, or a run's folder: its last")
    parser.add_argument("--max-length", type=whole(0), help="words that are read at most; 0: all (default: the run's)")


def restore(path, device):
    """(model, {word: id}, --max-length) of a checkpoint of this task. Raises CheckpointError, one line."""
    path = Path(path) / "last.safetensors" if Path(path).is_dir() else Path(path)
    _, meta = load_tensors(path)
    try:
        settings = dict(meta["config"])
        to_ids, longest = {word: n for n, word in enumerate(settings["words"])}, settings["max_length"]
        if not len(SPECIAL) < len(to_ids) <= settings["vocab"] + len(SPECIAL):
            raise ValueError(f"it has {len(to_ids):,} words")
        model = build(settings)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"checkpoint {path}: not one of tasks/imdb.py, or damaged ({what})") from error
    load_model(model, path)
    return model.to_device(device), to_ids, longest


def read_texts(given):
    """[str]: the text itself, or the lines of a file where there is one of that name. Raises DataError, one line."""
    try:
        exists = given.strip() and Path(given).exists()
    except (OSError, ValueError):                   # a text is not always a possible file name
        exists = False
    if not exists:
        if not any(map(str.isspace, given.strip())) and (os.sep in given or Path(given).suffix[1:].isalnum()):
            raise DataError(f"{given}: there is no such file")       # one word that looks like a path
        return [given]
    return read_lines(given)


def predict(settings):
    """Print the sentiment of each text with its probability."""
    texts, device = read_texts(settings["text"]), frame.device_of(settings)
    model, to_ids, longest = restore(settings["checkpoint"], device)
    longest = (longest if settings["max_length"] is None else settings["max_length"]) or None
    rows = []
    for n, text in enumerate(texts, 1):
        try:
            ids = encode_review(text, to_ids, len(to_ids))
        except ValueError as error:
            raise UsageError(f"predict: text {n} has no word ({text!r}); expected a review, or a file with one on "
                             "each line") from error
        if longest and len(ids) > longest:
            frame.say(settings, f"text {n}: only the first {longest:,} of its {len(ids):,} words are read")
        rows.append(ids[:longest])
    for ids, text in zip(rows, texts):              # one at a time: of very different lengths
        logits = model(*to_device(padded([ids]), device))
        p = asnumpy(softmax.forward(logits)[0])[0]
        known = (ids > 1).mean()
        print(f"{SENTIMENTS[int(p.argmax())]} {p.max():.3f}   {textwrap.shorten(text, 70)}"
              + ("" if known > 0.5 else f"   (only {known:.0%} of its words are known)"), flush=True)


TASK = frame.Task(
    name="imdb", description=__doc__, defaults=DEFAULTS, paper=PAPER, flags=flags, reads=READS,
    variants=MODELS, flags_of=taken_by(MODELS),
    label=lambda settings: cell_label(settings) if settings["model"] in MODELS else settings["model"].upper(),
    data=open_reviews, describe=describe, model=build, batches=batches, step=classify.forward_backward,
    evaluation=evaluation, trainer=trainer, resumed=lambda run: classify.require_an_end(run, METRIC),
    out_of_memory=out_of_memory,
    curve=frame.Curve(METRIC, "test error", title, "figure6.png", best=f"{METRIC}_all"),
    result=result, summary=lambda run, result: classify.summary_of(run, result, METRIC),
    figures=classify.draw_attention,
    shown=frame.Shown(columns=classify.columns(METRIC), note="on all test reviews", in_label=("window",)),
    commands={"predict": frame.Command("Print the sentiment of a text or of a file's lines.", predict_flags, predict)})

if __name__ == "__main__":
    sys.exit(frame.run(TASK))
