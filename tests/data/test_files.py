"""minigrad.data.files: found, checked, read through, fetched; without a network."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import threading
import zipfile
from pathlib import Path

import pytest
from helpers import one_line

from minigrad.data.files import (
    DataError,
    Official,
    check_content,
    data_folder,
    find_file,
    official_file,
    read_unpacked,
    unpacked,
)

CONTENT = b"Twas brillig, and the slithy toves\n" * 40
NOWHERE = "http://localhost:1/made.zip"             # nothing listens there: refused at once


def official(url=NOWHERE, name="made"):
    return Official(name, url, len(CONTENT), f"md5:{hashlib.md5(CONTENT).hexdigest()}")


def write(path, content=CONTENT, member="made"):
    """The content at `path`, packed as its suffix says; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
    else:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


# ---- where files lie -------------------------------------------------------------------------------------

def test_the_data_folder(monkeypatch):
    monkeypatch.delenv("MINIGRAD_DATA", raising=False)
    assert data_folder() == Path.home() / ".cache/minigrad"
    monkeypatch.setenv("MINIGRAD_DATA", "there")
    assert data_folder() == Path("there")
    assert data_folder("here") == Path("here")


def test_a_file_is_found_in_the_folder_or_one_below(tmp_path):
    assert find_file(["a"], tmp_path) is None
    assert find_file(["a"], tmp_path / "nothing") is None
    write(tmp_path / "x/y/a")
    assert find_file(["a"], tmp_path) is None
    below = write(tmp_path / "text/a")
    assert find_file(["a"], tmp_path) == below
    (tmp_path / "b").mkdir()
    assert find_file(["b", "a"], tmp_path) == below                          # a folder is no file
    here = write(tmp_path / "a")
    assert find_file(["a"], tmp_path) == here
    assert find_file(["a.gz", "a"], tmp_path) == here
    packed = write(tmp_path / "text/a.gz")
    assert find_file(["a.gz", "a"], tmp_path) == packed                      # the order of the names counts first


# ---- reading ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["made", "made.txt", "made.gz", "made.zip"])
def test_packed_files_are_read_through(tmp_path, name):
    path = write(tmp_path / name)
    assert read_unpacked(path) == CONTENT
    with unpacked(path) as stream:
        assert stream.read(4) == CONTENT[:4]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def damaged(path, change):
    write(path)
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize("name", ["made.gz", "made.zip"])
@pytest.mark.parametrize("change", [
    lambda packed: packed[:-12], lambda packed: packed[:len(packed) // 2], lambda packed: b"garbage" * 20,
    lambda packed: packed[:40] + bytes([packed[40] ^ 255, packed[41] ^ 255]) + packed[42:], lambda packed: packed[:5]],
    ids=["end", "half", "garbage", "flipped", "five bytes"])
def test_a_damaged_archive_is_one_line(tmp_path, name, change):
    with pytest.raises(DataError, match=rf"{name}: damaged, or no \.(gz|zip) file \(") as error:
        read_unpacked(damaged(tmp_path / name, change))
    one_line(error)


def test_what_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"nothing: there is no such file"):
        read_unpacked(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\)"):
        read_unpacked(tmp_path)
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a", "a")
        archive.writestr("b", "b")
    with pytest.raises(DataError, match=r"two.zip: holds 2 files; expected one"):
        read_unpacked(tmp_path / "two.zip")
    locked = damaged(tmp_path / "locked.zip", lambda packed: packed.replace(b"\x00\x00\x08\x00", b"\x01\x00\x08\x00"))
    with pytest.raises(DataError, match=r"locked.zip: cannot be unpacked \(.*password") as error:
        read_unpacked(locked)
    one_line(error)


