"""tasks/pixel_mnist.py: as a user runs it, on made images, and with bad input."""

import functools
import gc
import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import content, result, write_images

from minigrad.backend import gpu_problem
from minigrad.data.mnist import permutation, read_mnist, save_permutation
from minigrad.layers import IRNN
from minigrad.optim import RMSprop
from minigrad.tensors import load_tensors
from minigrad.training.runlog import read_log
from tasks import pixel_mnist
from tasks.frame import classify, results
from tasks.frame.common import run

pytestmark = pytest.mark.usefixtures("quick_figures", "made_images_only")

FEW = ["--stride", "7", "--hidden", "6", "-K", "2", "--batch-size", "9", "--eval-every", "2", "--eval-size", "7"]
TRAIN, TEST = 30, 20                                             # FEW: 3 batches an epoch, 16 steps an image


@pytest.fixture
def made_images_only(monkeypatch):
    monkeypatch.setattr(pixel_mnist, "read_mnist", functools.partial(read_mnist, official=False))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), TRAIN, TEST)


@pytest.fixture
def small(data):
    return [*FEW, "--data", str(data)]


def ran(capsys, *argv):
    """(exit status, stdout, stderr) of the task in this process."""
    try:
        status = run(pixel_mnist.main, [str(word) for word in argv])
    except SystemExit as end:                                    # argparse
        status = end.code
    out, err = capsys.readouterr()
    return status, out, err


# ---- runs ------------------------------------------------------------------------------------------------

@pytest.mark.figures
def test_a_run_writes_what_the_help_says(tmp_path, capsys, small, data):
    out = tmp_path / "run"
    status, shown, err = ran(capsys, *small, "--steps", 7, "--out", out)
    assert status == 0, err
    assert {path.name for path in out.iterdir()} == {
        "config.json", "log.csv", "figure5.png", "figure7.png", "result.json", "last.safetensors", "best.safetensors"}
    what = "16 steps of 7 x 7 pixels (not the paper's task)"
    assert f"30 images to train on, 20 to test on; {what}" in shown
    assert re.search(r"RRA, K = 2: [\d,]+ parameters, 7 steps, 2.33 epochs; about \d+ s on this machine", shown)
    assert re.search(r"RRA, K = 2: test accuracy [\d.]+% after 2.33 epochs \(7 iterations\); best [\d.]+% at \d", shown)
    kept = result(out)
    assert [epoch for epoch, _ in kept["per_epoch"]] == [1, 2, 7 / 3]
    assert kept["test_accuracy"] == kept["per_epoch"][-1][1]
    assert kept["best"]["value"] == max(value for _, value in kept["per_epoch"])
    assert kept["data"] == {"train": 30, "test": 20, "part": 7, "what": what}
    columns, rows = read_log(out / "log.csv")
    assert [row["step"] for row in rows] == [0, 2, 3, 4, 6, 7]   # --eval-every 2, the ends of the epochs, the last step
    assert [row["step"] for row in rows if row["test_accuracy_all"] is not None] == [3, 6, 7]
    assert columns[-2:] == ["w_hat_1", "w_hat_2"]
    assert all(row["w_hat_1"] + row["w_hat_2"] == pytest.approx(1, abs=1e-5) for row in rows)
    settings = pixel_mnist.parse([*small])                       # and the last figures once more, image by image
    model = pixel_mnist.build(settings, "rra")
    tensors, _ = load_tensors(out / "last.safetensors")
    for name, parameter in model.named_parameters():
        parameter.value[...] = tensors[name]
    mnist = read_mnist(data, official=False)
    right = []
    for n in np.random.default_rng(12).permutation(TEST):
        x = mnist.test_images[n].reshape(4, 7, 4, 7).mean(axis=(1, 3)).reshape(1, 16, 1) / 255
        right.append(model(x.astype("float32")).argmax() == mnist.test_labels[n])
    assert rows[-1]["test_accuracy_all"] == pytest.approx(np.mean(right))
    chosen = np.random.default_rng(12).permutation(TEST)[:7]
    assert rows[-1]["test_accuracy"] == pytest.approx(np.mean([right[n] for n in chosen]))


