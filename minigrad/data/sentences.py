"""Sentences: reading them, words, the vocabulary, noise for a denoising autoencoder, and batches of similar length."""

import re
from collections import Counter
from zlib import crc32

import numpy as np

from minigrad.check import check_choice, check_count, check_number
from minigrad.data.batches import Epochs, order_by_length
from minigrad.data.files import DataError, read_lines

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
PAD, CLS, SEP, UNK, MASK = range(len(SPECIAL))
WORD = re.compile(r"\w+|[^\w\s]")


def read_sentences(path):
    """[str] of a text file, one sentence per line (plain, .gz, or the one file of a .zip; UTF-8).

    Blank lines are left out. Raises DataError, one line, for a file that is missing, damaged, not UTF-8 (with the
    line's number), or without a sentence.
    """
    sentences = [line for line in read_lines(path) if line]
    if not sentences:
        raise DataError(f"{path}: no sentence in it; expected one a line")
    return sentences


def words_of(sentence):
    """[str]: its words in lower case; each punctuation mark is a word."""
    return WORD.findall(sentence.lower())


class WordVocabulary:
    """The words of a model: id n is words[n]; first the special ones, [PAD] = 0, [CLS], [SEP], [UNK], [MASK].

    buckets    a word that is not in `words` gets one of this many further ids, chosen by its CRC-32: always the same,
               shared with few other words, so that two sentences with a rare word in common can be recognised (the
               hashing trick; Weinberger et al. 2009). 0: such words are all [UNK]

    Raises ValueError for words that do not begin with the special ones, and for a duplicate.
    """

    def __init__(self, words, buckets=0):
        check_count("WordVocabulary", "buckets", buckets, least=0)
        self.words, self.buckets = list(words), buckets
        if tuple(self.words[:len(SPECIAL)]) != SPECIAL:
            raise ValueError(f"WordVocabulary: words begin with {self.words[:len(SPECIAL)]}; expected {list(SPECIAL)}")
        self.ids = {word: n for n, word in enumerate(self.words)}
        if len(self.ids) < len(self.words):
            twice = next(word for n, word in enumerate(self.words) if self.ids[word] != n)
            raise ValueError(f"WordVocabulary: {twice!r} comes twice; expected each word once")

    @classmethod
    def of(cls, sentences, size, buckets=0):
        """`size` ids: the special ones, the most frequent words of the sentences (alphabetically where equal), buckets.

        Where all words have an id there are no buckets, for nothing would be learned of them.
        """
        check_count("WordVocabulary", "size", size, least=len(SPECIAL) + 1)
        check_count("WordVocabulary", "buckets", buckets, least=0)
        if size - buckets <= len(SPECIAL):
            raise ValueError(f"WordVocabulary: size is {size} and buckets {buckets}; expected more than "
                             f"{buckets + len(SPECIAL)}, the buckets and the special ones")
        counts = Counter(word for sentence in sentences for word in words_of(sentence))
        frequent = sorted(counts, key=lambda word: (-counts[word], word))
        fits = len(frequent) <= size - len(SPECIAL)
        return cls([*SPECIAL, *frequent[:size - len(SPECIAL) - (0 if fits else buckets)]], 0 if fits else buckets)

    def __len__(self):
        return len(self.words) + self.buckets

    def id_of(self, word):
        """The word's id; of a word that is not among them its bucket's, or [UNK]."""
        known = self.ids.get(word)
        if known is not None:
            return known
        return len(self.words) + crc32(word.encode("utf-8", "surrogatepass")) % self.buckets if self.buckets else UNK

    def encode(self, sentence):
        """(n,) int64, a word's id each."""
        return np.array([self.id_of(word) for word in words_of(sentence)], np.int64)

    def decode(self, ids):
        """str: the words, with a space between them; of a bucket [UNK]."""
        return " ".join(self.words[n if n < len(self.words) else UNK] for n in map(int, ids))


