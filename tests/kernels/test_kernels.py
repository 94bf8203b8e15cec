"""The CUDA kernels: on the CPU, as C++ (cuda_shim.py), against their NumPy twins; under the CUDA compilers; on a GPU.

Every parity test runs twice: everywhere on the shim, and with `-m gpu` through CuPy on a GPU.
"""

import importlib
import mmap
import os
import shutil
import sys

import cuda_shim
import numpy as np
import pytest
from cases import TABLE
from helpers import floats, grads, run_forward, upstream

from minigrad import Parameter, functional, kernels
from minigrad.backend import asnumpy, to_device
from minigrad.clipping import clip_grad_norm, clip_grad_value, grad_norm, norm_scale
from minigrad.fast import lstm as lstm_loop, sru as sru_loop
from minigrad.kernels import fused, launch, lstm
from minigrad.layers import LSTM, RRALSTM, SRU, Embedding, LayerNorm, MultiHeadAttention, SRUpp
from minigrad.layers.norm import normalize, normalize_backward
from minigrad.losses import mean_squared_error
from minigrad.optim import SGD, Adadelta, Adam, AdamW, Momentum, RAdam, RMSprop
from minigrad.tree import tree_leaves, tree_map

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 4e-3}             # relative to the largest entry
no_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile the kernels as C++")
on_shim = pytest.param("shim", marks=[no_gxx, pytest.mark.slow])
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def shared_folder(tmp_path_factory, name):
    """One folder for all workers of a run (pytest-xdist)."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda_shim" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return cuda_shim.Shim(shared_folder(tmp_path_factory, "kernels"))


def copy(tree):
    return tree_map(lambda a: a.copy("K"), tree)


def filled_with_nan(shape, dtype, xp=np):
    """In place of memory.empty: what a kernel leaves unwritten shows."""
    return xp.full(shape, np.nan, dtype)


def on_the_shim(monkeypatch, kernel):
    monkeypatch.setattr(launch, "kernel", kernel)
    for family in cuda_shim.families():
        module = importlib.import_module(f"minigrad.kernels.{family}")
        if hasattr(module, "empty"):
            monkeypatch.setattr(module, "empty", filled_with_nan)


@pytest.fixture(params=[on_shim, pytest.param("gpu", marks=pytest.mark.gpu)])
def put(request, monkeypatch):
    """f(tree) -> the arrays where the kernels run."""
    if request.param == "gpu":
        return lambda tree: to_device(tree, "gpu")
    on_the_shim(monkeypatch, request.getfixturevalue("shim").kernel)
    return copy


def as_double(tree):
    return tree_map(lambda a: a.astype("float64") if a.dtype.kind == "f" else a, tree)


def assert_near(got, expected, dtype, factor=1):
    """Equal to rounding, relative to the largest entry of each array, and of this dtype.

    Rounding differs more on a GPU, which contracts a b + c and has an exp and a tanh of its own.
    """
    got, expected = list(tree_leaves(got)), list(tree_leaves(expected))
    assert [path for path, _ in got] == [path for path, _ in expected]
    for (path, a), (_, b) in zip(got, expected):
        assert a.dtype == dtype, path
        slack = factor if isinstance(a, np.ndarray) else 4 * factor
        a, b = asnumpy(a), asnumpy(b)
        assert a.shape == b.shape, path
        finest = 10 * np.finfo(dtype).tiny * np.finfo(dtype).eps             # this type has no numbers between
        atol = slack * TOLERANCE[dtype] * abs(b).max(initial=0) + finest
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=path)


def drawn(rng, shape, dtype, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(dtype)


# ---- SRU -------------------------------------------------------------------------------------------------

def sru_arguments(T, B, w, h, k, dtype, given=True, masked=False, seed=0):
    """(n, x, c, weights), (dh, dc), m, lengths."""
    rng = np.random.default_rng(seed)
    weights = tuple(drawn(rng, shape, dtype, 0.5) for shape in [(w, k * h), (h,), (h,), (h,), (h,)])
    n, x, c, dh, dc = (drawn(rng, shape, dtype) for shape in [(T, B, w), (T, B, h), (B, h), (T, B, h), (B, h)])
    m, lengths = None, None
    if masked:
        m = (rng.random((B, h)) > 0.4).astype(dtype) / np.asarray(0.6, dtype)
        lengths = rng.integers(0, T + 1, B)
        dh[np.arange(T)[:, None] >= lengths] = 0
    return (n, x, c if given else None, weights), (dh if given else None, dc), m, lengths


def sru(module, arguments, upstream, m, lengths, how):
    """What a module's recurrence computes, forward and backward; h at the real steps alone."""
    hs, c, cache = module.recurrence_forward(*arguments, m=m, lengths=lengths, **how)
    returned = module.recurrence_backward(*upstream, cache, arguments[3], **how)
    if lengths is not None:
        hs = asnumpy(hs).copy()
        hs[np.arange(len(hs))[:, None] >= asnumpy(lengths)] = 0
    return hs, c, returned


@every_dtype
@pytest.mark.parametrize("k", [3, 4])
@pytest.mark.parametrize(("T", "B", "h", "activation", "scale", "given", "masked"), [
    (1, 1, 1, "identity", 1.0, True, False), (7, 3, 5, "tanh", 1.2, True, True),
    (8, 2, 16, "identity", 1.5, False, True), (21, 5, 13, "tanh", 1.0, False, False),
    (17, 4, 33, "identity", 1.0, True, True), (0, 2, 3, "tanh", 1.0, True, False)])
def test_sru(put, T, B, h, activation, scale, given, masked, k, dtype):
    sru_parity(put, T, B, h, activation, scale, given, masked, k, dtype)


