"""LSTM and RRALSTM against PyTorch in float64: torch.nn.LSTM, and the same equations under torch autograd."""

import numpy as np
import pytest
from cases import mask_kinds
from helpers import assert_close, grads, upstream

from minigrad.layers import LSTM, RRALSTM, Stack

torch = pytest.importorskip("torch", reason="PyTorch is a test oracle only; pip install torch to run these")
B, L, D, H = 3, 7, 4, 5
TOLERANCE = 1e-10


def tensor(array):
    return torch.tensor(array, dtype=torch.float64, requires_grad=True)


def torch_order(weights):
    """Columns i, f, o, g -> PyTorch's i, f, g, o, as rows."""
    i, f, o, g = np.split(weights, 4, axis=-1)
    return np.concatenate([i, f, g, o], axis=-1).T


def our_order(weights):
    i, f, g, o = np.split(weights.T, 4, axis=-1)
    return np.concatenate([i, f, o, g], axis=-1)


def torch_lstm(layers):
    """A torch.nn.LSTM with the weights of our layers (b in bias_ih; bias_hh zero)."""
    d, h = layers[0].W.value.shape[0], layers[0].U.value.shape[0]
    module = torch.nn.LSTM(d, h, num_layers=len(layers), batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for n, layer in enumerate(layers):
            getattr(module, f"weight_ih_l{n}").copy_(torch.tensor(torch_order(layer.W.value)))
            getattr(module, f"weight_hh_l{n}").copy_(torch.tensor(torch_order(layer.U.value)))
            getattr(module, f"bias_ih_l{n}").copy_(torch.tensor(torch_order(layer.b.value)))
            getattr(module, f"bias_hh_l{n}").zero_()
    return module


@pytest.mark.parametrize("depth", [1, 3])
def test_lstm_equals_torch(depth):
    rng = np.random.default_rng(0)
    layers = [LSTM(H if n else D, H, rng=n, dtype="float64") for n in range(depth)]
    for layer in layers:
        layer.b.value += 0.3 * rng.standard_normal(4 * H)
    stack, module = Stack(*layers), torch_lstm(layers)
    x = rng.standard_normal((B, L, D))
    h0, c0 = rng.standard_normal((2, depth, B, H))
    (y, state), cache = stack.forward(x, state=tuple(zip(h0, c0)))
    dy, dstate = upstream((y, state))
    dx, dstate0 = stack.backward((dy, dstate), cache)

    tx, th, tc = tensor(x), tensor(h0), tensor(c0)
    ty, (th1, tc1) = module(tx, (th, tc))
    dh, dc = (torch.tensor(np.stack(part)) for part in zip(*dstate))
    ((ty * torch.tensor(dy)).sum() + (th1 * dh).sum() + (tc1 * dc).sum()).backward()
    assert_close((y, state), (ty.detach().numpy(), tuple(zip(th1.detach().numpy(), tc1.detach().numpy()))), TOLERANCE)
    assert_close((dx, dstate0), (tx.grad.numpy(), tuple(zip(th.grad.numpy(), tc.grad.numpy()))), TOLERANCE)
    for n, layer in enumerate(layers):
        expected = [our_order(getattr(module, f"{name}_l{n}").grad.numpy())
                    for name in ("weight_ih", "weight_hh", "bias_ih")]
        assert_close(grads(layer), expected, TOLERANCE)


def test_lstm_with_lengths_equals_torch_packed():
    layer = LSTM(D, H, rng=0, dtype="float64")
    module, lengths = torch_lstm([layer]), [3, 7, 1]
    x = np.random.default_rng(0).standard_normal((B, L, D))
    mask = np.arange(L) < np.array(lengths)[:, None]
    (y, state), cache = layer.forward(x, mask=mask)
    dy, dstate = upstream((y, state))
    dx, _ = layer.backward((dy, dstate), cache)

    tx = tensor(x)
    packed = torch.nn.utils.rnn.pack_padded_sequence(tx, lengths, batch_first=True, enforce_sorted=False)
    out, (th, tc) = module(packed)
    ty, _ = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=L)
    ((ty * torch.tensor(dy)).sum() + (th[0] * torch.tensor(dstate[0])).sum()
     + (tc[0] * torch.tensor(dstate[1])).sum()).backward()
    assert_close((y, state), (ty.detach().numpy(), (th[0].detach().numpy(), tc[0].detach().numpy())), TOLERANCE)
    assert_close(dx, tx.grad.numpy(), TOLERANCE)
    assert_close(layer.W.grad, our_order(module.weight_ih_l0.grad.numpy()), TOLERANCE)


def torch_rra(x, past, c, mask, W, U, b, w, offset, normalize):
    """Equations 7 to 10 in torch, from the paper, with the mask in every step: y, past, c."""
    h = U.shape[0]
    w_hat = w / w.sum() if normalize == "sum" else torch.softmax(w, 0)
    window = list(past.unbind(1))                                    # oldest first, window[-1] = h_{t-1}
    ys = []
    for t in range(x.shape[1]):
        real = mask[:, t, None]
        z = x[:, t] @ W + window[-1] @ U + b
        i, f, o = torch.sigmoid(z[:, :3 * h]).split(h, 1)
        new_c = f * c + i * torch.tanh(z[:, 3 * h:])                 # (8)
        a = sum(w_hat[k - 1] * window[len(window) - k - offset + 1] for k in range(1, len(w) + 1))   # (9)
        new_h = o * torch.tanh(new_c + a)                            # (10)
        c = torch.where(real, new_c, c)
        moved = [*window[1:], new_h]
        window = [torch.where(real, new, old) for new, old in zip(moved, window)]
        ys.append(torch.where(real, new_h, 0.0))
    return torch.stack(ys, 1), torch.stack(window, 1), c


@pytest.mark.parametrize("kind", mask_kinds())
@pytest.mark.parametrize("normalize", ["sum", "softmax"])
@pytest.mark.parametrize(("K", "offset"), [(1, 1), (1, 2), (3, 1), (3, 2), (10, 2)])
def test_rra_equals_torch_autograd(K, offset, normalize, kind):
    rng, mask = np.random.default_rng(0), mask_kinds()[kind]
    layer = RRALSTM(D, H, K, offset, normalize, rng=2, dtype="float64")
    layer.b.value += 0.3 * rng.standard_normal(4 * H)
    x, past, c = (rng.standard_normal(s) for s in [(B, L, D), (B, max(1, K + offset - 1), H), (B, H)])
    out, cache = layer.forward(x, state=(past, c), mask=mask)
    dy, (dpast, dc) = upstream(out)
    dx, dstate0 = layer.backward((dy, (dpast, dc)), cache)

    tx, tpast, tc = map(tensor, (x, past, c))
    weights = [tensor(p.value) for p in layer.parameters()]
    ty, tpast1, tc1 = torch_rra(tx, tpast, tc, torch.tensor(mask), *weights, offset, normalize)
    sum((a * torch.tensor(da)).sum() for a, da in [(ty, dy), (tpast1, dpast), (tc1, dc)]).backward()
    assert_close(out, tuple(a.detach().numpy() for a in (ty, tpast1, tc1)), TOLERANCE)
    assert_close((dx, dstate0), tuple(a.grad.numpy() for a in (tx, tpast, tc)), TOLERANCE)
    assert_close(grads(layer), [w.grad.numpy() for w in weights], TOLERANCE)
