"""Layers, losses, optimizers, checkpoints, training on the stand-in for CuPy: NumPy's numbers, no hidden transfer."""

import csv
import dataclasses
import itertools
from collections import Counter

import device_parity
import fake_cupy
import numpy as np
import pytest
from cases import TABLE, B, L
from device_parity import (
    FAMILIES,
    LOG_EVERY,
    OPTIMIZERS,
    SCALES,
    SMALL,
    Device,
    adding_family,
    char_lm_family,
    draw,
    forward_and_backward,
    imdb_family,
    on_device,
    trainer_of,
    tsdae_family,
)
from fake_cupy import no_transfers, peek, transfers
from helpers import assert_close

from minigrad import Parameter
from minigrad.backend import to_device
from minigrad.clipping import clip_grad_norm
from minigrad.data import Vocabulary
from minigrad.layers import IRNN, LSTM, RNN, RRALSTM, RWA, SRU, URNN, Bidirectional, SinusoidalPositions, SRUpp
from minigrad.tensors import fill_exactly, load_tensors, save_tensors
from models.regressor import SequenceRegressor
from tasks import adding, char_lm_generate, clipping, frame
from tasks.frame import classify

pytestmark = pytest.mark.usefixtures("fake_gpu")

DEVICE = Device(still=no_transfers, fetch=peek)


# ---- layers ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_a_layer_gives_the_numbers_of_the_host_and_moves_nothing(case):
    device_parity.layer_agrees(DEVICE, case)


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


def plain(case):
    """The case with fast=False."""
    def make(dtype, rng):
        layer = case.make(dtype, rng)
        layer.fast = False
        return layer
    return dataclasses.replace(case, make=make)


@pytest.mark.parametrize("case", [plain(case) for case in TABLE if getattr(case.layer(), "fast", False)],
                         ids=lambda case: case.name)
def test_the_equations_as_written_too(case):
    device_parity.layer_agrees(DEVICE, case, ["gaps"])


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
        (y, _), _ = layer.forward(x, state=layer.initial_state(B))
        stepping = layer.begin()
        for t in range(L):
            y_t, stepping = layer.step(x[:, t], stepping)
    np.testing.assert_allclose(peek(y_t), peek(y)[:, -1], rtol=1e-9)


# ---- losses ----------------------------------------------------------------------------------------------

def test_losses():
    device_parity.losses_agree(DEVICE)


# ---- optimizers and clipping -----------------------------------------------------------------------------

@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_parameters_alike_and_nothing_else(name):
    device_parity.optimizer_agrees(DEVICE, name)


@pytest.mark.parametrize("scale", SCALES)
def test_clipping_does_not_wait(scale):
    device_parity.clipping_agrees(DEVICE, scale)


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
        save_tensors(tmp_path / "gpu", {name: p.value for name, p in model.named_parameters()}, {"n": 1})
    assert Counter(kind for kind, _ in moved) == {"to_host": len(values)}
    save_tensors(tmp_path / "cpu", values, {"n": 1})
    (of_gpu, meta), (of_cpu, _) = (load_tensors(tmp_path / name) for name in ("gpu", "cpu"))
    assert meta == {"n": 1}
    assert {name: array.tobytes() for name, array in of_gpu.items()} == {
        name: array.tobytes() for name, array in of_cpu.items()}
    other = RRALSTM(4, 3, 2, rng=1).to_device("gpu")
    with transfers() as moved:
        fill_exactly(other.named_arrays(), load_tensors(tmp_path / "cpu")[0], "checkpoint")
    assert Counter(kind for kind, _ in moved) == {"to_device": len(values)}
    for name, parameter in other.named_parameters():
        np.testing.assert_array_equal(peek(parameter.value), values[name])


# ---- training --------------------------------------------------------------------------------------------

def counting(trainer):
    """The trainer, which from now on notes what each step moves in `trainer.moved`."""
    trainer.moved, step = [], trainer._one_step

    def counted():
        with transfers() as moved:
            step()
        trainer.moved.append(Counter(kind for kind, _ in moved))
    trainer._one_step = counted
    return trainer


