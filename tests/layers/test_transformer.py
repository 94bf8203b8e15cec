"""MultiHeadAttention, FeedForward and the transformer layers against PyTorch's own modules, and exact facts: one row of
memory, tied weights, no look ahead, padding."""

import functools

import numpy as np
import pytest
from cases import B, L, mask_kinds
from helpers import all_gradients, assert_close, assert_identical
from oracles import (
    gradient,
    pytorch,
    tensor,
    tensors,
    their_gradients,
    torch_backward,
    torch_heads,
    torch_norm,
    with_our_weights,
)

from minigrad.functional import softmax_attention
from minigrad.layers import (
    FeedForward,
    MultiHeadAttention,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)

D, HIDDEN, M = 8, 12, 5
KINDS = mask_kinds()
MEMORY_MASK = np.array([[1, 1, 0, 1, 1], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
CAUSAL = np.tril(np.ones((L, L), bool))
# torch has no answer for a query that sees no key: under these masks every real one sees a key
MASKS = {"no mask": None, "right padding": KINDS["right padding"], "gaps": KINDS["gaps"] | (np.arange(L) == 0)}
every_mask = pytest.mark.parametrize("kind", MASKS)
every_norm = pytest.mark.parametrize("norm", ["post", "pre"])


def off_their_start(layer):
    """No bias is 0 and no gain 1."""
    rng = np.random.default_rng(1)
    for p in layer.parameters():
        p.value += (0.3 * rng.standard_normal(p.value.shape)).astype(p.value.dtype)
    return layer


def attention(heads=2, d_key=None, **settings):
    return off_their_start(MultiHeadAttention(D, heads, d_key, rng=0, dtype="float64", **settings))


def encoder(norm="post", activation="gelu", **settings):
    return off_their_start(TransformerEncoderLayer(D, 2, HIDDEN, norm, activation, rng=0, dtype="float64", **settings))


def decoder(norm="post", activation="gelu", **settings):
    return off_their_start(TransformerDecoderLayer(D, 2, HIDDEN, norm, activation, rng=2, dtype="float64", **settings))


def draw(length=L, seed=0, d=D, batch=B):
    return np.random.default_rng(seed).standard_normal((batch, length, d))


X, MEMORY, ROW, DY = draw(), draw(M, 1), draw(1, 2), draw(L, 3)


def real_only(array, mask):
    return array if mask is None else np.where(mask[:, :, None], array, 0)


def inverted(mask):
    """As torch has it: True where nothing may be seen."""
    return None if mask is None else pytorch().tensor(~mask)


def compare(layer, module, call, inputs, keywords, mask, dy=DY):
    """Values at real positions and every gradient against a torch module's, call(*leaves) -> y, to 1e-10."""
    y, returned, ours = all_gradients(layer, inputs[0], {**keywords, **({"memory": inputs[1]} if inputs[1:] else {})},
                                      real_only(dy, mask))
    leaves = [tensor(array) for array in inputs]
    expected = call(*leaves)
    torch_backward([expected], [real_only(dy, mask)])
    assert_close(real_only(y, mask), real_only(expected.detach().numpy(), mask), 1e-10)
    assert_close(returned, [gradient(leaf) for leaf in leaves] if inputs[1:] else gradient(leaves[0]), 1e-10)
    assert_close(ours, their_gradients(module, layer), 1e-10)


# ---- MultiHeadAttention against torch --------------------------------------------------------------------

def their_attention(layer):
    torch = pytorch()
    return with_our_weights(torch.nn.MultiheadAttention(D, layer.heads, batch_first=True), layer)


@pytest.mark.parametrize(("heads", "causal"), [(1, True), (8, False), (2, True)])
@every_mask
def test_self_attention_equals_torchs_module(kind, heads, causal):
    layer, mask = attention(heads), MASKS[kind]
    module, future = their_attention(layer), inverted(CAUSAL) if causal else None
    compare(layer, module, lambda x: module(x, x, x, key_padding_mask=inverted(mask), attn_mask=future)[0], (X,),
            {"causal": causal, "mask": mask}, mask)


@pytest.mark.parametrize("memory", [MEMORY, ROW], ids=["five rows", "one row"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_cross_attention_equals_torchs_module(heads, masked, memory):
    layer = attention(heads)
    module, mask = their_attention(layer), MEMORY_MASK[:, -memory.shape[1]:] | (memory is ROW) if masked else None
    compare(layer, module, lambda x, m: module(x, m, m, key_padding_mask=inverted(mask))[0], (X, memory),
            {"mask": mask}, None)


@pytest.mark.parametrize("kind", ["left padding", "a sample with no real step"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_its_formula_where_some_queries_see_nothing(causal, kind):
    layer, mask = attention(2, 6), KINDS[kind]
    y, dx, ours = all_gradients(layer, X, {"causal": causal, "mask": mask}, real_only(DY, mask))
    x, weights = tensor(real_only(X, mask)), tensors(layer)
    expected = torch_heads(weights, x, x, mask[:, None, None] & (CAUSAL if causal else True), 2)
    torch_backward([expected], [real_only(DY, mask)])
    assert_close(real_only(y, mask), real_only(expected.detach().numpy(), mask), 1e-10)
    assert_close(dx, gradient(x), 1e-10)
    assert_close(ours, list(map(gradient, weights.values())), 1e-10)


# ---- dropout ---------------------------------------------------------------------------------------------

def drops(p, seed=3):
    """f(shape) -> the next scaled dropout mask of a generator with this seed."""
    rng = np.random.default_rng(seed)
    return lambda *shape: pytorch().tensor((rng.random(shape) >= p) / (1 - p))


@pytest.mark.parametrize(("memory", "mask"), [
    (MEMORY, None), (MEMORY, MEMORY_MASK), (ROW, None), (None, KINDS["gaps"])], ids=["M", "M, mask", "one row", "self"])
def test_dropout_of_the_map_equals_torch_with_the_same_drops(memory, mask):
    layer = attention(dropout=0.4)
    real = mask if memory is None else None
    y, returned, ours = all_gradients(layer, X, {"memory": memory, "mask": mask, "rng": 3}, real_only(DY, real))
    x, weights = tensor(real_only(X, real)), tensors(layer)
    keys = x if memory is None else tensor(memory)
    drop = drops(0.4)(B, 2, L, keys.shape[1])
    expected = torch_heads(weights, x, keys, True if mask is None else mask[:, None, None], 2, drop.numpy())
    torch_backward([expected], [real_only(DY, real)])
    assert_close(real_only(y, real), real_only(expected.detach().numpy(), real), 1e-10)
    assert_close(returned, gradient(x) if memory is None else (gradient(x), gradient(keys)), 1e-10)
    assert_close(ours, list(map(gradient, weights.values())), 1e-10)


def their_layer(layer, weights, x, memory, norm, drop, drop_map):
    """A transformer layer by its formula, drop(*shape) and drop_map(*shape) drawing what is dropped; no masks."""
    torch, d_map = pytorch(), 0 if memory is None else 1
    length, causal = x.shape[1], CAUSAL if d_map else True

    def heads(part, query, keys, allowed):
        return torch_heads(weights, query, keys, allowed, 2, drop_map(B, 2, length, keys.shape[1]).numpy(), f"{part}.")

    def feed(n):
        a = torch.relu(n @ weights["feed_forward.W_1"] + weights["feed_forward.b_1"])
        return a @ weights["feed_forward.W_2"] + weights["feed_forward.b_2"]

    parts = [("attention", lambda n: heads("attention", n, n, causal)), ("feed_forward", feed)]
    if memory is not None:
        parts.insert(1, ("cross_attention", lambda n: heads("cross_attention", n, memory, True)))
    for part, f in parts:
        if norm == "pre":
            y = f(torch_norm(x, weights, f"{part}_norm"))
            x = x + drop(*x.shape) * y
        else:
            y = f(x)
            x = torch_norm(x + drop(*x.shape) * y, weights, f"{part}_norm")
    return x


@every_norm
@pytest.mark.parametrize("memory", [None, MEMORY], ids=["encoder", "decoder"])
def test_every_dropout_of_a_layer_equals_torch_with_the_same_drops(memory, norm):
    """One generator: each part draws its map, then its output."""
    p, settings = 0.3, {"dropout": 0.3, "attention_dropout": 0.3}
    layer = encoder(norm, "relu", **settings) if memory is None else decoder(norm, "relu", cross_dropout=p, **settings)
    inputs = {} if memory is None else {"memory": memory}
    y, returned, ours = all_gradients(layer, X, {"rng": 3, **inputs}, DY)
    x, m, weights, drop = tensor(X), None if memory is None else tensor(memory), tensors(layer), drops(p)
    expected = their_layer(layer, weights, x, m, norm, drop, drop)
    torch_backward([expected], [DY])
    assert_close(y, expected.detach().numpy(), 1e-10)
    assert_close(returned, gradient(x) if memory is None else (gradient(x), gradient(m)), 1e-10)
    assert_close(ours, list(map(gradient, weights.values())), 1e-10)


# ---- one row of memory -----------------------------------------------------------------------------------

DEAD = ("W_q", "b_q", "W_k", "b_k")
every_head = pytest.mark.parametrize("heads", [1, 4])
every_way = pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])


def one_row_layer(heads=2, fast=True, dtype="float64", **settings):
    layer = attention(heads, **settings).astype(dtype)
    layer.one_row = fast
    return layer


@every_head
@every_way
def test_one_row_is_two_matrices_at_every_position(fast, heads):
    layer = one_row_layer(heads, fast)
    y = layer(X, ROW)
    same = np.repeat(y[:, :1], L, axis=1)
    if fast:
        assert_identical(y, same)
    else:                                                    # a product rounds equal rows differently on some CPUs
        assert_close(y, same, 1e-14)
    assert_close(y[:, 0], (ROW[:, 0] @ layer.W_v.value + layer.b_v.value) @ layer.W_o.value + layer.b_o.value)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 1e4, 1e8])
def test_one_key_has_the_weight_1_exactly(size, dtype):
    q, k, v = ((size * draw(n, n)).astype(dtype) for n in (6, 1, 1))
    A, cache = softmax_attention.forward(q, k, v)
    assert all((P == 1).all() for P in cache.P)
    assert_identical(A, np.repeat(v, 6, axis=1))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@every_head
@every_way
def test_one_row_gives_queries_and_keys_a_gradient_of_exactly_zero(fast, heads, dtype):
    """Under a mask and with dropout of the map too, which take the general way."""
    layer = one_row_layer(heads, fast, dtype, dropout=0.5)
    x, memory, dy = X.astype(dtype), ROW.astype(dtype), DY.astype(dtype)
    for more in ({"mask": np.array([[True], [False], [True]])}, {"rng": 0}, {}):
        _, (dquery, dmemory), _ = all_gradients(layer, x, {"memory": memory, **more}, dy)
        assert not dquery.any()
        assert not any(getattr(layer, name).grad.any() for name in DEAD)
    assert dmemory.all()
    assert all(getattr(layer, name).grad.all() for name in ("W_v", "b_v", "W_o", "b_o"))


# ---- the layers against torch's --------------------------------------------------------------------------

def torch_activation(name):
    functional = pytorch().nn.functional
    return {"relu": functional.relu, "gelu": functional.gelu,
            "gelu_tanh": functools.partial(functional.gelu, approximate="tanh")}[name]


def their_module(kind, layer):
    """nn.TransformerEncoderLayer or nn.TransformerDecoderLayer with the layer's weights and settings."""
    return with_our_weights(getattr(pytorch().nn, kind)(
        D, 2, HIDDEN, dropout=0.0, activation=torch_activation(layer.feed_forward.activation), batch_first=True,
        norm_first=layer.norm == "pre"), layer)


every_activation_and_norm = pytest.mark.parametrize(
    ("activation", "norm"), [("relu", "pre"), ("gelu", "post"), ("gelu_tanh", "pre")])


@every_activation_and_norm
@every_mask
def test_the_encoder_layer_equals_torchs(kind, activation, norm):
    layer, mask = encoder(norm, activation), MASKS[kind]
    module = their_module("TransformerEncoderLayer", layer)
    compare(layer, module, lambda x: module(x, src_key_padding_mask=inverted(mask)), (X,), {"mask": mask}, mask)


@every_activation_and_norm
@pytest.mark.parametrize("memory_masked", [False, True])
@every_mask
def test_the_decoder_layer_equals_torchs(kind, memory_masked, activation, norm):
    layer, mask, memory_mask = decoder(norm, activation), MASKS[kind], MEMORY_MASK if memory_masked else None
    module = their_module("TransformerDecoderLayer", layer)
    compare(layer, module, lambda x, memory: module(
        x, memory, tgt_mask=inverted(CAUSAL), tgt_key_padding_mask=inverted(mask),
        memory_key_padding_mask=inverted(memory_mask)), (X, MEMORY), {"mask": mask, "memory_mask": memory_mask}, mask)


@every_norm
def test_the_decoder_layer_over_one_row_equals_torchs(norm):
    layer = decoder(norm)
    module = their_module("TransformerDecoderLayer", layer)
    compare(layer, module, lambda x, memory: module(x, memory, tgt_mask=inverted(CAUSAL)), (X, ROW), {}, None)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(D,), (2, 3, D), (2, 3, 2, D), (2, 0, D)], ids=str)
