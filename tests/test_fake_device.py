"""Layers, losses, optimizers, checkpoints, training on the stand-in for CuPy: NumPy's numbers, no hidden transfer."""

import itertools
from collections import Counter

import fake_cupy
import numpy as np
import pytest
from cases import TABLE, B, L, mask_kinds
from fake_cupy import no_transfers, peek, transfers
from helpers import assert_close, grads, upstream

from minigrad import Parameter
from minigrad.backend import to_device
from minigrad.checkpoint import load_checkpoint, load_parameters, save_checkpoint
from minigrad.data import Batches, Streams, Vocabulary
from minigrad.data.sentences import SPECIAL, WordVocabulary
from minigrad.layers import IRNN, LSTM, RNN, RRALSTM, RWA, SRU, URNN, Bidirectional, SinusoidalPositions, SRUpp
from minigrad.layers.lstm import lstm_step, lstm_step_backward
from minigrad.layers.rnn import irnn_step, irnn_step_backward, residual_step, residual_step_backward
from minigrad.layers.rra import rra_step, rra_step_backward
from minigrad.layers.rwa import rwa_step, rwa_step_backward
from minigrad.layers.sru import sru_step, sru_step_backward
from minigrad.layers.srupp import srupp_attention, srupp_attention_backward
from minigrad.layers.urnn import complex_rows, urnn_step, urnn_step_backward
from minigrad.losses import mean_squared_error, softmax_cross_entropy
from minigrad.optim import (
    SGD,
    Adadelta,
    Adam,
    AdamW,
    Momentum,
    RAdam,
    RMSprop,
    clip_grad_norm,
    clip_grad_value,
    grad_norm,
)
from minigrad.runlog import read_log
from minigrad.train import Trainer
from models.classifier import SequenceClassifier, TextClassifier
from models.regressor import SequenceRegressor
from models.srupp_lm import LanguageModel
from models.tsdae import TSDAE
from tasks import adding, char_lm, classify, tsdae

pytestmark = pytest.mark.usefixtures("fake_gpu")


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


def masks_of(case):
    """Of each kind for which the host has a way of its own, or there is nothing left."""
    return [mask_kinds()[kind] for kind in ("gaps", "right padding", "no real step at all")] if case.masks else [None]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_a_layer_gives_the_numbers_of_the_host_and_moves_nothing(case):
    host, device, x = case.layer(), case.layer().to_device("gpu"), case.x()
    x_there = to_device(x, "gpu")
    for mask in masks_of(case):
        keywords = {k: v for k, v in case.keywords().items() if k != "rng"}
        if mask is not None:
            keywords[case.mask_name] = mask
        dout, expected = forward_and_backward(host, x, keywords)
        there, dout = on_device(case, keywords), to_device(dout, "gpu")
        with no_transfers():
            _, got = forward_and_backward(device, x_there, there, dout)
        assert_close(peek(got), expected, 1e-9)


@pytest.mark.parametrize("case", [case for case in TABLE if case.draws], ids=lambda case: case.name)
def test_a_layer_that_draws_moves_nothing(case):
    """The stand-in draws what NumPy's generator does: where both draw the same shapes, both have the same numbers."""
    keywords = case.keywords()
    packs = case.masks and any(name in case.name for name in ("Transformer", "TSDAE"))       # on the host: rows, (N, d)
    host, device, x = case.layer(), case.layer().to_device("gpu"), case.x()
    dout, expected = forward_and_backward(host, x, {**keywords, "rng": np.random.default_rng(5)})
    rng = fake_cupy.Generator(fake_cupy._BitGenerator(5))
    there = {**on_device(case, {k: v for k, v in keywords.items() if k != "rng"}), "rng": rng}
    x, dout = to_device((x, dout), "gpu")
    with no_transfers():
        _, got = forward_and_backward(device, x, there, dout)
    if packs:
        assert [a.shape for a in leaves(got)] == [a.shape for a in leaves(expected)]
    else:
        assert_close(peek(got), expected, 1e-9)


def leaves(tree):
    if isinstance(tree, tuple | list):
        return [leaf for item in tree for leaf in leaves(item)]
    return [] if tree is None else [tree]


