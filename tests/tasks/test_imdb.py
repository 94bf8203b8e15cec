"""tasks/imdb.py and tasks/imdb_linear.py: as a user runs them, on made reviews, and with bad input."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import result, write_reviews
from task_runs import ran, refused

from minigrad.data import imdb as reader
from minigrad.data.files import Official
from minigrad.data.imdb import read_imdb
from minigrad.data.reviews import Reviews, review_words
from minigrad.tensors import load_tensors, save_tensors
from minigrad.training import read_log
from tasks import imdb, imdb_linear
from tasks.frame import classify, exit_status, results, run
from tasks.frame.flags import settings_of

TASK = imdb.TASK
pytestmark = pytest.mark.usefixtures("quick_figures", "made_reviews_only")

FEW = ["--hidden", "6", "--embedding", "5", "-K", "3", "--vocab", "30", "--batch-size", "5", "--eval-every", "3",
       "--eval-size", "8"]                                       # 4 batches an epoch
SIZE = 24                                                        # of both halves


@pytest.fixture
def made_reviews_only(monkeypatch):
    """Any number of reviews will do, and nothing is kept in the home folder or fetched."""
    monkeypatch.setattr(imdb, "read_imdb", functools.partial(read_imdb, cache=False, count=None))
    monkeypatch.setattr(reader, "ARCHIVE", Official("aclImdb_v1.tar.gz", "http://localhost:1/aclImdb_v1.tar.gz", 1))
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_reviews(tmp_path_factory.mktemp("data"), SIZE)


@pytest.fixture
def small(data):
    return [*FEW, "--data", str(data)]


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory, data):
    out = tmp_path_factory.mktemp("imdb") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imdb, "read_imdb", functools.partial(read_imdb, cache=False, count=None))
        patch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **how: Path(path).write_bytes(b""))
        assert run(TASK, [*FEW, "--data", str(data), "--steps", "10", "--quiet", "--out", str(out)]) == 0
    return out


@pytest.fixture
def finished(ten_steps, tmp_path):
    """A copy of the folder of a run that took its 10 steps."""
    return Path(shutil.copytree(ten_steps, tmp_path / "run"))


def test_not_enough_memory_says_what_to_cut(small, tmp_path, capsys):
    def fails(*arguments):
        raise MemoryError
    refused(capsys, "words, --batch-size is 5: --max-length N reads the first N words of each",
            dataclasses.replace(TASK, step=fails), *small, "--steps", 3, "--quiet", "--out", tmp_path / "run")


def test_a_name_that_is_no_file_is_not_read_as_a_text(finished, capsys):
    for name in ("no/such", "reviews.txt"):
        status, _, err = ran(capsys, TASK, "predict", name, "--checkpoint", finished)
        assert (status, err) == (2, f"error: {name}: there is no such file\n")
    for text in ("good.", "a/b c", "good"):
        assert ran(capsys, TASK, "predict", text, "--checkpoint", finished)[0] == 0


def test_other_reviews_are_told_on_resume(finished, data, tmp_path, capsys):
    other = Path(shutil.copytree(data, tmp_path / "other"))
    review = next((other / "aclImdb/train/pos").iterdir())
    words = review.read_text().split()
    review.write_text(" ".join(words[::-1]))                     # the same words, in another order
    refused(capsys, "reviews is ", TASK, "--resume", finished, "--steps", 12, "--data", other)


# ---- runs ------------------------------------------------------------------------------------------------

@pytest.mark.figures
def test_a_run_writes_what_the_help_says(tmp_path, capsys, small):
    out = tmp_path / "run"
    status, shown, err = ran(capsys, TASK, *small, "--steps", 10, "--out", out)
    assert status == 0, err
    assert {path.name for path in out.iterdir()} == {
        "config.json", "log.csv", "figure6.png", "figure7.png", "result.json", "last.safetensors", "best.safetensors"}
    assert "24 reviews to train on, 24 to test on; " in shown
    assert re.search(r"RRA, K = 3: [\d,]+ parameters, 10 steps", shown)
    assert re.search(r"RRA, K = 3: test error [\d.]+% after 2.5 epochs \(10 iterations\); best [\d.]+% at \d+; ", shown)
    assert re.search(r"step 9/10 .* test_error 0\.\d+ .* loss ", err)
    kept = result(out)
    assert (kept["model"], kept["steps"], kept["epochs"]) == ("rra", 10, 2.5)
    assert [epoch for epoch, _ in kept["per_epoch"]] == [1, 2, 2.5]
    assert kept["test_error"] == kept["per_epoch"][-1][1]
    assert kept["best"]["value"] == min(value for _, value in kept["per_epoch"])
    assert kept["parameters"] == 32 * 5 + 5 * 24 + 6 * 24 + 24 + 3 + 6 * 2 + 2
    assert kept["data"] | {"words": ""} == {"train": 24, "test": 24, "part": 8, "cut": 0, "words": "",
                                            "mean_length": kept["data"]["mean_length"]}


def test_a_part_within_an_epoch_and_the_whole_at_its_end(ten_steps, data):
    columns, rows = read_log(ten_steps / "log.csv")
    evaluated = [row["step"] for row in rows if row["test_error"] is not None]
    assert evaluated == [0, 3, 4, 6, 8, 9, 10]                   # --eval-every 3, the ends of the epochs, the last step
    assert [row["step"] for row in rows if row["test_error_all"] is not None] == [4, 8, 10]
    assert [column for column in columns if column.startswith("w_hat")] == ["w_hat_1", "w_hat_2", "w_hat_3"]
    for row in rows:
        assert sum(row[f"w_hat_{k}"] for k in (1, 2, 3)) == pytest.approx(1, abs=1e-5)
    model, _, _ = imdb.restore(ten_steps, "cpu")
    settings = json.loads((ten_steps / "config.json").read_text())["settings"]
    test = imdb.open_reviews(settings).test

    def wrong(review):
        ids = test.tokens[test.offsets[review]:test.offsets[review + 1]]
        return model(ids[None]).argmax() != test.labels[review]
    assert rows[-1]["test_error_all"] == pytest.approx(np.mean([wrong(n) for n in range(SIZE)]))
    part = np.random.default_rng([0, 12]).permutation(SIZE)[:8]
    assert rows[-1]["test_error"] == pytest.approx(np.mean([wrong(n) for n in part]))


def test_compare_trains_on_the_same_batches(tmp_path, capsys, small):
    out, met, forward_backward = tmp_path / "run", [], classify.forward_backward

    def noting(model, batch, rng):
        met.append(batch[0].tobytes())
        return forward_backward(model, batch, rng)
    status, _, err = ran(capsys, dataclasses.replace(TASK, step=noting), *small, "--steps", 5, "--compare",
                         "birra,lstm", "--quiet", "--out", out)
    assert status == 0, err
    assert met[:5] == met[5:]
    assert result(out / "birra")["data"] == result(out / "lstm")["data"]
    for file in ("figure6.png", "birra/figure7.png", "birra/figure7-backward.png", "lstm/figure6.png"):
        assert (out / file).exists()
    assert not (out / "lstm/figure7.png").exists()
    columns, rows = read_log(out / "birra/log.csv")
    for prefix in ("w_hat", "w_hat_backward"):
        assert [c for c in columns if re.fullmatch(rf"{prefix}_\d", c)] == [f"{prefix}_{k}" for k in (1, 2, 3)]
        assert sum(rows[-1][f"{prefix}_{k}"] for k in (1, 2, 3)) == pytest.approx(1, abs=1e-5)
    assert rows[0]["w_hat_1"] != rows[0]["w_hat_backward_1"]
    for folder, steps in ((out, 6), (out / "lstm", 7)):          # the whole, or a part of it alone
        status, _, err = ran(capsys, TASK, "--resume", folder, "--steps", steps, "--quiet")
        assert status == 0, err
        assert load_tensors(out / "lstm/last.safetensors")[1]["step"] == steps


def test_a_part_of_the_reviews_is_a_random_one(small, data):
    everything = imdb.open_reviews(settings_of(TASK, small)).train
    parts = [imdb.open_reviews(settings_of(TASK, [*small, "--train-size", "9", "--seed", seed])).train
             for seed in "00123"]
    assert parts[0].tokens.tobytes() == parts[1].tokens.tobytes()
    assert len({part.tokens.tobytes() for part in parts}) == 4
    texts = {everything.tokens[a:b].tobytes() for a, b in zip(everything.offsets, everything.offsets[1:])}
    for part in parts:
        assert {part.tokens[a:b].tobytes() for a, b in zip(part.offsets, part.offsets[1:])} <= texts
        assert 0 < part.labels.sum() < 9
    assert len(imdb.open_reviews(settings_of(TASK, [*small, "--test-size", "6"])).test.labels) == 6


# ---- settings --------------------------------------------------------------------------------------------

def test_the_papers_setting():
    settings = settings_of(TASK, ["--paper"])
    expected = {"hidden": 128, "embedding": 128, "vocab": 10_000, "batch_size": 16, "optimizer": "adadelta", "lr": None,
                "window": 5, "pooling": "mean", "dropout": 0.5, "clip_norm": 0, "clip_value": 0}
    assert {key: settings[key] for key in expected} == expected
    assert (settings["forget_bias"], settings["offset"], settings["normalize"]) == (0, 2, "sum")
    assert (settings["max_length"], settings["train_size"], settings["test_size"]) == (0, 0, 0)
    assert (settings["epochs"], settings_of(TASK, [])["epochs"]) == (15, 2)
    assert settings_of(TASK, [])["forget_bias"] == 1
    assert settings_of(TASK, ["--paper", "--forget-bias", "1", "-K", "20"])["forget_bias"] == 1


# ---- bad input: one line, exit status 2, nothing written -------------------------------------------------

@pytest.mark.parametrize(("argv", "sentence"), [
    (["--model", "gru"], "argument --model: invalid choice: 'gru'"),
    (["--compare", "rra,bow"], "--compare has 'bow'; expected names among rra, lstm"),
    (["--optimizer", "sgd", "--eps", "1e-3"], "--eps is 0.001, but the optimizer sgd has no eps"),
    (["--optimizer", "adam", "--eps", "0"], "argument --eps: '0'; expected a finite number above 0"),
    (["--dropout", "1"], "argument --dropout: '1'; expected a finite number of at least 0 and below 1"),
    (["--dropout", "-1"], "argument --dropout: '-1'; expected a finite number of at least 0"),
    (["--train-size", "25"], "--train-size is 25; expected at most 24"),
    (["--test-size", "1000"], "--test-size is 1,000; expected at most 24"),
    (["--batch-size", "25"], "LengthBatches: 24 reviews; expected at least a batch of 25"),
    (["--pooling", "first"], "argument --pooling: invalid choice: 'first'"),
    (["--vocab", "0"], "argument --vocab: '0'; expected a whole number of at least 1"),
    (["--eval-size", "0"], "argument --eval-size: '0'; expected a whole number of at least 1"),
    (["--max-length", "-1"], "argument --max-length: '-1'"),
    (["--data", "/nowhere"], "aclImdb_v1.tar.gz is neither in /nowhere"),
    (["--data", "/nowhere/a.tar.gz"], "/nowhere/a.tar.gz: there is no such file"),
    (["--model", "bilstm"], "--window has no meaning with bilstm; it belongs to rra, rnn-residual, rnn-attention, ")])
def test_bad_flags(tmp_path, capsys, small, argv, sentence, monkeypatch):
    monkeypatch.setattr("minigrad.data.files._download", no_download)
    refused(capsys, sentence, TASK, *small, "--out", tmp_path / "run", *argv)
    assert not (tmp_path / "run").exists()


def no_download(*_):
    raise OSError("no network")


def test_a_resumed_run_keeps_its_settings_and_its_words(finished, tmp_path, capsys, data):
    refused(capsys, "--hidden 7 differs from the run in", TASK, "--resume", finished, "--steps", 20, "--hidden", 7)
    other = shutil.copytree(data, tmp_path / "data")
    (other / "aclImdb/train/pos/0_9.txt").write_text("word1 " * 90)          # another order of the words
    log = (finished / "log.csv").read_bytes()
    status, _, err = ran(capsys, TASK, "--resume", finished, "--steps", 20, "--data", other)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"dictionary is '32 \(sha256 \w+\.\.\.\)'; this run has '32 ", err)
    last = (finished / "last.safetensors").read_bytes()
    (finished / "last.safetensors").write_bytes(last[:len(last) // 2])
    refused(capsys, "last.safetensors: damaged", TASK, "--resume", finished, "--steps", 20)
    assert (finished / "log.csv").read_bytes() == log


# ---- --predict -------------------------------------------------------------------------------------------

def probability(folder, text, longest=None):
    """(p of positive) by the equations, one word after another: RRA with K = 3, the mean, softmax."""
    tensors, meta = load_tensors(folder / "last.safetensors")
    w = {name.split(".")[-1] if "cell" in name else name: value.astype("float64") for name, value in tensors.items()
         if not name.startswith(("optimizer", "trainer"))}
    words = {word: n for n, word in enumerate(meta["config"]["words"])}
    sigmoid = lambda a: 1 / (1 + np.exp(-a))
    hs, c = [np.zeros(6)] * 4, np.zeros(6)
    for word in text.lower().split()[:longest]:
        x = w["embedding.W"][words.get(word, 1)]
        i, f, o, g = np.split(x @ w["W"] + hs[-1] @ w["U"] + w["b"], 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        a = sum(w["w"][k] / w["w"].sum() * hs[-2 - k] for k in range(3))
        hs.append(sigmoid(o) * np.tanh(c + a))
    e = np.exp(np.mean(hs[4:], axis=0) @ w["classifier.readout.W"] + w["classifier.readout.b"])
    return e[1] / e.sum()


def line_of(folder, text, longest=None):
    p = probability(folder, text, longest)
    return f"{'positive' if p > 0.5 else 'negative'} {max(p, 1 - p):.3f}   {text}"


def test_a_text_and_the_lines_of_a_file(tmp_path, capsys, finished):
    texts = ["word1 good word2 Good word3 word4", "bad word7", "never seen words"]
    status, out, err = ran(capsys, TASK, "predict", texts[0], "--checkpoint", finished)
    assert (status, out, err) == (0, f"{line_of(finished, texts[0])}\n", "")
    path = tmp_path / "texts.txt"
    expected = [line_of(finished, text) for text in texts]
    assert len({line.split()[1] for line in expected}) == 3      # probabilities that tell the texts apart
    expected[2] += "   (only 0% of its words are known)"
    for written in ("\n".join(texts), "\ufeff" + "\r\n".join(texts) + "\r\n"):
        path.write_bytes(written.encode())
        status, out, err = ran(capsys, TASK, "predict", path, "--checkpoint", finished / "last.safetensors")
        assert (status, out.splitlines(), err) == (0, expected, "")


def test_a_long_text_is_cut_and_says_so(capsys, finished, tmp_path, small):
    text = "good word1 word2 bad bad bad"
    status, out, _ = ran(capsys, TASK, "predict", text, "--checkpoint", finished, "--max-length", 2)
    assert status == 0
    assert out.splitlines() == ["text 1: only the first 2 of its 6 words are read", line_of(finished, text, 2)]
    short = tmp_path / "short"
    assert ran(capsys, TASK, *small, "--max-length", 4, "--steps", 1, "--quiet", "--out", short)[0] == 0
    _, out, _ = ran(capsys, TASK, "predict", text, "--checkpoint", short)
    assert out.splitlines() == ["text 1: only the first 4 of its 6 words are read", line_of(short, text, 4)]
    _, out, _ = ran(capsys, TASK, "predict", text, "--checkpoint", short, "--max-length", 9, "--quiet")
    assert out.splitlines() == [line_of(short, text)]
    _, out, _ = ran(capsys, TASK, "predict", text, "--checkpoint", short, "--max-length", 0)         # all of it
    assert out.splitlines() == [line_of(short, text)]
    _, out, _ = ran(capsys, TASK, "predict", "good\n" * 50, "--checkpoint", finished)
    assert re.fullmatch(r"\w+ 0\.\d{3}   (good ){13}\[...\]\n", out)


@pytest.mark.parametrize(("written", "sentence"), [
    (b"good\n\nbad\n", "predict: text 2 has no word ('')"), (b"", "predict: text 1 has no word ('')"),
    (b"good\n<br />\n", "predict: text 2 has no word ('<br />')"),
    (b"good\ncaf\xe9\n", "texts.txt, line 2: not UTF-8 (byte 0xe9 at position 3)")])
def test_a_file_with_a_bad_line(tmp_path, capsys, finished, written, sentence):
    (tmp_path / "texts.txt").write_bytes(written)
    status, out, err = ran(capsys, TASK, "predict", tmp_path / "texts.txt", "--checkpoint", finished)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


def test_a_folder_and_what_is_no_plain_file_are_never_read_as_a_text(tmp_path, capsys, finished):
    status, out, err = ran(capsys, TASK, "predict", tmp_path, "--checkpoint", finished)
    assert (status, out, err) == (2, "", f"error: {tmp_path}: cannot be read (Is a directory)\n")
    status, out, err = ran(capsys, TASK, "predict", "/dev/null", "--checkpoint", finished)     # as <(a command) is
    assert (status, out, "text 1 has no word ('')" in err) == (2, "", True)


def test_predict_with_bad_checkpoints(tmp_path, capsys, finished):
    def refused(*flags):
        status, out, err = ran(capsys, TASK, "predict", "good", *flags)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        return err
    assert "the following arguments are required: --checkpoint" in refused()
    assert "unrecognized arguments: --hidden 5" in refused("--hidden", 5, "--checkpoint", finished)
    assert "nowhere" in refused("--checkpoint", tmp_path / "nowhere")
    assert "last.safetensors" in refused("--checkpoint", tmp_path)
    path = finished / "last.safetensors"
    good, (tensors, meta) = path.read_bytes(), load_tensors(path)
    for damaged in (good[:-7], good[:30], b"", b"garbage"):
        path.write_bytes(damaged)
        assert "last.safetensors: damaged" in refused("--checkpoint", path)
    for change in ({"words": None}, {"words": [*meta["config"]["words"], "more"]},
                   {"words": []}, {"words": [["a"]] * 32}, {"hidden": "x"}, {"hidden": 0}, {"hidden": 7}, {"vocab": 31},
                   {"model": "bow"}, {"model": None}, {"window": 4}, {"hidden": 10**30}):
        save_tensors(path, tensors, {**meta, "config": {**meta["config"], **change}})
        assert "last.safetensors" in refused("--checkpoint", path), change
    for key in ("words", "max_length", "model", "vocab"):
        save_tensors(path, tensors, {**meta, "config": {k: v for k, v in meta["config"].items() if k != key}})
        assert f"not one of tasks/imdb.py, or damaged ('{key}' is missing)" in refused("--checkpoint", path)
    for meta_of in ({}, {"config": None}, {"config": 5}):
        save_tensors(path, tensors, meta_of)
        assert "not one of tasks/imdb.py, or damaged" in refused("--checkpoint", path)
    del tensors["embedding.W"]
    save_tensors(path, tensors, meta)
    assert "embedding.W" in refused("--checkpoint", path)


# ---- the linear classifiers ------------------------------------------------------------------------------

LINEAR = ["--vocab", "30", "--seed", "1"]


def linear(capsys, *argv):
    """(exit status, stdout, stderr) of tasks/imdb_linear.py."""
    status = exit_status(imdb_linear.main, [str(word) for word in argv])
    return status, *capsys.readouterr()


@pytest.mark.parametrize(("argv", "sentence"), [
    (["--train-size", "1"], "--train-size is 1; expected at least 2"),
    (["--train-size", "30"], "--train-size is 30; expected at most 24"),
    (["--hidden", "5"], "unrecognized arguments: --hidden 5")])
def test_bad_flags_of_a_linear_classifier(tmp_path, capsys, data, argv, sentence):
    status, _, err = linear(capsys, "lsa", *argv, "--data", data, "--out", tmp_path / "run")
    assert (status, err.count("\n"), sentence in err) == (2, 1, True), err
    assert not (tmp_path / "run").exists()


def reviews_of(texts, vocab=8, seed=0):
    """Reviews of `texts`, lists of ids."""
    labels = np.arange(len(texts)) % 2
    return Reviews(np.concatenate(texts).astype(np.int32), np.cumsum([0, *map(len, texts)]), labels, labels)


def test_a_linear_classifier_that_diverges_is_one_line(tmp_path, capsys, data):
    status, out, err = linear(capsys, "bow", *LINEAR, "--data", data, "--lr", 1e308, "--out", tmp_path / "run")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "W or b is not finite; try a smaller --lr" in err
    assert not (tmp_path / "run/result.json").exists()


def test_tf_idf_is_that_of_a_plain_loop():
    train = [[2, 2, 3], [3, 4, 1, 1], [5, 2], [1, 1], [3, 3, 3, 3]]
    test = [[2, 6], [7, 7, 7, 1], [1], [5, 4, 3, 2, 2]]
    idf = [np.log(6 / (1 + sum(word in text for text in train))) + 1 for word in range(8)]
    for rows, texts in zip(imdb_linear.tf_idf(reviews_of(train), reviews_of(test), 8), (train, test)):
        expected = np.zeros((len(texts), 8))
        for n, text in enumerate(texts):
            for word in range(2, 8):
                expected[n, word] = np.log(1 + text.count(word)) * idf[word]
            norm = np.sqrt((expected[n]**2).sum())
            expected[n] /= norm or 1
        np.testing.assert_allclose(rows.toarray(), expected, rtol=1e-12, atol=1e-14)


def test_lsa_is_that_of_a_whole_decomposition():
    rng = np.random.default_rng(0)
    train, test = (imdb_linear.csr_array(rng.random((n, 9)) * (rng.random((n, 9)) < 0.6)) for n in (12, 5))
    _, _, V_T = np.linalg.svd(train.toarray(), full_matrices=False)
    expected = [part.toarray() @ V_T[:4].T for part in (train, test)]
    mean, deviation = expected[0].mean(axis=0), expected[0].std(axis=0)
    got = imdb_linear.lsa(train, test, 4, 0)
    signs = np.sign((got[0][:, ::-1] * (expected[0] - mean)).sum(axis=0))    # the smallest one comes first there
    for rows, of_them in zip(got, expected):
        np.testing.assert_allclose(rows[:, ::-1] * signs, (of_them - mean) / deviation, rtol=1e-9, atol=1e-9)
    for rows, other in zip(got, imdb_linear.lsa(train, test, 4, 0)):
        np.testing.assert_array_equal(rows, other)
    assert imdb_linear.lsa(train, test, 300, 0)[0].shape == (12, 8)


@pytest.mark.parametrize("sparse", [True, False])
def test_the_linear_classifiers_gradient_by_hand(sparse, monkeypatch):
    rng = np.random.default_rng(0)
    dense, labels, seen = rng.standard_normal((12, 5)), rng.integers(0, 2, 12), []

    class Plain:
        """theta <- theta - lr g, and what it was given."""

        def __init__(self, parameters, lr, weight_decay, no_decay):
            self.parameters, self.lr = parameters, lr
            assert (weight_decay, [p.name for p in no_decay]) == (imdb_linear.WEIGHT_DECAY, ["b"])

        def step(self):
            seen.append([(p.value.copy(), p.grad.copy()) for p in self.parameters])
            for p in self.parameters:
                p.value -= self.lr * p.grad
    monkeypatch.setattr(imdb_linear, "AdamW", Plain)
    rows, epochs = imdb_linear.csr_array(dense) if sparse else dense, []
    W, _ = imdb_linear.train_linear(rows, labels, 3, lr=0.5, epochs=2, batch_size=4,
                                    each=lambda epoch, *_: epochs.append(epoch))
    assert epochs == [1, 2]
    assert len(seen) == 6
    for step, ((W_t, dW), (b_t, db)) in enumerate(seen):
        epoch, n = divmod(step, 3)
        batch = np.random.default_rng([3, epoch]).permutation(12)[4 * n:4 * n + 4]
        expected_dW, expected_db = np.zeros((5, 2)), np.zeros(2)
        for row in batch:
            e = np.exp(dense[row] @ W_t + b_t)
            dlogits = (e / e.sum() - np.eye(2)[labels[row]]) / 4
            expected_dW += np.outer(dense[row], dlogits)
            expected_db += dlogits
        np.testing.assert_allclose(dW, expected_dW, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(db, expected_db, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(W, seen[-1][0][0] - 0.5 * seen[-1][0][1])


# ---- kept results ----------------------------------------------------------------------------------------

def test_runs_are_kept_and_shown(ten_steps, tmp_path, capsys, data, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    assert linear(capsys, "bow", *LINEAR, "--data", data, "--epochs", 2, "--out", tmp_path / "bow")[0] == 0
    for folder in (ten_steps, tmp_path / "bow"):                 # the command is that of the tests
        path = tmp_path / folder.name / "config.json"
        config = json.loads((folder / "config.json").read_text())
        config["ran_on"]["command"] = "python tasks/imdb.py --data x --quiet --seed 0"
        if folder == ten_steps:
            shutil.copytree(folder, path.parent)
        path.write_text(json.dumps(config))
        place = results.keep(path.parent, folder.name).parent
    assert place == tmp_path / "docs/results/imdb"
    capsys.readouterr()
    assert exit_status(results.main, ["table", str(place)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("| run | command | what | test error at the end | epochs | best, by the test set itself | "
                        "wall time |")
    bow, rra = result(tmp_path / "bow"), result(ten_steps)
    assert lines[2] == (f"| bow | `python tasks/imdb.py --seed 0` | BOW, vocab 30 | {bow['test_error']:.2%} | 2 |  | "
                        "0.0 min |")
    assert lines[3] == (
        "| run | `python tasks/imdb.py --seed 0` | RRA, K = 3, hidden 6, embedding 5, vocab 30, batch size 5 | "
        f"{rra['test_error']:.2%} | 2.5 | {rra['best']['value']:.2%} | 0.0 min |")
    drawn = {}
    monkeypatch.setattr(results, "draw_runs", lambda path, groups, **how: drawn.update(groups=groups, how=how))
    assert exit_status(results.main, ["figure", str(place), "x.png", "run"]) == 0
    (points,), = drawn["groups"].values()
    assert [step for step, _ in points] == [3, 4, 6, 8, 9, 10]
    assert drawn["how"]["title"] == "IMDB, 6 units, adadelta; 8 of 25,000 test reviews"
    assert exit_status(results.main, ["figure", str(place), "x.png", "run", "--y", "test_error_all"]) == 0
    (points,), = drawn["groups"].values()
    assert [step for step, _ in points] == [4, 8, 10]


def test_what_is_said_of_the_data(small, capsys):
    settings = settings_of(TASK, [*small, "--max-length", "4"])
    said = imdb.describe(settings, imdb.open_reviews(settings))
    train, test = (sum(len(review_words(path.read_text())) > 4 for path in Path(settings["data"]).glob(
        f"aclImdb/{half}/*/*.txt")) for half in ("train", "test"))
    assert 0 < train < SIZE
    assert f"of {train} training reviews only the first 4 words are read, of {test} test reviews as well" in said
    assert "30 words are known, " in said
