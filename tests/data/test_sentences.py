"""minigrad.data.sentences: reading, words, vocabulary, padding, the noises and their shares, batches of like length."""

import gzip
from zlib import crc32

import numpy as np
import pytest
from helpers import one_line
from hypothesis import given, settings, strategies as st

from minigrad.data.batches import POOL
from minigrad.data.files import DataError
from minigrad.data.sentences import (
    CLS,
    MASK,
    NOISES,
    PAD,
    SEP,
    SPECIAL,
    UNK,
    DenoisingBatches,
    WordVocabulary,
    delete_words,
    padded,
    read_sentences,
    words_of,
)

FIRST = len(SPECIAL)                # the first id that is a word's
VOCAB = 30
every_noise = pytest.mark.parametrize("noise", NOISES)
ratios = st.sampled_from([0.0, 0.3, 0.6, 1.0])
word_ids = st.lists(st.integers(FIRST, VOCAB - 1), min_size=1, max_size=20).map(lambda ids: np.array(ids, np.int64))


# ---- reading ---------------------------------------------------------------------------------------------

def written(path, data):
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.gz"])
def test_a_sentence_a_line(tmp_path, name):
    data = "\ufeffÄpfel fallen .\r\n\n  \t\n  A man 中文 plays .  \n\u00a0\nlast, without a line's end".encode()
    assert read_sentences(written(tmp_path / name, data)) == [
        "Äpfel fallen .", "A man 中文 plays .", "last, without a line's end"]


def test_only_a_line_feed_ends_a_line(tmp_path):
    """Unicode has other line ends, and a sentence may hold them."""
    data = "one\u2028still one\x0bstill\x85\ntwo".encode()
    assert read_sentences(written(tmp_path / "a.txt", data)) == ["one\u2028still one\x0bstill", "two"]