def test_a_layer_goes_there_and_back_with_all_that_belongs_to_it():
    x, = draw((B, L, 4))
    model = SequenceRegressor(Bidirectional(URNN(4, 3, rng=0, dtype="float64"), SRU(4, 3, rng=1, dtype="float64")), 9,
                              rng=2, dtype="float64")
    expected, permutation = model(x), model.cell.forward_layer.permutation
    got = model.to_device("gpu")(to_device(x, "gpu"))
    assert type(model.cell.forward_layer.permutation).__module__ == "cupy"
    assert_close(peek(got), expected)
    model.to_device("cpu")
    np.testing.assert_array_equal(model.cell.forward_layer.permutation, permutation)
    np.testing.assert_array_equal(model(x), expected)


def test_positions_are_computed_where_x_is():
    layer = SinusoidalPositions(5)
    assert_close(peek(layer.positions(9, __import__("cupy"))), layer.positions(9), 1e-15)


h, d = 3, 4
STEPS = {          # name: (step, its backward, shapes of the inputs, of what backward is given, of what that reads)
    "LSTM": (lstm_step, lstm_step_backward, [(B, d), (B, h), (B, h), (d, 4 * h), (h, 4 * h), (4 * h,)], 2, (3, 4)),
    "RRALSTM": (rra_step, rra_step_backward,
                [(B, d), (B, 3, h), (B, h), (d, 4 * h), (h, 4 * h), (4 * h,), (2,)], 2, (3, 4, 6)),
    "RNN, W_f": (residual_step, residual_step_backward,
                 [(B, d), (B, 2, h), (d, h), (h, h), (h,), (h, h)], 1, (2, 3, 5)),
    "IRNN": (irnn_step, irnn_step_backward, [(B, d), (B, h), (d, h), (h, h), (h,)], 1, (2, 3)),
    "RWA": (rwa_step, rwa_step_backward,
            [(B, d), (B, h), (B, h), (B, h), (d, h), (h,), (d + h, h), (h,), (d + h, h)], 3, (4, 6, 8)),
    "SRU": (sru_step, sru_step_backward, [(B, 4 * h), (B, h), (B, h), (h,), (h,), (h,), (h,)], 2, (3, 4)),
    "SRU++": (srupp_attention, srupp_attention_backward,
              [(B, L, d), (d, h), (h, h), (h, h), (1,)], 1, (1, 2, 3, 4)),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_plain_equations_too(name):
    step, step_backward, shapes, _, read = STEPS[name]
    inputs = draw(*shapes)
    out, cache = step(*inputs)
    douts = [upstream(o) for o in (out if isinstance(out, tuple) else (out,))]
    expected = out, step_backward(*douts, cache, *(inputs[n] for n in read))
    inputs, douts = to_device((inputs, douts), "gpu")
    with no_transfers():
        out, cache = step(*inputs)
        got = out, step_backward(*douts, cache, *(inputs[n] for n in read))
    assert_close(peek(got), expected, 1e-12)


def test_the_plain_equations_of_urnn():
    x, z, *weights = draw((B, d), (B, 2 * h), (h,), (h,), (h,), (2 * h,), (2 * h,), (d, 2 * h), (h,))
    P = np.array([2, 0, 1])

    def run(x, z, weights, P):
        out, cache = urnn_step(x, complex_rows(z), *weights, P)
        return out, urnn_step_backward(out, cache, weights[5], P)
    expected = run(x, z, weights, P)
    there = to_device((x, z, weights, P), "gpu")
    with no_transfers():
        got = run(*there)
    assert_close(peek(got), expected, 1e-12)


@pytest.mark.parametrize("make", [
    lambda: LSTM(4, 3, rng=0, dtype="float64"), lambda: RRALSTM(4, 3, 2, rng=0, dtype="float64"),
    lambda: RNN(4, 3, 3, attention=True, rng=0, dtype="float64"), lambda: IRNN(4, 3, rng=0, dtype="float64"),
    lambda: URNN(4, 3, rng=0, dtype="float64"), lambda: RWA(4, 3, rng=0, dtype="float64"),
    lambda: SRU(4, 3, rng=0, dtype="float64"), lambda: SRUpp(4, 3, 2, window=3, rng=0, dtype="float64")])
def test_step_by_step(make):
    x, = draw((B, L, 4))
    layer = make().to_device("gpu")
    x = to_device(x, "gpu")
    with no_transfers():
        (y, _), _ = layer.forward(x, state=layer.zero_state(B))
        stepping = layer.begin()
        for t in range(L):
            y_t, stepping = layer.step(x[:, t], stepping)
    np.testing.assert_allclose(peek(y_t), peek(y)[:, -1], rtol=1e-9)


# ---- losses ----------------------------------------------------------------------------------------------

def test_losses():
    y, target, logits = draw((5, 2), (5, 2), (4, 3, 6))
    ids, mask = np.random.default_rng(1).integers(0, 6, (4, 3)), np.random.default_rng(2).random((4, 3)) < 0.6

    def run(y, target, logits, ids, mask):
        for loss, inputs in ((mean_squared_error, (y, target)), (softmax_cross_entropy, (logits, ids)),
                             (softmax_cross_entropy, (logits, ids, mask)),
                             (softmax_cross_entropy, (logits, ids, mask & ~mask))):
            value, cache = loss.forward(*inputs)
            yield value, loss.backward(cache), loss.backward(cache, value)
    expected = list(run(y, target, logits, ids, mask))
    there = to_device((y, target, logits, ids, mask), "gpu")
    with no_transfers():
        got = list(run(*there))
    assert all(value.shape == () for value, *_ in got)
    assert_close(peek(got), expected, 1e-12)


# ---- optimizers and clipping -----------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": SGD, "Momentum": Momentum, "Nesterov": lambda p, **k: Momentum(p, nesterov=True, **k), "Adadelta": Adadelta,
    "RMSprop": RMSprop, "RMSprop, centred": lambda p, **k: RMSprop(p, centred=True, momentum=0.9, **k),
    "RMSprop, eps inside": lambda p, **k: RMSprop(p, centred=True, eps_inside=True, **k), "Adam": Adam, "AdamW": AdamW,
    "RAdam": RAdam,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_parameters_alike_and_nothing_else(name):
    shapes = [(3, 4), (), (5,), (0,)]

    def run(device):
        parameters = [Parameter(value) for value in to_device(draw(*map(tuple, shapes)), device)] if device == "gpu" \
            else [Parameter(np.asarray(value)) for value in draw(*shapes)]
        gradients = to_device([[np.asarray(g) for g in draw(*shapes, seed=n)] for n in range(1, 8)], device)
        optimizer = OPTIMIZERS[name](parameters, lr=0.1, weight_decay=0.01)
        with no_transfers():
            for step in gradients:
                optimizer.zero_grad()
                for parameter, g in zip(parameters, step):
                    parameter.grad += g
                optimizer.step()
        return [p.value for p in parameters], list(optimizer.accumulators.values())
    assert_close(peek(run("gpu")), run("cpu"), 1e-12)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0, 0.0, np.inf, np.nan])
