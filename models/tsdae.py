"""TSDAE: sentence embeddings by reconstructing a sentence from its noisy copy (Wang et al. 2021, arXiv 2104.06979).

    noisy sentence -> encoder -> s (d,) -> decoder, which sees s and the earlier words -> each next word

Only the encoder is needed afterwards:

    model = TSDAE.load("runs/tsdae/.../best.safetensors")
    vectors = model.encode(["A man plays a guitar.", "Someone plays an instrument."])       # (2, d) float32
"""

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import array_module, asnumpy, on_host, to_device
from minigrad.check import check_choice, check_count, check_mask, check_rank_and_width, check_shape
from minigrad.data.sentences import CLS, PAD, SEP, WordVocabulary, enclosed, padded
from minigrad.functional import gelu, gelu_tanh
from minigrad.initializers import generator, zeros
from minigrad.layer import Layer
from minigrad.layers import (
    Dropout,
    Embedding,
    LayerNorm,
    LearnedPositions,
    Linear,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)
from minigrad.layers.transformer import NORMS
from minigrad.memory import matmul
from minigrad.parameter import Parameter
from minigrad.tensors import CheckpointError, load_tensors, save_tensors
from minigrad.training import load_model

POOLINGS = ("cls", "mean", "max")
EVALUATED = 64                  # sentences encoded at a time
BEST = "best.safetensors"       # in a run's folder


# ---- pooling ---------------------------------------------------------------------------------------------

def pool(h, mask, pooling):
    """s (B, d) of the encoder's outputs h (B, L, d) at the real positions, mask (B, L). Returns s, cache.

        cls   s = h_0, the output at [CLS]
        mean  s = sum_t h_t / n, over the n real positions
        max   s_i = max_t h_ti, over the real positions
    """
    xp = array_module(h=h, mask=mask)
    if pooling == "cls":
        return h[:, 0], (h.shape, None)
    real = mask[:, :, None]
    if pooling == "mean":
        share = (real / xp.maximum(real.sum(axis=1, keepdims=True), 1)).astype(h.dtype)     # (B, L, 1)
        return (h * share).sum(axis=1), (h.shape, share)
    chosen = xp.where(real, h, -math.inf).argmax(axis=1)[:, None]                            # (B, 1, d)
    return xp.take_along_axis(h, chosen, axis=1)[:, 0], (h.shape, chosen)


def pool_backward(ds, cache, pooling):
    """dh: cls, ds at position 0; mean, ds / n at every real position; max, ds_i where h_i was largest (the first)."""
    xp, (shape, how) = array_module(ds), cache
    if pooling == "mean":
        return ds[:, None] * how
    if pooling == "max":
        return xp.where(xp.arange(shape[1])[:, None] == how, ds[:, None], 0)
    dh = xp.zeros(shape, ds.dtype)
    dh[:, 0] = ds
    return dh


# ---- the two halves --------------------------------------------------------------------------------------


class _Words(Layer):
    """Embeddings of words and positions, the input of encoder and decoder: x_t = E[id_t] + P_t, then dropout.

    With norm="post" a layer norm comes before the dropout, as in BERT; with "pre" it comes after the last layer.
    """

    def __init__(self, vocab, d, length, norm, dropout, *, rng, dtype):
        check_choice("TSDAE", "norm", norm, NORMS)
        self.embedding = Embedding(vocab, d, rng=rng, dtype=dtype)
        self.positions = LearnedPositions(length, d, rng=rng, dtype=dtype)
        self.norm, self.norm_first, self.drop = LayerNorm(d, dtype=dtype), norm == "post", Dropout(dropout)

    def forward(self, ids, mask=None, rng=None):
        x, embedding_cache = self.embedding.forward(ids, mask=mask)
        x, positions_cache = self.positions.forward(x, mask=mask)
        norm_cache = None
        if self.norm_first:
            x, norm_cache = self.norm.forward(x)
        x, drop_cache = self.drop.forward(x, rng=rng)
        return x, (embedding_cache, positions_cache, norm_cache, drop_cache)

    def backward(self, dx, cache):
        embedding_cache, positions_cache, norm_cache, drop_cache = cache
        dx = self.drop.backward(dx, drop_cache)
        if self.norm_first:
            dx = self.norm.backward(dx, norm_cache)
        self.embedding.backward(self.positions.backward(dx, positions_cache), embedding_cache)