def sru_parity(put, T, B, h, activation, scale, given, masked, k, dtype):
    arguments = sru_arguments(T, B, 4, h, k, dtype, given, masked)
    how = {"activation": activation, "scale": scale}
    expected = sru(sru_loop, *as_double(arguments), how)
    assert_near(sru(fused, *put(arguments), how), expected, dtype)


@pytest.mark.parametrize(("dh_given", "dc_given"), [(True, False), (False, False)])
def test_sru_whose_last_state_gets_no_gradient(put, dh_given, dc_given):
    arguments, (dh, dc), *rest = sru_arguments(5, 2, 3, 4, 3, "float64", masked=True)
    upstream = dh if dh_given else None, dc if dc_given else None
    expected = sru(sru_loop, arguments, upstream, *rest, {})
    assert_near(sru(fused, *put((arguments, upstream, *rest)), {}), expected, "float64")


def test_sru_carries_its_state_in_float32(put):
    """Moves of c and dc too small for float16 add up: (1 - f) / 2 is 6e-5, float16's spacing there 2.4e-4 and more."""
    T, one = 1000, np.ones((1, 1, 1), "float16")
    vectors = [np.array([v], "float16") for v in (0, 0, 9, 0)]               # v_f, v_r, b_f, b_r
    weights = (np.array([[1, 0, 0]], "float16"), *vectors)                   # u0 = 1, u1 = u2 = 0
    arguments = one.repeat(T, axis=0), one.repeat(T, axis=0), one[0] / 2, weights
    upstream = None, one[0] / 2
    expected = sru(sru_loop, *as_double((arguments, upstream)), None, None, {})
    assert expected[1] > 0.55
    assert expected[2][0][2] < 0.45
    assert_near(sru(fused, *put((arguments, upstream)), None, None, {}), expected, "float16")


# ---- LSTM and RRA ----------------------------------------------------------------------------------------

def loop_arguments(T, B, d, h, K, offset, dtype, given=True, masked=None, seed=0):
    """(x, past, c, mask, W, U, b, w_hat), (dy, dpast, dc)."""
    rng, P = np.random.default_rng(seed), max(1, K + offset - 1)
    x, past, c, W, U, b, dy, dpast, dc = (drawn(rng, shape, dtype, scale) for shape, scale in [
        ((B, T, d), 1), ((B, P, h), 0.5), ((B, h), 1), ((d, 4 * h), 0.4), ((h, 4 * h), 0.4), ((4 * h,), 0.3),
        ((B, T, h), 1), ((B, P, h), 1), ((B, h), 1)])
    w_hat = (rng.random(K) / max(K, 1)).astype(dtype) if K else None
    mask = None
    if masked:
        mask = np.arange(T) < rng.integers(0, T + 1, B)[:, None] if masked == "right" else rng.random((B, T)) > 0.4
    if not given:
        past, c, dpast, dc = np.zeros_like(past), np.zeros_like(c), None, None
    return (x, past, c, mask, W, U, b, w_hat), (dy, dpast, dc)


def loop(module, arguments, upstream, offset):
    y, past, c, cache = module.loop_forward(*arguments, offset)
    *_, W, U, _, w_hat = arguments
    return y, past, c, module.loop_backward(*upstream, cache, W, U, w_hat, offset)


@every_dtype
@pytest.mark.parametrize(("T", "B", "d", "h", "K", "offset", "given", "masked"), [
    (1, 1, 1, 1, 0, 1, True, None), (6, 3, 2, 5, 0, 1, True, "gaps"), (9, 2, 3, 17, 0, 1, False, "right"),
    (7, 3, 2, 5, 3, 2, True, None), (5, 2, 2, 7, 4, 1, True, "gaps"), (3, 2, 2, 4, 6, 2, True, "right"),
    (12, 5, 3, 33, 2, 2, False, None), (1, 2, 2, 3, 1, 2, True, None), (0, 2, 2, 3, 2, 2, True, None)])
def test_lstm_and_rra(put, T, B, d, h, K, offset, given, masked, dtype):
    loop_parity(put, T, B, d, h, K, offset, given, masked, dtype)


def loop_parity(put, T, B, d, h, K, offset, given, masked, dtype):
    arguments, upstream = loop_arguments(T, B, d, h, K, offset, dtype, given, masked)
    expected = loop(lstm_loop, *as_double((arguments, upstream)), offset=offset)
    assert_near(loop(fused, *put((arguments, upstream)), offset=offset), expected, dtype)


def test_blocks_that_share_a_window_weight_go_round(put, monkeypatch):
    monkeypatch.setattr(lstm, "WINDOW_BLOCKS", 2)
    loop_parity(put, 12, 3, 2, 33, 2, 1, True, None, "float64")


@pytest.mark.parametrize("w_hat", [None, np.ones(1, "float16")], ids=["LSTM", "RRALSTM"])
def test_lstm_carries_its_state_in_float32(put, w_hat):
    """As SRU: i g = 1 - f = 1.2e-4, so that c creeps from 0.5 to 1 in moves of 6e-5. (Backward reads the gates as they
    are kept, rounded.)"""
    T, zeros = 1000, np.zeros((1, 4), "float16")
    b, half = np.array([-9, 9, 0, 9], "float16"), np.full((1, 1), 0.5, "float16")
    arguments = np.zeros((1, T, 1), "float16"), np.zeros((1, 1, 1), "float16"), half, None, zeros, zeros, b, w_hat
    _, _, expected, _ = lstm_loop.loop_forward(*as_double(arguments), 1)
    assert expected > 0.55
    _, _, c, _ = fused.loop_forward(*put(arguments), 1)
    assert_near(c, expected, "float16")


