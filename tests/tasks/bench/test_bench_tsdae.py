"""The TSDAE part of tasks/bench.py: its peers compute what minigrad computes, faults in them are found, its rows are
judged. No figure of speed is asserted here."""

import json

import numpy as np
import pytest
from test_bench import QUICK, WITHOUT_LIMIT, ran

from tasks.bench import main as bench, peers as bench_peers, tsdae as bench_tsdae, tsdae_peers as bench_tsdae_peers
from tasks.bench.measure import Timing

SMALL = {"tsdae_size": bench.QUICK["tsdae_size"], "tsdae_encoded": 20}
ONLY = [*QUICK, "--only", "tsdae"]


def works_of(**settings):
    """{name: Work}, minigrad's one side in each, and PyTorch's where it is installed."""
    works, _ = bench_tsdae.works({**SMALL, **settings}, *WITHOUT_LIMIT, (1,))
    return {work.name: work for work in works}


def judged(work):
    """bench.compared's answer for the peers of a work."""
    ours, = work.sides
    return bench.compared({work.name: ours.result()}, work.peers, work.peers)


# ---- the peers -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [bench.QUICK["tsdae_size"], (3, 7, 12, 3, 1, 30)], ids=str)
@pytest.mark.parametrize(("name", "ways"), [("TSDAE step", bench_tsdae_peers.STEP_WAYS),
                                            ("TSDAE encode", bench_tsdae_peers.WAYS)])
def test_peers_equal_ours(name, ways, size):
    pytest.importorskip("torch")
    work = works_of(tsdae_size=size)[name]
    ours = work.sides[0].result()
    assert [side.way for side in work.peers] == list(ways)
    for side in work.peers:
        theirs = side.result()
        assert {key for key in ours if not bench_tsdae_peers.unused(key)} == set(theirs)
        for key, array in theirs.items():
            assert array.shape == ours[key].shape
            moves = key.startswith("move of ")       # of float32 parameters near 1, divided by lr
            assert bench_peers.difference(ours, {key: array})[1] < (1.3e-4 if moves else 2e-5), (side.way, key)


def test_a_result_can_be_had_again_and_between_the_steps():
    """It is that of the first step, whatever was trained meanwhile."""
    for work in works_of().values():
        for side in [*work.sides, *work.peers[:1]]:
            before = side.result()
            side.call()
            after = side.result()
            assert all((after[key] == array).all() for key, array in before.items())


def test_every_result_is_large_enough_to_be_compared_and_the_unused_are_zero():
    """The tolerance is relative to the largest entry, but to 1 where all are smaller. (b_k changes no weight.)"""
    ours = works_of()["TSDAE step"].sides[0].result()
    for key, array in ours.items():
        largest = abs(array).max()
        if key.endswith((".W_q", ".b_q", ".W_k", ".b_k")) and "cross_attention." in key:
            assert largest == 0
        elif "cross_attention_norm" not in key and not key.endswith(".b_k"):
            assert largest > 30 * bench_peers.TOLERANCE, key


def test_weight_decay_is_seen():
    pytest.importorskip("torch")
    work = works_of()["TSDAE step"]
    ours = work.sides[0].result()
    decay = bench_tsdae.OPTIMIZER["weight_decay"]
    values = dict(bench_tsdae.make_model(SMALL["tsdae_size"]).named_parameters())
    key = "encoder.layers.0.feed_forward.W_1"
    without = {**ours, f"move of {key}": ours[f"move of {key}"] + decay * values[key].value}
    assert bench_peers.difference(without, work.peers[0].result())[1] > 10 * bench_peers.TOLERANCE


def unscaled(torch, q, k, v, mask, causal):
    return bench_tsdae_peers.matmul_attention(torch, 1.01 * q, k, v, mask, causal)


def without_mask(torch, q, k, v, mask, causal):
    return bench_tsdae_peers.matmul_attention(torch, q, k, v, None if mask is None else 0 * q[:1, :1, :1, :1], causal)


def sees_ahead(torch, q, k, v, mask, causal):
    return bench_tsdae_peers.matmul_attention(torch, q, k, v, 0 * q[:1, :1, :1, :1] if causal else mask, False)


@pytest.mark.parametrize("attention", [unscaled, without_mask, sees_ahead], ids=lambda function: function.__name__)
def test_a_wrong_attention_is_found_out(attention, monkeypatch):
    pytest.importorskip("torch")
    right, fused = bench_tsdae_peers.matmul_attention, bench_tsdae_peers.OPTIMIZERS["fused"]
    monkeypatch.setattr(bench_tsdae_peers, "STEP_WAYS", {"right": (right, True, False, fused),
                                                         "wrong": (attention, True, False, fused)})
    agree, differing = judged(works_of()["TSDAE step"])
    assert [side.way for side in agree] == ["right"]
    line, = differing
    assert line.startswith("TSDAE step by PyTorch eager (wrong) differs from minigrad and is not measured: ")


@pytest.mark.parametrize("fault", [lambda array: 1.01 * array, lambda array: array * np.nan], ids=["off", "nan"])
@pytest.mark.parametrize(("layer", "name"), [
    ("TSDAE step", "loss"), ("TSDAE step", "dencoder.words.embedding.W"), ("TSDAE step", "ddecoder.b_v"),
    ("TSDAE step", "move of encoder.layers.0.attention.W_v"), ("TSDAE encode", "vectors")])