def test_feed_forward_equals_torch(shape, activation):
    layer, rng = off_their_start(FeedForward(D, HIDDEN, activation, rng=0, dtype="float64")), np.random.default_rng(0)
    x, dy = rng.standard_normal(shape), rng.standard_normal(shape)
    y, dx, ours = all_gradients(layer, x, {}, dy)
    leaf, w = tensor(x), tensors(layer)
    expected = torch_activation(activation)(leaf @ w["W_1"] + w["b_1"]) @ w["W_2"] + w["b_2"]
    torch_backward([expected], [dy])
    assert_close((y, dx), (expected.detach().numpy(), gradient(leaf)), 1e-12)
    assert_close(ours, list(map(gradient, w.values())), 1e-12)


# ---- padding and look ahead ------------------------------------------------------------------------------

def self_attention(causal):
    class Causal(MultiHeadAttention):
        def forward(self, query, mask=None, rng=None):
            return super().forward(query, causal=causal, mask=mask, rng=rng)
    return off_their_start(Causal(D, 2, rng=0, dtype="float64"))


PADDED = {"attention": lambda: self_attention(False), "causal attention": lambda: self_attention(True),
          "encoder, post": encoder, "encoder, pre": lambda: encoder("pre"), "decoder, post": decoder,
          "decoder, pre": lambda: decoder("pre")}


