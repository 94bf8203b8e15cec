"""The SRU++ part of tasks/bench.py: its peers compute what minigrad computes, and faults in them are found; its tables
over L and of generation have the shapes they promise and judge as they say. No figure of speed is asserted here."""

import importlib
import json
from contextlib import nullcontext
from importlib import metadata

import numpy as np
import pytest
from test_bench import QUICK, WITHOUT_LIMIT, ran

from minigrad.functional import QUERY_BLOCK, attention_blocks
from tasks.bench import (
    main as bench,
    measure as bench_measure,
    peers as bench_peers,
    srupp as bench_srupp,
    srupp_peers as bench_srupp_peers,
)

SIZES = [(7, 3, 8, 4), (150, 2, 6, 4)]               # L, B, d, d'; the second: more than one block of queries


def family_of(L, B, d, p):
    x, dy = bench_srupp.upstream_and_input(L, B, d)
    return bench.Family("srupp", "", [bench_srupp.make_srupp(d, p)], x, dy, {})


def compared(family, table):
    """bench.agreeing's answer for the peers in a table."""
    sides, notes = bench_peers.peers(table, family.layers, family.x, family.dy, (1,))
    assert not any("cannot be imported" in note for note in notes)
    return bench.agreeing(family, sides)


# ---- the peers -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("module", ["torch", "sru"])
def test_peers_equal_ours(module, size):
    pytest.importorskip("torch")
    table = [peer for peer in bench_srupp_peers.PEERS if peer.module == module]
    try:
        table[0].load(module)
    except ImportError as error:
        pytest.skip(str(error))
    family = family_of(*size)
    layer, = family.layers
    ours = bench_measure.our_side(layer, family.x, family.dy, *WITHOUT_LIMIT).result()
    assert set(ours) == {"y", "dx", *(f"d{name}" for name, _ in layer.named_parameters())}
    sides, _ = bench_peers.peers(table, [layer], family.x, family.dy, (1,))
    assert len(sides) == (len(bench_srupp_peers.WAYS) if module == "torch" else 1)
    for side in sides:
        theirs = side.result()
        assert {name: array.shape for name, array in theirs.items()} == {
            name: array.shape for name, array in ours.items()}
        assert bench_peers.difference(ours, theirs)[1] < 1e-5, side.way


def not_causal(torch, mask, q, k, v):
    return bench_srupp_peers.matmul_attention(torch, 0 * mask.nan_to_num(0, 0, 0), q, k, v)


def unscaled(torch, mask, q, k, v):
    return bench_srupp_peers.matmul_attention(torch, mask, 1.01 * q, k, v)


def gates_swapped(torch, n, W_o, b_f, b_r):
    u0, u1, u2 = bench_srupp_peers.one_product(torch, n, W_o, b_f, b_r)
    return u0, u2, u1


def without_bias_gradient(torch, n, W_o, b_f, b_r):
    return bench_srupp_peers.one_product(torch, n, W_o, b_f, b_r.detach() + 0 * b_r)


@pytest.mark.parametrize(("attention", "products"), [
    (not_causal, bench_srupp_peers.one_product), (unscaled, bench_srupp_peers.one_product),
    (bench_srupp_peers.matmul_attention, gates_swapped), (bench_srupp_peers.matmul_attention, without_bias_gradient)],
    ids=lambda function: function.__name__)
def test_a_wrong_peer_is_found_out(attention, products, monkeypatch):
    pytest.importorskip("torch")
    ways = {"right": bench_srupp_peers.WAYS["matmul, one product, time first"], "wrong": (attention, products, True)}
    monkeypatch.setattr(bench_srupp_peers, "WAYS", ways)
    agree, differing = compared(family_of(12, 2, 16, 4), [bench_srupp_peers.PEERS[0]])
    assert [side.way for side in agree] == ["right"]
    line, = differing
    assert line.startswith("SRUpp by PyTorch eager (wrong) differs from minigrad and is not measured: ")


def test_every_gradient_is_large_enough_to_be_compared():
    """The tolerance is relative to the largest entry, but to 1 where all are smaller."""
    family = family_of(*bench.QUICK["srupp_size"])
    ours = bench_measure.our_side(*family.layers, family.x, family.dy, *WITHOUT_LIMIT).result()
    assert min(abs(array).max() for array in ours.values()) > 100 * bench_peers.TOLERANCE


def test_the_official_layout_of_W_o_and_back():
    p, h = 2, 5
    W = np.arange(p * 3 * h).reshape(p, 3 * h)
    theirs = bench_srupp_peers.slices_last(W, h)
    assert (theirs.reshape(h, 3, p)[4, 1] == W[:, h + 4]).all()              # unit 4's forget gate
    assert (bench_srupp_peers.slices_first(theirs, h) == W).all()


def imports(outcome):
    def load(name):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
    return load


@pytest.mark.parametrize(("version", "outcome", "said"), [
    (None, None, "it is not installed; pip install sru==3.0.0.dev6"),
    ("2.6.0", None, "version 2.6.0 has no SRU++; pip install sru==3.0.0.dev6"),
    ("3.0.0.dev6", RuntimeError("Error building extension\nninja: stopped"), "Error building extension"),
    ("3.0.0.dev6", OSError(), "OSError"), ("3.0.0.dev6", ImportError("no torch"), "no torch")])