def test_arrays_in_the_order_of_columns(put):
    """Whatever a caller hands over: backward works in a copy of dc, which has to be in the order of rows."""
    arguments, upstream = tree_map(np.asfortranarray, loop_arguments(5, 3, 2, 4, 2, 2, "float64", masked="gaps"))
    expected = loop(lstm_loop, arguments, upstream, offset=2)
    assert_near(loop(fused, *put((arguments, upstream)), offset=2), expected, "float64")
    P, dP, drop = np.random.default_rng(0).random((3, 4, 5))
    expected = functional.softmax_rows_backward(dP.copy(), P, drop, (P * drop * dP).sum(axis=1, keepdims=True), 1.0)
    got = fused.softmax_rows_backward(*put((dP, P, np.asfortranarray(drop))), None, None)
    assert_near({"dS": got}, {"dS": expected}, "float64")
    arguments, upstream, *rest = tree_map(np.asfortranarray, sru_arguments(5, 3, 4, 4, 3, "float64"))
    expected = sru(sru_loop, arguments, upstream, *rest, {})
    assert_near(sru(fused, *put((arguments, upstream, *rest)), {}), expected, "float64")


# ---- layer norm ------------------------------------------------------------------------------------------

@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (5, 3, 7), (3, 33), (70, 5), (2, 0, 4), (2, 300)])
def test_layer_norm(put, shape, dtype):
    norm_parity(put, shape, dtype)


def norm_parity(put, shape, dtype):
    rng, d = np.random.default_rng(0), shape[-1]
    x, dy = drawn(rng, shape, dtype) + np.asarray(3, dtype), drawn(rng, shape, dtype)
    gain, bias = drawn(rng, (d,), dtype), drawn(rng, (d,), dtype)
    x_hat, cache = normalize(x.astype("float64"), 1e-5)
    dgain, dbias = ((dy * part).astype("float64").reshape(-1, d).sum(axis=0) for part in (x_hat, 1.0))
    expected = x_hat * gain + bias, (normalize_backward(dy.astype("float64") * gain, cache), dgain, dbias)
    x, dy, gain, bias = put((x, dy, gain, bias))
    y, cache = fused.layer_norm_forward(x, gain, bias, 1e-5)
    assert_near((y, fused.layer_norm_backward(dy, gain, cache)), expected, dtype)


# ---- attention -------------------------------------------------------------------------------------------

def attention_mask(kind, shape, rng):
    *front, L, M = shape
    if kind is None:
        return None
    shapes = {"keys": (front[0], *(1,) * (len(front) - 1), 1, M), "full": (*front, L, M),
              "queries": (*(1,) * len(front), L, 1)}
    mask = rng.random(shapes[kind]) > 0.4
    mask[..., -1] = kind != "keys"
    return mask


@every_dtype
@pytest.mark.parametrize(("shape", "rows", "keys", "kind", "causal", "window"), [
    ((2, 3, 5, 7), 0, 0, None, False, None), ((2, 3, 5, 7), 0, 0, "keys", False, None),
    ((3, 4, 9), 0, 0, "full", True, None), ((2, 2, 6, 33), 64, 30, "queries", True, 12),
    ((1, 1, 1, 1), 0, 0, None, True, 1), ((1, 2, 300), 0, 0, "keys", False, None),
    ((2, 3, 4, 5), 0, 0, "full", False, None),
    ((2, 1, 2, 3, 5), 0, 0, "full", True, 2), ((2, 3, 5, 0), 0, 0, None, False, None)])
def test_masked_softmax(put, shape, rows, keys, kind, causal, window, dtype):
    softmax_parity(put, shape, rows, keys, kind, causal, window, dtype)


def softmax_parity(put, shape, rows, keys, kind, causal, window, dtype):
    rng, (L, M) = np.random.default_rng(0), shape[-2:]
    S, dA, A = drawn(rng, shape, dtype, 3), drawn(rng, (*shape[:-1], 4), dtype), None
    mask, v = attention_mask(kind, shape, rng), drawn(rng, (*shape[:-2], M, 4), dtype)
    drop = ((rng.random(shape) > 0.3) / 0.7).astype(dtype) if kind == "full" else None
    rows, keys = slice(rows, rows + L), slice(keys, keys + M)
    offset = keys.stop - rows.stop
    S64, v64, dA64, drop64 = as_double((S, v, dA, drop))
    P = functional.masked_softmax(S64, mask, rows, keys, offset, causal, window)
    A, dP = (P if drop is None else P * drop64) @ v64, dA64 @ v64.swapaxes(-1, -2)
    dP_given = dP.astype(dtype)
    expected = P, functional.softmax_rows_backward(dP.copy(), P, drop64, dA64, A)
    S, mask, P_given, drop, dP_given = put((S, mask, P.astype(dtype), drop, dP_given))
    got = (fused.masked_softmax(S, mask, rows, keys, offset, causal, window),
           fused.softmax_rows_backward(dP_given, P_given, drop, None, None))
    assert_near(got, expected, dtype, 3)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 2, 2, 3, 4)])
def test_a_softmax_of_nothing_has_a_mask_too(put, shape):
    S, mask = put((np.zeros(shape), np.ones(shape, bool)))
    assert fused.masked_softmax(S, mask, slice(0, shape[-2]), slice(0, shape[-1]), 0, True, None).shape == shape


def test_a_mask_that_broadcast_to_repeats_is_not_written_out(monkeypatch):
    given = []
    monkeypatch.setattr(launch, "kernel", lambda *names: lambda *arguments: given.append(arguments))
    mask = np.broadcast_to(np.arange(14).reshape(2, 1, 1, 7) > 3, (2, 1, 5, 7))
    fused.masked_softmax(np.zeros((2, 3, 5, 7)), mask, slice(0, 5), slice(0, 7), 0, False, None)
    (_, _, _, mask, *strides), = ([*arguments[:8]] for arguments in given)
    assert (mask.shape, strides) == ((2, 1, 1, 7), [7, 0, 0, 1])


