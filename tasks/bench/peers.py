"""What tasks/bench.py measures RRALSTM and LSTM against: the same equations in PyTorch and in JAX, written well.

A peer computes y and the gradients of x and of every parameter from the same numbers. Where there are several good ways
to write it, all are measured and the fastest counts. Well written means: the input product of all steps is one product
before the loop, taken apart by `unbind` (indexing it inside the loop makes autograd's backward quadratic in S); one
product a step for all gates; one operation for the weighted sum over the window. SRU++: tasks/bench_srupp_peers.py.
"""

import functools
import importlib
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np

from tasks.bench.measure import Side

TOLERANCE = 3e-4                   # of the largest entry: float32, a hundred steps; found: up to 2e-5


class Peer(NamedTuple):
    """A module that computes what a layer computes."""

    module: str             # "torch", ...
    layer: str              # the layer's class
    build: Callable         # build(module, layer, x, dy, thread_counts) -> [Side], one a way to write it
    load: Callable = importlib.import_module


def peers(table, layers, x, dy, thread_counts):
    """([Side], [note]): every way of every peer in the table of [Peer]; a note says which cannot be imported."""
    sides, notes = [], []
    for peer in table:
        for layer in layers:
            if type(layer).__name__ != peer.layer:
                continue
            try:
                module = peer.load(peer.module)
            except ImportError as error:
                notes.append(f"{peer.module} cannot be imported ({error}): its rows are left out")
                continue
            sides += peer.build(module, layer, x, dy, thread_counts)
            notes.append(f"{peer.module} {module.__version__}")
    return sides, notes


def difference(ours, theirs):
    """(name, distance) of the worst of the results, relative to its largest entry (to 1 where all are smaller)."""
    distances = {name: float(abs(ours[name] - theirs[name]).max() / max(abs(theirs[name]).max(), 1.0))
                 for name in theirs}
    return max(distances.items(), key=lambda item: item[1] if np.isfinite(item[1]) else np.inf)


def compared(expected, peers, checked, tolerance=None):
    """(the peers whose check gives what is expected of their layer, a line for each that does not)."""
    agree, differing, at_most = [], [], TOLERANCE if tolerance is None else tolerance
    for side, check in zip(peers, checked):
        name, distance = difference(expected[side.layer], check.result())
        if distance <= at_most:
            agree.append(side)
        else:
            differing.append(f"{side.layer} by {side.name} ({side.way}) differs from minigrad and is not measured: "
                             f"{name} by {distance:.1e} of its largest entry; at most {at_most:.0e} expected")
    return agree, differing


def values_of(layer):
    """The parameters' arrays, in the order W, U, b(, w)."""
    return [parameter.value for parameter in layer.parameters()]


NAMES = ("y", "dx", "dW", "dU", "db", "dw")


# ---- PyTorch eager: RRALSTM ------------------------------------------------------------------------------

def one_product(torch, x, W, U, b):
    """x W + b of every step, and gates(z_t, h_{t-1}) by one (B, h) @ (h, 4h) product."""
    (B, S, d), h = x.shape, U.shape[0]
    z = torch.addmm(b, x.transpose(0, 1).reshape(S * B, d), W).view(S, B, 4 * h)

    def gates(z_t, h_before):
        sigmoids, g = torch.addmm(z_t, h_before, U).split([3 * h, h], dim=1)
        return *torch.sigmoid(sigmoids).chunk(3, dim=1), torch.tanh(g)
    return z.unbind(0), gates


def four_blocks(torch, x, W, U, b):
    """The same with a contiguous block a gate, as minigrad does: (B, h) @ (4, h, h)."""
    (B, S, d), h = x.shape, U.shape[0]
    W4, U4 = W.view(d, 4, h).transpose(0, 1), U.view(h, 4, h).transpose(0, 1).contiguous()
    rows = x.transpose(0, 1).reshape(1, S * B, d).expand(4, S * B, d)
    z = torch.baddbmm(b.view(4, 1, h), rows, W4).view(4, S, B, h)

    def gates(z_t, h_before):
        sigmoids, g = torch.baddbmm(z_t, h_before.expand(4, B, h), U4).split([3, 1])
        return *torch.sigmoid(sigmoids).unbind(0), torch.tanh(g)[0]
    return z.unbind(1), gates


