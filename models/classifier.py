"""Classification from a recurrent layer's outputs: the model for MNIST and, with an embedding, for IMDB."""

from minigrad.backend import array_module
from minigrad.check import check_choice, check_mask
from minigrad.initializers import generator
from minigrad.layer import Layer
from minigrad.layers import Dropout, Embedding, Linear

POOLINGS = ("mean", "last")


# ---- pooling -------------------------------------------------------------------------------------------------

class masked_mean:
    """s = the mean of h_t over a sample's n real steps: hs (B, L, h), mask (B, L) or None -> s (B, h); 0 where n is 0.

    Backward: dh_t = ds / n at a real step, 0 elsewhere.
    """

    @staticmethod
    def forward(hs, mask=None):
        xp, (B, L) = array_module(hs=hs, mask=mask), hs.shape[:2]
        if mask is None:
            weights = xp.full((B, L), 1 / max(L, 1), hs.dtype)
        else:
            weights = (mask / xp.maximum(mask.sum(axis=1, keepdims=True), 1)).astype(hs.dtype)
            hs = xp.where(mask[:, :, None], hs, 0)               # NaN at a padded step ends here
        return (weights[:, None] @ hs)[:, 0], weights

    @staticmethod
    def backward(ds, weights):
        return weights[:, :, None] * ds[:, None]


class last_outputs:
    """s = h at the end of reading: hs (B, L, h), mask -> s (B, h); 0 for a sample with no real step.

    from_left   columns of hs whose layer reads forwards: they end at the last real step. The others read backwards
                and end at the first one
    """

    @staticmethod
    def forward(hs, mask, from_left):
        xp, (B, L, h) = array_module(hs=hs, mask=mask), hs.shape
        steps = xp.arange(L)
        real = xp.ones((B, L), bool) if mask is None else mask
        last = xp.where(real, steps, 0).max(axis=1)                          # (B,)
        first = xp.where(real, steps, L - 1).min(axis=1)
        column = xp.arange(h)
        step = xp.where(column < from_left, last[:, None], first[:, None])         # (B, h)
        exists = real.any(axis=1)[:, None]
        s = xp.where(exists, hs[xp.arange(B)[:, None], step, column], 0)
        return s, (step, exists, hs.shape)

    @staticmethod
    def backward(ds, cache):
        step, exists, (B, L, h) = cache
        xp = array_module(ds)
        dhs = xp.zeros((B, L, h), ds.dtype)
        dhs[xp.arange(B)[:, None], step, xp.arange(h)] = xp.where(exists, ds, 0)       # each place once
        return dhs


# ---- the models ------------------------------------------------------------------------------------------

class SequenceClassifier(Layer):
    """logits = dropout(s) W + b, s the pooled outputs of a recurrent layer.

    cell      any recurrent layer with outputs of `width` columns
    pooling   "last": the output at the last real step (of a Bidirectional's backward layer, at the first one);
              "mean": the masked mean over time (the deeplearning.net tutorial's, which RRA's IMDB settings follow)
    dropout   of s, in training

    forward(x (B, L, d), mask=None, rng=None) -> (logits (B, classes), cache); backward(dlogits, cache) -> dx (B, L, d).
    A sample with no real step gets s = 0. Raises ValueError for an empty sequence and as the cell does, TypeError for a
    cell that is not recurrent.
    """

    def __init__(self, cell, width, classes, *, pooling="last", dropout=0.0, rng=None, dtype=None):
        if not getattr(cell, "recurrent", False):
            raise TypeError(f"SequenceClassifier: cell is a {type(cell).__name__}; expected a recurrent layer")
        check_choice("SequenceClassifier", "pooling", pooling, POOLINGS)
        self.cell, self.pooling = cell, pooling
        self.drop = Dropout(dropout)
        self.readout = Linear(width, classes, rng=rng, dtype=dtype)

    def forward(self, x, mask=None, rng=None):
        array_module(x=x, mask=mask)
        if x.ndim != 3 or x.shape[1] == 0:
            raise ValueError(f"SequenceClassifier: x has shape {x.shape}; expected (batch, length, width), at least "
                             "one step long")
        if mask is not None:
            check_mask("SequenceClassifier", mask, x.shape[:2])
        (hs, _), cell_cache = self.cell.forward(x, mask=mask, rng=rng)       # (B, L, h)
        if self.pooling == "mean":
            s, pooling_cache = masked_mean.forward(hs, mask)                 # (B, h)
        else:
            from_left, _ = self.cell.columns()
            s, pooling_cache = last_outputs.forward(hs, mask, from_left)
        s, drop_cache = self.drop.forward(s, rng=rng)
        logits, readout_cache = self.readout.forward(s)
        return logits, (cell_cache, pooling_cache, drop_cache, readout_cache)

    def backward(self, dlogits, cache):
        cell_cache, pooling_cache, drop_cache, readout_cache = cache
        ds = self.drop.backward(self.readout.backward(dlogits, readout_cache), drop_cache)
        dhs = (masked_mean if self.pooling == "mean" else last_outputs).backward(ds, pooling_cache)
        dx, _ = self.cell.backward((dhs, None), cell_cache)
        return dx


class TextClassifier(Layer):
    """logits = classifier(embedding(ids)): a SequenceClassifier over learned word vectors.

    forward(ids (B, L) integer, mask=None, rng=None) -> (logits (B, classes), cache); backward(dlogits, cache) -> None:
    ids have no gradient. Ids at masked positions have no effect. Raises as Embedding and SequenceClassifier do.
    """

    def __init__(self, vocab, d, cell, width, classes=2, *, pooling="mean", dropout=0.0, rng=None, dtype=None):
        rng = generator(rng)
        self.embedding = Embedding(vocab, d, rng=rng, dtype=dtype)
        self.classifier = SequenceClassifier(cell, width, classes, pooling=pooling, dropout=dropout, rng=rng,
                                             dtype=dtype)

    def forward(self, ids, mask=None, rng=None):
        x, embedding_cache = self.embedding.forward(ids, mask=mask)
        logits, classifier_cache = self.classifier.forward(x, mask=mask, rng=rng)
        return logits, (embedding_cache, classifier_cache)

    def backward(self, dlogits, cache):
        embedding_cache, classifier_cache = cache
        return self.embedding.backward(self.classifier.backward(dlogits, classifier_cache), embedding_cache)
