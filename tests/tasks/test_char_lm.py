"""tasks/char_lm.py: as a user runs it, and with bad input."""

import dataclasses
import gzip
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import result
from task_runs import ran, refused

from minigrad.data import Vocabulary, text as text_module
from minigrad.losses import softmax_cross_entropy
from minigrad.tensors import load_tensors, save_tensors
from minigrad.training import read_log
from models.srupp_lm import LAYERS, model_of, size_of
from tasks import adding, char_lm, char_lm_generate, frame
from tasks.frame.flags import settings_of
from tasks.frame.run_folder import UsageError

TASK = char_lm.TASK
pytestmark = pytest.mark.usefixtures("quick_figures")

ROOT = Path(__file__).resolve().parents[2]
LSTM = ["--width", "16", "--batch-size", "3", "--unroll", "7", "--eval-every", "5", "--warmup", "2", "--layer", "lstm",
        "--lstm-layers", "1"]
SMALL = [*LSTM[:-4], "--layers", "2"]
BOTH = [*SMALL, "--lstm-layers", "1"]
WORDS = ["the", "of", "and", "[[link]]", "recurrence", "attends", "fast", "{{SRU}}", "é\n"]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of 3 kB, made of few words."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_bytes(" ".join(np.random.default_rng(0).choice(WORDS, size=500)).encode())
    return path


# ---- runs ------------------------------------------------------------------------------------------------

@pytest.mark.figures
def test_a_run_writes_what_the_help_says(tmp_path, capsys, text):
    out = tmp_path / "run"
    status, shown, err = ran(capsys, TASK, *SMALL, "--data", text, "--steps", 20, "--out", out)
    assert status == 0, err
    assert {path.name for path in out.iterdir()} == {
        "config.json", "log.csv", "bpc.png", "alpha.png", "grad_norm.png", "result.json", "last.safetensors",
        "best.safetensors"}
    assert re.search(r"srupp: [\d.]+ bits per character on validation, [\d.]+ on test \(best checkpoint, step ", shown)
    assert re.search(r"words.txt: [\d,]+ bytes, 26 different ones; [\d,]+ for training, \d+ for validation, ", shown)
    columns, rows = read_log(out / "log.csv")
    assert columns == ["step", "seconds", "lr", "loss", "grad_norm", "valid_bpc", "alpha_1", "alpha_2"]
    assert [row["step"] for row in rows] == [0, 5, 10, 15, 20]
    assert rows[0]["alpha_1"] == 0 != rows[-1]["alpha_1"]
    assert rows[0]["valid_bpc"] == pytest.approx(math.log2(26), abs=0.3)
    kept = result(out)
    assert kept["best"]["value"] == min(row["valid_bpc"] for row in rows) == pytest.approx(kept["valid_bpc"], abs=1e-9)
    assert kept["text"]["name"] == "words.txt"
    assert kept["text"]["bytes"] == sum(kept["text"]["split"]) == text.stat().st_size
    config = load_tensors(out / "best.safetensors")[1]["config"]
    assert config["vocabulary"] == sorted(set(text.read_bytes()))


def test_the_cosine_ends_at_zero(tmp_path, capsys, text):
    ran(capsys, TASK, *SMALL, "--data", text, "--steps", 20, "--lr", 0.01, "--quiet", "--out", tmp_path / "run")
    _, rows = read_log(tmp_path / "run/log.csv")
    lrs = [row["lr"] for row in rows]
    assert lrs[0] == 0.005                                       # the first of two steps of warm-up
    assert lrs[1] > lrs[2] > lrs[3] > lrs[4] < 1e-4


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.figures
def test_every_layer_and_what_it_draws(tmp_path, capsys, text, layer):
    out = tmp_path / "run"
    small = LSTM if layer == "lstm" else [*SMALL, "--layer", layer]
    status, _, err = ran(capsys, TASK, *small, "--data", text, "--steps", 5, "--quiet", "--out", out,
                         "--dropout", 0.1, "--schedule", "constant")
    assert status == 0, err
    assert (out / "alpha.png").exists() == (layer == "srupp")
    columns, _ = read_log(out / "log.csv")
    assert ("alpha_1" in columns) == (layer == "srupp")
    assert result(out)["layer"] == layer


