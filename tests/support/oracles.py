"""The papers' equations once more, under torch autograd: what the layers must equal.

Written from the formulas; the attention one sample at a time, on its real steps only, so that no mask is in it.
"""

import numpy as np
import pytest


def pytorch():
    """torch, on one thread as BLAS is (conftest.py); skips the test where it is not installed."""
    torch = pytest.importorskip("torch", reason="PyTorch is a test oracle only; pip install torch to run these")
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
    return torch


def tensor(array):
    """A float64 leaf with a gradient."""
    torch = pytorch()
    return torch.tensor(array, dtype=torch.float64, requires_grad=True)


def tensors(layer):
    """{name: leaf} of a layer's parameters."""
    return {name: tensor(p.value) for name, p in layer.named_parameters()}


def gradient(leaf):
    """A leaf's gradient as an array; zeros where it had no part in the loss."""
    return np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()


def torch_backward(outputs, upstreams):
    """Backward of sum <output, upstream>; an upstream of None is left out."""
    torch = pytorch()
    sum((out * torch.tensor(d)).sum() for out, d in zip(outputs, upstreams) if d is not None).backward()


def torch_attention(q, k, v, allowed, scale=None, drop=None):
    """softmax(scale q k^T) v over the keys that are allowed (boolean, broadcast to (..., L, M)); 0 where none is."""
    torch = pytorch()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    allowed = torch.tensor(np.array(allowed))
    P = torch.softmax(torch.where(allowed, scale * q @ k.transpose(-1, -2), -1e30), -1) * allowed
    return (P if drop is None else P * torch.tensor(drop)) @ v


def allowed_keys(L, M, causal=False, window=None):
    """(L, M) boolean: whether query i, at position i + M - L, may see key j; one pair at a time."""
    def may(i, j):
        position = i + M - L
        return not causal or (j <= position and (window is None or j > position - window))
    return np.array([[may(i, j) for j in range(M)] for i in range(L)], bool).reshape(L, M)


def torch_norm(x, weights, name, eps=1e-5):
    mu = x.mean(-1, keepdim=True)
    variance = ((x - mu) ** 2).mean(-1, keepdim=True)
    return (x - mu) / (variance + eps).sqrt() * weights[f"{name}.gain"] + weights[f"{name}.bias"]


def torch_recurrence(u, x, c, weights, mask, scale, activation, m=None):
    """y (B, L, h) and the last c of the SRU's equations, from u (B, L, k h); m (B, h), the dropout mask, or None."""
    torch = pytorch()
    ys, m = [], torch.ones(c.shape) if m is None else torch.tensor(m)
    for t, real in enumerate(torch.tensor(mask).T[:, :, None]):
        u0, u1, u2, *u3 = u[:, t].split(c.shape[1], 1)
        f = torch.sigmoid(u1 + weights["v_f"] * c + weights["b_f"])
        r = torch.sigmoid(u2 + weights["v_r"] * c + weights["b_r"])
        c = torch.where(real, f * c + (1 - f) * u0, c)
        highway = u3[0] if u3 else scale * x[:, t]
        ys.append(real * (highway + m * r * ((torch.tanh(c) if activation == "tanh" else c) - highway)))
    return torch.stack(ys, 1), c


def torch_sru(layer, weights, x, c, mask, scale, m=None):
    """y, c of an SRU."""
    W = weights["W"] if layer.projection is None else weights["W_q"] @ weights["W_o"]
    return torch_recurrence(x @ W, x, c, weights, mask, scale, layer.activation, m)


def put_back(rows, real):
    """(L, ...) with the rows where `real` is True and zeros elsewhere."""
    full = rows.new_zeros((len(real), *rows.shape[1:]))
    full[real] = rows
    return full


