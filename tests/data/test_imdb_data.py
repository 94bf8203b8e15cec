"""minigrad.data.imdb and .reviews: small made archives, what is refused of them, the cache, batches of like length."""

import gzip
import hashlib
import io
import itertools
import tarfile
from collections import Counter

import numpy as np
import pytest
from helpers import one_line
from hypothesis import given, settings, strategies as st

from minigrad.data import imdb
from minigrad.data.batches import POOL
from minigrad.data.files import DataError, Official
from minigrad.data.imdb import LengthBatches, Reviews, encode_review, in_order, read_imdb, top_words
from minigrad.data.reviews import review_words
from minigrad.data.sentences import words_of
from minigrad.tensors import save_tensors

MADE = {
    "train/neg/10_1.txt": "Bad, bad film.<br /><br />Bad!", "train/neg/9_4.txt": "A film. not bad?",
    "train/pos/0_7.txt": "Good film: a GOOD one", "train/pos/11_10.txt": "Der Film war schön",
    "test/neg/3_2.txt": "awful; bad", "test/neg/20_1.txt": "A film", "test/pos/7_8.txt": "good",
    "test/pos/6_9.txt": "one good unseen"}
OTHERS = {
    "README": "read me", "imdb.vocab": "the\n", "train/urls_pos.txt": "http://x\n", "train/labeledBow.feat": "9 0:1",
    "train/unsup/0_0.txt": "good good", "train/unsup/bad name": "\udcff"}


def archive(path, texts=MADE, top="aclImdb/", mode="w:gz"):
    """A tar of the texts, a folder's entry before them, as the official one has them; returns the path."""
    with tarfile.open(path, mode) as tar:
        for name in ("", "train", "train/pos", "train/pos/folder"):
            entry = tarfile.TarInfo(f"{top}{name}".rstrip("/"))
            entry.type = tarfile.DIRTYPE
            tar.addfile(entry)
        for name, text in texts.items():
            data = text.encode(errors="surrogateescape")
            entry = tarfile.TarInfo(f"{top}{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def unpacked(folder, texts=MADE):
    for name, text in texts.items():
        path = folder / "aclImdb" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(errors="surrogateescape"))
    return folder / "aclImdb"


def read(path, **more):
    return read_imdb(path, cache=more.pop("cache", False), quiet=True, count=more.pop("count", 2), **more)


def same(a, b):
    assert a.words == b.words
    for one, other in zip((*a.train, *a.test), (*b.train, *b.test)):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


# ---- reading ---------------------------------------------------------------------------------------------

def check_made(data):
    """By a plain loop over MADE."""
    order = {half: sorted((name for name in MADE if name.startswith(half)), key=lambda name: (
        "pos" in name, int(name.rpartition("/")[2].partition("_")[0]))) for half in ("train", "test")}
    words = {name: words_of(text.replace("<br />", " ")) for name, text in MADE.items()}
    counts = Counter(word for name in order["train"] for word in words[name])
    vocabulary = ["[PAD]", "[UNK]", *sorted(counts, key=lambda word: (-counts[word], word))]
    assert data.words == vocabulary
    assert vocabulary[2:6] == ["bad", "film", ".", "a"]                      # 4, 4, 2, 2 times
    for half, reviews in (("train", data.train), ("test", data.test)):
        assert [array.dtype for array in reviews] == [np.int32, np.int64, np.int64, np.int64]
        assert reviews.labels.tolist() == [0, 0, 1, 1]
        assert reviews.ratings.tolist() == [int(name[:-4].partition("_")[2]) for name in order[half]]
        assert len(reviews.offsets) == 5
        for k, name in enumerate(order[half]):
            ids = reviews.tokens[reviews.offsets[k]:reviews.offsets[k + 1]].tolist()
            assert ids == [vocabulary.index(word) if word in vocabulary else 1 for word in words[name]]
        assert reviews.offsets[-1] == len(reviews.tokens)
    assert (data.test.tokens == 1).sum() == 3                                # awful ; unseen


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("top", ["aclImdb/", "./aclImdb/"])
def test_an_archive_is_read_member_by_member(tmp_path, order, top):
    texts = dict(list({**OTHERS, **MADE}.items())[::order])
    path = archive(tmp_path / "aclImdb_small.tar.gz", texts, top)
    data = read(path)
    check_made(data)
    assert data.source == str(path)
    assert [path.name for path in tmp_path.iterdir()] == ["aclImdb_small.tar.gz"]          # nothing is unpacked