class Encoder(Layer):
    """s = pool(layers(words)): one vector per sentence.

    words     the embeddings of words and positions
    layers    TransformerEncoderLayers

    forward(ids (B, L), mask=None, rng=None) -> s (B, d), cache; mask (B, L) True where real, [CLS] at position 0.
    backward(ds, cache) -> None: ids have no gradient.
    """

    def __init__(self, words, layers, pooling):
        check_choice("TSDAE", "pooling", pooling, POOLINGS)
        self.words, self.layers, self.pooling = words, list(layers), pooling

    def forward(self, ids, mask=None, rng=None):
        return self._run(ids, mask, rng, keep=True)

    def __call__(self, ids, mask=None, rng=None):
        s, _ = self._run(ids, mask, rng, keep=False)
        return s

    def _run(self, ids, mask, rng, keep):
        """s and the cache; with keep=False each layer's cache is dropped as soon as the layer is done."""
        xp = array_module(ids=ids, mask=mask)
        check_ids("Encoder", "ids", ids, mask)
        if mask is None:
            mask = xp.ones(ids.shape, bool)
        x, words_cache = self.words.forward(ids, mask, rng)
        caches, norm_cache = [], None
        for layer in self.layers:
            x, cache = layer.forward(x, mask=mask, rng=rng)
            caches.append(cache if keep else None)
            del cache
        if self.pooling == "cls":                    # the norm is of each position alone: only [CLS]'s is needed
            x, pool_cache = pool(x, mask, "cls")
        if not self.words.norm_first:
            x, norm_cache = self.words.norm.forward(x)
        if self.pooling != "cls":
            x, pool_cache = pool(x, mask, self.pooling)
        return x, (words_cache, caches, norm_cache, pool_cache)

    def backward(self, ds, cache):
        words_cache, caches, norm_cache, pool_cache = cache
        (B, _, d), _ = pool_cache
        check_shape("TSDAE's encoder", "ds", ds, (B, d))
        dx = ds if self.pooling == "cls" else pool_backward(ds, pool_cache, self.pooling)
        if not self.words.norm_first:
            dx = self.words.norm.backward(dx, norm_cache)
        if self.pooling == "cls":
            dx = pool_backward(dx, pool_cache, "cls")
        for layer, layer_cache in zip(reversed(self.layers), reversed(caches)):
            dx = layer.backward(dx, layer_cache)
        self.words.backward(dx, words_cache)


class _DecoderCache(NamedTuple):
    words: Any
    layers: list
    norm: Any
    places: Any         # (N,) of the rows that logits are made of, among (B L)
    head: tuple
    shapes: tuple       # of the last layer's output, of the logits


