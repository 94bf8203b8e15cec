"""LayerNorm: layer normalisation (Ba, Kiros and Hinton 2016, arXiv 1607.06450).

Derivation of the backward: docs/derivations/layer_norm.md.
"""

import numpy as np

from minigrad import kernels
from minigrad.backend import DEFAULT_DTYPE, array_module
from minigrad.check import check_count, check_number, check_rank_and_width, check_shape
from minigrad.initializers import zeros
from minigrad.layer import Layer
from minigrad.memory import apply
from minigrad.parameter import Parameter

# ---- the equations ---------------------------------------------------------------------------------------


def normalize(x, eps):
    """x_hat = (x - mu) / sqrt(var + eps), mu and var of each row (last axis). x (..., d) -> x_hat, cache."""
    xp = array_module(x)
    x_hat = apply(xp.subtract, x, row_means(x))
    variance = row_means(apply(xp.multiply, x_hat, x_hat))
    inverse_sigma = 1 / xp.sqrt(variance + eps)                 # (..., 1)
    x_hat *= inverse_sigma
    return x_hat, (x_hat, inverse_sigma)


def normalize_backward(dx_hat, cache):
    """dx = (dx_hat - mean(dx_hat) - x_hat mean(dx_hat x_hat)) / sigma."""
    x_hat, inverse_sigma = cache
    xp = array_module(x_hat)
    dx = apply(xp.subtract, dx_hat, row_means(dx_hat))
    dx -= apply(xp.multiply, x_hat, row_means(apply(xp.multiply, dx_hat, x_hat)))
    dx *= inverse_sigma
    return dx


def row_means(x):
    """x.mean(axis=-1, keepdims=True) as a product with a vector: faster than a reduction over short rows."""
    d = x.shape[-1]
    return (x @ array_module(x).full((d,), 1 / d, x.dtype))[..., None]


def layer_norm(x, gain, bias, eps):
    """y = x_hat gain + bias. x (..., d) -> y, cache."""
    xp = array_module(x)
    x_hat, cache = normalize(x, eps)
    y = apply(xp.multiply, x_hat, gain)
    y += bias
    return y, cache


def layer_norm_backward(dy, gain, cache):
    """dx: `normalize_backward` of dy gain; dgain = sum dy x_hat and dbias = sum dy, over every position."""
    xp, (x_hat, _), d = array_module(dy), cache, dy.shape[-1]
    dgain = apply(xp.multiply, dy, x_hat).reshape(-1, d).sum(axis=0)
    return normalize_backward(apply(xp.multiply, dy, gain), cache), dgain, dy.reshape(-1, d).sum(axis=0)


def norm_pair(xp):
    """(layer_norm, layer_norm_backward) of an array module: the fused kernels on a GPU."""
    fused = kernels.of(xp)
    return (fused.layer_norm_forward, fused.layer_norm_backward) if fused else (layer_norm, layer_norm_backward)


# ---- the layer -------------------------------------------------------------------------------------------


class LayerNorm(Layer):
    """y = x_hat gain + bias, x_hat = (x - mu) / sqrt(var + eps), mu and var over the last axis (the biased variance).

    gain (d,)  starts as one
    bias (d,)  starts as zero
    x (..., d) -> y (..., d), dtype of x and gain together. `mask` and `rng` are accepted and have no effect: each
    position is normalised on its own.

    Raises ValueError for a wrong width or an eps that is not above 0, TypeError for a wrong dtype or device.
    """

    def __init__(self, d, eps=1e-5, *, rng=None, dtype=None):
        check_count("LayerNorm", "d", d)
        check_number("LayerNorm", "eps", eps, 0, open_low=True, open_high=True)
        self.gain = Parameter(np.ones((d,), dtype or DEFAULT_DTYPE), "gain")
        self.bias = Parameter(zeros((d,), dtype), "bias")
        self.eps = float(eps)

    def forward(self, x, mask=None, rng=None):
        gain, bias = self.gain.value, self.bias.value
        xp = array_module(x=x, gain=gain)
        check_rank_and_width("LayerNorm", "x", x, None, gain.shape[0])
        x = x.astype(xp.result_type(x.dtype, gain.dtype), copy=False)
        y, norm_cache = norm_pair(xp)[0](x, gain, bias, self.eps)
        return y, (norm_cache, x.shape)

    def backward(self, dy, cache):
        norm_cache, shape = cache
        check_shape("LayerNorm", "dy", dy, shape)
        dx, dgain, dbias = norm_pair(array_module(dy))[1](dy, self.gain.value, norm_cache)
        self.add_gradients(gain=dgain, bias=dbias)
        return dx