def test_clipping_does_not_wait(scale):
    def run(device):
        parameters = [Parameter(value) for value in to_device([np.zeros((3, 4)), np.zeros(5)], device)]
        gradients = to_device(draw((3, 4), (5,)), device)
        with no_transfers(), np.errstate(invalid="ignore"):
            for parameter, g in zip(parameters, gradients):
                parameter.grad += g * scale
            norm = clip_grad_norm(parameters, 1.0)
            clip_grad_value(parameters, 0.3)
            return norm, grad_norm(parameters), [p.grad for p in parameters]
    got, expected = run("gpu"), run("cpu")
    assert got[0].shape == ()
    assert_close(peek(got), expected, 1e-12)


def test_clipping_that_may_raise_waits_for_the_norm():
    parameter = Parameter(to_device(np.zeros(3), "gpu"))
    parameter.grad[0] = np.inf
    with transfers() as moved, pytest.raises(FloatingPointError, match="the gradient of parameter is not finite"):
        clip_grad_norm([parameter], 1.0, error_if_nonfinite=True)
    assert {kind for kind, _ in moved} == {"wait"}


# ---- checkpoints -----------------------------------------------------------------------------------------

def test_a_checkpoint_of_either_device_is_read_on_the_other(tmp_path):
    model = RRALSTM(4, 3, 2, rng=0)
    values = {name: p.value.copy() for name, p in model.named_parameters()}
    model.to_device("gpu")
    with transfers() as moved:
        save_checkpoint(tmp_path / "gpu", {name: p.value for name, p in model.named_parameters()}, {"n": 1})
    assert Counter(kind for kind, _ in moved) == {"to_host": len(values)}
    save_checkpoint(tmp_path / "cpu", values, {"n": 1})
    (of_gpu, meta), (of_cpu, _) = (load_checkpoint(tmp_path / name) for name in ("gpu", "cpu"))
    assert meta == {"n": 1}
    assert {name: array.tobytes() for name, array in of_gpu.items()} == {
        name: array.tobytes() for name, array in of_cpu.items()}
    other = RRALSTM(4, 3, 2, rng=1).to_device("gpu")
    with transfers() as moved:
        load_parameters(other.named_parameters(), load_checkpoint(tmp_path / "cpu")[0])
    assert Counter(kind for kind, _ in moved) == {"to_device": len(values)}
    for name, parameter in other.named_parameters():
        np.testing.assert_array_equal(peek(parameter.value), values[name])


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
}                                                        # (model, batches ...), the arrays of a batch