@pytest.mark.parametrize("count", [2, None])
def test_a_folder_is_the_same(tmp_path, count):
    place = unpacked(tmp_path / "a/b", {**OTHERS, **MADE})
    for folder in (place, tmp_path / "a/b", tmp_path / "a"):                 # itself, in it, one folder below
        data = read(folder, count=count)
        check_made(data)
        assert data.source == str(place)
    same(data, read(archive(tmp_path / "x.tar.gz"), count=count))


texts = st.text(st.sampled_from("aBé İß_0.,'-<>/\x1c\x00\u2019\u3000\n~"), max_size=30)


@settings(max_examples=60, deadline=None)
@given(text=texts | st.text(max_size=30))
def test_the_words_are_words_of(text):
    assert review_words(text) == words_of(text.replace("<br />", " "))
    assert review_words("a" + "<br />" * 2 + "b") == ["a", "b"]


# ---- what is refused -------------------------------------------------------------------------------------

def changed(old, new=None, text="good"):
    texts = dict(MADE)
    del texts[old]
    return {**texts, new: text} if new else texts


@pytest.mark.parametrize("kind", ["archive", "folder"])
@pytest.mark.parametrize(("texts", "sentence"), [
    (changed("test/pos/6_9.txt"), "test/pos has 1 reviews; expected 2"),
    ({**MADE, "train/neg/5_1.txt": "x"}, "train/neg has 3 reviews; expected 2"),
    (changed("test/pos/6_9.txt", "test/pos/6_9.text"), "test/pos/: '6_9.text' is there; expected names as ID_R"),
    ({**MADE, "test/pos/a\nb": "x"}, r"test/pos/: 'a\\nb' is there"),
    ({**MADE, "test/pos/-1_9.txt": "x"}, "'-1_9.txt' is there"),
    ({**MADE, "test/pos/٣_9.txt": "x"}, "'٣_9.txt' is there"),
    (changed("test/pos/6_9.txt", "test/pos/6_0.txt"), "test/pos/6_0.txt: the rating is 0; expected 7 ... 10"),
    (changed("test/pos/6_9.txt", "test/pos/6_11.txt"), "test/pos/6_11.txt: the rating is 11; expected 7 ... 10"),
    (changed("test/pos/6_9.txt", "test/pos/6_4.txt"), "test/pos/6_4.txt: the rating is 4; expected 7 ... 10"),
    (changed("train/neg/9_4.txt", "train/neg/9_5.txt"), "train/neg/9_5.txt: the rating is 5; expected 1 ... 4"),
    (changed("train/neg/9_4.txt", "train/neg/9_7.txt"), "train/neg/9_7.txt: the rating is 7; expected 1 ... 4"),
    (changed("train/neg/9_4.txt", "train/neg/10_2.txt"), "train/neg has review 10 twice; expected each number"),
    ({**MADE, "test/pos/6_9.txt": "ab\udcff"}, "test/pos/6_9.txt: not UTF-8 .byte 0xff at position 2"),
    ({**MADE, "test/pos/6_9.txt": ""}, "test/pos/6_9.txt: no word in it"),
    ({**MADE, "test/pos/6_9.txt": " <br />\n"}, "test/pos/6_9.txt: no word in it")])
