"""The bench on the CPU: it runs and reports; its peers compute what minigrad computes, and one that does not is found;
it judges as it says. No figure of speed is asserted here. On a GPU: test_bench_gpu.py."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from minigrad.backend import gpu_problem
from tasks.bench import imdb, layers, main as bench, measure, peers, rnns_peers, srupp_peers, tsdae, tsdae_peers
from tasks.bench.flags import FULL, QUICK, parse
from tasks.bench.measure import Side, Timing
from tasks.bench.srupp_peers import OFFICIAL
from tasks.frame import exit_status as run

ROOT = Path(__file__).resolve().parents[3]
ARGV = ["--quick", "--repeats", "1"]
LAYERS = ["RRALSTM", "LSTM", "IRNN", "RWA", "URNN", "SRUpp"]
ROWS = [*LAYERS, "TSDAE step", "TSDAE encode", "IMDB step", "IMDB RRALSTM"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Idle threads spin."""
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.ExitStack() as limits:
        monkeypatch.setattr(measure, "THREADS", (1,))
        if find_spec("torch"):
            limits.enter_context(measure.torch_threads(1))
        yield


def ran(capsys, *argv):
    """(exit status, stdout, stderr) of the bench in this process."""
    status = run(bench.main, [str(word) for word in argv])
    out, err = capsys.readouterr()
    return status, out, err


def report_of(folder):
    return json.loads((folder / "bench.json").read_text(encoding="utf-8"))


def works(settings=QUICK, only=None):
    """{name: Work} of every row, or of one part."""
    settings = {**settings, "only": (only,) if only else ("rra", "lstm", "rnns", "srupp")}
    found = [*layers.works(settings), *(tsdae.works(settings) if only in (None, "tsdae") else ()),
             *(imdb.works(settings) if only in (None, "imdb") else ())]
    return {work.name: work for work in found}


# ---- a run -----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(exit status, stdout, report, folder) of everything that is installed, at small sizes and one thread."""
    folder, out = tmp_path_factory.mktemp("bench"), io.StringIO()
    with contextlib.redirect_stdout(out):
        status = run(bench.main, [*ARGV, "--json", f"{folder}/bench.json", "--out", f"{folder}/bench.png"])
    return status, out.getvalue(), report_of(folder), folder


def test_quick_runs_everything_that_is_installed(whole):
    status, out, report, folder = whole
    assert status == 0, out
    assert set(report) == {"settings", "environment", "sizes", "notes", "differing", "table", "ways", "memory", "cost",
                           "stepping"}
    assert report["differing"] == []                 # so every way of every peer gives minigrad's gradients
    assert list(report["sizes"]) == ROWS
    installed = {note.split()[0] for note in report["notes"] if "cannot be imported" not in note}
    expected = {(row, "minigrad") for row in ROWS} | {
        key for key in bench.TARGETS if {"jax.jit(lax.scan)": "jax", "official module": "sru"}.get(
            key[1], "torch") in installed}
    if "torch" in installed:
        expected.add(("IRNN", "torch.nn.RNN"))
    assert {(row["layer"], row["side"]) for row in report["table"]} == expected
    assert {"command", "commit", "numpy", "cpu"} <= set(report["environment"])
    assert (folder / "bench.png").stat().st_size > 1000


def test_a_row_is_its_fastest_way_and_its_ratio_is_minigrads_time_to_it(whole):
    _, _, report, _ = whole
    rows = {(row["layer"], row["side"]): row for row in report["table"]}
    for key, row in rows.items():
        ways = [way for way in report["ways"] if (way["layer"], way["side"]) == key]
        assert row["ms"] == min(way["ms"] for way in ways)
        assert row["way"] in {way["way"] for way in ways if way["ms"] == row["ms"]}
        assert ("ratio" in row) == (key[1] != "minigrad")
        if "ratio" in row:
            assert row["ratio"] == pytest.approx(rows[key[0], "minigrad"]["ms"] / row["ms"])
            assert (row["at_most"], row["aim"]) == bench.TARGETS.get(key, (None, None))
            assert row["verdict"] == ("not judged (another size)" if row["at_most"] else "no target")
        assert ("per_second" in row) == (key[0] == "TSDAE encode")
    assert rows["TSDAE encode", "minigrad"]["per_second"] == pytest.approx(
        QUICK["tsdae_encoded"] / (1e-3 * rows["TSDAE encode", "minigrad"]["ms"]))


