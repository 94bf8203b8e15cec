"""What minigrad is compared with: how peers are called and checked; RRALSTM and LSTM in PyTorch and JAX.

A peer computes y and the gradients of x and of every parameter from the same numbers. Where there are several good ways
to write it, all are measured and the fastest counts. Well written means: the input product of all steps is one product
before the loop, taken apart by `unbind` (indexing it inside the loop makes autograd's backward quadratic in S); one
product a step for all gates; one operation for the weighted sum over the window.
"""

import functools
import importlib

import numpy as np

from tasks.bench.measure import Side

EAGER = "PyTorch eager"
TOLERANCE = 3e-4                   # of the largest entry: float32, a hundred steps; found: up to 2e-5


def imported(name, load=importlib.import_module):
    """(module or None, a line about it)."""
    try:
        module = load(name)
    except ImportError as error:
        return None, f"{name} cannot be imported ({error}): its rows are left out"
    return module, f"{name} {module.__version__}"


def difference(ours, theirs):
    """(name, distance) of the worst of the results, relative to its largest entry (to 1 where all are smaller)."""
    distances = {name: float(abs(ours[name] - theirs[name]).max() / max(abs(theirs[name]).max(), 1.0))
                 for name in theirs}
    return max(distances.items(), key=lambda item: item[1] if np.isfinite(item[1]) else np.inf)


def compared(expected, peers, checked, tolerance=TOLERANCE):
    """(the peers whose check gives what is expected, a line for each that does not); checked: [Side], one a peer."""
    agree, differing = [], []
    for side, check in zip(peers, checked):
        name, distance = difference(expected, check.result())
        if distance <= tolerance:
            agree.append(side)
        else:
            differing.append(f"{side.row} by {side.name} ({side.way}) differs from minigrad and is not measured: "
                             f"{name} by {distance:.1e} of its largest entry; at most {tolerance:.0e} expected")
    return agree, differing


def torch_eager(torch, function, arrays, dy, names, device="cpu"):
    """(call, result) of a function of the arrays: x, W, ...; the result has y and their gradients under these names."""
    inputs = [torch.tensor(array, requires_grad=True, device=device) for array in arrays]
    dy = torch.tensor(dy, device=device)

    def call():
        y = function(*inputs)
        return y, *torch.autograd.grad(y, inputs, dy)
    return call, lambda: dict(zip(names, (tensor.detach().cpu().numpy() for tensor in call())))


def torch_module(torch, kind, arrays, names, x, dy, batch_first, device="cpu", order=lambda array: array, **settings):
    """(call, result) of torch.nn.LSTM or torch.nn.RNN with minigrad's W, U, b; its second bias is zero.

    order: of the gates along the last axis, its own inverse.
    """
    W, U, b = map(order, arrays)
    module = kind(*W.shape[:1], U.shape[0], batch_first=batch_first, device=device, **settings)
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), (W.T, U.T, b, 0 * b)):
            parameter.copy_(torch.tensor(value.copy()))
    axes = (0, 1, 2) if batch_first else (1, 0, 2)
    x, dy = (torch.tensor(array.transpose(axes).copy(), device=device) for array in (x, dy))
    inputs = [x.requires_grad_(), *module.parameters()]

    def call():
        y, _ = module(x)
        return y, *torch.autograd.grad(y, inputs, dy)

    def result():
        y, dx, *gradients = (tensor.detach().cpu().numpy() for tensor in call())
        return {"y": y.transpose(axes), "dx": dx.transpose(axes),
                **{f"d{name}": order(gradient.T) for name, gradient in zip(names, gradients)}}
    return call, result


# ---- RRALSTM in PyTorch eager ----------------------------------------------------------------------------

def one_product(torch, x, W, U, b):
    """x W + b of every step, and gates(z_t, h_{t-1}) by one (B, h) @ (h, 4h) product."""
    (B, S, d), h = x.shape, U.shape[0]
    z = torch.addmm(b, x.transpose(0, 1).reshape(S * B, d), W).view(S, B, 4 * h)

    def gates(z_t, h_before):
        sigmoids, g = torch.addmm(z_t, h_before, U).split([3 * h, h], dim=1)
        return *torch.sigmoid(sigmoids).chunk(3, dim=1), torch.tanh(g)
    return z.unbind(0), gates


def four_blocks(torch, x, W, U, b):
    """The same with a contiguous block for each gate, as minigrad does: (B, h) @ (4, h, h)."""
    (B, S, d), h = x.shape, U.shape[0]
    W4, U4 = W.view(d, 4, h).transpose(0, 1), U.view(h, 4, h).transpose(0, 1).contiguous()
    rows = x.transpose(0, 1).reshape(1, S * B, d).expand(4, S * B, d)
    z = torch.baddbmm(b.view(4, 1, h), rows, W4).view(4, S, B, h)

    def gates(z_t, h_before):
        sigmoids, g = torch.baddbmm(z_t, h_before.expand(4, B, h), U4).split([3, 1])
        return *torch.sigmoid(sigmoids).unbind(0), torch.tanh(g)[0]
    return z.unbind(1), gates


