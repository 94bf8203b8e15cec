"""What tasks/bench.py measures TSDAE against: its equations in PyTorch eager, written well.

Written well means: parameters as PyTorch lays them out, (d_out, d_in); q, k, v by one product or by three, attention
by scaled_dot_product_attention or by products and softmax, what is position by position at all positions of a batch or
at the real ones alone, AdamW in each of its forms: all are measured. Masks are made once a batch, where they are needed
at all: the decoder sees to its left only, so padding to its right needs none. Over the one row that the decoder attends
to a weight is 1: value and output product once a sentence. The last norm is that of [CLS] alone. Logits are made at the
real target positions.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from minigrad.data.sentences import padded
from minigrad.tree import tree_map
from tasks.bench.measure import Side
from tasks.bench.peers import torch_limit

Q_K_V = ("q", "k", "v")


# ---- the same parameters, in PyTorch's layout ------------------------------------------------------------

def laid_out(arrays, packed):
    """{name: array} of a tied TSDAE as PyTorch wants it: matrices (d_out, d_in), q, k, v as one if packed.

    Without what is `unused`. It is linear: gradients and moves are laid out in the same way.
    """
    theirs, arrays = {}, {name: array for name, array in arrays.items() if not unused(name)}
    for name, array in arrays.items():
        owner, _, symbol = name.rpartition(".")
        if packed and owner.endswith(".attention") and symbol[-1] in Q_K_V:
            if symbol.endswith("_q"):
                three = [arrays[f"{owner}.{symbol[:-1]}{which}"] for which in Q_K_V]
                theirs[f"{owner}.{symbol[:-1]}qkv"] = np.concatenate(three, axis=-1).T
        else:
            theirs[name] = array if owner.endswith(("embedding", "positions")) else array.T
    return {name: np.ascontiguousarray(array) for name, array in theirs.items()}


def laid_back(arrays):
    """The inverse of `laid_out`."""
    ours = {}
    for name, array in arrays.items():
        owner, _, symbol = name.rpartition(".")
        if symbol.endswith("_qkv"):
            for which, part in zip(Q_K_V, np.split(array.T, 3, axis=-1)):
                ours[f"{owner}.{symbol[:-3]}{which}"] = part
        else:
            ours[name] = array if owner.endswith(("embedding", "positions")) else array.T
    return ours


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
    tensors: dict           # as `laid_out`
    layers: int
    heads: int
    attention: Any
    packed: bool

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
            """(B, L, ...) of all positions, zeros at padded ones."""
            if at.places is not None:
                rows = rows.new_zeros(B * L, rows.shape[-1]).index_copy(0, at.places, rows)
            return rows.view(B, L, -1, self.heads, d // self.heads)

        if self.packed:
            q, k, v = placed(self.linear(n, name, "_qkv")).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (placed(self.linear(n, name, f"_{which}"))[:, :, 0].transpose(1, 2) for which in Q_K_V)
        A = self.attention(self.torch, q, k, v, at.mask, at.mask is None).transpose(1, 2)
        A = A.reshape(B, L, d) if at.places is None else A.reshape(B * L, d).index_select(0, at.places)
        return self.linear(A, name, "_o")

    def feed_forward(self, n, name):
        return self.linear(self.gelu(self.linear(n, name, "_1")), name, "_2")

    def block(self, x, n, at, s=None):
        """The n-th layer of the encoder or, where s is given, of the decoder."""
        name = f"encoder.layers.{n}"
        x = x + self.self_attention(self.norm(x, f"{name}.attention_norm"), f"{name}.attention", at)
        if s is not None:
            cross = f"decoder.layers.{n}.cross_attention"
            y = self.linear(self.linear(s, cross, "_v"), cross, "_o")
            x = x + (y[:, None] if at.places is None else y.index_select(0, at.sentence))
        return x + self.feed_forward(self.norm(x, f"{name}.feed_forward_norm"), f"{name}.feed_forward")

    def encode(self, at):
        """s (B, d)."""
        x = self.words(at)
        for n in range(self.layers):
            x = self.block(x, n, at)
        first = x[:, 0] if at.places is None else x[at.position == 0]
        return self.norm(first, "encoder.words.norm")

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


ATTENTIONS = {"matmul": matmul_attention, "SDPA": fused_attention}
PRODUCTS = {"one qkv": True, "three": False}
ROWS = {"padded": False, "real rows": True}
OPTIMIZERS = {"AdamW": {"foreach": False, "fused": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
WAYS = {f"{attention}, {products}, {rows}": (ATTENTIONS[attention], PRODUCTS[products], ROWS[rows])
        for attention, products in [("matmul", "one qkv"), ("SDPA", "three"), ("SDPA", "one qkv")] for rows in ROWS}
STEP_WAYS = {**{f"{way}, {form}": (*how, OPTIMIZERS[form]) for way, how in [*WAYS.items()][-1:] for form in OPTIMIZERS},
             **{f"{way}, fused": (*how, OPTIMIZERS["fused"]) for way, how in WAYS.items()}}


# ---- the two sides' work ---------------------------------------------------------------------------------

def build(torch, model, attention, packed, requires_grad, device="cpu"):
    """TorchTSDAE with copies of the values of models.tsdae.TSDAE."""
    values = laid_out({name: parameter.value for name, parameter in model.named_parameters()}, packed)
    tensors = {name: torch.tensor(value, requires_grad=requires_grad, device=device) for name, value in values.items()}
    return TorchTSDAE(torch, tensors, model.settings["layers"], model.settings["heads"], attention, packed)


def step_sides(torch, model, data, settings, thread_counts, device="cpu", ways=None, name="PyTorch eager",
               loss=TorchTSDAE.loss):
    """[Side]: a training step in every way to write it, or some; `settings`: AdamW's; loss(peer, batch)."""
    sides = []
    for way in STEP_WAYS if ways is None else ways:
        attention, packed, real_alone, form = STEP_WAYS[way]
        batch = torch_batch(torch, *data, real_alone, device)

        def begin(attention=attention, packed=packed, form=form):
            peer = build(torch, model, attention, packed, True, device)
            return peer, torch.optim.AdamW(peer.tensors.values(), **settings, **form), loss
        sides.append(Side("TSDAE step", name, way, functools.partial(train, *begin(), batch),
                          functools.partial(first_step, begin, batch, settings["lr"]), thread_counts, torch_limit))
    return sides


