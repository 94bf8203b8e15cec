"""URNN: W against its dense matrices, the fast loop against the plain equations, torch autograd, and exact facts."""

import math

import numpy as np
import pytest
from cases import TABLE, B, D, H, mask_kinds
from helpers import all_gradients, assert_close, assert_identical, grads, upstream
from oracles import choose, gradient, pytorch, tensor, tensors, torch_backward

from minigrad.fast.urnn import BLOCK, EPS
from minigrad.layers import URNN, Bidirectional, Stack
from minigrad.layers.urnn import (
    complex_rows,
    modrelu,
    modrelu_backward,
    real_rows,
    unitary,
    urnn_step,
    urnn_step_backward as step_backward,
)
from minigrad.tensors import fill_exactly, load_tensors, save_tensors

CASE, = (case for case in TABLE if case.name == "URNN")


def complex_normal(rng, *shape):
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


# ---- W ---------------------------------------------------------------------------------------------------

def dense(layer):
    """W as the paper has it, a product of (h, h) matrices that act on columns."""
    omega1, omega2, omega3, v1, v2, _, _ = layer._values()
    h = len(omega1)
    n = np.arange(h)
    F = np.exp(-2j * np.pi * np.outer(n, n) / h) / math.sqrt(h)
    P = np.eye(h)[layer.permutation]
    D1, D2, D3 = (np.diag(np.exp(1j * omega)) for omega in (omega1, omega2, omega3))
    R1, R2 = (np.eye(h) - 2 * np.outer(v, v.conj()) / np.linalg.norm(v) ** 2 for v in (v1[:h] + 1j * v1[h:],
                                                                                       v2[:h] + 1j * v2[h:]))
    return D3 @ R2 @ np.linalg.inv(F) @ D2 @ P @ R1 @ F @ D1


def chain(layer, z):
    *omegas, v1, v2, _, _ = layer._values()
    return unitary(z, *omegas, v1, v2, layer.permutation)[0]


@pytest.mark.parametrize("h", [1, 2, 5, 12, 64])
def test_W_is_the_product_of_its_matrices_and_unitary(h):
    layer = URNN(1, h, rng=h, dtype="float64")
    W = chain(layer, np.eye(h) + 0j).T                                       # row k of the chain's result is W e_k
    np.testing.assert_allclose(W, dense(layer), atol=1e-12)
    np.testing.assert_allclose(W @ W.conj().T, np.eye(h), atol=1e-12)
    z = complex_normal(np.random.default_rng(0), 4, h)
    np.testing.assert_allclose(np.linalg.norm(chain(layer, z), axis=1), np.linalg.norm(z, axis=1), rtol=1e-12)


def test_without_input_and_bias_the_norm_of_the_state_is_kept():
    """h_t = W^t h_0 then: modReLU with b = 0 is the identity."""
    layer = URNN(2, 16, rng=0, dtype="float64")
    layer.b.value[...] = 0
    y, _ = layer(np.zeros((3, 200, 2)))
    norm = np.linalg.norm(layer.h0.value)
    np.testing.assert_allclose(np.linalg.norm(y, axis=2), norm, rtol=1e-12)
    last = np.linalg.matrix_power(dense(layer), 200) @ complex_rows(layer.h0.value)
    np.testing.assert_allclose(complex_rows(y[0, -1]), last, atol=1e-12)


# ---- the fast loop ---------------------------------------------------------------------------------------

def plain(layer, x, h, mask, dy, dstate):
    """(y, h), (dx, dh0), gradients: `urnn_step` after `urnn_step`, the mask in every step. h complex."""
    *_, V, _ = weights = layer._values()
    ys, caches, dxs = [], [], []
    for t in range(x.shape[1]):
        real = mask[:, t]
        h_new, cache = urnn_step(choose(real, x[:, t], 0), h, *weights, layer.permutation)
        h = choose(real, h_new, h)
        ys.append(choose(real, real_rows(h_new), 0))
        caches.append(cache)
    dh, totals = complex_rows(dstate), [0.0] * len(weights)
    for t in reversed(range(x.shape[1])):
        real = mask[:, t]
        dnew = choose(real, dh + complex_rows(dy[:, t]), 0)
        (dx, dold), step = step_backward(dnew, caches[t], V, layer.permutation)
        dh = choose(real, dold, dh)
        dxs.insert(0, choose(real, dx, 0))
        totals = [a + b for a, b in zip(totals, step)]
    return (np.stack(ys, axis=1), real_rows(h)), (np.stack(dxs, axis=1), real_rows(dh)), totals