def torch_rra(torch, products, offset, x, W, U, b, w):
    """y (B, S, h) of RRALSTM with normalize="sum"."""
    K, h = len(w), x.new_zeros(x.shape[0], U.shape[0])
    c, past, y = h, [h] * (K + offset - 1), []
    w_hat = (w / w.sum()).flip(0)[None]                                      # (1, K), oldest first
    z, gates = products(torch, x, W, U, b)
    for z_t in z:
        i, f, o, g = gates(z_t, h)
        c = torch.addcmul(i * g, f, c)
        window = torch.stack(past[:K]).view(K, -1)
        h = o * torch.tanh(torch.addmm(c.reshape(1, -1), w_hat, window).view(c.shape))
        past = [*past[1:], h]
        y.append(h)
    return torch.stack(y, dim=1)


TORCH_WAYS = {"one product": one_product, "four blocks": four_blocks}


def rra_in_torch(torch, rra, x, dy, device="cpu", row="RRALSTM"):
    """Both ways to write RRALSTM in PyTorch."""
    names, parameters = zip(*rra.named_parameters())
    arrays, names = [x, *(parameter.value for parameter in parameters)], ("y", "dx", *(f"d{name}" for name in names))
    return [Side(row, EAGER, way, *torch_eager(torch, functools.partial(torch_rra, torch, products, rra.offset), arrays,
                                               dy, names, device), "torch") for way, products in TORCH_WAYS.items()]


# ---- torch.nn.LSTM ---------------------------------------------------------------------------------------

def swap_o_g(array):
    """Gates in the order i, f, o, g (minigrad) to i, f, g, o (PyTorch) along the last axis, and back."""
    i, f, third, fourth = np.split(array, 4, axis=-1)
    return np.concatenate([i, f, fourth, third], axis=-1)


def torch_lstm(torch, lstm, x, dy, batch_first, device="cpu"):
    """(call, result) of torch.nn.LSTM with lstm's parameters."""
    arrays = [lstm.W.value, lstm.U.value, lstm.b.value]
    return torch_module(torch, torch.nn.LSTM, arrays, "WUb", x, dy, batch_first, device, swap_o_g)


def lstm_in_torch(torch, lstm, x, dy):
    """torch.nn.LSTM in both layouts."""
    return [Side("LSTM", "torch.nn.LSTM", way, *torch_lstm(torch, lstm, x, dy, batch_first), "torch")
            for way, batch_first in (("batch first", True), ("time first", False))]


# ---- RRALSTM in JAX --------------------------------------------------------------------------------------

def jax_rra(jax, offset, x, W, U, b, w):
    """y (B, S, h). The carry holds what the states so far add to a_t, a_{t+1} ..., not the window itself.

    pending[0] is a_t; each new state adds w_hat of itself to the later ones. Its backward need not keep the windows.
    """
    jnp, (B, h, K) = jax.numpy, (x.shape[0], U.shape[0], len(w))
    newest_first = jnp.concatenate([jnp.zeros(offset - 1, w.dtype), w / w.sum()])[:, None, None]

    def step(carry, z_t):
        h_before, c, pending = carry
        z = z_t + h_before @ U
        i, f, o = jnp.split(jax.nn.sigmoid(z[:, :3 * h]), 3, axis=1)
        c = f * c + i * jnp.tanh(z[:, 3 * h:])
        h_new = o * jnp.tanh(c + pending[0])
        pending = jnp.concatenate([pending[1:], jnp.zeros_like(pending[:1])]) + newest_first * h_new
        return (h_new, c, pending), h_new

    start, pending = jnp.zeros((B, h), x.dtype), jnp.zeros((K + offset - 1, B, h), x.dtype)
    _, y = jax.lax.scan(step, (start, start, pending), x.transpose(1, 0, 2) @ W + b, unroll=2)
    return y.transpose(1, 0, 2)


def rra_in_jax(jax, rra, x, dy):
    """RRALSTM in JAX, compiled for the CPU: value_and_grad of <dy, y>, whose gradients are those that dy sends back."""
    names, parameters = zip(*rra.named_parameters())
    arrays = [jax.device_put(array, jax.devices("cpu")[0]) for array in (dy, x, *(p.value for p in parameters))]

    def upstream(dy, *inputs):
        y = jax_rra(jax, rra.offset, *inputs)
        return (y * dy).sum(), y

    compiled = jax.jit(jax.value_and_grad(upstream, argnums=tuple(range(1, len(arrays))), has_aux=True))

    def call():
        (_, y), gradients = jax.block_until_ready(compiled(*arrays))
        return y, *gradients

    def result():
        return dict(zip(("y", "dx", *(f"d{name}" for name in names)), map(np.asarray, call())))
    return [Side("RRALSTM", "jax.jit(lax.scan)", "unrolled by 2", call, result, "jax")]