def train(peer, optimizer, loss_of, batch):
    """One training step; the loss."""
    optimizer.zero_grad()
    loss = loss_of(peer, batch)
    loss.backward()
    optimizer.step()
    return loss


def first_step(begin, batch, lr):
    """The loss, the gradients and the moves of a first step, as tasks.bench.tsdae.first_step."""
    peer, optimizer, loss_of = begin()

    def values():
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in peer.tensors.items()}

    before, loss, count = values(), train(peer, optimizer, loss_of, batch), len(batch[-1])
    gradients = laid_back({name: count * tensor.grad.cpu().numpy() for name, tensor in peer.tensors.items()})
    moves = laid_back({name: (value - before[name]) / lr for name, value in values().items()})
    return {"loss": loss.detach().cpu().numpy(), **{f"d{name}": array for name, array in gradients.items()},
            **{f"move of {name}": array for name, array in moves.items()}}


def encode_sides(torch, model, sentences, batch_size, thread_counts):
    """[Side]: the embeddings of sentences of ids, in every way."""
    sides = []
    for way, (attention, packed, real_alone) in WAYS.items():
        peer = build(torch, model, attention, packed, False)
        call = functools.partial(encode, peer, sentences, batch_size, real_alone)
        sides.append(Side("TSDAE encode", "PyTorch eager", way, call, lambda call=call: {"vectors": call()},
                          thread_counts, torch_limit))
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
