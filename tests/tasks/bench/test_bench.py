"""tasks/bench.py: it runs and reports; its peers compute what minigrad computes; it judges as it says. No figure of
speed is asserted here. What is SRU++'s alone: test_bench_srupp.py; TSDAE's: test_bench_tsdae.py; that of IRNN, RWA,
URNN and IMDB: test_bench_rnns.py."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minigrad.backend import gpu_problem
from tasks.bench import (
    main as bench,
    measure as bench_measure,
    peers as bench_peers,
    srupp_peers as bench_srupp_peers,
)
from tasks.bench.measure import Side, Timing
from tasks.frame.common import run

ROOT = Path(__file__).resolve().parents[3]
QUICK = ["--quick", "--repeats", "1"]
FAMILIES = ["RRALSTM", "LSTM", "IRNN", "RWA", "URNN", "SRUpp"]
OVER_L = ["SRU", "SRUpp without attention", "SRUpp, window 8", "SRUpp, causal"]
UNROLLED = {way: settings for way, settings in bench_peers.JAX_WAYS.items() if settings[1] > 1}
WITHOUT_LIMIT = (("as set",), lambda threads: None)


def ran(capsys, *argv):
    """(exit status, stdout, stderr) of the task in this process."""
    status = run(bench.main, [str(word) for word in argv])
    out, err = capsys.readouterr()
    return status, out, err


def written(folder):
    """The flags for both files."""
    return "--json", folder / "bench.json", "--out", folder / "bench.png"


@pytest.fixture
def no_peers(monkeypatch):
    for name in ("torch", "jax", "sru"):
        monkeypatch.setitem(sys.modules, name, None)


# ---- a run -----------------------------------------------------------------------------------------------

def test_without_peers_it_says_so_and_reports_the_rest(no_peers, tmp_path, capsys):
    status, out, _ = ran(capsys, *QUICK, *written(tmp_path))
    assert status == 0
    assert "torch cannot be imported" in out
    assert "jax cannot be imported" in out
    assert "sru cannot be imported" in out
    assert "floor (matrix products alone)" in out
    assert all(f"RRALSTM over {axis} " in out for axis in "SBK")
    assert all(f"{name} over L " in out for name in OVER_L)
    assert "SRU++ step by step" in out
    assert (tmp_path / "bench.png").stat().st_size > 1000
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert set(report) == {"settings", "environment", "sizes", "notes", "differing", "table", "ways", "floor", "memory",
                           "cost", "stepping"}
    assert [(row["layer"], row["side"]) for row in report["table"]] == [
        *((layer, side) for layer in (*FAMILIES, "TSDAE step") for side in ("minigrad", "floor")),
        ("TSDAE encode", "minigrad"),
        *((layer, side) for layer in ("IMDB step", "IMDB RRALSTM") for side in ("minigrad", "floor"))]
    assert set(report["floor"]) == {"adding", "IRNN", "RWA", "URNN", "srupp", "TSDAE step", "IMDB step", "IMDB RRALSTM"}
    assert set(report["floor"]["adding"]["parts"]) == {"step", "backward step", "input", "weight gradients", "dx"}
    for floor in report["floor"].values():
        assert floor["ms"] == pytest.approx(sum(part["ms"] for part in floor["parts"].values()))
    assert set(report["memory"]) == set(FAMILIES)
    assert {"command", "commit", "numpy", "cpu", "blas_threads"} <= set(report["environment"])
    assert [(cost["layer"], cost["axis"]) for cost in report["cost"]] == [
        *(("RRALSTM", axis) for axis in "SBK"), *((name, "L") for name in OVER_L)]
    for cost in report["cost"][:-1]:
        assert {"ms", "us_per_step", "cache_bytes", "peak_bytes", cost["axis"]} == set(cost["rows"][0])
        assert {"start_ms", "slope_ms", "farthest", "linear", "fixed"} < set(cost)


def test_with_peers_every_row_is_there(monkeypatch, tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.setattr(bench_peers, "JAX_WAYS", UNROLLED)   # compiling takes its time; the other ways: below
    status, out, _ = ran(capsys, *QUICK, "--only", "rra,lstm,srupp", "--json", tmp_path / "bench.json")
    assert status == 0, out
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert report["differing"] == []                 # so every way of every peer gives minigrad's gradients
    official = {("SRUpp", "official module")}                # where it is installed
    assert {(way["layer"], way["side"], way["way"]) for way in report["ways"] if way["side"] != "official module"} == {
        *((layer, "minigrad", "") for layer in ("RRALSTM", "LSTM", "SRUpp")),
        *(("RRALSTM", "PyTorch eager", way) for way in bench_peers.TORCH_WAYS),
        *(("RRALSTM", "jax.jit(lax.scan)", way) for way in bench_peers.JAX_WAYS),
        *(("LSTM", "torch.nn.LSTM", way) for way in ("batch first", "time first")),
        *(("SRUpp", "PyTorch eager", way) for way in bench_srupp_peers.WAYS)}
    rows = {(row["layer"], row["side"]): row for row in report["table"]}
    assert {key for key, row in rows.items() if "ratio" in row} | official == {
        (layer, side) for layer, side in bench.TARGETS if layer in ("RRALSTM", "LSTM", "SRUpp")}
    for key, row in rows.items():
        if "ratio" in row:
            ours = rows[key[0], "minigrad"]["ms"]
            assert row["ratio"] == pytest.approx(ours / row["ms"])
            assert row["verdict"] == ("not judged (another size)" if row["at_most"] else "no target")
            ways = [way["ms"] for way in report["ways"] if (way["layer"], way["side"]) == key]
            floor = report["floor"]["srupp" if key[0] == "SRUpp" else "adding"]["ms"]
            assert row["ms"] == (min(ways) if ways else floor)


@pytest.mark.slow
def test_as_a_script_numpy_has_both_thread_counts(tmp_path):
    pytest.importorskip("threadpoolctl")
    program = ("import sys, tasks.bench as bench, threadpoolctl\n"
               "blas = [b['num_threads'] for b in threadpoolctl.threadpool_info() if b['user_api'] == 'blas']\n"
               "assert blas and min(blas) >= max(bench.THREADS), blas\n"
               "sys.modules.update(torch=None, jax=None, sru=None)\n"
               f"sys.exit(bench.run(bench.main, {QUICK}))\n")
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True,
                           text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_threadpoolctl_it_says_so(no_peers, monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *rest):
        if name == "threadpoolctl":
            raise ImportError(name)
        return real(name, *rest)
    monkeypatch.setattr(builtins, "__import__", without)
    status, out, _ = ran(capsys, *QUICK, "--rows-only")
    assert status == 0
    assert "threadpoolctl cannot be imported" in out
    assert "as set" in out


# ---- the peers -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("only", "layers"), [("rra", ["RRALSTM"]), ("srupp, lstm", ["LSTM", "SRUpp"])])
def test_only_some_layers(only, layers, no_peers, tmp_path, capsys):
    status, out, _ = ran(capsys, *QUICK, "--only", only, *written(tmp_path))
    assert status == 0
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [row["layer"] for row in report["table"]] == [layer for layer in layers for _ in ("minigrad", "floor")]
    assert [name for family in report["sizes"].values() for name in family["layers"]] == layers
    assert list(report["memory"]) == layers
    assert {cost["axis"] for cost in report["cost"]} == ({"L"} if "SRUpp" in layers else {"S", "B", "K"})
    assert (report["stepping"] is not None) == ("SRUpp" in layers)
    assert ("jax cannot be imported" in out) == ("RRALSTM" in layers)


def test_rows_only(no_peers, tmp_path, capsys):
    status, out, _ = ran(capsys, *QUICK, "--rows-only", *written(tmp_path))
    assert status == 0
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert (report["cost"], report["stepping"]) == ([], None)
    assert len(report["table"]) == 2 * len(FAMILIES) + 3 + 4                  # of TSDAE, of IMDB
    assert " over " not in out


def sides_of(module, B, S, d, h, K, offset):
    """(minigrad's results by layer, the sides of a module)."""
    x, dy = bench_measure.upstream_and_input(B, S, d, h)
    rra, lstm = (bench_measure.make_layer(name, d, h, K) for name in ("RRALSTM", "LSTM"))
    rra.offset = offset
    ours = {type(layer).__name__: bench_measure.our_side(layer, x, dy, *WITHOUT_LIMIT).result()
            for layer in (rra, lstm)}
    table = [peer for peer in bench_peers.PEERS if peer.module == module]
    return ours, bench_peers.peers(table, [rra, lstm], x, dy, (1,))[0]


@pytest.mark.parametrize(("K", "offset"), [(1, 2), (4, 2), (4, 1), (9, 2)])
def test_pytorch_equals_ours(K, offset):
    pytest.importorskip("torch")
    ours, sides = sides_of("torch", 3, 6, 2, 5, K, offset)
    assert len(sides) == 6
    for side in sides:
        theirs = side.result()
        assert set(theirs) == set(ours[side.layer])
        for name, array in theirs.items():
            assert array.shape == ours[side.layer][name].shape
        assert bench_peers.difference(ours[side.layer], theirs)[1] < 1e-5, side.way


def test_jax_equals_ours_with_a_window_longer_than_the_sequence(monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setattr(bench_peers, "JAX_WAYS", {w: s for w, s in bench_peers.JAX_WAYS.items() if w not in UNROLLED})
    ours, sides = sides_of("jax", 3, 5, 2, 4, 7, 1)
    assert len(sides) == 2
    for side in sides:
        assert bench_peers.difference(ours["RRALSTM"], side.result())[1] < 1e-5, side.way


@pytest.mark.parametrize("fault", [lambda array: 1.01 * array, lambda array: array * np.nan], ids=["off", "nan"])
@pytest.mark.parametrize(("only", "name"), [("rra", "dU"), ("srupp", "y"), ("srupp", "dalpha"), ("srupp", "dW_k")])
def test_a_peer_that_differs_gets_no_figure(only, name, fault, monkeypatch, capsys, tmp_path):
    def peers(table, layers, x, dy, thread_counts):
        right = bench_measure.our_side(layers[0], x, dy, *WITHOUT_LIMIT)

        def result():
            arrays = right.result()
            return {**arrays, name: fault(arrays[name])}
        return [right._replace(name="PyTorch eager", result=result)], []
    monkeypatch.setattr(bench_peers, "peers", peers)
    status, out, err = ran(capsys, *QUICK, "--rows-only", "--only", only, "--json", tmp_path / "bench.json")
    assert status == 1
    assert f"differs from minigrad and is not measured: {name} by " in out
    assert err.startswith("stopped: 1 peers differ")
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert {row["side"] for row in report["table"]} == {"minigrad", "floor"}


def test_long_sequences_are_compared_over_their_first_steps(monkeypatch):
    lengths = []

    def peers(table, layers, x, dy, thread_counts):
        lengths.append(x.shape[1])
        return [bench_measure.our_side(layer, x, dy, *WITHOUT_LIMIT) for layer in layers], []
    monkeypatch.setattr(bench_peers, "peers", peers)
    monkeypatch.setattr(bench, "CHECKED", {"adding": 7})
    layers = [bench_measure.make_layer(name, 2, 5, 3) for name in ("RRALSTM", "LSTM")]
    for S in (9, 7):
        x, dy = bench_measure.upstream_and_input(2, S, 2, 5)
        sides, _ = peers(None, layers, x, dy, (1,))
        assert bench.agreeing(bench.Family("adding", "", layers, x, dy, {}), sides) == (sides, [])
    assert lengths == [9, 7, 7]


# ---- how it measures and judges --------------------------------------------------------------------------

@pytest.mark.parametrize("repeats", [1, 3, 15, 16])
def test_measure_takes_turns_and_calls_often_enough(repeats):
    log = []

    class limit:
        def __init__(self, threads):
            self.threads = threads

        def __enter__(self):
            log.append(self.threads)

        def __exit__(self, *_):
            pass
    sides = [Side("", name, "", lambda name=name: log.append(name), None, (1, 2), limit) for name in "ab"]
    timings = bench_measure.measure(sides, repeats, 0)
    assert len(timings) == 2
    blocks = log.count(1) // 2
    assert log.count("a") >= 2 * (repeats + blocks)          # at both thread counts, and one untimed a block
    assert [word for word in log if word in (1, 2)] == [1, 2, 1, 2] * blocks
    assert all(timing.ms <= timing.median_ms for timing in timings)


def test_verdicts():
    key, quiet = ("LSTM", "torch.nn.LSTM"), Timing(10.0, 11.0, 1)

    def verdict(ours, theirs=quiet, not_judged=None):
        return bench.judge(*key, ours, theirs, not_judged)["verdict"]
    assert verdict(Timing(13.0, 14.0, 1)) == "met"
    assert verdict(Timing(13.1, 14.0, 1)) == "missed"
    assert verdict(Timing(9.0, 10.0, 1), Timing(10.0, 20.1, 2)) == "unsteady"
    assert verdict(Timing(9.0, 18.1, 1)) == "unsteady"
    assert verdict(Timing(9.0, 10.0, 1), not_judged="another size") == "not judged (another size)"
    assert bench.judge("SRUpp", "floor", quiet, quiet, None)["verdict"] == "no target"


@pytest.mark.parametrize(("argv", "adding", "srupp"), [
    ([], None, None), (["-K", "9"], "another size", None), (["--srupp-size", "128, 8,256,32"], None, "another size"),
    (["--srupp-size", "128,8,256,64"], None, None), (["--repeats", "14"], "under 15 calls", "under 15 calls")])
def test_targets_are_judged_at_their_own_size(argv, adding, srupp):
    settings = bench.parse(argv)
    assert bench.differs_from_target_size(settings, "adding") == adding
    assert bench.differs_from_target_size(settings, "srupp") == srupp


def test_straightness_tells_linear_from_quadratic():
    n = np.array(bench.FULL["over_S"])
    line = bench_measure.straightness(n, 3 + 0.2 * n)
    assert line["linear"]
    assert (line["start_ms"], line["slope_ms"], line["farthest"]) == pytest.approx((3, 0.2, 0), abs=1e-8)
    assert not bench_measure.straightness(n, 0.2 * n + 2e-4 * n**2)["linear"]
    assert not bench_measure.straightness(n, 1e-3 * n**2)["linear"]


def test_fit_finds_a_polynomial():
    n = np.array(bench.FULL["over_L"])
    coefficients, farthest = bench_measure.fit(n, 3 + 0.2 * n + 2e-4 * n**2, 2)
    assert coefficients == pytest.approx([3, 0.2, 2e-4])
    assert farthest < 1e-9
    assert bench_measure.fit(n, 3 + 0.2 * n + 2e-4 * n**2, 1)[1] > 0.1


def test_memory_that_two_arrays_share_counts_once():
    array, other = np.zeros((6, 10), "float32"), np.zeros(5)
    leaves = [array[:4], array.T, array[2:], other, 7, "causal", None]
    assert bench_measure.bytes_of(leaves) == array.nbytes + other.nbytes
    assert bench_measure.bytes_of([array[:2], array[4:]]) == array.nbytes * 4 // 6


def test_memory_is_linear_in_S_and_the_window_is_not_copied():
    def memory(S, K):
        x, dy = bench_measure.upstream_and_input(10, S, 2, 32)
        return bench_measure.bytes_per_step(bench_measure.make_layer("RRALSTM", 2, 32, K), x, dy)
    base = memory(50, 5)
    assert 28 <= base["cache_bytes"] < 32                    # i, f, o, g, h, c, tanh: 7 float32, then x and the past
    assert base["cache_bytes"] < base["peak_bytes"] < 90
    longer = memory(400, 5)
    assert longer["cache_bytes"] <= base["cache_bytes"]
    assert longer["peak_bytes"] <= 1.1 * base["peak_bytes"]
    assert memory(400, 40)["peak_bytes"] < 1.2 * longer["peak_bytes"]


# ---- bad input -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("argv", [
    ["--repeats", "0"], ["-S", "1"], ["-K", "0"], ["--hidden", "x"], ["--batch-size", "-1"], ["--device", "tpu"],
    ["--lr", "1"], ["--only", "gru"], ["--only", ""], ["--srupp-size", "8,2,16"], ["--srupp-size", "1,2,16,4"],
    ["--srupp-size", "8,2,0,4"], ["--srupp-size", "8,2,x,4"], ["--json", "{tmp}/nowhere/bench.json"],
    ["--json", "{tmp}"], ["--json", ""], ["--out", "{tmp}/nowhere/bench.png"]],
    ids=" ".join)
def test_bad_flags_are_one_line_and_status_2(argv, tmp_path, capsys):
    status, out, err = ran(capsys, *(word.format(tmp=tmp_path) for word in argv))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize("flag", ["--json", "--out"])
def test_a_report_is_not_written_in_the_place_of_a_device(flag, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, _, err = ran(capsys, "--quick", flag, pipe)
    assert status == 2
    assert err == f"error: {flag} '{pipe}' cannot be written; expected a file in a folder that is there\n"
    assert pipe.is_fifo()


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    status, _, err = ran(capsys, "--device", "gpu", "--quick")
    assert status == 2
    assert err.startswith("error: device 'gpu' was asked for, but ")
