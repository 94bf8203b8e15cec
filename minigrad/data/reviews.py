"""Labelled reviews as one long array of word ids: the vocabulary's size, new texts, and batches of similar length."""

from typing import NamedTuple

import numpy as np

from minigrad.check import check_count
from minigrad.data.batches import Epochs, order_by_length
from minigrad.data.sentences import words_of

SPECIAL = ("[PAD]", "[UNK]")
PAD, UNK = range(len(SPECIAL))
LINE_BREAK = "<br />"               # the only markup in the reviews
MARKS = {mark for mark in map(chr, range(128)) if words_of(mark) and not mark.isalnum() and mark != "_"}


class Reviews(NamedTuple):
    """n reviews; the words of review k are tokens[offsets[k]:offsets[k + 1]]."""

    tokens: np.ndarray              # (N,) int32: 0 [PAD], 1 [UNK], then the words, the most frequent one first
    offsets: np.ndarray             # (n + 1,) int64
    labels: np.ndarray              # (n,) int64: 1 positive, 0 negative
    ratings: np.ndarray             # (n,) int64: stars, 1 ... 10


def review_words(text):
    """[str]: the words of a review, words_of(text) with each line break as a space, in half the time."""
    text = text.replace(LINE_BREAK, " ")
    if not text.isascii():
        return words_of(text)
    text = text.lower()
    for mark in MARKS.intersection(text):
        text = text.replace(mark, f" {mark} ")
    return text.split()


def top_words(reviews, vocab):
    """The reviews with `vocab` ids, 0 ... vocab-1, including the two special ones: all other words are [UNK]."""
    check_count("top_words", "vocab", vocab, least=len(SPECIAL) + 1)
    return reviews._replace(tokens=np.where(reviews.tokens < vocab, reviews.tokens, UNK).astype(reviews.tokens.dtype))


def chosen(reviews, rows):
    """The Reviews `rows` of these, (n,) integer, in that order."""
    lengths = np.diff(reviews.offsets)[rows]
    offsets = np.concatenate([[0], lengths.cumsum()])
    places = np.arange(offsets[-1]) + np.repeat(reviews.offsets[rows] - offsets[:-1], lengths)
    return Reviews(reviews.tokens[places], offsets, reviews.labels[rows], reviews.ratings[rows])


def encode_review(text, words_to_ids, vocab):
    """(n,) int64: the ids below `vocab` of a new text's words, as `top_words` has them.

    words_to_ids    {word: id}, or an `Imdb`, whose words are used

    Raises ValueError for a text without a word.
    """
    check_count("encode_review", "vocab", vocab, least=len(SPECIAL) + 1)
    if hasattr(words_to_ids, "words"):
        words_to_ids = {word: n for n, word in enumerate(words_to_ids.words)}
    ids = np.array([words_to_ids.get(word, UNK) for word in review_words(text)], np.int64)
    if not len(ids):
        raise ValueError(f"encode_review: text is {text!r}; expected at least one word")
    return np.where(ids < vocab, ids, UNK)


# ---- batches ---------------------------------------------------------------------------------------------

class LengthBatches(Epochs):
    """Batches of reviews of similar length: batches[s] -> (ids (B, L) int64, mask (B, L) bool, labels (B,) int64).

    longest    a longer review is cut to its first `longest` words; None: none is. `cut` is the number of reviews
               that are shortened

    L is the length of the batch's longest review; the others are right-padded with [PAD] and False. An epoch has every
    review once, except for a remainder smaller than a batch, in the order of `order_by_length`, a function of (seed,
    epoch). So step s depends on (seed, s) alone, and a resumed run continues exactly.

    Raises ValueError for fewer reviews than a batch, and for an empty one.
    """

    def __init__(self, reviews, batch_size, seed, *, longest=None):
        check_count("LengthBatches", "batch_size", batch_size)
        if len(reviews.labels) < batch_size:
            raise ValueError(f"LengthBatches: {len(reviews.labels)} reviews; expected at least a batch of {batch_size}")
        super().__init__(len(reviews.labels) // batch_size)
        self.lengths, self.cut = _lengths("LengthBatches", reviews, longest)
        self.reviews, self.batch_size, self.seed = reviews, batch_size, seed

    def order(self, epoch):
        """(per_epoch, batch_size): the reviews of each batch of an epoch."""
        return order_by_length(self.lengths, self.batch_size, np.random.default_rng([self.seed, epoch]))

    def __getitem__(self, step):
        rows = self.rows(step)
        return (*_padded(self.reviews, rows, self.lengths[rows]), self.reviews.labels[rows])


def in_order(reviews, batch_size, longest=None):
    """Every review once, by increasing length, the last batch may be smaller: an iterator of (ids, mask, labels, rows).

    ids, mask, labels and `longest` as in `LengthBatches`; rows (B,) are the reviews' indices. Raises ValueError for an
    empty review.
    """
    check_count("in_order", "batch_size", batch_size)
    lengths, _ = _lengths("in_order", reviews, longest)
    order = lengths.argsort(kind="stable")
    batches = (order[start:start + batch_size] for start in range(0, len(order), batch_size))
    return ((*_padded(reviews, rows, lengths[rows]), reviews.labels[rows], rows) for rows in batches)


def _lengths(owner, reviews, longest):
    """The reviews' lengths, at most `longest`, and how many were longer."""
    lengths = np.diff(reviews.offsets)
    if not lengths.all():
        raise ValueError(f"{owner}: review {int(lengths.argmin()) + 1} has no word; expected at least one in each")
    if longest is None:
        return lengths, 0
    check_count(owner, "longest", longest)
    longest = min(longest, int(lengths.max(initial=1)))          # an int of any size may be given
    return np.minimum(lengths, longest), int((lengths > longest).sum())


def _padded(reviews, rows, lengths):
    """(ids, mask), (B, L) each, of the first lengths[k] words of review rows[k]."""
    places = np.arange(lengths.max(initial=0))                   # (L,)
    mask = places < lengths[:, None]                             # (B, L)
    ids = np.full(mask.shape, PAD, np.int64)
    ids[mask] = reviews.tokens[(reviews.offsets[rows, None] + places)[mask]]
    return ids, mask