class StackedWindow:
    """The last states in a list, stacked when they are read."""

    def __init__(self, torch, start, K, offset):
        self.torch, self.K, self.past = torch, K, [start] * (K + offset - 1)

    def read(self):
        return self.torch.stack(self.past[:self.K])

    def push(self, h):
        self.past = [*self.past[1:], h]


class RolledWindow:
    """The window as one tensor (K, B, h), the oldest dropped and the next appended at each step."""

    def __init__(self, torch, start, K, offset):
        self.torch, self.window, self.waiting = torch, start.new_zeros(K, *start.shape), [start] * (offset - 1)

    def read(self):
        return self.window

    def push(self, h):
        oldest, *self.waiting = [*self.waiting, h]
        self.window = self.torch.cat([self.window[1:], oldest[None]])


def torch_rra(torch, products, windows, offset, x, W, U, b, w):
    """y (B, S, h) of RRALSTM with normalize="sum"."""
    h = c = x.new_zeros(x.shape[0], U.shape[0])
    window = windows(torch, h, len(w), offset)
    w_hat = (w / w.sum()).flip(0)[None]                                      # (1, K), oldest first
    y = []
    z, gates = products(torch, x, W, U, b)
    for z_t in z:
        i, f, o, g = gates(z_t, h)
        c = torch.addcmul(i * g, f, c)
        c_plus_a = torch.addmm(c.reshape(1, -1), w_hat, window.read().view(len(w), -1))
        h = o * torch.tanh(c_plus_a.view(c.shape))
        window.push(h)
        y.append(h)
    return torch.stack(y, dim=1)


TORCH_WAYS = {
    "one product, stacked window": (one_product, StackedWindow),
    "one product, rolled window": (one_product, RolledWindow),
    "four blocks, stacked window": (four_blocks, StackedWindow),
    "four blocks, rolled window": (four_blocks, RolledWindow)}


def rra_in_torch(torch, rra, x, dy, thread_counts, device="cpu", ways=None):
    """Every way to write RRALSTM in PyTorch, or some."""
    sides = []
    for way in TORCH_WAYS if ways is None else ways:
        products, windows = TORCH_WAYS[way]
        function = functools.partial(torch_rra, torch, products, windows, rra.offset)
        call, result = torch_eager(torch, function, [x, *values_of(rra)], dy, NAMES, device)
        sides.append(Side("RRALSTM", "PyTorch eager", way, call, result, thread_counts, torch_limit))
    return sides


def torch_eager(torch, function, arrays, dy, names, device="cpu"):
    """(call, result) of a function of the arrays: x, W, ...; the result has y and their gradients under these names."""
    inputs = [torch.tensor(array, requires_grad=True, device=device) for array in arrays]
    dy = torch.tensor(dy, device=device)

    def call():
        y = function(*inputs)
        return y, *torch.autograd.grad(y, inputs, dy)
    return call, lambda: dict(zip(names, (tensor.detach().cpu().numpy() for tensor in call())))


@contextmanager
def torch_limit(threads):
    """A context in which PyTorch has that many threads."""
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- torch.nn.LSTM ---------------------------------------------------------------------------------------

def swap_o_g(array):
    """Gates in the order i, f, o, g (minigrad) to i, f, g, o (PyTorch) along the last axis, and back."""
    i, f, third, fourth = np.split(array, 4, axis=-1)
    return np.concatenate([i, f, fourth, third], axis=-1)


def lstm_in_torch(torch, lstm, x, dy, thread_counts):
    """torch.nn.LSTM in both layouts."""
    ways = [("batch first", True), ("time first", False)]
    return [Side("LSTM", "torch.nn.LSTM", way, *torch_lstm(torch, lstm, x, dy, batch_first), thread_counts, torch_limit)
            for way, batch_first in ways]


