"""What tasks/bench.py measures IRNN, RWA and URNN against: the same equations in PyTorch eager, written well.

Well written as in tasks/bench_peers.py: one input product before the loop, taken apart by `unbind`, and one product a
step. Each layer has several ways, and the fastest counts; `p` has its parameters by name.

IRNN    relu in a tensor of its own or in place; beside it torch.nn.RNN, whose loop is C++
RWA     W_g and W_a as one product or as two blocks; the average by shares, as minigrad's is, with log d by logaddexp or
        softplus, or as the paper writes it, n / d, which overflows at scores beyond 88 and is measured all the same
URNN    W as the chain of its factors, or multiplied out to a matrix once a call, complex or real
"""

import functools

from minigrad.fast.urnn import EPS
from tasks.bench.measure import Side
from tasks.bench.peers import Peer, torch_eager, torch_limit


def input_product(torch, x, W, b=None):
    """x W, + b, of every step: (S, B, n)."""
    B, S, d = x.shape
    rows = x.transpose(0, 1).reshape(S * B, d)
    return (rows @ W if b is None else torch.addmm(b, rows, W)).view(S, B, W.shape[1])


# ---- IRNN ------------------------------------------------------------------------------------------------

def irnn(relu, torch, layer, x, p):
    """y (B, S, h); relu: the name of torch's function."""
    h, y = x.new_zeros(len(x), len(p["b"])), []
    for z_t in input_product(torch, x, p["V"], p["b"]).unbind(0):
        h = getattr(torch, relu)(torch.addmm(z_t, h, p["W"]))
        y.append(h)
    return torch.stack(y, dim=1)


def irnn_module(torch, irnn, x, dy, thread_counts):
    """torch.nn.RNN in both layouts."""
    return [Side("IRNN", "torch.nn.RNN", way, *torch_rnn(torch, irnn, x, dy, batch_first), thread_counts, torch_limit)
            for way, batch_first in [("batch first", True), ("time first", False)]]


def torch_rnn(torch, irnn, x, dy, batch_first):
    """(call, result) of torch.nn.RNN with irnn's parameters; its second bias is zero."""
    V, W, b = (parameter.value for parameter in (irnn.V, irnn.W, irnn.b))
    module = torch.nn.RNN(*V.shape, nonlinearity="relu", batch_first=batch_first)
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), (V.T, W.T, b, 0 * b)):
            parameter.copy_(torch.tensor(value.copy()))
    order = (0, 1, 2) if batch_first else (1, 0, 2)
    x, dy = (torch.tensor(array.transpose(order).copy()) for array in (x, dy))
    inputs = [x.requires_grad_(), *module.parameters()]

    def call():
        y, _ = module(x)
        return y, *torch.autograd.grad(y, inputs, dy)

    def result():
        y, dx, dV, dW, db, _ = (tensor.detach().numpy() for tensor in call())
        return {"y": y.transpose(order), "dx": dx.transpose(order), "dV": dV.T, "dW": dW.T, "db": db}
    return call, result


# ---- RWA -------------------------------------------------------------------------------------------------

def one_product(torch, x, p):
    """u_t of every step, what x_t adds to g_t and a_t, and gates(that, h_{t-1}) -> g_t, a_t by one product."""
    d, h = p["W_u"].shape
    W = torch.cat([p["W_u"], p["W_g"][:d], p["W_a"][:d]], dim=1)
    b = torch.cat([p["b_u"], p["b_g"], torch.zeros_like(p["b_g"])])
    U = torch.cat([p["W_g"][d:], p["W_a"][d:]], dim=1)                       # (h, 2h)
    u, ga = input_product(torch, x, W, b).split([h, 2 * h], dim=2)
    return u.unbind(0), ga.unbind(0), lambda ga_t, h_before: torch.addmm(ga_t, h_before, U).chunk(2, dim=1)


def two_blocks(torch, x, p):
    """The same with a contiguous block each, as minigrad does: (B, h) @ (2, h, h)."""
    (B, S, _), (d, h) = x.shape, p["W_u"].shape
    W = torch.stack([p["W_u"], p["W_g"][:d], p["W_a"][:d]])
    b = torch.stack([p["b_u"], p["b_g"], torch.zeros_like(p["b_g"])])[:, None]
    U = torch.stack([p["W_g"][d:], p["W_a"][d:]])
    rows = x.transpose(0, 1).reshape(1, S * B, d).expand(3, S * B, d)
    u, ga = torch.baddbmm(b, rows, W).view(3, S, B, h).split([1, 2])

    def gates(ga_t, h_before):
        return torch.baddbmm(ga_t, h_before.expand(2, B, h), U).unbind(0)
    return u[0].unbind(0), ga.unbind(1), gates


def by_logaddexp(torch, past, z, a):
    """r_t and what the next step needs: r' = r + sigma(a - l) (z - r), l' = logaddexp(l, a)."""
    if past is None:
        return z, (z, a)
    r, l = past
    r = torch.lerp(r, z, torch.sigmoid(a - l))
    return r, (r, torch.logaddexp(l, a))


def by_softplus(torch, past, z, a):
    """The same, l' = l + softplus(a - l)."""
    if past is None:
        return z, (z, a)
    r, l = past
    difference = a - l
    r = torch.lerp(r, z, torch.sigmoid(difference))
    return r, (r, l + torch.nn.functional.softplus(difference))


def by_fraction(torch, past, z, a):
    """r = n / d, n' = n + z e^a, d' = d + e^a."""
    e = torch.exp(a)
    n, d = (z * e, e) if past is None else (torch.addcmul(past[0], z, e), past[1] + e)
    return n / d, (n, d)