def padded(sequences, value=PAD):
    """(ids, mask), (B, L) each, of sequences of ids, right-padded with `value` to the longest one."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    ids = np.full(mask.shape, value, np.int64)
    if len(sequences):
        ids[mask] = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
    return ids, mask


def enclosed(ids, begin=CLS, end=SEP):
    """begin, the words, end."""
    return np.concatenate([[begin], ids, [end]])


# ---- noise -----------------------------------------------------------------------------------------------
# `ratio` is the share of words that a noise affects, each independently. (TSDAE's scripts are inconsistent: in some of
# them del_ratio = 0.6 keeps 60 %.)

def delete_words(ids, ratio, vocab, rng):
    """Each word is deleted with probability `ratio`; if none would remain, a random one is kept (TSDAE).

    E[words kept] = (1 - ratio) n + ratio^n for n words.
    """
    kept = rng.random(len(ids)) >= ratio
    if len(ids) and not kept.any():
        kept[rng.integers(len(ids))] = True
    return ids[kept]


def swap_words(ids, ratio, vocab, rng):
    """The chosen words are permuted among themselves."""
    noisy, places = ids.copy(), np.flatnonzero(rng.random(len(ids)) < ratio)
    noisy[places] = ids[rng.permutation(places)]
    return noisy


def mask_words(ids, ratio, vocab, rng):
    """Each chosen word is replaced by [MASK]."""
    return np.where(rng.random(len(ids)) < ratio, MASK, ids)


def replace_words(ids, ratio, vocab, rng):
    """Each chosen word is replaced by a random word of the vocabulary, never a special one."""
    return np.where(rng.random(len(ids)) < ratio, rng.integers(len(SPECIAL), vocab, len(ids)), ids)


def add_words(ids, ratio, vocab, rng):
    """After each chosen word a random word of the vocabulary, never a special one, is inserted."""
    places = np.flatnonzero(rng.random(len(ids)) < ratio)
    return np.insert(ids, places + 1, rng.integers(len(SPECIAL), vocab, len(places)))


NOISES = {"delete": delete_words, "swap": swap_words, "mask": mask_words, "replace": replace_words, "add": add_words}


# ---- batches ---------------------------------------------------------------------------------------------

class DenoisingBatches(Epochs):
    """Batches of sentences with and without noise: batches[s] -> (noisy, noisy_mask, clean, clean_mask).

    sequences    [(n,) int64] the words of each sentence, n > 0; both copies begin with [CLS] and end with [SEP]
    noise        delete, swap, mask, replace, add, with the share `ratio` of words that it affects
    vocab        words are drawn from 5 ... vocab-1 (replace, add)
    longest      both copies are cut to this many words; None: all are kept

    Each (B, L) int64 with its mask (B, L); L is the length of the batch's longest sentence. An epoch has every
    sentence once, except for a remainder smaller than a batch, in the order of `order_by_length`. Order and noise are
    functions of (seed, epoch) and (seed, step): they differ from epoch to epoch, and a resumed run continues exactly.

    Raises ValueError for fewer sentences than a batch, for an empty one, and for a wrong noise or ratio.
    """

    def __init__(self, sequences, batch_size, seed, *, noise="delete", ratio=0.6, vocab, longest=None):
        check_count("DenoisingBatches", "batch_size", batch_size)
        check_choice("DenoisingBatches", "noise", noise, NOISES)
        check_number("DenoisingBatches", "ratio", ratio, 0, 1)
        check_count("DenoisingBatches", "vocab", vocab, least=len(SPECIAL) + 1)
        if longest is not None:
            check_count("DenoisingBatches", "longest", longest)
        if len(sequences) < batch_size:
            raise ValueError(f"DenoisingBatches: {len(sequences)} sentences; expected at least a batch of {batch_size}")
        super().__init__(len(sequences) // batch_size)
        self.sequences = [sequence[:longest] for sequence in sequences]
        self.batch_size, self.seed, self.longest = batch_size, seed, longest
        self.noise, self.ratio, self.vocab = NOISES[noise], ratio, vocab
        self.lengths = np.array([len(sequence) for sequence in self.sequences])
        if not self.lengths.all():
            raise ValueError(f"DenoisingBatches: sentence {int(self.lengths.argmin()) + 1} has no word; expected at "
                             "least one in each")

    def order(self, epoch):
        """(per_epoch, batch_size): the sentences of each batch of an epoch."""
        return order_by_length(self.lengths, self.batch_size, np.random.default_rng([self.seed, epoch, 1]))

    def __getitem__(self, step):
        rng = np.random.default_rng([self.seed, step, 2])
        clean = [self.sequences[row] for row in self.rows(step)]
        noisy = [self.noise(ids, self.ratio, self.vocab, rng)[:self.longest] for ids in clean]
        noisy, clean = ([enclosed(ids) for ids in rows] for rows in (noisy, clean))
        return (*padded(noisy), *padded(clean))
