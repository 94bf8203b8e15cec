"""minigrad.data.sts: the official lines, what is refused of them, where the files are found, and the archive."""

import contextlib
import gzip
import hashlib
import io
import tarfile

import numpy as np
import pytest
from helpers import one_line
from hypothesis import given, settings, strategies as st

from minigrad.data import sts
from minigrad.data.files import DataError, Official
from minigrad.data.sts import ARCHIVE, PARTS, Pairs, find_sts, parse_sts, read_archive, read_sts

FOUR = ["main-captions", "MSRvid", "2012test", "0001"]


def line(score="2.5", first="A man plays.", second="A girl plays.", *more):
    return "\t".join([*FOUR, score, first, second, *more])


def parse(*lines, end="\n"):
    return parse_sts(end.join(lines).encode(), "sts-test.csv", "test")


# ---- lines -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_pair_a_line(end):
    pairs = parse(line("0", "ein Mädchen", "ein Junge"), "", line("5.000"), line("3.8", " a ", "b\u00a0"), "", end=end)
    assert pairs.first == ["ein Mädchen", "A man plays.", "a"]
    assert pairs.second == ["ein Junge", "A girl plays.", "b"]
    assert pairs.scores.tolist() == [0, 5, 3.8]
    assert (pairs.scores.dtype, pairs.part) == (np.float64, "test")


def test_quotes_are_kept_as_they_are():
    """A reader of quoted csv would join lines at them."""
    pairs = parse(line("1", '"A man', 'said "no"'), line("2", '"', 'a""b'), line("3", "'x'", "y"))
    assert pairs.first == ['"A man', '"', "'x'"]
    assert pairs.second == ['said "no"', 'a""b', "y"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("more", [(), ("licence",), ("MSRvid", "http://x"), ("", ""), ("a", "b", "c")])
def test_columns_after_the_seventh_are_left_out(more, end):
    pairs = parse(line("4", "a", "b", *more), line("1", "c", "d"), end=end)
    assert (pairs.first, pairs.second, pairs.scores.tolist()) == (["a", "c"], ["b", "d"], [4, 1])


@pytest.mark.parametrize(("bad", "sentence"), [
    ("genre\tfile\t2012", "3 columns; expected at least 7, separated by tabs: genre, file, year, id, score, sentence1"),
    (line()[:-14], "6 columns; expected at least 7"),
    (line().replace("\t", ","), "1 columns"), ("\r", "is empty|1 columns"), (" ", "1 columns"),
    (line("x"), "the score is 'x'; expected a number in 0 ... 5"), (line(""), "the score is ''"),
    (line("2,5"), "the score is '2,5'"), (line("nan"), "the score is 'nan'"), (line("inf"), "the score is 'inf'"),
    (line("-0.1"), "the score is '-0.1'"), (line("5.01"), "the score is '5.01'"), (line("1e3"), "the score is '1e3'"),
    (line("2", ""), "sentence 1 is empty"), (line("2", " \u00a0"), "sentence 1 is empty"),
    (line("2", "a", ""), "sentence 2 is empty"), (line("2", "a", "\r"), "sentence 2 is empty"),
    (line("2", "", ""), "sentence 1 is empty"), (line("2", "a", "", "licence"), "sentence 2 is empty"),
    (line("2", "a", "b\udcff"), "not UTF-8")])
def test_a_wrong_line_is_named(bad, sentence, tmp_path):
    data = "\n".join([line(), "", bad, line()]).encode(errors="surrogateescape")
    if bad == "\r":                                              # the end of an empty line
        assert len(parse_sts(data, "x", "test").scores) == 2
        return
    for name, content in (("sts-dev.csv", data), ("sts-dev.csv.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}, line 3: {sentence}") as error:
            read_sts(tmp_path / name, "dev")
        one_line(error)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\r\n"])
def test_a_file_without_a_pair_is_refused(data):
    with pytest.raises(DataError, match=r"sts-test.csv: no pair in it"):
        parse_sts(data, "sts-test.csv", "test")


fields = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\t"), min_size=1, max_size=8).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.floats(0, 5), fields, fields), min_size=1, max_size=5))
def test_what_was_written_is_read(rows):
    pairs = parse(*(line(repr(score), first, second) for score, first, second in rows))
    assert pairs.scores.tolist() == [score for score, _, _ in rows]
    assert pairs.first == [first.strip() for _, first, _ in rows]
    assert pairs.second == [second.strip() for _, _, second in rows]


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=60).map(lambda data: data.replace(b"0", b"\t")))
def test_any_bytes_are_pairs_or_one_line_that_says_why_not(data):
    why = ""
    try:
        assert len(parse_sts(data, "x", "dev").scores)
    except DataError as error:
        why = str(error)
    assert "\n" not in why


# ---- what figures are called -----------------------------------------------------------------------------

