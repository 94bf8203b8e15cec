"""The STS Benchmark: pairs of sentences with similarity scores given by people (Cer et al. 2017, arXiv 1708.00055)."""

import math
import tarfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minigrad.data.files import DataError, Official, data_folder, find_file, official_file, read_unpacked

PARTS = {"train": 5749, "dev": 1500, "test": 1379}               # pairs of each, as published
ARCHIVE = Official("Stsbenchmark.tar.gz", "http://ixa2.si.ehu.eus/stswiki/images/4/48/Stsbenchmark.tar.gz", None,
                   "sha256:557a86abbd2b76ee6768d8b5103b659601a9d26b797898c7467812f303b21280")
COLUMNS = ("genre", "file", "year", "id", "score", "sentence1", "sentence2")


class Pairs(NamedTuple):
    """Pairs of sentences and their gold scores, 0 ... 5."""

    first: list                 # [str]
    second: list                # [str]
    scores: np.ndarray          # (n,) float64
    part: str                   # train, dev, test

    @property
    def name(self):
        """How to label a figure on these pairs."""
        published = PARTS.get(self.part)
        if len(self.scores) == published:
            return f"STS-B {self.part}"
        of = "" if published is None else f" of {published:,}"
        return f"STS-B, {len(self.scores):,}{of} {self.part} pairs"


def parse_sts(data, path, part):
    """Pairs from the bytes of an official file: one pair per line, tab-separated, no header, no quoting; UTF-8.

    The score is column 5, the sentences are columns 6 and 7; some lines have more columns, with a licence. Raises
    DataError, naming the line, for any other format.
    """
    first, second, scores = [], [], []
    for number, line in enumerate(data.split(b"\n"), 1):
        where = f"{path}, line {number}"
        try:
            fields = line.decode("utf-8").rstrip("\r").split("\t")
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8") from error
        if fields == [""]:
            continue
        if len(fields) < len(COLUMNS):
            raise DataError(f"{where}: {len(fields)} columns; expected at least {len(COLUMNS)}, separated by tabs: "
                            f"{', '.join(COLUMNS)}")
        try:
            score = float(fields[4])
        except ValueError:
            score = math.nan
        if not 0 <= score <= 5:
            raise DataError(f"{where}: the score is {fields[4]!r}; expected a number in 0 ... 5")
        sentences = [field.strip() for field in fields[5:7]]
        if not all(sentences):
            raise DataError(f"{where}: sentence {1 + bool(sentences[0])} is empty")
        scores.append(score)
        first.append(sentences[0])
        second.append(sentences[1])
    if not scores:
        raise DataError(f"{path}: no pair in it")
    return Pairs(first, second, np.array(scores), part)


def read_sts(path, part="test"):
    """Pairs from an official file, sts-{train,dev,test}.csv, plain or .gz. Raises DataError as `parse_sts` does."""
    return parse_sts(read_unpacked(path), path, part)


def find_sts(folder=None, quiet=False):
    """{"train", "dev", "test": Pairs} from the STS Benchmark under a data folder.

    From its three files (unpacked ones may lack pairs: `Pairs.name` says so) or from Stsbenchmark.tar.gz, which is
    downloaded if it is missing. The archive's checksum is verified and its members are read one by one. Raises
    DataError, one line.
    """
    folder = data_folder(folder)
    names = {part: f"sts-{part}.csv" for part in PARTS}
    paths = {part: find_file([name, f"{name}.gz"], folder) for part, name in names.items()}
    if all(paths.values()):
        return {part: read_sts(path, part) for part, path in paths.items()}
    if any(paths.values()) and find_file([ARCHIVE.name], folder) is None:
        missing = next(names[part] for part, path in paths.items() if path is None)
        raise DataError(f"{missing} is neither in {folder} nor one folder below, though other parts of the STS "
                        "Benchmark are")
    return read_archive(official_file(ARCHIVE, folder, quiet))


def read_archive(path):
    """{"train", "dev", "test": Pairs} from Stsbenchmark.tar.gz, member by member; nothing is unpacked onto the disk."""
    found = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                part = Path(member.name).name.removeprefix("sts-").removesuffix(".csv")
                if member.isfile() and Path(member.name).name == f"sts-{part}.csv" and part in PARTS:
                    found[part] = parse_sts(archive.extractfile(member).read(), f"{path}: {member.name}", part)
    except DataError:
        raise
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError, OverflowError) as error:
        raise DataError(f"{path}: damaged, or no .tar.gz file ({error})") from error
    missing = [part for part in PARTS if part not in found]
    if missing:
        raise DataError(f"{path}: holds no sts-{missing[0]}.csv")
    return {part: found[part] for part in PARTS}