@no_gxx
@pytest.mark.slow
def test_attention_that_sees_nothing_and_nan_that_is_not_seen(shim, monkeypatch):
    on_the_shim(monkeypatch, shim.kernel)
    S = np.array([[np.nan, 1, 2], [np.nan, 1, 2], [0, np.nan, 1], [-np.inf, 0, 0], [-np.inf, -np.inf, 0]])
    mask = np.array([[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]], bool)
    P = fused.masked_softmax(S, mask, slice(0, 5), slice(0, 3), 0, False, None)
    e = 1 / (1 + np.exp(1))
    np.testing.assert_allclose(P, [[0, e, 1 - e], [0, 0, 0], [np.nan] * 3, [0, 1, 0], [0, 0, 0]], rtol=1e-15)


@every_dtype
def test_scores_whose_exp_leaves_the_range(put, dtype):
    """The largest of a row is its first, its last, and near all others; every difference is exact."""
    S = np.random.default_rng(0).integers(-903, -896, (3, 300)).astype(dtype)
    S[0, 0] = S[1, -1] = 900
    expected = functional.softmax_rows(S.astype("float64"))
    got = fused.masked_softmax(put(S), None, slice(0, 3), slice(0, 300), 0, False, None)
    assert_near({"P": got}, {"P": expected}, dtype)


# ---- embedding -------------------------------------------------------------------------------------------

@every_dtype
@pytest.mark.parametrize(("N", "V", "shape"), [
    (1, 1, (1,)), (40, 7, (33,)), (40, 7, ()), (9, 300, (2, 3)), (64, 1, (5,)), (0, 3, (4,)), (5, 3, (0,)),
    (100, 26, (65,))])
def test_scatter_add(put, N, V, shape, dtype):
    scatter_parity(put, N, V, shape, dtype)


def scatter_parity(put, N, V, shape, dtype):
    rng = np.random.default_rng(0)
    target, updates = drawn(rng, (V, *shape), dtype), drawn(rng, (N, *shape), dtype)
    ids = rng.integers(0, V, N)
    expected = target.astype("float64")
    np.add.at(expected, ids, updates.astype("float64"))
    target, ids, updates = put((target, ids, updates))
    assert fused.scatter_add(target, ids, updates)
    assert_near(target, expected, dtype, 2)


def test_scatter_add_adds_in_the_order_of_the_updates(put):
    """So that a run gives the same bits each time: in float32 1e8 swallows the ones that follow it."""
    target, ids, updates = put((np.zeros((2, 1), "float32"), np.array([1, 0, 1, 1, 1]),
                                np.array([[1], [5], [1e8], [1], [-1e8]], "float32")))
    assert fused.scatter_add(target, ids, updates)
    np.testing.assert_array_equal(asnumpy(target), [[5], [0]])
    assert fused.scatter_add(target, ids[::-1], updates[::-1])
    np.testing.assert_array_equal(asnumpy(target), [[10], [1]])


@pytest.mark.parametrize("ids", [np.array([-1, 2, 5, 3]), np.array([[1, 1], [0, 2]]), np.array([2, 0, 2], "uint8"),
                                 np.array([1, 1], "int32")], ids=str)
def test_scatter_add_takes_any_integers_modulo_V(put, ids):
    target, updates = np.zeros((3, 2)), np.arange(2.0 * ids.size).reshape(*ids.shape, 2)
    expected = target.copy()
    np.add.at(expected, ids % 3, updates)
    target, ids, updates, no_rows = put((target, ids, updates, np.zeros((0, 2))))
    assert fused.scatter_add(target, ids, updates)
    np.testing.assert_array_equal(asnumpy(target), expected)
    assert fused.scatter_add(no_rows, ids, updates)                          # there is nowhere to write


def test_scatter_add_leaves_what_it_has_no_kernel_for(put):
    target, ids, updates = put((np.zeros((3, 4)), np.array([1]), np.ones((1, 4))))
    assert not fused.scatter_add(target[:, ::2], ids, updates[:, ::2])
    assert not fused.scatter_add(target.astype("complex128"), ids, updates)
    assert not asnumpy(target).any()


# ---- optimizers and clipping -----------------------------------------------------------------------------

OPTIMIZERS = [
    (SGD, {}), (SGD, {"weight_decay": 0.1}), (Momentum, {"nesterov": True}), (Momentum, {"weight_decay": 0.1}),
    (Adadelta, {"lr": 0.7, "weight_decay": 0.01}), (RMSprop, {"eps": 1e-3}),
    (RMSprop, {"eps": 1e-3, "centred": True, "eps_inside": True, "momentum": 0.9}),
    (RMSprop, {"eps": 1e-3, "centred": True, "weight_decay": 0.1}), (RMSprop, {"eps_inside": True, "momentum": 0.5}),
    (Adam, {"weight_decay": 0.1}), (AdamW, {"weight_decay": 0.2}), (RAdam, {"weight_decay": 0.1}),
    (RAdam, {"betas": (0.8, 0.6)})]
SHAPES = [(1,), (7,), (33, 65), (0, 3), (5000,), (3, 4096)]


def parameters_of(dtype, rng):
    """Of several sizes; one in the order of columns."""
    values = [drawn(rng, shape, dtype) for shape in SHAPES] + [np.asfortranarray(drawn(rng, (6, 5), dtype))]
    return [Parameter(value) for value in values]


@pytest.fixture
def through_kernels(monkeypatch):
    """`kernels.of` gives the fused functions for NumPy too."""
    return lambda: monkeypatch.setattr(kernels, "of", lambda xp: fused)


@every_dtype
@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS, ids=str)
def test_optimizers(put, through_kernels, optimizer, settings, dtype):
    optimizer_parity(put, through_kernels, optimizer, settings, dtype)