def test_a_wrong_member_is_named(tmp_path, kind, texts, sentence):
    source = archive(tmp_path / "a.tar.gz", texts) if kind == "archive" else unpacked(tmp_path, texts)
    for cache in (False, tmp_path / "cache"):
        with pytest.raises(DataError, match=f"^{source}: .*{sentence}") as error:
            read(source, cache=cache)
        one_line(error)
    assert not (tmp_path / "cache").exists()                                 # nothing wrong is kept


def test_any_number_of_reviews_where_the_parts_have_the_same(tmp_path):
    with pytest.raises(DataError, match="train/neg has 2 reviews; expected 12,500"):
        read_imdb(archive(tmp_path / "a.tar.gz"), cache=False, quiet=True)
    with pytest.raises(DataError, match="test/pos has 1 reviews; expected 2"):
        read(archive(tmp_path / "b.tar.gz", changed("test/pos/6_9.txt")), count=None)
    with pytest.raises(DataError, match="train/neg has 0 reviews; expected 1"):
        read(archive(tmp_path / "c.tar.gz", OTHERS), count=None)


def test_a_missing_part_of_a_folder(tmp_path):
    place = unpacked(tmp_path, {name: text for name, text in MADE.items() if "test/neg" not in name})
    with pytest.raises(DataError, match=r"test/neg: cannot be read .No such file or directory") as error:
        read(place)
    one_line(error)


@pytest.mark.parametrize("change", [
    lambda packed: packed[:len(packed) // 2], lambda packed: b"", lambda packed: gzip.compress(b"garbage" * 200),
    lambda packed: packed[:-6] + bytes([packed[-6] ^ 255]) + packed[-5:],
    lambda packed: gzip.compress(gzip.decompress(packed)[:5400]),            # within a member
    lambda packed: gzip.compress(gzip.decompress(packed)[:5120])],           # after one
    ids=["half", "empty", "no tar", "checksum", "member", "members"])
def test_a_damaged_archive_is_one_line(tmp_path, change):
    path = archive(tmp_path / "a.tar.gz")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=r"a.tar.gz: (damaged, or no (.tar)?.gz file|t.* expected 2)") as error:
        read(path)
    one_line(error)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_damage_is_one_line(tmp_path_factory, data):
    path = archive(tmp_path_factory.mktemp("imdb") / "a.tar.gz")
    content = bytearray(gzip.decompress(path.read_bytes()))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(gzip.compress(content, 1))
    why = ""
    try:
        read(path)
    except DataError as error:
        why = str(error)
    assert "\n" not in why


# ---- where it lies ---------------------------------------------------------------------------------------

@pytest.fixture
def official(tmp_path, monkeypatch):
    """A function that says what the official archive is; fetched from a folder that is not there."""
    def of(content, url="http://localhost:1/aclImdb_v1.tar.gz"):
        monkeypatch.setattr(imdb, "ARCHIVE", Official("aclImdb_v1.tar.gz", url, len(content),
                                                      f"md5:{hashlib.md5(content).hexdigest()}"))
    monkeypatch.setenv("no_proxy", "*")
    of(b"-")
    return of


def test_which_source_is_taken(tmp_path, official, monkeypatch):
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match=r"aclImdb_v1.tar.gz is neither in .* put aclImdb_v1.tar.gz from http") as error:
        read(tmp_path / "there")
    one_line(error)
    other = archive(tmp_path / "there/aclImdb_v1_text.tar.gz")
    assert read(tmp_path / "there").source == read(tmp_path).source == read(other).source == str(other)
    monkeypatch.setenv("MINIGRAD_DATA", str(tmp_path))
    assert read(None).source == str(other)
    whole = archive(tmp_path / "aclImdb_v1.tar.gz", dict(list(MADE.items())[::-1]))
    for path in (tmp_path, whole):
        with pytest.raises(DataError, match=r"aclImdb_v1.tar.gz: holds more than 1 bytes; the official acl"):
            read(path)
    official(whole.read_bytes())
    assert read(tmp_path).source == read(whole).source == str(whole)
    assert read(tmp_path / "there").source == str(other)
    place = unpacked(tmp_path / "there")
    assert read(tmp_path).source == str(place)
    with pytest.raises(DataError, match=r"none.tar.gz: there is no such file"):
        read(tmp_path / "none.tar.gz")
    assert not (tmp_path / "none.tar.gz").exists()