@pytest.mark.parametrize("name", FAMILIES)
def test_training_moves_the_batch_alone(name, tmp_path):
    """Between log intervals nothing waits either; there, the loss and the norm are read."""
    family, arrays = FAMILIES[name]
    made = fake_cupy._BitGenerator.made
    trainer = counting(trainer_of(family, "gpu", tmp_path / "gpu"))
    trainer.train(10)
    for step, moved in enumerate(trainer.moved, 1):
        assert moved == {"to_device": arrays, **({"wait": 2} if step % LOG_EVERY == 0 else {})}, step
    assert fake_cupy._BitGenerator.made == made                  # no layer drew anything
    device_parity.training_agrees(trainer, name, tmp_path)


@pytest.mark.parametrize(("first", "then"), [("cpu", "gpu"), ("gpu", "cpu")])
@pytest.mark.parametrize("name", ["char_lm", "tsdae"])
def test_a_run_is_resumed_on_the_other_device(name, first, then, tmp_path):
    device_parity.resumed_on_the_other_device(name, first, then, tmp_path)


def test_dropout_is_drawn_on_the_device_and_repeated_exactly(tmp_path):
    def family():
        return tsdae_family(dropout=0.2, attention_dropout=0.2)
    made = fake_cupy._BitGenerator.made
    trainer = counting(trainer_of(family, "gpu", tmp_path / "whole", eval_every=3))
    trainer.train(6)
    assert fake_cupy._BitGenerator.made == made + 6
    assert all(moved["to_device"] == 5 for moved in trainer.moved)
    trainer_of(family, "gpu", tmp_path / "cut", eval_every=3).train(3)
    second = trainer_of(family, "gpu", tmp_path / "cut", eval_every=3)
    second.resume()
    second.train(6)
    whole, cut = (load_tensors(tmp_path / place / "last.safetensors")[0] for place in ("whole", "cut"))
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

@pytest.mark.usefixtures("quick_figures")
@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.__name__)
def test_a_task_runs_there_and_says_the_same(task, tmp_path, monkeypatch):
    device_parity.task_agrees(task, tmp_path, monkeypatch)


@pytest.mark.usefixtures("quick_figures")
def test_the_table_of_clipping_is_the_same_there(tmp_path):
    for device in ("cpu", "gpu"):
        clipping.main(["table", "--seeds", "1", "--steps", "3", "--train-size", "20", "--test-size", "10",
                       "--batch-size", "5", "-S", "6", "--hidden", "4", "--dtype", "float64", "--quiet",
                       "--device", device, "--out", str(tmp_path / device)])
    (_, *here), (_, *there) = (
        csv.reader((tmp_path / device / "log.csv").read_text("utf-8").splitlines()) for device in ("cpu", "gpu"))
    assert len(there) == len(here) == 3 * 3                      # variants, steps
    for row, other in zip(here, there):
        assert other[:3] == row[:3]
        np.testing.assert_allclose([float(n) for n in other[3:]], [float(n) for n in row[3:]], rtol=1e-9)


def test_text_is_written_and_encoded_there():
    model, *_ = char_lm_family()
    vocabulary = Vocabulary(np.arange(97, 104, dtype="uint8"))
    written = lambda device: char_lm_generate.generate(model.to_device(device), vocabulary, b"ab", 1.0, 0, device)
    texts = [list(itertools.islice(written(device), 12)) for device in ("cpu", "gpu")]
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
        evaluation = classify.Evaluation({"steps": 1}, lambda: [batches[0]], lambda: [batches[0], batches[1]], 1,
                                         "test_accuracy", device)
        figures.append(evaluation(model, 1))
    assert figures[0] == pytest.approx(figures[1], rel=1e-9)
    assert {"test_accuracy", "test_accuracy_all", "w_hat_1", "w_hat_backward_2"} <= set(figures[0])


def test_an_odd_switch_of_the_kernels_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MINIGRAD_KERNELS", "off")
    argv = [*map(str, SMALL[adding]), "--device", "gpu", "--steps", "1", "--out", str(tmp_path / "run")]
    assert frame.run(adding.TASK, argv) == 2
    assert capsys.readouterr().err == "error: MINIGRAD_KERNELS is 'off' in the environment; expected 0 or 1\n"
    assert not (tmp_path / "run").exists()