def test_memory_and_cost(whole):
    _, out, report, _ = whole
    assert list(report["memory"]) == LAYERS
    over_L = ["SRU", "SRUpp without attention", "SRUpp, window 8", "SRUpp, causal"]
    assert [(cost["layer"], cost["axis"]) for cost in report["cost"]] == [
        *(("RRALSTM", axis) for axis in "SBK"), *((name, "L") for name in over_L)]
    for cost in report["cost"]:
        axis = cost["axis"]
        assert [row[axis] for row in cost["rows"]] == QUICK[f"over_{axis}"]
        assert {"ms", "us_per_step", "cache_bytes", "peak_bytes", axis} == set(cost["rows"][0])
        assert len(cost["coefficients_ms"]) == (3 if cost["layer"] == "SRUpp, causal" else 2)
        assert f"{cost['layer']} over {axis} (" in out
    for row in report["cost"][-1]["rows"]:
        assert row["us_per_step"] == pytest.approx(1e3 * row["ms"] / row["L"])
    windowed, growing = report["stepping"]["rows"]
    assert windowed["ratio"] == windowed["last_us"] / windowed["first_us"]
    assert windowed["verdict"] == ("met" if windowed["ratio"] <= 1.25 else "missed")
    assert growing["verdict"] == "no target"


@pytest.mark.parametrize(("only", "names"), [("rra", ["RRALSTM"]), ("srupp, lstm", ["LSTM", "SRUpp"])])
def test_some_rows_without_peers_and_without_threadpoolctl(only, names, tmp_path, monkeypatch, capsys):
    for name in ("torch", "jax", "sru"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(measure, "threadpool_limits", None)
    status, out, _ = ran(capsys, *ARGV, "--rows-only", "--only", only, "--json", tmp_path / "bench.json")
    assert status == 0
    assert "torch cannot be imported" in out
    assert ("jax cannot be imported" in out) == (only == "rra")
    assert "threadpoolctl cannot be imported" in out
    report = report_of(tmp_path)
    assert [(row["layer"], row["side"], row["threads"]) for row in report["table"]] == [
        (name, "minigrad", "as set") for name in names]
    assert (report["cost"], report["stepping"]) == ([], None)


@pytest.mark.slow
def test_as_a_command():
    def ended(*argv):
        done = subprocess.run([sys.executable, *argv], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                              capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout
    assert re.search(r"^LSTM +minigrad ", ended("tasks/bench", *ARGV, "--rows-only", "--only", "lstm"), re.MULTILINE)
    text = ended("-m", "tasks.bench", "--help")
    assert text.startswith("usage: python tasks/bench ")
    assert "compared with PyTorch and JAX" in text


# ---- the peers -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [
    {"batch_size": 3, "length": 6, "hidden": 5, "window": 1, "srupp_size": (7, 3, 8, 4),
     "tsdae_size": (3, 7, 12, 3, 1, 30), "imdb_size": (5, 9, 8, 2, 30)},
    {"batch_size": 3, "length": 6, "hidden": 5, "window": 9, "srupp_size": (150, 2, 6, 4)}], ids=["small", "long"])
def test_peers_equal_ours_at_other_sizes(settings):
    """A window longer than the sequence; more than one block of queries. Closer than the bench asks for."""
    pytest.importorskip("torch")
    for work in works({**QUICK, **settings}).values():
        ours = work.ours.result()
        for side in work.peers:
            theirs = side.result()
            assert set(theirs) == {name for name in ours if work.name != "TSDAE step" or not tsdae_peers.unused(name)}
            for name, array in theirs.items():
                assert array.shape == ours[name].shape
                moves = name.startswith("move of ")  # of float32 parameters near 1, in much smaller units
                assert peers.difference(ours, {name: array})[1] < (1.3e-4 if moves else 2e-5), (side.way, name)


