"""What must hold on a GPU, and on the stand-in for one: the bodies of tests in test_gpu.py and in test_fake_device.py.

Each compares the GPU with the CPU, in float64 and with dropout off. Its first argument is a `Device`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from cases import mask_kinds
from helpers import assert_close, grads, upstream, write_images, write_reviews

from minigrad import Parameter
from minigrad.backend import to_device
from minigrad.clipping import clip_grad_norm, clip_grad_value, grad_norm
from minigrad.data import Batches, Streams
from minigrad.data.imdb import read_imdb
from minigrad.data.mnist import read_mnist
from minigrad.data.sentences import SPECIAL, WordVocabulary
from minigrad.layers import IRNN, LSTM, RNN, RRALSTM, RWA, SRU, URNN, Bidirectional, SRUpp
from minigrad.losses import mean_squared_error, softmax_cross_entropy
from minigrad.optim import SGD, Adadelta, Adam, AdamW, Momentum, RAdam, RMSprop
from minigrad.tensors import load_tensors
from minigrad.training import Trainer, read_log
from models.classifier import SequenceClassifier, TextClassifier
from models.regressor import SequenceRegressor
from models.srupp_lm import LanguageModel
from models.tsdae import TSDAE
from tasks import adding, char_lm, imdb, pixel_mnist, tsdae
from tasks.frame import classify
from tasks.frame.run import main


class Device(NamedTuple):
    """A GPU as the bodies see it."""

    still: Callable             # still() -> a context in which nothing may move between host and device, nor wait
    fetch: Callable             # fetch(tree) -> its values as NumPy arrays


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


# ---- layers ----------------------------------------------------------------------------------------------

def on_device(case, keywords):
    """The keywords there; flags stay Python's."""
    return {**to_device({k: v for k, v in keywords.items() if k not in case.flags}, "gpu"), **case.flags}


def forward_and_backward(layer, x, keywords, dout=None):
    """(out, dout, (out, what backward returns, gradients)), from zeroed gradients."""
    layer.zero_grad()
    out, cache = layer.forward(x, **keywords)
    dout = upstream(out) if dout is None else dout
    return dout, (out, layer.backward(dout, cache), grads(layer))


KINDS = ("gaps", "right padding", "no real step at all")     # the host has a way of its own for each


def layer_agrees(gpu, case, kinds=KINDS):
    host, device, x = case.layer(), case.layer().to_device("gpu"), case.x()
    x_there = to_device(x, "gpu")
    for mask in [mask_kinds()[kind] for kind in kinds] if case.masks else [None]:
        keywords = {k: v for k, v in case.keywords().items() if k != "rng"}
        if mask is not None:
            keywords[case.mask_name] = mask
        dout, expected = forward_and_backward(host, x, keywords)
        there, dout = on_device(case, keywords), to_device(dout, "gpu")
        with gpu.still():
            _, got = forward_and_backward(device, x_there, there, dout)
        assert_close(gpu.fetch(got), expected, 1e-9)


# ---- losses ----------------------------------------------------------------------------------------------

def losses_agree(gpu):
    y, target, logits = draw((5, 2), (5, 2), (4, 3, 6))
    ids, mask = np.random.default_rng(1).integers(0, 6, (4, 3)), np.random.default_rng(2).random((4, 3)) < 0.6

    def run(y, target, logits, ids, mask):
        for loss, inputs in ((mean_squared_error, (y, target)), (softmax_cross_entropy, (logits, ids)),
                             (softmax_cross_entropy, (logits, ids, mask)),
                             (softmax_cross_entropy, (logits, ids, mask & ~mask))):
            value, cache = loss.forward(*inputs)
            yield value, loss.backward(1.0, cache), loss.backward(value, cache)
    expected = list(run(y, target, logits, ids, mask))
    there = to_device((y, target, logits, ids, mask), "gpu")
    with gpu.still():
        got = list(run(*there))
    assert all(value.shape == () for value, *_ in got)
    assert_close(gpu.fetch(got), expected, 1e-12)


# ---- optimizers and clipping -----------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": SGD, "Momentum": Momentum, "Nesterov": lambda p, **k: Momentum(p, nesterov=True, **k), "Adadelta": Adadelta,
    "RMSprop": RMSprop, "RMSprop, centred": lambda p, **k: RMSprop(p, centred=True, momentum=0.9, **k),
    "RMSprop, eps inside": lambda p, **k: RMSprop(p, centred=True, eps_inside=True, **k), "Adam": Adam, "AdamW": AdamW,
    "RAdam": RAdam,
}
SCALES = [0.01, 1.0, 100.0, 0.0, np.inf, np.nan]                             # of gradients that are clipped