def optimizer_parity(put, through_kernels, optimizer, settings, dtype):
    rng = np.random.default_rng(0)
    plain, other = (parameters_of(dtype, np.random.default_rng(1)) for _ in range(2))
    moved = [Parameter(value) for value in put([p.value for p in other])]
    for parameter in plain:
        parameter.value, parameter.grad = as_double((parameter.value, parameter.grad))
    runs = [optimizer(ps, no_decay=ps[1:3], **settings) for ps in (plain, moved)]
    gradients = [[drawn(rng, p.value.shape, dtype) for p in plain] for _ in range(7)]
    for step in gradients:
        for parameter, g in zip(plain, step):
            parameter.grad[...] = g
        runs[0].step()
    through_kernels()
    for step in gradients:
        for parameter, g in zip(moved, put(step)):
            parameter.grad[...] = g
        runs[1].step()
    got, expected = (([p.value for p in ps], [p.grad for p in ps], run.accumulators)
                     for ps, run in zip((moved, plain), runs[::-1]))
    assert_near(got, expected, dtype, 4)


@pytest.mark.parametrize(("optimizer", "settings", "state"), [
    (SGD, {}, {}), (SGD, {"weight_decay": 1.0}, {}),
    (RMSprop, {"centred": True, "eps": 1e-3}, {"E_g2": 0.5, "E_g": 1.0})], ids=str)
def test_a_step_from_a_state(put, through_kernels, optimizer, settings, state):
    """Nothing but the decay makes NaN of an infinite theta; a variance that rounding took below zero counts as zero."""
    moved = []
    for values in ([np.array([np.inf, 1.0, -2.0])], put([np.array([np.inf, 1.0, -2.0])])):
        parameter, = map(Parameter, values)
        run = optimizer([parameter], lr=0.1, **settings)
        parameter.grad[...] = 0.25
        for slot, number in state.items():
            run.accumulators[slot][0][...] = number
        with np.errstate(invalid="ignore"):
            run.step()
        moved.append(asnumpy(parameter.value))
        through_kernels()
    np.testing.assert_allclose(*moved, rtol=1e-13)


@every_dtype
def test_the_norm_and_clipping(put, through_kernels, dtype):
    rng = np.random.default_rng(0)
    plain = parameters_of(dtype, rng)
    for parameter in plain:
        parameter.grad[...] = drawn(rng, parameter.value.shape, dtype)
    moved = [Parameter(value) for value in put([p.value for p in plain])]
    for parameter, g in zip(moved, put([p.grad for p in plain])):
        parameter.grad[...] = g
    norm = clip_grad_norm(plain, 1.5)
    through_kernels()
    got = clip_grad_norm(moved, 1.5)
    assert got.shape == ()
    np.testing.assert_allclose(asnumpy(got), norm, rtol=1e-14)
    assert_near([p.grad for p in moved], [p.grad for p in plain], dtype)


@every_dtype
@pytest.mark.parametrize("c", [0.25, np.float64(0.1), 0, np.inf])
def test_clipping_by_value_and_zeros(put, through_kernels, c, dtype):
    """NaN stays, Inf is clipped; one gradient is every second column of an array."""
    rng, gradients = np.random.default_rng(0), []
    for shape in (*SHAPES, (6, 10)):
        g = drawn(rng, shape, dtype)
        g.reshape(-1)[:3] = [np.nan, np.inf, -np.inf][:g.size]
        gradients.append(g)
    expected = [np.clip(g, -c, c).astype(dtype) for g in gradients]
    parameters = [Parameter(value) for value in put(gradients)]
    for parameter, g in zip(parameters, put(gradients)):
        parameter.grad = g
    parameters[-1].grad, expected[-1] = parameters[-1].grad[:, ::2], expected[-1][:, ::2]
    through_kernels()
    clip_grad_value(parameters, c)
    for parameter, right in zip(parameters, expected):
        np.testing.assert_array_equal(asnumpy(parameter.grad), right)
    SGD(parameters).zero_grad()
    assert all((asnumpy(parameter.grad) == 0).all() for parameter in parameters)


def test_the_norm_of_gradients_with_gaps(put, through_kernels):
    """Their contiguous copies must live until the kernels have read them: the next array may get their memory."""
    parameters = [Parameter(value) for value in put([np.zeros((2, 1)), np.zeros((2, 1))])]
    for parameter, g in zip(parameters, put([np.full((2, 2), 1.0), np.full((2, 2), 7.0)])):
        parameter.grad = g[:, ::2]
    through_kernels()
    assert asnumpy(grad_norm(parameters)) == 10


def test_parameters_of_several_dtypes(put, through_kernels):
    """Each dtype has launches of its own, and one norm is made of them all; a replaced array is found."""
    kinds = [(5000, "float32"), (3, "float64"), (0, "float64"), (9, "float16")]
    parameters = [Parameter(value) for value in put([np.ones(*kind) for kind in kinds])]
    for parameter, n in zip(parameters, (1, 40, 0, 30)):
        parameter.grad[...] = n
    norm = np.sqrt(5000 + 3 * 40**2 + 9 * 30**2)
    through_kernels()
    run = Momentum(parameters, lr=0.5)
    for step in range(2):
        got = clip_grad_norm(parameters, 1.0)
        np.testing.assert_allclose(asnumpy(got), [norm, 1.0][step], rtol=1e-3)
        parameters[0].grad = parameters[0].grad.copy()
        run.accumulators = copy(run.accumulators)
        run.step()
    for parameter, n in zip(parameters, (1, 40, 0, 30)):                     # v = g, then 0.9 g + g
        np.testing.assert_allclose(asnumpy(parameter.value), 1 - 0.5 * 2.9 * n / norm, rtol=2e-3)


