from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.data.archives import member, tarred, zipped
from tpunb.data import unpack_archive
from tpunb.errors import DataError


def unpacked(content: bytes, name: str, folder: Path) -> dict[str, bytes]:
    archive = folder / name
    archive.write_bytes(content)
    (folder / "out").mkdir(exist_ok=True)
    unpack_archive(archive, name, folder / "out")
    return {
        str(path.relative_to(folder / "out")): path.read_bytes()
        for path in (folder / "out").rglob("*")
        if path.is_file()
    }


def linked_zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        info = zipfile.ZipInfo("link")
        info.external_attr = 0o120777 << 16
        file.writestr(info, "/etc/passwd")
    return made.getvalue()


def plain(name: str) -> bytes:
    return tarred((member(name), b"x"))


def test_both_kinds(tmp_path: Path) -> None:
    assert unpacked(zipped(**{"a/b.txt": b"1", "c": b"2"}), "x.zip", tmp_path) == {
        "a/b.txt": b"1",
        "c": b"2",
    }
    content = tarred((member("d", tarfile.DIRTYPE), b""), (member("./d/e.txt"), b"3"))
    assert unpacked(content, "x.tar.gz", tmp_path)["d/e.txt"] == b"3"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="each Python from 3.12 on has filters")
def test_a_python_without_filters_for_tar_archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before 3.10.12 and 3.11.4."""
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    content = tarred((member("d", tarfile.DIRTYPE), b""), (member("d/e.txt"), b"3"))
    assert unpacked(content, "x.tar.gz", tmp_path)["d/e.txt"] == b"3"
    with pytest.raises(DataError, match="leads out of the folder"):
        unpacked(plain("../evil"), "x.tar.gz", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.zip", zipped(**{"../../evil": b"x"}), "leads out of the folder"),
        ("x.zip", zipped(**{"/evil": b"x"}), "leads out of the folder"),
        ("x.zip", zipped(**{"a\\..\\evil": b"x"}), "leads out of the folder"),
        ("x.zip", linked_zip(), "is a link"),
        ("x.tar.gz", plain("../evil"), "leads out of the folder"),
        ("x.tar.gz", plain("/evil"), "leads out of the folder"),
        ("x.tar.gz", plain("a/../../evil"), "leads out of the folder"),
        ("x.tar.gz", tarred((member("l", tarfile.SYMTYPE, "/etc"), b"")), "is a link or a device"),
        ("x.tar.gz", tarred((member("l", tarfile.LNKTYPE, "x"), b"")), "is a link or a device"),
        ("x.tar.gz", tarred((member("p", tarfile.FIFOTYPE), b"")), "is a link or a device"),
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


@pytest.mark.parametrize("name", ["x.zip", "x.tar.gz"])
def test_a_bomb_finds_no_room(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(20_000_000)
    packed = zipped(a=content) if name == "x.zip" else tarred((member("a"), content))
    assert len(packed) < 100_000
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1_000_000}))
    with pytest.raises(
        DataError, match=rf"unpacking {name} needs 20 MB, but .* has only 1.0 MB free"
    ):
        unpacked(packed, name, tmp_path)
    assert not list((tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("name", [".tpunb-data/0123456789ab.part", "a/.TPUNB-data/record.json"])
def test_nothing_is_put_where_downloads_begin(name: str, tmp_path: Path) -> None:
    for archive, content in (("x.zip", zipped(**{name: b"x"})), ("x.tar", plain(name))):
        with pytest.raises(DataError, match="is where tpunb keeps its own files"):
            unpacked(content, archive, tmp_path)
