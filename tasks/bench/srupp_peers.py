"""SRU++ in PyTorch eager, written well, and the official module.

Written well means: time first; the attention in one of two ways, its mask made beforehand; U of all steps is one
product before the loop, taken apart by `unbind`; the loop has three operations a step (addcmul and sigmoid for f, lerp
for c), none of which makes its backward sum over the batch; r and h of all steps at once follow.
"""

import functools
import importlib
import math
import warnings
from importlib import metadata

import numpy as np

from tasks.bench.measure import Side
from tasks.bench.peers import EAGER, torch_eager

OFFICIAL = "3.0.0.dev6"            # the only release of `sru` that has SRU++


def parameters_of(layer):
    """{name: array}; of an SRUpp with attention, layer norm and d = h in the order of `torch_srupp`'s arguments."""
    return {name: parameter.value for name, parameter in layer.named_parameters()}


def causal_mask(torch, L, like):
    """(L, L) to be added to the scores: 0 where a key may be seen, -inf where it is later than the query."""
    return torch.full((L, L), -math.inf, dtype=like.dtype, device=like.device).triu(1)


# ---- PyTorch eager ---------------------------------------------------------------------------------------

def matmul_attention(torch, mask, q, k, v):
    """softmax(q k^T / sqrt(d') + mask) v; scale and mask come with the product."""
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=1 / math.sqrt(q.shape[2]))
    return torch.softmax(scores, dim=-1) @ v


def fused_attention(torch, mask, q, k, v):
    """The same by scaled_dot_product_attention, whose CPU kernel never forms all scores at once."""
    q, k, v = (rows[:, None] for rows in (q, k, v))                          # one head
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


def input_product(torch, n, W_o, b_f, b_r):
    """u0, u1 + b_f, u2 + b_r of every step, (L, B, h) each, by one (L B, d') @ (d', 3h) product."""
    (L, B, p), h = n.shape, len(b_f)
    bias = torch.cat([torch.zeros_like(b_f), b_f, b_r])
    return torch.addmm(bias, n.reshape(L * B, p), W_o).view(L, B, 3 * h).split(h, dim=2)


def torch_srupp(torch, attention, mask, x, W_q, W_k, W_v, alpha, gain, bias, W_o, v_f, v_r, b_f, b_r):
    """y of SRUpp with one head, causal, for x and y (L, B, d)."""
    Q = x @ W_q
    A = attention(torch, mask, *(rows.transpose(0, 1) for rows in (Q, Q @ W_k, Q @ W_v))).transpose(0, 1)
    N = torch.nn.functional.layer_norm(torch.addcmul(Q, alpha, A), gain.shape, gain, bias)
    return torch_recurrence(torch, *input_product(torch, N, W_o, b_f, b_r), x, v_f, v_r)


def torch_recurrence(torch, u0, u1, u2, x, v_f, v_r):
    """h (L, B, h) from u0, u1 + b_f, u2 + b_r and the highway's x, time first."""
    c = torch.zeros_like(u0[0])
    v_f_of_each = v_f.expand(c.shape).contiguous()           # else the gradient is summed over the batch at every step
    cs = [c]
    for u0_t, u1_t in zip(u0.unbind(0), u1.unbind(0)):
        c = torch.lerp(u0_t, c, torch.sigmoid(torch.addcmul(u1_t, v_f_of_each, c)))          # u0 + f (c - u0)
        cs.append(c)
    cs = torch.stack(cs)
    r = torch.sigmoid(torch.addcmul(u2, v_r, cs[:-1]))
    return torch.lerp(x, cs[1:], r)                                          # x + r (c - x)


WAYS = {"matmul": matmul_attention, "SDPA": fused_attention}


def srupp_in_torch(torch, layer, x, dy, device="cpu", name=EAGER, through=lambda function: function):
    """Both ways to write SRUpp in PyTorch; through(function): what is called in a function's place."""
    mask, sides = causal_mask(torch, x.shape[1], torch.tensor(x, device=device)), []
    for way, attention in WAYS.items():
        function = through(functools.partial(torch_srupp, torch, attention, mask))
        call_and_result = time_first(torch, function, x, dy, parameters_of(layer), device)
        sides.append(Side("SRUpp", name, way, *call_and_result, "torch"))
    return sides