def test_clipping_a_gradient_between_others(put, through_kernels):
    """What lies before and behind it in memory is neither read nor changed."""
    around = put(np.full(5002, np.nan))
    around[1:-1] = 2
    parameter = Parameter(around[1:-1])
    parameter.grad = around[1:-1]
    through_kernels()
    np.testing.assert_allclose(asnumpy(clip_grad_norm([parameter], 1.0)), 2 * np.sqrt(5000), rtol=1e-14)
    clip_grad_value([parameter], 0.01)
    SGD([parameter]).zero_grad()
    assert np.flatnonzero(np.isnan(asnumpy(around))).tolist() == [0, 5001]
    assert not asnumpy(parameter.grad).any()


@pytest.mark.parametrize("place", [0, 4500])
@pytest.mark.parametrize("norm", [np.nan, np.inf, 1e200, 3e-310, 0])
def test_norms_at_the_ends_of_the_range(put, through_kernels, norm, place):
    through_kernels()
    values = put([np.zeros(5000), np.zeros(3)])
    parameters = [Parameter(value) for value in values]
    parameters[0].grad[place] = norm
    got = clip_grad_norm(parameters, np.inf)
    np.testing.assert_allclose(asnumpy(got), norm, rtol=1e-10)
    assert np.isfinite(norm) or all(np.isnan(asnumpy(p.grad)).all() for p in parameters)


@no_gxx
@pytest.mark.slow
@every_dtype
def test_with_a_thread_for_each_thread(shim, monkeypatch, dtype):
    """Every kernel that synchronises, with threads of the machine and a std::barrier in place of fibers."""
    launched = set()

    def kernel(family, name, dtype):
        launched.add(name)
        return shim.kernel(family, name, dtype, fibers=False)
    on_the_shim(monkeypatch, kernel)
    norm_parity(copy, (3, 33), dtype)
    softmax_parity(copy, (3, 4, 9), 0, 0, "full", True, None, dtype)
    loop_parity(copy, 5, 2, 2, 7, 2, 1, True, "gaps", dtype)
    gradients = [drawn(np.random.default_rng(0), (5, 7), dtype)]
    norm = np.linalg.norm(gradients[0].astype("float64"))
    np.testing.assert_allclose(fused.grad_norm(gradients, norm_scale), norm, rtol=1e-14)
    assert launched >= {name for found in shim.signatures.values() for name, (_, synchronises) in found.items()
                        if synchronises}


# ---- whole layers ----------------------------------------------------------------------------------------

def outcome(case):
    layer, x = case.layer(), case.x()
    out, cache = run_forward(layer, x, case.keywords())
    returned = layer.backward(upstream(out), cache)
    return floats(out), floats(returned), grads(layer)


@no_gxx
@pytest.mark.slow
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_a_layer_is_the_same_through_the_kernels(shim, monkeypatch, through_kernels, case):
    """Every row of the contract table, in float64, with what would run on a GPU in place of the NumPy code."""
    expected = outcome(case)
    on_the_shim(monkeypatch, shim.kernel)
    through_kernels()
    for got, right in zip(outcome(case), expected):
        assert len(got) == len(right)
        for a, b in zip(got, right):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@no_gxx
@pytest.mark.slow
def test_half_precision_on_the_shim(shim, monkeypatch):
    """Every float16 there is, times a number: rounded as NumPy rounds it."""
    on_the_shim(monkeypatch, shim.kernel)
    every = np.arange(1 << 16, dtype="uint16").view("float16")
    for factor in (1.0, 1 / 3, 3e-5, 3.0):
        with np.errstate(all="ignore"):
            expected = (every.astype("float32") * np.float32(factor)).astype("float16")
        g = every.copy()
        fused.shrink_gradients([g], np.array(factor))
        np.testing.assert_array_equal(g, expected)


def losses(layer, device="cpu"):
    """Of three training steps on one batch: RMSprop with clipping, as the tasks train."""
    rng = np.random.default_rng(0)
    x, targets, mask = to_device((rng.standard_normal((4, 9, 3)), rng.standard_normal((4, 9, 3)),
                                  np.arange(9) < np.array([[9], [4], [7], [1]])), device)
    layer.to_device(device)
    optimizer, seen = RMSprop(layer.parameters(), lr=0.01, eps=1e-3), []
    for _ in range(3):
        layer.zero_grad()
        (y, _), cache = layer.forward(x, mask=mask)
        loss, loss_cache = mean_squared_error.forward(y, targets)
        layer.backward((mean_squared_error.backward(1.0, loss_cache), None), cache)
        clip_grad_norm(layer.parameters(), 0.5)
        optimizer.step()
        seen.append(float(loss))
    return seen


@pytest.mark.parametrize("make", [
    lambda: LSTM(3, 3, rng=0, dtype="float64"), lambda: RRALSTM(3, 3, 2, rng=0, dtype="float64"),
    lambda: SRUpp(3, 3, 2, rng=0, dtype="float64")], ids=["LSTM", "RRALSTM", "SRUpp"])
@pytest.mark.parametrize("device", [on_shim, pytest.param("gpu", marks=pytest.mark.gpu)])
def test_training(request, monkeypatch, through_kernels, make, device):
    expected = losses(make())
    if device == "gpu":
        got = losses(make(), "gpu")
    else:
        on_the_shim(monkeypatch, request.getfixturevalue("shim").kernel)
        through_kernels()
        got = losses(make())
    assert got == pytest.approx(expected, rel=1e-9)
    assert got[-1] < got[0]


@pytest.fixture
def stand_in(shim, monkeypatch):
    """The strict stand-in for CuPy (fake_cupy.py), with the kernels on the shim."""
    fake_cupy = pytest.importorskip("fake_cupy")
    on_the_shim(monkeypatch, shim.kernel)
    fake_cupy.install(monkeypatch)
    return fake_cupy


