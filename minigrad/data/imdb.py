"""IMDB: 50,000 film reviews, half of them for training, as positive or negative (Maas et al., ACL 2011).

Read member by member from the published aclImdb_v1.tar.gz, from any other .tar.gz with the same members, or from the
unpacked folder. The result is cached in one file under ~/.cache/minigrad, so that the next run starts at once.
"""

import contextlib
import hashlib
import os
import re
import sys
import tarfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from minigrad.data.files import (
    CHUNK,
    DataError,
    Official,
    cache_folder,
    check_content,
    data_folder,
    find_file,
    official_file,
    unpacked,
)
from minigrad.data.reviews import (
    SPECIAL,
    UNK,
    LengthBatches,
    Reviews,
    encode_review,
    in_order,
    review_words,
    top_words,
)
from minigrad.tensors import CheckpointError, load_tensors, save_tensors

__all__ = ["Imdb", "LengthBatches", "Reviews", "encode_review", "in_order", "read_imdb", "top_words"]

ARCHIVE = Official("aclImdb_v1.tar.gz", "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz", 84_125_825,
                   "md5:7c2ac02c03563afcf9b574c7e56c153a")
COUNT = 12_500                                                   # reviews of each part, as published
PARTS = tuple(f"{half}/{kind}" for half in ("train", "test") for kind in ("neg", "pos"))
RATINGS = {"neg": range(1, 5), "pos": range(7, 11)}              # those in between are not in the data set
MEMBER = re.compile(rf"(?:\./)?aclImdb/({'|'.join(PARTS)})/([^/]+)")
NAME = re.compile(r"([0-9]{1,18})_([0-9]{1,18})\.txt")           # ID_RATING.txt
FORMAT = 1                                                       # of the cache file: any other is read anew


class Imdb(NamedTuple):
    """The reviews and their words: id n is words[n], of all words of the training reviews.

    The reviews are sorted by label, then by number. Words that occur only in test reviews are [UNK].
    """

    train: Reviews
    test: Reviews
    words: list                                                  # [str]: [PAD], [UNK], then by falling frequency
    source: str                                                  # the path they were read from


def read_imdb(folder=None, cache=None, quiet=False, *, count=COUNT):
    """Imdb from a data folder; downloaded if it is missing.

    folder    a data folder (None: `data_folder`'s) that contains, directly or one folder below, the unpacked aclImdb,
              else aclImdb_v1.tar.gz, which is verified, else another aclImdb*.tar.gz; or the path of one of these
    cache     the folder of the cache file (None: ~/.cache/minigrad, if there is a home folder); False: no cache
    count     reviews of each part; None: any number, the same for each

    Raises DataError, one line: for a damaged source, for a part with another number of reviews, for a member that
    is not ID_RATING.txt, has a rating of another part, is not UTF-8 or has no word.
    """
    source = find_imdb(data_folder(folder), quiet)
    kept, cache = None, cache_folder() if cache is None else cache
    if cache:
        kept = Path(cache) / f"imdb-{_fingerprint(source)}-{FORMAT}.safetensors"
        imdb = _load(kept, source)
        if imdb is not None:
            _check_counts(source, np.concatenate([np.bincount(half.labels, minlength=2) for half in imdb[:2]]), count)
            return imdb
    imdb = _read(source, quiet, count)
    if kept is not None:
        _save(kept, imdb, quiet)
    return imdb


def find_imdb(folder, quiet=False):
    """The path of the unpacked folder or of the archive; see `read_imdb`. The official archive has been verified."""
    if folder.is_file():
        if folder.name == ARCHIVE.name:
            check_content(folder, ARCHIVE)
        return folder
    if folder.name.endswith(".tar.gz") and not folder.exists():
        raise DataError(f"{folder}: there is no such file")
    below = [path for pattern in ("aclImdb", "*/aclImdb") for path in sorted(folder.glob(pattern))]
    for place in (folder, *below):
        if (place / "train/pos").is_dir():
            return place
    if find_file([ARCHIVE.name], folder) is None:
        for pattern in ("aclImdb*.tar.gz", "*/aclImdb*.tar.gz"):
            others = sorted(path for path in folder.glob(pattern) if path.is_file())
            if others:
                return others[0]
    return official_file(ARCHIVE, folder, quiet)


# ---- reading ---------------------------------------------------------------------------------------------

def _read(source, quiet, count):
    """Imdb of a folder or an archive. Until all words are known, a word's id is the order of its first occurrence."""
    ids = defaultdict()
    ids.default_factory = ids.__len__
    found = {part: [] for part in PARTS}                         # [(number, rating, (n,) ids)]
    members = _folder_members(source) if source.is_dir() else _archive_members(source)
    silent = quiet or sys.stderr is None
    with contextlib.closing(members), tqdm(total=len(PARTS) * count if count else None, desc="IMDB", unit=" reviews",
                                           disable=silent or None) as bar:           # None: no terminal
        for part, name, data in members:
            if name.startswith("."):                             # a file manager's notes: .DS_Store, ._3_4.txt
                continue
            number, rating, words = _review(f"{source}: {part}/", part, name, data)
            found[part].append((number, rating, np.fromiter(map(ids.__getitem__, words), np.int32, len(words))))
            bar.update()
    _check_counts(source, map(len, found.values()), count)
    train, test = (_joined(source, found, half) for half in ("train", "test"))
    counts, met = np.bincount(train.tokens, minlength=len(ids)), list(ids)
    frequent = sorted(np.flatnonzero(counts).tolist(), key=lambda n: (-counts[n], met[n]))
    final = np.full(len(ids), UNK, np.int32)
    final[frequent] = np.arange(len(SPECIAL), len(SPECIAL) + len(frequent))
    train, test = (part._replace(tokens=final[part.tokens]) for part in (train, test))
    return Imdb(train, test, [*SPECIAL, *(met[n] for n in frequent)], str(source))