def test_every_result_is_large_enough_to_be_compared():
    """The tolerance is relative to the largest entry, but to 1 where all are smaller. (b_k changes no weight.)"""
    for work in works().values():
        for name, array in work.ours.result().items():
            if work.name != "TSDAE step" or not (tsdae_peers.unused(name) or name.endswith(".b_k")):
                assert abs(array).max() > 30 * peers.TOLERANCE, (work.name, name)


def test_a_step_is_compared_by_its_first_result():
    """Whatever was trained in between."""
    for part, row in (("tsdae", "TSDAE step"), ("imdb", "IMDB step")):
        work = works(only=part)[row]
        for side in (work.ours, *work.peers[:1]):
            before = side.result()
            side.call()
            assert all((side.result()[key] == array).all() for key, array in before.items())


def changed(name, change):
    """Wrap a function of (..., p), so that it gets other parameters."""
    def wrap(function):
        return lambda torch, layer, x, p: function(torch, layer, x, {**p, name: change(p[name])})
    return wrap


def with_queries(factor):
    return lambda function: lambda torch, mask, q, k, v: function(torch, mask, factor * q, k, v)


def in_tsdae(q=1.0, mask=True, causal=True):
    """Wrap TSDAE's attention: with other queries, without the mask, with later keys."""
    def wrap(function):
        def attention(torch, queries, k, v, its_mask, its_causal):
            its_mask = its_mask if mask or its_mask is None else 0 * its_mask.nan_to_num(0, 0, 0)
            if its_causal and not causal:
                its_mask, its_causal = 0 * queries[:1, :1, :1, :1], False
            return function(torch, q * queries, k, v, its_mask, its_causal)
        return attention
    return wrap


def other_rra(offset=0, bias=0.0):
    def wrap(function):
        return lambda torch, products, its_offset, x, W, U, b, w: function(
            torch, products, its_offset + offset, x, W, U, b + bias, w)
    return wrap


FAULTS = {                                           # (part, row, where, what, wrap), each planted in turn
    "RRA: offset": ("rra", "RRALSTM", peers, "torch_rra", other_rra(offset=1)),
    "LSTM: gates": ("lstm", "LSTM", peers, "swap_o_g", lambda function: lambda array: array),
    "IRNN: W": ("rnns", "IRNN", rnns_peers, "irnn", changed("W", lambda W: W.T)),
    "RWA: s": ("rnns", "RWA", rnns_peers, "rwa", changed("s", lambda s: 0 * s)),
    "RWA: b_g": ("rnns", "RWA", rnns_peers, "rwa", changed("b_g", lambda b: 1.01 * b)),
    "URNN: h0": ("rnns", "URNN", rnns_peers, "real_urnn", changed("h0", lambda h: 0 * h)),
    "URNN: b": ("rnns", "URNN", rnns_peers, "real_urnn", changed("b", lambda b: 0 * b)),
    "SRUpp: scale": ("srupp", "SRUpp", srupp_peers, "matmul_attention", with_queries(1.01)),
    "SRUpp: reset gate": ("srupp", "SRUpp", srupp_peers, "torch_recurrence", lambda function: (
        lambda torch, u0, u1, u2, x, v_f, v_r: function(torch, u0, u1, u2.detach(), x, v_f, v_r))),
    "TSDAE: scale": ("tsdae", "TSDAE step", tsdae_peers, "matmul_attention", in_tsdae(q=1.01)),
    "TSDAE: mask": ("tsdae", "TSDAE step", tsdae_peers, "matmul_attention", in_tsdae(mask=False)),
    "TSDAE: causal": ("tsdae", "TSDAE step", tsdae_peers, "matmul_attention", in_tsdae(causal=False)),
    "IMDB: bias": ("imdb", "IMDB step", imdb, "torch_rra", other_rra(bias=0.01))}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_peer_is_found(fault, monkeypatch):
    pytest.importorskip("torch")
    part, row, module, name, wrap = FAULTS[fault]
    right = getattr(module, name)
    monkeypatch.setattr(module, name, wrap(right))
    if name == "irnn" or name == "real_urnn":
        monkeypatch.setitem(rnns_peers.WAYS, row, {"wrong": wrap(right)})
    if name == "rwa":
        monkeypatch.setitem(rnns_peers.WAYS, row, {"wrong": wrap(
            lambda *arguments: right(rnns_peers.by_logaddexp, *arguments))})
    if name == "matmul_attention":
        way = (wrap(right), False) if part == "tsdae" else wrap(right)
        monkeypatch.setattr(module, "WAYS", {"wrong": way})
    work = works(only=part)[row]
    wrong = [side for side in work.peers if side.name != "torch.nn.RNN" and side.library == "torch"]
    agree, differing = peers.compared(work.ours.result(), wrong, wrong)
    assert agree == []
    assert len(differing) == len(wrong) > 0