def test_all_of_table_1_reads_the_same_permuted_images(tmp_path, capsys, small, monkeypatch):
    out, met, forward_backward = tmp_path / "run", [], classify.forward_backward

    def noting(model, batch, rng):
        met.append(batch[0].tobytes())
        return forward_backward(model, batch, rng)
    with monkeypatch.context() as patch:
        patch.setattr(classify, "forward_backward", noting)
        patch.setattr(classify, "seconds_for", lambda *arguments: 0)
        names = ["rra", "lstm", "irnn", "urnn", "rwa"]
        status, shown, err = ran(capsys, *small, "--permuted", "--permutation-seed", 5, "--steps", 3, "--compare",
                                 ",".join(names), "--out", out, "--threads", 1)
    assert status == 0, err
    assert "16 steps of 7 x 7 pixels (not the paper's task), permuted" in shown
    assert f"the order of the steps is drawn from seed 5 and kept in {out / 'permutation.json'}" in shown
    kept = json.loads((out / "permutation.json").read_text())
    assert (kept["seed"], kept["order"]) == (5, permutation(16, 5).tolist())
    each = len(met) // len(names)
    assert all(met[:each] == met[n * each:(n + 1) * each] for n in range(len(names)))
    orders = {load_tensors(out / name / "last.safetensors")[1]["config"]["order"] for name in names}
    assert len(orders) == 1
    assert {path.name for path in out.iterdir()} == {*names, "config.json", "figure5.png", "permutation.json"}
    status, _, err = ran(capsys, "--resume", out, "--steps", 4, "--quiet")
    assert status == 0, err
    status, _, err = ran(capsys, "--resume", out / "irnn", "--steps", 5, "--quiet")
    assert status == 0, err
    assert load_tensors(out / "irnn/last.safetensors")[1]["config"]["order"] in orders


def test_a_model_that_diverges_does_not_end_the_others(tmp_path, capsys, small, monkeypatch):
    out, forward_backward = tmp_path / "run", classify.forward_backward

    def diverging(model, batch, rng):
        loss = forward_backward(model, batch, rng)
        if isinstance(model.cell, IRNN):
            model.cell.V.grad[...] = np.inf
        return loss
    monkeypatch.setattr(classify, "forward_backward", diverging)
    status, shown, err = ran(capsys, *small, "--steps", 8, "--compare", "irnn,lstm,rwa", "--out", out)
    assert status == 1
    assert re.search(r"^irnn stopped: step 1: the gradient of cell.V is not finite", err, re.MULTILINE)
    assert "stopped: irnn diverged (above); the others were trained to their end" in err
    assert re.search(r"all 3 models: about \d+ s on this machine", shown)
    assert not (out / "irnn/result.json").exists()
    assert all(result(out / name)["steps"] == 8 for name in ("lstm", "rwa"))
    assert (out / "figure5.png").exists()