@no_gxx
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in TABLE if "rng" not in case.keywords() and isinstance(
    case.layer(), LSTM | RRALSTM | SRU | SRUpp | LayerNorm | MultiHeadAttention | Embedding)],
    ids=lambda case: case.name)
def test_a_layer_through_the_kernels_moves_nothing(stand_in, case):
    """What leads to the kernels calls only what CuPy has, and moves nothing between host and device."""
    expected = outcome(case)
    layer, x = case.layer().to_device("gpu"), to_device(case.x(), "gpu")
    keywords = {name: value if isinstance(value, bool) else to_device(value, "gpu")
                for name, value in case.keywords().items()}
    out, cache = layer.forward(x, **keywords)
    dout = to_device(upstream(stand_in.peek(out)), "gpu")
    with stand_in.no_transfers():
        out, cache = layer.forward(x, **keywords)
        returned = layer.backward(dout, cache)
    got = stand_in.peek((out, returned, tuple(p.grad for p in layer.parameters())))
    for part, right in zip(got, expected):
        for a, b in zip(floats(part), right):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@no_gxx
@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS, ids=str)
def test_steps_and_clipping_move_nothing(stand_in, optimizer, settings):
    parameters = [Parameter(value) for value in to_device([np.ones((3, 4)), np.ones(5000, "float32")], "gpu")]
    run = optimizer(parameters, **settings)
    for _ in range(2):                                                       # the first sends the tables
        clip_grad_norm(parameters, 1.0)
        run.step()
    with stand_in.no_transfers():
        run.zero_grad()
        clip_grad_value(parameters, 1.0)
        clip_grad_norm(parameters, 1.0)
        run.step()


class Entered:
    """A device of arrays, which counts how often it is current."""

    times = 0

    def __enter__(self):
        self.times += 1

    def __exit__(self, *error):
        self.times -= 1


def test_every_launch_is_on_the_device_of_its_arrays(monkeypatch):
    """It is made current before a kernel is looked up: on another device each launch would fail, or be on that one."""
    fake_cupy, device, launched = pytest.importorskip("fake_cupy"), Entered(), set()

    def kernel(family, name, dtype):
        assert device.times, f"{name} is looked up on whatever device is current"
        launched.add(name)
        return lambda *arguments: pytest.fail(name) if not device.times else None
    on_the_shim(monkeypatch, kernel)
    monkeypatch.setenv(kernels.SWITCH, "1")
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(fake_cupy.ndarray, "device", device)
    x = {Embedding: np.array([[1, 2]])}
    for layer in (SRU(3, 3, rng=0), RRALSTM(3, 3, 2, rng=0), LayerNorm(3), MultiHeadAttention(3, 1, rng=0),
                  Embedding(4, 3, rng=0)):
        layer.to_device("gpu")
        y, cache = layer.forward(to_device(x.get(type(layer), np.ones((1, 2, 3), "float32")), "gpu"))
        with np.errstate(all="ignore"):
            layer.backward((y[0], None) if isinstance(y, tuple) else y, cache)
    for optimizer, settings in OPTIMIZERS:
        run = optimizer([Parameter(to_device(np.ones(3), "gpu"))], **settings)
        run.zero_grad()
        clip_grad_norm(run.parameters, 1.0)
        clip_grad_value(run.parameters, 1.0)
        run.step()
    assert launched == set().union(*(cuda_shim.signatures(launch.source(family)) for family in cuda_shim.families()))
    assert device.times == 0


