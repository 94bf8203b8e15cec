"""Dropout (Srivastava et al. 2014), in the inverted form: scaling happens in training."""

from minigrad.backend import array_module, uniform_like
from minigrad.check import check_number, check_shape
from minigrad.layer import Layer


class Dropout(Layer):
    """y = x * m / (1 - p) with m_i = 1 with probability 1 - p, else 0; the identity when rng is None.

    Backward: dx = dy * m / (1 - p), with forward's m, which is in the cache.
    x of any shape, floating point; y has its shape and dtype. `mask` is accepted and has no effect.
    Raises ValueError for p outside [0, 1), TypeError for x of another dtype.
    """

    def __init__(self, p, *, rng=None, dtype=None):
        check_number("Dropout", "p", p, 0, 1, open_high=True)
        self.p = float(p)

    def forward(self, x, mask=None, rng=None):
        array_module(x=x)
        if x.dtype.kind != "f":
            raise TypeError(f"Dropout: x has dtype {x.dtype}; expected floating-point numbers")
        if rng is None or self.p == 0:
            return x, (None, x.shape)
        scaled_mask = (uniform_like(rng, x) >= self.p).astype(x.dtype)
        scaled_mask *= 1 / (1 - self.p)
        return x * scaled_mask, (scaled_mask, x.shape)

    def backward(self, dy, cache):
        scaled_mask, shape = cache
        check_shape("Dropout", "dy", dy, shape)
        return dy if scaled_mask is None else dy * scaled_mask
