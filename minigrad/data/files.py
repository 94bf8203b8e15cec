"""Data files: finding them, verifying that they are the official ones, and downloading what is missing.

A file is used under its official name, from the data folder or one folder below it; one that is not the official one is
refused, never replaced. Compressed files are read as streams: nothing is unpacked onto the disk.
"""

import contextlib
import gzip
import hashlib
import http.client
import lzma
import os
import sys
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

FORMS = ("", ".gz", ".zip")             # how a file may be stored: plain or compressed
CHUNK = 1 << 20                         # bytes
TIMEOUT = 30                            # seconds without a byte


class DataError(ValueError):
    """A data file that is missing, damaged, or not the official one."""


class Official(NamedTuple):
    """A published file. It may be stored as `name`, `name`.gz or `name`.zip; size and checksum are of its content."""

    name: str
    url: str                            # its last part is the file's name on disk
    size: int | None = None             # bytes; None: not known, not checked
    checksum: str | None = None         # "md5:..." or another of hashlib's


def data_folder(given=None):
    """The folder for data: the one given, else $MINIGRAD_DATA, else ~/.cache/minigrad.

    Raises DataError if none is given and the user has no home folder.
    """
    folder = given or os.environ.get("MINIGRAD_DATA") or cache_folder()
    if folder is None:
        raise DataError("there is no home folder to look for data in: say where they lie with --data or $MINIGRAD_DATA")
    return Path(folder)


def cache_folder():
    """~/.cache/minigrad; None if the user has no home folder, as in some containers."""
    try:
        return Path.home() / ".cache/minigrad"
    except RuntimeError:
        return None


def find_file(names, folder):
    """The path of the first of the names found in the folder or one folder below it; None if none is."""
    folder = Path(folder)
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())] if folder.is_dir() else []
    return next((place / name for name in names for place in places if (place / name).is_file()), None)


def official_file(official, folder, quiet=False):
    """The path of a published file under the folder, verified; downloaded into the folder if it is missing.

    Raises DataError, one line, for a file that is not the official one. If it cannot be downloaded, the line says what
    to put where.
    """
    path = find_file([official.name + form for form in FORMS], folder)
    if path is None:
        return _fetch(official, Path(folder), quiet)
    check_content(path, official)
    return path


# ---- reading ---------------------------------------------------------------------------------------------

@contextlib.contextmanager
def unpacked(path, form=None):
    """A binary stream of a file's content: a .gz decompressed, the one file of a .zip, any other file itself.

    `form` is ".gz", ".zip" or "", if the name does not say it. Raises DataError, also while the stream is read, for a
    file that is missing or damaged, and for a zip that does not hold exactly one file.
    """
    path = Path(path)
    form = (path.suffix if path.suffix in FORMS else "") if form is None else form
    try:
        with contextlib.ExitStack() as stack:
            if form == ".gz":
                stream = stack.enter_context(gzip.open(path))
            elif form == ".zip":
                archive = stack.enter_context(zipfile.ZipFile(path))
                stream = stack.enter_context(archive.open(_one_file(archive, path)))
            else:
                stream = stack.enter_context(path.open("rb"))
            yield stream
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path}: damaged, or no {form} file ({error})") from error
    except RuntimeError as error:                                # a password, an unknown method
        raise DataError(f"{path}: cannot be unpacked ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _one_file(archive, path):
    files = [entry for entry in archive.infolist() if not entry.is_dir()]
    if len(files) != 1:
        raise DataError(f"{path}: holds {len(files)} files; expected one")
    return files[0]


def read_unpacked(path):
    """The bytes of a file's content; see `unpacked`."""
    with unpacked(path) as stream:
        return stream.read()


def read_lines(path):
    """[str]: the stripped lines of a UTF-8 file; see `unpacked`. Raises DataError, naming the line."""
    lines = []
    for n, line in enumerate(read_unpacked(path).removesuffix(b"\n").split(b"\n"), 1):
        try:
            lines.append(line.decode("utf-8-sig" if n == 1 else "utf-8").strip())
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {n}: not UTF-8 (byte {error.object[error.start]:#04x} at position "
                            f"{error.start})") from error
    return lines


def check_content(path, official, form=None):
    """Raise DataError unless the file's content is what was published, as far as size and checksum are known."""
    if form is None:
        form = Path(path).name.removeprefix(official.name)       # "a.tar.gz" itself is published packed
    kind, _, expected = (official.checksum or "md5:").partition(":")
    digest, size = hashlib.new(kind, usedforsecurity=False), 0
    with unpacked(path, form) as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if size > (official.size or size):                   # an archive may unpack to anything
                break
    if official.size is not None and size != official.size:
        came = f"more than {official.size:,}" if size > official.size else f"{size:,}"
        raise DataError(f"{path}: holds {came} bytes; the official {official.name} has {official.size:,}")
    if expected and digest.hexdigest() != expected:
        raise DataError(f"{path}: its {kind} is {digest.hexdigest()}; that of the official {official.name} is "
                        f"{expected}")


# ---- fetching --------------------------------------------------------------------------------------------

def _fetch(official, folder, quiet):
    """Download the file into the folder, under a temporary name until it has been verified; returns its path."""
    target = folder / official.url.rpartition("/")[2]
    temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _download(official.url, temporary, quiet)
            check_content(temporary, official, target.name.removeprefix(official.name))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except DataError as error:
        raise DataError(f"{official.url} gave something else than {official.name}: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()                                        # it is the server's answer, with a connection
        raise DataError(f"{official.name} is neither in {folder} nor one folder below and could not be fetched "
                        f"({_reason(error)}): put {target.name} from {official.url} into {folder}") from error
    return target


def _download(url, path, quiet):
    # Some hosts refuse Python's own name.
    request = urllib.request.Request(url, headers={"User-Agent": "minigrad"})
    silent = quiet or sys.stderr is None
    with path.open("wb") as file, urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        if not silent:
            print(f"fetching {url}", file=sys.stderr, flush=True)
        total = int(answer.headers.get("Content-Length") or 0)
        with tqdm(total=total or None, unit="B", unit_scale=True, disable=silent or None) as bar:    # None: no terminal
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
        if file.tell() < total:
            raise OSError(f"the connection ended after {file.tell():,} of {total:,} bytes")


def _reason(error):
    """The useful part of a network error, in one line."""
    inner = getattr(error, "reason", None)
    error = inner if isinstance(inner, OSError) else error
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