def optimizer_agrees(gpu, name):
    shapes = [(3, 4), (), (5,), (0,)]

    def run(device):
        parameters = [Parameter(value) for value in to_device(draw(*map(tuple, shapes)), device)] if device == "gpu" \
            else [Parameter(np.asarray(value)) for value in draw(*shapes)]
        gradients = to_device([[np.asarray(g) for g in draw(*shapes, seed=n)] for n in range(1, 8)], device)
        optimizer = OPTIMIZERS[name](parameters, lr=0.1, weight_decay=0.01)
        with gpu.still():
            for step in gradients:
                optimizer.zero_grad()
                for parameter, g in zip(parameters, step):
                    parameter.grad += g
                optimizer.step()
        return [p.value for p in parameters], list(optimizer.accumulators.values())
    assert_close(gpu.fetch(run("gpu")), run("cpu"), 1e-12)


def clipping_agrees(gpu, scale):
    def run(device):
        parameters = [Parameter(value) for value in to_device([np.zeros((3, 4)), np.zeros(5)], device)]
        gradients = to_device(draw((3, 4), (5,)), device)
        with gpu.still(), np.errstate(invalid="ignore"):
            for parameter, g in zip(parameters, gradients):
                parameter.grad += g * scale
            norm = clip_grad_norm(parameters, 1.0)
            clip_grad_value(parameters, 0.3)
            return norm, grad_norm(parameters), [p.grad for p in parameters]
    got, expected = run("gpu"), run("cpu")
    assert got[0].shape == ()
    assert_close(gpu.fetch(got), expected, 1e-12)


# ---- training --------------------------------------------------------------------------------------------

LOG_EVERY = 4


def adding_family():
    x, target = draw((12, 5, 2), (12, 1))
    model = SequenceRegressor(RRALSTM(2, 4, 3, rng=1, dtype="float64"), 4, rng=2, dtype="float64")
    return model, Batches((x, target), 4, seed=0), adding.forward_backward, {"clip_norm": 0.5, "clip_value": 0.1}


def char_lm_family():
    ids = np.random.default_rng(0).integers(0, 7, 90).astype("uint8")
    layers = [SRUpp(4, 4, 3, window=4, rng=1, dtype="float64"), LSTM(4, 4, rng=2, dtype="float64")]
    model = LanguageModel(7, 4, layers, rng=3, dtype="float64")
    return model, Streams(ids, 2, 5, seed=0), char_lm.forward_backward, {"clip_norm": 1.0}


def tsdae_family(**settings):
    words = WordVocabulary([*SPECIAL, *"abcdefg"])
    rng = np.random.default_rng(0)
    sentences = [rng.integers(len(SPECIAL), len(words), n) for n in (3, 5, 2, 6, 4, 3, 5, 4)]
    model = TSDAE(words, 4, 2, 6, layers=1, length=8, rng=1, dtype="float64", **settings)
    batches = tsdae.TrainingBatches(sentences, 3, 0, vocab=len(words), longest=6)
    return model, batches, tsdae.forward_backward, {"clip_norm": 1.0}


def imdb_family():
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 9, (12, 6)), np.arange(6) < rng.integers(1, 7, (12, 1))
    cell = Bidirectional(RRALSTM(3, 4, 2, rng=1, dtype="float64"), RRALSTM(3, 4, 2, rng=2, dtype="float64"))
    model = TextClassifier(9, 3, cell, 8, rng=3, dtype="float64")
    return model, Batches((ids, mask, rng.integers(0, 2, 12)), 4, seed=0), classify.forward_backward, {}


def pixels_family(cell):
    def make():
        x, = draw((12, 6, 1))
        model = SequenceClassifier(cell(), 8 if cell is urnn else 4, 10, rng=2, dtype="float64")
        labels = np.random.default_rng(1).integers(0, 10, 12)
        return model, Batches((x, labels), 4, seed=0), classify.forward_backward, {"clip_norm": 1.0}
    return make


def urnn():
    return URNN(1, 4, rng=1, dtype="float64")


FAMILIES = {
    "adding": (adding_family, 2), "char_lm": (char_lm_family, 2), "tsdae": (tsdae_family, 5), "imdb": (imdb_family, 3),
    "pixels, rra": (pixels_family(lambda: RRALSTM(1, 4, 3, rng=1, dtype="float64")), 2),
    "pixels, irnn": (pixels_family(lambda: IRNN(1, 4, rng=1, dtype="float64")), 2),
    "pixels, urnn": (pixels_family(urnn), 2),
    "pixels, rwa": (pixels_family(lambda: RWA(1, 4, rng=1, dtype="float64")), 2),
    "pixels, sru": (pixels_family(lambda: SRU(1, 4, rng=1, dtype="float64")), 2),
    "pixels, rnn": (pixels_family(lambda: RNN(1, 4, rng=1, dtype="float64")), 2),
    "pixels, rnn, attention": (pixels_family(lambda: RNN(1, 4, 3, attention=True, rng=1, dtype="float64")), 2),
}                                                        # (model, batches ...), the arrays of a batch


