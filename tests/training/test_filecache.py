"""`FileCache`: the same bytes, read once, shared."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from tpunb.errors import DataError
from tpunb.training import FileCache, filecache


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "data" / f"{number}.bin" for number in range(30)]
    made[0].parent.mkdir()
    for number, path in enumerate(made):
        path.write_bytes(os.urandom(number * 7))  # the first is empty
    return made


def same(cache: FileCache, files: list[Path]) -> None:
    assert list(cache) == [str(path) for path in files]
    assert len(cache) == len(files)
    for path in files:
        assert bytes(cache[path]) == path.read_bytes() == cache.open(str(path)).read()
    assert cache.size == sum(path.stat().st_size for path in files)


def test_the_same_bytes(files: list[Path], tmp_path: Path) -> None:
    cache = FileCache(files, folder=tmp_path / "cache")
    same(cache, files)
    same(pickle.loads(pickle.dumps(cache)), files)
    with pytest.raises(KeyError):
        cache["other"]
    with pytest.raises(TypeError, match="read-only"):
        cache[files[5]][0] = 1
    cache.remove()
    assert list((tmp_path / "cache").iterdir()) == []
    same(cache, files)  # who has it keeps it


def test_the_next_run_has_it_and_a_change_makes_another(files: list[Path], tmp_path: Path) -> None:
    first = FileCache(files, folder=tmp_path / "cache")
    made = first.path.stat()
    again = FileCache(files, folder=tmp_path / "cache")
    assert (again.path, again.path.stat().st_ino) == (first.path, made.st_ino)
    files[3].write_bytes(b"other")
    changed = FileCache(files, folder=tmp_path / "cache")
    assert changed.path != first.path
    same(changed, files)


def opened(files: list[Path], folder: Path, queue: Any) -> None:
    cache = FileCache(files, folder=folder)
    queue.put((cache.path.stat().st_ino, bytes(cache[files[-1]])))


def test_processes_that_come_together_make_one(files: list[Path], tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    started = [
        context.Process(target=opened, args=(files, tmp_path / "cache", queue)) for _ in range(4)
    ]
    for process in started:
        process.start()
    found = {queue.get(timeout=60) for _ in started}
    for process in started:
        process.join()
    ((_, content),) = found
    assert content == files[-1].read_bytes()
    kept = [path.name for path in (tmp_path / "cache").iterdir()]
    assert sorted(name.rpartition(".")[2] == "lock" for name in kept) == [False, True]


def test_it_lies_where_there_is_room(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ram, disk = tmp_path / "ram", tmp_path / "disk"
    ram.mkdir()
    disk.mkdir()
    monkeypatch.setattr(filecache, "RAM", ram)
    monkeypatch.setattr(filecache.tempfile, "gettempdir", lambda: str(disk))
    assert FileCache(files).path.parent == ram
    monkeypatch.setattr(filecache, "_SPARE", 0.0)
    assert FileCache(files).path.parent == disk
    monkeypatch.setattr(filecache, "RAM", tmp_path / "none")
    assert FileCache(files).path.parent == disk


def test_what_cannot_be_read_or_written_is_told(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.bin: No such file"):
        FileCache([*files, tmp_path / "gone.bin"])
    with pytest.raises(DataError, match=r"cannot write 0 MB to .*folder="):
        FileCache(files, folder=files[0])
    assert len(FileCache([], folder=tmp_path / "cache")) == 0
