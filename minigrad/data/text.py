"""Texts as sequences of bytes: reading, splitting, the vocabulary, and parallel streams for truncated BPTT."""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minigrad.check import check_count
from minigrad.data.batches import Epochs
from minigrad.data.files import FORMS, DataError, Official, data_folder, find_file, official_file, read_unpacked

ENWIK8 = Official("enwik8", "http://mattmahoney.net/dc/enwik8.zip", 100_000_000, "md5:a1fa5ffddb56f4953e226637dabbb36a")


def read_text(path):
    """The bytes of a text file: plain, .gz, or the one file of a .zip.

    Raises DataError, one line, for a file that is missing, damaged or empty.
    """
    data = read_unpacked(path)
    if not data:
        raise DataError(f"{path}: the text is empty")
    return data


def find_enwik8(folder=None, quiet=False):
    """The path of enwik8 (its first 10^8 bytes of Wikipedia; Hutter 2006) under a data folder, its checksum checked.

    If it is missing but a prefix of it is there (enwik8.firstN, of N bytes; the longest one), the prefix's path, which
    the caller must report to the user. If neither is there, it is downloaded. Raises DataError as `official_file` does.
    """
    folder = data_folder(folder)
    if find_file([ENWIK8.name + form for form in FORMS], folder) is None:
        lengths = {path: re.fullmatch(r"enwik8\.first(\d+)(\.gz|\.zip)?", path.name)
                   for pattern in ("enwik8.first*", "*/enwik8.first*") for path in sorted(folder.glob(pattern))}
        beginnings = {path: int(match[1]) for path, match in lengths.items() if match and path.is_file()}
        if beginnings:
            return max(beginnings, key=beginnings.get)
    return official_file(ENWIK8, folder, quiet)


def split_90_5_5(data):
    """(train, valid, test): the first 90 %, the next 5 % and the last 5 % of a sequence; enwik8's usual split.

    Of the 100,000,000 bytes of enwik8 these are 90, 5 and 5 million. Raises ValueError when a part would be empty.
    """
    n = len(data)
    if n < 20:
        raise ValueError(f"split_90_5_5: the text has {n} bytes; expected at least 20, for parts of 90, 5 and 5 %")
    return data[:n * 90 // 100], data[n * 90 // 100:n * 95 // 100], data[n * 95 // 100:]


class Vocabulary:
    """The distinct bytes of a text, in order: symbol n is the byte values[n].

    encode(bytes) -> (N,) uint8, one byte per symbol, so that a large text stays small; decode(symbols) -> bytes.
    """

    def __init__(self, values):
        self.values = np.array(sorted(set(values)), np.uint8)
        self._known = np.zeros(256, bool)
        self._known[self.values] = True
        self._symbols = np.zeros(256, np.uint8)
        self._symbols[self.values] = np.arange(len(self.values))

    @classmethod
    def of(cls, data):
        """The vocabulary of a text."""
        return cls(np.flatnonzero(np.bincount(np.frombuffer(data, np.uint8), minlength=256)).tolist())

    def __len__(self):
        return len(self.values)

    def encode(self, data):
        """Raises ValueError, naming byte and position, for a byte that is not in the vocabulary."""
        values = np.frombuffer(data, np.uint8)
        known = self._known[values]
        if not known.all():
            at = np.flatnonzero(~known)
            first = dict.fromkeys(bytes([values[n]]) for n in at)            # each once, in order
            names = ", ".join(repr(byte)[1:] for byte in list(first)[:5]) + (", ..." if len(first) > 5 else "")
            raise ValueError(f"byte {names} (at position {at[0]}) is not among the {len(self)} bytes of the text")
        return self._symbols[values]

    def decode(self, symbols):
        return self.values[np.asarray(symbols)].tobytes()


class Text(NamedTuple):
    """A text in symbols, with its usual parts."""

    path: Path
    vocabulary: Vocabulary
    ids: np.ndarray             # (N,) of the whole
    parts: tuple                # training, validation, test: [(begin, end)]
    sha256: str

    def record(self):
        """What is kept of it with a result."""
        return {"name": self.path.name, "bytes": len(self.ids), "symbols": len(self.vocabulary),
                "split": [end - begin for begin, end in self.parts], "sha256": self.sha256}

    def describe(self):
        """One line about it."""
        train, valid, test = (f"{end - begin:,}" for begin, end in self.parts)
        part = " (a beginning of enwik8: its figures are not those of the whole)"
        return (f"{self.path}{part if self.path.name.startswith('enwik8.first') else ''}: {len(self.ids):,} bytes, "
                f"{len(self.vocabulary)} different ones; {train} for training, {valid} for validation, {test} for the "
                "test")


def open_text(given=None, quiet=False):
    """The Text of a file; of a folder (by default the data folder) enwik8 or a beginning of it. Raises DataError."""
    if given is not None and not Path(given).exists():
        raise DataError(f"{given}: there is no such file or folder")
    folder = data_folder(given)
    path = folder if folder.is_file() else find_enwik8(folder, quiet)
    data = read_text(path)
    try:
        lengths = [len(part) for part in split_90_5_5(data)]
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    ends = np.cumsum(lengths).tolist()
    vocabulary = Vocabulary.of(data)
    return Text(path.absolute(), vocabulary, vocabulary.encode(data), tuple(zip([0, *ends], ends)),
                hashlib.sha256(data).hexdigest())


class Streams(Epochs):
    """Parallel streams of one long text: each row of step s + 1 continues where it ended at step s.

    ids          (N,) the symbols of the text
    streams[s] -> (x, y), each (batch_size, unroll) int64; y is the symbol after each one in x

    An epoch reads the text once, except for a remainder shorter than batch_size * unroll + 1: the text, treated as a
    circle, is cut into batch_size pieces from an offset drawn from (seed, epoch). `begins(s)` is True if an epoch
    begins at step s, where the rows jump. Step s depends on (seed, s) alone, so a resumed run continues exactly.

    Raises ValueError for a text shorter than batch_size * unroll + 1.
    """

    def __init__(self, ids, batch_size, unroll, seed):
        check_count("Streams", "batch_size", batch_size)
        check_count("Streams", "unroll", unroll)
        if len(ids) < batch_size * unroll + 1:
            raise ValueError(f"Streams: the text has {len(ids):,} symbols; expected at least "
                             f"{batch_size * unroll + 1:,} = batch_size {batch_size} x unroll {unroll} + 1")
        self.ids, self.batch_size, self.unroll, self.seed = ids, batch_size, unroll, seed
        super().__init__((len(ids) - 1) // (batch_size * unroll))

    def begins(self, step):
        """True at the first step of an epoch."""
        return step % self.per_epoch == 0

    def __getitem__(self, step):
        epoch, n = self.position(step)
        start = np.random.default_rng([self.seed, epoch]).integers(len(self.ids))
        rows = start + np.arange(self.batch_size) * self.per_epoch * self.unroll             # (B,)
        places = rows[:, None] + n * self.unroll + np.arange(self.unroll + 1)                # (B, unroll + 1)
        symbols = self.ids[places % len(self.ids)].astype(np.int64)
        return symbols[:, :-1], symbols[:, 1:]
