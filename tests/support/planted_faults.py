"""Layers with one planted fault each: what test_gradcheck.py holds the gradient checker to.

A reference layer is small and right. A Fault is one line of it replaced by a wrong one, so that the reference is the
same layer without the fault, and what the checker must find stands next to what was broken.
"""

import functools
import inspect
import itertools
from dataclasses import dataclass

import numpy as np

from minigrad import Layer, Parameter

N = 4                              # everything is square, so that a wrong transpose or axis still fits
SCRATCH = {}                       # where faulty layers hide things
COUNT = itertools.count()


def parameter(rng, *shape):
    return Parameter(np.random.default_rng(rng).standard_normal(shape))


# ---- the reference layers --------------------------------------------------------------------------------


class Affine(Layer):
    def __init__(self, rng):
        self.W, self.b = parameter(rng, N, N), parameter(rng, N)

    def forward(self, x, mask=None, rng=None):
        y = x @ self.W.value + self.b.value
        return y, (x,)

    def backward(self, dy, cache):
        x, = cache
        self.W.grad += x.T @ dy
        self.b.grad += dy.sum(axis=0)
        dx = dy @ self.W.value.T
        return dx


class Tanh(Layer):
    def __init__(self, rng):
        self.scale = 1.0

    def forward(self, x, mask=None, rng=None):
        y = self.scale * np.tanh(x)
        return y, (y,)

    def backward(self, dy, cache):
        y, = cache
        return dy * (self.scale - y * y / self.scale)


class LayerNorm(Layer):
    def __init__(self, rng):
        self.gain, self.bias = Parameter(np.ones(N)), Parameter(np.zeros(N))

    def forward(self, x, mask=None, rng=None):
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        std = np.sqrt(variance + 1e-5)
        z = centred / std
        return z * self.gain.value + self.bias.value, (z, std, variance)

    def backward(self, dy, cache):
        z, std, _ = cache
        self.gain.grad += (dy * z).sum(axis=0)
        self.bias.grad += dy.sum(axis=0)
        dz = dy * self.gain.value
        mean = dz.mean(axis=-1, keepdims=True)
        along = (dz * z).mean(axis=-1, keepdims=True)
        return (dz - mean - z * along) / std


class Softmax(Layer):
    def __init__(self, rng):
        pass

    def forward(self, x, mask=None, rng=None):
        y = np.exp(x - x.max(axis=-1, keepdims=True))
        y = y / y.sum(axis=-1, keepdims=True)
        return y, (y,)

    def backward(self, dy, cache):
        y, = cache
        return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


class Dropout(Layer):
    def __init__(self, rng):
        self.p = 0.4

    def forward(self, x, mask=None, rng=None):
        kept = (rng.random(x.shape) >= self.p) / (1 - self.p)
        return x * kept, (kept,)

    def backward(self, dy, cache):
        kept, = cache
        return dy * kept


class Product(Layer):
    """Two inputs, two gradients."""

    def __init__(self, rng):
        pass

    def forward(self, a, b, mask=None, rng=None):
        return a @ b, (a, b)

    def backward(self, dy, cache):
        a, b = cache
        return dy @ b.T, a.T @ dy


class Embedding(Layer):
    def __init__(self, rng):
        self.W = parameter(rng, N, N)

    def forward(self, ids, mask=None, rng=None):
        return self.W.value[ids], (ids,)

    def backward(self, dy, cache):
        ids, = cache
        np.add.at(self.W.grad, ids, dy)


