"""Pixel-by-pixel MNIST: RRA, LSTM, IRNN, uRNN and RWA (Wang 2017, section 4.2, Figure 5, Table 1).

    python tasks/pixel_mnist.py --rows                   28 steps of 28 pixels, not the paper's task: two minutes
    python tasks/pixel_mnist.py --stride 4               49 steps, each the mean of 4 x 4 pixels: not it either
    python tasks/pixel_mnist.py --paper --device gpu     the paper's task and setting: 784 steps of one pixel, 256 units
    python tasks/pixel_mnist.py --paper --permuted --compare rra,lstm,irnn,urnn,rwa --device gpu
                                                         all of Table 1, the pixels in one fixed random order
    python tasks/pixel_mnist.py --resume runs/pixel_mnist/...        continue a run that was stopped

The network reads an image pixel by pixel, left to right, then top to bottom, and must say the digit after the last one.
With --permuted the pixels of all images come in one random order, drawn from --permutation-seed and kept in the run's
folder as permutation.json (--permutation FILE: one that was kept).

Data: --data, else $MINIGRAD_DATA, else ~/.cache/minigrad: the four official files train-images-idx3-ubyte.gz ...,
there or one folder below; fetched where they are missing, and checked.

Stated in the paper: 784 steps, 256 units, batches of 50, RMSprop. The rest is chosen: --paper takes RMSprop as in Keras
(lr 1e-3, rho 0.9; --optimizer rmsprop-centred is the deeplearning.net tutorial's), forget bias 0, K = 10, no clipping,
30 epochs.
Defaults: 128 units, Adam 1e-3, global norm clipped at 1, forget bias 1, K = 10, 2 epochs.

Expect: with --rows a test accuracy of 97 % after two epochs. A run folder (runs/pixel_mnist/TIME) with config.json,
log.csv, figure5.png (test accuracy against iteration), figure7.png (RRA's attention weights), last and best checkpoints
(best by the test accuracy, for there is no validation set: the result to quote is the last one), result.json.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from minigrad.data import Batches
from minigrad.data.files import read_unpacked
from minigrad.data.mnist import as_sequences, load_permutation, permutation, read_mnist, save_permutation
from minigrad.tensors import write_atomically
from models.cells import CELLS, build_cell, taken_by
from models.classifier import SequenceClassifier
from tasks import frame
from tasks.frame import UsageError, classify, number, whole
from tasks.frame.cell_flags import cell_label, cell_settings

SIDE, CLASSES = 28, 10
DEFAULTS = {
    **classify.DEFAULTS, "permuted": False, "permutation": None, "permutation_seed": 0, "rows": False,
    "stride": 1, "hidden": 128, "dropout": 0.0, "batch_size": 50, "optimizer": "adam", "lr": 1e-3,
    "clip_norm": 1.0, "eval_every": 200, "eval_size": 1000, "train_size": 0, "test_size": 0, "epochs": 2}
PAPER = {"hidden": 256, "optimizer": "rmsprop", "lr": 1e-3, "clip_norm": 0.0, "forget_bias": 0.0, "epochs": 30}
METRIC = "test_accuracy"
EVALUATED = 100                                     # images at a time, where nothing is trained
ORDER_FILE = "permutation.json"


def flags(group):
    classify.add_flags(group, DEFAULTS)
    group.add_argument("--permuted", action="store_true", default=None, help="the pixels in one fixed random order")
    group.add_argument("--permutation-seed", type=whole(0), help="of that order (default 0)")
    group.add_argument("--permutation", metavar="FILE", help="an order that a run has kept, not one from the seed")
    group.add_argument("--rows", action="store_true", default=None, help="28 steps of 28 pixels: quick, another task")
    group.add_argument("--stride", type=whole(1), help="each step the mean of STRIDE x STRIDE pixels: another task")
    group.add_argument("--dropout", type=number(0, below=1), help="of the last output (default 0)")
    group.add_argument("--train-size", type=whole(0), help="images to train on, the first so many; 0: all (default)")
    group.add_argument("--test-size", type=whole(0), help="images to test on, at random; 0: all (default)")


def check(settings, given):
    if settings["rows"] and settings["stride"] != 1:
        raise UsageError("--rows and --stride were both given; expected one of them")
    if SIDE % settings["stride"]:
        raise UsageError(f"--stride is {settings['stride']}; expected a divisor of {SIDE}")
    orders = {"permutation", "permutation_seed"} & set(given)
    if orders and not settings["permuted"]:
        raise UsageError("--permutation and --permutation-seed have a meaning only with --permuted")
    if len(orders) == 2 and not settings["resume"]:
        raise UsageError("--permutation and --permutation-seed were both given; expected one of them")


# ---- data ------------------------------------------------------------------------------------------------

class Images(NamedTuple):
    """The images of a run."""

    reader: Any                 # images -> sequences, an ImageReader
    train: tuple                # (images, labels)
    test: tuple
    part: tuple                 # of the test images, for the evaluations within an epoch


class ImageReader:
    """How an image is read: f(images (n, 28, 28) uint8) -> (n, L, d) in [0, 1]."""

    def __init__(self, settings, order):
        self.rows, self.stride, self.order, self.dtype = settings["rows"], settings["stride"], order, settings["dtype"]

    def __call__(self, images):
        return as_sequences(images, rows=self.rows, stride=self.stride, order=self.order, dtype=self.dtype)


class ImageBatches(Batches):
    """Batches whose images are turned into sequences as they are met: 60,000 of them would fill 188 MB."""

    def __init__(self, images, labels, reader, batch_size, seed):
        super().__init__((images, labels), batch_size, seed=seed)
        self.reader = reader

    def __getitem__(self, step):
        images, labels = super().__getitem__(step)
        return self.reader(images), labels


def shape_of(settings):
    """(L, d) of a sequence."""
    return (SIDE, SIDE) if settings["rows"] else ((SIDE // settings["stride"])**2, 1)


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


def open_images(settings):
    """MNIST as the settings have it, a part of it where one is asked for."""
    reader = ImageReader(settings, order_of(settings))
    mnist = read_mnist(settings["data"], quiet=settings["quiet"])
    for name, labels in (("train", mnist.train_labels), ("test", mnist.test_labels)):
        if settings[f"{name}_size"] > len(labels):
            raise UsageError(f"--{name}-size is {settings[f'{name}_size']:,}; expected at most {len(labels):,}")
    size = settings["train_size"] or len(mnist.train_labels)
    train = mnist.train_images[:size], mnist.train_labels[:size].astype(np.int64)
    rows = at_random(len(mnist.test_labels), settings["test_size"] or len(mnist.test_labels))
    images, labels = mnist.test_images[rows], mnist.test_labels[rows].astype(np.int64)
    part = at_random(len(labels), settings["eval_size"])
    return Images(reader, train, (images, labels), (images[part], labels[part]))


def at_random(n, size):
    """`size` of n rows, always the same ones (the test images' first half is of other writers than the second)."""
    return np.random.default_rng(12).permutation(n)[:size]


def batches(settings, data):
    return ImageBatches(*data.train, data.reader, settings["batch_size"], settings["seed"])


def for_evaluation(images, labels, reader):
    """f() -> batches (x, labels) of all of these images."""
    return lambda: ((reader(images[n:n + EVALUATED]), labels[n:n + EVALUATED])
                    for n in range(0, len(labels), EVALUATED))


# ---- training --------------------------------------------------------------------------------------------

def build(settings, data=None):
    """The model; the readout starts the same for all of one width."""
    cell, width = build_cell(settings["model"], shape_of(settings)[1], settings["hidden"],
                             rng=np.random.default_rng([settings["seed"], 1]), **cell_settings(settings))
    return SequenceClassifier(cell, width, CLASSES, dropout=settings["dropout"], dtype=settings["dtype"],
                              rng=np.random.default_rng([settings["seed"], 2]))


def evaluation(settings, data, device):
    return classify.Evaluation(
        settings, for_evaluation(*data.part, data.reader), for_evaluation(*data.test, data.reader),
        batches(settings, data).per_epoch, METRIC, device)


def trainer(settings, data, model):
    order = data.reader.order
    return {"config": {"order": None if order is None else crc32(np.ascontiguousarray(order))},
            **classify.trainer_keywords(METRIC)}


def keep_order(settings, data, out):
    """permutation.json in the run's folder, and a line that says where the order comes from."""
    order, given, seed = data.reader.order, settings["permutation"], settings["permutation_seed"]
    if order is None:
        return
    if not (out / ORDER_FILE).exists():
        if given is not None:
            write_atomically(out / ORDER_FILE, read_unpacked(given))
        else:
            save_permutation(out / ORDER_FILE, order, seed)
    origin = f"from {given}" if given is not None else f"drawn from seed {seed}"
    frame.say(settings, f"the order of the steps is {origin} and kept in {out / ORDER_FILE}")


# ---- what came out ---------------------------------------------------------------------------------------

def what(settings):
    """What is read, in words: "784 steps of one pixel", and what is not the paper's task is called so."""
    if settings["rows"]:
        words = "28 rows of 28 pixels (not pixel by pixel)"
    elif settings["stride"] > 1:
        k = settings["stride"]
        words = f"{shape_of(settings)[0]} steps of {k} x {k} pixels (not the paper's task)"
    else:
        words = "784 steps of one pixel"
    return words + (", permuted" if settings["permuted"] else "")


def describe(settings, data):
    return f"{len(data.train[1]):,} images to train on, {len(data.test[1]):,} to test on; {what(settings)}"


def title(settings):
    test = settings["test_size"] or 10_000
    return (f"MNIST, {what(settings)}\n{settings['hidden']} units, {classify.setting_of(settings, DEFAULTS, PAPER)}; "
            f"{min(settings['eval_size'], test):,} of {test:,} test images")


def result(run):
    data = run.data
    return classify.result_of(run, METRIC, {"train": len(data.train[1]), "test": len(data.test[1]),
                                            "part": len(data.part[1]), "what": what(run.settings)})


TASK = frame.Task(
    name="pixel_mnist", description=__doc__, defaults=DEFAULTS, paper=PAPER, flags=flags, check=check,
    reads="the folder with the four files (default $MINIGRAD_DATA, then ~/.cache/minigrad)",
    variants=CELLS, flags_of=taken_by(CELLS), label=cell_label,
    data=open_images, describe=describe, model=build, batches=batches, step=classify.forward_backward,
    evaluation=evaluation, trainer=trainer, started=keep_order,
    resumed=lambda run: classify.require_an_end(run, METRIC),
    curve=frame.Curve(METRIC, "test accuracy", title, "figure5.png", best=f"{METRIC}_all", maximize=True),
    result=result, summary=lambda run, result: classify.summary_of(run, result, METRIC),
    figures=classify.draw_attention,
    shown=frame.Shown(columns=classify.columns(METRIC), note="on all test images", in_label=("window",)))

if __name__ == "__main__":
    sys.exit(frame.run(TASK))