def test_compare_trains_at_equal_parameters(tmp_path, capsys, text):
    out = tmp_path / "run"
    flags = [*BOTH, "--width", 64, "--compare", "--data", text]
    status, shown, err = ran(capsys, TASK, *flags, "--steps", 10, "--out", out)
    assert status == 0, err
    results = {name: result(out / name) for name in LAYERS}
    sizes = [kept["parameters"] for kept in results.values()]
    assert max(sizes) < 1.03 * results["srupp"]["parameters"] < 1.03 * 1.03 * min(sizes)
    for name, kept in results.items():
        assert re.search(rf"^{name} +\d+ +{kept['width']} +[\d-]+ +{kept['parameters']:,}$", shown, re.M)
    assert ran(capsys, TASK, "--resume", out, "--steps", 20)[0] == 2   # its cosine ended at 10
    again, _, err = ran(capsys, TASK, "--resume", out / "lstm", "--steps", 10)         # a part of it alone
    assert again == 0, err
    assert load_tensors(out / "lstm/last.safetensors")[1]["step"] == 10


def test_the_figures_show_what_was_logged(tmp_path, monkeypatch, capsys, text):
    drawn = {}
    monkeypatch.setattr("tasks.frame.figures.draw_runs",
                        lambda path, groups, **how: drawn.update({path.name: (groups, how)}))
    out = tmp_path / "run"
    assert ran(capsys, TASK, *SMALL, "--data", text, "--steps", 20, "--clip-norm", 0.5, "--quiet", "--out", out)[0] == 0
    _, rows = read_log(out / "log.csv")
    groups, _ = drawn["bpc.png"]
    assert groups["SRU++, d = 16"] == [[(row["step"], row["valid_bpc"]) for row in rows[1:]]]
    losses, = groups["training, mean since the evaluation before"]
    np.testing.assert_allclose(losses, [(row["step"], row["loss"] / math.log(2)) for row in rows[1:]])
    groups, how = drawn["grad_norm.png"]
    assert groups["global norm before clipping"] == [[(row["step"], row["grad_norm"]) for row in rows[1:]]]
    assert (how["horizontal"], how["log_y"]) == ((0.5, "clipped at 0.5"), True)
    groups, _ = drawn["alpha.png"]
    assert list(groups) == ["layer 1", "layer 2"]
    assert groups["layer 2"] == [[(row["step"], row["alpha_2"]) for row in rows]]


def test_attention_in_some_layers(tmp_path, capsys, text):
    for n, (flags, alphas) in enumerate([(["--attention-last", 1], ["alpha_2"]), (["--attention-last", 0], []),
                                         (["--attention-every", 2], ["alpha_2"])]):
        out = tmp_path / str(n)
        status, _, err = ran(capsys, TASK, *SMALL, *flags, "--heads", 2, "--window", 4, "--data", text, "--steps", 2,
                             "--quiet", "--out", out)
        assert status == 0, err
        assert [c for c in read_log(out / "log.csv")[0] if c.startswith("alpha")] == alphas


# ---- the score -------------------------------------------------------------------------------------------

class Bigrams:
    """A model whose answer needs one byte: log p(next | this) from a table; its state counts the calls."""

    def __init__(self, logits):
        self.logits, self.seen = logits, []

    def initial_state(self, batch, dtype=None):
        return np.zeros(batch)

    def __call__(self, ids, state=None):
        self.seen.append(ids.copy())
        return self.logits[ids], state + 1


@pytest.mark.parametrize(("begin", "end", "unroll"), [
    (40, 97, 7), (1, 100, 10), (50, 51, 3), (3, 60, 200), (60, 90, 1)])
def test_each_byte_is_scored_once(begin, end, unroll):
    ids, logits = np.arange(100, dtype=np.uint8), np.random.default_rng(0).standard_normal((100, 100))
    model = Bigrams(logits)
    bits = char_lm.bits_per_character(model, ids, begin, end, unroll)
    loss, _ = softmax_cross_entropy.forward(logits[ids[begin - 1:end - 1]], ids[begin:end])
    assert bits == pytest.approx(loss / math.log(2), rel=1e-12)
    for row in np.concatenate(model.seen, axis=1):               # each stream reads on, up to the end of the part
        np.testing.assert_array_equal(row, np.minimum(row[0] + np.arange(len(row)), end - 2))


