"""Pixel-by-pixel MNIST: RRA beside LSTM, IRNN, uRNN and RWA (Wang 2017, section 4.2, Figure 5, Table 1).

    python tasks/pixel_mnist.py --rows                   28 steps of 28 pixels, not the paper's task: two minutes
    python tasks/pixel_mnist.py --stride 4               49 steps, each the mean of 4 x 4 pixels: not it either
    python tasks/pixel_mnist.py --paper --device gpu     the paper's task and setting: 784 steps of one pixel, 256 units
    python tasks/pixel_mnist.py --paper --permuted --compare rra,lstm,irnn,urnn,rwa --device gpu
                                                         all of Table 1, the pixels in one fixed random order
    python tasks/pixel_mnist.py --resume runs/pixel_mnist/...        go on with a run that was stopped

The network reads an image pixel by pixel, left to right, then top to bottom, and must say the digit after the last one.
With --permuted the pixels of all images come in one random order, drawn from --permutation-seed and kept in the run's
folder as permutation.json (--permutation FILE: one that was kept).

Data: --data, else $MINIGRAD_DATA, else ~/.cache/minigrad: the four official files train-images-idx3-ubyte.gz ...,
there or one folder below; fetched where they are missing, and checked.

Stated in the paper: 784 steps, 256 units, batches of 50, RMSprop. The rest is chosen: --paper takes RMSprop as in Keras
(lr 1e-3, rho 0.9; --rmsprop centred is the deeplearning.net tutorial's), forget bias 0, K = 10, no clipping, 30 epochs.
Defaults: 128 units, Adam 1e-3, global norm clipped at 1, forget bias 1, K = 10, 2 epochs.

Expect: with --rows a test accuracy of 97 % after two epochs. A run folder (runs/pixel_mnist/TIME) with config.json,
log.csv, figure5.png (test accuracy against iteration), figure7.png (RRA's attention weights), last and best checkpoints
(best by the test accuracy, for there is no validation set: the result to quote is the last one), result.json.
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
import sys
from pathlib import Path
from zlib import crc32

import numpy as np

from minigrad.data import Batches, data_folder
from minigrad.data.files import read_unpacked
from minigrad.data.mnist import as_sequences, load_permutation, permutation, read_mnist, save_permutation
from minigrad.tensors import write_atomically
from models.cells import CELLS, build_cell
from models.classifier import SequenceClassifier
from tasks.frame import classify
from tasks.frame.run_folder import UsageError, open_run_folder

SIDE, CLASSES = 28, 10
DEFAULTS = {
    **classify.FLAGS, "data": None, "permuted": False, "permutation": None, "permutation_seed": 0, "rows": False,
    "stride": 1, "window": 10, "hidden": 128, "dropout": 0.0, "batch_size": 50, "optimizer": "adam", "lr": 1e-3,
    "clip_norm": 1.0, "eval_every": 200, "eval_size": 1000, "train_size": 0, "test_size": 0}
PAPER = {"hidden": 256, "optimizer": "rmsprop", "lr": 1e-3, "clip_norm": 0.0, "forget_bias": 0.0}
EPOCHS = {False: 2, True: 30}                       # by --paper
EVALUATED = 100                                     # images at a time, where nothing is trained
ORDER_FILE = "permutation.json"


def parse(argv):
    """The settings of this run; see `--help`."""
    parser = parser_for("pixel_mnist", __doc__, data="the folder with the four files (default $MINIGRAD_DATA, then "
                                                     "~/.cache/minigrad)")
    own = parser.add_argument_group("of this task")
    classify.add_flags(own, DEFAULTS, CELLS)
    own.add_argument("--permuted", action="store_true", default=None, help="the pixels in one fixed random order")
    own.add_argument("--permutation-seed", type=whole(0), help="of that order (default 0)")
    own.add_argument("--permutation", metavar="FILE", help="an order that a run has kept, instead of one from the seed")
    own.add_argument("--rows", action="store_true", default=None, help="28 steps of 28 pixels: quick, another task")
    own.add_argument("--stride", type=whole(1), help="each step the mean of STRIDE x STRIDE pixels: another task")
    own.add_argument("--dropout", type=number(0), help="of the last output (default 0)")
    own.add_argument("--train-size", type=whole(0), help="images to train on, the first so many; 0: all (default)")
    own.add_argument("--test-size", type=whole(0), help="images to test on, at random; 0: all (default)")
    given = {key for key, value in vars(parser.parse_args(argv)).items() if value is not None}
    settings = settings_of(parser, argv, lambda given: classify.default_lr(
        given, {**DEFAULTS, **(PAPER if "paper" in given else {})}))
    if settings["rows"] and settings["stride"] != 1:
        raise UsageError("--rows and --stride were both given; expected one of them")
    if SIDE % settings["stride"]:
        raise UsageError(f"--stride is {settings['stride']}; expected a divisor of {SIDE}")
    if given & {"permutation", "permutation_seed"} and not settings["permuted"]:
        raise UsageError("--permutation and --permutation-seed have a meaning only with --permuted")
    if {"permutation", "permutation_seed"} <= given and not settings["resume"]:
        raise UsageError("--permutation and --permutation-seed were both given; expected one of them")
    if settings["dropout"] >= 1:
        raise UsageError(f"--dropout is {settings['dropout']:g}; expected a share below 1")
    classify.names_of(settings, CELLS)
    return settings


# ---- data ------------------------------------------------------------------------------------------------

class Form:
    """How an image is read: f(images (n, 28, 28) uint8) -> (n, L, d) in [0, 1]."""

    def __init__(self, settings, order):
        self.rows, self.stride, self.order, self.dtype = settings["rows"], settings["stride"], order, settings["dtype"]

    def __call__(self, images):
        return as_sequences(images, rows=self.rows, stride=self.stride, order=self.order, dtype=self.dtype)


def shape_of(settings):
    """(L, d) of a sequence."""
    return (SIDE, SIDE) if settings["rows"] else ((SIDE // settings["stride"])**2, 1)


class ImageBatches(Batches):
    """Batches whose images are turned into sequences as they are met: 60,000 of them would fill 188 MB."""

    def __init__(self, images, labels, form, batch_size, seed):
        super().__init__((images, labels), batch_size, seed=seed)
        self.form = form

    def __getitem__(self, step):
        images, labels = super().__getitem__(step)
        return self.form(images), labels


def order_of(settings):
    """The order of the steps, None for the images' own. Raises DataError for a file that is not one of their length."""
    if not settings["permuted"]:
        return None
    L, _ = shape_of(settings)
    kept = Path(settings["resume"]) / ORDER_FILE if settings["resume"] else None
    if kept is not None and kept.exists():                       # the run's own
        return load_permutation(kept, L)
    if settings["permutation"] is not None:
        return load_permutation(settings["permutation"], L)
    return permutation(L, settings["permutation_seed"])


