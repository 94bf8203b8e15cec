"""What tasks/bench.py measures of IRNN, RWA, URNN and of IMDB: the peers compute what minigrad computes, faults in them
are found, the rows are judged. No figure of speed is asserted here."""

import functools
import json
import sys

import numpy as np
import pytest
from test_bench import QUICK, WITHOUT_LIMIT, ran

from tasks.bench import (
    imdb as bench_imdb,
    main as bench,
    measure as bench_measure,
    peers as bench_peers,
    rnns as bench_rnns,
    rnns_peers as bench_rnns_peers,
)
from tasks.bench.measure import Timing

SIZES = [(4, 9, 2, 8), (3, 6, 3, 5)]                 # B, S, d, h
IMDB_SIZES = [bench.QUICK["imdb_size"], (5, 9, 8, 2, 30)]
ROWS = {**{name: ["minigrad", "PyTorch eager", "floor"] for name in ("RWA", "URNN", "IMDB step", "IMDB RRALSTM")},
        "IRNN": ["minigrad", "PyTorch eager", "torch.nn.RNN", "floor"]}
TARGETS = {"IRNN": 0.4, "RWA": 0.4, "URNN": 1.0, "IMDB step": 0.5, "IMDB RRALSTM": 0.5}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """PyTorch's idle threads spin."""
    try:
        import torch
    except ImportError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def few_ways(monkeypatch):
    """One way to write a step of IMDB: test_imdb_equals_its_peers has all."""
    monkeypatch.setattr(bench_imdb, "TORCH_WAYS", dict([*bench_peers.TORCH_WAYS.items()][:1]))
    monkeypatch.setattr(bench_imdb, "FORMS", dict([*bench_imdb.FORMS.items()][:1]))


def family_of(name, B, S, d, h):
    x, dy = bench_rnns.upstream_and_input(name, B, S, d, h)
    return bench.Family(name, "", [bench_rnns.make_layer(name, d, h)], x, dy, {})


def peers_of(family):
    return bench_peers.peers(bench_rnns_peers.PEERS, family.layers, family.x, family.dy, (1,))[0]


def ours_of(family):
    layer, = family.layers
    return bench_measure.our_side(layer, family.x, family.dy, *WITHOUT_LIMIT).result()


def imdb_works(size=IMDB_SIZES[0]):
    """{name: Work}, minigrad's one side in each, and PyTorch's where it is installed."""
    works, _ = bench_imdb.works({"imdb_size": size}, *WITHOUT_LIMIT, (1,))
    return {work.name: work for work in works}


def judged(work):
    """bench.compared's answer for the peers of a work."""
    return bench.compared({work.name: work.sides[0].result()}, work.peers, work.peers)


# ---- the peers -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", bench_rnns.NAMES)
def test_layers_equal_their_peers(name, size):
    pytest.importorskip("torch")
    family = family_of(name, *size)
    ours, sides = ours_of(family), peers_of(family)
    assert set(ours) == {"y", "dx", *(f"d{key}" for key, _ in family.layers[0].named_parameters())}
    assert [side.way for side in sides if side.name == "PyTorch eager"] == list(bench_rnns_peers.WAYS[name])
    assert len(sides) == len(bench_rnns_peers.WAYS[name]) + 2 * (name == "IRNN")
    for side in sides:
        theirs = side.result()
        assert {key: array.shape for key, array in theirs.items()} == {key: array.shape for key, array in ours.items()}
        for key, array in theirs.items():
            assert bench_peers.difference(ours, {key: array})[1] < 1e-5, (side.way, key)


