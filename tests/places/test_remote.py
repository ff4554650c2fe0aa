"""The commands for hosts, run locally, also with malicious archives."""

from __future__ import annotations

import gzip
import inspect
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tpunb.places import remote


def call(*words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", inspect.getsource(remote), *words]
    return subprocess.run(command, input=given, capture_output=True, timeout=60)


def archive(*members: tarfile.TarInfo) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as made:
        for member in members:
            made.addfile(member, io.BytesIO(bytes(member.size)))
    return data.getvalue()


def member(name: str, **values: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    for key, value in values.items():
        setattr(made, key, value)
    return made


def receive(folder: Path, data: bytes, *words: str) -> subprocess.CompletedProcess[bytes]:
    return call("receive", str(folder), *words, given=data)


@pytest.mark.usefixtures("starts_processes")
def test_unpacked_files_belong_to_this_user(tmp_path: Path) -> None:
    data = archive(member("src/deep/a.py", size=3, uid=12345, gid=12345, mode=0o755))
    assert receive(tmp_path, data).returncode == 0
    assert b"another run with this id" in receive(tmp_path, data, "new").stderr
    arrived = tmp_path / "src/deep/a.py"
    assert arrived.read_bytes() == bytes(3)
    assert arrived.stat().st_uid == tmp_path.stat().st_uid
    assert arrived.stat().st_mode & 0o700 == 0o700


@pytest.mark.usefixtures("starts_processes")
def test_nothing_of_an_archive_that_is_cut_off_is_unpacked(tmp_path: Path) -> None:
    whole = gzip.compress(archive(member("a", size=9), member("b", size=100_000)))
    for data in (b"", whole[:-20]):
        assert receive(tmp_path, data).returncode == 1
        assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(
    "refused",
    [
        member("../outside", size=1),
        member("/outside", size=1),
        member("a/../../outside", size=1),
        member("link", type=tarfile.SYMTYPE, linkname="/etc"),
        member("hard", type=tarfile.LNKTYPE, linkname="first"),
        member("pipe", type=tarfile.FIFOTYPE),
    ],
    ids=lambda each: each.name,
)
def test_archive_with_outside_paths_is_refused(tmp_path: Path, refused: tarfile.TarInfo) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    done = receive(inside, archive(member("first", size=1), refused))
    assert done.returncode == 1
    assert f"{refused.name} is not a file or folder" in done.stderr.decode()
    assert list(inside.iterdir()) == []
    assert not (tmp_path / "outside").exists()


def test_archive_with_outside_paths_is_refused_without_tar_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    outside = io.BytesIO(archive(member("../outside", size=1)))
    with (
        tarfile.open(fileobj=outside) as made,
        pytest.raises(SystemExit, match=r"is not a file or folder inside"),
    ):
        remote.extract(made, str(tmp_path))
    with tarfile.open(fileobj=io.BytesIO(archive(member("a", size=1)))) as made:
        remote.extract(made, str(tmp_path))
    assert (tmp_path / "a").read_bytes() == b"\0"


@pytest.mark.usefixtures("starts_processes")
def test_packed_archive_contains_no_links(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/one").write_text("one")
    (tmp_path / "saved/same").hardlink_to(tmp_path / "saved/one")
    (tmp_path / "saved/latest").symlink_to("one")
    (tmp_path / "saved/removed").symlink_to("gone")
    done = call("pack", str(tmp_path), "saved")
    assert done.returncode == 0, done.stderr
    start = done.stdout.index(remote.ARCHIVE) + len(remote.ARCHIVE)
    with tarfile.open(fileobj=io.BytesIO(done.stdout[start:])) as made:
        found = {each.name: (each.isreg(), each.size) for each in made.getmembers()}
    assert found == dict.fromkeys(("saved/latest", "saved/one", "saved/same"), (True, 3))
