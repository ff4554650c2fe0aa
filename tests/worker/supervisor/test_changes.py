"""What tells the supervisor of changes in a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpunb.utils.descriptors import wait_readable
from tpunb.worker.supervisor.changes import Changes


def test_files_of_ranks_are_told_also_in_new_folders(tmp_path: Path) -> None:
    rank = tmp_path / "attempts/0/0"
    rank.mkdir(parents=True)
    changes = Changes(tmp_path)
    assert not changes.read()
    assert not changes.told
    (rank / "out.log").write_text("a line\n")
    assert wait_readable([changes.fd], 10) == {changes.fd}
    assert changes.read()
    assert changes.told
    retry = tmp_path / "attempts/1/0"
    retry.mkdir(parents=True)
    assert changes.read()
    assert not changes.read()
    (retry / "out.log").write_text("a line of the retry\n")
    assert changes.read()
    changes.close()
    assert not changes.read()


def test_without_inotify_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpunb.worker.supervisor import changes

    class NoInotify:
        def inotify_init1(self, flags: int) -> int:
            return -1

        def inotify_add_watch(self, fd: int, *_: object) -> int:
            return -1

    monkeypatch.setattr(changes, "_libc", NoInotify())
    found = Changes(tmp_path)
    (tmp_path / "out.log").touch()
    assert not found.read()
    assert not found.told
    found.close()