@pytest.mark.parametrize("size", IMDB_SIZES, ids=str)
def test_imdb_equals_its_peers(size):
    pytest.importorskip("torch")
    works = imdb_works(size)
    assert [side.way for side in works["IMDB step"].peers] == [
        f"{way}, {form}" for way in bench_peers.TORCH_WAYS for form in bench_imdb.FORMS]
    assert [side.way for side in works["IMDB RRALSTM"].peers] == list(bench_peers.TORCH_WAYS)
    for work in works.values():
        ours = work.sides[0].result()
        for side in work.peers:
            theirs = side.result()
            assert {key: array.shape for key, array in theirs.items()} == {
                key: array.shape for key, array in ours.items()}
            for key, array in theirs.items():
                moves = key.startswith("move of ")           # of float32 parameters near 1, divided by sqrt(eps)
                assert bench_peers.difference(ours, {key: array})[1] < (1e-4 if moves else 2e-5), (side.way, key)


def test_every_result_is_large_enough_to_be_compared():
    """The tolerance is relative to the largest entry, but to 1 where all are smaller."""
    results = {name: ours_of(family_of(name, *SIZES[0])) for name in bench_rnns.NAMES}
    results |= {name: work.sides[0].result() for name, work in imdb_works().items()}
    for name, result in results.items():
        for key, array in result.items():
            assert abs(array).max() > 100 * bench_peers.TOLERANCE, (name, key)


def test_a_step_can_be_had_again_after_other_steps(few_ways):
    pytest.importorskip("torch")
    work = imdb_works()["IMDB step"]
    for side in (work.sides[0], work.peers[0]):
        before = side.result()
        side.call()
        assert all((side.result()[key] == array).all() for key, array in before.items())


# ---- wrong peers -----------------------------------------------------------------------------------------

def with_transposed(torch, layer, x, p):
    return bench_rnns_peers.irnn("relu", torch, layer, x, {**p, "W": p["W"].T})


def as_tanh(torch, layer, x, p):
    return bench_rnns_peers.irnn("tanh", torch, layer, x, p)


def rwa_of(torch, layer, x, p):
    return bench_rnns_peers.rwa(bench_rnns_peers.one_product, bench_rnns_peers.by_softplus, torch, layer, x, p)


def starting_at_zero(torch, layer, x, p):
    return rwa_of(torch, layer, x, {**p, "s": 0 * p["s"]})


def scores_of_x_alone(torch, layer, x, p):
    d = len(p["W_u"])
    return rwa_of(torch, layer, x, {**p, "W_a": torch.cat([p["W_a"][:d], 0 * p["W_a"][d:]])})


def with_a_bias_for_the_scores(torch, layer, x, p):
    """A bias of all scores would cancel; this is one of all but the first."""
    def average(torch, past, z, a):
        return bench_rnns_peers.by_softplus(torch, past, z, a if past is None else a + 0.01)
    return bench_rnns_peers.rwa(bench_rnns_peers.one_product, average, torch, layer, x, p)


def urnn_of(torch, layer, x, p):
    return bench_rnns_peers.real_urnn(bench_rnns_peers.modrelu_of_view, torch, layer, x, p)


def permuted_the_other_way(torch, layer, x, p):
    class Other:
        permutation = layer.permutation.argsort()
    return urnn_of(torch, Other, x, p)


def without_its_start(torch, layer, x, p):
    return urnn_of(torch, layer, x, {**p, "h0": 0 * p["h0"]})


def without_b(torch, layer, x, p):
    return urnn_of(torch, layer, x, {**p, "b": 0 * p["b"]})


