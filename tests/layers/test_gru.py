"""GRU equals torch.nn.GRU: values, states and all gradients."""

import numpy as np
import pytest
from cases import B, D, H, L
from helpers import assert_close, grads, upstream
from oracles import gradient, pytorch, tensor, torch_backward

from minigrad.layers import GRU


def test_gru_equals_torch():
    torch, rng, layer = pytorch(), np.random.default_rng(0), GRU(D, H, rng=0, dtype="float64")
    for bias in (layer.b_x, layer.b_h):
        bias.value[...] = 0.3 * rng.standard_normal(3 * H)
    module = torch.nn.GRU(D, H, batch_first=True, dtype=torch.float64)
    theirs = [module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0, module.bias_hh_l0]
    with torch.no_grad():
        for theirs_of, p in zip(theirs, layer.parameters()):
            theirs_of.copy_(torch.tensor(p.value.T))
    x, h = rng.standard_normal((B, L, D)), rng.standard_normal((B, H))
    (y, state), cache = layer.forward(x, state=(h,))
    dy, (dh,) = upstream((y, state))
    dx, (dh0,) = layer.backward((dy, (dh,)), cache)

    tx, th = tensor(x), tensor(h[None])
    ty, last = module(tx, th)
    torch_backward((ty, last[0]), (dy, dh))
    assert_close((y, *state), (ty.detach().numpy(), last[0].detach().numpy()), 1e-10)
    assert_close((dx, dh0), (gradient(tx), gradient(th)[0]), 1e-10)
    assert_close(grads(layer), [leaf.grad.numpy().T for leaf in theirs], 1e-10)


def test_the_parameters_at_the_start():
    W, U, b_x, b_h = (p.value for p in GRU(8, 8, rng=0).parameters())
    for block in (*np.split(W, 3, axis=1), *np.split(U, 3, axis=1)):
        np.testing.assert_allclose(block.T @ block, np.eye(8), atol=1e-5)
    assert not any(bias.any() for bias in (b_x, b_h))


@pytest.mark.parametrize(("arguments", "sentence"), [((0, 5), "GRU: d is 0"), ((4, 2.5), "GRU: h is 2.5")])
def test_bad_settings(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        GRU(*arguments)
