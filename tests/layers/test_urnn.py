"""URNN: W against its dense matrices, the equations under torch autograd, and exact facts."""

import math

import numpy as np
import pytest
from cases import TABLE, B, D, H, mask_kinds
from helpers import all_gradients, assert_close, assert_identical, grads, upstream
from oracles import gradient, pytorch, tensor, tensors, torch_backward

from minigrad.fast.urnn import EPS
from minigrad.layers import URNN
from minigrad.layers.urnn import complex_rows, modrelu, modrelu_backward, real_rows, unitary

CASE, = (case for case in TABLE if case.name == "URNN")


# ---- W ---------------------------------------------------------------------------------------------------

def dense(layer):
    """W as the paper has it, a product of (h, h) matrices that act on columns."""
    h, n = len(layer.b.value), np.arange(len(layer.b.value))
    F, P = np.exp(-2j * np.pi * np.outer(n, n) / h) / math.sqrt(h), np.eye(h)[layer.permutation]
    D1, D2, D3 = (np.diag(np.exp(1j * omega.value)) for omega in (layer.omega1, layer.omega2, layer.omega3))
    R1, R2 = (np.eye(h) - 2 * np.outer(v, v.conj()) / np.linalg.norm(v) ** 2
              for v in (complex_rows(layer.v1.value), complex_rows(layer.v2.value)))
    return D3 @ R2 @ np.linalg.inv(F) @ D2 @ P @ R1 @ F @ D1


@pytest.mark.parametrize("h", [1, 2, 5, 12, 64])
def test_W_is_the_product_of_its_matrices_and_unitary(h):
    layer = URNN(1, h, rng=h, dtype="float64")
    _, *omegas_and_vs, _ = layer.cell_weights("float64")[0]
    W = unitary(np.eye(h) + 0j, *omegas_and_vs, layer.permutation)[0].T      # row k of the chain's result is W e_k
    np.testing.assert_allclose(W, dense(layer), atol=1e-12)
    np.testing.assert_allclose(W @ W.conj().T, np.eye(h), atol=1e-12)


def test_without_input_and_bias_the_norm_of_the_state_is_kept():
    """h_t = W^t h_0 then: modReLU with b = 0 is the identity."""
    layer = URNN(2, 16, rng=0, dtype="float64")
    layer.b.value[...] = 0
    y, _ = layer(np.zeros((3, 200, 2)))
    norm = np.linalg.norm(layer.h0.value)
    np.testing.assert_allclose(np.linalg.norm(y, axis=2), norm, rtol=1e-12)
    last = np.linalg.matrix_power(dense(layer), 200) @ complex_rows(layer.h0.value)
    np.testing.assert_allclose(complex_rows(y[0, -1]), last, atol=1e-12)


# ---- against PyTorch -------------------------------------------------------------------------------------

def test_equals_torch_autograd():
    """The equations under torch's own complex autograd, from the learned h0; eps stands in r alone."""
    torch, layer, x, mask = pytorch(), CASE.layer(), CASE.x(), mask_kinds()["a sample with no real step"]
    (y, state), cache = layer.forward(x, mask=mask)
    dy, dstate = upstream((y, state))
    dx, _ = layer.backward((dy, dstate), cache)

    weights, tx = tensors(layer), tensor(x)
    v1, v2 = (torch.complex(v[:H], v[H:]) for v in (weights["v1"], weights["v2"]))
    R1, R2 = (torch.eye(H) - 2 * torch.outer(v, v.conj()) / v.abs().square().sum() for v in (v1, v2))
    D1, D2, D3 = (torch.polar(torch.ones(H, dtype=torch.float64), weights[f"omega{n}"]) for n in (1, 2, 3))
    h, ys = torch.complex(*weights["h0"].expand(B, 2 * H).split(H, 1)), []
    for t, real in enumerate(torch.tensor(mask).T[:, :, None]):
        z = (torch.fft.fft(h * D1, norm="ortho") @ R1.T)[:, torch.tensor(layer.permutation)]
        z = (torch.fft.ifft(z * D2, norm="ortho") @ R2.T) * D3 + torch.complex(*(tx[:, t] @ weights["V"]).split(H, 1))
        r = (z.real.square() + z.imag.square() + EPS * EPS).sqrt()
        new = torch.relu(r + weights["b"]) * z / r
        h = torch.where(real, new, h)
        ys.append(real * torch.cat([new.real, new.imag], 1))
    ty, last = torch.stack(ys, 1), torch.cat([h.real, h.imag], 1)
    torch_backward((ty, last), (dy, *dstate))
    assert_close((y, *state), (ty.detach().numpy(), last.detach().numpy()), 1e-11)
    assert_close((dx, grads(layer)), (gradient(tx), [gradient(leaf) for leaf in weights.values()]), 1e-11)
    off = (complex_rows(y) == 0) & mask[:, :, None]
    assert 0.05 < off.mean() < 0.5                                           # modReLU turns some units off


