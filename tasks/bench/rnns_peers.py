"""IRNN, RWA and URNN in PyTorch eager, written well as in peers.py; `p` has the layer's parameters by name.

IRNN    as written; and torch.nn.RNN, whose loop is C++
RWA     u, g and a by one product; the average by shares with logaddexp, as minigrad's is, or as the paper writes it,
        n / d, which overflows at scores beyond 88 and is measured all the same
URNN    W multiplied out to a real matrix once a call
"""

import functools

from minigrad.fast.urnn import EPS
from tasks.bench.measure import Side
from tasks.bench.peers import EAGER, torch_eager, torch_module


def input_product(torch, x, W, b=None):
    """x W, + b, of every step: (S, B, n)."""
    B, S, d = x.shape
    rows = x.transpose(0, 1).reshape(S * B, d)
    return (rows @ W if b is None else torch.addmm(b, rows, W)).view(S, B, W.shape[1])


# ---- IRNN ------------------------------------------------------------------------------------------------

def irnn(torch, layer, x, p):
    """y (B, S, h)."""
    h, y = x.new_zeros(len(x), len(p["b"])), []
    for z_t in input_product(torch, x, p["V"], p["b"]).unbind(0):
        h = torch.relu(torch.addmm(z_t, h, p["W"]))
        y.append(h)
    return torch.stack(y, dim=1)


def irnn_module(torch, layer, x, dy):
    """torch.nn.RNN in both layouts."""
    arrays = [layer.V.value, layer.W.value, layer.b.value]
    return [Side("IRNN", "torch.nn.RNN", way, *torch_module(
        torch, torch.nn.RNN, arrays, "VWb", x, dy, batch_first, nonlinearity="relu"), "torch")
        for way, batch_first in (("batch first", True), ("time first", False))]


# ---- RWA -------------------------------------------------------------------------------------------------

def by_logaddexp(torch, past, z, a):
    """r_t and what the next step needs: r' = r + sigma(a - l) (z - r), l' = logaddexp(l, a)."""
    if past is None:
        return z, (z, a)
    r, l = past
    r = torch.lerp(r, z, torch.sigmoid(a - l))
    return r, (r, torch.logaddexp(l, a))


def by_fraction(torch, past, z, a):
    """r = n / d, n' = n + z e^a, d' = d + e^a."""
    e = torch.exp(a)
    n, d = (z * e, e) if past is None else (torch.addcmul(past[0], z, e), past[1] + e)
    return n / d, (n, d)


def rwa(average, torch, layer, x, p):
    """y (B, S, h); g_t and a_t by one product."""
    d, h = p["W_u"].shape
    W = torch.cat([p["W_u"], p["W_g"][:d], p["W_a"][:d]], dim=1)
    b = torch.cat([p["b_u"], p["b_g"], torch.zeros_like(p["b_g"])])
    U = torch.cat([p["W_g"][d:], p["W_a"][d:]], dim=1)                       # (h, 2h)
    us, gas = input_product(torch, x, W, b).split([h, 2 * h], dim=2)
    h, past, y = torch.tanh(p["s"]).expand(len(x), -1), None, []
    for u, ga in zip(us.unbind(0), gas.unbind(0)):
        g, a = torch.addmm(ga, h, U).chunk(2, dim=1)
        r, past = average(torch, past, u * torch.tanh(g), a)
        h = torch.tanh(r)
        y.append(h)
    return torch.stack(y, dim=1)


# ---- URNN ------------------------------------------------------------------------------------------------

def complex_of(torch, halves):
    """[Re | Im] (..., 2h) -> (..., h)."""
    return torch.complex(*(half.contiguous() for half in halves.chunk(2, dim=-1)))


def unitary(torch, p, permutation):
    """f(z) = W z of rows z (B, h), as the chain that W is."""
    D1, D2, D3 = (torch.polar(torch.ones_like(p[name]), p[name]) for name in ("omega1", "omega2", "omega3"))
    vs = [complex_of(torch, p[name]) for name in ("v1", "v2")]
    (v1, w1), (v2, w2) = ((v.conj().resolve_conj(), v * (-2 / (v.real.square() + v.imag.square()).sum())) for v in vs)

    def W(z):
        z = torch.fft.fft(z * D1, norm="ortho")
        z = z + torch.outer(z @ v1, w1)
        z = torch.fft.ifft(z[:, permutation] * D2, norm="ortho")
        return (z + torch.outer(z @ v2, w2)) * D3
    return W


def real_urnn(torch, layer, x, p):
    """y (B, S, 2h) by W as a real matrix: [Re z | Im z] [[Re M, Im M], [-Im M, Re M]]."""
    permutation = torch.from_numpy(layer.permutation)
    M = unitary(torch, p, permutation)(torch.eye(len(permutation), dtype=torch.complex64))
    M = torch.cat([torch.cat([M.real, M.imag], dim=1), torch.cat([-M.imag, M.real], dim=1)])
    h, y = p["h0"].expand(len(x), -1), []
    for z_t in input_product(torch, x, p["V"]).unbind(0):
        z = torch.addmm(z_t, h, M).view(len(x), 2, -1)
        f = torch.relu(1 + p["b"] / (z.square().sum(1) + EPS * EPS).sqrt())
        h = (z * f[:, None]).flatten(1)
        y.append(h)
    return torch.stack(y, dim=1)


# ---- the peers -------------------------------------------------------------------------------------------

WAYS = {"IRNN": {"as written": irnn},
        "RWA": {"logaddexp": functools.partial(rwa, by_logaddexp), "n / d": functools.partial(rwa, by_fraction)},
        "URNN": {"real matrix": real_urnn}}


def in_torch(torch, layer, x, dy):
    """Every way to write the layer in PyTorch."""
    names, parameters = zip(*layer.named_parameters())
    kind, sides = type(layer).__name__, []
    for way, function in WAYS[kind].items():
        def of_tensors(x, *tensors, function=function):
            return function(torch, layer, x, dict(zip(names, tensors)))
        call, result = torch_eager(torch, of_tensors, [x, *(parameter.value for parameter in parameters)], dy,
                                   ("y", "dx", *(f"d{name}" for name in names)))
        sides.append(Side(kind, EAGER, way, call, result, "torch"))
    return sides