def mask_of(T):
    mask = np.ones((2, T), bool)
    mask[0, 1::3] = mask[1, T // 2:] = False
    return mask


@pytest.mark.parametrize("mask", [*mask_kinds().values(), *map(mask_of, [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])],
                         ids=[*mask_kinds(), "7", "8", "9", "29"])
def test_the_fast_loop_equals_the_plain_equations(mask):
    layer, rng = CASE.layer(), np.random.default_rng(4)
    x, h = rng.standard_normal((*mask.shape, D)), rng.standard_normal((len(mask), 2 * H))
    (y, (state,)), cache = layer.forward(x, state=(h,), mask=mask)
    dy, (dstate,) = upstream((y, (state,)))
    dx, (dh,) = layer.backward((dy, (dstate,)), cache)
    out, returned, totals = plain(layer, x, complex_rows(h), mask, dy, dstate)
    assert_close((y, state), out)
    assert_close((dx, dh), returned)
    assert_close(grads(layer)[:-1], totals)
    assert not layer.h0.grad.any()                                           # it had no part
    if mask.all():
        off = np.abs(complex_rows(y)) == 0
        assert 0.05 < off.mean() < 0.5                                       # modReLU turns some units off


@pytest.mark.parametrize("kind", mask_kinds())
def test_equals_torch_autograd(kind):
    """The equations under torch's own complex autograd, from the learned h0; eps stands in r alone."""
    torch, layer, x, mask = pytorch(), CASE.layer(), CASE.x(), mask_kinds()[kind]
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
    assert_close(dx, gradient(tx), 1e-11)
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, gradient(weights[name]), 1e-11)


def test_stepping_equals_the_sequence():
    layer, x = CASE.layer(), CASE.x()
    y, _ = layer(x)
    stepping = layer.begin()
    for t in range(x.shape[1]):
        y_t, stepping = layer.step(x[:, t], stepping)
        assert_close(y_t, y[:, t])


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

def test_h0_has_the_gradient_of_a_state_written_out():
    layer, x = CASE.layer(), CASE.x()
    state = layer.initial_state(B)
    assert_identical(state, (np.tile(layer.h0.value, (B, 1)),))
    dout = upstream(layer(x))
    out, (dx, dstate0), totals = all_gradients(layer, x, {}, dout)
    same, (same_dx, (dh,)), given = all_gradients(layer, x, {"state": state}, dout)
    assert_identical((out, dx, dstate0, totals[:-1]), (same, same_dx, (dh,), given[:-1]))
    assert_close(totals[-1], dh.sum(axis=0))
    assert not given[-1].any()


def test_a_sample_with_no_real_step_keeps_h0_and_hands_it_its_dstate():
    layer, x = CASE.layer(), CASE.x()
    mask = mask_kinds()["no real step at all"]
    (y, (h,)), cache = layer.forward(x, mask=mask)
    assert_identical(h, layer.initial_state(B)[0])
    dy, dstate = upstream((y, (h,)))
    dx, dstate0 = layer.backward((dy, dstate), cache)
    assert_identical(dstate0, dstate)
    assert_close(layer.h0.grad, dstate[0].sum(axis=0))
    assert not any(g.any() for g in [dx, *grads(layer)[:-1]])


@pytest.mark.parametrize("masked", [False, True])
def test_segments_from_the_learned_start(masked):
    """All gradients, h0's too, when the first segment is given no state."""
    layer, x = CASE.layer(), CASE.x()
    mask = mask_kinds()["a sample with no real step"] if masked else np.ones(x.shape[:2], bool)
    dy, dstate = upstream(layer(x))
    _, _, whole = all_gradients(layer, x, {"mask": mask}, (dy, dstate))
    layer.zero_grad()
    (_, state), first = layer.forward(x[:, :3], mask=mask[:, :3])
    _, second = layer.forward(x[:, 3:], state=state, mask=mask[:, 3:])
    _, dstate = layer.backward((dy[:, 3:], dstate), second)
    layer.backward((dy[:, :3], dstate), first)
    assert_close(grads(layer), whole)