class Decoder(Layer):
    """The logits of each next word, from the earlier words and s, which is all that the cross-attention sees.

        n_t = norm(gelu(h_t W + b))       logits_t = n_t E^T + b_v        (the head, as in BERT; E the embedding)

    words, layers     as the encoder's (tied: the same objects) with TransformerDecoderLayers
    transform         Linear(d, d);  transform_norm: LayerNorm(d)
    b_v (vocab,)      zero; `set_bias_from_counts` gives it the words' frequencies

    forward(ids (B, T), s (B, d), predicted=None, rng=None, places=None) -> logits (B, T, vocab), cache; with predicted
    (B, T), True where a next word is predicted, (N, vocab) of these N places only, row by row. Position t sees the ids
    0 ... t, so that padding on the right needs no mask. `places` (N,) are the indices of the N places among the B T;
    passing them avoids a wait on a GPU.
    backward(dlogits, cache) -> ds.
    """

    def __init__(self, words, layers, activation, *, rng, dtype):
        d, vocab = words.embedding.W.value.shape[1], len(words.embedding.W.value)
        self.words, self.layers = words, list(layers)
        self.transform = Linear(d, d, rng=rng, dtype=dtype)
        self.transform_norm = LayerNorm(d, dtype=dtype)
        self.b_v = Parameter(zeros((vocab,), dtype), "b_v")
        self.gelu = gelu_tanh if activation == "gelu_tanh" else gelu

    def forward(self, ids, s, predicted=None, rng=None, places=None):
        xp = array_module(ids=ids, s=s, predicted=predicted, places=places)
        check_ids("Decoder", "ids", ids, predicted, "predicted")
        check_rank_and_width("Decoder", "s", s, 2, self.words.embedding.W.value.shape[1])
        x, words_cache = self.words.forward(ids, None, rng)
        caches, norm_cache = [], None
        # No prediction depends on what comes after a sentence's last one: the layers treat it as padding.
        seen = None if predicted is None else predicted[:, ::-1].cumsum(axis=1)[:, ::-1] > 0
        for layer in self.layers:
            x, cache = layer.forward(x, s[:, None], mask=seen, rng=rng)
            caches.append(cache)
        if not self.words.norm_first:
            x, norm_cache = self.words.norm.forward(x)
        if places is None:
            places = xp.arange(ids.size) if predicted is None else xp.flatnonzero(predicted)
        logits, head_cache = self._head(x.reshape(-1, x.shape[-1])[places])
        if predicted is None:
            logits = logits.reshape(*ids.shape, logits.shape[1])
        return logits, _DecoderCache(words_cache, caches, norm_cache, places, head_cache, (x.shape, logits.shape))

    def backward(self, dlogits, cache):
        words_cache, caches, norm_cache, places, head_cache, (shape, logits_shape) = cache
        xp = array_module(dlogits)
        check_shape("Decoder", "dlogits", dlogits, logits_shape)
        drows = self._head_backward(dlogits.reshape(len(places), dlogits.shape[-1]), head_cache)
        dx = xp.zeros((math.prod(shape[:2]), shape[2]), drows.dtype)
        dx[places] = drows
        dx, ds = dx.reshape(shape), 0
        if not self.words.norm_first:
            dx = self.words.norm.backward(dx, norm_cache)
        for layer, layer_cache in zip(reversed(self.layers), reversed(caches)):
            dx, ds_layer = layer.backward(dx, layer_cache)
            ds = ds + ds_layer[:, 0]
        self.words.backward(dx, words_cache)
        return ds

    def set_bias_from_counts(self, counts):
        """b_v = log((n_w + 1) / sum (n + 1)), n_w the count of word w in the text, counts (vocab,).

        An untrained decoder then predicts each word with its frequency in the text. Otherwise E first learns that most
        words are rare, by moving their rows in one direction, and similar rows say little about a sentence.
        Raises ValueError for counts of another shape.
        """
        xp = array_module(self.b_v.value)
        check_shape("Decoder", "counts", counts, self.b_v.value.shape)
        smoothed = counts + 1
        self.b_v.value[...] = xp.log(smoothed / smoothed.sum())

    def _head(self, rows):
        """logits (N, vocab) of rows (N, d)."""
        z, transform_cache = self.transform.forward(rows)
        a, gelu_cache = self.gelu.forward(z)
        n, norm_cache = self.transform_norm.forward(a)
        logits = matmul(n, self.words.embedding.W.value.T)
        logits += self.b_v.value
        return logits, (n, transform_cache, (gelu_cache, norm_cache))

    def _head_backward(self, dlogits, cache):
        """dn = dlogits E; E.grad += dlogits^T n, added to the gradient from the embedding's other uses."""
        n, transform_cache, (gelu_cache, norm_cache) = cache
        E = self.words.embedding.W
        E.grad += dlogits.T @ n
        self.b_v.grad += dlogits.sum(axis=0)
        da = self.transform_norm.backward(matmul(dlogits, E.value), norm_cache)
        return self.transform.backward(self.gelu.backward(da, gelu_cache), transform_cache)


def check_ids(owner, name, ids, mask, mask_name="mask"):
    """`ids` must be (batch, length) integers with a mask of its shape."""
    if ids.ndim != 2 or not ids.shape[1]:
        raise ValueError(f"{owner}: {name} has shape {ids.shape}; expected (batch, length)")
    if mask is not None:
        check_mask(owner, mask, ids.shape, mask_name)


# ---- the model -------------------------------------------------------------------------------------------


