"""The rows of the bench on a GPU: minigrad's work, its least cost, and what it is compared with.

"SRU recurrence" is the two kernel launches alone; "LSTM", "RRALSTM", "SRU" and "SRUpp" are a forward and a backward of
the layer, "attention" those of functional.softmax_attention; "TSDAE step" and "MNIST step" are whole training steps.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import module_of_device, to_device
from minigrad.clipping import grad_norm
from minigrad.functional import softmax_attention
from minigrad.kernels import sru
from minigrad.kernels.launch import sum_dtype
from minigrad.layers import RRALSTM, SRU
from minigrad.losses import softmax_cross_entropy
from minigrad.memory import empty
from minigrad.optim import RMSprop
from models.classifier import SequenceClassifier
from tasks.bench import gpu_peers, tsdae
from tasks.bench.layers import CHECKED, make_layer, make_srupp
from tasks.bench.measure import Side, our_side, upstream_and_input
from tasks.bench.peers import rra_in_torch

BATCHES, CLASSES = 16, 10                        # of random images, used in turn


class Row(NamedTuple):
    """What is measured under one name."""

    name: str
    size: str               # in words
    ours: Side              # minigrad's, its arrays on the GPU
    bytes: int              # at least read and written: every input once, every output once
    flops: int              # of the matrix products, 2 m n k each; elementwise operations are not counted
    expected: Any = None    # expected() -> minigrad's results over the steps that are compared, on the host
    peers: Callable | None = None   # peers(torch, device[, gpu_peers.COMPILED], steps=None) -> [Side]; None: no peers
    steps: Any = None       # that are compared; None: all


def product_flops(parameters, positions):
    """Forward and backward of x W at that many positions: 6 for each entry of each matrix."""
    return 6 * positions * sum(parameter.value.size for parameter in parameters if parameter.value.ndim == 2)


def bytes_of(parameters):
    return sum(parameter.value.nbytes for parameter in parameters)


# ---- the rows, in the order of their importance ----------------------------------------------------------

def recurrence(settings):
    """The launches of the recurrence, forward and backward, on arrays that exist already."""
    L, B, d = settings["sru_size"]
    rng, xp, dtype = np.random.default_rng(0), module_of_device("gpu"), np.dtype("float32")

    def drawn(*shape):
        return to_device(rng.standard_normal(shape, dtype), "gpu")

    u, x, dh = drawn(L, B, 3 * d), drawn(L, B, d), drawn(L, B, d)
    vectors = [drawn(d) for _ in range(4)]
    cs, hs, du, dx, dc0 = (empty(shape, dtype, xp) for shape in [
        (L + 1, B, d), (L, B, d), (L, B, 3 * d), (L, B, d), (B, d)])
    cs[0] = 0
    sums = empty((4, B, d), sum_dtype(dtype), xp)

    def call():
        sru.launch_forward(u, x, vectors, 0, cs, hs)
        sru.launch_backward(u, x, vectors, 0, cs, dh, 0, 0, du, dx, dc0, sums)
    forward, backward = (u, x, *vectors, cs, hs), (u, x, *vectors, cs, dh, du, dx, dc0, sums)
    return Row("SRU recurrence", f"L={L} B={B} d=h={d}, the two launches alone",
               Side("SRU recurrence", "minigrad", "", call, None), sum(a.nbytes for a in (*forward, *backward)), 0)


def layer_row(size, layer, x, dy, of_peers, more_flops=0):
    """Forward and backward of a layer; of_peers(torch, layer, x, dy, device[, name]) -> [Side]."""
    name = type(layer).__name__
    on_gpu, steps, parameters = copy.deepcopy(layer).to_device("gpu"), CHECKED.get(name), list(layer.parameters())

    def ours(steps):
        return our_side(on_gpu, *to_device((x[:, :steps], dy[:, :steps]), "gpu"))

    def theirs(torch, device, *name, steps=None):
        return of_peers(torch, layer, x[:, :steps], dy[:, :steps], device, *name)
    return Row(name, size, ours(None), 2 * (x.nbytes + dy.nbytes + bytes_of(parameters)),
               product_flops(parameters, x[..., 0].size) + more_flops, lambda: ours(steps).result(), theirs, steps)


def lstm(settings):
    B, T, d, h = settings["lstm_size"]
    return layer_row(f"B={B} T={T} d={d} h={h}", make_layer("LSTM", d, h), *upstream_and_input(B, T, d, h),
                     gpu_peers.lstm_sides)


def rralstm(settings):
    (B, T, d, h), K = settings["lstm_size"], settings["window"]
    return layer_row(f"B={B} T={T} d={d} h={h} K={K}", make_layer("RRALSTM", d, h, K), *upstream_and_input(B, T, d, h),
                     rra_in_torch, 6 * B * T * K * h)


def sru_layer(settings):
    L, B, d = settings["sru_size"]
    return layer_row(f"L={L} B={B} d=h={d}", SRU(d, d, rng=1, dtype="float32"), *upstream_and_input(B, L, d, d),
                     gpu_peers.sru_sides)


def srupp(settings):
    L, B, d, p = settings["srupp_size"]
    return layer_row(f"L={L} B={B} d=h={d} d'={p}, one head, causal", make_srupp(d, p), *upstream_and_input(B, L, d, d),
                     gpu_peers.srupp_sides, 6 * B * L * (L + 1) * p)         # the scores and A of the pairs seen


def attention(settings):
    """functional.softmax_attention of q, k, v (B, heads, L, d / heads), forward and backward."""
    B, heads, L, d = settings["attention_size"]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((B, heads, L, d // heads), "float32") for _ in range(4)]   # q, k, v, dA
    q, k, v, dA = to_device(arrays, "gpu")

    def call():
        A, cache = softmax_attention.forward(q, k, v)
        return A, *softmax_attention.backward(dA, cache)

    def result():
        return to_device(dict(zip(gpu_peers.ATTENTION_NAMES, call())), "cpu")
    return Row("attention", f"B={B} heads={heads} L={L} d={d}, softmax_attention of q, k, v",
               Side("attention", "minigrad", "", call, result), 8 * q.nbytes, 6 * 2 * B * L * L * d, result,
               lambda torch, *device_and_name: gpu_peers.attention_sides(torch, arrays, *device_and_name))


def tsdae_step(settings):
    """A training step of TSDAE: forward, backward, AdamW. The batch is on the GPU, and where its targets are.

    Bytes: parameters and both moments are read and written, gradients written. Flops: those of the layers' matrices at
    real positions and of the vocabulary at the targets, without the attention's scores.
    """
    size = settings["tsdae_size"]
    model, data = tsdae.make_model(size), tsdae.make_batch(size)
    *batch, places = to_device((*data, model.predicted_places(data[3])), "gpu")
    units = tsdae.units_of(data)
    ours = tsdae.training_step(copy.deepcopy(model).to_device("gpu"), batch, units, places)
    targets = int(data[3][:, 1:].sum())
    flops = product_flops(model.encoder.words.parameters(), targets) + product_flops(
        [p for name, p in model.named_parameters() if ".layers." in name and "cross" not in name],
        int(data[1].sum()) + targets)
    return Row(tsdae.STEP, tsdae.in_words(size, data), ours, 7 * bytes_of(model.parameters()), flops, ours.result,
               lambda torch, *device_and_name: gpu_peers.tsdae_sides(torch, model, data, units, *device_and_name))


def mnist_step(settings):
    """A training step of pixel MNIST's classifier with RRALSTM in the paper's setting, on random images.

    The batch is moved to the GPU; then forward, backward, the gradient's norm (for the log), RMSprop.
    """
    (B, T, h), K, rng = settings["mnist_size"], settings["window"], np.random.default_rng(0)
    batches = itertools.cycle([(rng.random((B, T, 1), "float32"), rng.integers(0, CLASSES, B)) for _ in range(BATCHES)])
    cell = RRALSTM(1, h, K, forget_bias=0.0, rng=1, dtype="float32")
    model = SequenceClassifier(cell, h, CLASSES, rng=2, dtype="float32").to_device("gpu")
    optimizer, parameters = RMSprop(model.parameters(), lr=1e-3), list(model.parameters())

    def call():
        x, labels = to_device(next(batches), "gpu")
        optimizer.zero_grad()
        logits, cache = model.forward(x)
        _, loss_cache = softmax_cross_entropy.forward(logits, labels)
        model.backward(softmax_cross_entropy.backward(1.0, loss_cache), cache)
        grad_norm(parameters)
        optimizer.step()
    return Row("MNIST step", f"B={B} T={T} d=1 h={h} K={K}, random images",
               Side("MNIST step", "minigrad", "", call, None), 4 * B * T + 5 * bytes_of(parameters),
               product_flops(cell.parameters(), B * T) + 6 * B * T * K * h)


ROWS = {"SRU recurrence": recurrence, "LSTM": lstm, "RRALSTM": rralstm, "SRU": sru_layer, "SRUpp": srupp,
        "attention": attention, "TSDAE step": tsdae_step, "MNIST step": mnist_step}
COMPILED = ("attention", "TSDAE step", "SRUpp", "SRU")       # the likeliest first: of the last two a loop is unrolled