def time_first(torch, function, x, dy, parameters, device="cpu"):
    """`torch_eager` of a function of x (L, B, d) and of {name: array}; the result's y and dx are (B, L, ...)."""
    x, dy = (np.ascontiguousarray(array.transpose(1, 0, 2)) for array in (x, dy))
    names = "y", "dx", *(f"d{name}" for name in parameters)
    call, result = torch_eager(torch, function, [x, *parameters.values()], dy, names, device)

    def batch_first():
        arrays = result()
        return {**arrays, "y": arrays["y"].transpose(1, 0, 2), "dx": arrays["dx"].transpose(1, 0, 2)}
    return call, batch_first


# ---- the official module ---------------------------------------------------------------------------------

def load_official(name):
    """The module `sru`, a version with SRU++; it compiles its C++ when it is imported. Raises ImportError."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise ImportError(f"it is not installed; pip install {name}=={OFFICIAL}") from error
    if version.partition(".")[0] in ("0", "1", "2"):
        raise ImportError(f"version {version} has no SRU++; pip install {name}=={OFFICIAL}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                                      # about CUDA, and about torch.jit
        try:
            module = importlib.import_module(name)
        except ImportError:
            raise
        except Exception as error:                                           # no compiler, a PyTorch that does not fit
            raise ImportError(str(error).strip().partition("\n")[0] or type(error).__name__) from error
    module.__version__ = version
    return module


def slices_last(W, h):
    """W_o (d', 3h) with the slices side by side -> the official (3h, d'), the slices of a unit next to each other."""
    p = W.shape[0]
    return W.reshape(p, 3, h).transpose(2, 1, 0).reshape(3 * h, p)


def slices_first(W, h):
    """The inverse of `slices_last`."""
    p = W.shape[1]
    return W.reshape(h, 3, p).transpose(2, 1, 0).reshape(p, 3 * h)


def official_srupp(sru, layer, x, dy):
    """sru.SRUpp of one layer with the layer's parameters, and the causal mask that it wants to be given."""
    torch, values = importlib.import_module("torch"), parameters_of(layer)
    (d, p), h = values["W_q"].shape, len(values["v_f"])
    module = sru.SRUpp(d, h, p, num_layers=1)
    theirs = {
        "weight_c": np.concatenate([values["v_f"], values["v_r"]]),
        "bias": np.concatenate([values["b_f"], values["b_r"]]),
        "transform_module.alpha": values["alpha"], "transform_module.linear1.weight": values["W_q"].T,
        "transform_module.linear2.weight": np.concatenate([values["W_k"], values["W_v"]], axis=1).T,
        "transform_module.linear3.weight": slices_last(values["W_o"], h),
        "transform_module.layer_norm.weight": values["norm.gain"],
        "transform_module.layer_norm.bias": values["norm.bias"]}
    parameters = dict(module.rnn_lst[0].named_parameters())
    with torch.no_grad():
        for name, value in theirs.items():
            parameters[name].copy_(torch.tensor(np.ascontiguousarray(value)))
    x, dy = (torch.tensor(np.ascontiguousarray(array.transpose(1, 0, 2))) for array in (x, dy))
    mask, inputs = causal_mask(torch, len(x), x), [x.requires_grad_(), *(parameters[name] for name in theirs)]

    def call():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                                  # at every call: whether one is sure
            y, _, _ = module(x, attn_mask=mask)
        return y, *torch.autograd.grad(y, inputs, dy)

    def result():
        y, dx, *gradients = (tensor.detach().numpy() for tensor in call())
        dv, db, dalpha, dW_q, dW_kv, dW_o, dgain, dbias = gradients
        return {"y": y.transpose(1, 0, 2), "dx": dx.transpose(1, 0, 2), "dW_q": dW_q.T, "dW_k": dW_kv[:p].T,
                "dW_v": dW_kv[p:].T, "dalpha": dalpha, "dnorm.gain": dgain, "dnorm.bias": dbias,
                "dW_o": slices_first(dW_o, h), "dv_f": dv[:h], "dv_r": dv[h:], "db_f": db[:h], "db_r": db[h:]}
    return [Side("SRUpp", "official module", f"sru {sru.__version__}", call, result, "torch")]