def test_a_peer_that_differs_gets_no_figure(layer, name, fault, monkeypatch, capsys, tmp_path):
    real = bench_tsdae.works

    def works(*arguments):
        measured, notes = real(*arguments)
        for n, work in enumerate(measured):
            right, = work.sides

            def result(right=right, work=work):
                arrays = right.result()
                return {**arrays, name: fault(arrays[name])} if work.name == layer else arrays
            measured[n] = work._replace(peers=[right._replace(name="PyTorch eager", result=result)])
        return measured, notes
    monkeypatch.setattr(bench_tsdae, "works", works)
    status, out, err = ran(capsys, *ONLY, "--json", tmp_path / "bench.json")
    assert status == 1
    assert f"{layer} by PyTorch eager () differs from minigrad and is not measured: {name} by " in out
    assert err.startswith("stopped: 1 peers differ")
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert layer not in {row["layer"] for row in report["table"] if row["side"] == "PyTorch eager"}


@pytest.mark.parametrize("packed", [False, True])
def test_the_layout_of_parameters_and_back(packed):
    arrays = {name: parameter.value
              for name, parameter in bench_tsdae.make_model(SMALL["tsdae_size"]).named_parameters()}
    back = bench_tsdae_peers.laid_back(bench_tsdae_peers.laid_out(arrays, packed))
    assert set(back) == {name for name in arrays if not bench_tsdae_peers.unused(name)}
    assert all((array == arrays[name]).all() for name, array in back.items())


# ---- the report ------------------------------------------------------------------------------------------

def test_rows_floor_and_sentences_a_second(tmp_path, capsys):
    pytest.importorskip("torch")
    status, out, _ = ran(capsys, *ONLY, "--json", tmp_path / "bench.json", "--out", tmp_path / "bench.png")
    assert status == 0, out
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    rows = {(row["layer"], row["side"]): row for row in report["table"]}
    assert set(rows) == {("TSDAE step", "minigrad"), ("TSDAE step", "PyTorch eager"), ("TSDAE step", "floor"),
                         ("TSDAE encode", "minigrad"), ("TSDAE encode", "PyTorch eager")}
    for (layer, side), row in rows.items():
        assert ("per_second" in row) == (layer == "TSDAE encode")
        if side == "PyTorch eager":
            assert row["verdict"] == "not judged (another size)"
            assert (row["at_most"], row["aim"]) == bench.TARGETS[layer, side]
            assert row["ms"] == min(way["ms"] for way in report["ways"] if (way["layer"], way["side"]) == (layer, side))
    ours = rows["TSDAE encode", "minigrad"]
    assert ours["per_second"] == pytest.approx(20 / (1e-3 * ours["ms"]))
    assert f"sentences a second: minigrad {ours['per_second']:,.0f}, PyTorch eager " in out
    assert "23 targets" in report["sizes"]["TSDAE step"]["size"]
    assert set(report["floor"]) == {"TSDAE step"}
    assert (report["cost"], report["memory"], report["stepping"]) == ([], {}, None)
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_without_torch_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(bench_tsdae.importlib.sys.modules, "torch", None)
    status, out, _ = ran(capsys, *ONLY)
    assert status == 0
    assert "torch cannot be imported" in out
    assert "PyTorch eager" not in out


@pytest.mark.parametrize(("layer", "ms", "verdict"), [
    ("TSDAE step", 12.0, "met"), ("TSDAE step", 12.1, "missed"), ("TSDAE encode", 10.0, "met"),
    ("TSDAE encode", 10.1, "missed")])
def test_verdicts(layer, ms, verdict):
    assert bench.judge(layer, "PyTorch eager", Timing(ms, ms, 1), Timing(10.0, 10.0, 1), None)["verdict"] == verdict


def test_targets_are_judged_at_their_own_size():
    settings = bench.parse([])
    assert [bench.differs_from_target_size(settings, name) for name in ("TSDAE step", "TSDAE encode")] == [None, None]
    settings["tsdae_encoded"] = 10
    assert bench.differs_from_target_size(settings, "TSDAE step") is None
    assert bench.differs_from_target_size(settings, "TSDAE encode") == "another size"


def test_lengths_are_mixed_and_one_is_the_longest():
    lengths = [len(words) + 2 for words in bench_tsdae.random_sentences(500, 24, 100)]
    assert (min(lengths), max(lengths), lengths[0]) == (12, 24, 24)
    assert len(set(lengths)) == 13


def test_the_floor_is_all_of_the_products(monkeypatch):
    size = SMALL["tsdae_size"]
    B, L, d, _, layers, vocab = size
    data = bench_tsdae.DenoisingBatches(bench_tsdae.random_sentences(B, L, vocab), B, 0, vocab=vocab)[0]
    products = bench_tsdae.floor_products(size, data)
    multiplied = []
    monkeypatch.setattr(np, "matmul", lambda a, b, out: multiplied.append(2 * out.size * a.shape[-1]))

    def operations(name):
        multiplied.clear()
        products[name]()
        return sum(multiplied)
    padded, real = data[1].size + data[3][:, 1:].size, data[1].sum() + data[3][:, 1:].sum()
    assert operations("q, k, v, o") == layers * padded * 4 * 2 * d * d
    assert operations("feed-forward") == layers * real * 2 * 2 * d * 4 * d
    scores = data[1].size * data[1].shape[1] + data[3][:, 1:].size * (L - 1)
    assert operations("scores and A") == layers * scores * 2 * 2 * d
    assert operations("gradients of these") == layers * scores * 4 * 2 * d
    assert operations("logits") == data[3][:, 1:].sum() * 2 * d * vocab
