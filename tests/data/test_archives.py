from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.data.archives import member, tarred, zipped
from tpunb.data import unpack_archive
from tpunb.errors import DataError


def unpacked(content: bytes, name: str, folder: Path) -> dict[str, bytes]:
    archive = folder / name
    archive.write_bytes(content)
    unpack_archive(archive, folder / "out")
    return {
        str(path.relative_to(folder / "out")): path.read_bytes()
        for path in (folder / "out").rglob("*")
        if path.is_file()
    }


def plain(name: str) -> bytes:
    return tarred((member(name), b"x"))


def test_both_kinds(tmp_path: Path) -> None:
    assert unpacked(zipped(**{"a/b.txt": b"1", "c": b"2"}), "x.zip", tmp_path) == {
        "a/b.txt": b"1",
        "c": b"2",
    }
    content = tarred((member("d", tarfile.DIRTYPE), b""), (member("./d/e.txt"), b"3"))
    assert unpacked(content, "x.tar.gz", tmp_path)["d/e.txt"] == b"3"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.zip", zipped(**{"../../evil": b"x"}), "leads out of the folder"),
        ("x.zip", zipped(**{"/evil": b"x"}), "leads out of the folder"),
        ("x.zip", zipped(**{"a\\..\\evil": b"x"}), "leads out of the folder"),
        ("x.tar.gz", plain("../evil"), "is outside the destination"),
        ("x.tar.gz", plain("a/../../evil"), "is outside the destination"),
        ("x.tar.gz", tarred((member("l", tarfile.SYMTYPE, "/etc"), b"")), "to an absolute path"),
        ("x.tar.gz", tarred((member("l", tarfile.LNKTYPE, "x"), b"")), "is broken or not an arch"),
        ("x.tar.gz", tarred((member("p", tarfile.FIFOTYPE), b"")), "is a special file"),
        ("x.zip", b"no zip", "is broken or not an archive"),
        ("x.tar.gz", b"no tar", "is broken or not an archive"),
        ("x.zip", zipped(a=bytes(range(256)) * 20)[:-40], "is broken or not an archive"),
        ("x.tar.gz", tarred((member("a"), bytes(range(256)) * 99))[:-200], "is broken or not"),
    ],
)
def test_what_is_not_unpacked(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    inner = tmp_path / "in/ner"
    inner.mkdir(parents=True)
    with pytest.raises(DataError, match=words):
        unpacked(content, name, inner)
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    left = set() if "broken" in words else {inner / name}
    assert {path for path in written if inner / "out" not in path.parents} == left


def test_an_absolute_name_of_a_tar_archive_is_one_in_the_folder(tmp_path: Path) -> None:
    assert unpacked(plain("/evil"), "x.tar.gz", tmp_path) == {"evil": b"x"}