# ---- the cache -------------------------------------------------------------------------------------------

def no_reading(*_):
    raise AssertionError("it is read anew")


@pytest.mark.parametrize("kind", ["archive", "folder"])
def test_what_was_read_is_kept(tmp_path, kind, monkeypatch, capsys):
    source = archive(tmp_path / "a.tar.gz") if kind == "archive" else unpacked(tmp_path)
    kept = tmp_path / "x/cache"
    first = read(source, cache=kept)
    assert len(list(kept.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(imdb, "_read", no_reading)
        again = read(source, cache=kept)
        same(first, again)
        check_made(again)
        assert again.source == str(source)
        with pytest.raises(DataError, match="train/neg has 2 reviews; expected 3"):
            read(source, cache=kept, count=3)
        same(first, read(source, cache=kept, count=None))
    assert capsys.readouterr() == ("", "")
    texts = {**MADE, "test/pos/6_9.txt": "one good good"}
    (archive(source, texts) if kind == "archive" else unpacked(tmp_path, texts))
    changed = read(source, cache=kept)
    assert (changed.test.tokens == 1).sum() == 2
    assert len(list(kept.iterdir())) == 2                                    # another source, another file


def test_a_change_after_a_link_to_nothing_is_seen(tmp_path):
    source, kept = unpacked(tmp_path), tmp_path / "cache"
    (source / "test/pos/.#lock").symlink_to("nowhere")                       # sorted before all reviews
    first = read(source, cache=kept)
    check_made(first)
    unpacked(tmp_path, {**MADE, "test/pos/6_9.txt": "one good good"})
    assert len(read(source, cache=kept).test.tokens) == len(first.test.tokens)
    assert (read(source, cache=kept).test.tokens == 1).sum() < (first.test.tokens == 1).sum()


def test_without_a_home_folder_nothing_is_kept(tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")
    monkeypatch.setattr("pathlib.Path.home", no_home)
    monkeypatch.delenv("MINIGRAD_DATA", raising=False)
    check_made(read(archive(tmp_path / "a.tar.gz"), cache=None))
    with pytest.raises(DataError, match="there is no home folder to look for data in"):
        read(None)


def test_by_default_it_is_kept_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    read(archive(tmp_path / "a.tar.gz"), cache=None)
    assert len(list((tmp_path / ".cache/minigrad").glob("imdb-*.safetensors"))) == 1


def test_a_damaged_cache_is_made_again(tmp_path, monkeypatch):
    source = archive(tmp_path / "a.tar.gz")
    first = read(source, cache=tmp_path / "cache")
    [kept] = (tmp_path / "cache").iterdir()
    good = kept.read_bytes()
    header = int.from_bytes(good[:8], "little")
    foreign = tmp_path / "foreign"
    save_tensors(foreign, {"w": np.zeros(3)}, {"step": 1})
    tokens = bytearray(good)
    tokens[-9] ^= 1                                                          # a bit of an array
    for content in (b"", good[:20], good[:-1], good + b"x", b"\0" * 400, bytes(tokens), foreign.read_bytes(),
                    good[:8] + good[8:8 + header].replace(b"train.labels", b"train.babels") + good[8 + header:],
                    good.replace(b'\\"imdb\\":1', b'\\"imdb\\":9').replace(b'\\"imdb\\": 1', b'\\"imdb\\": 9')):
        assert content != good
        kept.write_bytes(content)
        same(first, read(source, cache=tmp_path / "cache"))
        with monkeypatch.context() as patch:
            patch.setattr(imdb, "_read", no_reading)
            same(first, read(source, cache=tmp_path / "cache"))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, capsys):
    source = archive(tmp_path / "a.tar.gz")
    (tmp_path / "file").write_text("a file where a folder should be")
    check_made(read_imdb(source, cache=tmp_path / "file/folder", count=2))
    out, err = capsys.readouterr()
    assert (out, len([line for line in err.splitlines() if "cannot be written" in line])) == ("", 1)
    assert "IMDB is read anew the next time" in err
    check_made(read(source, cache=tmp_path / "file/folder"))
    assert capsys.readouterr() == ("", "")


# ---- ids -------------------------------------------------------------------------------------------------

def made(lengths, seed=0, vocab=50):
    """Reviews of these lengths; of review k the first word is k + 2 and the label is k's parity."""
    rng, lengths = np.random.default_rng(seed), np.asarray(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = rng.integers(2, vocab, offsets[-1]).astype(np.int32)
    tokens[offsets[:-1]] = np.arange(len(lengths)) + 2
    labels = np.arange(len(lengths)) % 2
    return Reviews(tokens, offsets, labels, np.where(labels, 10, 1))


def test_the_most_frequent_words(tmp_path):
    data = read(archive(tmp_path / "a.tar.gz"))
    for vocab in (3, 5, len(data.words), 10**6):
        for reviews in (data.train, data.test):
            cut = top_words(reviews, vocab)
            assert cut.tokens.dtype == np.int32
            assert cut.tokens.tolist() == [n if n < vocab else 1 for n in reviews.tokens.tolist()]
            assert all(one is other for one, other in zip(cut[1:], reviews[1:]))
    with pytest.raises(ValueError, match="top_words: vocab is 2; expected a whole number of at least 3"):
        top_words(data.train, 2)


def test_a_new_text_has_the_ids_that_it_would_have_had(tmp_path):
    data = read(archive(tmp_path / "a.tar.gz"))
    ids = {word: n for n, word in enumerate(data.words)}
    for vocab in (3, 6, 1000):
        reviews = top_words(data.train, vocab)
        for k, name in enumerate(["neg/9_4", "neg/10_1", "pos/0_7", "pos/11_10"]):
            for words in (data, ids):
                got = encode_review(MADE[f"train/{name}.txt"], words, vocab)
                assert got.dtype == np.int64
                assert got.tolist() == reviews.tokens[reviews.offsets[k]:reviews.offsets[k + 1]].tolist()
    assert encode_review("never [UNK]", ids, 1000).tolist() == [1, 1, 1, 1]
    for text in ("", " \n", "<br />"):
        with pytest.raises(ValueError, match=r"encode_review: text is .*; expected at least one word"):
            encode_review(text, data, 10)


# ---- batches of like length ------------------------------------------------------------------------------

def check_batch(reviews, ids, mask, labels, rows, longest=None):
    """By a plain loop."""
    expected = [reviews.tokens[reviews.offsets[row]:reviews.offsets[row + 1]].tolist()[:longest] for row in rows]
    L = max(map(len, expected))
    assert (ids.dtype, mask.dtype, labels.dtype) == (np.int64, bool, np.int64)
    assert ids.tolist() == [words + [0] * (L - len(words)) for words in expected]
    assert mask.tolist() == [[True] * len(words) + [False] * (L - len(words)) for words in expected]
    assert labels.tolist() == [int(reviews.labels[row]) for row in rows]


lengths = st.lists(st.integers(1, 9), min_size=5, max_size=40)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths, batch_size=st.integers(1, 5), seed=st.integers(0, 99), longest=st.none() | st.integers(1, 9))
def test_an_epoch_meets_every_review_once(lengths, batch_size, seed, longest):
    reviews = made(lengths)
    batches = LengthBatches(reviews, batch_size, seed, longest=longest)
    assert batches.per_epoch == len(lengths) // batch_size
    assert batches.cut == sum(n > (longest or 99) for n in lengths)
    for epoch in range(2):
        met = []
        for n in range(batches.per_epoch):
            step = epoch * batches.per_epoch + n
            assert batches.position(step) == (epoch, n)
            ids, mask, labels = batches[step]
            rows = (ids[:, 0] - 2).tolist()
            check_batch(reviews, ids, mask, labels, rows, longest)
            met += rows
        assert len(set(met)) == len(met) == batches.per_epoch * batch_size


def test_the_reviews_of_a_batch_are_of_like_length():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, 2 * 4 * POOL)
    batches = LengthBatches(made(lengths), 4, 0)
    for epoch in range(2):
        order = batches.order(epoch)
        for pool in np.split(order, 2):
            rows = lengths[pool]
            by_length = rows[np.lexsort((rows.max(1), rows.min(1)))]
            assert (by_length[:-1].max(1) <= by_length[1:].min(1)).all()     # no two batches of a pool overlap
            assert (np.diff(rows[:, 0]) < 0).any()                           # and they come in random order
    masks = [batches[step][1] for step in range(batches.per_epoch)]
    assert sum(mask.sum() for mask in masks) > .95 * sum(mask.size for mask in masks)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths, batch_size=st.integers(1, 50), longest=st.none() | st.integers(1, 9))
