"""tasks/bench.py --device gpu on the stand-in for CuPy, its peers on the CPU: it runs, reports, judges and stops as it
says, moves nothing where it times, and its floors are counted rightly. No figure of speed is asserted here."""

import json
import math
import sys
import time

import fake_cupy
import numpy as np
import pytest
from fake_cupy import peek
from test_bench import ran

from minigrad import kernels
from minigrad.training.trainer import Trainer
from tasks import pixel_mnist
from tasks.bench import (
    flags as bench_flags,
    gpu as bench_gpu,
    gpu_costs as bench_gpu_costs,
    gpu_measure as bench_gpu_measure,
    gpu_peers as bench_gpu_peers,
    gpu_rows as bench_gpu_rows,
    main as bench,
    measure as bench_measure,
    peers as bench_peers,
    srupp as bench_srupp,
    tsdae as bench_tsdae,
)
from tasks.bench.gpu_costs import COSTS, FULL_GPU, QUICK_GPU
from tasks.bench.gpu_measure import GpuTiming, TimeIsUp
from tasks.frame import classify

QUICK = ["--device", "gpu", "--quick", "--repeats", "1"]
ROWS = list(bench_gpu_rows.ROWS)


def launch_nothing(family, name, dtype):
    """In the place of kernels.kernel: a launch is counted, and nothing is computed."""
    def launch(blocks, threads, *arguments):
        if all(blocks if isinstance(blocks, tuple) else (blocks,)):
            fake_cupy.launched(name)
    return launch


@pytest.fixture
def gpu(fake_gpu, monkeypatch):
    """The stand-in, the recurrence's launches empty; the layers run without kernels, and compute."""
    monkeypatch.setattr(launch, "kernel", launch_nothing)
    monkeypatch.setattr(bench_gpu_measure.gc, "collect", lambda *generation: 0)  # which takes its time
    monkeypatch.setitem(sys.modules, "torch", None)
    return fake_gpu


@pytest.fixture
def with_kernels(gpu, monkeypatch):
    """Everything goes through the kernels, which compute nothing."""
    monkeypatch.delenv(kernels.SWITCH)
    with np.errstate(all="ignore"):
        yield gpu