@pytest.mark.parametrize("kind", ["gaps", "a sample with no real step"])
@pytest.mark.parametrize("name", PADDED)
def test_a_padded_batch_is_its_samples_without_padding(name, kind):
    """y, dx, dmemory and the parameters' gradients; NaN at the padded positions of x, memory and dy never leaks."""
    layer, mask, own = PADDED[name](), KINDS[kind], "attention" not in name
    extra = {"memory": np.where(MEMORY_MASK[:, :, None], MEMORY, np.nan), "memory_mask": MEMORY_MASK}
    extra = extra if "decoder" in name else {}
    y, returned, total = all_gradients(layer, np.where(mask[:, :, None], X, np.nan), {"mask": mask, **extra},
                                       np.where(mask[:, :, None], DY, np.nan if own else 0))
    dx, dmemory = returned if extra else (returned, MEMORY)
    assert not dx[~mask].any()
    assert not own or not y[~mask].any()
    sums = [np.zeros_like(g) for g in total]
    for n in range(B):
        seen = MEMORY_MASK[n]
        keywords = {"memory": MEMORY[n:n + 1, seen]} if extra else {}
        y_n, returned_n, grads_n = all_gradients(layer, X[n:n + 1, mask[n]], keywords, DY[n:n + 1, mask[n]])
        dx_n, dmemory_n = returned_n if extra else (returned_n, MEMORY[n:n + 1, seen])
        assert_close((y[n, mask[n]], dx[n, mask[n]], dmemory[n, seen]), (y_n[0], dx_n[0], dmemory_n[0]))
        assert not extra or not dmemory[n, ~seen].any()
        sums = [a + b for a, b in zip(sums, grads_n)]
    assert_close(total, sums)