def test_cutting_the_part_up_costs_next_to_nothing(text):
    """What 32 streams give, one gives too, but for the beginnings of the streams."""
    settings = settings_of(TASK, LSTM)
    ids = Vocabulary.of(text.read_bytes()).encode(text.read_bytes())
    model = model_of(settings, 26)
    whole, _ = softmax_cross_entropy.forward(model(ids[None, :-1].astype(np.int64))[0][:, 1999:], ids[None, 2000:])
    bits = char_lm.bits_per_character(model, ids, 2000, len(ids), 16)
    assert bits == pytest.approx(float(whole) / math.log(2), abs=0.01)


# ---- resumed ---------------------------------------------------------------------------------------------

def test_the_state_is_carried_within_an_epoch_only(tmp_path, capsys, text):
    seen, forward_backward = [], char_lm.forward_backward

    def noting(model, batch, rng, state):
        seen.append(any(np.any(leaf) for entry in state for leaf in entry))
        return forward_backward(model, batch, rng, state)
    ran(capsys, dataclasses.replace(TASK, step=noting), *SMALL, "--batch-size", 30, "--data", text, "--steps", 25,
        "--quiet", "--out", tmp_path / "run")
    per_epoch = (result(tmp_path / "run")["text"]["split"][0] - 1) // (30 * 7)
    assert per_epoch < 15
    assert seen == [step % per_epoch != 0 for step in range(25)]


def test_resume_on_another_text_or_another_number_of_steps(tmp_path, capsys, text):
    out = tmp_path / "run"
    ran(capsys, TASK, *SMALL, "--data", text, "--steps", 10, "--out", out)
    moved = tmp_path / "moved.gz"
    moved.write_bytes(gzip.compress(text.read_bytes()))
    assert ran(capsys, TASK, "--resume", out, "--data", moved)[0] == 0             # the same text elsewhere
    assert json.loads((out / "config.json").read_text())["settings"]["data"] == str(moved)
    moved.write_bytes(gzip.compress(b"x" + text.read_bytes()[1:]))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for flags, sentence in [([], "text is {'bytes': "), (["--steps", 20], "--steps: 20 are asked for, but the run in"),
                            (["--layer", "lstm"], "--layer lstm differs from the run in")]:
        refused(capsys, sentence, TASK, "--resume", out, *flags)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


# ---- generating ------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """The folder of a comparison of two tiny models."""
    out = tmp_path_factory.mktemp("trained") / "run"
    argv = [*BOTH, "--compare", "srupp,lstm", "--width", "64", "--data", str(text), "--steps", "60", "--quiet", "--lr",
            "0.02", "--out", str(out)]
    assert frame.run(TASK, argv) == 0
    return out


def test_generated_text_is_the_models_own(capsys, trained):
    """Written byte by byte: at temperature 0 what the parallel forward says, within the bytes it was trained to see."""
    status, shown, err = ran(capsys, TASK, "generate", 9, "--prompt", "the ", "--temperature", 0, "--checkpoint",
                             trained / "srupp")
    assert status == 0, err
    assert shown.startswith("the ")
    assert re.fullmatch(r"9 bytes in [\d.]+ s, [\d,]+ bytes/s\n", err)
    model, vocabulary = char_lm_generate.restore(trained / "srupp/best.safetensors")
    text = b"the "
    for _ in range(9):
        logits, _ = model(vocabulary.encode(text)[None].astype(np.int64))
        text += vocabulary.decode([logits[0, -1].argmax()])
    assert shown == text.decode() + "\n"


def test_generated_text_depends_on_seed_and_temperature(capsys, trained):
    def text(*flags, checkpoint=trained / "srupp/last.safetensors"):
        status, shown, err = ran(capsys, TASK, "generate", 40, "--checkpoint", checkpoint, "--quiet", *flags)
        assert (status, err) == (0, "")
        assert len(shown) <= 41                                  # the prompt is not shown; a broken é is one sign
        return shown

    assert text() == text() == text("--seed", 0) == text("--prompt", "\n")
    assert len({text(), text("--seed", 1), text("--temperature", 0), text("--temperature", 3), text("--prompt", "the "),
                text(checkpoint=trained / "lstm")}) == 6


def test_the_window_bounds_what_a_generated_byte_costs(trained):
    model, vocabulary = char_lm_generate.restore(trained / "srupp/best.safetensors")
    assert [layer.window for layer in model.layers.layers] == [14, 14]       # memory 7 and segment 7, as in training
    written = char_lm_generate.generate(model, vocabulary, b"the ", 1.0, 0)
    assert len(bytes(next(written) for _ in range(100))) == 100