def test_in_order_is_every_review_once_by_length(lengths, batch_size, longest):
    reviews, met, sizes = made(lengths), [], []
    for ids, mask, labels, rows in in_order(reviews, batch_size, longest):
        check_batch(reviews, ids, mask, labels, rows, longest)
        met += rows.tolist()
        sizes.append(len(rows))
    assert sorted(met) == list(range(len(lengths)))
    cut = [min(lengths[row], longest or 99) for row in met]
    assert cut == sorted(cut)
    assert set(sizes[:-1]) <= {batch_size}
    assert 1 <= sizes[-1] <= batch_size


@pytest.mark.parametrize("make", [lambda *args, **more: LengthBatches(*args, 0, **more), in_order])
@pytest.mark.parametrize(("lengths", "batch_size", "more", "sentence"), [
    ([1, 2], 0, {}, "batch_size is 0; expected a whole number of at least 1"),
    ([1, 2], 1, {"longest": 0}, "longest is 0; expected a whole number of at least 1"),
    ([2, 0, 3], 1, {}, "review 2 has no word; expected at least one")])
def test_bad_batches_are_refused(make, lengths, batch_size, more, sentence):
    zeros = np.zeros(len(lengths), np.int64)
    reviews = Reviews(np.zeros(sum(lengths), np.int32), np.cumsum([0, *lengths]), zeros, zeros)
    with pytest.raises(ValueError, match=sentence):
        make(reviews, batch_size, **more)