@pytest.mark.parametrize("settings", [{"lr": 1.01}, {"rho": 0.94}, {"eps": 1.01e-6}], ids=str)
def test_another_optimizer_is_found(settings, monkeypatch):
    torch = pytest.importorskip("torch")
    real = torch.optim.Adadelta
    monkeypatch.setattr(torch.optim, "Adadelta", lambda tensors, **given: real(tensors, **{**given, **settings}))
    work = works(only="imdb")["IMDB step"]
    assert peers.compared(work.ours.result(), work.peers, work.peers)[0] == []


def test_weight_decay_is_seen():
    pytest.importorskip("torch")
    work, name = works(only="tsdae")["TSDAE step"], "encoder.layers.0.feed_forward.W_1"
    value = dict(tsdae.make_model(QUICK["tsdae_size"]).named_parameters())[name].value
    ours = work.ours.result()
    without = {**ours, f"move of {name}": ours[f"move of {name}"] + tsdae.OPTIMIZER["weight_decay"] * value}
    assert peers.difference(without, work.peers[0].result())[1] > 10 * peers.TOLERANCE


@pytest.mark.parametrize("fault", [lambda array: 1.01 * array, lambda array: array * np.nan], ids=["off", "nan"])
@pytest.mark.parametrize(("part", "row", "name"), [
    ("rra", "RRALSTM", "dU"), ("srupp", "SRUpp", "dW_k"), ("tsdae", "TSDAE step", "loss"),
    ("tsdae", "TSDAE step", "move of encoder.layers.0.attention.W_v"), ("tsdae", "TSDAE encode", "vectors")])
def test_a_peer_that_differs_gets_no_figure_and_the_exit_status_is_1(part, row, name, fault, monkeypatch, tmp_path,
                                                                     capsys):
    real = bench.add_work

    def add_work(found, work, settings):
        def wrong():
            arrays = work.ours.result()
            return {**arrays, name: fault(arrays[name])}
        side = work.ours._replace(name="a peer", way="wrong", result=wrong)
        real(found, work._replace(peers=[side] if work.name == row else [], checked=None), settings)
    monkeypatch.setattr(bench, "add_work", add_work)
    status, out, err = ran(capsys, *ARGV, "--rows-only", "--only", part, "--json", tmp_path / "bench.json")
    assert (status, err) == (1, "stopped: 1 peers differ from minigrad (above)\n")
    assert f"{row} by a peer (wrong) differs from minigrad and is not measured: {name} by " in out
    report = report_of(tmp_path)
    assert {line["side"] for key in ("table", "ways") for line in report[key]} == {"minigrad"}
    assert len(report["differing"]) == 1