@settings(max_examples=30, deadline=None)
@given(sentences=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\ufeff"), max_size=12)))
def test_what_was_written_is_read(tmp_path_factory, sentences):
    path, kept = tmp_path_factory.getbasetemp() / "a.txt", [line.strip() for line in sentences if line.strip()]
    path.write_bytes("\n".join(["first", *sentences]).encode())
    assert read_sentences(path) == ["first", *kept]


@pytest.mark.parametrize(("data", "sentence"), [
    (b"ab\xffc\nsecond", "line 1: not UTF-8 .byte 0xff at position 2"),
    (b"\xef\xbb\xbfab\xffc\nsecond", "line 1: not UTF-8 .byte 0xff at position 2"),
    (b"first\n\n\xe9t\xe9\n", "line 3: not UTF-8 .byte 0xe9 at position 0"),
    ("a man".encode("utf-16"), "line 1: not UTF-8 .byte 0xff at position 0")])
@pytest.mark.parametrize("name", ["a.txt", "a.gz"])
def test_bad_bytes_name_the_line_and_the_byte(tmp_path, name, data, sentence):
    with pytest.raises(DataError, match=f"{name}, {sentence}") as error:
        read_sentences(written(tmp_path / name, data))
    one_line(error)


@pytest.mark.parametrize("data", [b"", b"\n\n", b" \r\n\t", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.gz"])
def test_a_file_without_a_sentence_is_refused(tmp_path, name, data):
    with pytest.raises(DataError, match=f"{name}: no sentence in it; expected one a line") as error:
        read_sentences(written(tmp_path / name, data))
    one_line(error)


def test_a_missing_and_a_damaged_file(tmp_path):
    with pytest.raises(DataError, match=r"nothing.txt: there is no such file"):
        read_sentences(tmp_path / "nothing.txt")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"a sentence\n" * 99)[:-9])
    with pytest.raises(DataError, match=r"a.gz: damaged, or no .gz file"):
        read_sentences(tmp_path / "a.gz")


def test_the_real_sentences(real_data):
    sentences = read_sentences(real_data("wikisplit_sentences.txt.gz"))
    assert len(sentences) == 44_958
    lengths = [len(words_of(sentence)) for sentence in sentences[:2000]]
    assert min(lengths) >= 4
    assert 18 < np.mean(lengths) < 28
    vocabulary = WordVocabulary.of(sentences[:2000], 1000)
    assert len(vocabulary) == 1000
    assert {"the", ",", "."} == set(vocabulary.words[FIRST:FIRST + 3])


# ---- words and the vocabulary ----------------------------------------------------------------------------

@pytest.mark.parametrize(("sentence", "words"), [
    ("A man, playing.", ["a", "man", ",", "playing", "."]),
    ("It's 3.5%!", ["it", "'", "s", "3", ".", "5", "%", "!"]),
    ("ÄPFEL und_so  weiter", ["äpfel", "und_so", "weiter"]),
    ("[MASK] ...", ["[", "mask", "]", ".", ".", "."]), (" \t\u00a0", []), ("", [])])
def test_words_and_marks(sentence, words):
    assert words_of(sentence) == words


def test_the_most_frequent_words_and_equal_ones_alphabetically():
    vocabulary = WordVocabulary.of(["b c a", "c B", "d c"], 8)
    assert vocabulary.words == [*SPECIAL, "c", "b", "a"]                     # a and d come once each
    assert WordVocabulary.of(["d c", "a b c B c"], 8).words == vocabulary.words
    assert len(vocabulary) == 8
    assert WordVocabulary.of(iter(["b a"]), 100).words == [*SPECIAL, "a", "b"]
    assert [vocabulary.ids[word] for word in SPECIAL] == [PAD, CLS, SEP, UNK, MASK] == [0, 1, 2, 3, 4]


def test_encode_and_decode():
    vocabulary = WordVocabulary([*SPECIAL, "man", "a", "."])
    ids = vocabulary.encode("A Man sees a man.")
    assert ids.dtype == np.int64
    assert ids.tolist() == [6, 5, UNK, 6, 5, 7]
    assert vocabulary.decode(ids) == "a man [UNK] a man ."
    assert vocabulary.decode([]) == ""
    empty = vocabulary.encode(" ")
    assert (empty.shape, empty.dtype) == ((0,), np.int64)
    assert (vocabulary.encode("[PAD] [CLS]") == UNK).all()                   # text never makes a special word


def test_a_word_without_an_id_gets_its_buckets():
    """By a checksum, not by Python's hash, which differs from process to process."""
    vocabulary = WordVocabulary([*SPECIAL, "man", "a"], buckets=4)
    assert len(vocabulary) == 11
    assert vocabulary.encode("a zebra").tolist() == [6, 7 + crc32(b"zebra") % 4] == [6, 9]
    ids = vocabulary.encode(" ".join(f"w{n}" for n in range(200)))
    assert np.bincount(ids, minlength=11)[:7].sum() == 0
    assert np.bincount(ids)[7:].min() > 30
    assert vocabulary.encode("äpfel \ud800").min() >= 7
    assert vocabulary.decode([6, 7, 10, 5]) == "a [UNK] [UNK] man"
    assert WordVocabulary(vocabulary.words).encode("a zebra").tolist() == [6, UNK]


def test_buckets_are_part_of_the_size_and_left_out_where_every_word_has_an_id():
    sentences = ["c c c", "b b a d"]
    vocabulary = WordVocabulary.of(sentences, 8, buckets=1)
    assert (vocabulary.words[FIRST:], vocabulary.buckets, len(vocabulary)) == (["c", "b"], 1, 8)
    for size in (9, 20):
        vocabulary = WordVocabulary.of(sentences, size, buckets=3)
        assert (vocabulary.words[FIRST:], vocabulary.buckets, len(vocabulary)) == (["c", "b", "a", "d"], 0, 9)


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: WordVocabulary(["a", "b"]), r"WordVocabulary: words begin with \['a', 'b'\]; expected \['\[PAD\]', "),
    (lambda: WordVocabulary([]), r"words begin with \[\]"),
    (lambda: WordVocabulary(["[CLS]", "[PAD]", *SPECIAL[2:], "a"]), r"words begin with \['\[CLS\]'"),
    (lambda: WordVocabulary([*SPECIAL, "a", "b", "a"]), "WordVocabulary: 'a' comes twice; expected each word once"),
    (lambda: WordVocabulary([*SPECIAL, "[MASK]"]), r"'\[MASK\]' comes twice"),
    (lambda: WordVocabulary.of(["a"], 5), "WordVocabulary: size is 5; expected a whole number of at least 6"),
    (lambda: WordVocabulary.of(["a"], 9.0), "size is 9.0"),
    (lambda: WordVocabulary.of(["a"], 9, 4), "size is 9 and buckets 4; expected more than 9, the buckets and"),
    (lambda: WordVocabulary.of(["a"], 9, -1), "buckets is -1; expected a whole number of at least 0"),
    (lambda: WordVocabulary(SPECIAL, 1.5), "buckets is 1.5")])