def torch_lstm(torch, lstm, x, dy, batch_first, device="cpu"):
    """(call, result) of torch.nn.LSTM with lstm's parameters; its second bias is zero."""
    W, U, b = (swap_o_g(value) for value in values_of(lstm))
    module = torch.nn.LSTM(W.shape[0], U.shape[0], batch_first=batch_first, device=device)
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), (W.T, U.T, b, 0 * b)):
            parameter.copy_(torch.tensor(value.copy()))
    order = (0, 1, 2) if batch_first else (1, 0, 2)
    x, dy = (torch.tensor(array.transpose(order).copy(), device=device) for array in (x, dy))
    inputs = [x.requires_grad_(), *module.parameters()]

    def call():
        y, _ = module(x)
        return y, *torch.autograd.grad(y, inputs, dy)

    def result():
        y, dx, dW, dU, db, _ = (tensor.detach().cpu().numpy() for tensor in call())
        return {"y": y.transpose(order), "dx": dx.transpose(order),
                "dW": swap_o_g(dW.T), "dU": swap_o_g(dU.T), "db": swap_o_g(db)}
    return call, result


# ---- jax.jit(lax.scan): RRALSTM --------------------------------------------------------------------------

def jax_rra(jax, offset, pending, unroll, x, W, U, b, w):
    """y (B, S, h). The carry holds the window, or (`pending`) what the states so far add to the next a_t.

    pending[0] is a_t; each new state adds w_hat of itself to the later ones. Its backward need not keep the windows.
    """
    jnp, (B, h, K) = jax.numpy, (x.shape[0], U.shape[0], len(w))
    w_hat = w / w.sum()
    newest_first = jnp.concatenate([jnp.zeros(offset - 1, w.dtype), w_hat])[:, None, None]

    def step(carry, z_t):
        h_before, c, past = carry
        z = z_t + h_before @ U
        i, f, o = jnp.split(jax.nn.sigmoid(z[:, :3 * h]), 3, axis=1)
        c = f * c + i * jnp.tanh(z[:, 3 * h:])
        a = past[0] if pending else jnp.tensordot(w_hat[::-1], past[:K], 1)
        h_new = o * jnp.tanh(c + a)
        if pending:
            past = jnp.concatenate([past[1:], jnp.zeros_like(past[:1])]) + newest_first * h_new
        else:
            past = jnp.concatenate([past[1:], h_new[None]])
        return (h_new, c, past), h_new

    start = jnp.zeros((B, h), x.dtype)
    past = jnp.zeros((K + offset - 1, B, h), x.dtype)
    _, y = jax.lax.scan(step, (start, start, past), x.transpose(1, 0, 2) @ W + b, unroll=unroll)
    return y.transpose(1, 0, 2)


JAX_WAYS = {"window": (False, 1), "pending sums": (True, 1), "pending sums, unrolled by 2": (True, 2)}


def rra_in_jax(jax, rra, x, dy, thread_counts):
    """Every way to write RRALSTM in JAX, compiled, on the CPU; XLA's threads cannot be changed once it runs."""
    cpu = jax.devices("cpu")[0]
    arrays = [jax.device_put(array, cpu) for array in (dy, x, *values_of(rra))]
    sides = []
    for way, (pending, unroll) in JAX_WAYS.items():
        function = functools.partial(jax_rra, jax, rra.offset, pending, unroll)
        call, result = jax_jit(jax, function, arrays)
        sides.append(Side("RRALSTM", "jax.jit(lax.scan)", way, call, result, ("its own",), lambda _: nullcontext()))
    return sides


def jax_jit(jax, function, arrays):
    """(call, result): value_and_grad of <dy, y>, whose gradients are those that dy sends back; arrays: dy, x, W ..."""
    def upstream(dy, *inputs):
        y = function(*inputs)
        return (y * dy).sum(), y

    compiled = jax.jit(jax.value_and_grad(upstream, argnums=tuple(range(1, len(arrays))), has_aux=True))

    def call():
        (_, y), gradients = jax.block_until_ready(compiled(*arrays))
        return y, *gradients
    return call, lambda: dict(zip(NAMES, map(np.asarray, call())))


PEERS = [Peer("torch", "RRALSTM", rra_in_torch), Peer("jax", "RRALSTM", rra_in_jax),
         Peer("torch", "LSTM", lstm_in_torch)]
