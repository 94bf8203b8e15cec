"""What the rows of tasks/bench.py --device gpu cost at least, by their sizes alone: no GPU and no CuPy are needed.

bytes      every input read once and every output written once, four bytes each
flops      of the matrix products (2 m n k of an (m, k) @ (k, n)) and of RRA's sum over the window; what is elementwise
           is not counted
launches   kernels of ours and array operations of CuPy, as counted on the stand-in for CuPy (tests/test_bench_gpu.py
           holds the formulas to that): a product, or a sum, is one, though CuPy may make two or three kernels of it
floor      the larger of bytes / copy rate and flops / rate of a matrix product
"""

from typing import NamedTuple

from minigrad.functional import GPU_QUERY_BLOCK
from tasks.bench import tsdae as bench_tsdae

PARTS = ("sru", "lstm", "rra", "srupp", "attention", "tsdae", "mnist")
FULL_GPU = {"only": PARTS, "repeats": 30, "seconds": None,
            "sru_size": (1024, 32, 1024), "lstm_size": (50, 784, 1, 256), "window": 10,          # L, B, d; B, T, d, h
            "srupp_size": (512, 16, 1024, 256), "attention_size": (8, 8, 512, 512),    # L, B, d, d'; B, heads, L, d
            "tsdae_size": (64, 32, 512, 8, 4, 30_000), "mnist_size": (50, 1, 256),     # as on the CPU; B, stride, h
            "copy_bytes": 1 << 30, "matrix": 8192, "launch_calls": 1000}
QUICK_GPU = {"only": PARTS, "repeats": 3, "seconds": None,
             "sru_size": (12, 2, 16), "lstm_size": (4, 12, 1, 16), "window": 3, "srupp_size": (12, 2, 16, 4),
             "attention_size": (2, 2, 6, 8), "tsdae_size": (4, 10, 16, 2, 2, 40), "mnist_size": (4, 14, 16),
             "copy_bytes": 1 << 16, "matrix": 32, "launch_calls": 5}
PART = {"SRU recurrence": "sru", "LSTM": "lstm", "RRALSTM": "rra", "SRU": "sru", "SRUpp": "srupp",
        "attention": "attention", "TSDAE step": "tsdae", "MNIST step": "mnist"}
SIZES = {"SRU recurrence": ("sru_size",), "LSTM": ("lstm_size",), "RRALSTM": ("lstm_size", "window"),
         "SRU": ("sru_size",), "SRUpp": ("srupp_size",), "attention": ("attention_size",),
         "TSDAE step": ("tsdae_size",), "MNIST step": ("mnist_size", "window")}
PIXELS, CLASSES, EPOCH_IMAGES = 28, 10, 60_000
ASSUMED = (4.3, 50.0, 10.0)        # TB/s of a copy, TFLOP/s of a float32 product, microseconds a launch from Python


class Cost(NamedTuple):
    bytes: int
    flops: int
    launches: int


def floor_ms(cost, tb_s, tflop_s):
    return max(cost.bytes / tb_s, cost.flops / tflop_s) * 1e-9


def launches_ms(cost, us):
    return 1e-3 * cost.launches * us


# ---- the rows --------------------------------------------------------------------------------------------

def recurrence(settings):
    """Forward: u (3), x, c_0 and the four vectors are read, c and h written: 6 numbers a step, sample and unit.
    Backward: u (3), x, c and dh are read, du (3) and dx written: 10; and dc_0 and four sums a sample."""
    L, B, d = settings["sru_size"]
    return Cost(4 * (16 * L * B * d + 2 * 4 * d + (1 + 1 + 1 + 4) * B * d), 0, 2)


def lstm(settings, K=0):
    """x, dy, W, U, b (and w) are read, y, dx and the gradients written. A step is one (B, d + h) @ (d + h, 4 h) and, in
    the backward, two; RRA's sum over K states is read as often. Launches: a product and a kernel a step, both ways."""
    B, T, d, h = settings["lstm_size"]
    parameters = 4 * h * (d + h + 1) + K
    launches = 4 * T + (29 if K else 20)
    return Cost(4 * (2 * B * T * (d + h) + 2 * parameters), 6 * B * T * h * (4 * (d + h) + K), launches)


def rralstm(settings):
    return lstm(settings, settings["window"])


def sru(settings):
    """x, dy and the parameters are read, y, dx and the gradients written; one (L B, d) @ (d, 3 d), two as large."""
    L, B, d = settings["sru_size"]
    return Cost(4 * (4 * L * B * d + 2 * (3 * d * d + 4 * d)), 6 * L * B * d * 3 * d, 16)


