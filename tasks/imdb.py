"""Sentiment of film reviews: RRA, LSTM and others on IMDB (Wang 2017, section 4.3, Figures 6 and 7, Table 2).

    python tasks/imdb.py                                 RRA, K = 5, two epochs
    python tasks/imdb.py --model birra                   the same, reading both ways
    python tasks/imdb.py --paper --compare rra,lstm      the paper's setting, 15 epochs: it says how long that takes
    python tasks/imdb.py --model bow                     a linear classifier of the words, seconds; --model lsa
    python tasks/imdb.py --resume runs/imdb/...          go on with a run that was stopped
    python tasks/imdb.py --predict "I loved it." --checkpoint runs/imdb/...
                                                         the sentiment of a text, or of each line of a file

25,000 labelled reviews to train on and 25,000 to test on (Maas et al. 2011), no others: about 280 words each, 10,000
different ones. A review's words become vectors, a recurrent layer reads them, the mean of its outputs over the review
goes through dropout into a softmax over negative and positive.

Data: --data, else $MINIGRAD_DATA, else ~/.cache/minigrad: the unpacked folder aclImdb, or aclImdb_v1.tar.gz as it is,
there or one folder below; fetched where there is none. It is read once, in some seconds, and then kept in one file in
~/.cache/minigrad.

Stated in the paper: 10,000 words, embedding and units 128, batches of 16, Adadelta, K = 5, 10, 20, about 15 epochs. The
rest is the deeplearning.net tutorial's, from which its settings come: Adadelta without a learning rate, the mean over
time, dropout 0.5, no clipping, biases 0. The defaults are these, but for the forget bias 1 and 2 epochs. Not the
tutorial's are the first values of embedding and readout (there 0.01 U[0, 1) and 0.01 N(0, 1)), the tokeniser, that a
batch's reviews are of like length, and that reviews are read whole (there none above 100 words is trained on).

Expect: the test error falls below 20 % within the first epoch; a run folder (runs/imdb/TIME) with config.json, log.csv,
figure6.png (test error against iteration), figure7.png (RRA's attention weights), last and best checkpoints (best by
the test error, for there is no validation set: the result to quote is the last one), result.json.
"""

from tasks.frame.common import (  # first: it sets the number of BLAS threads
    device_of,
    number,
    parser_for,
    run,
    say,
    settings_of,
    steps_of,
    whole,
)

# isort: split
import hashlib
import os
import sys
from pathlib import Path
from zlib import crc32

import numpy as np

from minigrad.backend import asnumpy, to_device
from minigrad.data import DataError, data_folder
from minigrad.data.files import read_unpacked
from minigrad.data.imdb import read_imdb
from minigrad.data.reviews import SPECIAL, LengthBatches, chosen, encode_review, in_order, top_words
from minigrad.data.sentences import padded
from minigrad.functional import softmax
from minigrad.tensors import CheckpointError, fill_exactly, load_tensors
from minigrad.training.checkpoint import model_tensors
from models.cells import BOTH_WAYS, CELLS, build_cell
from models.classifier import READOUTS, TextClassifier
from tasks import imdb_linear
from tasks.frame import classify
from tasks.frame.run_folder import UsageError, open_run_folder

MODELS = (*CELLS, *BOTH_WAYS)
DEFAULTS = {
    **classify.FLAGS, "data": None, "window": 5, "hidden": 128, "embedding": 128, "vocab": 10_000, "readout": "mean",
    "dropout": 0.5, "max_length": 0, "batch_size": 16, "optimizer": "adadelta", "lr": None, "eval_every": 250,
    "eval_size": 2000, "train_size": 0, "test_size": 0}
PAPER = {"forget_bias": 0.0}
SIZES = {"hidden": 128, "embedding": 128, "vocab": 10_000, "batch_size": 16, "max_length": 0, "train_size": 0}
EPOCHS = {False: 2, True: 15}                       # by --paper
SENTIMENTS = ("negative", "positive")
EVALUATED = 64                                      # reviews at a time, where nothing is trained
WITH_LINEAR = {"model", "data", "seed", "epochs", "lr", "vocab", "train_size", "test_size", "out", "quiet", "threads"}
WITH_PREDICT = {"predict", "checkpoint", "device", "threads", "quiet", "max_length"}


