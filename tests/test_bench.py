"""tasks/bench.py: it runs and reports; its peers compute what minigrad computes; it judges as it says. No figure of
speed is asserted here."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minigrad.backend import gpu_problem
from tasks import bench, bench_measure, bench_peers
from tasks.bench_measure import Side, Timing
from tasks.common import run

ROOT = Path(__file__).resolve().parent.parent
QUICK = ["--quick", "--repeats", "1"]
UNROLLED = {way: settings for way, settings in bench_peers.JAX_WAYS.items() if settings[1] > 1}
WITHOUT_LIMIT = (("as set",), lambda threads: None)


def ran(capsys, *argv):
    """(exit status, stdout, stderr) of the task in this process."""
    status = run(bench.main, [str(word) for word in argv])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def no_peers(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "jax", None)


# ---- a run -----------------------------------------------------------------------------------------------

def test_without_peers_it_says_so_and_reports_the_rest(no_peers, tmp_path, capsys):
    status, out, _ = ran(capsys, *QUICK, "--json", tmp_path / "bench.json", "--out", tmp_path / "bench.png")
    assert status == 0
    assert "torch cannot be imported" in out
    assert "jax cannot be imported" in out
    assert "floor (matrix products alone)" in out
    assert all(f"RRALSTM over {axis} " in out for axis in "SBK")
    assert (tmp_path / "bench.png").stat().st_size > 1000
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert set(report) == {"settings", "environment", "notes", "differing", "table", "ways", "floor", "memory", "cost"}
    assert [(row["layer"], row["side"]) for row in report["table"]] == [
        ("RRALSTM", "minigrad"), ("RRALSTM", "floor"), ("LSTM", "minigrad"), ("LSTM", "floor")]
    assert set(report["floor"]["parts"]) == {"step", "backward step", "input", "weight gradients", "dx"}
    assert report["floor"]["ms"] == pytest.approx(sum(part["ms"] for part in report["floor"]["parts"].values()))
    assert {"command", "commit", "numpy", "cpu", "blas_threads"} <= set(report["environment"])
    for cost in report["cost"]:
        assert {"ms", "us_per_step", "cache_bytes", "peak_bytes", cost["axis"]} == set(cost["rows"][0])
        assert {"start_ms", "slope_ms", "farthest", "linear", "fixed"} < set(cost)


def test_with_peers_every_row_is_there(monkeypatch, tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.setattr(bench_peers, "JAX_WAYS", UNROLLED)   # compiling takes its time; the other ways: below
    status, out, _ = ran(capsys, *QUICK, "--json", tmp_path / "bench.json")
    assert status == 0, out
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert report["differing"] == []                 # so every way of every peer gives minigrad's gradients
    assert {(way["side"], way["way"]) for way in report["ways"]} == {
        ("minigrad", ""), *(("PyTorch eager", way) for way in bench_peers.TORCH_WAYS),
        *(("jax.jit(lax.scan)", way) for way in bench_peers.JAX_WAYS),
        ("torch.nn.LSTM", "batch first"), ("torch.nn.LSTM", "time first")}
    rows = {(row["layer"], row["side"]): row for row in report["table"]}
    assert {key for key, row in rows.items() if "ratio" in row} == set(bench.TARGETS)
    for key, row in rows.items():
        if "ratio" in row:
            ours = rows[key[0], "minigrad"]["ms"]
            assert row["ratio"] == pytest.approx(ours / row["ms"])
            assert row["verdict"] == "not judged (another size)"
            ways = [way["ms"] for way in report["ways"] if way["side"] == key[1]]
            assert row["ms"] == (min(ways) if ways else report["floor"]["ms"])


@pytest.mark.slow
def test_as_a_script_numpy_has_both_thread_counts(tmp_path):
    pytest.importorskip("threadpoolctl")
    program = ("import sys, tasks.bench as bench, threadpoolctl\n"
               "blas = [b['num_threads'] for b in threadpoolctl.threadpool_info() if b['user_api'] == 'blas']\n"
               "assert blas and min(blas) >= max(bench.THREADS), blas\n"
               "sys.modules.update(torch=None, jax=None)\n"
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
    status, out, _ = ran(capsys, *QUICK)
    assert status == 0
    assert "threadpoolctl cannot be imported" in out
    assert "as set" in out


# ---- the peers -------------------------------------------------------------------------------------------

def sides_of(build, module, B, S, d, h, K, offset):
    """(minigrad's results by layer, the peers' sides)."""
    x, dy = bench_measure.upstream_and_input(B, S, d, h)
    rra, lstm = (bench_measure.make_layer(name, d, h, K) for name in ("RRALSTM", "LSTM"))
    rra.offset = offset
    ours = {type(layer).__name__: bench_measure.our_side(layer, x, dy, *WITHOUT_LIMIT).result()
            for layer in (rra, lstm)}
    return ours, build(module, rra, lstm, x, dy, (1,))


@pytest.mark.parametrize(("K", "offset"), [(1, 2), (4, 2), (4, 1), (9, 2)])
def test_pytorch_equals_ours(K, offset):
    torch = pytest.importorskip("torch")
    ours, sides = sides_of(bench_peers.torch_peers, torch, 3, 6, 2, 5, K, offset)
    assert len(sides) == 6
    for side in sides:
        theirs = side.result()
        assert set(theirs) == set(ours[side.layer])
        for name, array in theirs.items():
            assert array.shape == ours[side.layer][name].shape
        assert bench_peers.difference(ours[side.layer], theirs)[1] < 1e-5, side.way


def test_jax_equals_ours_with_a_window_longer_than_the_sequence(monkeypatch):
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(bench_peers, "JAX_WAYS", {w: s for w, s in bench_peers.JAX_WAYS.items() if w not in UNROLLED})
    ours, sides = sides_of(bench_peers.jax_peers, jax, 3, 5, 2, 4, 7, 1)
    assert len(sides) == 2
    for side in sides:
        assert bench_peers.difference(ours["RRALSTM"], side.result())[1] < 1e-5, side.way


@pytest.mark.parametrize("fault", [lambda dU: 1.001 * dU, lambda dU: dU * np.nan], ids=["off", "nan"])
def test_a_peer_that_differs_gets_no_figure(fault, monkeypatch, capsys, tmp_path):
    def peers(rra, lstm, x, dy, thread_counts):
        right = bench_measure.our_side(rra, x, dy, *WITHOUT_LIMIT)

        def result():
            arrays = right.result()
            return {**arrays, "dU": fault(arrays["dU"])}
        return [right._replace(name="jax.jit(lax.scan)", result=result)], []
    monkeypatch.setattr(bench_peers, "peers", peers)
    status, out, err = ran(capsys, *QUICK, "--json", tmp_path / "bench.json")
    assert status == 1
    assert "differs from minigrad and is not measured: dU by " in out
    assert err.startswith("stopped: 1 peers differ")
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert {row["side"] for row in report["table"]} == {"minigrad", "floor"}


def test_long_sequences_are_compared_over_their_first_steps(monkeypatch):
    lengths = []

    def peers(rra, lstm, x, dy, thread_counts):
        lengths.append(x.shape[1])
        return [bench_measure.our_side(layer, x, dy, *WITHOUT_LIMIT) for layer in (rra, lstm)], []
    monkeypatch.setattr(bench_peers, "peers", peers)
    monkeypatch.setattr(bench, "CHECKED", 7)
    layers = [bench_measure.make_layer(name, 2, 5, 3) for name in ("RRALSTM", "LSTM")]
    for S in (9, 7):
        x, dy = bench_measure.upstream_and_input(2, S, 2, 5)
        sides, _ = peers(*layers, x, dy, (1,))
        assert bench.agreeing(layers, x, dy, sides) == (sides, [])
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
    assert bench.differs_from_target_size(bench.parse([])) is None
    assert bench.differs_from_target_size(bench.parse(["-K", "9"])) == "another size"
    assert bench.differs_from_target_size(bench.parse(["--repeats", "14"])) == "under 15 calls"


def test_straightness_tells_linear_from_quadratic():
    n = np.array(bench.FULL["over_S"])
    line = bench_measure.straightness(n, 3 + 0.2 * n)
    assert line["linear"]
    assert (line["start_ms"], line["slope_ms"], line["farthest"]) == pytest.approx((3, 0.2, 0), abs=1e-8)
    assert not bench_measure.straightness(n, 0.2 * n + 2e-4 * n**2)["linear"]
    assert not bench_measure.straightness(n, 1e-3 * n**2)["linear"]


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
    ["--lr", "1"], ["--json", "{tmp}/nowhere/bench.json"], ["--json", "{tmp}"], ["--out", "{tmp}/nowhere/bench.png"]],
    ids=" ".join)
def test_bad_flags_are_one_line_and_status_2(argv, tmp_path, capsys):
    status, out, err = ran(capsys, *(word.format(tmp=tmp_path) for word in argv))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    status, _, err = ran(capsys, "--device", "gpu", "--quick")
    assert status == 2
    assert err.startswith("error: device 'gpu' was asked for, but ")


def test_on_a_gpu_it_says_that_it_cannot_yet(monkeypatch, capsys):
    monkeypatch.setattr(bench, "resolve_device", lambda device: "gpu")
    status, _, err = ran(capsys, "--device", "auto", "--quick")
    assert (status, err) == (2, "error: bench measures on the CPU only, so far; use --device cpu\n")