def test_a_wrong_vocabulary_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        make()
    one_line(error)


# ---- padding ---------------------------------------------------------------------------------------------

@settings(max_examples=30, deadline=None)
@given(sequences=st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=6), value=st.sampled_from([PAD, 7]))
def test_padded_puts_each_sequence_to_the_left(sequences, value):
    ids, mask = padded(sequences, value)
    assert ids.shape == mask.shape == (len(sequences), max(map(len, sequences), default=0))
    assert (ids.dtype, mask.dtype) == (np.int64, bool)
    for row, real, sequence in zip(ids, mask, sequences):
        assert row.tolist() == sequence + [value] * (len(row) - len(sequence))
        assert real.tolist() == [True] * len(sequence) + [False] * (len(row) - len(sequence))


# ---- noise -----------------------------------------------------------------------------------------------

def noisy_of(noise, ids, ratio, seed=0):
    before = ids.copy()
    noisy = NOISES[noise](ids, ratio, VOCAB, np.random.default_rng(seed))
    np.testing.assert_array_equal(ids, before)
    assert noisy.dtype == np.int64
    if ratio == 0:
        np.testing.assert_array_equal(noisy, ids)
    return noisy


def is_subsequence(part, whole):
    rest = iter(whole)
    return all(any(word == other for other in rest) for word in part)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
@pytest.mark.parametrize("ratio", [0.2, 0.6, 0.9])
def test_deletion_deletes_the_share_ratio(n, ratio):
    """Kept are (1 - ratio) n + ratio^n words on average, each place alike, and never none."""
    rng, ids, trials = np.random.default_rng(0), np.arange(n), 1000
    counts, kept = np.zeros(n), []
    for _ in range(trials):
        left = delete_words(ids, ratio, VOCAB, rng)
        counts[left] += 1
        kept.append(len(left))
    assert min(kept) >= 1
    error = max(np.std(kept), 1e-9) / np.sqrt(trials)
    assert abs(np.mean(kept) - ((1 - ratio) * n + ratio**n)) <= 4 * error
    share = (1 - ratio) + ratio**n / n
    assert np.abs(counts / trials - share).max() <= 4.5 * np.sqrt(share * (1 - share) / trials)


@every_noise
def test_the_share_of_words_that_a_noise_touches_is_the_ratio(noise):
    ids, ratio, touched = np.arange(1000) % (VOCAB - FIRST) + FIRST, 0.6, []
    for seed in range(20):
        noisy = noisy_of(noise, ids, ratio, seed)
        touched.append(abs(len(noisy) - len(ids)) if noise in ("delete", "add") else (noisy != ids).sum())
    unseen = {"swap": 1 / 25, "replace": 1 / 25}.get(noise, 0)               # a word of 25 for the same word
    assert np.mean(touched) / 1000 == pytest.approx(ratio * (1 - unseen), abs=0.015)


@settings(max_examples=30, deadline=None)
@given(ids=word_ids, ratio=ratios, seed=st.integers(0, 999))
def test_deletion_keeps_the_order_and_a_word(ids, ratio, seed):
    noisy = noisy_of("delete", ids, ratio, seed)
    assert len(noisy) >= 1
    assert is_subsequence(noisy, ids)
    if len(ids) == 1:
        np.testing.assert_array_equal(noisy, ids)
    elif ratio == 1:
        assert len(noisy) == 1


@settings(max_examples=30, deadline=None)
@given(ids=word_ids, ratio=ratios, seed=st.integers(0, 999))
def test_swapping_keeps_the_words(ids, ratio, seed):
    assert sorted(noisy_of("swap", ids, ratio, seed)) == sorted(ids)


@settings(max_examples=30, deadline=None)
@given(ids=word_ids, ratio=ratios, seed=st.integers(0, 999))
def test_masking_puts_the_mask_in_its_place(ids, ratio, seed):
    noisy = noisy_of("mask", ids, ratio, seed)
    assert noisy.shape == ids.shape
    assert ((noisy == ids) | (noisy == MASK)).all()
    if ratio == 1:
        assert (noisy == MASK).all()


