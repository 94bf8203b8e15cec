"""The transformer's blocks: FeedForward, TransformerEncoderLayer, TransformerDecoderLayer (Vaswani et al. 2017)."""

from typing import Any, NamedTuple

from minigrad.backend import array_module, on_host
from minigrad.check import check_choice, check_count, check_mask, check_rank_and_width, check_shape
from minigrad.functional import gelu, gelu_tanh, relu
from minigrad.initializers import generator, glorot_uniform, zeros
from minigrad.layer import Layer
from minigrad.layers.attention import MultiHeadAttention
from minigrad.layers.dropout import Dropout
from minigrad.layers.linear import affine, affine_backward
from minigrad.layers.norm import LayerNorm
from minigrad.memory import apply, zeros as zeros_of
from minigrad.parameter import Parameter

ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh}
NORMS = ("post", "pre")


class FeedForward(Layer):
    """y = g(x W_1 + b_1) W_2 + b_2 at every position (Vaswani et al. 2017, equation 2).

    W_1 (d, d_hidden), W_2 (d_hidden, d)   Glorot uniform;  b_1 (d_hidden,), b_2 (d,)   zero
    activation   g: "relu", "gelu" (exact, by erf) or "gelu_tanh" (its approximation), each with its own gradient
    x (..., d) -> y (..., d). `mask` and `rng` are accepted and have no effect.

    Raises ValueError for a wrong setting or width, TypeError for a wrong dtype or device.
    """

    def __init__(self, d, d_hidden, activation="gelu", *, rng=None, dtype=None):
        check_count("FeedForward", "d", d)
        check_count("FeedForward", "d_hidden", d_hidden)
        check_choice("FeedForward", "activation", activation, ACTIVATIONS)
        rng = generator(rng)
        self.W_1 = Parameter(glorot_uniform(rng, (d, d_hidden), dtype), "W_1")
        self.b_1 = Parameter(zeros((d_hidden,), dtype), "b_1")
        self.W_2 = Parameter(glorot_uniform(rng, (d_hidden, d), dtype), "W_2")
        self.b_2 = Parameter(zeros((d,), dtype), "b_2")
        self.activation = activation

    def forward(self, x, mask=None, rng=None):
        array_module(x=x, W_1=self.W_1.value)
        check_rank_and_width("FeedForward", "x", x, None, self.W_1.value.shape[0])
        rows = x.reshape(-1, x.shape[-1])
        a, activation_cache = ACTIVATIONS[self.activation].forward(affine(rows, self.W_1, self.b_1))     # (N, d_hidden)
        return affine(a, self.W_2, self.b_2).reshape(x.shape), (rows, a, activation_cache, x.shape)

    def backward(self, dy, cache):
        """da = dy W_2^T, dz = g'(z) da, dx = dz W_1^T; the weights' gradients over every position."""
        rows, a, activation_cache, shape = cache
        check_shape("FeedForward", "dy", dy, shape)
        da = affine_backward(dy.reshape(rows.shape), a, self.W_2, self.b_2)
        dz = ACTIVATIONS[self.activation].backward(da, activation_cache)
        return affine_backward(dz, rows, self.W_1, self.b_1).reshape(shape)


# ---- a residual with its norm ----------------------------------------------------------------------------


class _ResidualCache(NamedTuple):
    norm: Any
    part: Any
    drop: Any


class _NormedResidual:
    """A residual around a part f, with the layer norm after the sum or before f:

        post (Vaswani et al. 2017, BERT):   y = norm(x + drop(f(x)))
        pre  (Xiong et al. 2020):           y = x + drop(f(norm(x)))
    """

    def __init__(self, part, norm, block):
        self.part, self.norm, self.drop, self.place = part, norm, block.drop, block.norm

    def forward(self, x, *memory, rng=None, **settings):
        n, norm_cache = self.norm.forward(x) if self.place == "pre" else (x, None)
        f, part_cache = self.part.forward(n, *memory, rng=rng, **settings)
        f, drop_cache = self.drop.forward(f, rng=rng)
        y = apply(array_module(x).add, x, f)
        if self.place == "post":
            y, norm_cache = self.norm.forward(y)
        return y, _ResidualCache(norm_cache, part_cache, drop_cache)

    def backward(self, dy, cache):
        """dx, then any further gradients that the part's backward returns."""
        if self.place == "post":
            dy = self.norm.backward(dy, cache.norm)
        returned = self.part.backward(self.drop.backward(dy, cache.drop), cache.part)
        dn, *others = returned if isinstance(returned, tuple) else (returned,)
        if self.place == "pre":
            dn = self.norm.backward(dn, cache.norm)
        return apply(array_module(dy).add, dy, dn), *others