def test_long_sequences_are_compared_over_their_first_steps(monkeypatch):
    monkeypatch.setitem(layers.CHECKED, "LSTM", 7)
    for S in (9, 7):
        work, = works({**QUICK, "length": S}, "lstm").values()
        assert work.ours.result()["y"].shape[1] == S
        assert (work.checked is None) == (S == 7)
        for side in [work.checked[0], *work.checked[1]] if work.checked else []:
            assert side.result()["y"].shape[1] == 7


@pytest.mark.parametrize(("version", "outcome", "said"), [
    (None, None, f"it is not installed; pip install sru=={OFFICIAL}"),
    ("2.6.0", None, f"version 2.6.0 has no SRU++; pip install sru=={OFFICIAL}"),
    (OFFICIAL, RuntimeError("Error building extension\nninja: stopped"), "Error building extension"),
    (OFFICIAL, OSError(), "OSError"), (OFFICIAL, ImportError("no torch"), "no torch")])
def test_an_official_module_that_cannot_be_used(version, outcome, said, monkeypatch):
    def found(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    def load(name):
        raise outcome
    monkeypatch.setattr(srupp_peers.metadata, "version", found)
    monkeypatch.setattr(srupp_peers.importlib, "import_module", load)
    module, note = peers.imported("sru", srupp_peers.load_official)
    assert (module, note) == (None, f"sru cannot be imported ({said}): its rows are left out")


def test_the_official_layout_of_W_o_and_back():
    p, h = 2, 5
    W = np.arange(p * 3 * h).reshape(p, 3 * h)
    theirs = srupp_peers.slices_last(W, h)
    assert (theirs.reshape(h, 3, p)[4, 1] == W[:, h + 4]).all()              # unit 4's forget gate
    assert (srupp_peers.slices_first(theirs, h) == W).all()


# ---- how it measures and judges --------------------------------------------------------------------------

@pytest.mark.parametrize("repeats", [1, 3, 15, 16])
def test_measure_alternates_and_calls_often_enough(repeats, monkeypatch):
    log = []

    @contextlib.contextmanager
    def limit(threads, user_api):
        log.append(threads)
        yield
    monkeypatch.setattr(measure, "THREADS", (1, 2))
    monkeypatch.setattr(measure, "threadpool_limits", limit)
    sides = [Side("", name, "", lambda name=name: log.append(name), None) for name in "ab"]
    timings = measure.measure(sides, repeats, 0)
    blocks = log.count(1) // 2
    assert log.count("a") >= 2 * (repeats + blocks)          # at both numbers of threads, and one untimed in each block
    assert [word for word in log if word in (1, 2)] == [1, 2, 1, 2] * blocks
    assert len(timings) == 2
    assert all(timing.ms <= timing.median_ms for timing in timings)


def test_blas_gets_the_threads_that_are_measured(monkeypatch):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    monkeypatch.setattr(measure, "THREADS", (1, 2))
    for count, limit in measure.thread_limits("numpy"):
        with limit():
            found = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
        assert found
        assert set(found) == {count}


def test_verdicts():
    quiet = Timing(10.0, 11.0, 1)

    def verdict(ours, theirs=quiet, not_judged=None):
        return bench.judge("LSTM", "torch.nn.LSTM", ours, theirs, not_judged)["verdict"]
    assert verdict(Timing(13.0, 14.0, 1)) == "met"
    assert verdict(Timing(13.1, 14.0, 1)) == "missed"
    assert verdict(Timing(9.0, 10.0, 1), Timing(10.0, 20.1, 2)) == "unsteady"
    assert verdict(Timing(9.0, 18.1, 1)) == "unsteady"
    assert verdict(Timing(9.0, 10.0, 1), not_judged="another size") == "not judged (another size)"
    assert bench.judge("IRNN", "torch.nn.RNN", quiet, quiet, None)["verdict"] == "no target"


@pytest.mark.parametrize(("argv", "others"), [
    ([], set()), (["-K", "9"], {"RRALSTM"}), (["-S", "99"], {"RRALSTM", "LSTM", "IRNN", "RWA", "URNN"}),
    (["--srupp-size", "128, 8,256,32"], {"SRUpp"}), (["--srupp-size", "128,8,256,64"], set())])
def test_targets_are_judged_at_their_own_size(argv, others):
    settings = parse(argv)
    assert {row for row in ROWS if bench.not_judged(row, settings) == "another size"} == others
    assert bench.not_judged("LSTM", parse(["--repeats", "14"])) == "under 15 calls"


def test_fit_finds_a_polynomial():
    n = np.array(FULL["over_L"])
    coefficients, farthest = measure.fit(n, 3 + 0.2 * n + 2e-4 * n**2, 2)
    assert coefficients == pytest.approx([3, 0.2, 2e-4])
    assert farthest < 1e-9
    assert measure.fit(n, 3 + 0.2 * n, 1)[0] == pytest.approx([3, 0.2])
    assert measure.fit(n, 3 + 0.2 * n + 2e-4 * n**2, 1)[1] > measure.STRAIGHT / 2
    assert measure.fit(n, 1e-3 * n**2, 1)[1] > measure.STRAIGHT


def test_memory():
    array, other = np.zeros((6, 10), "float32"), np.zeros(5)
    assert measure.bytes_of([array[:4], array.T, array[2:], other, 7, "causal", None]) == array.nbytes + other.nbytes
    assert measure.bytes_of([array[:2], array[4:]]) == array.nbytes * 4 // 6

    def memory(S, K):
        return measure.bytes_per_step(layers.make_layer("RRALSTM", 2, 32, K), *measure.upstream_and_input(10, S, 2, 32))
    base, longer = memory(50, 5), memory(400, 5)
    assert 28 <= base["cache_bytes"] < 32                    # i, f, o, g, h, c, tanh: 7 float32, then x and the past
    assert base["cache_bytes"] < base["peak_bytes"] < 90
    assert longer["cache_bytes"] <= base["cache_bytes"]
    assert longer["peak_bytes"] <= 1.1 * base["peak_bytes"]
    assert memory(400, 40)["peak_bytes"] < 1.2 * longer["peak_bytes"]


# ---- data and bad input ----------------------------------------------------------------------------------

def test_lengths():
    lengths = [len(words) + 2 for words in tsdae.random_sentences(500, 24, 100)]
    assert (min(lengths), max(lengths), lengths[0], len(set(lengths))) == (12, 24, 24, 13)
    ids, mask, labels = imdb.random_batch(FULL["imdb_size"])
    assert (ids.shape, ids.min() >= 2, ids.max() < 10_002, labels.tolist()) == ((16, 256), True, True, [0, 1] * 8)
    lengths = mask.sum(axis=1)
    assert (lengths[:12] == 256).all()
    assert ((lengths[12:] < 256) & (lengths[12:] >= 192)).all()
    assert not (mask[:, 1:] > mask[:, :-1]).any()


@pytest.mark.parametrize("argv", [
    ["--repeats", "0"], ["-S", "1"], ["--hidden", "x"], ["--batch-size", "-1"], ["--device", "tpu"], ["--lr", "1"],
    ["--only", "gru"], ["--only", ""], ["--srupp-size", "8,2,16"], ["--srupp-size", "1,2,16,4"],
    ["--srupp-size", "8,2,0,4"], ["--json", "{tmp}/nowhere/bench.json"], ["--json", "{tmp}"], ["--json", ""],
    ["--out", "{tmp}/nowhere/bench.png"]], ids=" ".join)
def test_bad_flags_are_one_line_and_status_2(argv, tmp_path, capsys):
    status, out, err = ran(capsys, *(word.format(tmp=tmp_path) for word in argv))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_report_does_not_replace_a_pipe(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, _, err = ran(capsys, "--quick", "--json", pipe)
    assert (status, err) == (2, f"error: --json '{pipe}' cannot be written; expected a file in an existing folder\n")
    assert pipe.is_fifo()


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    status, _, err = ran(capsys, "--device", "gpu", "--quick")
    assert status == 2
    assert err.startswith("error: device 'gpu' was asked for, but ")