def _archive_members(path):
    """(part, name, bytes) of each review; read to the end, so that the archive's own checksum is verified."""
    try:
        with unpacked(path, ".gz") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            while member := archive.next():
                archive.members.clear()                          # it would keep them all
                match = MEMBER.fullmatch(member.name)
                if match and member.isreg():
                    yield match[1], match[2], archive.extractfile(member).read()
            while stream.read(CHUNK):
                pass
    except DataError:
        raise
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: damaged, or no .tar.gz file ({error})") from error


def _folder_members(folder):
    for part in PARTS:
        try:
            with os.scandir(folder / part) as entries:
                for entry in entries:
                    if entry.is_file():
                        yield part, entry.name, Path(entry.path).read_bytes()
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror or error})") from error


def _review(where, part, name, data):
    """(number, rating, words) of a member; `where` precedes its name in an error message."""
    match = NAME.fullmatch(name)
    if not match:
        raise DataError(f"{where}: {name!r} is there; expected names as ID_RATING.txt")
    expected = RATINGS[part.rpartition("/")[2]]
    if int(match[2]) not in expected:
        raise DataError(f"{where}{name}: the rating is {int(match[2])}; expected {expected[0]} ... {expected[-1]}")
    try:
        words = review_words(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}{name}: not UTF-8 (byte {data[error.start]:#04x} at position "
                        f"{error.start})") from error
    if not words:
        raise DataError(f"{where}{name}: no word in it")
    return int(match[1]), int(match[2]), words


def _check_counts(source, counts, count):
    """Raise DataError unless each of PARTS has this many reviews."""
    counts = [int(n) for n in counts]
    expected = max(1, *counts) if count is None else count
    for part, came in zip(PARTS, counts):
        if came != expected:
            raise DataError(f"{source}: {part} has {came:,} reviews; expected {expected:,}")


def _joined(source, found, half):
    """Reviews of both kinds of a half, sorted, so that the order of reading does not matter."""
    rows = []
    for label, kind in enumerate(("neg", "pos")):
        of_kind = sorted(found[f"{half}/{kind}"], key=lambda row: row[:2])
        for one, other in pairwise(of_kind):
            if one[0] == other[0]:
                raise DataError(f"{source}: {half}/{kind} has review {one[0]} twice; expected each number once")
        rows += [(label, *row[1:]) for row in of_kind]
    labels, ratings, tokens = zip(*rows)
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in tokens])])
    return Reviews(np.concatenate(tokens), offsets.astype(np.int64), np.array(labels, np.int64),
                   np.array(ratings, np.int64))


# ---- what was read is kept -------------------------------------------------------------------------------

def _fingerprint(source):
    """Hexadecimal digest of the source: of an archive's bytes, or of a folder's names, sizes and times."""
    digest = hashlib.md5(usedforsecurity=False)
    if source.is_dir():
        for part in PARTS:
            with contextlib.suppress(OSError), os.scandir(source / part) as entries:     # said where it is read
                for entry in sorted(entries, key=lambda entry: entry.name):
                    with contextlib.suppress(OSError):           # a link to nothing, which is not read either
                        state = entry.stat()
                        digest.update(f"{part}/{entry.name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode(
                            "utf-8", "surrogateescape"))
    else:
        with unpacked(source, "") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _load(path, source):
    """Imdb from a file that `_save` wrote; None if it is missing, damaged or something else."""
    try:
        tensors, meta = load_tensors(path)
        if meta != {"imdb": FORMAT}:
            return None
        words = tensors["words"].tobytes().decode("utf-8").split("\n")
        train, test = (Reviews(*(tensors[f"{half}.{name}"] for name in Reviews._fields)) for half in ("train", "test"))
        return Imdb(train, test, words, str(source))
    except (CheckpointError, KeyError, ValueError, TypeError, OSError):
        return None


def _save(path, imdb, quiet):
    """Write the cache, if possible; without it the next run only takes longer to start."""
    tensors = {f"{half}.{name}": array for half in ("train", "test")
               for name, array in getattr(imdb, half)._asdict().items()}
    tensors["words"] = np.frombuffer("\n".join(imdb.words).encode("utf-8"), np.uint8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, tensors, {"imdb": FORMAT})
    except OSError as error:
        if not quiet and sys.stderr is not None:
            print(f"{path}: cannot be written ({error.strerror or error}); IMDB is read anew the next time",
                  file=sys.stderr)