def rwa(products, average, torch, layer, x, p):
    """y (B, S, h)."""
    us, gas, gates = products(torch, x, p)
    h, past, y = torch.tanh(p["s"]).expand(len(x), -1), None, []
    for u, ga in zip(us, gas):
        g, a = gates(ga, h)
        r, past = average(torch, past, u * torch.tanh(g), a)
        h = torch.tanh(r)
        y.append(h)
    return torch.stack(y, dim=1)


# ---- URNN ------------------------------------------------------------------------------------------------

def complex_of(torch, halves):
    """[Re | Im] (..., 2h) -> (..., h)."""
    return torch.complex(*(half.contiguous() for half in halves.chunk(2, dim=-1)))


def factors_of(torch, p):
    """D1, D2, D3 and of each reflection (conj(v), -2 v / |v|^2)."""
    D = [torch.polar(torch.ones_like(p[name]), p[name]) for name in ("omega1", "omega2", "omega3")]
    vs = [complex_of(torch, p[name]) for name in ("v1", "v2")]
    return D, [(v.conj().resolve_conj(), v * (-2 / (v.real.square() + v.imag.square()).sum())) for v in vs]


def unitary(torch, z, factors, permutation):
    """W z of rows z (B, h), as the chain that W is."""
    (D1, D2, D3), ((v1, w1), (v2, w2)) = factors
    z = torch.fft.fft(z * D1, norm="ortho")
    z = z + torch.outer(z @ v1, w1)
    z = torch.fft.ifft(z[:, permutation] * D2, norm="ortho")
    return (z + torch.outer(z @ v2, w2)) * D3


def matrix_of(torch, p, permutation):
    """(h, h) complex M with W z = z M for rows z."""
    identity = torch.eye(len(permutation), dtype=torch.complex64)
    return unitary(torch, identity, factors_of(torch, p), permutation)


def complex_modrelu(torch, z, b):
    """max(1 + b / r, 0) z, r = sqrt(|z|^2 + eps^2)."""
    r = (torch.view_as_real(z).square().sum(-1) + EPS * EPS).sqrt()
    return z * torch.relu(1 + b / r)


def modrelu_of_halves(torch, z, b):
    """The same of z (B, 2h), [Re | Im], each half by itself."""
    re, im = z.chunk(2, dim=1)
    f = torch.relu(1 + b / (re * re + im * im + EPS * EPS).sqrt())
    return torch.cat([re * f, im * f], dim=1)


def modrelu_of_view(torch, z, b):
    """The same of a view (B, 2, h)."""
    z = z.view(len(z), 2, -1)
    f = torch.relu(1 + b / (z.square().sum(1) + EPS * EPS).sqrt())
    return (z * f[:, None]).flatten(1)


def complex_urnn(as_matrix, torch, layer, x, p):
    """y (B, S, 2h), by complex tensors."""
    permutation = torch.from_numpy(layer.permutation)
    if as_matrix:
        M = matrix_of(torch, p, permutation)
    else:
        factors = factors_of(torch, p)
    h, y = complex_of(torch, p["h0"]).expand(len(x), -1), []
    for z_t in complex_of(torch, input_product(torch, x, p["V"])).unbind(0):
        z = torch.addmm(z_t, h, M) if as_matrix else unitary(torch, h, factors, permutation) + z_t
        h = complex_modrelu(torch, z, p["b"])
        y.append(h)
    y = torch.stack(y, dim=1)
    return torch.cat([y.real, y.imag], dim=-1)


def real_urnn(modrelu, torch, layer, x, p):
    """y (B, S, 2h) by W as a real matrix: [Re z | Im z] [[Re M, Im M], [-Im M, Re M]]."""
    M = matrix_of(torch, p, torch.from_numpy(layer.permutation))
    M = torch.cat([torch.cat([M.real, M.imag], dim=1), torch.cat([-M.imag, M.real], dim=1)])
    h, y = p["h0"].expand(len(x), -1), []
    for z_t in input_product(torch, x, p["V"]).unbind(0):
        h = modrelu(torch, torch.addmm(z_t, h, M), p["b"])
        y.append(h)
    return torch.stack(y, dim=1)


# ---- the peers -------------------------------------------------------------------------------------------

WAYS = {
    "IRNN": {"relu": functools.partial(irnn, "relu"), "relu in place": functools.partial(irnn, "relu_")},
    "RWA": {f"{product}, {form}": functools.partial(rwa, products, average)
            for product, products in [("one product", one_product), ("two blocks", two_blocks)]
            for form, average in [("logaddexp", by_logaddexp), ("softplus", by_softplus), ("n / d", by_fraction)]},
    "URNN": {"chain": functools.partial(complex_urnn, False), "complex matrix": functools.partial(complex_urnn, True),
             "real matrix, halves": functools.partial(real_urnn, modrelu_of_halves),
             "real matrix, view": functools.partial(real_urnn, modrelu_of_view)}}


def in_torch(torch, layer, x, dy, thread_counts):
    """Every way to write the layer in PyTorch."""
    names, parameters = zip(*layer.named_parameters())
    kind, sides = type(layer).__name__, []
    for way, function in WAYS[kind].items():
        def of_tensors(x, *tensors, function=function):
            return function(torch, layer, x, dict(zip(names, tensors)))
        call, result = torch_eager(torch, of_tensors, [x, *(parameter.value for parameter in parameters)], dy,
                                   ("y", "dx", *(f"d{name}" for name in names)))
        sides.append(Side(kind, "PyTorch eager", way, call, result, thread_counts, torch_limit))
    return sides


PEERS = [*(Peer("torch", name, in_torch) for name in WAYS), Peer("torch", "IRNN", irnn_module)]