def parts_of(mnist, settings):
    """((train images, labels), (test images, labels)), a part of them where one is asked for. Raises UsageError."""
    for name, labels in (("train", mnist.train_labels), ("test", mnist.test_labels)):
        if settings[f"{name}_size"] > len(labels):
            raise UsageError(f"--{name}-size is {settings[f'{name}_size']:,}; expected at most {len(labels):,}")
    size = settings["train_size"] or len(mnist.train_labels)
    train = mnist.train_images[:size], mnist.train_labels[:size].astype(np.int64)
    rows = at_random(len(mnist.test_labels), settings["test_size"] or len(mnist.test_labels))
    return train, (mnist.test_images[rows], mnist.test_labels[rows].astype(np.int64))


def at_random(n, size):
    """`size` of n rows, always the same ones (the test images' first half is of other writers than the second)."""
    return np.random.default_rng(12).permutation(n)[:size]


def for_evaluation(images, labels, form):
    """f() -> batches (x, labels) of all of these images."""
    return lambda: ((form(images[n:n + EVALUATED]), labels[n:n + EVALUATED])
                    for n in range(0, len(labels), EVALUATED))


# ---- training --------------------------------------------------------------------------------------------

def build(settings, name):
    """The model `name`; the readout starts the same for all of one width."""
    own = {key: settings[key] for key in ("window", "offset", "normalize", "forget_bias", "init", "dtype")}
    cell, width = build_cell(name, shape_of(settings)[1], settings["hidden"],
                             rng=np.random.default_rng([settings["seed"], 1]), **own)
    return SequenceClassifier(cell, width, CLASSES, "last", settings["dropout"], dtype=settings["dtype"],
                              rng=np.random.default_rng([settings["seed"], 2]))