@pytest.mark.parametrize(("name", "wrong"), [
    ("IRNN", with_transposed), ("IRNN", as_tanh), ("RWA", starting_at_zero), ("RWA", scores_of_x_alone),
    ("RWA", with_a_bias_for_the_scores), ("URNN", permuted_the_other_way), ("URNN", without_its_start),
    ("URNN", without_b)], ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_layer_is_found_out(name, wrong, monkeypatch):
    pytest.importorskip("torch")
    right = dict(list(bench_rnns_peers.WAYS[name].items())[-1:])
    monkeypatch.setitem(bench_rnns_peers.WAYS, name, {**right, "wrong": wrong})
    family = family_of(name, *SIZES[0])
    agree, differing = bench.agreeing(family, peers_of(family))
    assert [side.way for side in agree if side.name == "PyTorch eager"] == list(right)
    line, = differing
    assert line.startswith(f"{name} by PyTorch eager (wrong) differs from minigrad and is not measured: ")


def other_settings(**settings):
    def plant(monkeypatch):
        import torch
        real = torch.optim.Adadelta
        monkeypatch.setattr(torch.optim, "Adadelta", lambda tensors, **given: real(tensors, **{**given, **settings}))
    return plant


def mean_of_all_steps(monkeypatch):
    real = bench_imdb.torch_steps

    def torch_steps(torch, model, batch, thread_counts):
        ids, mask, labels = batch
        return real(torch, model, (ids, mask | True, labels), thread_counts)
    monkeypatch.setattr(bench_imdb, "torch_steps", torch_steps)


def other_window(monkeypatch):
    real = bench_imdb.torch_rra
    monkeypatch.setattr(bench_imdb, "torch_rra", lambda torch, products, windows, offset, *arrays: real(
        torch, products, windows, 1, *arrays))


@pytest.mark.parametrize("plant", [other_settings(lr=1.01), other_settings(rho=0.94), other_settings(eps=1.01e-6),
                                   mean_of_all_steps, other_window], ids=["lr", "rho", "eps", "mean", "offset"])
def test_a_wrong_step_is_found_out(plant, few_ways, monkeypatch):
    pytest.importorskip("torch")
    plant(monkeypatch)
    agree, (line,) = judged(imdb_works()["IMDB step"])
    assert agree == []
    assert line.startswith("IMDB step by PyTorch eager (one product, stacked window, for-loop) differs from minigrad ")


def test_wrong_peers_get_no_figure(monkeypatch, capsys, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.setattr(bench, "THREADS", (1,))
    right = functools.partial(bench_rnns_peers.irnn, "relu")
    monkeypatch.setitem(bench_rnns_peers.WAYS, "IRNN", {"right": right, "wrong": with_transposed})
    monkeypatch.setitem(bench_rnns_peers.WAYS, "RWA", {"wrong": starting_at_zero})
    status, out, err = ran(capsys, *QUICK, "--only", "rnns", "--json", tmp_path / "bench.json")
    assert (status, err) == (1, "stopped: 2 peers differ from minigrad (above)\n")
    assert "IRNN by PyTorch eager (wrong) differs from minigrad and is not measured: " in out
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert "wrong" not in {way["way"] for way in report["ways"]}
    assert ("RWA", "PyTorch eager") not in {(row["layer"], row["side"]) for row in report["table"]}
    row, = (row for row in report["table"] if (row["layer"], row["side"]) == ("IRNN", "PyTorch eager"))
    assert row["way"] == "right"


# ---- the report ------------------------------------------------------------------------------------------

def test_rows_targets_and_floors(few_ways, quick_figures, monkeypatch, tmp_path, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(bench, "THREADS", (1,))
    status, out, _ = ran(capsys, *QUICK, "--only", "imdb,rnns", "--json", tmp_path / "bench.json",
                         "--out", tmp_path / "bench.png")
    assert status == 0, out
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    rows = {(row["layer"], row["side"]): row for row in report["table"]}
    assert set(rows) == {(layer, side) for layer, sides in ROWS.items() for side in sides}
    for (layer, side), row in rows.items():
        if side == "PyTorch eager":
            assert (row["at_most"], row["verdict"]) == (TARGETS[layer], "not judged (another size)")
            assert row["ms"] == min(way["ms"] for way in report["ways"] if (way["layer"], way["side"]) == (layer, side))
        elif side != "minigrad":
            assert (row["at_most"], row["verdict"]) == (None, "no target")
    assert "URNN         floor (Fourier transforms and products alone)" in out
    assert "IRNN         floor (matrix products alone)" in out
    assert list(report["floor"]) == ["IRNN", "RWA", "URNN", "IMDB step", "IMDB RRALSTM"] == list(report["sizes"])
    assert report["sizes"]["IMDB step"]["size"] == "B=4 L=12 d=h=16 K=3, vocabulary 40, 3 of 48 steps padded"
    assert set(report["memory"]) == {"IRNN", "RWA", "URNN"}
    assert (report["cost"], report["stepping"]) == ([], None)
    assert (tmp_path / "bench.png").exists()


def test_without_torch_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(bench, "THREADS", (1,))
    status, out, _ = ran(capsys, *QUICK, "--only", "rnns,imdb")
    assert status == 0
    assert "torch cannot be imported" in out
    assert "PyTorch eager (" not in out


@pytest.mark.parametrize(("layer", "at_most"), TARGETS.items())
def test_verdicts(layer, at_most):
    def verdict(ms):
        return bench.judge(layer, "PyTorch eager", Timing(ms, ms, 1), Timing(100.0, 100.0, 1), None)["verdict"]
    assert verdict(100 * at_most) == "met"
    assert verdict(100 * at_most + 1) == "missed"


@pytest.mark.parametrize(("argv", "rnns"), [([], None), (["-K", "9"], None), (["-S", "99"], "another size"),
                                            (["--repeats", "14"], "under 15 calls")])
def test_targets_are_judged_at_their_own_size(argv, rnns):
    settings = bench.parse(argv)
    assert {bench.differs_from_target_size(settings, name) for name in bench_rnns.NAMES} == {rnns}
    imdb = "under 15 calls" if "--repeats" in argv else None
    assert {bench.differs_from_target_size(settings, name) for name in ("IMDB step", "IMDB RRALSTM")} == {imdb}
    settings["imdb_size"] = (16, 128, 128, 5, 10_002)
    assert bench.differs_from_target_size(settings, "IMDB step") == "another size"


def test_reviews_are_long_and_a_few_are_padded_on_the_right():
    ids, mask, labels = bench_imdb.random_batch(bench.FULL["imdb_size"])
    assert (ids.shape, ids.min() >= 2, ids.max() < 10_002) == ((16, 256), True, True)
    assert mask[:12].all()
    lengths = mask[12:].sum(axis=1)
    assert (lengths < 256).all()
    assert (lengths >= 192).all()
    assert not (mask[:, 1:] > mask[:, :-1]).any()
    assert labels.tolist() == [0, 1] * 8


def test_the_floors_are_all_of_the_products(monkeypatch):
    B, S, d, h = 3, 12, 2, 5
    products = {name: bench_rnns.floor_products(name, B, S, d, h) for name in bench_rnns.NAMES}
    real, multiplied = np.matmul, []

    def matmul(a, b, out=None):
        result = real(a, b, out=out)
        multiplied.append(2 * result.size * a.shape[-1])
        return result
    monkeypatch.setattr(np, "matmul", matmul)

    def operations(name, part):
        multiplied.clear()
        products[name][part]()
        return sum(multiplied)
    for name, blocks in (("IRNN", 1), ("RWA", 2)):
        for part in ("step", "backward step"):
            assert operations(name, part) == blocks * 2 * S * B * h * h
    assert operations("IRNN", "input") == 2 * S * B * (d + 1) * h
    assert operations("IRNN", "dx") == 2 * S * B * d * h
    assert operations("RWA", "input") == 3 * 2 * S * B * (d + 1) * h
    assert operations("RWA", "dx") == 3 * 2 * S * B * d * h
    assert operations("RWA", "weight gradients") == 2 * S * B * h * (2 * h + 3 * (d + 1))
    assert operations("URNN", "projections on v") == 4 * 2 * S * B * h
    assert operations("URNN", "input") == operations("URNN", "dx") == 2 * S * B * d * 2 * h


def test_the_floor_of_urnn_has_its_transforms(monkeypatch):
    B, S, d, h = 3, 12, 2, 5
    calls = []
    for name in ("fft", "ifft"):
        monkeypatch.setattr(np.fft, name, lambda z, norm, name=name: calls.append((name, z.shape, z.dtype.name, norm)))
    bench_rnns.floor_products("URNN", B, S, d, h)["Fourier transforms"]()
    assert calls == [("fft", (B, h), "complex64", "ortho"), ("ifft", (B, h), "complex64", "ortho")] * 2 * S