class _OnRows:
    """MultiHeadAttention on the rows of the real positions: of all parts only it needs them at their places, (B, L)."""

    def __init__(self, attention, mask):
        self.attention, self.mask = attention, mask

    def forward(self, n, *memory, rng=None, **settings):
        y, cache = self.attention.forward(_placed(n, self.mask), *memory, rng=rng, **settings)
        return _rows(y, self.mask), cache

    def backward(self, dy, cache):
        returned = self.attention.backward(_placed(dy, self.mask), cache)
        dquery, *dmemory = returned if isinstance(returned, tuple) else (returned,)
        return _rows(dquery, self.mask), *dmemory


class _Block(Layer):
    """Base of the encoder's and the decoder's layer."""

    def _setting(self, norm, dropout):
        check_choice(type(self).__name__, "norm", norm, NORMS)
        self.norm, self.drop = norm, Dropout(dropout)

    def _self_attention(self, mask):
        return _NormedResidual(_OnRows(self.attention, mask), self.attention_norm, self)

    def _feed_forward(self):
        return _NormedResidual(self.feed_forward, self.feed_forward_norm, self)

    def _check_input(self, x, mask):
        name = type(self).__name__
        check_rank_and_width(name, "x", x, 3, self.attention.W_q.value.shape[0])
        if mask is not None:
            check_mask(name, mask, x.shape[:2])


def _rows(array, mask):
    """(N, d) of an array (B, L, d): the N real positions. Values at padded ones, NaN included, are dropped.

    On a GPU it stays (B, L, d), with zeros at padded positions: otherwise the host would have to wait for N.
    """
    if mask is None or on_host(mask):
        return array if mask is None else array[mask]
    return array_module(array).where(mask[:, :, None], array, 0)


def _placed(rows, mask):
    """The inverse of `_rows`, with zeros at padded positions."""
    if mask is None:
        return rows
    if not on_host(mask):
        return _rows(rows, mask)
    array = zeros_of((*mask.shape, rows.shape[-1]), rows.dtype, array_module(rows))
    array[mask] = rows
    return array


class TransformerEncoderLayer(_Block):
    """Self-attention, then the feed-forward layer, each with a residual and a layer norm.

    attention, attention_norm, feed_forward, feed_forward_norm: the parts
    norm       "post", after each sum (as in BERT), or "pre", before each part
    dropout    of each part's output;  attention_dropout: of the attention weights

    forward(x (B, L, d), mask=None, rng=None) -> y (B, L, d), cache; mask (B, L). At a padded position y and dx are 0
    and dy is ignored.
    Raises as its parts do.
    """

    def __init__(self, d, heads, d_hidden, norm="post", activation="gelu", *, dropout=0.0, attention_dropout=0.0,
                 rng=None, dtype=None):
        rng = generator(rng)
        self._setting(norm, dropout)
        self.attention = MultiHeadAttention(d, heads, dropout=attention_dropout, rng=rng, dtype=dtype)
        self.attention_norm = LayerNorm(d, dtype=dtype)
        self.feed_forward = FeedForward(d, d_hidden, activation, rng=rng, dtype=dtype)
        self.feed_forward_norm = LayerNorm(d, dtype=dtype)

    def forward(self, x, mask=None, rng=None):
        array_module(x=x, mask=mask, W_q=self.attention.W_q.value)
        self._check_input(x, mask)
        rows, attention_cache = self._self_attention(mask).forward(_rows(x, mask), mask=mask, rng=rng)
        rows, feed_cache = self._feed_forward().forward(rows, rng=rng)
        return _placed(rows, mask), (attention_cache, feed_cache, mask, x.shape)

    def backward(self, dy, cache):
        attention_cache, feed_cache, mask, shape = cache
        check_shape("TransformerEncoderLayer", "dy", dy, shape)
        drows, = self._feed_forward().backward(_rows(dy, mask), feed_cache)
        drows, = self._self_attention(mask).backward(drows, attention_cache)
        return _placed(drows, mask)


