"""LSTM: torch.nn.LSTM, and facts that the contract table does not see."""

import numpy as np
import pytest
from cases import B, D, H, L
from helpers import assert_close, grads, upstream
from oracles import gradient, pytorch, tensor, torch_backward

from minigrad.layers import LSTM, RRALSTM, Stack

TOLERANCE = 1e-10


def torch_order(weights):
    """Columns i, f, o, g -> PyTorch's rows i, f, g, o."""
    i, f, o, g = np.split(weights, 4, axis=-1)
    return np.concatenate([i, f, g, o], axis=-1).T


def our_order(weights):
    i, f, g, o = np.split(weights.T, 4, axis=-1)
    return np.concatenate([i, f, o, g], axis=-1)


def torch_lstm(layers):
    """A torch.nn.LSTM with the weights of our layers (b in bias_ih; bias_hh zero)."""
    torch = pytorch()
    module = torch.nn.LSTM(D, H, num_layers=len(layers), batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for n, layer in enumerate(layers):
            for name, p in (("weight_ih", layer.W), ("weight_hh", layer.U), ("bias_ih", layer.b)):
                getattr(module, f"{name}_l{n}").copy_(torch.tensor(torch_order(p.value)))
            getattr(module, f"bias_hh_l{n}").zero_()
    return module


def their_gradients(module, n):
    return [our_order(getattr(module, f"{name}_l{n}").grad.numpy()) for name in ("weight_ih", "weight_hh", "bias_ih")]


@pytest.mark.parametrize("depth", [1, 3])
def test_lstm_equals_torch(depth):
    torch, rng = pytorch(), np.random.default_rng(0)
    layers = [LSTM(H if n else D, H, rng=n, dtype="float64") for n in range(depth)]
    for layer in layers:
        layer.b.value += 0.3 * rng.standard_normal(4 * H)
    stack, module = Stack(*layers), torch_lstm(layers)
    x, (h0, c0) = rng.standard_normal((B, L, D)), rng.standard_normal((2, depth, B, H))
    (y, state), cache = stack.forward(x, state=tuple(zip(h0, c0)))
    dy, dstate = upstream((y, state))
    dx, dstate0 = stack.backward((dy, dstate), cache)

    tx, th, tc = map(tensor, (x, h0, c0))
    ty, (th1, tc1) = module(tx, (th, tc))
    torch_backward((ty, th1, tc1), (dy, *map(np.stack, zip(*dstate))))
    with torch.no_grad():
        assert_close((y, state), (ty.numpy(), tuple(zip(th1.numpy(), tc1.numpy()))), TOLERANCE)
    assert_close((dx, dstate0), (gradient(tx), tuple(zip(gradient(th), gradient(tc)))), TOLERANCE)
    for n, layer in enumerate(layers):
        assert_close(grads(layer), their_gradients(module, n), TOLERANCE)


def test_lstm_with_lengths_equals_torch_packed():
    torch, layer, lengths = pytorch(), LSTM(D, H, rng=0, dtype="float64"), [3, 7, 1]
    module, rnn = torch_lstm([layer]), torch.nn.utils.rnn
    x = np.random.default_rng(0).standard_normal((B, L, D))
    (y, state), cache = layer.forward(x, mask=np.arange(L) < np.array(lengths)[:, None])
    dy, dstate = upstream((y, state))
    dx, _ = layer.backward((dy, dstate), cache)

    tx = tensor(x)
    out, (th, tc) = module(rnn.pack_padded_sequence(tx, lengths, batch_first=True, enforce_sorted=False))
    ty, _ = rnn.pad_packed_sequence(out, batch_first=True, total_length=L)
    torch_backward((ty, th[0], tc[0]), (dy, *dstate))
    assert_close((y, *state), [array.detach().numpy() for array in (ty, th[0], tc[0])], TOLERANCE)
    assert_close((dx, grads(layer)), (gradient(tx), their_gradients(module, 0)), TOLERANCE)


@pytest.mark.parametrize("make", [LSTM, lambda d, h, **settings: RRALSTM(d, h, 4, **settings)], ids=["LSTM", "RRALSTM"])
def test_the_forget_bias_and_the_blocks_at_the_start(make):
    layer = make(3, 8, forget_bias=1.5, rng=0)
    assert (layer.b.value == np.repeat([0, 1.5, 0, 0], 8)).all()
    for block in np.split(layer.U.value, 4, axis=1):
        np.testing.assert_allclose(block.T @ block, np.eye(8), atol=1e-5)


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: LSTM(0, 5), r"LSTM: d is 0; expected a whole number of at least 1"),
    (lambda: LSTM(4, 2.5), r"LSTM: h is 2.5"),
    (lambda: LSTM(4, 5, init="xavier"), r"init is 'xavier'"),
    (lambda: LSTM(4, 5, forget_bias=float("nan")), r"LSTM: forget_bias is nan"),
    (lambda: RRALSTM(4, 5, 2, forget_bias=float("inf")), r"RRALSTM: forget_bias is inf"),
])
def test_bad_settings(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