def srupp(settings):
    """As SRU's. The products are Q (d d' a row), K and V (d'^2 each), U (3 d d'), and scores and A over the pairs that
    are seen, L (L + 1) / 2 of them (2 d' each); the backward's are twice as many."""
    L, B, d, p = settings["srupp_size"]
    parameters = d * p + 2 * p * p + 3 * d * p + 4 * d + 2 * p + 1
    products = L * B * (d * p + 2 * p * p + 3 * d * p) + B * L * (L + 1) // 2 * 2 * p
    blocks = -(-L // GPU_QUERY_BLOCK)
    return Cost(4 * (4 * L * B * d + 2 * parameters), 6 * products, 52 + 10 * blocks + 4 * (blocks > 1))


def attention(settings):
    """q, k, v and dA are read, A, dq, dk and dv written. Two products forward, four backward, each 2 B L^2 d."""
    B, _, L, d = settings["attention_size"]
    return Cost(4 * 8 * B * L * d, 6 * 2 * B * L * L * d, 10)


def tsdae(settings):
    """theta, m and v are read, these and the gradients written: 7 numbers a parameter, with two ids a position. The
    products, forward and twice that backward, are those of the real positions, (12 d^2 a position and layer), of the
    pairs that see each other (2 d each), of the cross-attention's value (2 d^2 a sentence and layer), and of the
    head: (d^2 + d vocab) a target."""
    B, _, d, _, layers, vocab = size = settings["tsdae_size"]
    _, noisy_mask, _, clean_mask = bench_tsdae.make_batch(size)
    n, m = noisy_mask.sum(axis=1), clean_mask[:, 1:].sum(axis=1)             # words of each sentence
    rows = layers * 12 * d * d * (n.sum() + m.sum()) + layers * 2 * d * ((n * n).sum() + (m * (m + 1) // 2).sum())
    products = rows + layers * B * 2 * d * d + m.sum() * (d * d + d * vocab)
    parameters = tsdae_parameters(size)
    return Cost(int(4 * 7 * parameters + 2 * 8 * (n.sum() + m.sum())), int(6 * products), 108 + 227 * layers)


def tsdae_parameters(size):
    """Numbers in a tied TSDAE: words and positions; a layer's attention, feed-forward and two norms, and the decoder's
    cross-attention and its norm; the last norm; the head's transform, norm and bias."""
    _, L, d, _, layers, vocab = size
    a_layer = 4 * d * (d + 1) + (d + 1) * 4 * d + (4 * d + 1) * d + 4 * d + 4 * d * (d + 1) + 2 * d
    return (vocab + L) * d + layers * a_layer + 2 * d + d * (d + 1) + 2 * d + vocab


def mnist(settings):
    """The images and labels, theta and the mean squares are read, these two and the gradients written (5 numbers a
    parameter); products as RRALSTM's, and the readout's."""
    B, stride, h = settings["mnist_size"]
    T, K = (PIXELS // stride)**2, settings["window"]
    cell = lstm({"lstm_size": (B, T, 1, h)}, K)
    parameters = 4 * h * (1 + h + 1) + K + (h + 1) * CLASSES
    return Cost(4 * (B * T + 5 * parameters) + 8 * B, cell.flops + 6 * B * h * CLASSES, 4 * T + 89)


COSTS = {"SRU recurrence": recurrence, "LSTM": lstm, "RRALSTM": rralstm, "SRU": sru, "SRUpp": srupp,
         "attention": attention, "TSDAE step": tsdae, "MNIST step": mnist}


# ---- without a GPU ---------------------------------------------------------------------------------------

def estimates(settings, assumed):
    """[{layer, bytes, flops, launches, floor_ms, launches_ms, ms (the larger of the two)}] at (TB/s, TFLOP/s, us)."""
    tb_s, tflop_s, us = assumed
    rows = []
    for name, cost_of in COSTS.items():
        if PART[name] in settings["only"]:
            cost = cost_of(settings)
            times = floor_ms(cost, tb_s, tflop_s), launches_ms(cost, us)
            rows.append({"layer": name, "size": [settings[key] for key in SIZES[name]], **cost._asdict(),
                         "floor_ms": times[0], "launches_ms": times[1], "ms": max(times)})
    return rows


def epoch_of(settings, ms):
    """(training steps of an epoch, its seconds) at that many milliseconds a step."""
    steps = EPOCH_IMAGES // settings["mnist_size"][0]
    return steps, steps * ms / 1e3