def test_an_official_module_that_cannot_be_used(version, outcome, said, monkeypatch):
    def version_of(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version
    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(importlib, "import_module", imports(outcome))
    family = family_of(4, 1, 4, 2)
    sides, notes = bench_peers.peers(bench_srupp_peers.PEERS[1:], family.layers, family.x, family.dy, (1,))
    assert (sides, notes) == ([], [f"sru cannot be imported ({said}): its rows are left out"])


# ---- the floor and the tables over L ---------------------------------------------------------------------

@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_floor_is_all_of_the_layers_products(size, monkeypatch):
    multiplied = []
    monkeypatch.setattr(np, "matmul", lambda a, b, out: multiplied.append(2 * out.size * a.shape[-1]))
    products = bench_srupp.floor_products(*size)
    L, B, d, p = size
    assert set(products) == {"Q, K, V", "their gradients", "scores and A", "gradients of these", "U", "dW_o",
                             "d of its rows"}
    pairs = sum((rows.stop - rows.start) * keys.stop for rows, keys in attention_blocks(L, L, True, None, QUERY_BLOCK))
    for name, factor in [("scores and A", 2), ("gradients of these", 4)]:
        products[name]()
        assert sum(multiplied) == factor * 2 * B * pairs * p
        multiplied.clear()
    products["Q, K, V"]()
    assert sum(multiplied) == 2 * L * B * (d * p + 2 * p * p)


def test_the_tables_over_L(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "PEERS", [])
    status, out, _ = ran(capsys, *QUICK, "--only", "srupp", "--json", tmp_path / "bench.json")
    assert status == 0
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    *straight, causal = report["cost"]
    assert [cost["layer"] for cost in straight] == ["SRU", "SRUpp without attention", "SRUpp, window 8"]
    for cost in report["cost"]:
        assert [row["L"] for row in cost["rows"]] == bench.QUICK["over_L"]
        assert all(row["us_per_step"] == pytest.approx(1e3 * row["ms"] / row["L"]) for row in cost["rows"])
    assert all("linear" in cost and "only_attention" not in cost for cost in straight)
    assert "linear" not in causal
    assert {"start_ms", "slope_ms", "square_ms", "attention_square_ms", "farthest", "only_attention"} < set(causal)
    for row in causal["rows"]:
        assert row["attention_share"] == pytest.approx(row["attention_ms"] / row["ms"])
        assert row["rest_us_per_step"] == pytest.approx(1e3 * (row["ms"] - row["attention_ms"]) / row["L"])
    assert out.count("the rest, us a step") == out.count("the attention alone: ") == 1


def test_the_weights_of_a_window_are_linear_in_L_those_of_all_keys_are_not():
    def cache_bytes(name, L):
        layer, x, dy = bench_srupp.variants(16)[name]({"L": L, "B": 2, "d": 16, "d'": 8})
        return bench_measure.bytes_per_step(layer, x, dy)["cache_bytes"]
    for name in ("SRU", "SRUpp without attention", "SRUpp, window 16"):
        assert cache_bytes(name, 2048) < 1.1 * cache_bytes(name, 512)
    assert cache_bytes("SRUpp, causal", 2048) > 2.5 * cache_bytes("SRUpp, causal", 512)


def test_whose_the_square_is():
    n = np.array(bench.FULL["over_L"])
    attention = 0.01 * n + 3e-5 * n**2
    assert bench_srupp.squares(n, 2 + 0.05 * n + attention, attention)["only_attention"]
    more = bench_srupp.squares(n, 2 + 0.05 * n + attention + 1e-5 * n**2, attention)
    assert not more["only_attention"]
    assert (more["square_ms"], more["attention_square_ms"], more["slope_ms"]) == pytest.approx((4e-5, 3e-5, 0.06))
    assert not bench_srupp.squares(n, attention + 1e-8 * n**3, attention)["only_attention"]


# ---- step by step ----------------------------------------------------------------------------------------

def test_generation_is_reported_at_both_ends():
    settings = {**bench.QUICK, "step_bytes": 40, "step_repeats": 1, "step_layers": 2, "step_window": 5}
    report = bench_srupp.stepping(settings, nullcontext())
    assert (report["layers"], report["bytes"], report["beginning"], report["end"]) == (2, 40, [2, 6], [36, 40])
    windowed, growing = report["rows"]
    assert (windowed["window"], windowed["keys"], windowed["explained_us"]) == (5, [4, 5], pytest.approx(
        windowed["attention_us"][1] - windowed["attention_us"][0]))
    assert (growing["window"], growing["keys"]) == (None, [4, 38])
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(row["last_us"] / row["first_us"])
        assert row["verdict"] == ("met" if row["last_us"] <= row["at_most_us"] else "missed")


@pytest.mark.parametrize(("last_us", "window", "verdict"), [
    (124, 64, "met"), (126, 64, "missed"),                                   # a window explains nothing
    (129, None, "met"), (131, None, "missed")])                              # 5 % of 100, and 1.25 times 20
def test_what_growth_is_explained(last_us, window, verdict):
    judged = bench_srupp.judge_growth(100, last_us, [10, 30], window)
    assert judged["verdict"] == verdict
    assert judged["ratio"] == last_us / 100
    assert bench_srupp.judge_growth(100, 104, [30, 10], None)["verdict"] == "met"          # noise: nothing is explained


def test_a_step_counts_with_its_fastest_run():
    runs = iter([[3, 1, 5], [2, 4, 6]])
    assert bench_srupp.fastest(2, 0, lambda: next(runs)) == [2, 1, 5]


def test_steps_are_timed_one_by_one():
    model = bench_srupp.build("srupp", bench_srupp.VOCAB, 8, layers=2, window=3, rng=0)
    assert len(bench_srupp.generation(model, 7)) == 7
    seconds = bench_srupp.attention_steps(5, 3, 4, 6)
    assert len(seconds) == 6
    assert min(seconds) > 0
