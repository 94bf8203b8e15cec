"""minigrad.data.text: reading, splitting, vocabulary and streams."""

import gzip
import hashlib
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minigrad.data import DataError, Streams, Vocabulary, find_enwik8, read_text, split_90_5_5, text
from minigrad.data.files import Official, read_unpacked

# ---- files -----------------------------------------------------------------------------------------------


def test_plain_and_packed_texts(tmp_path):
    data = "Mëthod\n".encode() * 9
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "a.gz").write_bytes(gzip.compress(data))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("folder/any name", data)
    assert [read_text(path) for path in sorted(tmp_path.iterdir())] == [data] * 3


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.gz").write_bytes(gzip.compress(b""))
    for name in ("a.txt", "a.gz"):
        with pytest.raises(DataError, match=f"{name}: the text is empty"):
            read_text(tmp_path / name)


@pytest.fixture
def small_enwik8(monkeypatch):
    """enwik8 made small, and nowhere to be fetched."""
    data = bytes(range(256)) * 4
    official = Official("enwik8", "http://localhost:1/enwik8.zip", len(data), f"md5:{hashlib.md5(data).hexdigest()}")
    monkeypatch.setattr(text, "ENWIK8", official)
    monkeypatch.setenv("no_proxy", "*")
    return data


def test_enwik8_or_a_beginning_of_it(tmp_path, small_enwik8, monkeypatch):
    with pytest.raises(DataError, match=r"enwik8 is neither in .* put enwik8.zip from http.* into ") as error:
        find_enwik8(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "text").mkdir()
    for name in ("enwik8.first900", "enwik8.first1000.gz", "enwik8.first.gz", "enwik8.first5000.gz.part"):
        (tmp_path / "text" / name).touch()
    monkeypatch.setenv("MINIGRAD_DATA", str(tmp_path))
    assert find_enwik8() == tmp_path / "text/enwik8.first1000.gz"
    whole = tmp_path / "enwik8.gz"
    whole.write_bytes(gzip.compress(small_enwik8))
    assert find_enwik8(tmp_path) == whole
    whole.write_bytes(gzip.compress(small_enwik8[:-1]))
    with pytest.raises(DataError, match="holds 1,023 bytes; the official enwik8 has 1,024"):     # and not the beginning
        find_enwik8(tmp_path)


def test_the_real_beginning_of_enwik8(real_data):
    path = real_data("enwik8.first4150000.gz")
    data = read_text(path)
    assert len(data) == 4_150_000
    assert hashlib.sha256(data).hexdigest() == "204482105f330f13c6490df36624bd9bc020dd24ba0854e005ada4d735ad6d7e"
    vocabulary = Vocabulary.of(data)
    assert len(vocabulary) == 200
    assert vocabulary.decode(vocabulary.encode(data)) == data
    assert data == read_unpacked(path)


# ---- split -----------------------------------------------------------------------------------------------

def test_enwik8s_split():
    parts = split_90_5_5(range(100_000_000))
    assert [len(part) for part in parts] == [90_000_000, 5_000_000, 5_000_000]
    assert [part[0] for part in parts] == [0, 90_000_000, 95_000_000]


@settings(max_examples=50, deadline=None)
@given(n=st.integers(20, 3000))
def test_the_parts_are_the_whole(n):
    data = np.arange(n)
    parts = split_90_5_5(data)
    np.testing.assert_array_equal(np.concatenate(parts), data)
    for part, share in zip(parts, (.90, .05, .05)):
        assert len(part) >= 1
        assert abs(len(part) - share * n) < 1 + 1e-9


def test_a_text_too_short_to_split():
    with pytest.raises(ValueError, match="the text has 19 bytes; expected at least 20"):
        split_90_5_5(b"x" * 19)


# ---- vocabulary ------------------------------------------------------------------------------------------

@settings(max_examples=100, deadline=None)
@given(data=st.binary(min_size=1, max_size=400))
def test_encode_and_decode(data):
    vocabulary = Vocabulary.of(data)
    assert vocabulary.values.tolist() == sorted(set(data))
    symbols = vocabulary.encode(data)
    assert symbols.shape == (len(data),)
    assert symbols.max() < len(vocabulary)
    assert vocabulary.decode(symbols) == data
    assert vocabulary.decode(symbols.astype(np.int64).tolist()) == data
    again = Vocabulary(vocabulary.values.tolist())               # as a checkpoint has it
    np.testing.assert_array_equal(again.encode(data), symbols)


@pytest.mark.parametrize(("data", "sentence"), [
    (b"abXb", r"byte 'X' \(at position 2\) is not among the 2 bytes of the text"),
    (b"a\xc3\x01\xc3", r"byte '\\xc3', '\\x01' \(at position 1\)"),
    (b"123456", r"'1', '2', '3', '4', '5', \.\.\. \(at"),
])
def test_a_byte_never_seen_is_named(data, sentence):
    with pytest.raises(ValueError, match=sentence):
        Vocabulary.of(b"abba").encode(data)


def test_nothing_to_encode():
    assert Vocabulary.of(b"ab").encode(b"").shape == (0,)


# ---- streams ---------------------------------------------------------------------------------------------

shapes = {"batch_size": st.integers(1, 5), "unroll": st.integers(1, 7), "rest": st.integers(0, 90),
          "seed": st.integers(0, 10**6)}


@settings(max_examples=60, deadline=None)
@given(**shapes)
def test_each_stream_goes_on_and_an_epoch_reads_the_text_once(batch_size, unroll, rest, seed):
    n = batch_size * unroll + 1 + rest
    streams = Streams(np.arange(n), batch_size, unroll, seed)
    assert streams.per_epoch == (n - 1) // (batch_size * unroll)
    for epoch in range(3):
        steps = range(epoch * streams.per_epoch, (epoch + 1) * streams.per_epoch)
        assert [streams.position(step) for step in steps] == [(epoch, k) for k in range(streams.per_epoch)]
        assert [streams.begins(step) for step in steps] == [True] + [False] * (streams.per_epoch - 1)
        x, y = (np.concatenate(parts, axis=1) for parts in zip(*(streams[step] for step in steps)))
        assert x.dtype == y.dtype == np.int64
        np.testing.assert_array_equal(y, (x + 1) % n)                        # the next symbol, on a circle
        np.testing.assert_array_equal(x[:, 1:], y[:, :-1])                   # over the steps' ends too
        assert len(set(x.ravel().tolist())) == x.size > n - 1 - batch_size * unroll


def test_epochs_and_seeds_begin_at_places_of_their_own():
    ids = np.arange(10_000)
    starts = {int(Streams(ids, 2, 5, seed)[epoch * 999][0][0, 0]) for seed in range(4) for epoch in range(4)}
    assert len(starts) == 16
    assert max(starts) > 7000 > 3000 > min(starts)


@pytest.mark.parametrize(("n", "batch_size", "unroll", "sentence"), [
    (100, 4, 25, "the text has 100 symbols; expected at least 101 = batch_size 4 x unroll 25 [+] 1"),
    (0, 1, 1, "the text has 0 symbols; expected at least 2"), (100, 0, 5, "batch_size is 0; expected a whole number"),
    (100, 5, 2.5, "unroll is 2.5; expected a whole number"),
])
def test_bad_streams_are_refused(n, batch_size, unroll, sentence):
    with pytest.raises(ValueError, match=sentence):
        Streams(np.zeros(n, np.uint8), batch_size, unroll, seed=0)
