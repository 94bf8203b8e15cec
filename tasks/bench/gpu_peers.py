"""What the bench compares with on a GPU: cuDNN's LSTM, and the equations in PyTorch, eager and compiled.

They are written as for the CPU (peers.py, srupp_peers.py, tsdae_peers.py). Everything is float32, without TF32.
"""

import functools
import importlib
import math

from tasks.bench import tsdae
from tasks.bench.measure import Side
from tasks.bench.peers import EAGER, torch_eager, torch_lstm
from tasks.bench.srupp_peers import input_product, parameters_of, srupp_in_torch, time_first, torch_recurrence
from tasks.bench.tsdae_peers import TorchTSDAE, fused_attention, step_sides

COMPILED, CUDNN = "torch.compile", "cuDNN float32"
TOLERANCES = {"TSDAE step": 1e-3}                # where peers.TOLERANCE is too little: AdamW divides by small numbers
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
    """f(function) -> the function itself, or for COMPILED compiled."""
    if name == EAGER:
        return lambda function: function
    return lambda function: compiled(torch, lambda *inputs: function(*inputs))


def lstm_sides(torch, lstm, x, dy, device):
    """cuDNN's LSTM in both layouts."""
    return [Side("LSTM", CUDNN, way, *torch_lstm(torch, lstm, x, dy, batch_first, device))
            for way, batch_first in (("batch first", True), ("time first", False))]


def sru_sides(torch, sru, x, dy, device, name=EAGER):
    """SRU with d = h."""
    def torch_sru(x, W, v_f, v_r, b_f, b_r):
        return torch_recurrence(torch, *input_product(torch, x, W, b_f, b_r), x, v_f, v_r)
    values = parameters_of(sru)
    values = {name: values[name] for name in ("W", "v_f", "v_r", "b_f", "b_r")}
    return [Side("SRU", name, "time first", *time_first(torch, through(torch, name)(torch_sru), x, dy, values, device))]


def srupp_sides(torch, srupp, x, dy, device, name=EAGER):
    """SRU++ in two ways."""
    return srupp_in_torch(torch, srupp, x, dy, device, name, through(torch, name))


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
        sides.append(Side("attention", name, way, *torch_eager(torch, function, inputs, dA, ATTENTION_NAMES, device)))
    return sides


def tsdae_sides(torch, model, data, units, device, name=EAGER):
    """A training step of TSDAE in every way; or in one, the loss compiled."""
    ways, loss = (None, TorchTSDAE.loss) if name == EAGER else (("SDPA, real rows",), compiled(torch, TorchTSDAE.loss))
    return step_sides(torch, model, data, tsdae.OPTIMIZER, units, device, ways, name, loss)
