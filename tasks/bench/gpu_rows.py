"""What tasks/bench.py --device gpu measures: minigrad's work on a GPU, and what it is measured against.

"SRU recurrence" is the two kernel launches alone; "LSTM", "RRALSTM", "SRU" and "SRUpp" are a forward and a backward of
the layer, "attention" those of functional.softmax_attention; "TSDAE step" and "MNIST step" are whole training steps.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import module_of_device, to_device
from minigrad.clipping import grad_norm
from minigrad.functional import softmax_attention
from minigrad.kernels import sru, sum_dtype
from minigrad.layers import SRU
from minigrad.memory import empty
from tasks import pixel_mnist
from tasks.bench import gpu_peers as peers, measure as bench_measure, srupp as bench_srupp, tsdae as bench_tsdae
from tasks.bench.measure import Side
from tasks.frame import classify

CHECKED = {"LSTM": 100, "RRALSTM": 100}          # steps compared: RRALSTM is chaotic, see bench.agreeing
IMAGES = 16                                      # batches of random images, used in turn


class Row(NamedTuple):
    """What is measured under one name."""

    name: str
    size: str               # in words
    ours: Side              # minigrad's, its arrays on the GPU
    expected: Callable      # expected() -> minigrad's results over the first `steps`, on the host
    peers: Any = None       # peers(torch, device[, peers.COMPILED], steps=None) -> [Side]; None: there are none
    steps: Any = None       # that are compared; None: all


# ---- the rows, in the order of their importance ----------------------------------------------------------

def recurrence(settings):
    """The launches of the recurrence, forward and backward, on arrays that are there."""
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
    return Row("SRU recurrence", f"L={L} B={B} d=h={d}, the two launches alone",
               Side("SRU recurrence", "minigrad", "", call, None, (), None), dict)


def layer_row(name, size, layer, x, dy, of_peers):
    """Forward and backward of a layer; of_peers(torch, layer, x, dy, device[, name]) -> [Side]."""
    on_gpu, steps = copy.deepcopy(layer).to_device("gpu"), CHECKED.get(name)

    def ours(steps):
        return bench_measure.our_side(on_gpu, *to_device((x[:, :steps], dy[:, :steps]), "gpu"), (), None)

    def theirs(torch, device, *name, steps=None):
        return of_peers(torch, layer, x[:, :steps], dy[:, :steps], device, *name)
    return Row(name, size, ours(None), lambda: ours(steps).result(), theirs, steps)


def lstm(settings):
    B, T, d, h = settings["lstm_size"]
    return layer_row("LSTM", f"B={B} T={T} d={d} h={h}", bench_measure.make_layer("LSTM", d, h, None),
                     *bench_measure.upstream_and_input(B, T, d, h), peers.lstm_sides)


def rralstm(settings):
    (B, T, d, h), K = settings["lstm_size"], settings["window"]
    return layer_row("RRALSTM", f"B={B} T={T} d={d} h={h} K={K}", bench_measure.make_layer("RRALSTM", d, h, K),
                     *bench_measure.upstream_and_input(B, T, d, h), peers.rra_sides)


def sru_layer(settings):
    L, B, d = settings["sru_size"]
    return layer_row("SRU", f"L={L} B={B} d=h={d}", SRU(d, d, rng=1, dtype="float32"),
                     *bench_srupp.upstream_and_input(L, B, d), peers.sru_sides)


def srupp(settings):
    L, B, d, p = settings["srupp_size"]
    return layer_row("SRUpp", f"L={L} B={B} d=h={d} d'={p}, one head, causal", bench_srupp.make_srupp(d, p),
                     *bench_srupp.upstream_and_input(L, B, d), peers.srupp_sides)


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
        return to_device(dict(zip(peers.ATTENTION_NAMES, call())), "cpu")
    return Row("attention", f"B={B} heads={heads} L={L} d={d}, softmax_attention of q, k, v",
               Side("attention", "minigrad", "", call, result, (), None), result,
               lambda torch, *device_and_name: peers.attention_sides(torch, arrays, *device_and_name))


def tsdae_step(settings):
    """A training step of TSDAE: forward, backward, AdamW. The batch is there, and where its targets are."""
    size = settings["tsdae_size"]
    model, data = bench_tsdae.make_model(size), bench_tsdae.make_batch(size)
    batch = to_device((*data, model.predicted_places(data[3])), "gpu")
    ours = bench_tsdae.our_step(copy.deepcopy(model).to_device("gpu"), batch, (), None)
    how = model, data, bench_tsdae.OPTIMIZER
    return Row("TSDAE step", bench_tsdae.in_words(size, data), ours, ours.result,
               lambda torch, *device_and_name: peers.tsdae_sides(torch, *how, *device_and_name))


def mnist_settings(settings):
    """The settings of `tasks/pixel_mnist.py --paper` of that size."""
    B, stride, h = settings["mnist_size"]
    return pixel_mnist.parse(["--paper", "--batch-size", str(B), "--hidden", str(h), "--stride", str(stride),
                              "--window", str(settings["window"])])


def mnist_step(settings):
    """A training step of tasks/pixel_mnist.py --paper with RRA, on random images."""
    how = mnist_settings(settings)
    B, (T, d) = how["batch_size"], pixel_mnist.shape_of(how)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (IMAGES * B, pixel_mnist.SIDE, pixel_mnist.SIDE), "uint8")
    batches = pixel_mnist.ImageBatches(images, rng.integers(0, pixel_mnist.CLASSES, IMAGES * B),
                                       pixel_mnist.Form(how, None), B, 0)
    model = pixel_mnist.build(how, "rra").to_device("gpu")
    optimizer, taken = classify.optimizer_of(how, model.parameters()), iter(range(1 << 62))
    call = functools.partial(train_on_images, model, optimizer, batches, taken)
    return Row("MNIST step", f"B={B} T={T} d={d} h={how['hidden']} K={how['window']}, random images",
               Side("MNIST step", "minigrad", "", call, None, (), None), dict)


def train_on_images(model, optimizer, batches, taken):
    """One step, as minigrad.train.Trainer takes it: the batch moved there, forward, backward, the norm, RMSprop. (The
    paper's setting does not clip: the norm is for the log.)"""
    batch = to_device(batches[next(taken)], "gpu")
    optimizer.zero_grad()
    loss = classify.forward_backward(model, batch, None)
    norm = grad_norm(model.parameters())
    optimizer.step()
    return loss, norm


ROWS = {"SRU recurrence": recurrence, "LSTM": lstm, "RRALSTM": rralstm, "SRU": sru_layer, "SRUpp": srupp,
        "attention": attention, "TSDAE step": tsdae_step, "MNIST step": mnist_step}
COMPILED = ("attention", "TSDAE step", "SRUpp", "SRU")       # the likeliest first: of the last two a loop is unrolled
