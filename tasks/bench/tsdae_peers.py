"""TSDAE in PyTorch eager, written well.

Written well means: attention by scaled_dot_product_attention or by products and softmax; what is position by position
at all positions of a batch or at the real ones alone; the fused AdamW. Masks are made once a batch, where they are
needed at all: the decoder sees earlier positions only, so right padding needs none. Over the one row that the decoder
attends to a weight is 1: value and output product once a sentence. The last norm is that of [CLS] alone. Logits are
made at the real target positions.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from minigrad.data.sentences import padded
from minigrad.tree import tree_map
from tasks.bench.measure import Side
from tasks.bench.peers import EAGER
from tasks.bench.steps import torch_step

# ---- the same parameters, in PyTorch's layout ------------------------------------------------------------


def transposed(arrays):
    """{name: array} of a tied TSDAE in PyTorch's layout, matrices (d_out, d_in), and back; without what is `unused`."""
    return {name: np.ascontiguousarray(array if name.endswith(("embedding.W", "positions.P")) else array.T)
            for name, array in arrays.items() if not unused(name)}


def unused(name):
    """Whether a parameter, by its dotted name, changes nothing: q, k over one row, and the norm that q alone sees."""
    return "cross_attention_norm." in name or ("cross_attention." in name and name[-1] in "qk")


# ---- the model -------------------------------------------------------------------------------------------

def matmul_attention(torch, q, k, v, mask, causal):
    """softmax(q k^T / sqrt(e) + mask) v."""
    scores = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[3]))
    if causal:
        mask = scores.new_full(scores.shape[2:], -math.inf).triu(1)
    return torch.softmax(scores + mask, dim=-1) @ v


def fused_attention(torch, q, k, v, mask, causal):
    """The same by scaled_dot_product_attention."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


class Positions(NamedTuple):
    """One side's ids: as (B, L), or the real ones alone in a row (N,), with their places among the B L."""

    ids: Any
    shape: tuple            # B, L
    mask: Any               # (B, 1, 1, L), 0 at real positions and -inf elsewhere; None: causal, nothing else to mask
    places: Any = None      # (N,); None: all of them
    sentence: Any = None    # (N,) the sentence of each
    position: Any = None    # (N,) and the position in it


