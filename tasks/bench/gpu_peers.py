"""What tasks/bench.py --device gpu measures against: cuDNN's LSTM, and the equations in PyTorch, eager and compiled.

The ways to write them are those of the CPU's bench (bench_peers.py, bench_srupp_peers.py, bench_tsdae_peers.py), of
each the ones that suit a GPU. Everything is float32; TF32 is allowed in one side alone, which says so.
"""

import functools
import importlib
import math

from tasks.bench.measure import Side
from tasks.bench.peers import rra_in_torch, torch_eager, torch_lstm
from tasks.bench.srupp_peers import in_layout, one_product, parameters_of, srupp_in_torch, torch_recurrence
from tasks.bench.tsdae_peers import TorchTSDAE, fused_attention, step_sides

EAGER, COMPILED = "PyTorch eager", "torch.compile"
CUDNN, TF32 = "cuDNN float32", "cuDNN, TF32 allowed"
# Beside bench_peers.TOLERANCE: TF32 has 10 bits of a fraction, 1e-3 a product; AdamW divides a gradient by little.
TOLERANCES = {TF32: 3e-2, "TSDAE step": 1e-3}
RRA_WAYS = ("one product, stacked window", "one product, rolled window")
SRUPP_WAYS = ("matmul, one product, time first", "SDPA, one product, time first")
TSDAE_WAYS = tuple(f"{attention}, one qkv, {rows}, fused" for attention in ("matmul", "SDPA")
                   for rows in ("padded", "real rows"))
ATTENTION_NAMES = ("A", "dq", "dk", "dv")


def on_a_gpu():
    """(torch, "cuda", a line about it), or (None, None, why there is none). TF32 is switched off."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:     # of a PyTorch that does not fit its CUDA libraries, many kinds
        return None, None, f"torch cannot be imported ({error}): its sides are left out"
    if not torch.cuda.is_available():
        return None, None, f"torch {torch.__version__} finds no GPU: its sides are left out"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    cudnn = torch.backends.cudnn.version()
    return torch, "cuda", f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}"


def compiled(torch, function):
    """By torch.compile, for the sizes that it is first called with."""
    return torch.compile(function, dynamic=False)


def through(torch, name):
    """f(function) -> the function as it is, or for COMPILED compiled."""
    if name == EAGER:
        return lambda function: function
    return lambda function: compiled(torch, lambda *inputs: function(*inputs))


def lstm_sides(torch, lstm, x, dy, device):
    """cuDNN's LSTM in both layouts, and with TF32."""
    sides = [Side("LSTM", CUDNN, way, *torch_lstm(torch, lstm, x, dy, batch_first, device), (), None)
             for way, batch_first in (("batch first", True), ("time first", False))]
    call, result = (with_tf32(torch, function) for function in torch_lstm(torch, lstm, x, dy, False, device))
    return [*sides, Side("LSTM", TF32, "time first", call, result, (), None)]


def with_tf32(torch, function):
    """The function, TF32 allowed in cuDNN while it runs."""
    def run():
        torch.backends.cudnn.allow_tf32 = True
        try:
            return function()
        finally:
            torch.backends.cudnn.allow_tf32 = False
    return run


def rra_sides(torch, rra, x, dy, device):
    """The equations of RRALSTM, eager."""
    return rra_in_torch(torch, rra, x, dy, (), device, RRA_WAYS)


def torch_sru(torch, x, W, v_f, v_r, b_f, b_r):
    """h (L, B, d) of SRU with d = h, x (L, B, d)."""
    return torch_recurrence(torch, *one_product(torch, x, W, b_f, b_r), x, v_f, v_r)


def sru_sides(torch, sru, x, dy, device, name=EAGER):
    """SRU, time first."""
    values, function = parameters_of(sru), functools.partial(torch_sru, torch)
    values = {name: values[name] for name in ("W", "v_f", "v_r", "b_f", "b_r")}
    call, result = in_layout(torch, through(torch, name)(function), True, x, dy, values, device)
    return [Side("SRU", name, "time first", call, result, (), None)]


def srupp_sides(torch, srupp, x, dy, device, name=EAGER):
    """SRU++ in two ways, compiled in one."""
    ways = SRUPP_WAYS if name == EAGER else SRUPP_WAYS[1:]
    return srupp_in_torch(torch, srupp, x, dy, (), device, ways, name, through(torch, name))


def matmul_attention(torch, q, k, v):
    """softmax(q k^T / sqrt(e)) v."""
    return torch.softmax(q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[3])), dim=-1) @ v


def sdpa(torch, q, k, v):
    return fused_attention(torch, q, k, v, None, False)


def attention_sides(torch, arrays, device, name=EAGER):
    """Of q, k, v and dA: by products and softmax, and by scaled_dot_product_attention."""
    *inputs, dA = arrays
    sides = []
    for way, function in (("matmul", matmul_attention), ("SDPA", sdpa)):
        function = through(torch, name)(functools.partial(function, torch))
        call, result = torch_eager(torch, function, inputs, dA, ATTENTION_NAMES, device)
        sides.append(Side("attention", name, way, call, result, (), None))
    return sides


def tsdae_sides(torch, model, data, settings, device, name=EAGER):
    """A training step of TSDAE in several ways; or in one, the loss compiled."""
    if name == EAGER:
        return step_sides(torch, model, data, settings, (), device, TSDAE_WAYS)
    loss = compiled(torch, TorchTSDAE.loss)
    return step_sides(torch, model, data, settings, (), device, TSDAE_WAYS[-1:], name, loss)
