"""Linear: y = x W + b."""

from minigrad.backend import array_module
from minigrad.check import check_count, check_rank_and_width, check_shape
from minigrad.initializers import glorot_uniform, zeros
from minigrad.layer import Layer
from minigrad.memory import matmul
from minigrad.parameter import Parameter


class Linear(Layer):
    """y = x W + b, row vectors, on the last axis.

    W (d_in, d_out)  Glorot uniform
    b (d_out,)       zero; absent with bias=False
    x (..., d_in) -> y (..., d_out), dtype of x and W together. `mask` and `rng` are accepted and have no effect:
    each position is mapped separately.

    Raises ValueError for a wrong width, TypeError for a wrong dtype or device.
    """

    def __init__(self, d_in, d_out, bias=True, *, rng=None, dtype=None):
        check_count("Linear", "d_in", d_in)
        check_count("Linear", "d_out", d_out)
        self.W = Parameter(glorot_uniform(rng, (d_in, d_out), dtype), "W")
        self.b = Parameter(zeros((d_out,), dtype), "b") if bias else None

    def forward(self, x, mask=None, rng=None):
        array_module(x=x, W=self.W.value)
        check_rank_and_width("Linear", "x", x, None, self.W.value.shape[0])
        return affine(x, self.W, self.b), x

    def backward(self, dy, cache):
        x = cache
        check_shape("Linear", "dy", dy, (*x.shape[:-1], self.W.value.shape[1]))
        return affine_backward(dy, x, self.W, self.b)


def affine(x, W, b):
    """x W + b for Parameters W (d_in, d_out) and b (d_out,) or None. x (..., d_in) -> (..., d_out)."""
    y = _rows_times(x, W.value)
    if b is not None:
        y += b.value
    return y


def affine_backward(dy, x, W, b):
    """dx = dy W^T; W.grad += x^T dy; b.grad += sum dy (over every position)."""
    rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])       # (N, d_in), (N, d_out)
    W.grad += rows.T @ drows
    if b is not None:
        b.grad += drows.sum(axis=0)
    return _rows_times(dy, W.value.T)


def _rows_times(x, W):
    """x W as one product over all rows: with three axes `@` makes one of each batch entry."""
    return x @ W if x.ndim == 1 else matmul(x, W)