class TorchTSDAE(NamedTuple):
    """A tied, pre-norm TSDAE with "cls" pooling and gelu_tanh."""

    torch: Any
    tensors: dict           # as `transposed`
    layers: int
    heads: int
    attention: Any

    def linear(self, x, name, symbol=""):
        return self.torch.nn.functional.linear(x, self.tensors[f"{name}.W{symbol}"], self.tensors[f"{name}.b{symbol}"])

    def norm(self, x, name):
        gain, bias = self.tensors[f"{name}.gain"], self.tensors[f"{name}.bias"]
        return self.torch.nn.functional.layer_norm(x, gain.shape, gain, bias)

    def gelu(self, z):
        return self.torch.nn.functional.gelu(z, approximate="tanh")

    def words(self, at):
        E, P = (self.tensors[f"encoder.words.{name}"] for name in ("embedding.W", "positions.P"))
        rows_of = self.torch.nn.functional.embedding
        return rows_of(at.ids, E) + (P[:at.shape[1]] if at.places is None else rows_of(at.position, P))

    def self_attention(self, n, name, at):
        (B, L), d = at.shape, n.shape[-1]

        def placed(rows):
            """(B, heads, L, e) of all positions, zeros at padded ones."""
            if at.places is not None:
                rows = rows.new_zeros(B * L, d).index_copy(0, at.places, rows)
            return rows.view(B, L, self.heads, d // self.heads).transpose(1, 2)

        q, k, v = (placed(self.linear(n, name, symbol)) for symbol in ("_q", "_k", "_v"))
        A = self.attention(self.torch, q, k, v, at.mask, at.mask is None).transpose(1, 2)
        A = A.reshape(B, L, d) if at.places is None else A.reshape(B * L, d).index_select(0, at.places)
        return self.linear(A, name, "_o")

    def block(self, x, n, at, s=None):
        """The n-th layer of the encoder or, where s is given, of the decoder."""
        name = f"encoder.layers.{n}"
        x = x + self.self_attention(self.norm(x, f"{name}.attention_norm"), f"{name}.attention", at)
        if s is not None:
            cross = f"decoder.layers.{n}.cross_attention"
            y = self.linear(self.linear(s, cross, "_v"), cross, "_o")
            x = x + (y[:, None] if at.places is None else y.index_select(0, at.sentence))
        z = self.gelu(self.linear(self.norm(x, f"{name}.feed_forward_norm"), f"{name}.feed_forward", "_1"))
        return x + self.linear(z, f"{name}.feed_forward", "_2")

    def encode(self, at):
        """s (B, d)."""
        x = self.words(at)
        for n in range(self.layers):
            x = self.block(x, n, at)
        return self.norm(x[:, 0] if at.places is None else x[at.position == 0], "encoder.words.norm")

    def logits(self, s, at, places):
        """(N, vocab) at these places among the B T positions (all there are, where `at` has the real ones alone)."""
        x = self.words(at)
        for n in range(self.layers):
            x = self.block(x, n, at, s)
        if at.places is None:
            x = x.flatten(0, 1).index_select(0, places)
        rows = self.gelu(self.linear(self.norm(x, "encoder.words.norm"), "decoder.transform"))
        rows = self.norm(rows, "decoder.transform_norm")
        return self.torch.addmm(self.tensors["decoder.b_v"], rows, self.tensors["encoder.words.embedding.W"].T)

    def loss(self, batch):
        noisy, clean, places, targets = batch
        return self.torch.nn.functional.cross_entropy(self.logits(self.encode(noisy), clean, places), targets)


def positions(torch, ids, mask, real_alone, causal=False):
    """Positions of ids (B, L) with their mask (B, L)."""
    additive = torch.zeros(mask.shape).masked_fill_(~torch.from_numpy(mask), -math.inf)[:, None, None]
    additive = None if causal else additive
    if not real_alone:
        return Positions(torch.from_numpy(ids), ids.shape, additive)
    sentence, position = map(torch.from_numpy, np.nonzero(mask))
    return Positions(torch.from_numpy(ids[mask]), ids.shape, additive, torch.from_numpy(np.flatnonzero(mask)), sentence,
                     position)


def torch_batch(torch, noisy, noisy_mask, clean, clean_mask, real_alone, device="cpu"):
    """What TorchTSDAE.loss takes."""
    predicted = clean_mask[:, 1:]
    batch = (positions(torch, noisy, noisy_mask, real_alone),
             positions(torch, clean[:, :-1].copy(), predicted, real_alone, causal=True),
             torch.from_numpy(np.flatnonzero(predicted)), torch.from_numpy(clean[:, 1:][predicted]))
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


WAYS = {f"{attention}, {rows}": (function, rows == "real rows")
        for attention, function in (("matmul", matmul_attention), ("SDPA", fused_attention))
        for rows in ("padded", "real rows")}


# ---- the work --------------------------------------------------------------------------------------------

def tensors_of(torch, model, requires_grad, device="cpu"):
    """{name: tensor}: copies of the values of models.tsdae.TSDAE."""
    values = transposed({name: parameter.value for name, parameter in model.named_parameters()})
    return {name: torch.tensor(value, requires_grad=requires_grad, device=device) for name, value in values.items()}


def step_sides(torch, model, data, settings, units, device="cpu", ways=None, name=EAGER, loss=TorchTSDAE.loss):
    """[Side]: a training step in every way to write it, or some; `settings`: AdamW's; loss(peer, batch)."""
    layers, heads, sides = model.settings["layers"], model.settings["heads"], []

    def begin():
        tensors = tensors_of(torch, model, True, device)
        return tensors, torch.optim.AdamW(tensors.values(), **settings, fused=True)
    for way in WAYS if ways is None else ways:
        attention, real_alone = WAYS[way]
        batch = torch_batch(torch, *data, real_alone, device)

        def loss_of(tensors, attention=attention, batch=batch):
            return loss(TorchTSDAE(torch, tensors, layers, heads, attention), batch)
        sides.append(torch_step("TSDAE step", way, begin, loss_of, units, transposed, name))
    return sides


def encode_sides(torch, model, sentences, batch_size):
    """[Side]: the embeddings of sentences of ids, in every way."""
    tensors, sides = tensors_of(torch, model, False), []
    for way, (attention, real_alone) in WAYS.items():
        peer = TorchTSDAE(torch, tensors, model.settings["layers"], model.settings["heads"], attention)
        call = functools.partial(encode, peer, sentences, batch_size, real_alone)
        sides.append(Side("TSDAE encode", EAGER, way, call, lambda call=call: {"vectors": call()}, "torch"))
    return sides


def encode(peer, sentences, batch_size, real_alone):
    """(n, d), as models.tsdae.TSDAE.encode: sorted by length, padded, a batch at a time."""
    torch, d = peer.torch, peer.tensors["encoder.words.norm.gain"].shape[0]
    vectors = np.empty((len(sentences), d), np.float32)
    order = np.argsort([len(ids) for ids in sentences], kind="stable")
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            rows = order[start:start + batch_size]
            batch = padded([sentences[row] for row in rows])
            vectors[rows] = peer.encode(positions(torch, *batch, real_alone)).numpy()
    return vectors