@no_gxx
@pytest.mark.slow
def test_offsets_beyond_2_to_the_31(shim):
    """One block at the end of arrays of more than 2^31 entries, of which no more than a few pages are ever touched."""
    if sys.platform != "linux":
        pytest.skip("memory that is there when it is touched is asked for in Linux's way")

    def sparse(*shape):
        private, anonymous, no_reserve = 2, 32, 0x4000                       # of mmap(2)
        memory = mmap.mmap(-1, 4 * int(np.prod(shape, dtype=np.int64)), flags=private | anonymous | no_reserve)
        return np.frombuffer(memory, np.float32).reshape(shape)
    T, B, h, k = 2, 1 << 15, (1 << 16) + 32, 3
    u, x, cs, hs = sparse(T, B, k, h), sparse(T, B, h), sparse(T + 1, B, h), sparse(T, B, h)
    last, vectors = slice(h - 32, h), np.random.default_rng(0).standard_normal((4, h)).astype("float32")
    u[:, -1, :, last] = 0.5
    x[:, -1, last] = np.arange(32)
    blocks = B * h // 32
    shim.kernel("sru", "sru_forward", "float32", first=blocks - 1)(
        blocks, 32, u, x, *vectors, 0, cs, hs, 1.0, 0, T, B, h, k)
    W = np.zeros((1, 3 * 32), "float32")
    W[:] = 0.5
    expected, c, _ = sru_loop.recurrence_forward(
        np.ones((T, 1, 1), "float32"), x[:, -1:, last].copy(), None, (W, *vectors[:, last]))
    np.testing.assert_allclose(hs[:, -1, last], expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(cs[T, -1, last], c[0], rtol=1e-5)


# ---- planted faults --------------------------------------------------------------------------------------

SRU_CASE = {"T": 21, "B": 3, "h": 5, "activation": "tanh", "scale": 1.2, "given": True, "masked": True,
            "k": 3, "dtype": "float64"}
RRA_CASE = {"T": 9, "B": 3, "d": 2, "h": 5, "K": 3, "offset": 2, "given": True, "masked": "gaps", "dtype": "float64"}
SOFTMAX_CASE = {"shape": (2, 2, 3, 37), "rows": 64, "keys": 30, "kind": "keys", "causal": True, "window": 12,
                "dtype": "float64"}
NORM_CASE = {"shape": (17, 20), "dtype": "float64"}

SCATTER_CASE = {"N": 40, "V": 7, "shape": (33,), "dtype": "float64"}

ADAM_CASE, ADAMW_CASE, CENTRED_CASE = (
    {"optimizer": optimizer, "settings": {"weight_decay": 0.1, **more}, "dtype": "float64"}
    for optimizer, more in [(Adam, {}), (AdamW, {}), (RMSprop, {"centred": True, "eps": 1e-3})])

FAULTS = [                         # family, right, wrong, what finds it
    ("sru", "load(u_t, 2 * h), s_x", "load(u_t, h), s_x", SRU_CASE),
    ("sru", "now[s] = next[s];", "now[s] = next[0];", SRU_CASE),
    ("sru", "first + AHEAD_BACKWARD + s < length", "first + AHEAD_BACKWARD + s < length - 1", SRU_CASE),
    ("sru", "for (Index t = length; t < T; t++)", "for (Index t = length + 1; t < T; t++)", SRU_CASE),
    ("sru", "in.dh * keep * r", "in.dh * r", SRU_CASE),
    ("sru", "dc = dc * f + vf * du1 + vr * du2", "dc = dc * f + vf * du1", SRU_CASE),
    ("sru", "Acc dv_f = 0, dv_r = 0", "float dv_f = 0, dv_r = 0", SRU_CASE),
    ("sru", "Acc c = load(cs, 0);", "float c = load(cs, 0);", SRU_CASE),
    ("lstm", "(P + t - k - offset + 1) * Bh + n", "(P + t - k - offset + 2) * Bh + n", RRA_CASE),
    ("lstm", "const Index later = t + k + offset - 1;", "const Index later = t + k + offset;", RRA_CASE),
    ("lstm", "t < lengths[n / h]", "t <= lengths[n / h]", RRA_CASE),
    ("lstm", "dc[n] = dc_t * f;", "dc[n] = dc_t;", RRA_CASE),
    ("lstm", "if (row == P - 1 && dzU)", "if (row == P - 2 && dzU)", RRA_CASE),
    ("norm", "parts[threadIdx.x] = x;\n    __syncthreads();", "parts[threadIdx.x] = x;", NORM_CASE),
    ("norm", "unsigned half = blockDim.x / 2", "unsigned half = blockDim.x / 4", NORM_CASE),
    ("norm", "for (unsigned i = 1; i < ROWS; i++)", "for (unsigned i = 1; i < ROWS - 1; i++)", NORM_CASE),
    ("norm", "- x_hat * mean_along", "", NORM_CASE),
    ("softmax", "newest - window + 1", "newest - window", SOFTMAX_CASE),
    ("softmax", "row / L / H * stride_a", "row / L % 2 * stride_a", SOFTMAX_CASE),
    ("softmax", "store(S, j, seen(j) ?", "if (seen(j)) store(S, j, true ?", SOFTMAX_CASE),
    ("softmax", "(kept(j) - sum)", "kept(j)", SOFTMAX_CASE),
    ("scatter", "ids[first - 1] == ids[first]", "false", SCATTER_CASE),
    ("scatter", "load(target, entry) + sum", "sum", SCATTER_CASE),
    ("scatter", "low = middle + 1;", "low = middle + 2;", SCATTER_CASE),
    ("scatter", "order[n] * d + j", "n * d + j", SCATTER_CASE),
    ("optim", "sqrt(v) / Acc(root)", "sqrt(v)", ADAM_CASE),
    ("optim", "const Index first = work", "const Index first = 0 * work", ADAM_CASE),
    ("optim", "theta *= Acc(shrink);", "", ADAMW_CASE),
    ("optim", "if (variance < 0) variance = 0;", "variance += slots[1];", CENTRED_CASE),
]
PARITY = {"sru": sru_parity, "lstm": loop_parity, "norm": norm_parity, "softmax": softmax_parity,
          "scatter": scatter_parity, "optim": optimizer_parity}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    sources = {}
    for n, (family, right, wrong, _) in enumerate(FAULTS):
        text = launch.source(family)
        assert right in text, right
        sources[f"{family}_{n}"] = text.replace(right, wrong)
    return cuda_shim.Shim(shared_folder(tmp_path_factory, "faults"), sources)


@no_gxx
@pytest.mark.slow
@pytest.mark.parametrize("n", range(len(FAULTS)), ids=lambda n: f"{FAULTS[n][0]}: {FAULTS[n][1]} -> {FAULTS[n][2]}")
def test_planted_faults_are_found(faulty, monkeypatch, through_kernels, n):
    family, _, _, case = FAULTS[n]
    on_the_shim(monkeypatch, lambda _, name, dtype: faulty.kernel(f"{family}_{n}", name, dtype))
    more = {"through_kernels": through_kernels} if family == "optim" else {}
    found = r"Not equal to tolerance|depends on the threads' order|(reads|writes) outside"
    with pytest.raises(AssertionError, match=found):
        PARITY[family](copy, **more, **case)


@no_gxx
@pytest.mark.slow
def test_what_a_launch_is_given_is_held_to_the_signature(shim):
    sgd, good = shim.kernel("optim", "sgd", "float32"), np.zeros((1, 7), "int64")
    for arguments, sentence in [
            ((good,), "sgd takes 5 arguments, not 1"), ((good, good, 0, 1.0, 1.0), "l2 is 0; expected a Python float"),
            ((good, good.astype("int32"), 0.0, 1.0, 1.0), "work has dtype int32; expected int64"),
            ((good, good[:, ::2], 0.0, 1.0, 1.0), "work is not contiguous")]:
        with pytest.raises(AssertionError, match=sentence):
            sgd(1, 1, *arguments)