@pytest.mark.parametrize(("part", "n", "name"), [
    ("test", 1379, "STS-B test"), ("dev", 1500, "STS-B dev"), ("train", 5749, "STS-B train"),
    ("test", 879, "STS-B, 879 of 1,379 test pairs"), ("train", 2999, "STS-B, 2,999 of 5,749 train pairs"),
    ("test", 1500, "STS-B, 1,500 of 1,379 test pairs"), ("test", 1378, "STS-B, 1,378 of 1,379 test pairs"),
    ("own", 1379, "STS-B, 1,379 own pairs")])
def test_only_all_pairs_are_called_the_benchmark(part, n, name):
    assert Pairs(["a"] * n, ["b"] * n, np.zeros(n), part).name == name


# ---- where the files lie ---------------------------------------------------------------------------------

def content(part, n=2):
    return "\n".join(line("1", part, f"s{k}") for k in range(n)).encode() + b"\n"


def write_parts(folder, parts=PARTS, packed=()):
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        name = folder / f"sts-{part}.csv"
        if part in packed:
            name.with_name(f"{name.name}.gz").write_bytes(gzip.compress(content(part)))
        else:
            name.write_bytes(content(part))
    return folder


def check_parts(found, n=2):
    assert list(found) == ["train", "dev", "test"]
    for part, pairs in found.items():
        assert (pairs.part, pairs.first, len(pairs.scores)) == (part, [part] * n, n)


@pytest.fixture
def nowhere(monkeypatch):
    """The archive's checksum as given; nothing is there to be fetched."""
    def publish(data=b""):
        official = Official(ARCHIVE.name, "http://localhost:1/Stsbenchmark.tar.gz", None,
                            f"sha256:{hashlib.sha256(data).hexdigest()}")
        monkeypatch.setattr(sts, "ARCHIVE", official)
    monkeypatch.setenv("no_proxy", "*")
    publish()
    return publish


@pytest.mark.parametrize("below", ["", "stsbenchmark"])
@pytest.mark.parametrize("packed", [(), ("dev",), tuple(PARTS)], ids=str)
def test_the_three_files_are_found(tmp_path, nowhere, monkeypatch, below, packed):
    write_parts(tmp_path / below, packed=packed)
    check_parts(find_sts(tmp_path))
    monkeypatch.setenv("MINIGRAD_DATA", str(tmp_path))
    check_parts(find_sts())


@pytest.mark.parametrize("missing", PARTS)
def test_a_missing_part_is_named(tmp_path, nowhere, missing):
    write_parts(tmp_path / "sts", [part for part in PARTS if part != missing])
    with pytest.raises(DataError, match=f"sts-{missing}.csv is neither in .* nor one folder below, though ") as error:
        find_sts(tmp_path)
    one_line(error)


def test_nothing_there_says_what_to_put_where(tmp_path, nowhere):
    write_parts(tmp_path / "two/down")
    with pytest.raises(DataError) as error:
        find_sts(tmp_path, quiet=True)
    assert one_line(error) == (
        f"Stsbenchmark.tar.gz is neither in {tmp_path} nor one folder below and could not be fetched (Connection "
        f"refused): put Stsbenchmark.tar.gz from http://localhost:1/Stsbenchmark.tar.gz into {tmp_path}")


def test_a_wrong_line_of_one_of_three_files_is_not_replaced_by_the_archive(tmp_path, nowhere):
    write_parts(tmp_path)
    nowhere(write_archive(tmp_path / ARCHIVE.name).read_bytes())
    (tmp_path / "sts-dev.csv").write_bytes(b"x")
    with pytest.raises(DataError, match=r"sts-dev.csv, line 1: 1 columns"):
        find_sts(tmp_path)


# ---- the archive -----------------------------------------------------------------------------------------

def official_members(n=3):
    return {"stsbenchmark/": None, "stsbenchmark/readme.txt": b"read me", "stsbenchmark/LICENSE.txt": b"",
            **{f"stsbenchmark/sts-{part}.csv": content(part, n) for part in PARTS}, "stsbenchmark/correlation.pl": b"#"}


