"""tasks/tsdae.py: as a user runs it, and with bad input."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import result
from task_runs import ran, refused

from minigrad.data.sts import Pairs, find_sts
from minigrad.training import read_log
from models.tsdae import TSDAE
from tasks import adding, frame, tsdae, tsdae_ablate, tsdae_score
from tasks.frame import exit_status, results
from tasks.frame.flags import defaults_of
from tasks.tsdae_data import open_corpus

TASK = tsdae.TASK
pytestmark = pytest.mark.usefixtures("quick_figures")

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--width", "16", "--heads", "2", "--layers", "1", "--length", "12", "--batch-size", "8", "--eval-every", "5",
         "--warmup", "2", "--vocab", "50", "--buckets", "10"]
SUBJECTS = ["a man", "a woman", "the dog", "two children", "the old king", "a cat", "some birds", "nobody"]
VERBS = ["plays", "eats", "sees", "carries", "sings", "cuts", "hates", "finds"]
OBJECTS = ["a guitar", "an onion", "the ball", "a long song", "the river", "three boxes", "bread", "nothing"]


def made_sentences(count, seed):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(words) for words in (SUBJECTS, VERBS, OBJECTS)) + " ." for _ in range(count)]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with a text and a small benchmark in the official form: the score counts the parts in common."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("\n".join(made_sentences(300, 0)), encoding="utf-8")
    (folder / "sts").mkdir()
    for seed, part in enumerate(("train", "dev", "test"), 1):
        first, second = made_sentences(40, seed), made_sentences(40, seed + 10)
        lines = []
        for n, (a, b) in enumerate(zip(first, second)):
            b = a if n % 5 == 0 else b
            score = 5 * len(set(a.split()) & set(b.split())) / max(len(set(a.split())), len(set(b.split())))
            lines.append(f"main\tmade\t2026\t{n}\t{score:.2f}\t{a}\t{b}")
        (folder / "sts" / f"sts-{part}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def given(data):
    return ["--data", str(data / "text.txt"), "--sts", str(data / "sts")]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, given):
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert frame.run(TASK, [*SMALL, *given, "--steps", "15", "--quiet", "--out", str(out)]) == 0
    return out


# ---- runs ------------------------------------------------------------------------------------------------

@pytest.mark.figures
def test_a_run_writes_what_the_help_says(tmp_path, capsys, given):
    out = tmp_path / "run"
    status, shown, err = ran(capsys, TASK, *SMALL, *given, "--steps", 10, "--out", out)
    assert status == 0, err
    assert {path.name for path in out.iterdir()} == {
        "config.json", "log.csv", "sts.png", "loss.png", "alignment-uniformity.png", "grad_norm.png", "scores.png",
        "result.json", "last.safetensors", "best.safetensors"}
    columns, rows = read_log(out / "log.csv")
    assert columns == ["step", "seconds", "lr", "loss", "grad_norm", "dev_spearman", "dev_pearson", "alignment",
                       "uniformity", "held_out_loss", "held_out_loss_shuffled"]
    assert [row["step"] for row in rows] == [0, 5, 10]
    assert result(out)["best"]["value"] == max(row["dev_spearman"] for row in rows)
    assert "STS-B, 40 of 1,379 test pairs" in shown
    assert "rebuilt" in shown


def test_the_baselines_are_scored_in_the_same_run(trained):
    scores = result(trained)["scores"]
    assert set(scores) == {
        "TSDAE", "untrained encoder", "mean of the trained word embeddings", "mean of random word vectors",
        "bag of words", "TF-IDF", "TSDAE, whitened", "untrained encoder, whitened",
        "mean of the trained word embeddings, whitened", "mean of random word vectors, whitened", tsdae.LAST}
    assert scores["bag of words"]["test"][0] > 0.9            # so the scores were made
    assert all(-1 <= value <= 1 for own in scores.values() for part in own.values() for value in part)


def test_the_test_score_is_that_of_the_best_checkpoint(trained, data):
    model, pairs = TSDAE.load(trained), find_sts(data / "sts")["test"]
    expected = tsdae_score.score(lambda s: model.encode(s).astype(float), pairs)
    assert result(trained)["scores"]["TSDAE"]["test"] == pytest.approx(list(expected), abs=1e-12)


def test_the_untrained_encoder_is_the_one_that_the_run_began_with(trained):
    first = read_log(trained / "log.csv")[1][0]
    assert result(trained)["scores"]["untrained encoder"]["dev"][0] == pytest.approx(first["dev_spearman"], abs=1e-9)


def test_the_model_learns_to_rebuild_and_uses_the_embedding(tmp_path, capsys, given):
    out = tmp_path / "run"
    flags = ["--steps", 300, "--lr", 1e-2, "--eval-every", 300, "--ratio", 0.2, "--quiet"]
    assert ran(capsys, TASK, *SMALL, *given, *flags, "--out", out)[0] == 0
    rows = read_log(out / "log.csv")[1]
    assert rows[-1]["held_out_loss"] < 0.4 * rows[0]["held_out_loss"]
    assert rows[-1]["held_out_loss_shuffled"] > rows[-1]["held_out_loss"] + 0.2


@pytest.mark.figures
def test_training_without_the_benchmark(tmp_path, capsys, data):
    out = tmp_path / "run"
    status, shown, err = ran(capsys, TASK, *SMALL, "--data", data / "text.txt", "--sts", "none", "--steps", 5,
                             "--out", out)
    assert status == 0, err
    assert result(out)["best"]["value"] == min(row["held_out_loss"] for row in read_log(out / "log.csv")[1])
    assert "scores" not in result(out)
    assert "STS" not in shown


@pytest.mark.parametrize("flags", [
    ["--noise", "swap", "--ratio", "0.3"], ["--noise", "mask"], ["--noise", "replace"], ["--noise", "add"],
    ["--ratio", "0"], ["--ratio", "1"], ["--pooling", "mean", "--norm", "post"], ["--pooling", "max", "--no-tie"],
    ["--dropout", "0.1", "--attention-dropout", "0.1", "--activation", "relu"], ["--no-sts-text", "--longest", "0"]])
def test_every_setting_runs(tmp_path, capsys, given, flags):
    status, _, err = ran(capsys, TASK, *SMALL, *given, *flags, "--steps", 3, "--quiet", "--out", tmp_path / "run")
    assert status == 0, err


def test_the_benchmarks_sentences_are_trained_on_without_their_scores(data, given):
    settings = {**defaults_of(TASK, {}), "data": given[1], "sts": given[3], "seed": 0, "quiet": True, "sts_times": 3}
    corpus = open_corpus(settings)
    of_sts = {*corpus.sts["train"].first, *corpus.sts["train"].second}
    counts = [corpus.train.count(sentence) for sentence in of_sts - set(corpus.held_out)]
    assert set(counts) == {3}
    assert not set(corpus.held_out) & {*corpus.text, *corpus.train}
    without = open_corpus({**settings, "no_sts_text": True})
    text = set((data / "text.txt").read_text(encoding="utf-8").splitlines())
    assert {*without.text, *without.held_out} == text


# ---- scores ----------------------------------------------------------------------------------------------

def test_cosines_of_dense_and_sparse_rows_agree():
    embed, _ = tsdae_score.bag_of_words(["a b", "b c c", "d"])
    sparse = embed(["a b", "b c c", "d"]), embed(["b", "c", "a"])
    dense = [rows.toarray() for rows in sparse]
    np.testing.assert_allclose(tsdae_score.cosines(*sparse), tsdae_score.cosines(*dense))
    np.testing.assert_allclose(tsdae_score.cosines(*dense), [1 / np.sqrt(2), 2 / np.sqrt(5), 0])


def test_tf_idf_weighs_a_rare_word_more():
    text = ["the cat", "the dog", "the bird", "the cat"]
    rows = tsdae_score.tf_idf(["the bird", "bird unheard"], text)(["the bird"]).toarray()[0]
    ids = tsdae_score.bag_of_words(["the bird", "bird unheard"])[1]
    assert rows[ids["the"]] == pytest.approx(1)
    assert rows[ids["bird"]] == pytest.approx(np.log(5 / 2) + 1)


def test_a_score_is_one_where_cosines_rise_with_the_gold_scores_and_0_where_all_are_equal():
    pairs = Pairs(["a"] * 3, ["b", "c", "d"], np.array([0.0, 2.0, 5.0]), "test")
    angles = {"a": 0.0, "b": 1.2, "c": 0.5, "d": 0.1}
    rho, r = tsdae_score.score(lambda s: np.array([[np.cos(angles[x]), np.sin(angles[x])] for x in s]), pairs)
    assert rho == pytest.approx(1)
    assert 0.85 < r < 1
    assert tsdae_score.score(lambda s: np.ones((len(s), 2)), pairs) == (0.0, 0.0)


def test_whitened_vectors_have_mean_0_and_covariance_1():
    vectors = np.random.default_rng(0).standard_normal((500, 6)) @ np.random.default_rng(1).standard_normal((6, 6)) + 3
    white = tsdae_score.whitening(vectors)(vectors)
    np.testing.assert_allclose(white.mean(axis=0), 0, atol=1e-10)
    np.testing.assert_allclose(white.T @ white / 500, np.eye(6), atol=1e-10)
    flat = np.c_[vectors, vectors[:, :1]]                    # one direction in which nothing varies
    assert tsdae_score.whitening(flat)(flat).shape == (500, 6)


def test_alignment_and_uniformity():
    rng = np.random.default_rng(0)
    spread = rng.standard_normal((200, 64))
    assert tsdae_score.uniformity(np.ones((10, 4))) == pytest.approx(0, abs=1e-9)
    assert -4 < tsdae_score.uniformity(spread) < -3.5
    assert tsdae_score.alignment(spread, 7 * spread) == pytest.approx(0, abs=1e-12)
    assert tsdae_score.alignment(spread, -spread) == pytest.approx(4)


# ---- the encoder alone -----------------------------------------------------------------------------------

def test_encode_writes_a_vector_for_each_line(tmp_path, capsys, trained):
    lines = made_sentences(20, 5)
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    status, shown, err = ran(capsys, TASK, "encode", tmp_path / "lines.txt", "--checkpoint", trained, "--out",
                             tmp_path / "vectors.npy")
    assert status == 0, err
    vectors = np.load(tmp_path / "vectors.npy")
    assert vectors.dtype == np.float32
    assert vectors.shape == (20, 16)
    np.testing.assert_array_equal(vectors, TSDAE.load(trained / "best.safetensors").encode(lines))
    assert "row n the n-th line" in shown
    refused(capsys, "is there already; nothing was written", TASK, "encode", tmp_path / "lines.txt", "--checkpoint",
            trained, "--out", tmp_path / "vectors.npy")


def test_nearest_prints_the_sentence_itself_first(tmp_path, capsys, trained):
    lines = made_sentences(20, 5)
    (tmp_path / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    status, shown, err = ran(capsys, TASK, "encode", tmp_path / "lines.txt", "--checkpoint", trained, "--nearest",
                             lines[7], "--top", 3)
    assert status == 0, err
    rows = [line.split("  ", 1) for line in shown.splitlines()]
    assert len(rows) == 3
    assert rows[0] == ["1.000", lines[7]]
    assert [float(row[0]) for row in rows] == sorted((float(row[0]) for row in rows), reverse=True)


def test_a_long_line_is_cut_with_one_warning(tmp_path, capsys, trained):
    (tmp_path / "lines.txt").write_text("word " * 50 + "\na cat\n" + "word " * 60, encoding="utf-8")
    status, _, err = ran(capsys, TASK, "encode", tmp_path / "lines.txt", "--checkpoint", trained, "--nearest", "a cat")
    assert status == 0
    assert re.fullmatch(r"warning: 2 of 3 sentences have more than 10 words, .* cut off\n", err)


# ---- the ablation ----------------------------------------------------------------------------------------

def test_the_grid_has_the_base_once_and_every_other_value():
    settings = {**tsdae.DEFAULTS, "groups": "ratio,noise,pooling,tie"}
    names = list(tsdae_ablate.variants(settings))
    assert names == ["base", "ratio-0", "ratio-0.2", "ratio-0.4", "ratio-0.5", "ratio-0.6", "ratio-0.7", "ratio-0.8",
                     "ratio-0.9", "swap", "mask", "replace", "add", "mean-pooling", "max-pooling", "not-tied"]
    assert "tied" in tsdae_ablate.variants({**settings, "no_tie": True})


@pytest.mark.parametrize(("argv", "says"), [
    ("--groups ratio,nois", "--groups has 'nois'; expected names among ratio, noise, pooling, tie"),
    ("--groups tie,tie", "twice"), ("--sts none", "an ablation compares scores")])
def test_bad_flags_of_the_ablation(tmp_path, capsys, given, argv, says, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_status(tsdae_ablate.main, [*given, *argv.split()]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.figures
@pytest.mark.slow
def test_ablate_runs_the_grid_and_draws_it(tmp_path, capsys, given, monkeypatch):
    out = tmp_path / "grid"
    monkeypatch.delitem(tsdae_ablate.GROUPS["pooling"], "max-pooling")       # a process less
    flags = ["--steps", "2", "--jobs", "2", "--groups", "pooling,tie", "--out", str(out)]
    status = exit_status(tsdae_ablate.main, [*SMALL, *given, *flags])
    shown, err = capsys.readouterr()
    assert status == 0, err
    assert {path.name for path in out.iterdir()} == {
        "config.json", "base", "mean-pooling", "not-tied", "ablation.md", "ablation.json",
        "ablation.png"}
    rows = json.loads((out / "ablation.json").read_text(encoding="utf-8"))
    assert [row["label"] for row in rows] == ["delete 0.3", "mean pooling", "not tied"]
    assert rows[0]["test"] == [result(out / "base")["scores"][tsdae.LAST]["test"][0]]
    assert "| not tied |" in shown
    before = (out / "base/result.json").stat().st_mtime_ns
    (out / "not-tied/result.json").unlink()                  # as if stopped in the middle of it
    status = exit_status(tsdae_ablate.main, ["--resume", str(out)])
    again, err = capsys.readouterr()
    assert status == 0, err
    assert (out / "base/result.json").stat().st_mtime_ns == before
    shown, again = (text.split("Spearman after 2 steps")[1].split("figures")[0] for text in (shown, again))
    assert shown == again


# ---- kept results ----------------------------------------------------------------------------------------

@pytest.mark.figures
def test_a_run_is_kept_and_shown(tmp_path, trained, monkeypatch):
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    config["ran_on"]["command"] = "python /somewhere/tasks/tsdae.py --data x --sts y --steps 15"
    (trained / "config.json").write_text(json.dumps(config), encoding="utf-8")
    kept = json.loads(results.keep(trained, "tiny").read_text(encoding="utf-8"))
    assert kept["ran_on"]["command"] == "python tasks/tsdae.py --steps 15"
    assert str(tmp_path) not in json.dumps(kept["result"])
    table = results.table(tmp_path / "docs/results/tsdae")
    assert "| TSDAE, delete 0.3, cls, tied, vocab 50, buckets 10, width 16" in table
    results.figure(tmp_path / "docs/results/tsdae", tmp_path / "curves.png", None)
    assert (tmp_path / "curves.png").stat().st_size > 1000


# ---- bad input -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("argv", "says"), [
    ("--ratio 1.5", "--ratio is 1.5"), ("--ratio nan", "--ratio"), ("--noise delet", "--noise"),
    ("--pooling last", "--pooling"), ("--width 10 --heads 4", "--heads is 4; expected a divisor of --width, 10"),
    ("--jobs 2", "unrecognized arguments: --jobs 2"), ("--nearest hello", "unrecognized arguments: --nearest hello"),
    ("encode x.txt", "required: --checkpoint"), ("encode x.txt --checkpoint y", "encode needs --out"),
    ("encode x.txt --checkpoint y --out z.npy --ratio 0.1", "unrecognized arguments: --ratio 0.1"),
    ("encode x.txt --checkpoint y --out z.npy --top 3", "--top has a meaning only with --nearest"),
    ("--vocab 20 --buckets 20", "buckets 20"), ("--batch-size 10000", "10000"), ("--dropout 1", "Dropout: p is 1.0"),
    ("--warmup 50 --steps 10", "--warmup is 50"),
    ("--sts nowhere", "--sts nowhere: there is no such folder"),
    ("--data nowhere", "--data nowhere: there is no such file")])
def test_a_bad_flag_is_one_line_and_nothing_is_written(tmp_path, capsys, given, argv, says, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(argv)
    refused(capsys, says, TASK, *([] if argv[0] == "encode" else given), *argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("content", "says"), [
    (b"", "no sentence in it"), (b" \n\t\n", "no sentence in it"), (b"one sentence\n", "expected at least 10"),
    (b"fine\n\xff\xfe broken\n", "line 2: not UTF-8")])
def test_a_bad_text_is_one_line(tmp_path, capsys, content, says):
    (tmp_path / "text.txt").write_bytes(content)
    refused(capsys, says, TASK, "--data", tmp_path / "text.txt", "--sts", "none", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_malformed_line_of_the_benchmark_is_named(tmp_path, capsys, data):
    for part in ("train", "dev", "test"):
        (tmp_path / f"sts-{part}.csv").write_bytes((data / "sts" / f"sts-{part}.csv").read_bytes())
    with (tmp_path / "sts-dev.csv").open("a", encoding="utf-8") as file:
        file.write("main\tmade\t2026\t99\t7.5\tone\ttwo\n")
    refused(capsys, "sts-dev.csv, line 41: the score is '7.5'", TASK, "--data", data / "text.txt", "--sts", tmp_path)


def test_an_empty_line_to_encode_is_named(tmp_path, capsys, trained):
    (tmp_path / "lines.txt").write_bytes(b"a cat\n   \na dog\n")
    refused(capsys, "line 2: empty", TASK, "encode", tmp_path / "lines.txt", "--checkpoint", trained, "--out",
            tmp_path / "v.npy")
    assert not (tmp_path / "v.npy").exists()


def test_a_checkpoint_of_another_task_is_refused(tmp_path, capsys):
    assert frame.run(adding.TASK, ["-S", "4", "--hidden", "4", "--train-size", "50", "--test-size", "10", "--steps",
                                    "1", "--batch-size", "5", "--quiet", "--out", str(tmp_path / "adding")]) == 0
    (tmp_path / "lines.txt").write_text("a cat", encoding="utf-8")
    refused(capsys, "not one of tasks/tsdae.py", TASK, "encode", tmp_path / "lines.txt", "--checkpoint",
            tmp_path / "adding", "--nearest", "a cat")
    refused(capsys, "there is no such file", TASK, "encode", tmp_path / "lines.txt", "--checkpoint",
            tmp_path, "--nearest", "a cat")


def test_resuming_on_another_text_is_refused(tmp_path, capsys, trained, data, given):
    shutil.copytree(trained, tmp_path / "run")
    other = tmp_path / "other.txt"
    other.write_text("\n".join(made_sentences(300, 9)), encoding="utf-8")
    refused(capsys, "corpus is", TASK, "--resume", tmp_path / "run", "--data", other, "--steps", 15)