class Attention(Layer):
    """One head of self-attention, y = softmax(Q K^T / sqrt(d)) V, with a mask over the keys."""

    def __init__(self, rng):
        self.W_q, self.W_k, self.W_v = (parameter(rng, N, N) for _ in range(3))

    def forward(self, x, mask=None, rng=None):
        q, k, v = (x @ W.value for W in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(N)
        scores = np.where(mask[:, None], scores, -np.inf)
        a = np.exp(scores - scores.max(axis=-1, keepdims=True))
        a = a / a.sum(axis=-1, keepdims=True)
        return a @ v, (x, q, k, v, a)

    def backward(self, dy, cache):
        x, q, k, v, a = cache
        da, dv = dy @ v.swapaxes(1, 2), a.swapaxes(1, 2) @ dy
        ds = a * (da - (da * a).sum(axis=-1, keepdims=True)) / np.sqrt(N)
        dq, dk = ds @ k, ds.swapaxes(1, 2) @ q
        for W, d in ((self.W_q, dq), (self.W_k, dk), (self.W_v, dv)):
            W.grad += np.einsum("bli,blj->ij", x, d)
        return dq @ self.W_q.value.T + dk @ self.W_k.value.T + dv @ self.W_v.value.T


class Recurrence(Layer):
    """c_t = s(f) c_{t-1} + tanh(x_t W + h_{t-1} U + b), h_t = tanh(c_t), with a state (h, c) and a mask."""

    recurrent = True

    def __init__(self, rng):
        self.W, self.U, self.b, self.f = (parameter(rng, *shape) for shape in ((N, N), (N, N), (N,), (N,)))

    def forward(self, x, state=None, mask=None, rng=None):
        zero = np.zeros((len(x), N))
        h, c = (zero, zero) if state is None else state
        keep = 1 / (1 + np.exp(-self.f.value))
        ys, steps = [], []
        for t in range(x.shape[1]):
            real = np.full((len(x), 1), True) if mask is None else mask[:, t, None]
            g = np.tanh(x[:, t] @ self.W.value + h @ self.U.value + self.b.value)
            c_new = keep * c + g
            h_new = np.tanh(c_new)
            steps.append((x[:, t], h, c, g, h_new, real))
            h, c = np.where(real, h_new, h), np.where(real, c_new, c)
            ys.append(np.where(real, h_new, 0))
        return (np.stack(ys, axis=1), (h.copy(), c.copy())), (steps, keep)

    def backward(self, upstream, cache):
        steps, keep = cache
        dy, dstate = upstream
        zero = np.zeros_like(steps[0][1])
        dh, dc = (None, None) if dstate is None else dstate
        dh = zero if dh is None else dh
        dc = zero if dc is None else dc
        dxs = []
        for t in reversed(range(len(steps))):
            x, h, c, g, h_new, real = steps[t]
            dh_new = np.where(real, (zero if dy is None else dy[:, t]) + dh, 0)
            dc_new = np.where(real, dc, 0) + dh_new * (1 - h_new * h_new)
            dz = dc_new * (1 - g * g)
            self.W.grad += x.T @ dz
            self.U.grad += h.T @ dz
            self.b.grad += dz.sum(axis=0)
            self.f.grad += (dc_new * c).sum(axis=0) * keep * (1 - keep)
            dx = dz @ self.W.value.T
            dxs.insert(0, dx)
            dh = np.where(real, dz @ self.U.value.T, dh)
            dc = np.where(real, dc_new * keep, dc)
        return np.stack(dxs, axis=1), (dh, dc)


REFERENCES = [Affine, Tanh, LayerNorm, Softmax, Dropout, Product, Embedding, Attention, Recurrence]


def arguments(reference, seed=1):
    """(inputs, keywords) to try a reference layer, or a faulty one made of it, on."""
    rng = np.random.default_rng(seed)
    if reference is Product:
        return (rng.standard_normal((N, N)), rng.standard_normal((N, N))), {}
    if reference is Embedding:
        return (np.array([2, 0, 2, 3]),), {}
    if reference is Dropout:
        return (rng.standard_normal((N, N)),), {"rng": 3}
    if reference in (Attention, Recurrence):
        mask = np.array([[1, 0, 1, 1], [1, 1, 1, 0]], bool)
        state = {"state": (rng.standard_normal((2, N)), rng.standard_normal((2, N)))} if reference is Recurrence else {}
        return (rng.standard_normal((2, 4, N)),), {"mask": mask, **state}
    return (rng.standard_normal((N, N)),), {}


# ---- the faults ------------------------------------------------------------------------------------------


source_of = functools.cache(inspect.getsource)


@dataclass
class Fault:
    """`reference` with its line `right` replaced by `wrong` (a list: by several lines).

    tensors     the rows that must be wrong, and no others but `maybe` (strings of names)
    index       the entry that must be named; None in a place: any
    problem     words that must stand in the report's problems
    also        (right, wrong) of a second line
    """

    name: str
    reference: type
    right: str
    wrong: str | list
    tensors: str = ""
    index: tuple | None = None
    problem: str = ""
    also: tuple = ()
    maybe: str = ""

    def source(self):
        source = source_of(self.reference)
        for right, wrong in [(self.right, self.wrong), *([self.also] if self.also else [])]:
            line, = (line for line in source.splitlines() if line.strip() == right)
            indent = line[:len(line) - len(line.lstrip())]
            new = [wrong] if isinstance(wrong, str) else wrong
            source = source.replace(line, "\n".join(indent + part for part in new))
        return source

    def make(self, rng):
        scope = dict(globals())
        exec(self.source(), scope)
        return scope[self.reference.__name__](rng)


EVERYTHING = "x state.0 state.1 W U b f"

FAULTS = [
    # a linear layer
    Fault("a wrong transpose, of dx", Affine, "dx = dy @ self.W.value.T", "dx = dy @ self.W.value", "x"),
    Fault("a wrong transpose, of dW", Affine, "self.W.grad += x.T @ dy", "self.W.grad += dy.T @ x", "W"),
    Fault("a sum over the wrong axis", Affine, "self.b.grad += dy.sum(axis=0)", "self.b.grad += dy.sum(axis=1)", "b"),
    Fault("a wrong sign", Affine, "self.b.grad += dy.sum(axis=0)", "self.b.grad -= dy.sum(axis=0)", "b"),
    Fault("a factor of 2", Affine, "dx = dy @ self.W.value.T", "dx = 2 * dy @ self.W.value.T", "x"),
    Fault("a parameter forgotten", Affine, "self.b.grad += dy.sum(axis=0)", "pass", "b"),
    Fault("divided by the batch size", Affine, "self.W.grad += x.T @ dy", "self.W.grad += x.T @ dy / len(x)", "W"),
    Fault("= for +=", Affine, "self.W.grad += x.T @ dy", "self.W.grad[...] = x.T @ dy",
          problem="the gradient of W does not double"),
    Fault("an array of its own for the gradient", Affine, "self.b.grad += dy.sum(axis=0)",
          "self.b.grad = self.b.grad + dy.sum(axis=0)", problem="the gradient array of b is replaced"),
    Fault("dx of a wrong shape", Affine, "return dx", "return dx[:1]",
          problem="the gradient of x has shape (1, 4); expected (4, 4)"),
    Fault("no dx", Affine, "return dx", "pass", problem="no gradient for x"),
    Fault("one entry off by 1e-4", Affine, "return dx", ["dx[2, 1] *= 1.0001", "return dx"], "x", (2, 1)),
    Fault("one entry of a parameter off by 1e-4", Affine, "return dx", ["self.W.grad[3, 2] += 1e-4", "return dx"],
          "W", (3, 2)),
    Fault("a NaN", Affine, "return dx", ["dx[1, 2] = np.nan", "return dx"], "x", (1, 2)),
    Fault("right only where dy is one", Affine, "dx = dy @ self.W.value.T",
          "dx = np.ones_like(dy) @ self.W.value.T", "x", problem="the gradient of x is not linear"),
    Fault("a gradient at zero dy", Affine, "return dx", "return dx + 1e-9",
          problem="the gradient of x is not linear"),
    Fault("a clipped dy", Affine, "x, = cache", ["x, = cache", "dy = np.clip(dy, -5, 5)"],
          problem="the gradient of x is not linear"),
    Fault("a stale cache on self", Affine, "x, = cache", "x = self.kept",
          problem="forward edits the layer's attribute kept",
          also=("y = x @ self.W.value + self.b.value", ["self.kept = x", "y = x @ self.W.value + self.b.value"])),
    Fault("a stale cache elsewhere", Affine, "x, = cache", "x = SCRATCH['x']",
          problem="backward reads what a later forward stored, not its own cache (gradient of W)",
          also=("y = x @ self.W.value + self.b.value", ["SCRATCH['x'] = x", "y = x @ self.W.value + self.b.value"])),
    Fault("a reused output buffer", Tanh, "y = self.scale * np.tanh(x)",
          "y = np.tanh(x, out=SCRATCH.setdefault('y', np.empty_like(x)))",
          problem="a later forward writes into what an earlier one returned"),
    Fault("float32 in forward", Affine, "y = x @ self.W.value + self.b.value",
          "y = x.astype('float32') @ self.W.value + self.b.value", "x",
          problem="the gradient of W agrees only to", maybe="W"),
    Fault("a float32 result", Affine, "return y, (x,)", "return y.astype('float32'), (x,)",
          "x W b", problem="output is float32"),
    Fault("float32 in backward, dy", Affine, "dx = dy @ self.W.value.T",
          "dx = dy.astype('float32') @ self.W.value.T", problem="the gradient of x is not linear"),
    Fault("float32 in backward, a value", Affine, "self.W.grad += x.T @ dy",
          "self.W.grad += x.T.astype('float32') @ dy", problem="the gradient of W agrees only to", maybe="W"),
    Fault("float32 in the cache", Affine, "return y, (x,)", "return y, (x.astype('float32'),)",
          problem="cache.0 is float32", maybe="W"),
    Fault("a float32 gradient", Affine, "return dx", "return dx.astype('float32')",
          problem="the gradient of x is float32"),
    Fault("an edited dy", Affine, "return dx", ["dy[...] = 0", "return dx"], problem="backward edits dy"),
    Fault("an edited cache", Tanh, "y, = cache", ["y, = cache", "y *= 1.0001"], "x",
          problem="backward edits its cache"),
    Fault("an input edited by backward", Affine, "x, = cache", ["x, = cache", "x[0] += 1"], "W",
          problem="backward edits its input x"),
    Fault("an input edited by forward", Affine, "return y, (x,)", ["x -= 0.1", "return y, (x,)"],
          problem="forward edits its input x", maybe="x W b"),
    Fault("a parameter edited by forward", Affine, "y = x @ self.W.value + self.b.value",
          ["self.W.value[...] /= np.linalg.norm(self.W.value)", "y = x @ self.W.value + self.b.value"],
          "W", problem="forward edits the parameter W"),
    Fault("a parameter edited by backward", Affine, "return dx", ["self.b.value -= 1e-3", "return dx"],
          problem="backward edits the parameter b"),
    Fault("a setting edited by backward", Tanh, "y, = cache", ["y, = cache", "self.scale = 1.5"], "x",
          problem="backward edits the layer's attribute scale"),
    Fault("a forward that cannot be repeated", Affine, "y = x @ self.W.value + self.b.value",
          "y = x @ self.W.value + self.b.value + 1e-12 * next(COUNT)", problem="forward is not repeatable"),
    Fault("tiny gradients, all wrong", Tanh, "return y, (y,)", "return 1e-9 * y, (0 * y,)", "x"),
    Fault("y without a cache", Tanh, "return y, (y,)", "return y", problem="forward returned a ndarray; expected"),
    # layer norm, softmax, dropout
    Fault("the gain forgotten", LayerNorm, "dz = dy * self.gain.value", "dz = dy", "x"),
    Fault("the term of the mean dropped", LayerNorm, "mean = dz.mean(axis=-1, keepdims=True)", "mean = 0", "x"),
    Fault("the term of the variance dropped", LayerNorm, "along = (dz * z).mean(axis=-1, keepdims=True)", "along = 0",
          "x"),
    Fault("a mean over the wrong axis", LayerNorm, "mean = dz.mean(axis=-1, keepdims=True)",
          "mean = dz.mean(axis=0, keepdims=True)", "x"),
    Fault("eps missing in backward alone", LayerNorm, "z, std, _ = cache",
          ["z, _, variance = cache", "std = np.sqrt(variance)"], "x"),
    Fault("dgain without z", LayerNorm, "self.gain.grad += (dy * z).sum(axis=0)", "self.gain.grad += dy.sum(axis=0)",
          "gain"),
    Fault("softmax taken for a sigmoid", Softmax, "return y * (dy - (y * dy).sum(axis=-1, keepdims=True))",
          "return y * (1 - y) * dy", "x"),
    Fault("softmax, the wrong axis", Softmax, "return y * (dy - (y * dy).sum(axis=-1, keepdims=True))",
          "return y * (dy - (y * dy).sum(axis=0, keepdims=True))", "x"),
    Fault("dropout without its mask", Dropout, "return dy * kept", "return dy / (1 - self.p)", "x"),
    Fault("dropout without 1/(1-p)", Dropout, "return dy * kept", "return dy * (kept > 0)", "x"),
    Fault("dropout drawing anew in backward", Dropout, "return dy * kept",
          "return dy * (SCRATCH['rng'].random(dy.shape) >= self.p) / (1 - self.p)", "x",
          problem="the gradient of x differs when backward runs twice",
          also=("return x * kept, (kept,)", ["SCRATCH['rng'] = rng", "return x * kept, (kept,)"])),
    Fault("dropout's mask kept elsewhere", Dropout, "kept, = cache", "kept = SCRATCH['kept']",
          problem="backward reads what a later forward stored",
          also=("return x * kept, (kept,)", ["SCRATCH['kept'] = kept", "return x * kept, (kept,)"])),
    Fault("dropout with a generator of its own", Dropout, "kept = (rng.random(x.shape) >= self.p) / (1 - self.p)",
          "kept = (np.random.default_rng().random(x.shape) >= self.p) / (1 - self.p)", "x",
          problem="forward is not repeatable"),
    # several inputs, repeated ids, attention
    Fault("gradients in the wrong order", Product, "return dy @ b.T, a.T @ dy", "return a.T @ dy, dy @ b.T", "a b"),
    Fault("one gradient of two", Product, "return dy @ b.T, a.T @ dy", "return dy @ b.T",
          problem="backward returned 1 gradients; expected one for each of a, b"),
    Fault("a repeated id counted once", Embedding, "np.add.at(self.W.grad, ids, dy)", "self.W.grad[ids] += dy", "W",
          (2, None)),
    Fault("a detached branch", Attention,
          "return dq @ self.W_q.value.T + dk @ self.W_k.value.T + dv @ self.W_v.value.T",
          "return dq @ self.W_q.value.T + dk @ self.W_k.value.T", "x"),
    Fault("queries and keys mixed up", Attention, "dq, dk = ds @ k, ds.swapaxes(1, 2) @ q", "dq, dk = ds @ k, ds @ q",
          "x W_k"),
    Fault("the scale forgotten", Attention, "ds = a * (da - (da * a).sum(axis=-1, keepdims=True)) / np.sqrt(N)",
          "ds = a * (da - (da * a).sum(axis=-1, keepdims=True))", "x W_q W_k"),
    Fault("softmax's own term dropped", Attention,
          "ds = a * (da - (da * a).sum(axis=-1, keepdims=True)) / np.sqrt(N)", "ds = a * da / np.sqrt(N)", "x W_q W_k"),
    # recurrence
    Fault("off by one in time", Recurrence, "self.U.grad += h.T @ dz", "self.U.grad += h_new.T @ dz", "U"),
    Fault("no gradient through time", Recurrence, "dh = np.where(real, dz @ self.U.value.T, dh)",
          "dh = np.where(real, 0, dh)", EVERYTHING),
    Fault("a wrong transpose in time", Recurrence, "dh = np.where(real, dz @ self.U.value.T, dh)",
          "dh = np.where(real, dz @ self.U.value, dh)", EVERYTHING),
    Fault("the cell's path dropped", Recurrence, "dc = np.where(real, dc_new * keep, dc)", "dc = zero", EVERYTHING),
    Fault("a mask missing in backward", Recurrence,
          "dh_new = np.where(real, (zero if dy is None else dy[:, t]) + dh, 0)",
          "dh_new = (zero if dy is None else dy[:, t]) + dh", "x W U b f"),
    Fault("a state that does not wait at a masked step", Recurrence, "dh = np.where(real, dz @ self.U.value.T, dh)",
          "dh = dz @ self.U.value.T", EVERYTHING),
    Fault("the square dropped", Recurrence, "dz = dc_new * (1 - g * g)", "dz = dc_new * (1 - g)",
          EVERYTHING),
    Fault("a bias gradient of the last step alone", Recurrence, "self.b.grad += dz.sum(axis=0)",
          "self.b.grad += dz.sum(axis=0) * (t == 3)", "b"),
    Fault("the gate's derivative dropped", Recurrence, "self.f.grad += (dc_new * c).sum(axis=0) * keep * (1 - keep)",
          "self.f.grad += (dc_new * c).sum(axis=0)", "f"),
    Fault("the first step's dx off by 1e-4", Recurrence, "dxs.insert(0, dx)",
          "dxs.insert(0, dx * (1.0001 if t == 0 else 1))", "x", (None, 0, None)),
    Fault("the last step's dx off by 1e-4", Recurrence, "dxs.insert(0, dx)",
          "dxs.insert(0, dx * (1.0001 if t == 3 else 1))", "x", (None, 3, None)),
    Fault("no gradient of the initial state", Recurrence, "return np.stack(dxs, axis=1), (dh, dc)",
          "return np.stack(dxs, axis=1), None", problem="backward returned no gradient for state.0"),
    Fault("a zero gradient of the initial state", Recurrence, "return np.stack(dxs, axis=1), (dh, dc)",
          "return np.stack(dxs, axis=1), (zero, zero)", "state.0 state.1"),
    Fault("a wrong gradient of the initial cell", Recurrence, "return np.stack(dxs, axis=1), (dh, dc)",
          "return np.stack(dxs, axis=1), (dh, dc + dh)", "state.1"),
    Fault("the initial states' gradients swapped", Recurrence, "return np.stack(dxs, axis=1), (dh, dc)",
          "return np.stack(dxs, axis=1), (dc, dh)", "state.0 state.1"),
    Fault("dstate ignored", Recurrence, "dh, dc = (None, None) if dstate is None else dstate", "dh, dc = None, None",
          EVERYTHING),
    Fault("dstate for None", Recurrence, "dh, dc = (None, None) if dstate is None else dstate",
          "dh, dc = (zero + 1, None) if dstate is None else dstate", problem="dstate = None must mean zero"),
    Fault("None in dstate not taken", Recurrence, "dc = zero if dc is None else dc", "pass",
          problem="backward fails when dstate.1 is None"),
    Fault("an edited dstate", Recurrence, "dc = zero if dc is None else dc",
          ["dc = zero if dc is None else dc", "dc *= 1 + 1e-9"], problem="backward edits dy"),
]
