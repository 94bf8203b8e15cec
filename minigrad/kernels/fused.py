"""The functions of `kernels.of(xp)`. The NumPy counterpart of each is where it is called."""

from minigrad.kernels.lstm import loop_backward, loop_forward
from minigrad.kernels.norm import layer_norm_backward, layer_norm_forward
from minigrad.kernels.optim import clip_gradients, grad_norm, optimizer_step, shrink_gradients, zero_gradients
from minigrad.kernels.scatter import scatter_add
from minigrad.kernels.softmax import masked_softmax, softmax_rows_backward
from minigrad.kernels.sru import recurrence_backward, recurrence_forward

__all__ = ["clip_gradients", "grad_norm", "layer_norm_backward", "layer_norm_forward", "loop_backward", "loop_forward",
           "masked_softmax", "optimizer_step", "recurrence_backward", "recurrence_forward", "scatter_add",
           "shrink_gradients", "softmax_rows_backward", "zero_gradients"]