def tar_of(members):
    """The bytes of a tar of {name: bytes; None: a folder; (type, target): a link or a device}."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            if data is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(data, tuple):
                info.type, info.linkname = data
            else:
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return file.getvalue()


def write_archive(path, members=None, change=lambda tar: tar):
    path.write_bytes(gzip.compress(change(tar_of(official_members() if members is None else members)), 1, mtime=0))
    return path


def test_the_archive_is_checked_and_read_through(tmp_path, nowhere):
    (tmp_path / "sts").mkdir()
    path = write_archive(tmp_path / "sts" / ARCHIVE.name)
    with pytest.raises(DataError, match=r"its sha256 is [0-9a-f]{64}; that of the official Stsbenchmark") as error:
        find_sts(tmp_path)
    one_line(error)
    nowhere(path.read_bytes())
    check_parts(find_sts(tmp_path), 3)
    write_parts(tmp_path, ["dev"])
    check_parts(find_sts(tmp_path), 3)                           # the archive is whole, one file alone is not
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["Stsbenchmark.tar.gz", "sts", "sts-dev.csv"]


def test_the_published_checksum():
    assert ARCHIVE.checksum == "sha256:557a86abbd2b76ee6768d8b5103b659601a9d26b797898c7467812f303b21280"
    assert ARCHIVE.name == "Stsbenchmark.tar.gz"
    assert PARTS == {"train": 5749, "dev": 1500, "test": 1379}


def test_hostile_members_leave_nothing_on_the_disk(tmp_path, monkeypatch):
    """Of an archive only what is read counts: no path, link or device of it is ever followed."""
    secret = tmp_path / "secret"
    secret.write_bytes(content("stolen"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    path = write_archive(tmp_path / "a.tar.gz", {
        "../escaped.csv": b"x", "/tmp/minigrad-escaped": b"x", "a/sts-test.csv": (tarfile.SYMTYPE, str(secret)),
        "b/sts-test.csv": (tarfile.LNKTYPE, "../secret"), "c/sts-test.csv": (tarfile.CHRTYPE, ""),
        "d/sts-test.csv": (tarfile.FIFOTYPE, ""), "e/sts-test.csv/": None, **official_members(),
        "z/sts-.csv": b"x", "z/sts-other.csv": b"x", "z/test.csv": b"x", "z/sts-test.csv.bak": b"x", "z/sts-test": b"x",
        "z/test": b"x"})
    check_parts(read_archive(path), 3)
    assert list(work.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "secret", "work"]


@pytest.mark.parametrize("link", [
    (tarfile.SYMTYPE, "sts-dev.csv"), (tarfile.LNKTYPE, "stsbenchmark/sts-dev.csv"), None])
def test_a_link_is_no_part(tmp_path, link):
    path = write_archive(tmp_path / "a.tar.gz", {**official_members(), "stsbenchmark/sts-test.csv": link})
    with pytest.raises(DataError, match=r"a.tar.gz: holds no sts-test.csv"):
        read_archive(path)


def test_a_wrong_line_within_the_archive_is_named(tmp_path):
    path = write_archive(tmp_path / "a.tar.gz", {**official_members(), "stsbenchmark/sts-dev.csv": b"\nx\n"})
    with pytest.raises(DataError, match=r"a.tar.gz: stsbenchmark/sts-dev.csv, line 2: 1 columns") as error:
        read_archive(path)
    one_line(error)


@pytest.mark.parametrize("missing", PARTS)
def test_an_archive_without_a_part(tmp_path, missing):
    members = {name: data for name, data in official_members().items() if missing not in name}
    with pytest.raises(DataError, match=rf"a.tar.gz: holds no sts-{missing}.csv"):
        read_archive(write_archive(tmp_path / "a.tar.gz", members))


@pytest.mark.parametrize("share", [0, 0.02, 0.5, 0.95])
def test_a_truncated_archive_is_one_line(tmp_path, share):
    last = {"stsbenchmark/sts-test.csv": content("test", 4000)}
    path = write_archive(tmp_path / "a.tar.gz", {**official_members(), **last})
    packed = path.read_bytes()
    path.write_bytes(packed[:int(share * len(packed))])
    with pytest.raises(DataError, match=r"a.tar.gz: (damaged, or no .tar.gz file \(|holds no sts-)") as error:
        read_archive(path)
    one_line(error)


def test_any_damage_is_one_line_at_most(tmp_path):
    rng = np.random.default_rng(0)

    def flipped(tar):
        tar = bytearray(tar)
        for place in rng.integers(0, 6000, 3):
            tar[place] = rng.integers(256)
        return bytes(tar)

    for _ in range(60):
        path = write_archive(tmp_path / "a.tar.gz", change=flipped)
        with contextlib.suppress(DataError):
            read_archive(path)
    path.write_bytes(b"garbage" * 99)
    with pytest.raises(DataError, match=r"damaged, or no .tar.gz file"):
        read_archive(path)


# ---- the real files --------------------------------------------------------------------------------------

@pytest.mark.parametrize("part", PARTS)
def test_the_real_pairs(real_data, part):
    pairs = read_sts(real_data(f"sts-{part}.csv"), part)
    n = len(pairs.scores)
    assert n in (PARTS[part], {"train": 2999, "dev": 1000, "test": 879}[part])
    assert pairs.name == (f"STS-B {part}" if n == PARTS[part] else f"STS-B, {n:,} of {PARTS[part]:,} {part} pairs")
    assert len(pairs.first) == len(pairs.second) == n
    assert (pairs.scores.min(), pairs.scores.max()) == (0, 5)
    assert 2 < pairs.scores.mean() < 3.2
    assert not any("\t" in sentence or "\n" in sentence for sentence in [*pairs.first, *pairs.second])


def test_the_real_folder(real_data):
    found = find_sts(real_data("sts-test.csv").parent.parent)
    assert [len(pairs.scores) <= PARTS[part] for part, pairs in found.items()] == [True] * 3
