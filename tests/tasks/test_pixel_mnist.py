"""tasks/pixel_mnist.py: as a user runs it, on made images, and with bad input."""

import dataclasses
import functools
import gzip
import json
import re

import numpy as np
import pytest
from helpers import content, result, write_images
from task_runs import ran, refused

from minigrad.data.mnist import permutation, read_mnist, save_permutation
from minigrad.tensors import load_tensors
from minigrad.training import read_log
from tasks import pixel_mnist
from tasks.frame import classify, exit_status as run, results
from tasks.frame.flags import settings_of

TASK = pixel_mnist.TASK
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


# ---- runs ------------------------------------------------------------------------------------------------

@pytest.mark.figures
def test_a_run_writes_what_the_help_says(tmp_path, capsys, small, data):
    out = tmp_path / "run"
    status, shown, err = ran(capsys, TASK, *small, "--steps", 7, "--out", out)
    assert status == 0, err
    assert {path.name for path in out.iterdir()} == {
        "config.json", "log.csv", "figure5.png", "figure7.png", "result.json", "last.safetensors", "best.safetensors"}
    what = "16 steps of 7 x 7 pixels (not the paper's task)"
    assert f"30 images to train on, 20 to test on; {what}" in shown
    assert re.search(r"RRA, K = 2: [\d,]+ parameters, 7 steps", shown)
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
    settings = settings_of(TASK, [*small])                       # and the last figures once more, image by image
    model = pixel_mnist.build(settings)
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


def test_all_of_table_1_reads_the_same_permuted_images(tmp_path, capsys, small):
    out, met, forward_backward = tmp_path / "run", [], classify.forward_backward

    def noting(model, batch, rng):
        met.append(batch[0].tobytes())
        return forward_backward(model, batch, rng)
    names = ["rra", "lstm", "irnn", "urnn", "rwa"]
    status, shown, err = ran(capsys, dataclasses.replace(TASK, step=noting), *small, "--permuted", "--permutation-seed",
                             5, "--steps", 3, "--compare", ",".join(names), "--out", out)
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
    status, _, err = ran(capsys, TASK, "--resume", out, "--steps", 4, "--quiet")
    assert status == 0, err
    status, _, err = ran(capsys, TASK, "--resume", out / "irnn", "--steps", 5, "--quiet")
    assert status == 0, err
    assert load_tensors(out / "irnn/last.safetensors")[1]["config"]["order"] in orders


def test_what_the_network_is_given(small, data):
    mnist = read_mnist(data, official=False)
    for flags, shape in (([], (784, 1)), (["--rows"], (28, 28)), (["--stride", "4"], (49, 1)),
                         (["--permuted"], (784, 1)), (["--rows", "--permuted", "--dtype", "float64"], (28, 28))):
        settings = settings_of(TASK, ["--data", str(data), *flags])
        settings.update(batch_size=4, seed=3)
        images = pixel_mnist.open_images(settings)
        order = images.reader.order
        assert images.reader(np.zeros((1, 28, 28), np.uint8)).shape[1:] == shape == pixel_mnist.shape_of(settings)
        batches = pixel_mnist.batches(settings, images)
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
    settings = settings_of(TASK, [*small, "--train-size", "8", "--test-size", "5"])
    _, (images, labels), (test_images, test_labels), _ = pixel_mnist.open_images(settings)
    np.testing.assert_array_equal(images, mnist.train_images[:8])
    np.testing.assert_array_equal(labels, mnist.train_labels[:8])
    rows = np.random.default_rng(12).permutation(TEST)[:5]
    np.testing.assert_array_equal(test_images, mnist.test_images[rows])
    np.testing.assert_array_equal(test_labels, mnist.test_labels[rows])


# ---- the order of the pixels -----------------------------------------------------------------------------

def test_a_kept_order_is_read_again(tmp_path, capsys, small):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    flags = [*small, "--permuted", "--steps", 3]
    assert ran(capsys, TASK, *flags, "--permutation-seed", 7, "--quiet", "--out", first)[0] == 0
    given = tmp_path / "given.json.gz"
    given.write_bytes(gzip.compress((first / "permutation.json").read_bytes()))
    status, shown, err = ran(capsys, TASK, *flags, "--permutation", given, "--out", second)
    assert status == 0, err
    assert f"the order of the steps is from {given} and kept in" in shown
    assert (second / "permutation.json").read_bytes() == (first / "permutation.json").read_bytes()
    assert content(first)[:2] == content(second)[:2]
    assert ran(capsys, TASK, *flags, "--quiet", "--out", third)[0] == 0
    assert content(first)[1] != content(third)[1]                # another order is another run
    given.unlink()
    kept = (second / "permutation.json").read_bytes()
    status, _, err = ran(capsys, TASK, "--resume", second, "--steps", 6)           # the run has its own
    assert status == 0, err
    assert (second / "permutation.json").read_bytes() == kept