def describe(settings):
    """What is read, in words: "784 steps of one pixel", and what is not the paper's task is called so."""
    if settings["rows"]:
        words = "28 rows of 28 pixels (not pixel by pixel)"
    elif settings["stride"] > 1:
        k = settings["stride"]
        words = f"{shape_of(settings)[0]} steps of {k} x {k} pixels (not the paper's task)"
    else:
        words = "784 steps of one pixel"
    return words + (", permuted" if settings["permuted"] else "")


def title(settings):
    how = classify.setting_of(settings, {**PAPER, "rows": False, "stride": 1, "batch_size": 50, "train_size": 0})
    test = settings["test_size"] or 10_000
    return (f"MNIST, {describe(settings)}\n{settings['hidden']} units, {how}; {min(settings['eval_size'], test):,} of "
            f"{test:,} test images")


def main(argv):
    settings = parse(argv)
    device_of(settings)                             # before anything is written, and anything slow is done
    classify.check_optimizer(settings)
    names, order = classify.names_of(settings, CELLS), order_of(settings)
    mnist = read_mnist(settings["data"], quiet=settings["quiet"])
    settings["data"] = str(Path(settings["data"]).absolute()) if settings["data"] else str(data_folder().absolute())
    form, (train, test) = Form(settings, order), parts_of(mnist, settings)
    try:                                            # nor is anything written for settings that do not fit
        batches = ImageBatches(*train, form, settings["batch_size"], settings["seed"])
        for name in names:
            classify.optimizer_of(settings, build(settings, name).parameters())
    except ValueError as error:
        raise UsageError(str(error)) from error
    steps = steps_of(settings, batches.per_epoch, EPOCHS[bool(settings["paper"])] * batches.per_epoch)
    out, hold = open_run_folder("pixel_mnist", settings)
    say(settings, f"{len(train[1]):,} images to train on, {len(test[1]):,} to test on; {describe(settings)}"
                  f"\nwriting to {out}")
    keep_order(settings, order, out)
    part = at_random(len(test[1]), settings["eval_size"])
    task = classify.Task(
        build=lambda name: build(settings, name), batches=batches, metric="test_accuracy", figure="figure5.png",
        part=for_evaluation(test[0][part], test[1][part], form), every=for_evaluation(*test, form),
        title=title(settings), config={"order": None if order is None else crc32(np.ascontiguousarray(order))},
        record={"train": len(train[1]), "test": len(test[1]), "part": len(part), "what": describe(settings)})
    if settings["compare"] is None:
        classify.train_one(task, names[0], settings, out, steps)
    else:
        classify.compare(task, names, settings, out, steps)
    del hold
    say(settings, f"figures: {', '.join(str(path) for path in sorted(out.rglob('figure*.png')))}")


def keep_order(settings, order, out):
    """permutation.json in the run's folder, and a line that says where the order comes from."""
    if order is None:
        return
    given, seed = settings["permutation"], settings["permutation_seed"]
    if not (out / ORDER_FILE).exists():
        if given is not None:
            write_atomically(out / ORDER_FILE, read_unpacked(given))
        else:
            save_permutation(out / ORDER_FILE, order, seed)
    origin = f"from {given}" if given is not None else f"drawn from seed {seed}"
    say(settings, f"the order of the steps is {origin} and kept in {out / ORDER_FILE}")


if __name__ == "__main__":
    sys.exit(run(main))