def trainer_of(family, device, out, seed=0, **more):
    """A Trainer of the family; it notes what each step moves in `trainer.moved`."""
    model, batches, forward_backward, settings = family()
    model.to_device(device)
    if isinstance(model, LanguageModel):
        settings["carried"] = model.zero_state(batches.batch_size)

    def evaluate(model):
        return {"size": float(sum(abs(p.value).sum() for p in model.parameters()))}
    out.mkdir(exist_ok=True)
    trainer = Trainer(model, Adam(model.parameters(), lr=0.01), batches, forward_backward, evaluate, out=out,
                      best="size", device=device, log_every=LOG_EVERY, quiet=True, seed=seed,
                      **{"eval_every": 100, **settings, **more})
    trainer.moved, step = [], trainer._one_step

    def counted():
        with transfers() as moved:
            step()
        trainer.moved.append(Counter(kind for kind, _ in moved))
    trainer._one_step = counted
    return trainer


def figures_of(out):
    _, rows = read_log(out / "log.csv")
    return [[row[name] or 0 for name in ("step", "loss", "grad_norm", "size")] for row in rows]


@pytest.mark.parametrize("name", FAMILIES)
def test_training_moves_the_batch_alone(name, tmp_path):
    """Between log intervals nothing waits either; there, the loss and the norm are read."""
    family, arrays = FAMILIES[name]
    made = fake_cupy._BitGenerator.made
    trainer = trainer_of(family, "gpu", tmp_path / "gpu")
    trainer.train(10)
    for step, moved in enumerate(trainer.moved, 1):
        assert moved == {"to_device": arrays, **({"wait": 2} if step % LOG_EVERY == 0 else {})}, step
    assert fake_cupy._BitGenerator.made == made                  # no layer drew anything
    host = trainer_of(family, "cpu", tmp_path / "cpu")
    host.train(10)
    np.testing.assert_allclose(figures_of(tmp_path / "gpu"), figures_of(tmp_path / "cpu"), rtol=1e-9)
    here, there = (load_checkpoint(tmp_path / place / "last.safetensors")[0] for place in ("cpu", "gpu"))
    for key, array in here.items():
        np.testing.assert_allclose(there[key], array, rtol=1e-7, atol=1e-9, err_msg=key)