@pytest.fixture
def peers(fake_gpu, monkeypatch):
    """PyTorch on the CPU in the place of PyTorch on a GPU; nothing is compiled."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(launch, "kernel", launch_nothing)
    monkeypatch.setattr(bench_gpu_measure.gc, "collect", lambda *generation: 0)
    monkeypatch.setattr(bench_gpu_peers, "compiled", lambda torch, function: function)
    monkeypatch.setattr(bench_gpu_peers, "on_a_gpu", lambda: (torch, "cpu", "torch on the CPU"))
    with bench_peers.torch_limit(1):
        yield torch


def report_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


def minigrads(report):
    return [row["layer"] for row in report["table"] if row["side"] == "minigrad"]


# ---- a run -----------------------------------------------------------------------------------------------

def test_a_run_without_pytorch(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUPY_TF32", "1")
    status, out, _ = ran(capsys, *QUICK, "--json", tmp_path / "bench.json", "--out", tmp_path / "bench.png")
    assert status == 0, out
    report = report_of(tmp_path / "bench.json")
    assert minigrads(report) == ROWS == list(report["floors"]) == list(report["sizes"])
    assert all(set(GpuTiming._fields) < set(row) and row["min_ms"] <= row["ms"] for row in report["table"])
    assert all(row["ratio"] > 0 and row["bytes"] > 0 and row["ms"] > 0 for row in report["floors"].values())
    assert {"card", "multiprocessors", "memory_bytes", "cuda_runtime", "cuda_driver", "cupy", "command",
            "kernels", "variables"} <= set(report["environment"])
    assert set(report["rates"]) == {"copy_bytes", "matrix", "copy_tb_s", "product_tflop_s", "kernel_us", "dot_us"}
    assert report["floors"]["MNIST step"]["epoch"]["steps"] == 15_000
    assert "stand-in, 1 multiprocessors, 1 GiB; CUDA 13.0, driver 13.1; CuPy 14." in out
    assert "legacy default stream" in out
    assert "MINIGRAD_KERNELS=0: plain CuPy" in out
    assert report["environment"]["variables"]["CUPY_TF32"] == "1"
    assert "the figures may be others for it: CUPY_TF32=1" in out
    assert "torch cannot be imported" in out
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert fake_cupy.freed                                       # between the rows


def test_all_peers_agree_and_are_there(peers, tmp_path, capsys):
    status, out, _ = ran(capsys, *QUICK, "--json", tmp_path / "bench.json")
    assert status == 0, out
    report = report_of(tmp_path / "bench.json")
    assert (report["differing"], report["failed"], report["notes"]) == ([], [], [])
    ways = {(row["layer"], row["side"], row["way"]) for row in report["table"] if row["side"] != "minigrad"}
    eager, compiled = bench_gpu_peers.EAGER, bench_gpu_peers.COMPILED
    assert ways == {
        ("LSTM", "cuDNN float32", "batch first"), ("LSTM", "cuDNN float32", "time first"),
        ("LSTM", "cuDNN, TF32 allowed", "time first"), ("RRALSTM", "minigrad's LSTM", ""),
        *(("RRALSTM", eager, way) for way in bench_gpu_peers.RRA_WAYS), ("SRU", eager, "time first"),
        *(("SRUpp", eager, way) for way in bench_gpu_peers.SRUPP_WAYS),
        *(("attention", name, way) for name in (eager, compiled) for way in ("matmul", "SDPA")),
        *(("TSDAE step", eager, way) for way in bench_gpu_peers.TSDAE_WAYS),
        ("TSDAE step", compiled, bench_gpu_peers.TSDAE_WAYS[-1]), ("SRU", compiled, "time first"),
        ("SRUpp", compiled, bench_gpu_peers.SRUPP_WAYS[-1])}
    judged = [(row["layer"], row["side"]) for row in report["table"] if "ratio" in row]
    assert len(judged) == len(set(judged)) == len({way[:2] for way in ways})           # of each side its quickest way
    assert {key for key in judged if key in bench_gpu.TARGETS} == {
        ("LSTM", "cuDNN float32"), ("RRALSTM", "minigrad's LSTM"), ("SRUpp", eager)}
    assert all(row["verdict"] == "not judged (another size)" for row in report["table"] if row.get("at_most"))


def test_a_wrong_peer_is_noted_and_not_timed(peers, monkeypatch, tmp_path, capsys):
    right = bench_gpu_peers.sdpa
    monkeypatch.setattr(bench_gpu_peers, "sdpa", lambda torch, q, k, v: right(torch, 1.01 * q, k, v))
    status, out, err = ran(capsys, *QUICK, "--only", "attention", "--json", tmp_path / "bench.json")
    assert status == 1
    assert err == "stopped: 2 peers differ from minigrad (above)\n"         # eager and compiled
    assert "attention by PyTorch eager (SDPA) differs from minigrad and is not measured: " in out
    assert {row["way"] for row in report_of(tmp_path / "bench.json")["table"]} == {"", "matmul"}


@pytest.mark.parametrize("function", ["through", "torch_lstm"])
def test_a_peer_that_fails_leaves_the_rest(function, peers, monkeypatch, tmp_path, capsys):
    def fail(*arguments):
        raise RuntimeError("CUDA out of memory\nmore")
    monkeypatch.setattr(bench_gpu_peers, function, fail)
    status, out, _ = ran(capsys, *QUICK, "--only", "lstm,attention", "--json", tmp_path / "bench.json")
    assert status == 0
    assert "failed: RuntimeError: CUDA out of memory\n" in out
    assert minigrads(report_of(tmp_path / "bench.json")) == ["LSTM", "attention"]


@pytest.mark.parametrize("error", [MemoryError("out of memory allocating 5 bytes"), kernels.KernelError("no compiler")])
def test_a_row_that_fails_leaves_the_others(error, gpu, monkeypatch, tmp_path, capsys):
    def fail(settings):
        raise error
    monkeypatch.setitem(bench_gpu_rows.ROWS, "LSTM", fail)
    status, out, err = ran(capsys, *QUICK, "--only", "sru,lstm,rra", "--json", tmp_path / "bench.json")
    assert status == 1
    assert err == "stopped: 1 of minigrad's own rows failed (above)\n"
    assert f"LSTM failed: {type(error).__name__}: {error}" in out
    assert "RRALSTM is judged by minigrad's LSTM, which was not measured" in out
    report = report_of(tmp_path / "bench.json")
    assert report["failed"] == ["LSTM"]
    assert minigrads(report) == ["SRU recurrence", "RRALSTM", "SRU"]


def test_a_run_that_is_killed_has_left_what_it_measured(gpu, monkeypatch, tmp_path, capsys):
    def kill(settings):
        raise KeyboardInterrupt
    monkeypatch.setitem(bench_gpu_rows.ROWS, "LSTM", kill)
    status, _, _ = ran(capsys, *QUICK, "--json", tmp_path / "bench.json")
    assert status == 130
    assert minigrads(report_of(tmp_path / "bench.json")) == ["SRU recurrence"]


def test_no_time_at_all(gpu, tmp_path, capsys):
    status, out, _ = ran(capsys, *QUICK, "--seconds", "0", "--json", tmp_path / "bench.json", "--out",
                         tmp_path / "bench.png")
    assert status == 0
    report = report_of(tmp_path / "bench.json")
    assert (report["table"], report["rates"]) == ([], None)
    assert [note for note in report["notes"] if "not reached" in note] == [
        f"{what}: not reached in 0 s" for what in ("the card's rates", *ROWS)]
    assert "MNIST step: not reached in 0 s" in out


def test_time_that_ends_before_the_peers(peers, monkeypatch, tmp_path, capsys):
    ended = []
    monkeypatch.setattr(bench_gpu, "add_our_lstm", lambda *arguments: ended.append(True))
    monkeypatch.setattr(bench_gpu.Clock, "is_over", lambda clock: bool(ended))
    status, out, _ = ran(capsys, *QUICK, "--only", "rra,mnist", "--seconds", "30", "--json", tmp_path / "bench.json")
    assert status == 0
    assert minigrads(report_of(tmp_path / "bench.json")) == ["RRALSTM"]
    assert "what RRALSTM is compared with: not reached in 30 s" in out
    assert "MNIST step: not reached in 30 s" in out


def test_a_compilation_that_takes_too_long(peers, monkeypatch, tmp_path, capsys):
    def slow(torch, function):
        def call(*inputs):
            try:
                time.sleep(60)
            except Exception:                                    # as a library may have it: it must not stop the alarm
                return None
        return call
    monkeypatch.setattr(bench_gpu_peers, "compiled", slow)
    monkeypatch.setattr(bench_gpu, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(bench_gpu_measure, "reset_compiler", lambda torch: None)
    status, out, _ = ran(capsys, *QUICK, "--only", "attention", "--json", tmp_path / "bench.json")
    assert status == 0
    assert "attention by torch.compile (SDPA): not compiled in 0 s" in out
    assert {row["side"] for row in report_of(tmp_path / "bench.json")["table"]} == {"minigrad", "PyTorch eager"}


def test_time_that_ends_among_the_peers(peers, monkeypatch, tmp_path, capsys):
    real, tried = bench_gpu.try_peer, []

    def once(*arguments):
        tried.append(True)
        real(*arguments)
    monkeypatch.setattr(bench_gpu, "try_peer", once)
    monkeypatch.setattr(bench_gpu.Clock, "is_over", lambda clock: bool(tried))
    status, out, _ = ran(capsys, *QUICK, "--only", "attention", "--seconds", "30", "--json", tmp_path / "bench.json")
    assert status == 0
    assert [row["way"] for row in report_of(tmp_path / "bench.json")["table"]] == ["", "matmul"]
    assert "attention by PyTorch eager (SDPA): not reached in 30 s" in out
    assert "attention by torch.compile: not reached in 30 s" in out


@pytest.mark.slow
def test_pytorch_traces_what_is_compiled(peers, monkeypatch, tmp_path, capsys):
    """By its own front end; nothing is compiled for a machine."""
    monkeypatch.setattr(bench_gpu_peers, "compiled", lambda torch, function: torch.compile(
        function, backend="eager", fullgraph=True, dynamic=False))
    status, out, _ = ran(capsys, *QUICK, "--only", "srupp,tsdae", "--json", tmp_path / "bench.json")
    assert status == 0, out
    report = report_of(tmp_path / "bench.json")
    assert report["notes"] == []
    compiled = [row["layer"] for row in report["table"] if row["side"] == bench_gpu_peers.COMPILED]
    assert compiled == ["TSDAE step", "SRUpp"]


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_gpu_peers, "compiled", lambda torch, function: function)
    status, out, _ = ran(capsys, *QUICK, "--json", tmp_path / "bench.json", "--out", tmp_path / "bench.png")
    assert status == 0, out
    assert minigrads(report_of(tmp_path / "bench.json")) == ROWS


# ---- what is timed ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ROWS)
def test_what_is_timed_moves_nothing_but_a_batch(name, with_kernels):
    call = bench_gpu_rows.ROWS[name](QUICK_GPU).ours.call
    for _ in range(2):                                           # the first sends the optimizer's tables
        call()
    with fake_cupy.transfers() as moved:
        call()
    batch = ["to_device"] * 2 if name == "MNIST step" else []    # images, labels
    assert [kind for kind, _ in moved] == batch


COUNTED = {"SRU recurrence": [{}], "LSTM": [{}, {"lstm_size": (3, 31, 2, 8)}], "SRU": [{}],
           "RRALSTM": [{}, {"lstm_size": (3, 31, 2, 8), "window": 5}],
           "SRUpp": [{}, {"srupp_size": (1030, 2, 4, 2)}, {"srupp_size": (2050, 2, 4, 2)}], "attention": [{}],
           "TSDAE step": [{}, {"tsdae_size": (4, 10, 16, 2, 4, 40)}], "MNIST step": [{}, {"mnist_size": (4, 7, 16)}]}


@pytest.mark.parametrize("name", ROWS)
def test_launches_are_counted(name, with_kernels):
    """A step's exactly; what is made once a call may change a little with the layers: then the formula's constant is to
    follow, at 10 % at the latest."""
    counts = []
    for settings in COUNTED[name]:
        settings = {**QUICK_GPU, **settings}
        call = bench_gpu_rows.ROWS[name](settings).ours.call
        call()
        with fake_cupy.launches() as launched:
            call()
        counts.append((len(launched), COSTS[name](settings).launches))
    for counted, formula in counts:
        assert counted == pytest.approx(formula, rel=0.1)
    if name in ("LSTM", "RRALSTM", "MNIST step"):
        (first, first_formula), (second, second_formula) = counts
        assert second - first == second_formula - first_formula


def test_the_mnist_step_is_the_trainers(gpu, tmp_path):
    row = bench_gpu_rows.mnist_step(QUICK_GPU)
    model, _, batches, _ = row.ours.call.args
    how = bench_gpu_rows.mnist_settings(QUICK_GPU)
    other = pixel_mnist.build(how, "rra").to_device("gpu")
    trainer = Trainer(other, classify.optimizer_of(how, other.parameters()), batches, classify.forward_backward,
                      lambda model: {"x": 0.0}, out=tmp_path, best="x", device="gpu", quiet=True,
                      **classify.clip_settings(how))
    assert (how["optimizer"], trainer.clip_norm, trainer.clip_value) == ("rmsprop", None, None)
    for _ in range(2):
        row.ours.call()
    trainer.train(2)
    for ours, theirs in zip(model.parameters(), other.parameters()):
        np.testing.assert_array_equal(peek(ours.value), peek(theirs.value))


def test_the_rates_take_what_memory_there_is(gpu, monkeypatch):
    monkeypatch.setattr(gpu.cuda.runtime, "memGetInfo", lambda: (40_000, 60_000))
    found = bench_gpu_measure.rates(QUICK_GPU)
    assert (found["copy_bytes"], found["matrix"]) == (1 << 13, 16)
    assert all(value > 0 for value in found.values())


class Ticks:
    """A clock at which every call takes a millisecond more than the last one."""

    def __init__(self):
        self.marks, self.waits = 0, 0

    def mark(self):
        self.marks += 1
        return self.marks

    def wait(self, mark):
        self.waits += 1

    def ms(self, first, second):
        return float(first - self.warm_ups)

    @property
    def warm_ups(self):
        return self.waits - 1


def test_measuring(monkeypatch):
    clock, calls = Ticks(), []
    timing = bench_gpu_measure.measure(lambda: calls.append(1), clock, 4)
    assert len(calls) == clock.warm_ups + 4
    assert clock.warm_ups >= bench_gpu_measure.WARM_UP
    assert timing[:2] == (2.5, 1.0)
    assert timing.spread == pytest.approx(1.5 / 2.5)
    assert timing.calls == 4
    monkeypatch.setattr(bench_gpu_measure, "MOST_SECONDS", 0.01)
    assert bench_gpu_measure.measure(lambda: time.sleep(0.01), Ticks(), 9).calls == bench_gpu_measure.LEAST_CALLS


def test_the_time_limit():
    with pytest.raises(TimeIsUp, match=r"^0 s were up$"), bench_gpu_measure.time_limit(0.01):
        time.sleep(5)
    with bench_gpu_measure.time_limit(5):
        pass
    time.sleep(0.02)


# ---- verdicts and floors ---------------------------------------------------------------------------------

def test_verdicts_at_their_limits():
    def verdict(name, side, ours, theirs, settings=FULL_GPU):
        return bench_gpu.judged(name, side, GpuTiming(ours, ours, 0.0, 30), theirs, settings)["verdict"]
    for (name, side), at_most in bench_gpu.TARGETS.items():
        theirs = 10.0 if side == "floor" else GpuTiming(10.0, 9.0, 0.0, 30)
        assert verdict(name, side, 10 * at_most, theirs) == "met"
        assert verdict(name, side, 10.01 * at_most, theirs) == "missed"
        assert verdict(name, side, 1.0, theirs, QUICK_GPU) == "not judged (another size)"
    assert verdict("LSTM", "cuDNN float32", 1.0, GpuTiming(10.0, 4.9, 0.0, 30)) == "unsteady"
    assert verdict("LSTM", bench_gpu_peers.TF32, 1.0, GpuTiming(1.0, 1.0, 0.0, 30)) == "no target"


@pytest.mark.parametrize(("ms", "verdict"), [(50.0, "met"), (50.1, "missed")])
def test_the_epoch(ms, verdict):
    report = {"rates": None, "floors": {}}
    bench_gpu.add_floor(report, "MNIST step", GpuTiming(ms, ms, 0.0, 30), FULL_GPU)
    epoch = report["floors"]["MNIST step"]["epoch"]
    assert epoch == {"steps": 1200, "seconds": pytest.approx(1.2 * ms), "at_most": 60, "verdict": verdict}


def size_of(layer):
    return sum(parameter.value.size for parameter in layer.parameters())


def test_costs_by_hand():
    """Of the smallest sizes; parameters as the layers have them."""
    one = {"sru_size": (1, 1, 1), "lstm_size": (1, 1, 1, 1), "window": 1, "srupp_size": (1, 1, 1, 1),
           "attention_size": (1, 1, 2, 3), "mnist_size": (1, 28, 1), "tsdae_size": (1, 4, 4, 2, 1, 9)}
    cost = {name: of(one) for name, of in COSTS.items()}
    forward = 3 + 1 + 4 + 1, 1 + 1                               # u, x, the vectors, c_0; c, h
    backward = 3 + 1 + 4 + 2 + 1, 3 + 1 + 1 + 4                  # u, x, the vectors, cs, dh; du, dx, dc_0, the sums
    assert cost["SRU recurrence"] == (4 * (sum(forward) + sum(backward)), 0, 2)
    assert cost["LSTM"][:2] == (4 * (4 + 2 * 12), 3 * 2 * 2 * 4)
    assert cost["RRALSTM"][:2] == (4 * (4 + 2 * 13), 3 * (2 * 2 * 4 + 2))
    assert cost["SRU"][:2] == (4 * (4 + 2 * 7), 3 * 2 * 3)
    assert cost["SRUpp"][:2] == (4 * (4 + 2 * 13), 3 * 2 * (1 + 2 + 2 + 3))
    assert cost["attention"][:2] == (4 * 8 * 2 * 3, 6 * 2 * 2 * 2 * 3)
    assert cost["MNIST step"][:2] == (4 * (1 + 5 * (12 + 1 + 20)) + 8, 3 * (2 * 2 * 4 + 2) + 3 * 2 * 10)
    _, noisy, _, clean = bench_tsdae.make_batch(one["tsdae_size"])
    n, m = noisy.sum(), clean[:, 1:].sum()                       # words read, words written, [CLS] and [SEP] among them
    attended = n * n + m * (m + 1) // 2
    products = (n + m) * 12 * 16 + 2 * 4 * attended + 2 * 16 + m * (16 + 4 * 9)
    parameters = size_of(bench_tsdae.make_model(one["tsdae_size"]))
    assert cost["TSDAE step"] == (28 * parameters + 16 * (n + m), 6 * products, 335)


def test_parameters_are_those_of_the_layers():
    for d, h, K in [(2, 5, 0), (3, 4, 7)]:
        layer = bench_measure.make_layer("RRALSTM", d, h, K) if K else bench_measure.make_layer("LSTM", d, h, None)
        read = bench_gpu_costs.lstm({"lstm_size": (1, 1, d, h)}, K).bytes // 4 - 2 * (d + h)
        assert read == 2 * size_of(layer)
    L, B, d, p = size = 3, 2, 6, 4
    assert COSTS["SRUpp"]({"srupp_size": size}).bytes // 4 - 4 * L * B * d == 2 * size_of(bench_srupp.make_srupp(d, p))
    for size in [(4, 10, 16, 2, 2, 40), (1, 7, 12, 3, 1, 30)]:
        assert bench_gpu_costs.tsdae_parameters(size) == size_of(bench_tsdae.make_model(size))
    model = pixel_mnist.build(bench_gpu_rows.mnist_settings(QUICK_GPU), "rra")
    B, stride, _ = QUICK_GPU["mnist_size"]
    assert COSTS["MNIST step"](QUICK_GPU).bytes == 4 * (B * (28 // stride)**2 + 5 * size_of(model)) + 8 * B


@pytest.mark.parametrize("name", ROWS)
def test_costs_grow_with_every_size(name):
    cost, (key, *_) = COSTS[name], bench_gpu_costs.SIZES[name]
    for n, value in enumerate(FULL_GPU[key]):
        if (key, n) in (("attention_size", 1), ("tsdae_size", 3)):           # the heads share the same width
            continue
        larger = value // 2 if (key, n) == ("mnist_size", 1) else 2 * value
        size = tuple(larger if axis == n else other for axis, other in enumerate(QUICK_GPU[key]))
        if (key, n) == ("mnist_size", 1):
            size = (QUICK_GPU[key][0], 7, QUICK_GPU[key][2])
        small, large = cost(QUICK_GPU), cost({**QUICK_GPU, key: size})
        assert all(a <= b for a, b in zip(small, large))
        assert large.bytes > small.bytes
        assert large.flops > small.flops or name == "SRU recurrence"


def test_a_floor_is_the_larger_of_the_two():
    cost = bench_gpu_costs.Cost(4_000_000, 30_000_000, 5)
    assert bench_gpu_costs.floor_ms(cost, 2.0, 10.0) == pytest.approx(0.003)
    assert bench_gpu_costs.floor_ms(cost, 0.5, 10.0) == pytest.approx(0.008)
    assert bench_gpu_costs.launches_ms(cost, 8.0) == pytest.approx(0.04)


# ---- --estimate ------------------------------------------------------------------------------------------

def test_estimates_need_no_cupy(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    status, out, _ = ran(capsys, "--estimate", "--rates", "2,10,5", "--json", tmp_path / "bench.json")
    assert status == 0
    assert out.startswith("ESTIMATES from assumed rates, not measurements: 2 TB/s copied, 10 TFLOP/s of a float32 "
                          "product, 5 us a launch")
    rows = {row["layer"]: row for row in report_of(tmp_path / "bench.json")["estimates"]}
    assert list(rows) == ROWS
    lstm = rows["LSTM"]
    assert (lstm["launches"], lstm["ms"]) == (3156, pytest.approx(15.78))
    assert lstm["floor_ms"] == pytest.approx(6 * 50 * 784 * 256 * 4 * 257 / 1e10)
    for row in rows.values():
        assert row["ms"] == max(row["floor_ms"], row["launches_ms"])
        assert f"\n{row['layer']} " in out
    assert "an epoch of 1,200 such steps: " in out


def test_estimates_of_some_rows(capsys):
    status, out, _ = ran(capsys, "--estimate", "--quick", "--only", "mnist,sru")
    assert status == 0
    assert [line.split("  ")[0] for line in out.splitlines()[3:]] == ["SRU recurrence", "SRU", "MNIST step", ""]


# ---- flags -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("argv", "says"), [
    (["--device", "gpu", "--only", "imdb"], "--only has 'imdb', which is not measured with --device gpu; expected "
     "names among sru, lstm, rra, srupp, attention, tsdae, mnist"),
    (["--only", "lstm,mnist"], "--only has 'mnist', which is not measured with --device cpu; expected names among "
     "rra, lstm, rnns, srupp, tsdae, imdb"),
    (["--device", "auto", "--only", "gru"], "argument --only: 'gru'; expected names among rra, lstm, rnns, "),
    (["--device", "gpu", "--hidden", "8"], "--hidden has a meaning with --device cpu only; the device is the gpu"),
    (["--device", "auto", "--rows-only"], "--rows-only has a meaning with --device cpu only; the device is the gpu"),
    (["--seconds", "3"], "--seconds has a meaning with --device gpu only; the device is the cpu"),
    (["--device", "gpu", "--seconds", "-1"], "argument --seconds: '-1'; expected a finite number of at least 0"),
    (["--rates", "1,2,3"], "--rates has a meaning with --estimate only"),
    (["--estimate", "--rates", "1,2"], "argument --rates: '1,2'; expected three numbers TB/S,TFLOP/S,US"),
    (["--estimate", "--rates", "1,0,2"], "argument --rates: '0'; expected a finite number above 0"),
    (["--estimate", "--device", "cpu"], "--estimate is of the rows of --device gpu; --device cpu was given"),
    (["--estimate", "--out", "x.png"], "--out has no meaning with --estimate, which measures nothing"),
    (["--estimate", "-K", "3"], "--window has a meaning with --device cpu only; the device is the gpu"),
    (["--estimate", "--only", "rnns"], "--only has 'rnns', which is not measured with --device gpu; ")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_flags(argv, says, gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = ran(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {says}")
    assert err.count("\n") == 1


def test_the_device_is_chosen_as_everywhere(gpu, monkeypatch):
    assert bench.parse(["--device", "auto"])["only"] == bench_gpu_costs.PARTS
    assert bench.parse([])["only"] == bench_flags.PARTS
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert bench.parse(["--device", "auto"])["device"] == "cpu"


def test_full_sizes_are_the_issues():
    assert math.prod(FULL_GPU["lstm_size"]) == 50 * 784 * 256
    settings = bench_gpu_rows.mnist_settings(FULL_GPU)
    paper = pixel_mnist.parse(["--paper"])
    assert {key: value for key, value in settings.items() if paper[key] != value} == {}