@settings(max_examples=30, deadline=None)
@given(ids=word_ids, ratio=ratios, seed=st.integers(0, 999))
def test_replacing_and_adding_take_words_and_no_special_ones(ids, ratio, seed):
    replaced, added = (noisy_of(noise, ids, ratio, seed) for noise in ("replace", "add"))
    assert replaced.shape == ids.shape
    assert len(ids) <= len(added) <= 2 * len(ids)
    for noisy in (replaced, added):
        assert noisy.min() >= FIRST
        assert noisy.max() < VOCAB
    assert added[0] == ids[0]                                                # after a word, not before it
    assert is_subsequence(ids, added)
    if ratio == 1:
        np.testing.assert_array_equal(added[::2], ids)
        assert len(added) == 2 * len(ids)


@pytest.mark.parametrize("noise", ["replace", "add"])
def test_every_word_of_the_vocabulary_may_come(noise):
    ids = np.full(600, FIRST)
    drawn = noisy_of(noise, ids, 1.0)
    assert set((drawn[1::2] if noise == "add" else drawn).tolist()) == set(range(FIRST, VOCAB))


@every_noise
def test_a_sentence_without_a_word_stays_so(noise):
    for ratio in (0.0, 0.6, 1.0):
        assert noisy_of(noise, np.array([], np.int64), ratio).shape == (0,)


# ---- batches ---------------------------------------------------------------------------------------------

def sequences_of(n, seed=0, up_to=20):
    """n sequences of words; the first of each is its number + FIRST."""
    rng = np.random.default_rng(seed)
    return [np.concatenate([[row + FIRST], rng.integers(FIRST, n + FIRST, rng.integers(up_to))]) for row in range(n)]


def batches_of(n=100, batch_size=8, seed=3, up_to=20, **more):
    return DenoisingBatches(sequences_of(n, up_to=up_to), batch_size, seed, vocab=n + FIRST, **more)


def epoch_of(batches, epoch):
    return [batches[step] for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)]


def numbers(clean):
    """Which sentences a batch has."""
    return (clean[:, 1] - FIRST).tolist()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 60), batch_size=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_an_epoch_meets_every_sentence_once_but_the_rest(n, batch_size, seed):
    n, sequences = n + batch_size, sequences_of(n + batch_size)
    batches = DenoisingBatches(sequences, batch_size, seed, vocab=n + FIRST)
    assert batches.per_epoch == n // batch_size
    for epoch in range(3):
        met = [number for _, _, clean, _ in epoch_of(batches, epoch) for number in numbers(clean)]
        assert len(set(met)) == len(met) == batches.per_epoch * batch_size > n - batch_size
        assert batches.position(epoch * batches.per_epoch) == (epoch, 0)
    assert batches.position(batches.per_epoch - 1) == (0, batches.per_epoch - 1)


@every_noise
def test_a_batch_is_its_sentences_between_begin_and_end(noise):
    sequences, batches = sequences_of(100), batches_of(noise=noise)
    for noisy, noisy_mask, clean, clean_mask in epoch_of(batches, 0):
        for ids, mask in ((noisy, noisy_mask), (clean, clean_mask)):
            lengths = mask.sum(axis=1)
            assert ids.shape == mask.shape == (8, lengths.max())
            assert (ids.dtype, mask.dtype) == (np.int64, bool)
            np.testing.assert_array_equal(mask, np.arange(ids.shape[1]) < lengths[:, None])
            assert (ids[~mask] == PAD).all()
            assert (ids[:, 0] == CLS).all()
            assert (ids[np.arange(8), lengths - 1] == SEP).all()
            inner = mask & (np.cumsum(mask, axis=1) > 1) & (np.arange(ids.shape[1]) < lengths[:, None] - 1)
            assert ((ids[inner] >= FIRST) | ((ids[inner] == MASK) & (noise == "mask") & (ids is noisy))).all()
        for row, mask, number in zip(clean, clean_mask, numbers(clean)):
            np.testing.assert_array_equal(row[mask], [CLS, *sequences[number], SEP])
    assert any(noisy.shape != clean.shape or (noisy != clean).any() for noisy, _, clean, _ in epoch_of(batches, 0))