@pytest.mark.parametrize(("first", "then"), [("cpu", "gpu"), ("gpu", "cpu")])
@pytest.mark.parametrize("name", ["char_lm", "tsdae"])
def test_a_run_is_resumed_on_the_other_device(name, first, then, tmp_path):
    family, _ = FAMILIES[name]
    trainer_of(family, "cpu", tmp_path / "whole").train(9)
    trainer_of(family, first, tmp_path / "cut").train(5)
    second = trainer_of(family, then, tmp_path / "cut")
    second.resume()
    assert second.step == 5
    second.train(9)
    whole, cut = (load_checkpoint(tmp_path / place / "last.safetensors")[0] for place in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    for key, array in whole.items():
        if key != "trainer.tally":                               # an evaluation at step 5 begins it anew
            np.testing.assert_allclose(cut[key], array, rtol=1e-7, atol=1e-9, err_msg=key)


def test_dropout_is_drawn_on_the_device_and_repeated_exactly(tmp_path):
    def family():
        return tsdae_family(dropout=0.2, attention_dropout=0.2)
    made = fake_cupy._BitGenerator.made
    trainer = trainer_of(family, "gpu", tmp_path / "whole", eval_every=3)
    trainer.train(6)
    assert fake_cupy._BitGenerator.made == made + 6
    assert all(moved["to_device"] == 5 for moved in trainer.moved)
    trainer_of(family, "gpu", tmp_path / "cut", eval_every=3).train(3)
    second = trainer_of(family, "gpu", tmp_path / "cut", eval_every=3)
    second.resume()
    second.train(6)
    whole, cut = (load_checkpoint(tmp_path / place / "last.safetensors")[0] for place in ("whole", "cut"))
    for key, array in whole.items():
        np.testing.assert_array_equal(cut[key], array, err_msg=key)


def test_a_non_finite_gradient_is_found_at_the_next_log_interval(tmp_path):
    def spoiled(model, batch, rng):
        loss = adding.forward_backward(model, batch, rng)
        if trainer.step == 1:
            model.readout.W.grad[...] = np.nan
        return loss

    def family():
        model, batches, _, settings = adding_family()
        return model, batches, spoiled, settings
    trainer = trainer_of(family, "gpu", tmp_path / "run")
    with pytest.raises(ArithmeticError, match=r"step 4: .* is not finite"):
        trainer.train(8)


# ---- a task ----------------------------------------------------------------------------------------------

SMALL = {
    adding: ["-S", "6", "-K", "2", "--hidden", "4", "--train-size", "20", "--test-size", "10", "--batch-size", "5"],
    char_lm: ["--width", "8", "--ratio", "2", "--layers", "1", "--unroll", "8", "--batch-size", "2",
              "--valid-bytes", "64", "--warmup", "1"],
    tsdae: ["--width", "8", "--heads", "2", "--layers", "1", "--vocab", "60", "--buckets", "9", "--batch-size", "4",
            "--sts", "none", "--dropout", "0", "--attention-dropout", "0", "--warmup", "1"],
}


@pytest.mark.usefixtures("quick_figures")
@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.__name__)
def test_a_task_runs_there_and_says_the_same(task, tmp_path, capsys):
    text, found = tmp_path / "text.txt", {}
    words = np.random.default_rng(0).choice(["the", "of", "and", "a", "fast", "river", "sings"], (60, 6))
    text.write_text("\n".join(" ".join(line) + " ." for line in words), encoding="utf-8")
    more = [] if task is adding else ["--data", text]
    for device in ("cpu", "gpu"):
        task.main([str(word) for word in [
            *SMALL[task], *more, "--dtype", "float64", "--steps", "3", "--eval-every", "2", "--clip-norm", "1",
            "--device", device, "--out", tmp_path / device, "--quiet"]])
        _, found[device] = read_log(tmp_path / device / "log.csv")
    assert len(found["gpu"]) == len(found["cpu"]) > 1
    for here, there in zip(found["cpu"], found["gpu"]):
        for key in set(here) - {"seconds"}:
            assert (there[key] or 0) == pytest.approx(here[key] or 0, rel=1e-6), key


def test_text_is_written_and_encoded_there():
    model, *_ = char_lm_family()
    vocabulary = Vocabulary(np.arange(97, 104, dtype="uint8"))
    texts = [list(itertools.islice(char_lm.generate(model.to_device(device), vocabulary, b"ab", 1.0, 0, device), 12))
             for device in ("cpu", "gpu")]
    assert texts[0] == texts[1]
    model, *_ = tsdae_family()
    vectors = model.encode(["a b c", "g"])
    written = model.reconstruct(vectors)
    model.to_device("gpu")
    assert_close(model.encode(["a b c", "g"]), vectors, 1e-6)
    assert model.reconstruct(vectors) == model.reconstruct(to_device(vectors, "gpu")) == written


def test_an_evaluation_of_classes(tmp_path):
    model, batches, *_ = imdb_family()
    figures = []
    for device in ("cpu", "gpu"):
        model.to_device(device)
        evaluation = classify.Evaluation(lambda: [batches[0]], lambda: [batches[0], batches[1]], 1, 1, "test_accuracy",
                                         device)
        evaluation.step = lambda: 1
        figures.append(evaluation(model))
    assert figures[0] == pytest.approx(figures[1], rel=1e-9)
    assert {"test_accuracy", "test_accuracy_all", "w_hat_1", "w_hat_backward_2"} <= set(figures[0])