def torch_srupp(layer, weights, x, state, mask, scale=1.0, sees=None, drops=(None, None, None)):
    """y, c, the next memory, its mask, of SRU++.

    sees    f(n, M, T) -> (T, M+T) boolean, which real positions each step of sample n attends to; default: the layer's
            causal and window
    drops   masks of the attention weights (B, heads, T, M+T), of the rows before W_o (B, T, d') and of r (B, h)
    """
    torch = pytorch()
    c, memory, memory_mask = state
    slots = memory.shape[1] + x.shape[1] if layer.memory is None else layer.memory
    us, memories, masks = [], [], []
    for n in range(len(x)):
        real, drop = torch.tensor(mask[n]), [None if d is None else d[n] for d in drops]
        rows, past = x[n][real], memory[n][torch.tensor(memory_mask[n])]
        past = past.detach() if layer.detach_memory else past
        z = rows if layer.input_norm is None else torch_norm(rows, weights, "input_norm")
        R, both = z @ weights["W_q"], torch.cat([past, z])
        if layer.attention:
            M, T, Q = len(past), len(rows), both @ weights["W_q"]
            allowed = allowed_keys(T, M + T, layer.causal, layer.window) if sees is None else sees(n, M, T)
            q, k, v = (array.unflatten(1, (layer.heads, array.shape[1] // layer.heads)).transpose(0, 1)
                       for array in (Q[M:], Q @ weights["W_k"], Q @ weights["W_v"]))
            A = torch_attention(q, k, v, allowed, drop=drop[0])
            R = R + weights["alpha"] * A.transpose(0, 1).reshape(R.shape)
        N = R if layer.norm is None else torch_norm(R, weights, "norm")
        N = N if drop[1] is None else N * torch.tensor(drop[1])
        kept = both[max(0, len(both) - slots):]
        kept, filled = kept.detach() if layer.detach_memory else kept, torch.arange(slots) >= slots - len(kept)
        us.append(put_back(N @ weights["W_o"], real))
        memories.append(put_back(kept, filled))
        masks.append(filled)
    y, c = torch_recurrence(torch.stack(us), x, c, weights, mask, scale, layer.activation, drops[2])
    if layer.output_norm is not None:
        y = torch.tensor(mask)[:, :, None] * torch_norm(y, weights, "output_norm")
    return y, c, torch.stack(memories), torch.stack(masks).numpy()


# ---- torch's own attention and transformer layers, with our weights ----------------------------------------

def torch_heads(weights, query, memory, allowed, heads, drop=None, prefix=""):
    """Multi-head attention by its formula: `allowed` broadcasts to (B, heads, L, M), as `drop` does."""
    q, k, v = ((x @ weights[f"{prefix}W_{n}"] + weights[f"{prefix}b_{n}"]).unflatten(2, (heads, -1)).transpose(1, 2)
               for n, x in (("q", query), ("k", memory), ("v", memory)))
    A = torch_attention(q, k, v, allowed, drop=drop).transpose(1, 2).flatten(2)
    return A @ weights[f"{prefix}W_o"] + weights[f"{prefix}b_o"]


def in_our_names(module, of):
    """{our name: of(torch's parameter), turned as ours is} of a torch MultiheadAttention or transformer layer."""
    if hasattr(module, "in_proj_weight"):
        W, b = of(module.in_proj_weight).chunk(3), of(module.in_proj_bias).chunk(3)
        return {**{f"W_{n}": array.T for n, array in zip("qkv", W)}, **{f"b_{n}": array for n, array in zip("qkv", b)},
                "W_o": of(module.out_proj.weight).T, "b_o": of(module.out_proj.bias)}
    parts, norms = {"attention": module.self_attn}, {"attention_norm": module.norm1}
    if hasattr(module, "multihead_attn"):
        parts["cross_attention"] = module.multihead_attn
        norms |= {"cross_attention_norm": module.norm2, "feed_forward_norm": module.norm3}
    else:
        norms["feed_forward_norm"] = module.norm2
    found = {f"{part}.{name}": array for part, inner in parts.items()
             for name, array in in_our_names(inner, of).items()}
    for n, linear in ((1, module.linear1), (2, module.linear2)):
        found |= {f"feed_forward.W_{n}": of(linear.weight).T, f"feed_forward.b_{n}": of(linear.bias)}
    for name, norm in norms.items():
        found |= {f"{name}.gain": of(norm.weight), f"{name}.bias": of(norm.bias)}
    return found


def with_our_weights(module, layer):
    """The torch module, in float64, with the layer's values."""
    module, torch = module.double(), pytorch()
    theirs = in_our_names(module, lambda p: p.data)
    ours = dict(layer.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, p in ours.items():
        theirs[name].copy_(torch.tensor(p.value))
    return module


def their_gradients(module, layer):
    """Torch's gradients in the order of the layer's parameters."""
    theirs = in_our_names(module, lambda p: p.grad)
    return [theirs[name].numpy() for name, _ in layer.named_parameters()]