@every_noise
def test_longest_cuts_the_end_of_both_copies(noise):
    """Of the clean one first, so that noise never touches what is not there; words that are added push others out."""
    sequences, batches = sequences_of(100), batches_of(noise=noise, longest=7)
    for noisy, noisy_mask, clean, clean_mask in epoch_of(batches, 0):
        assert max(noisy.shape[1], clean.shape[1]) <= 9
        assert (noisy[np.arange(8), noisy_mask.sum(axis=1) - 1] == SEP).all()
        for row, noisy_row, mask, number in zip(clean, noisy, clean_mask, numbers(clean)):
            np.testing.assert_array_equal(row[mask], [CLS, *sequences[number][:7], SEP])
            kept = noisy_row[noisy_row > MASK]
            assert noise not in ("delete", "swap", "mask") or set(kept) <= set(row)
    assert batches.lengths.max() == 7


def test_like_lengths_come_together():
    batches = batches_of(2000, batch_size=16, up_to=40)
    padding = sum((~clean_mask).sum() for _, _, _, clean_mask in epoch_of(batches, 0))
    random = np.random.default_rng(0).permutation(2000).reshape(-1, 16)
    expected = sum((batches.lengths[rows].max() - batches.lengths[rows]).sum() for rows in random)
    assert padding < 0.1 * expected
    longest = [clean.shape[1] for _, _, clean, _ in epoch_of(batches, 0)]
    assert longest != sorted(longest)                                        # but the batches are not in this order
    assert np.abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.25


def test_sentences_are_sorted_within_a_pool_only():
    """Who is with whom changes from epoch to epoch."""
    batches = batches_of(3 * POOL * 2, batch_size=2, up_to=5)
    first, second = ({frozenset(rows) for rows in batches.order(epoch).tolist()} for epoch in (0, 1))
    assert len(first & second) < 0.1 * len(first)


def test_every_epoch_has_an_order_and_noise_of_its_own():
    batches = batches_of(40, batch_size=4, up_to=40)
    orders, left = [], []
    for epoch in range(2):
        taken = epoch_of(batches, epoch)
        orders.append([numbers(clean) for _, _, clean, _ in taken])
        left.append({number: tuple(row[mask]) for noisy, noisy_mask, clean, _ in taken
                     for number, row, mask in zip(numbers(clean), noisy, noisy_mask)})
    assert orders[0] != orders[1]
    long = [number for number in range(40) if batches.lengths[number] > 10]
    assert len(long) > 20
    assert all(left[0][number] != left[1][number] for number in long)


def test_the_sentences_are_left_as_they_are():
    sequences = sequences_of(20)
    before = [ids.copy() for ids in sequences]
    for noise in NOISES:
        epoch_of(DenoisingBatches(sequences, 4, 0, noise=noise, vocab=40), 0)
    for ids, kept in zip(sequences, before):
        np.testing.assert_array_equal(ids, kept)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"batch_size": 0}, "batch_size is 0; expected a whole number of at least 1"),
    ({"batch_size": 21}, "20 sentences; expected at least a batch of 21"),
    ({"batch_size": 2.0}, "batch_size is 2.0"),
    ({"noise": "drop"}, "noise is 'drop'; expected one of 'delete', 'swap', 'mask', 'replace', 'add'"),
    ({"ratio": 1.2}, r"ratio is 1.2; expected a number in \[0, 1\]"),
    ({"ratio": -0.1}, "ratio is -0.1"), ({"ratio": np.nan}, "ratio is nan"), ({"ratio": "0.6"}, "ratio is '0.6'"),
    ({"vocab": 5}, "vocab is 5; expected a whole number of at least 6"),
    ({"sequences": []}, "0 sentences; expected at least a batch of 4"),
    ({"sequences": [np.array([5]), np.array([], np.int64)] * 4}, r"sentence \d has no word; expected at least one"),
])
def test_bad_batches_are_refused(change, sentence):
    arguments = {"sequences": sequences_of(20), "batch_size": 4, "seed": 0, "vocab": 40, **change}
    with pytest.raises(ValueError, match=f"DenoisingBatches: {sentence}") as error:
        DenoisingBatches(**arguments)
    one_line(error)
