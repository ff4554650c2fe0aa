from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.data.support import files, zipped
from tpunb.data import _unpack


def tarred(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    made, info = io.BytesIO(), tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    with tarfile.open(fileobj=made, mode="w:gz") as file:
        file.addfile(info)
    return made.getvalue()


def test_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(zipped(**{"a/b.txt": b"1", "c..d": b"2", "../../e": b"3"}))
    _unpack(tmp_path / "x.zip", tmp_path / "out")
    assert files(tmp_path / "out") == {"a/b.txt": b"1", "c..d": b"2", "e": b"3"}
    (tmp_path / "x.tar.gz").write_bytes(tarred("/d/e.txt"))
    _unpack(tmp_path / "x.tar.gz", tmp_path / "out")
    assert files(tmp_path / "out") == {"d/e.txt": b""}


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("x.tar.gz", tarred("a/../../evil"), tarfile.OutsideDestinationError),
        ("x.tar.gz", tarred("l", tarfile.SYMTYPE, "/etc"), tarfile.AbsoluteLinkError),
        ("x.tar.gz", tarred("l", tarfile.SYMTYPE, ".."), tarfile.LinkOutsideDestinationError),
        ("x.tar.gz", tarred("p", tarfile.FIFOTYPE), tarfile.SpecialFileError),
    ],
)
def test_what_leads_out(name: str, content: bytes, error: type, tmp_path: Path) -> None:
    inner = tmp_path / "in/ner"
    inner.mkdir(parents=True)
    (inner / name).write_bytes(content)
    with pytest.raises(error):
        _unpack(inner / name, inner / "out")
    assert files(tmp_path) == {f"in/ner/{name}": content}