def test_a_changed_order_is_another_run(tmp_path, capsys, small):
    out = tmp_path / "run"
    assert ran(capsys, TASK, *small, "--permuted", "--steps", 3, "--quiet", "--out", out)[0] == 0
    log = (out / "log.csv").read_bytes()
    save_permutation(out / "permutation.json", permutation(16, 1), 1)
    status, _, err = ran(capsys, TASK, "--resume", out, "--steps", 6)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"order is \d+; this run has \d+", err)
    (out / "permutation.json").write_text("{")
    refused(capsys, "permutation.json: damaged, or no JSON", TASK, "--resume", out, "--steps", 6)
    (out / "permutation.json").unlink()                          # drawn again from the seed
    assert ran(capsys, TASK, "--resume", out, "--steps", 6, "--quiet")[0] == 0
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
    refused(capsys, sentence, TASK, *small, "--permuted", "--permutation", path, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- settings --------------------------------------------------------------------------------------------

def test_the_papers_setting():
    settings = settings_of(TASK, ["--paper", "--permuted"])
    assert {key: settings[key] for key in ("hidden", "batch_size", "optimizer", "lr", "clip_norm", "clip_value")} == {
        "hidden": 256, "batch_size": 50, "optimizer": "rmsprop", "lr": 1e-3, "clip_norm": 0, "clip_value": 0}
    assert (settings["window"], settings["forget_bias"], settings["dropout"], settings["offset"]) == (10, 0, 0, 2)
    assert "the paper's setting" in pixel_mnist.title(settings)
    assert "units, the paper's setting;" not in pixel_mnist.title({**settings, "hidden": 9})
    assert (settings["train_size"], settings["test_size"], settings["permuted"]) == (0, 0, True)
    assert pixel_mnist.shape_of(settings) == (784, 1)
    assert pixel_mnist.what(settings) == "784 steps of one pixel, permuted"
    assert (settings["epochs"], settings_of(TASK, [])["epochs"]) == (30, 2)
    assert settings_of(TASK, ["--paper", "--hidden", "9"])["hidden"] == 9


# ---- bad input: one line, exit status 2, nothing written -------------------------------------------------

@pytest.mark.parametrize(("argv", "sentence"), [
    (["--model", "gru"], "argument --model: invalid choice: 'gru'"),
    (["--model", "birra"], "argument --model: invalid choice: 'birra'"),
    (["--rows"], "--rows and --stride were both given; expected one of them"),
    (["--stride", "3"], "--stride is 3; expected a divisor of 28"),
    (["--stride", "0"], "argument --stride: '0'; expected a whole number of at least 1"),
    (["--permutation", "x"], "--permutation and --permutation-seed have a meaning only with --permuted"),
    (["--permutation-seed", "1"], "--permutation and --permutation-seed have a meaning only with --permuted"),
    (["--permuted", "--permutation", "x", "--permutation-seed", "1"], "were both given; expected one of them"),
    (["--optimizer", "momentum", "--eps", "1"], "--eps is 1.0, but the optimizer momentum has no eps"),
    (["--dropout", "1.5"], "argument --dropout: '1.5'; expected a finite number of at least 0 and below 1"),
    (["--train-size", "31"], "--train-size is 31; expected at most 30"),
    (["--test-size", "21"], "--test-size is 21; expected at most 20"),
    (["--batch-size", "31"], "batch_size is 31, larger than the data (30 examples)"),
    (["--model", "rnn-attention", "-K", "1"], "RNN: "),
    (["--data", "/nowhere"], "train-images-idx3-ubyte is neither in /nowhere nor one folder below"),
    (["--model", "lstm"], "--window has no meaning with lstm; it belongs to rra, rnn-residual, rnn-attention")])
def test_bad_flags(tmp_path, capsys, small, argv, sentence):
    refused(capsys, sentence, TASK, *small, "--out", tmp_path / "run", *argv)
    assert not (tmp_path / "run").exists()


# ---- kept results, and what is said ----------------------------------------------------------------------

def test_runs_are_kept_and_shown(tmp_path, capsys, small, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for seed in (0, 1):
        flags = ["--permuted", "--seed", str(seed)]
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", ["/x/tasks/pixel_mnist.py", *flags, "--data", "x", "--quiet"])
            assert ran(capsys, TASK, *small, *flags, "--steps", 4, "--quiet", "--out", tmp_path / f"{seed}")[0] == 0
        place = results.keep(tmp_path / f"{seed}", f"rra-{seed}").parent
    assert place == tmp_path / "docs/results/pixel_mnist"
    assert run(results.main, ["table", str(place)]) == 0
    lines, kept = capsys.readouterr().out.splitlines(), result(tmp_path / "0")
    assert lines[2] == (
        "| rra-0 | `python tasks/pixel_mnist.py --permuted --seed 0` | RRA, K = 2, permuted, stride 7, hidden 6, "
        f"batch size 9 | {kept['test_accuracy']:.2%} | 1.33 | {kept['best']['value']:.2%} | 0.0 min |")
    drawn = {}
    monkeypatch.setattr(results, "draw_runs", lambda path, groups, **how: drawn.update(groups=groups, how=how))
    assert run(results.main, ["figure", str(place), "x.png"]) == 0
    assert list(drawn["groups"]) == ["RRA, K = 2, permuted, stride 7, hidden 6, batch size 9, 2 seeds"]
    assert drawn["how"]["title"] == ("MNIST, 16 steps of 7 x 7 pixels (not the paper's task), permuted\n"
                                     "6 units, adam; 7 of 10,000 test images")


# ---- real images -----------------------------------------------------------------------------------------

def test_the_real_images(tmp_path, capsys, real_data, monkeypatch):
    folder = real_data("train-images-idx3-ubyte.gz").parent
    monkeypatch.setattr(pixel_mnist, "read_mnist", read_mnist)
    status, shown, err = ran(capsys, TASK, "--data", folder, "--rows", "--steps", 3, "--train-size", 200, "--test-size",
                             100, "--hidden", 16, "--out", tmp_path / "run")
    assert status == 0, err
    assert "200 images to train on, 100 to test on; 28 rows of 28 pixels (not pixel by pixel)" in shown
    assert 0 < result(tmp_path / "run")["test_accuracy"] < 1