def parse(argv):
    """The settings of this run; see `--help`."""
    parser = parser_for("imdb", __doc__, data="the folder with aclImdb or its archive, or one of them (default "
                                              "$MINIGRAD_DATA, then ~/.cache/minigrad)")
    own = parser.add_argument_group("of this task")
    classify.add_flags(own, DEFAULTS, CELLS, BOTH_WAYS, others=imdb_linear.MODELS)
    own.add_argument("--embedding", type=whole(1), help="width of a word's vector (default 128)")
    own.add_argument("--vocab", type=whole(1), help="most frequent words that are known (default 10,000)")
    own.add_argument("--readout", choices=READOUTS, help="what the classifier reads: the mean over time (default), or "
                                                         "the last output")
    own.add_argument("--dropout", type=number(0), help="of what it reads (default 0.5)")
    own.add_argument("--max-length", type=whole(0), help="words of a review at most: of a longer one the first so many "
                                                         "are read; 0: all (default)")
    own.add_argument("--train-size", type=whole(0), help="reviews to train on, at random; 0: all (default)")
    own.add_argument("--test-size", type=whole(0), help="reviews to test on, at random; 0: all (default)")
    other = parser.add_argument_group("to use a trained model")
    other.add_argument("--predict", metavar="TEXT", help="the sentiment of a text, or of each line of a file")
    other.add_argument("--checkpoint", metavar="FILE", help="a checkpoint, or the folder of a run (its last one)")
    given = {key for key, value in vars(parser.parse_args(argv)).items() if value is not None}
    settings = settings_of(parser, argv, lambda given: classify.default_lr(
        given, {**DEFAULTS, **(PAPER if "paper" in given else {})}))
    _require_fitting(given, settings)
    if "predict" in given and "max_length" not in given:
        settings["max_length"] = None               # the checkpoint's
    return settings


def _require_fitting(given, settings):
    """Raise UsageError for flags that contradict one another."""
    if "predict" in given:
        foreign = sorted(given - WITH_PREDICT)
        if foreign:
            raise UsageError(f"--{foreign[0].replace('_', '-')} has no meaning with --predict: the model is the "
                             "checkpoint's")
        if "checkpoint" not in given:
            raise UsageError("--predict needs --checkpoint FILE, a checkpoint or the folder of a run")
        return
    if settings["model"] in imdb_linear.MODELS:
        foreign = sorted(given - WITH_LINEAR)
        if foreign:
            raise UsageError(f"--{foreign[0].replace('_', '-')} has no meaning with --model {settings['model']}")
    if "checkpoint" in given:
        raise UsageError("--checkpoint has a meaning only with --predict TEXT")
    if settings["dropout"] >= 1:
        raise UsageError(f"--dropout is {settings['dropout']:g}; expected a share below 1")
    classify.names_of(settings, MODELS)


# ---- data ------------------------------------------------------------------------------------------------

def open_reviews(settings):
    """(train, test, words): the reviews with --vocab words, and these; a random part of them where one is asked for."""
    imdb = read_imdb(settings["data"], quiet=settings["quiet"])
    vocab, parts = settings["vocab"] + len(SPECIAL), []
    for name, reviews in (("train", imdb.train), ("test", imdb.test)):
        size, most = settings[f"{name}_size"], len(reviews.labels)
        if size > most:
            raise UsageError(f"--{name}-size is {size:,}; expected at most {most:,}")
        seed = settings["seed"] if name == "train" else 0        # every seed has the same test set
        parts.append(top_words(random_part(reviews, size or most, seed), vocab))
    return *parts, imdb.words[:vocab]


def random_part(reviews, size, seed):
    """`size` of the reviews, the same ones for the same seed; all of them as they are."""
    n = len(reviews.labels)
    return reviews if size >= n else chosen(reviews, np.random.default_rng([seed, 12]).permutation(n)[:size])


def describe(train, test, words, batches, settings):
    """A line about the data."""
    unknown = (train.tokens == 1).mean()
    lengths = np.diff(train.offsets)
    lines = [f"{len(train.labels):,} reviews to train on, {len(test.labels):,} to test on; {lengths.mean():.0f} words "
             f"each, at most {lengths.max():,}; {len(words) - len(SPECIAL):,} words are known, {unknown:.1%} of the "
             "text is not"]
    if settings["max_length"]:
        lines.append(f"of {batches.cut:,} training reviews only the first {settings['max_length']:,} words are read, "
                     f"of {(np.diff(test.offsets) > settings['max_length']).sum():,} test reviews as well")
    return "\n".join(lines)


def for_evaluation(reviews, settings):
    """f() -> batches (ids, mask, labels) of all of these reviews, by length."""
    return lambda: (batch[:3] for batch in in_order(reviews, EVALUATED, settings["max_length"] or None))


# ---- training --------------------------------------------------------------------------------------------

def build(settings, name):
    """The model `name`; embedding and readout start the same for all of one width."""
    seed, dtype = settings["seed"], settings["dtype"]
    own = {key: settings[key] for key in ("window", "offset", "normalize", "forget_bias", "init", "dtype")}
    cell, width = build_cell(name, settings["embedding"], settings["hidden"], rng=np.random.default_rng([seed, 1]),
                             **own)
    return TextClassifier(settings["vocab"] + len(SPECIAL), settings["embedding"], cell, width, 2, settings["readout"],
                          settings["dropout"], rng=np.random.default_rng([seed, 2]), dtype=dtype)