@pytest.mark.parametrize("name", ["causal attention", "decoder, post", "decoder, pre"])
@pytest.mark.parametrize("t", [1, L - 1])
def test_a_later_token_changes_no_earlier_output(t, name):
    layer, later = PADDED[name](), X.copy()
    later[:, t:] = 1e3 * draw(L - t, 5)
    inputs = (MEMORY,) if "decoder" in name else ()
    y, other = layer(X, *inputs), layer(later, *inputs)
    assert_identical(other[:, :t], y[:, :t])
    assert (other[:, t:] != y[:, t:]).all()


@every_norm
def test_the_decoder_sees_no_later_token_in_its_gradient(norm):
    """dy at position t alone: nothing comes back to later positions, exactly; all earlier ones have a part."""
    layer, t, dy = decoder(norm), 3, np.zeros_like(DY)
    dy[:, t] = DY[:, t]
    _, (dx, _), _ = all_gradients(layer, X, {"memory": MEMORY}, dy)
    assert not dx[:, t + 1:].any()
    assert dx[:, :t + 1].all()


# ---- settings and bad input ------------------------------------------------------------------------------

def test_a_decoder_shares_the_parts_of_an_encoder_themselves():
    """The same objects, of the encoder's dtype. Their gradients: tests/models/test_tsdae_model.py."""
    shared = encoder()
    layer = TransformerDecoderLayer(D, 2, HIDDEN, shared=shared)
    for part in ("attention", "attention_norm", "feed_forward", "feed_forward_norm"):
        assert getattr(layer, part) is getattr(shared, part)
    own = {name.split(".")[0] for name, p in layer.named_parameters() if p not in shared.parameters()}
    assert own == {"cross_attention", "cross_attention_norm"}
    assert {p.value.dtype for p in layer.parameters()} == {np.dtype("float64")}


