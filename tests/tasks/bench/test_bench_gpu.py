"""The bench on a GPU, here on the stand-in for CuPy with PyTorch on the CPU: it runs, reports, judges and stops as it
says, and moves nothing where it times. No figure of speed is asserted here."""

import json
import sys
import time

import fake_cupy
import numpy as np
import pytest
from test_bench import ran

from minigrad import kernels
from minigrad.kernels import launch
from tasks.bench import gpu, gpu_measure, gpu_peers, gpu_rows
from tasks.bench.flags import FULL_GPU, PARTS, QUICK_GPU, parse
from tasks.bench.gpu_measure import GpuTiming, TimeIsUp
from tasks.bench.layers import make_layer
from tasks.bench.measure import torch_threads
from tasks.bench.peers import EAGER

QUICK = ["--device", "gpu", "--quick", "--repeats", "1"]
ROWS = list(gpu_rows.ROWS)


class HostClock:
    """For PyTorch on the CPU, where every call is finished when it returns."""

    def __init__(self, torch):
        self.mark = time.perf_counter

    def wait(self, mark):
        pass

    def ms(self, first, second):
        return 1e3 * (second - first)


@pytest.fixture
def stand_in(fake_gpu, monkeypatch):
    """The stand-in for CuPy, without PyTorch. Launches compute nothing; the layers run without kernels, and compute."""
    monkeypatch.setattr(launch, "kernel", lambda family, name, dtype: lambda *arguments: None)
    monkeypatch.setattr(gpu_measure.gc, "collect", lambda *generation: 0)    # which takes its time
    monkeypatch.setitem(sys.modules, "torch", None)
    return fake_gpu