# ---- the official file -----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["made", "made.gz", "made.zip", "text/made.gz"])
def test_an_official_file_is_checked(tmp_path, name):
    path = write(tmp_path / name)
    assert official_file(official(), tmp_path) == path
    write(path, CONTENT[:-1])
    with pytest.raises(DataError, match="holds 1,399 bytes; the official made has 1,400"):
        official_file(official(), tmp_path)
    write(path, CONTENT + b"x" * 10**6)
    with pytest.raises(DataError, match="holds more than 1,400 bytes"):
        official_file(official(), tmp_path)
    write(path, b"x" + CONTENT[1:])
    with pytest.raises(DataError, match=r"its md5 is [0-9a-f]{32}; that of the official made is [0-9a-f]{32}"):
        official_file(official(), tmp_path)
    check_content(path, official()._replace(checksum=None))                  # what is not known is not checked
    check_content(path, Official("made", NOWHERE))


def test_a_file_published_packed_is_checked_as_it_is(tmp_path):
    path = write(tmp_path / "made.tar.gz")
    packed = path.read_bytes()
    published = Official("made.tar.gz", NOWHERE, len(packed), f"sha256:{hashlib.sha256(packed).hexdigest()}")
    assert official_file(published, tmp_path) == path


# ---- fetching --------------------------------------------------------------------------------------------

@contextlib.contextmanager
def served(folder, handler=http.server.SimpleHTTPRequestHandler):
    """The address of a server of this machine that gives the folder's files."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class CutOff(http.server.SimpleHTTPRequestHandler):
    """Promises more than it gives."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        self.wfile.write(b"x" * 1000)


@pytest.fixture(autouse=True)
def silent_server(monkeypatch):
    monkeypatch.setattr(http.server.BaseHTTPRequestHandler, "log_message", lambda *_: None)
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.parametrize("name", ["made", "made.gz", "made.zip"])
def test_what_is_missing_is_fetched_once(tmp_path, capsys, name):
    write(tmp_path / "there" / name)
    folder = tmp_path / "a/b"
    with served(tmp_path / "there") as address:
        path = official_file(official(f"{address}/{name}"), folder)
    assert path == folder / name
    assert read_unpacked(path) == CONTENT
    assert [path.name for path in folder.iterdir()] == [name]
    assert "fetching http://127.0.0.1" in capsys.readouterr().err
    assert official_file(official(), folder) == path             # nobody is asked any more


def test_quiet_is_quiet(tmp_path, capsys):
    write(tmp_path / "made.gz")
    official_file(official((tmp_path / "made.gz").as_uri()), tmp_path / "to", quiet=True)
    assert capsys.readouterr() == ("", "")


def test_something_else_is_never_taken(tmp_path):
    write(tmp_path / "made.gz", b"not it")
    with pytest.raises(DataError, match=r"made.gz gave something else than made: .* holds 6 bytes") as error:
        official_file(official((tmp_path / "made.gz").as_uri()), tmp_path / "to", quiet=True)
    one_line(error)
    assert list((tmp_path / "to").iterdir()) == []


@pytest.mark.parametrize(("handler", "name", "reason"), [
    (CutOff, "made.zip", "the connection ended after 1,000 of 1,000,000 bytes"),
    (http.server.SimpleHTTPRequestHandler, "none.zip", "HTTP Error 404: File not found")])
def test_a_failed_fetch_leaves_nothing(tmp_path, handler, name, reason):
    (tmp_path / "there").mkdir()
    with served(tmp_path / "there", handler) as address, pytest.raises(DataError) as error:
        official_file(official(f"{address}/{name}"), tmp_path / "to", quiet=True)
    text = one_line(error)
    assert reason in text
    assert f"put {name} from {address}/{name} into {tmp_path / 'to'}" in text
    assert list((tmp_path / "to").iterdir()) == []


def test_no_network_says_which_file_to_put_where(tmp_path):
    with pytest.raises(DataError) as error:
        official_file(official(), tmp_path)
    assert one_line(error) == (
        f"made is neither in {tmp_path} nor one folder below and could not be fetched (Connection refused): "
        f"put made.zip from {NOWHERE} into {tmp_path}")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("a file where a folder should be")
    with pytest.raises(DataError, match="could not be fetched"):
        official_file(official(), tmp_path / "file/folder")