@pytest.mark.parametrize("make", [lambda u: Stack(u, URNN(2 * H, 3, rng=1, dtype="float64")),
                                  lambda u: Bidirectional(u, URNN(D, 3, rng=1, dtype="float64"))])
def test_no_state_is_the_written_out_one_in_composites(make):
    layer = make(CASE.layer())
    assert_identical(layer(CASE.x()), layer(CASE.x(), state=layer.initial_state(B)))


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
    assert sum(p.value.size for p in URNN(1, 512).parameters()) + (2 * 512 + 1) * 10 == 16_394


def test_the_permutation_is_fixed_by_the_seed(tmp_path):
    layer, same, other = (URNN(D, 30, rng=seed, dtype="float64") for seed in (1, 1, 2))
    assert_identical(np.sort(layer.permutation), np.arange(30))
    assert_identical(layer.permutation, same.permutation)
    assert (layer.permutation != other.permutation).any()
    layer.b.value += 0.3
    save_tensors(tmp_path / "c", {name: p.value for name, p in layer.named_parameters()}, {})
    fill_exactly(same.named_arrays(), load_tensors(tmp_path / "c")[0], "checkpoint")
    assert_identical(same(CASE.x()), layer(CASE.x()))
    assert_identical(layer.astype("float32").permutation, same.permutation)


# ---- bad input -------------------------------------------------------------------------------------------

X = np.zeros((2, 3, 4))


@pytest.mark.parametrize(("arguments", "sentence"), [
    ((0, 5), r"URNN: d is 0; expected a whole number of at least 1"), ((4, 2.5), r"URNN: h is 2.5; expected a whole"),
])
def test_bad_settings(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        URNN(*arguments)


@pytest.mark.parametrize(("x", "keywords", "error", "sentence"), [
    (np.zeros((2, 3, 5)), {}, ValueError, r"URNN: x has shape \(2, 3, 5\); expected \(batch, length, 4\)"),
    (np.zeros((2, 3, 4), int), {}, TypeError, r"URNN: x has dtype int64; expected floating-point"),
    (np.zeros((2, 3, 4), complex), {}, TypeError, r"URNN: x has dtype complex128; expected floating-point"),
    (X, {"state": (np.zeros((2, 5)),)}, ValueError, r"URNN: state's h has shape \(2, 5\); expected \(2, 10\)"),
    (X, {"state": (np.zeros((2, 10), complex),)}, TypeError, r"URNN: state's h has dtype complex128"),
    (X, {"state": np.zeros((2, 10))}, ValueError, r"URNN: state is ndarray; expected a tuple \(h\)"),
    (X, {"mask": np.ones((2, 4), bool)}, ValueError, r"URNN: mask has shape \(2, 4\); expected \(2, 3\)"),
])
def test_bad_input(x, keywords, error, sentence):
    with pytest.raises(error, match=sentence):
        URNN(4, 5, dtype="float64").forward(x, **keywords)


def test_a_wrong_upstream_gradient_is_refused():
    layer = URNN(4, 5, dtype="float64")
    _, cache = layer.forward(X)
    with pytest.raises(ValueError, match=r"URNN: dy has shape \(2, 3, 5\); expected \(2, 3, 10\)"):
        layer.backward((np.zeros((2, 3, 5)), None), cache)
    with pytest.raises(ValueError, match=r"URNN: dstate's h has shape \(1, 10\); expected \(2, 10\)"):
        layer.backward((None, (np.zeros((1, 10)),)), cache)


def test_half_precision_is_refused():
    layer = URNN(4, 5, rng=0).astype("float16")
    with pytest.raises(TypeError, match=r"URNN: x and the parameters have dtype float16; expected float32 or wider"):
        layer.forward(X.astype("float16"))
    assert layer(X.astype("float32"))[0].dtype == np.float32                 # what both are together counts


# ---- cost ------------------------------------------------------------------------------------------------

def test_the_cache_is_linear_in_the_length_and_in_the_units():
    def size(T, h):
        _, (cache, _) = URNN(1, h, rng=0).forward(np.zeros((4, T, 1), "float32"))
        return sum(array.nbytes for array in cache if array is not None)
    assert size(400, 16) / size(200, 16) == pytest.approx(2, rel=0.05)
    assert size(200, 64) / size(200, 16) == pytest.approx(4, rel=0.05)