def train(settings, names, train, test, words, out, steps, batches):
    """Train the models in the run's folder."""
    digest = hashlib.sha256("\n".join(words).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    record = {"train": len(train.labels), "test": len(test.labels), "words": f"{len(words):,} (sha256 {digest}...)",
              "part": min(settings["eval_size"], len(test.labels)), "cut": batches.cut,
              "mean_length": round(float(np.diff(train.offsets).mean()), 1)}
    task = classify.Task(
        build=lambda name: build(settings, name), batches=batches, metric="test_error", figure="figure6.png",
        part=for_evaluation(random_part(test, settings["eval_size"], 0), settings),
        every=for_evaluation(test, settings), title=title(settings, record), record=record,
        config={"dictionary": record["words"], "reviews": crc32(train.tokens), "words": words})
    if settings["compare"] is None:
        classify.train_one(task, names[0], settings, out, steps)
    else:
        classify.compare(task, names, settings, out, steps)


def title(settings, record):
    how = classify.setting_of(settings, {**SIZES, "optimizer": "adadelta", "lr": None})
    return f"IMDB, {settings['hidden']} units, {how}; {record['part']:,} of {record['test']:,} test reviews"


# ---- using a trained model -------------------------------------------------------------------------------

def load_model(path, device):
    """(model, {word: id}, --max-length) of a checkpoint of this task. Raises CheckpointError, one line."""
    path = Path(path) / "last.safetensors" if Path(path).is_dir() else Path(path)
    tensors, meta = load_tensors(path)
    try:
        settings = dict(meta["config"])
        to_ids, longest = {word: n for n, word in enumerate(settings["words"])}, settings["max_length"]
        if not len(SPECIAL) < len(to_ids) <= settings["vocab"] + len(SPECIAL):
            raise ValueError(f"it has {len(to_ids):,} words")
        model = build(settings, settings["model"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"checkpoint {path}: not one of tasks/imdb.py, or damaged ({what})") from error
    fill_exactly(model.named_arrays(), model_tensors(tensors), path)
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
    lines = read_unpacked(given).removesuffix(b"\n").split(b"\n")
    texts = []
    for n, line in enumerate(lines, 1):
        try:
            texts.append(line.decode("utf-8-sig" if n == 1 else "utf-8").strip())
        except UnicodeDecodeError as error:
            raise DataError(f"{given}, line {n}: not UTF-8 (byte {line[error.start]:#04x})") from error
    return texts


def predict(settings):
    """--predict: print the sentiment of each text with its probability."""
    texts, device = read_texts(settings["predict"]), device_of(settings)
    model, to_ids, longest = load_model(settings["checkpoint"], device)
    longest = (longest if settings["max_length"] is None else settings["max_length"]) or None
    rows = []
    for n, text in enumerate(texts, 1):
        try:
            ids = encode_review(text, to_ids, len(to_ids))
        except ValueError as error:
            raise UsageError(f"--predict: text {n} has no word ({text!r}); expected a review, or a file with one on "
                             "each line") from error
        if longest and len(ids) > longest:
            say(settings, f"text {n}: only the first {longest:,} of its {len(ids):,} words are read")
        rows.append(ids[:longest])
    for ids, text in zip(rows, texts):              # one at a time: of very different lengths
        logits = model(*to_device(padded([ids]), device))
        p = asnumpy(softmax.forward(logits)[0])[0]
        known = (ids > 1).mean()
        print(f"{SENTIMENTS[int(p.argmax())]} {p.max():.3f}   {shortened(text)}"
              + ("" if known > 0.5 else f"   (only {known:.0%} of its words are known)"), flush=True)


def shortened(text, width=70):
    """The text in one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[:width - 3]}..."


# ---- the command -----------------------------------------------------------------------------------------

def main(argv):
    settings = parse(argv)
    if settings.get("predict") is not None:
        predict(settings)
        return
    device_of(settings)                             # before anything is written, and anything slow is done
    classify.check_optimizer(settings)
    names = classify.names_of(settings, MODELS)
    train_part, test_part, words = open_reviews(settings)
    settings["data"] = str(Path(settings["data"]).absolute()) if settings["data"] else str(data_folder().absolute())
    if names[0] in imdb_linear.MODELS:
        imdb_linear.main(settings, train_part, test_part)
        return
    try:                                            # nor is anything written for settings that do not fit
        batches = LengthBatches(train_part, settings["batch_size"], settings["seed"],
                                longest=settings["max_length"] or None)
        for name in names:
            classify.optimizer_of(settings, build(settings, name).parameters())
    except ValueError as error:
        raise UsageError(str(error)) from error
    steps = steps_of(settings, batches.per_epoch, EPOCHS[bool(settings["paper"])] * batches.per_epoch)
    say(settings, describe(train_part, test_part, words, batches, settings))
    out, hold = open_run_folder("imdb", settings)
    say(settings, f"writing to {out}")
    try:
        train(settings, names, train_part, test_part, words, out, steps, batches)
    except MemoryError as error:
        longest = max(int(np.diff(part.offsets).max()) for part in (train_part, test_part))
        raise UsageError(f"not enough memory for batches of the longest reviews ({longest:,} words; --batch-size "
                         f"{settings['batch_size']} in training, {EVALUATED} in evaluations): cut them with "
                         "--max-length N, which reads the first N words of each") from error
    del hold
    say(settings, f"figures: {', '.join(str(path) for path in sorted(out.rglob('figure*.png')))}")


if __name__ == "__main__":
    sys.exit(run(main))