def test_the_estimate_grows_with_the_steps_and_their_size(data):
    settings = pixel_mnist.parse([*FEW, "--data", str(data)])
    clock = iter(range(10_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classify.time, "monotonic", lambda: next(clock))       # whatever is tried takes a second
        mnist = read_mnist(data, official=False)
        (images, labels), test = pixel_mnist.parts_of(mnist, settings)
        form = pixel_mnist.Form(settings, None)
        batches = pixel_mnist.ImageBatches(images, labels, form, 9, 0)
        every = pixel_mnist.for_evaluation(*test, form)
        task = classify.Task(lambda name: pixel_mnist.build(settings, name), batches, every, every, "test_accuracy", "",
                             "", {"part": 20, "test": 20}, {})
        of_training = [classify.seconds_for(task, "rra", {**settings, "eval_every": 10**9}, steps) for steps in (3, 30)]
        # a second a step; an evaluation of all test images, one batch here, at the end of every epoch of three steps
        assert of_training == pytest.approx([3 + 1, 30 + 10], abs=1e-3)
        assert classify.seconds_for(task, "rra", {**settings, "eval_every": 3}, 30) == pytest.approx(30 + 20, abs=1e-3)
        assert classify.seconds_for(task, "rra", {**settings, "eval_every": 3}, 30, 15) == pytest.approx(25, abs=1e-3)


def test_what_the_network_is_given(small, data):
    mnist = read_mnist(data, official=False)
    for flags, shape in (([], (784, 1)), (["--rows"], (28, 28)), (["--stride", "4"], (49, 1)),
                         (["--permuted"], (784, 1)), (["--rows", "--permuted", "--dtype", "float64"], (28, 28))):
        settings = pixel_mnist.parse(["--data", str(data), *flags])
        order = pixel_mnist.order_of(settings)
        train, _ = pixel_mnist.parts_of(mnist, settings)
        form = pixel_mnist.Form(settings, order)
        assert form(np.zeros((1, 28, 28), np.uint8)).shape[1:] == shape
        batches = pixel_mnist.ImageBatches(*train, form, 4, 3)
        assert batches.per_epoch == TRAIN // 4
        x, labels = batches[1]
        rows = np.random.default_rng([3, 0]).permutation(TRAIN)[4:8]
        expected = np.zeros((4, *shape))
        for n, row in enumerate(rows):
            image = mnist.train_images[row] / 255
            if "--stride" in flags:
                image = image.reshape(7, 4, 7, 4).mean(axis=(1, 3))
            for t in range(shape[0]):
                at = t if order is None else order[t]
                expected[n, t] = image[at] if "--rows" in flags else image.flat[at]
        np.testing.assert_allclose(x, expected, rtol=1e-6)
        assert x.dtype == settings["dtype"]
        np.testing.assert_array_equal(labels, mnist.train_labels[rows])


def test_parts_of_the_images(small, data):
    mnist = read_mnist(data, official=False)
    settings = pixel_mnist.parse([*small, "--train-size", "8", "--test-size", "5"])
    (images, labels), (test_images, test_labels) = pixel_mnist.parts_of(mnist, settings)
    np.testing.assert_array_equal(images, mnist.train_images[:8])
    np.testing.assert_array_equal(labels, mnist.train_labels[:8])
    rows = np.random.default_rng(12).permutation(TEST)[:5]
    np.testing.assert_array_equal(test_images, mnist.test_images[rows])
    np.testing.assert_array_equal(test_labels, mnist.test_labels[rows])


def test_common_weights_are_the_same_for_every_model(small):
    settings = pixel_mnist.parse([*small, "--seed", "3"])
    names = ("rra", "lstm", "irnn", "rwa")
    models = {name: dict(pixel_mnist.build(settings, name).named_parameters()) for name in names}
    for name in ("cell.W", "cell.U", "cell.b"):
        np.testing.assert_array_equal(models["rra"][name].value, models["lstm"][name].value)
    for name in models:
        np.testing.assert_array_equal(models[name]["readout.W"].value, models["rra"]["readout.W"].value)


@pytest.mark.parametrize("model", ["rra", "urnn"])
def test_stopped_and_resumed_is_as_never_stopped(tmp_path, capsys, small, monkeypatch, model):
    flags = [*small, "--model", model, "--dropout", 0.4, "--steps", 8, "--quiet", "--permuted"]
    assert ran(capsys, *flags, "--out", tmp_path / "whole")[0] == 0
    forward_backward, calls = classify.forward_backward, []

    def stops(*arguments):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt                              # as if killed: one step behind a checkpoint
        return forward_backward(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(classify, "forward_backward", stops)
        assert ran(capsys, *flags, "--out", tmp_path / "parts")[0] == 130
    gc.collect()                                                 # the lock, held by the frames of what was interrupted
    assert load_tensors(tmp_path / "parts/last.safetensors")[1]["step"] == 4
    status, _, err = ran(capsys, "--resume", tmp_path / "parts", "--steps", 4)
    assert (status, err.count("\n")) == (2, 1)
    assert "stands there already, within an epoch; expected more" in err
    status, _, err = ran(capsys, "--resume", tmp_path / "parts", "--steps", 8)
    assert status == 0, err
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


# ---- the order of the pixels -----------------------------------------------------------------------------

def test_a_kept_order_is_read_again(tmp_path, capsys, small):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    flags = [*small, "--permuted", "--steps", 3]
    assert ran(capsys, *flags, "--permutation-seed", 7, "--quiet", "--out", first)[0] == 0
    given = tmp_path / "given.json.gz"
    given.write_bytes(gzip.compress((first / "permutation.json").read_bytes()))
    status, shown, err = ran(capsys, *flags, "--permutation", given, "--out", second)
    assert status == 0, err
    assert f"the order of the steps is from {given} and kept in" in shown
    assert (second / "permutation.json").read_bytes() == (first / "permutation.json").read_bytes()
    assert content(first)[:2] == content(second)[:2]
    assert ran(capsys, *flags, "--quiet", "--out", third)[0] == 0
    assert content(first)[1] != content(third)[1]                # another order is another run
    given.unlink()
    kept = (second / "permutation.json").read_bytes()
    status, _, err = ran(capsys, "--resume", second, "--steps", 6)           # the run has its own
    assert status == 0, err
    assert (second / "permutation.json").read_bytes() == kept


def test_a_changed_order_is_another_run(tmp_path, capsys, small):
    out = tmp_path / "run"
    assert ran(capsys, *small, "--permuted", "--steps", 3, "--quiet", "--out", out)[0] == 0
    log = (out / "log.csv").read_bytes()
    save_permutation(out / "permutation.json", permutation(16, 1), 1)
    status, _, err = ran(capsys, "--resume", out, "--steps", 6)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"order is \d+; this run has \d+", err)
    (out / "permutation.json").write_text("{")
    status, _, err = ran(capsys, "--resume", out, "--steps", 6)
    assert (status, err.count("\n")) == (2, 1)
    assert "permutation.json: damaged, or no JSON" in err
    (out / "permutation.json").unlink()                          # drawn again from the seed
    assert ran(capsys, "--resume", out, "--steps", 6, "--quiet")[0] == 0
    assert (out / "log.csv").read_bytes().startswith(log)


@pytest.mark.parametrize(("text", "sentence"), [
    (None, "order.json: there is no such file"), (b"{", "order.json: damaged, or no JSON"),
    (b"[1, 2]", "order.json: is no minigrad-permutation-1"), (12, "order.json: the order has 12 steps; expected 16")])
def test_a_bad_file_of_an_order(tmp_path, capsys, small, text, sentence):
    path = tmp_path / "order.json"
    if isinstance(text, int):
        save_permutation(path, permutation(text, 0), 0)
    elif text is not None:
        path.write_bytes(text)
    status, _, err = ran(capsys, *small, "--permuted", "--permutation", path, "--out", tmp_path / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert sentence in err
    assert not (tmp_path / "run").exists()


# ---- settings --------------------------------------------------------------------------------------------

def test_the_papers_setting():
    settings = pixel_mnist.parse(["--paper", "--permuted"])
    assert {key: settings[key] for key in ("hidden", "batch_size", "optimizer", "lr", "clip_norm", "clip_value")} == {
        "hidden": 256, "batch_size": 50, "optimizer": "rmsprop", "lr": 1e-3, "clip_norm": 0, "clip_value": 0}
    assert (settings["window"], settings["forget_bias"], settings["dropout"], settings["offset"]) == (10, 0, 0, 2)
    assert (settings["train_size"], settings["test_size"], settings["permuted"]) == (0, 0, True)
    assert pixel_mnist.shape_of(settings) == (784, 1)
    assert pixel_mnist.describe(settings) == "784 steps of one pixel, permuted"
    assert pixel_mnist.EPOCHS == {True: 30, False: 2}
    assert pixel_mnist.parse(["--paper", "--hidden", "9"])["hidden"] == 9


def test_the_optimizers_settings(small):
    def made(*flags):
        settings = pixel_mnist.parse([*small, *flags])
        return classify.optimizer_of(settings, pixel_mnist.build(settings, "lstm").parameters())
    names = ("lr", "rho", "momentum", "centred", "eps", "eps_inside")
    for flags, expected in (
            (["--paper"], [1e-3, 0.9, 0, False, 1e-8, False]),
            (["--paper", "--rmsprop", "centred"], [1e-4, 0.95, 0.9, True, 1e-4, True]),
            (["--optimizer", "rmsprop", "--rmsprop", "centred", "--lr", "1e-3"], [1e-3, 0.95, 0.9, True, 1e-4, True])):
        optimizer = made(*flags)
        assert type(optimizer) is RMSprop
        assert [getattr(optimizer, name) for name in names] == expected
    assert (type(made()).__name__, made().lr) == ("Adam", 1e-3)
    assert made("--paper", "--optimizer", "adadelta").lr == 1    # not RMSprop's


# ---- bad input: one line, exit status 2, nothing written -------------------------------------------------

@pytest.mark.parametrize(("argv", "sentence"), [
    (["--model", "gru"], "argument --model: invalid choice: 'gru'"),
    (["--model", "birra"], "argument --model: invalid choice: 'birra'"),
    (["--compare", "rra,birra"], "--compare has 'birra'; expected names among rra, lstm"),
    (["--rows"], "--rows and --stride were both given; expected one of them"),
    (["--stride", "3"], "--stride is 3; expected a divisor of 28"),
    (["--stride", "0"], "argument --stride: '0'; expected a whole number of at least 1"),
    (["--permutation", "x"], "--permutation and --permutation-seed have a meaning only with --permuted"),
    (["--permutation-seed", "1"], "--permutation and --permutation-seed have a meaning only with --permuted"),
    (["--permuted", "--permutation", "x", "--permutation-seed", "1"], "were both given; expected one of them"),
    (["--rmsprop", "centred"], "--rmsprop centred was given, but the optimizer is adam"),
    (["--optimizer", "adma"], "--optimizer is 'adma'; expected one of sgd, momentum, adadelta"),
    (["--optimizer", "momentum", "--eps", "1"], "--eps is 1.0, but the optimizer momentum has no eps"),
    (["--dropout", "1.5"], "--dropout is 1.5; expected a share below 1"),
    (["--train-size", "31"], "--train-size is 31; expected at most 30"),
    (["--test-size", "21"], "--test-size is 21; expected at most 20"),
    (["--batch-size", "31"], "batch_size is 31, larger than the data (30 examples)"),
    (["--model", "rnn-attention", "-K", "1"], "RNN: "),
    (["--steps", "5", "--epochs", "1"], "--steps and --epochs were both given"),
    (["--data", "/nowhere"], "train-images-idx3-ubyte is neither in /nowhere nor one folder below"),
    (["--resume", "/nowhere"], "/nowhere: no run there"),
    (["--unknown"], "unrecognized arguments: --unknown")])
def test_bad_flags(tmp_path, capsys, small, argv, sentence):
    status, _, err = ran(capsys, *small, "--out", tmp_path / "run", *argv)
    assert status == 2
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU is there")
def test_no_gpu(tmp_path, capsys):
    status, out, err = ran(capsys, "--device", "gpu", "--out", tmp_path / "run")
    assert (status, out) == (2, "")
    assert err.startswith("error: device 'gpu' was asked for, but ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: b"garbage", lambda packed: b""])
def test_damaged_data_is_one_line(tmp_path, capsys, data, damage):
    place = Path(shutil.copytree(data, tmp_path / "data"))
    path = place / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    status, _, err = ran(capsys, *FEW, "--data", place, "--out", tmp_path / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert "t10k-images-idx3-ubyte.gz: " in err
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_its_settings(tmp_path, capsys, small):
    out = tmp_path / "run"
    assert ran(capsys, *small, "--permuted", "--steps", 3, "--quiet", "--out", out)[0] == 0
    log = (out / "log.csv").read_bytes()
    for flags, sentence in ((["--hidden", 7], "--hidden 7 differs from the run in"),
                            (["--permutation-seed", 1], "--permutation-seed 1 differs from the run in"),
                            (["--permutation", "x"], "--permutation x differs from the run in"),
                            (["--steps", 2], "--steps: 2 are asked for, but the run in")):
        status, _, err = ran(capsys, "--resume", out, "--steps", 6, *flags)
        assert (status, err.count("\n")) == (2, 1)
        assert sentence in err
    last = (out / "last.safetensors").read_bytes()
    (out / "last.safetensors").write_bytes(last[:len(last) // 2])
    status, _, err = ran(capsys, "--resume", out, "--steps", 6)
    assert (status, err.count("\n")) == (2, 1)
    assert "last.safetensors: damaged" in err
    assert (out / "log.csv").read_bytes() == log


def test_divergence_is_one_line_and_exit_status_1(tmp_path, capsys, small):
    status, _, err = ran(capsys, *small, "--steps", 60, "--optimizer", "sgd", "--lr", 1e38, "--clip-norm", 0, "--quiet",
                         "--out", tmp_path / "run")
    assert status == 1
    assert re.match(r"stopped: step \d+: ", err)
    assert len(err.splitlines()) == 1
    assert (tmp_path / "run/figure5.png").exists()


# ---- kept results, and what is said ----------------------------------------------------------------------

def test_runs_are_kept_and_shown(tmp_path, capsys, small, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for seed in (0, 1):
        flags = ["--permuted", "--model", "rwa", "--seed", str(seed)]
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", ["/x/tasks/pixel_mnist.py", *flags, "--data", "x", "--quiet"])
            assert ran(capsys, *small, *flags, "--steps", 4, "--quiet", "--out", tmp_path / f"{seed}")[0] == 0
        place = results.keep(tmp_path / f"{seed}", f"rwa-{seed}").parent
    assert place == tmp_path / "docs/results/pixel_mnist"
    assert run(results.main, ["table", str(place)]) == 0
    lines, kept = capsys.readouterr().out.splitlines(), result(tmp_path / "0")
    assert lines[2] == (
        "| rwa-0 | `python tasks/pixel_mnist.py --permuted --model rwa --seed 0` | RWA, permuted, stride 7, hidden 6, "
        f"batch size 9 | {kept['test_accuracy']:.2%} | 1.33 | {kept['best']['value']:.2%} | 0.0 min |")
    drawn = {}
    monkeypatch.setattr(results, "draw_runs", lambda path, groups, **how: drawn.update(groups=groups, how=how))
    assert run(results.main, ["figure", str(place), "x.png"]) == 0
    assert list(drawn["groups"]) == ["RWA, permuted, stride 7, hidden 6, batch size 9, 2 seeds"]
    assert drawn["how"]["title"] == ("MNIST, 16 steps of 7 x 7 pixels (not the paper's task), permuted\n"
                                     "6 units; 7 of 20 test images")


def test_what_a_run_was():
    describe = lambda *argv: results.describe_classify(pixel_mnist.parse(argv))
    assert describe() == "RRA, K = 10"
    assert describe("--paper") == "RRA, K = 10, the paper's setting"
    assert describe("--model", "irnn", "--permuted", "--rows") == "IRNN, permuted, rows"
    assert describe("--paper", "--clip-value", "1", "--lr", "1e-4") == (
        "RRA, K = 10, the paper's setting, lr 0.0001, clip value 1.0")
    assert describe("--optimizer", "sgd") == "RRA, K = 10, optimizer sgd"


@pytest.mark.parametrize(("seconds", "words"), [
    (0.4, "0 s"), (89, "89 s"), (95, "2 min"), (3600, "60 min"), (6000, "1.7 h"), (360_000, "100.0 h")])
def test_durations(seconds, words):
    assert classify.duration(seconds) == words


# ---- real images -----------------------------------------------------------------------------------------

def test_the_real_images(tmp_path, capsys, real_data, monkeypatch):
    folder = real_data("train-images-idx3-ubyte.gz").parent
    monkeypatch.setattr(pixel_mnist, "read_mnist", read_mnist)
    status, shown, err = ran(capsys, "--data", folder, "--rows", "--steps", 3, "--train-size", 200, "--test-size", 100,
                             "--hidden", 16, "--out", tmp_path / "run")
    assert status == 0, err
    assert "200 images to train on, 100 to test on; 28 rows of 28 pixels (not pixel by pixel)" in shown
    assert 0 < result(tmp_path / "run")["test_accuracy"] < 1