# ---- modReLU ---------------------------------------------------------------------------------------------

def test_modrelu_turns_the_modulus_and_keeps_the_phase():
    z, b = np.array([[3 + 4j, 0.3 - 0.4j, -1j, -0.6 + 0.8j]]), np.array([-2, -0.6, 0.5, 0])
    y, _ = modrelu(z, b)
    np.testing.assert_allclose(y, [[0.6 * (3 + 4j), 0, -1.5j, -0.6 + 0.8j]], atol=1e-9)
    assert y[0, 1] == 0


@pytest.mark.parametrize("b", [-1.0, -EPS / 2, 0.0, EPS, 0.3])
def test_modrelu_at_and_around_zero(b):
    """0 at z = 0 whatever b is, nothing divides by zero, and backward is the derivative of this very function."""
    b = np.array([b])
    y, cache = modrelu(np.zeros((1, 1), complex), b)
    assert y == 0
    dz, db = modrelu_backward(np.full((1, 1), 2 - 1j), cache)
    np.testing.assert_allclose(dz, max(1 + b[0] / EPS, 0) * (2 - 1j), rtol=1e-12)
    assert db == 0
    dy, step = 0.7 - 0.4j, 1e-4 * EPS

    def slope(z, step):
        """Of Re(conj(dy) modReLU(z)), by central differences."""
        above, below = (modrelu(np.array([[z + s]]), b)[0][0, 0] for s in (step, -step))
        return (np.conj(dy) * (above - below)).real / (2 * abs(step))

    for z in (0.3 * EPS * (1 - 2j), -2j * EPS, EPS * (40 + 9j)):
        expected = slope(z, step) + 1j * slope(z, 1j * step)
        dz, _ = modrelu_backward(np.array([[dy]]), modrelu(np.array([[z]]), b)[1])
        np.testing.assert_allclose(dz[0, 0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_zero_input_and_zero_start_stay_zero(dtype):
    layer = URNN(2, 6, rng=0, dtype=dtype)
    layer.h0.value[...] = 0
    (y, state), cache = layer.forward(np.zeros((2, 4, 2), dtype))
    assert not y.any()
    dx, dstate = layer.backward(upstream((y, state)), cache)
    assert all(np.isfinite(array).all() for array in [dx, *dstate, *grads(layer)])


def test_with_every_unit_off_every_gradient_is_zero():
    layer = URNN(D, H, rng=0, dtype="float64")
    layer.b.value[...] = -50
    out, returned, totals = all_gradients(layer, CASE.x(), {}, upstream(layer(CASE.x())))
    assert not any(array.any() for array in [out[0], *out[1], returned[0], *returned[1], *totals])


# ---- the learned start -----------------------------------------------------------------------------------

@pytest.mark.parametrize("fast", [True, False])
def test_a_sample_with_no_real_step_keeps_h0_and_hands_it_its_dstate(fast):
    layer, x, mask = CASE.layer(), CASE.x(), mask_kinds()["no real step at all"]
    layer.fast = fast
    (y, (h,)), cache = layer.forward(x, mask=mask)
    assert_identical(h, np.tile(layer.h0.value, (B, 1)))
    dy, dstate = upstream((y, (h,)))
    dx, dstate0 = layer.backward((dy, dstate), cache)
    assert_identical(dstate0, dstate)
    assert_close(layer.h0.grad, dstate[0].sum(axis=0))
    assert not any(g.any() for g in [dx, *grads(layer)[:-1]])


# ---- exact facts -----------------------------------------------------------------------------------------

def test_the_length_of_v_is_without_effect():
    """R depends on v's direction alone: a factor, and a phase, change nothing; so dv is orthogonal to v and to i v."""
    layer, x = CASE.layer(), CASE.x()
    dout = upstream(layer(x))
    out, _, _ = all_gradients(layer, x, {}, dout)
    for v in (layer.v1, layer.v2):
        inner = complex_rows(v.grad).conj() @ complex_rows(v.value)
        assert abs(inner) < 1e-12 * np.linalg.norm(v.grad) * np.linalg.norm(v.value)
        v.value[...] = real_rows(complex_rows(v.value) * (-30 + 7j))
    assert_close(layer(x), out)


def test_a_common_phase_passes_through():
    """modReLU and W commute with a phase: V and h0 turned by it turn every h_t by it."""
    layer, x, phase = CASE.layer(), CASE.x(), np.exp(0.7j)
    y, _ = layer(x)
    for parameter in (layer.V, layer.h0):
        parameter.value[...] = real_rows(phase * complex_rows(parameter.value))
    assert_close(layer(x)[0], real_rows(phase * complex_rows(y)))


# ---- the start of training -------------------------------------------------------------------------------

def test_first_values():
    h, d = 400, 3
    layer = URNN(d, h, rng=0)
    of_v = math.sqrt(6 / (2 + 2 * h))
    bounds = {"omega1": math.pi, "omega2": math.pi, "omega3": math.pi, "v1": of_v, "v2": of_v,
              "V": math.sqrt(6 / (d + 2 * h)), "b": 0.01, "h0": math.sqrt(3 / (2 * h))}
    for name, parameter in layer.named_parameters():
        size = np.abs(parameter.value)
        assert 0.97 * bounds[name] < size.max() <= bounds[name] * (1 + 1e-6)
        assert abs(parameter.value.mean()) < 0.1 * bounds[name]
    assert [*bounds] == [name for name, _ in layer.named_parameters()]


def test_the_size_of_the_papers_model():
    """512 units on pixel-by-pixel MNIST, with the readout of ten classes: about 16k numbers."""
    assert URNN(1, 512).count_parameters() + (2 * 512 + 1) * 10 == 16_394


def test_the_permutation_comes_from_the_seed_and_is_saved(tmp_path):
    layer, same, other = (URNN(D, 30, rng=seed, dtype="float64") for seed in (1, 1, 2))
    assert_identical(np.sort(layer.permutation), np.arange(30))
    assert_identical(layer.permutation, same.permutation)
    assert (layer.permutation != other.permutation).any()
    layer.save(tmp_path / "c")
    assert_identical(other.load(tmp_path / "c")(CASE.x()), layer(CASE.x()))
    assert_identical(layer.astype("float32").permutation, same.permutation)


# ---- bad input -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("arguments", "sentence"), [((0, 5), "URNN: d is 0"), ((4, 2.5), "URNN: h is 2.5")])
def test_bad_settings(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        URNN(*arguments)


@pytest.mark.parametrize("fast", [True, False])
def test_half_precision_is_refused(fast):
    layer, x = URNN(4, 5, fast=fast, rng=0).astype("float16"), np.zeros((2, 3, 4), "float16")
    with pytest.raises(TypeError, match=r"URNN: x and the parameters have dtype float16; expected float32 or wider"):
        layer.forward(x)
    assert layer(x.astype("float32"))[0].dtype == np.float32                 # what both are together counts