def test_the_settings_reach_the_parts():
    layer = TransformerDecoderLayer(D, 4, HIDDEN, "pre", "relu", attention_dropout=0.1, cross_dropout=0.2, rng=0)
    assert (layer.attention.heads, layer.cross_attention.heads, layer.feed_forward.activation) == (4, 4, "relu")
    assert (layer.attention.dropout, layer.cross_attention.dropout) == (0.1, 0.2)
    assert {p.value.dtype for p in layer.parameters()} == {np.dtype("float32")}
    assert layer.feed_forward.W_1.value.shape == (D, HIDDEN)


def test_weights_start_as_glorot_and_biases_at_zero():
    layer = TransformerDecoderLayer(128, 4, 256, rng=0)
    for name, p in layer.named_parameters():
        if p.value.ndim == 2:
            assert p.value.std() == pytest.approx((2 / sum(p.value.shape))**0.5, rel=0.02)
        else:
            assert (p.value == (1 if name.endswith("gain") else 0)).all()
    matrices = [p.value for p in layer.parameters() if p.value.shape == (128, 128)]
    assert len({array.tobytes() for array in matrices}) == len(matrices) == 8


MASK = KINDS["right padding"]


@pytest.mark.parametrize(("call", "error", "sentence"), [
    (lambda: attention()(X[..., :7]), ValueError, r"MultiHeadAttention: query has shape \(3, 7, 7\); expected \(ba"),
    (lambda: attention()(X.astype(int)), TypeError, "MultiHeadAttention: query has dtype int64"),
    (lambda: attention()(X, MEMORY[..., :7]), ValueError, r"MultiHeadAttention: memory has shape \(3, 5, 7\)"),
    (lambda: attention()(X, MEMORY[:1]), ValueError, r"memory has shape \(1, 5, 8\); expected a batch of 3, as query"),
    (lambda: attention()(X, ROW[:1]), ValueError, r"memory has shape \(1, 1, 8\); expected a batch of 3, as query"),
    (lambda: attention()(X, MEMORY, causal=True), ValueError, "causal is True and a memory is given"),
    (lambda: attention()(X, ROW, causal=True), ValueError, "causal is True and a memory is given"),
    (lambda: attention()(X, mask=MASK[:1]), ValueError, r"mask has shape \(1, 7\); expected \(3, 7\)"),
    (lambda: attention()(X, mask=MASK * 1.0), TypeError, "mask has dtype float64; expected bool"),
    (lambda: attention()(X, MEMORY, mask=MASK), ValueError, r"mask has shape \(3, 7\); expected \(3, 5\)"),
    (lambda: FeedForward(D, 3)(X[..., :7]), ValueError, r"FeedForward: x has shape \(3, 7, 7\); expected \(..., 8\)"),
    (lambda: encoder()(X[..., :7]), ValueError, r"TransformerEncoderLayer: x has shape \(3, 7, 7\)"),
    (lambda: encoder()(X, mask=MASK[:, :6]), ValueError, r"TransformerEncoderLayer: mask has shape \(3, 6\)"),
    (lambda: decoder()(X[..., :7], MEMORY), ValueError, r"TransformerDecoderLayer: x has shape \(3, 7, 7\)"),
    (lambda: decoder()(X, MEMORY, mask=MASK * 1), TypeError, "TransformerDecoderLayer: mask has dtype int64"),
    (lambda: decoder()(X, MEMORY[..., :7]), ValueError, r"memory has shape \(3, 5, 7\); expected \(batch, length, 8\)"),
    (lambda: decoder()(X, MEMORY[:2]), ValueError, r"memory has shape \(2, 5, 8\); expected a batch of 3"),
    (lambda: decoder()(X, None), TypeError, "TransformerDecoderLayer: memory is"),
    (lambda: decoder()(X, MEMORY, memory_mask=MASK), ValueError, r"memory_mask has shape \(3, 7\); expected \(3, 5\)"),
    (lambda: decoder()(X, MEMORY, memory_mask=MEMORY_MASK * 1), TypeError, "memory_mask has dtype int64; expected"),
])
def test_bad_input(call, error, sentence):
    with pytest.raises(error, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("make", "error", "sentence"), [
    (lambda: MultiHeadAttention(10, 4), ValueError, "MultiHeadAttention: d_key is 10 and heads 4; expected a width"),
    (lambda: MultiHeadAttention(8, 2, 7), ValueError, "MultiHeadAttention: d_key is 7 and heads 2"),
    (lambda: MultiHeadAttention(8, 0), ValueError, "MultiHeadAttention: heads is 0"),
    (lambda: MultiHeadAttention(8, 2, 0), ValueError, "MultiHeadAttention: d_key is 0"),
    (lambda: MultiHeadAttention(8, 2, dropout=1.0), ValueError, "MultiHeadAttention: dropout is 1.0"),
    (lambda: FeedForward(0, 3), ValueError, "FeedForward: d is 0"),
    (lambda: FeedForward(8, None), ValueError, "FeedForward: d_hidden is None"),
    (lambda: FeedForward(8, 3, "swish"), ValueError, "FeedForward: activation is 'swish'; expected one of 'relu'"),
    (lambda: TransformerEncoderLayer(8, 2, 3, "both"), ValueError, "TransformerEncoderLayer: norm is 'both'"),
    (lambda: TransformerDecoderLayer(8, 2, 3, "both"), ValueError, "TransformerDecoderLayer: norm is 'both'"),
    (lambda: TransformerDecoderLayer(8, 2, 3, dropout=1), ValueError, "p is 1; expected a number in"),
    (lambda: TransformerDecoderLayer(8, 2, 3, cross_dropout=-1), ValueError, "dropout is -1"),
    (lambda: TransformerDecoderLayer(8, 2, 3, shared=3), TypeError, "TransformerDecoderLayer: shared is"),
    (lambda: TransformerDecoderLayer(16, 2, HIDDEN, shared=encoder()), ValueError, "TransformerDecoderLayer: shared "),
    (lambda: TransformerDecoderLayer(8, 4, HIDDEN, shared=encoder()), ValueError, "TransformerDecoderLayer: shared "),
    (lambda: TransformerDecoderLayer(8, 2, 13, shared=encoder()), ValueError, "TransformerDecoderLayer: shared "),
    (lambda: TransformerDecoderLayer(8, 2, HIDDEN, "pre", shared=encoder()), ValueError,
     "TransformerDecoderLayer: shared "),
    (lambda: TransformerDecoderLayer(8, 2, HIDDEN, activation="relu", shared=encoder()), ValueError,
     "TransformerDecoderLayer: shared "),
])
def test_bad_settings(make, error, sentence):
    with pytest.raises(error, match=sentence):
        make()