@pytest.fixture
def peers(fake_gpu, monkeypatch):
    """The same with PyTorch on the CPU in place of PyTorch on a GPU; nothing is compiled."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(launch, "kernel", lambda family, name, dtype: lambda *arguments: None)
    monkeypatch.setattr(gpu_measure.gc, "collect", lambda *generation: 0)
    monkeypatch.setattr(gpu_peers, "compiled", lambda torch, function: function)
    monkeypatch.setattr(gpu, "TorchClock", HostClock)
    monkeypatch.setattr(gpu_peers, "on_a_gpu", lambda: (torch, "cpu", "torch on the CPU"))
    with torch_threads(1):
        yield torch


def report_of(folder):
    return json.loads((folder / "bench.json").read_text(encoding="utf-8"))


def sides(report, *names):
    """[layer] of the lines of these sides."""
    return [row["layer"] for row in report["table"] if row["side"] in names]


# ---- a run -----------------------------------------------------------------------------------------------

def test_a_run_without_pytorch(stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUPY_TF32", "1")
    status, out, _ = ran(capsys, *QUICK, "--json", tmp_path / "bench.json", "--out", tmp_path / "bench.png")
    assert status == 0, out
    report = report_of(tmp_path)
    assert sides(report, "minigrad") == ROWS == sides(report, "floor") == list(report["sizes"])
    assert all(set(GpuTiming._fields) < set(row) and 0 < row["min_ms"] <= row["ms"] for row in report["table"])
    assert {"card", "multiprocessors", "memory_bytes", "cuda_runtime", "cuda_driver", "cupy", "command",
            "kernels", "variables"} <= set(report["environment"])
    assert set(report["rates"]) == {"copy_bytes", "matrix", "copy_tb_s", "product_tflop_s", "kernel_us", "dot_us"}
    for words in ("stand-in, 1 multiprocessors, 1 GiB; CUDA 13.0, driver 13.1; CuPy 14.", "MINIGRAD_KERNELS=0: plain",
                  "which may change the figures: CUPY_TF32=1", "torch cannot be imported", "\n  an epoch of them: "):
        assert words in out
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert fake_cupy.freed                                       # between the rows


def test_all_peers_agree_and_are_there(peers, tmp_path, capsys):
    status, out, _ = ran(capsys, *QUICK, "--json", tmp_path / "bench.json")
    assert status == 0, out
    report = report_of(tmp_path)
    assert (report["differing"], report["failed"], report["notes"]) == ([], [], [])
    rows = {(row["layer"], row["side"], row["way"]): row for row in report["table"] if row["side"] != "floor"}
    compiled = gpu_peers.COMPILED
    assert {key for key in rows if key[1] != "minigrad"} == {
        ("LSTM", "cuDNN float32", "batch first"), ("LSTM", "cuDNN float32", "time first"),
        ("RRALSTM", "minigrad's LSTM", ""), ("RRALSTM", EAGER, "one product"), ("RRALSTM", EAGER, "four blocks"),
        *(("SRU", name, "time first") for name in (EAGER, compiled)),
        *((layer, name, way) for layer in ("SRUpp", "attention") for name in (EAGER, compiled)
          for way in ("matmul", "SDPA")),
        *(("TSDAE step", EAGER, f"{way}, {where}") for way in ("matmul", "SDPA") for where in ("padded", "real rows")),
        ("TSDAE step", compiled, "SDPA, real rows")}
    judged = [key for key, row in rows.items() if "ratio" in row]
    assert len(judged) == len({key[:2] for key in rows if key[1] != "minigrad"})       # of each side its fastest way
    for key in judged:
        assert rows[key]["ratio"] == pytest.approx(rows[key[0], "minigrad", ""]["ms"] / rows[key]["ms"])
        assert rows[key]["ms"] == min(row["ms"] for other, row in rows.items() if other[:2] == key[:2])
        assert rows[key]["verdict"] == ("not judged (another size)" if rows[key]["at_most"] else "no target")
    assert {key[:2] for key in judged if rows[key]["at_most"]} == {
        ("LSTM", "cuDNN float32"), ("RRALSTM", "minigrad's LSTM"), ("SRUpp", EAGER)}


def test_a_wrong_peer_is_noted_and_not_timed(peers, monkeypatch, tmp_path, capsys):
    right = gpu_peers.sdpa
    monkeypatch.setattr(gpu_peers, "sdpa", lambda torch, q, k, v: right(torch, 1.01 * q, k, v))
    status, out, err = ran(capsys, *QUICK, "--only", "attention", "--json", tmp_path / "bench.json")
    assert (status, err) == (1, "stopped: 2 peers differ from minigrad (above)\n")     # eager and compiled
    assert "attention by PyTorch eager (SDPA) differs from minigrad and is not measured: " in out
    assert {row["way"] for row in report_of(tmp_path)["table"] if row["side"] != "floor"} == {"", "matmul"}


@pytest.mark.parametrize("function", ["through", "torch_lstm"])
def test_a_peer_that_fails_leaves_the_rest(function, peers, monkeypatch, tmp_path, capsys):
    def fail(*arguments):
        raise RuntimeError("CUDA out of memory\nmore")
    monkeypatch.setattr(gpu_peers, function, fail)
    status, out, _ = ran(capsys, *QUICK, "--only", "lstm,attention", "--json", tmp_path / "bench.json")
    assert status == 0
    assert "failed: RuntimeError: CUDA out of memory\n" in out
    assert sides(report_of(tmp_path), "minigrad") == ["LSTM", "attention"]


@pytest.mark.parametrize("error", [MemoryError("out of memory"), kernels.KernelError("no compiler")])
def test_a_row_that_fails_leaves_the_others(error, stand_in, monkeypatch, tmp_path, capsys):
    def fail(settings):
        raise error
    monkeypatch.setitem(gpu_rows.ROWS, "LSTM", fail)
    status, out, err = ran(capsys, *QUICK, "--only", "sru,lstm,rra", "--json", tmp_path / "bench.json")
    assert (status, err) == (1, "stopped: 1 of minigrad's own rows failed (above)\n")
    assert f"LSTM failed: {type(error).__name__}: {error}" in out
    assert "RRALSTM is judged by minigrad's LSTM, which was not measured" in out
    report = report_of(tmp_path)
    assert report["failed"] == ["LSTM"]
    assert sides(report, "minigrad") == ["SRU recurrence", "RRALSTM", "SRU"]


def test_a_run_that_is_killed_has_left_what_it_measured(stand_in, monkeypatch, tmp_path, capsys):
    def kill(settings):
        raise KeyboardInterrupt
    monkeypatch.setitem(gpu_rows.ROWS, "LSTM", kill)
    assert ran(capsys, *QUICK, "--json", tmp_path / "bench.json")[0] == 130
    assert sides(report_of(tmp_path), "minigrad") == ["SRU recurrence"]


def test_no_time_at_all(stand_in, tmp_path, capsys):
    files = "--json", tmp_path / "bench.json", "--out", tmp_path / "bench.png"
    status, out, _ = ran(capsys, *QUICK, "--seconds", "0", *files)
    assert status == 0
    report = report_of(tmp_path)
    assert (report["table"], report["rates"]) == ([], None)
    assert [note for note in report["notes"] if "not reached" in note] == [
        f"{what}: not reached in 0 s" for what in ("the card's rates", *ROWS)]
    assert "MNIST step: not reached in 0 s" in out


def test_time_that_ends_between_the_peers(peers, monkeypatch, tmp_path, capsys):
    real, tried = gpu.Bench.try_peer, []

    def once(*arguments):
        tried.append(True)
        real(*arguments)
    monkeypatch.setattr(gpu.Bench, "try_peer", once)
    monkeypatch.setattr(gpu.Bench, "left", lambda bench: 0 if tried else 30)
    status, out, _ = ran(capsys, *QUICK, "--only", "attention,mnist", "--seconds", "30", "--json",
                         tmp_path / "bench.json")
    assert status == 0
    assert [row["way"] for row in report_of(tmp_path)["table"] if row["side"] != "floor"] == ["", "matmul"]
    for what in ("attention by PyTorch eager (SDPA)", "attention by torch.compile", "MNIST step"):
        assert f"{what}: not reached in 30 s" in out


def test_a_compilation_that_takes_too_long(peers, monkeypatch, tmp_path, capsys):
    def slow(torch, function):
        def call(*inputs):
            try:
                time.sleep(60)
            except Exception:                                    # as a library may have it: it must not stop the alarm
                return None
        return call
    monkeypatch.setattr(gpu_peers, "compiled", slow)
    monkeypatch.setattr(gpu, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(gpu_measure, "reset_compiler", lambda: None)
    status, out, _ = ran(capsys, *QUICK, "--only", "attention", "--json", tmp_path / "bench.json")
    assert status == 0
    assert "attention by torch.compile (SDPA): not compiled in 0 s" in out
    assert gpu_peers.COMPILED not in {row["side"] for row in report_of(tmp_path)["table"]}


@pytest.mark.slow
def test_pytorch_traces_what_is_compiled(peers, monkeypatch, tmp_path, capsys):
    """By its own front end; nothing is compiled for a machine."""
    monkeypatch.setattr(gpu_peers, "compiled", lambda torch, function: torch.compile(
        function, backend="eager", fullgraph=True, dynamic=False))
    status, out, _ = ran(capsys, *QUICK, "--only", "srupp,tsdae", "--json", tmp_path / "bench.json")
    assert status == 0, out
    report = report_of(tmp_path)
    assert report["notes"] == []
    assert sides(report, gpu_peers.COMPILED) == ["TSDAE step", "SRUpp", "SRUpp"]


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_peers, "compiled", lambda torch, function: function)
    status, out, _ = ran(capsys, *QUICK, "--json", tmp_path / "bench.json", "--out", tmp_path / "bench.png")
    assert status == 0, out
    assert sides(report_of(tmp_path), "minigrad") == ROWS


# ---- what is timed ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ROWS)
def test_what_is_timed_moves_nothing_but_a_batch(name, stand_in, monkeypatch):
    monkeypatch.delenv(kernels.SWITCH)                           # everything through the kernels, which compute nothing
    call = gpu_rows.ROWS[name](QUICK_GPU).ours.call
    with np.errstate(all="ignore"):
        for _ in range(2):                                       # the first sends the optimizer's tables
            call()
        with fake_cupy.transfers() as moved:
            call()
    assert [kind for kind, _ in moved] == (["to_device"] * 2 if name == "MNIST step" else [])    # images, labels


def test_the_floors_bytes_and_flops(stand_in):
    """Of the layers by hand: every product is 2 m n k, three times; every array is read or written once."""
    rows = {name: make(QUICK_GPU) for name, make in gpu_rows.ROWS.items() if name != "TSDAE step"}
    (B, T, d, h), K, (L, C, w) = QUICK_GPU["lstm_size"], QUICK_GPU["window"], QUICK_GPU["sru_size"]
    parameters = sum(parameter.value.size for parameter in make_layer("RRALSTM", d, h, K).parameters())
    assert (rows["RRALSTM"].bytes, rows["RRALSTM"].flops) == (
        8 * (B * T * (d + h) + parameters), 3 * 2 * B * T * h * (4 * (d + h) + K))
    assert rows["RRALSTM"].flops - rows["LSTM"].flops == 3 * 2 * B * T * h * K
    assert rows["SRU"].flops == 3 * 2 * L * C * w * 3 * w
    assert rows["SRU recurrence"].bytes == 4 * (16 * L * C * w + 8 * w + C * w * 7)
    L, B, d, p = QUICK_GPU["srupp_size"]
    assert rows["SRUpp"].flops == 3 * 2 * B * L * (4 * d * p + 2 * p * p + 2 * p * (L + 1) // 2)
    B, _, L, d = QUICK_GPU["attention_size"]
    assert (rows["attention"].bytes, rows["attention"].flops) == (4 * 8 * B * L * d, 3 * 2 * 2 * B * L * L * d)


# ---- how it measures and judges --------------------------------------------------------------------------

def test_the_rates_fit_into_the_memory(stand_in, monkeypatch):
    monkeypatch.setattr(stand_in.cuda.runtime, "memGetInfo", lambda: (40_000, 60_000))
    found = gpu_measure.rates(QUICK_GPU)
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
    timing = gpu_measure.measure(lambda: calls.append(1), clock, 4)
    assert len(calls) == clock.warm_ups + 4
    assert clock.warm_ups >= gpu_measure.WARM_UP
    assert timing == (2.5, 1.0, pytest.approx(1.5 / 2.5), 4)
    monkeypatch.setattr(gpu_measure, "MOST_SECONDS", 0.01)
    assert gpu_measure.measure(lambda: time.sleep(0.01), Ticks(), 9).calls == gpu_measure.LEAST_CALLS


def test_the_time_limit():
    with pytest.raises(TimeIsUp, match=r"^0 s were up$"), gpu_measure.time_limit(0.01):
        time.sleep(5)
    with gpu_measure.time_limit(5):
        pass
    time.sleep(0.02)


def bench_of(settings, rates=None):
    """A Bench that has measured nothing."""
    bench = object.__new__(gpu.Bench)
    bench.settings, bench.report = settings, {"table": [], "rates": rates}
    return bench


def test_verdicts_at_their_limits():
    def verdict(name, side, ours, theirs, settings=FULL_GPU):
        return bench_of(settings).judged(name, side, GpuTiming(ours, ours, 0.0, 30), theirs)["verdict"]
    theirs = GpuTiming(10.0, 9.0, 0.0, 30)
    for (name, side), at_most in gpu.TARGETS.items():
        assert verdict(name, side, 10 * at_most, theirs) == "met"
        assert verdict(name, side, 10.01 * at_most, theirs) == "missed"
        assert verdict(name, side, 1.0, theirs, QUICK_GPU) == "not judged (another size)"
    assert verdict("LSTM", gpu_peers.CUDNN, 1.0, GpuTiming(10.0, 4.9, 0.0, 30)) == "unsteady"
    assert verdict("SRU", EAGER, 1.0, theirs) == "no target"


@pytest.mark.parametrize(("ms", "verdict"), [(50.0, "met"), (50.1, "missed")])
def test_the_epoch(ms, verdict):
    bench = bench_of(FULL_GPU)
    bench.add("MNIST step", "minigrad", "", GpuTiming(ms, ms, 0.0, 30))
    bench.add_epoch(bench.timing_of("MNIST step"))
    assert bench.report["table"][0]["epoch"] == {"seconds": pytest.approx(1.2 * ms), "at_most": 60, "verdict": verdict}


@pytest.mark.parametrize(("flops", "ms"), [(10**9, 2.0), (10**11, 10.0)])
def test_a_floor_is_the_larger_of_the_two(flops, ms):
    bench = bench_of(FULL_GPU, {"copy_tb_s": 4.0, "product_tflop_s": 10.0})
    bench.add_floor(gpu_rows.Row("SRU", "", None, 8 * 10**9, flops), GpuTiming(30.0, 30.0, 0.0, 30))
    line, = bench.report["table"]
    assert (line["side"], line["ms"], line["ratio"]) == ("floor", pytest.approx(ms), pytest.approx(30 / ms))


# ---- flags -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("argv", "says"), [
    (["--device", "gpu", "--only", "imdb"], "--only has 'imdb', which is not measured with --device gpu; expected "
     "names among sru, lstm, rra, srupp, attention, tsdae, mnist"),
    (["--only", "lstm,mnist"], "--only has 'mnist', which is not measured with --device cpu; expected names among "
     "rra, lstm, rnns, srupp, tsdae, imdb"),
    (["--device", "gpu", "--hidden", "8"], "--hidden has a meaning with --device cpu only; the device is the gpu"),
    (["--device", "auto", "--rows-only"], "--rows-only has a meaning with --device cpu only; the device is the gpu"),
    (["--seconds", "3"], "--seconds has a meaning with --device gpu only; the device is the cpu"),
    (["--device", "gpu", "--seconds", "-1"], "argument --seconds: '-1'; expected a finite number of at least 0")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_flags(argv, says, stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = ran(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {says}")
    assert err.count("\n") == 1


def test_the_device_is_chosen_as_everywhere(stand_in, monkeypatch):
    assert parse(["--device", "auto"])["only"] == PARTS["gpu"]
    assert parse([])["only"] == PARTS["cpu"]
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert parse(["--device", "auto"])["device"] == "cpu"