def test_the_ends_of_the_range():
    """No review is as long as `longest`; there are fewer reviews than a batch has."""
    batches = LengthBatches(made([2, 5, 3]), 3, 0, longest=10**30)
    assert (batches.cut, batches[0][0].shape) == (0, (3, 5))
    with pytest.raises(ValueError, match="LengthBatches: 2 reviews; expected at least a batch of 3"):
        LengthBatches(made([1, 2]), 3, 0)


# ---- the real reviews ------------------------------------------------------------------------------------

def test_the_real_archives_first_members(real_data):
    members = list(itertools.islice(imdb._archive_members(real_data("aclImdb_v1_text.tar.gz")), 500))
    assert {part for part, _, _ in members} == {"test/neg"}
    reviews = [imdb._review("", *member) for member in members]
    assert reviews[:2] == [imdb._review("", *member) for member in members[:2]]
    assert {rating for _, rating, _ in reviews} == {1, 2, 3, 4}
    assert len({number for number, _, _ in reviews}) == 500
    assert 200 < np.mean([len(words) for *_, words in reviews]) < 350
    assert "br" not in {word for *_, words in reviews for word in words}


@pytest.mark.parametrize("make", [lambda folder, texts: archive(folder / "a.tar.gz", texts), unpacked])
def test_hidden_files_are_passed_over(tmp_path, make):
    source = make(tmp_path, {**MADE, "train/neg/.DS_Store": "\udcff", "test/pos/._6_9.txt": "x"})
    assert len(read(source).train.labels) == 4