def _shareable(shared, **wanted):
    """`shared`, which must be an encoder layer with these settings."""
    if not isinstance(shared, TransformerEncoderLayer):
        raise TypeError(f"TransformerDecoderLayer: shared is a {type(shared).__name__}; expected a "
                        "TransformerEncoderLayer")
    d, d_hidden = shared.feed_forward.W_1.value.shape
    settings = {"d": d, "heads": shared.attention.heads, "d_hidden": d_hidden, "norm": shared.norm,
                "activation": shared.feed_forward.activation}
    for name, value in wanted.items():
        if settings[name] != value:
            raise ValueError(f"TransformerDecoderLayer: shared has {name} {settings[name]!r} and {name} is {value!r}; "
                             "expected the same, as the shared layer's is used")
    return shared


class _DecoderCache(NamedTuple):
    attention: Any
    cross: Any
    feed: Any
    mask: Any
    shape: tuple        # of y


class TransformerDecoderLayer(_Block):
    """Causal self-attention, attention over a memory, then the feed-forward layer, each with a residual and a norm.

    attention, attention_norm, cross_attention, cross_attention_norm, feed_forward, feed_forward_norm: the parts
    shared     a TransformerEncoderLayer whose attention, feed-forward layer and norms are used here too (weight tying:
               the same objects, so one gradient, the sum of both uses); the cross-attention and its norm are separate
    norm, activation, dropout, attention_dropout    as in TransformerEncoderLayer;
    cross_dropout   of the cross-attention's weights

    forward(x (B, L, d), memory (B, M, d), mask=None, memory_mask=None, rng=None) -> y (B, L, d), cache; mask (B, L),
    memory_mask (B, M). At a padded position y and dx are 0 and dy is ignored. backward(dy, cache) -> (dx, dmemory).
    Raises as its parts do.
    """

    def __init__(self, d, heads, d_hidden, norm="post", activation="gelu", *, dropout=0.0, attention_dropout=0.0,
                 cross_dropout=0.0, shared=None, rng=None, dtype=None):
        rng = generator(rng)
        self._setting(norm, dropout)
        if shared is None:
            own = TransformerEncoderLayer(
                d, heads, d_hidden, norm, activation, attention_dropout=attention_dropout, rng=rng, dtype=dtype)
        else:
            own = _shareable(shared, d=d, heads=heads, d_hidden=d_hidden, norm=norm, activation=activation)
            dtype = dtype or own.attention.W_q.value.dtype
        self.attention, self.attention_norm = own.attention, own.attention_norm
        self.cross_attention = MultiHeadAttention(d, heads, dropout=cross_dropout, rng=rng, dtype=dtype)
        self.cross_attention_norm = LayerNorm(d, dtype=dtype)
        self.feed_forward, self.feed_forward_norm = own.feed_forward, own.feed_forward_norm

    def forward(self, x, memory, mask=None, memory_mask=None, rng=None):
        array_module(x=x, memory=memory, mask=mask, memory_mask=memory_mask, W_q=self.attention.W_q.value)
        self._check_input(x, mask)
        if memory is None:
            raise TypeError("TransformerDecoderLayer: memory is None; expected an array, (batch, length, d)")
        check_rank_and_width("TransformerDecoderLayer", "memory", memory, 3, x.shape[2])
        if memory_mask is not None:
            check_mask("TransformerDecoderLayer", memory_mask, memory.shape[:2], "memory_mask")
        rows, attention_cache = self._self_attention(mask).forward(_rows(x, mask), mask=mask, causal=True, rng=rng)
        rows, cross_cache = self._cross_attention(mask).forward(rows, memory, mask=memory_mask, rng=rng)
        rows, feed_cache = self._feed_forward().forward(rows, rng=rng)
        return _placed(rows, mask), _DecoderCache(attention_cache, cross_cache, feed_cache, mask, x.shape)

    def backward(self, dy, cache):
        attention_cache, cross_cache, feed_cache, mask, shape = cache
        check_shape("TransformerDecoderLayer", "dy", dy, shape)
        drows, = self._feed_forward().backward(_rows(dy, mask), feed_cache)
        drows, dmemory = self._cross_attention(mask).backward(drows, cross_cache)
        drows, = self._self_attention(mask).backward(drows, attention_cache)
        return _placed(drows, mask), dmemory

    def _cross_attention(self, mask):
        return _NormedResidual(_OnRows(self.cross_attention, mask), self.cross_attention_norm, self)