def test_sampling():
    rng, logits = np.random.default_rng(0), np.log(np.array([0.1, 0.6, 0.3], "float32"))
    for temperature in (1, 0.5, 2):
        expected = np.array([0.1, 0.6, 0.3]) ** (1 / temperature)
        counts = np.bincount([char_lm_generate.sample(logits, temperature, rng) for _ in range(5000)], minlength=3)
        np.testing.assert_allclose(counts / 5000, expected / expected.sum(), atol=0.03)
    for temperature in (0, 1e-3, 1e-300):
        assert {char_lm_generate.sample(logits, temperature, rng) for _ in range(50)} == {1}


@pytest.mark.parametrize(("flags", "sentence"), [
    (["--prompt", "Zebra"], "--prompt: byte 'Z' (at position 0), 'b'"),
    (["--prompt", ""], "--prompt is empty; expected at least one byte"),
    (["--temperature", "-1"], "argument --temperature: '-1'; expected a finite number of at least 0"),
    (["--layer", "lstm"], "unrecognized arguments: --layer lstm"),
    (["--checkpoint", "nowhere"], "checkpoint nowhere: there is no such file"),
    (["--checkpoint", "."], "--checkpoint .: there is no best.safetensors in it"),
])
def test_bad_input_to_generate(tmp_path, capsys, trained, flags, sentence, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, shown, err = ran(capsys, TASK, "generate", 5, "--checkpoint", trained / "srupp", *flags)
    assert (status, shown, len(err.splitlines())) == (2, "", 1), err
    assert sentence in err or "--prompt" in flags
    if flags == ["--prompt", "Zebra"]:
        assert err == ("error: --prompt: byte 'Z', 'b' (at position 0) is not among the 26 bytes of the text that the "
                       "model was trained on\n")


@pytest.mark.parametrize("change", [
    {"config": None}, {"config": {}}, {"vocabulary": None}, {"vocabulary": [300]}, {"vocabulary": "ab"},
    {"vocabulary": [1, 2]}, {"layer": "gru"}, {"width": 7}, {"width": "x"}, {"layers": 3}, {"heads": 5},
    {"unroll": None}], ids=str)
def test_a_checkpoint_with_a_damaged_header_is_one_line(tmp_path, capsys, trained, change):
    tensors, meta = load_tensors(trained / "srupp/best.safetensors")
    meta.update(change) if "config" in change else meta["config"].update(change)
    save_tensors(tmp_path / "x", tensors, meta)
    status, _, err = ran(capsys, TASK, "generate", 5, "--checkpoint", tmp_path / "x")
    assert (status, len(err.splitlines())) == (2, 1), err
    assert err.startswith("error: checkpoint ")


def test_checkpoints_of_something_else(tmp_path, capsys, trained):
    argv = ["-S", "8", "--hidden", "4", "--train-size", "50", "--test-size", "10", "--steps", "1", "--batch-size", "5"]
    assert frame.run(adding.TASK, [*argv, "--quiet", "--out", str(tmp_path / "adding")]) == 0
    whole = (trained / "srupp/best.safetensors").read_bytes()
    (tmp_path / "half").write_bytes(whole[:len(whole) // 2])
    (tmp_path / "text").write_text("no checkpoint")
    capsys.readouterr()
    for name, sentence in [("adding", "not one of tasks/char_lm.py, or damaged ('layer' is missing)"),
                           ("half", "damaged or not a safetensors file"),
                           ("text", "damaged or not a safetensors file")]:
        status, _, err = ran(capsys, TASK, "generate", 5, "--checkpoint", tmp_path / name)
        assert (status, len(err.splitlines())) == (2, 1), err
        assert sentence in err


# ---- bad input: one line, exit status 2, nothing written -------------------------------------------------

@pytest.mark.parametrize(("argv", "sentence"), [
    (["--layer", "gru"], "argument --layer: invalid choice: 'gru'"),
    (["--compare"], "comes nearer)"),
    (["--layer", "lstm"], "--layers has no meaning with lstm; it belongs to sru, sru-proj, srupp"),
    (["--heads", "3"], "--heads is 3; expected a divisor of d' = --width / --ratio = 4"),
    (["--ratio", "17"], "--ratio is 17, larger than --width, 16"),
    (["--width", "0"], "argument --width: '0'; expected a whole number of at least 1"),
    (["--unroll", "5000"], "symbols; expected at least 15,001 = batch_size 3 x unroll 5000 + 1"),
    (["--attention-last", "1", "--attention-every", "2"], "--attention-every 2 and --attention-last 1 were both given"),
    (["--dropout", "1"], "dropout is 1.0; expected a number in [0, 1)"),
    (["--warmup", "5", "--steps", "4"], "--warmup is 5; expected at most the number of steps, 4"),
    (["--schedule", "linear"], "argument --schedule: invalid choice: 'linear'"),
    (["--memory", "-1"], "argument --memory: '-1'; expected a whole number of at least 0"),
    (["--valid-bytes", "0"], "argument --valid-bytes: '0'"),
])
def test_bad_flags(tmp_path, capsys, text, argv, sentence):
    refused(capsys, sentence, TASK, *SMALL, "--data", text, *argv, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "content", "sentence"), [
    ("empty.txt", b"", "empty.txt: the text is empty"),
    ("empty.gz", gzip.compress(b"", mtime=0), "empty.gz: the text is empty"),
    ("half.gz", gzip.compress(bytes(range(256)) * 9, mtime=0)[:200], "half.gz: damaged, or no .gz file ("),
    ("no.zip", b"abc" * 99, "no.zip: damaged, or no .zip file ("),
    ("short.txt", b"too short", "short.txt: split_90_5_5: the text has 9 bytes; expected at least 20"),
    ("short.txt", b"too short" * 2 + b"aa", "Streams: the text has 18 symbols; expected at least 22 = batch_size 3"),
    (None, None, "there is no such file or folder"),
])
def test_bad_texts(tmp_path, capsys, name, content, sentence):
    if name:
        (tmp_path / name).write_bytes(content)
    refused(capsys, sentence, TASK, *SMALL, "--data", tmp_path / (name or "nothing"), "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_text_and_no_network(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("minigrad.data.text.ENWIK8", text_module.ENWIK8._replace(
        url="http://localhost:1/dc/enwik8.zip"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("MINIGRAD_DATA", str(tmp_path / "data"))
    for flags, folder in ([], tmp_path / "data"), (["--data", tmp_path], tmp_path):
        status, _, err = ran(capsys, TASK, *SMALL, *flags, "--out", tmp_path / "run")
        assert (status, len(err.splitlines())) == (2, 1)
        assert err.endswith(f"put enwik8.zip from http://localhost:1/dc/enwik8.zip into {folder}\n")
        assert not (tmp_path / "run").exists()


def test_plans_keep_to_three_percent():
    settings = settings_of(TASK, ["--compare"])

    class Text:
        vocabulary = range(26)
    for width, vocab in [(64, 26), (128, 65), (256, 200), (512, 205), (3072, 205)]:
        settings["width"], Text.vocabulary = width, range(vocab)
        expected = size_of({**settings, "layer": "srupp"}, vocab)
        for own in char_lm.plan(settings, Text):
            assert abs(size_of(own, vocab) / expected - 1) <= 0.03
    settings["width"], Text.vocabulary = 16, range(26)
    with pytest.raises(UsageError, match=r"--compare: sru has .* within 3% "):
        char_lm.plan(settings, Text)


# ---- on enwik8, and as a program -------------------------------------------------------------------------

def test_a_beginning_of_enwik8_is_named(tmp_path, capsys, real_data):
    path = real_data("enwik8.first4150000.gz")
    status, shown, err = ran(capsys, TASK, *SMALL, "--data", path.parent.parent, "--steps", 5, "--valid-bytes", 2000,
                             "--out", tmp_path / "run", "--width", 8, "--unroll", 200)
    assert status == 0, err
    assert (f"{path} (a beginning of enwik8: its figures are not those of the whole): 4,150,000 bytes, "
            "200 different ones; 3,735,000 for training, 207,500 for validation, 207,500 for the test") in shown
    assert result(tmp_path / "run")["text"]["name"] == "enwik8.first4150000.gz"
    assert json.loads((tmp_path / "run/config.json").read_text())["settings"]["data"] == str(path)


@pytest.mark.slow
def test_a_reader_that_has_enough_ends_the_writing_quietly(trained):
    command = (f"{shlex.quote(sys.executable)} {ROOT / 'tasks/char_lm.py'} generate 100000 --checkpoint "
               f"{trained / 'srupp'} | head -c 50")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert len(done.stdout.encode()) == 50