class TSDAE(Layer):
    """The transformer-based sequential denoising autoencoder.

    vocabulary    a WordVocabulary, or a number of words (then text cannot be encoded, ids can)
    length        the maximum number of positions of a sentence, including [CLS] and [SEP]
    pooling       "cls", "mean" or "max": how the sentence's embedding is computed from the encoder's outputs
    tie           the decoder's embedding, positions, norms, self-attention and feed-forward layers are the encoder's
                  (the same Parameters: one gradient, the sum of all uses). The cross-attention, its norm and the head
                  belong to the decoder alone. The output matrix is the decoder's embedding in both cases
    norm          "pre" or "post"; activation "relu", "gelu" or "gelu_tanh"; dropout of rows and parts' outputs;
    attention_dropout    of the self-attention's weights (the cross-attention's one weight is never dropped)

    forward(noisy (B, L), clean (B, T), noisy_mask=None, clean_mask=None, rng=None) -> logits (N, vocab), cache: of the
    N real words after the first of a clean sentence, row by row; `targets(clean, clean_mask)` are their ids (N,).
    (Without clean_mask: (B, T-1, vocab) and (B, T-1).) Both begin with [CLS] and end with [SEP]; masks are True where
    real. Both take `places` too, (N,) from `predicted_places(clean_mask)`: on a GPU finding them would mean a wait.
    backward(dlogits, cache) -> None.
    Raises ValueError and TypeError as its parts do.
    """

    def __init__(self, vocabulary, d=128, heads=4, d_hidden=None, layers=2, length=32, pooling="cls", tie=True,
                 norm="pre", activation="gelu_tanh", *, dropout=0.0, attention_dropout=0.0, rng=None, dtype=None):
        check_count("TSDAE", "layers", layers)
        check_count("TSDAE", "length", length, least=3)
        self.vocabulary = vocabulary if isinstance(vocabulary, WordVocabulary) else None
        vocab = len(vocabulary) if self.vocabulary else vocabulary
        d_hidden = 4 * d if d_hidden is None else d_hidden
        self.settings = {"d": d, "heads": heads, "d_hidden": d_hidden, "layers": layers, "length": length,
                         "pooling": pooling, "tie": tie, "norm": norm, "activation": activation, "dropout": dropout,
                         "attention_dropout": attention_dropout}
        rng = generator(rng)
        common = {"rng": rng, "dtype": dtype}
        words = _Words(vocab, d, length, norm, dropout, **common)
        self.encoder = Encoder(words, [TransformerEncoderLayer(
            d, heads, d_hidden, norm, activation, dropout=dropout, attention_dropout=attention_dropout, **common)
            for _ in range(layers)], pooling)
        decoder_words = words if tie else _Words(vocab, d, length, norm, dropout, **common)
        self.decoder = Decoder(decoder_words, [TransformerDecoderLayer(
            d, heads, d_hidden, norm, activation, dropout=dropout, attention_dropout=attention_dropout,
            shared=shared if tie else None, **common) for shared in self.encoder.layers], activation, **common)

    def forward(self, noisy, clean, noisy_mask=None, clean_mask=None, rng=None, places=None):
        xp = array_module(noisy=noisy, clean=clean, noisy_mask=noisy_mask, clean_mask=clean_mask, places=places)
        check_ids("TSDAE", "noisy", noisy, noisy_mask, "noisy_mask")
        check_ids("TSDAE", "clean", clean, clean_mask, "clean_mask")
        if len(noisy) != len(clean) or clean.shape[1] < 2:
            raise ValueError(f"TSDAE: noisy has shape {noisy.shape} and clean {clean.shape}; expected as many "
                             "sentences in both, and clean ones of at least two positions")
        s, encoder_cache = self.encoder.forward(noisy, noisy_mask, rng)
        ids = clean if clean_mask is None else xp.where(clean_mask, clean, PAD)
        predicted = None if clean_mask is None else clean_mask[:, 1:]
        logits, decoder_cache = self.decoder.forward(ids[:, :-1], s, predicted, rng, places)
        return logits, (encoder_cache, decoder_cache)

    def backward(self, dlogits, cache):
        encoder_cache, decoder_cache = cache
        self.encoder.backward(self.decoder.backward(dlogits, decoder_cache), encoder_cache)

    @staticmethod
    def predicted_places(clean_mask):
        """(N,): among the B (T-1) places after the first, the indices of those with a real word."""
        return array_module(clean_mask).flatnonzero(clean_mask[:, 1:])

    @staticmethod
    def targets(clean, clean_mask=None, places=None):
        """The ids that forward's logits predict: each real one except the first of its sentence."""
        following = clean[:, 1:]
        if places is not None:
            return following.reshape(-1)[places]
        return following if clean_mask is None else following[clean_mask[:, 1:]]

    def unused_parameters(self):
        """The cross-attentions' W_q, b_q, W_k, b_k: over one row attention is 1 whatever they are; their gradient is 0.

        With norm="pre" the norm before a cross-attention feeds only its query: gain and bias are unused too. An
        optimizer with weight decay would still shrink them: give it `no_decay=model.unused_parameters()`.
        """
        unused = []
        for layer in self.decoder.layers:
            attention, norm = layer.cross_attention, layer.cross_attention_norm
            unused += [attention.W_q, attention.b_q, attention.W_k, attention.b_k]
            unused += [norm.gain, norm.bias] if self.settings["norm"] == "pre" else []
        return unused

    # ---- use ---------------------------------------------------------------------------------------------

    def encode(self, sentences, batch_size=EVALUATED):
        """(n, d) float32 on the host, the embedding of each sentence, in their order.

        Sentences are cut after `length` - 2 words, with one warning. Raises ValueError for a sentence without a word,
        naming it, and for a model without a vocabulary; TypeError for a bare string.
        """
        check_count("TSDAE", "batch_size", batch_size)
        ids = self.ids_of(sentences)
        d, W = self.settings["d"], self.encoder.words.embedding.W.value
        vectors = np.empty((len(ids), d), np.float32)
        order = np.argsort([len(row) for row in ids], kind="stable")         # of like length together: less padding
        for start in range(0, len(ids), batch_size):
            rows = order[start:start + batch_size]
            batch = to_device(padded([ids[row] for row in rows]), "cpu" if on_host(W) else "gpu")
            vectors[rows] = asnumpy(self.encoder(*batch))
        return vectors

    def ids_of(self, sentences):
        """[(n,) int64]: [CLS], the words, [SEP] of each sentence, at most `length` of them; see `encode`."""
        self._require_vocabulary()
        if isinstance(sentences, str):
            raise TypeError("TSDAE: sentences is a str; expected a list of them")
        most, rows, cut = self.settings["length"] - 2, [], 0
        for n, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                raise TypeError(f"TSDAE: sentence {n + 1} is a {type(sentence).__name__}; expected a str")
            words = self.vocabulary.encode(sentence)
            if not len(words):
                raise ValueError(f"TSDAE: sentence {n + 1} has no word ({sentence!r}); expected at least one")
            cut += len(words) > most
            rows.append(enclosed(words[:most]))
        if cut:
            warnings.warn(f"{cut} of {len(rows)} sentences have more than {most} words, the length that this model was "
                          "made for; what lies beyond was cut off", stacklevel=3)
        return rows

    def _require_vocabulary(self):
        if self.vocabulary is None:
            raise ValueError("TSDAE: this model was made without a vocabulary; expected a WordVocabulary, so that text "
                             "can be encoded and written")

    def reconstruct(self, vectors, words=None):
        """[str]: the sentence that the decoder generates from each embedding (n, d), always the most likely next word.

        words: the most it may generate; default length - 1. Raises ValueError for a model without a vocabulary.
        """
        self._require_vocabulary()
        W = self.decoder.words.embedding.W.value
        xp, most = array_module(W), self.settings["length"] - 1 if words is None else words
        vectors = vectors if hasattr(vectors, "dtype") else np.asarray(vectors)
        s = to_device(vectors, "cpu" if on_host(W) else "gpu").astype(W.dtype, copy=False)
        ids = xp.full((len(s), 1), CLS)
        for _ in range(most):
            last = xp.zeros(ids.shape, bool)
            last[:, -1] = True
            ids = xp.concatenate([ids, self.decoder(ids, s, last).argmax(axis=1)[:, None]], axis=1)
        sentences = []
        for row in asnumpy(ids[:, 1:]):
            ends = np.flatnonzero(row == SEP)
            sentences.append(self.vocabulary.decode(row[:ends[0]] if len(ends) else row))
        return sentences

    # ---- files -------------------------------------------------------------------------------------------

    def record(self):
        """The settings and vocabulary, which a checkpoint holds along with the tensors; JSON-able."""
        return {**self.settings, "buckets": self.vocabulary.buckets if self.vocabulary else 0,
                "words": self.vocabulary.words if self.vocabulary else len(self.decoder.b_v.value)}

    def save(self, path):
        """Write the model and its vocabulary to one file."""
        save_tensors(path, self.named_arrays(), {"config": {"model": self.record()}})

    @classmethod
    def load(cls, path, device="cpu"):
        """The model of a file that `save` or tasks/tsdae.py wrote, or of a run's folder (its best checkpoint).

        Raises CheckpointError, one line, for another or a damaged one.
        """
        path = Path(path) / BEST if Path(path).is_dir() else Path(path)
        tensors, meta = load_tensors(path)
        try:
            settings = dict(meta["config"]["model"])
            words, buckets = settings.pop("words"), settings.pop("buckets", 0)
            model = cls(WordVocabulary(words, buckets) if isinstance(words, list) else words, **settings, rng=0,
                        dtype=tensors["decoder.b_v"].dtype)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"checkpoint {path}: not one of tasks/tsdae.py, or damaged ({what})") from error
        load_model(model, path)
        return model.to_device(device)