def trainer_of(family, device, out, seed=0, **more):
    """A Trainer of the family on a device, with its folder."""
    model, batches, forward_backward, settings = family()
    model.to_device(device)
    if isinstance(model, LanguageModel):
        settings["initial_state"] = model.initial_state(batches.batch_size)

    def evaluate(model, step):
        return {"size": float(sum(abs(p.value).sum() for p in model.parameters()))}
    out.mkdir(exist_ok=True)
    return Trainer(model, Adam(model.parameters(), lr=0.01), batches, forward_backward, evaluate, out=out, best="size",
                   device=device, log_every=LOG_EVERY, quiet=True, seed=seed,
                   **{"eval_every": 100, **settings, **more})


def figures_of(out):
    _, rows = read_log(out / "log.csv")
    return [[row[name] or 0 for name in ("step", "loss", "grad_norm", "size")] for row in rows]


def tensors_of(out):
    return load_tensors(out / "last.safetensors")[0]


def assert_same_tensors(got, expected):
    assert got.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(got[key], array, rtol=1e-7, atol=1e-9, err_msg=key)


def training_agrees(trained_there, name, tmp_path):
    """Ten steps on the CPU as those of a trainer on the GPU that has taken them: losses, norms, all that is saved."""
    trainer_of(FAMILIES[name][0], "cpu", tmp_path / "cpu").train(10)
    there = trained_there.out
    np.testing.assert_allclose(figures_of(there), figures_of(tmp_path / "cpu"), rtol=1e-9)
    assert_same_tensors(tensors_of(there), tensors_of(tmp_path / "cpu"))


def resumed_on_the_other_device(name, first, then, tmp_path):
    """Five steps on one device and four on the other are nine on the CPU."""
    family, _ = FAMILIES[name]
    trainer_of(family, "cpu", tmp_path / "whole").train(9)
    trainer_of(family, first, tmp_path / "cut").train(5)
    second = trainer_of(family, then, tmp_path / "cut")
    second.resume()
    assert second.step == 5
    second.train(9)
    whole, cut = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "cut")
    for tensors in (whole, cut):
        del tensors["trainer.tally"]                             # an evaluation at step 5 begins it anew
    assert_same_tensors(cut, whole)


# ---- a task ----------------------------------------------------------------------------------------------

LABELLED = ["--hidden", "4", "-K", "2", "--batch-size", "5", "--eval-size", "6"]
SMALL = {
    adding: ["-S", "6", "-K", "2", "--hidden", "4", "--train-size", "20", "--test-size", "10", "--batch-size", "5"],
    char_lm: ["--width", "8", "--ratio", "2", "--layers", "1", "--unroll", "8", "--batch-size", "2",
              "--valid-bytes", "64", "--warmup", "1"],
    tsdae: ["--width", "8", "--heads", "2", "--layers", "1", "--vocab", "60", "--buckets", "9", "--batch-size", "4",
            "--sts", "none", "--dropout", "0", "--attention-dropout", "0", "--warmup", "1"],
    pixel_mnist: [*LABELLED, "--stride", "7", "--compare", "rra,lstm,irnn,urnn,rwa"],
    imdb: [*LABELLED, "--embedding", "3", "--vocab", "30", "--dropout", "0"],
}


def data_of(task, folder, monkeypatch):
    """The words of --data, made data; where a task takes the published data only, it is told not to."""
    if task is adding:
        return []
    if task is pixel_mnist:
        monkeypatch.setattr(pixel_mnist, "read_mnist", functools.partial(read_mnist, official=False))
        return ["--data", write_images(folder, 20, 10)]
    if task is imdb:
        monkeypatch.setattr(imdb, "read_imdb", functools.partial(read_imdb, cache=False, count=None))
        return ["--data", write_reviews(folder, 20)]
    words = np.random.default_rng(0).choice(["the", "of", "and", "a", "fast", "river", "sings"], (60, 6))
    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(line) + " ." for line in words), encoding="utf-8")
    return ["--data", text]


def task_agrees(task, tmp_path, monkeypatch):
    """Three steps of a task through its command line, with --device cpu and gpu: the same log."""
    (tmp_path / "data").mkdir()
    data = data_of(task, tmp_path / "data", monkeypatch)
    for device in ("cpu", "gpu"):
        main(task.TASK, [str(word) for word in [
            *SMALL[task], *data, "--dtype", "float64", "--steps", "3", "--eval-every", "2", "--clip-norm", "1",
            "--device", device, "--out", tmp_path / device, "--quiet"]])
    logs = sorted(path.relative_to(tmp_path / "cpu") for path in (tmp_path / "cpu").rglob("log.csv"))
    assert logs
    for log in logs:
        (_, here), (_, there) = (read_log(tmp_path / device / log) for device in ("cpu", "gpu"))
        assert len(there) == len(here) > 1
        for row, other in zip(here, there):
            for key in set(row) - {"seconds"}:
                assert (other[key] or 0) == pytest.approx(row[key] or 0, rel=1e-6), (log, key)
