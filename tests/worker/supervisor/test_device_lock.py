"""The device lock, among processes that take it, release it and die."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.kernel import ROOT
from tpunb.worker.supervisor import device_lock
from tpunb.worker.supervisor.device_lock import DeviceLock, RunDescription

TAKES = """
import sys
from pathlib import Path
from tpunb.worker.supervisor.device_lock import DeviceLock, RunDescription
lock = DeviceLock("chips", RunDescription(sys.argv[2], "", 0.0), Path(sys.argv[1]))
print("has" if lock.holder() is None else "waits", flush=True)
sys.stdin.readline()
"""


def run(name: object) -> RunDescription:
    return RunDescription(str(name), "2 CPU cores", 1.0)


def test_device_is_given_in_order_of_arrival(tmp_path: Path) -> None:
    first, second, third = (DeviceLock("chips", run(n), tmp_path) for n in range(3))
    other = DeviceLock("other", run(9), tmp_path)
    assert first.holder() is None
    assert other.holder() is None
    assert second.holder() == run(0)
    assert third.holder() == run(0)
    second.release()  # it was called off
    first.release()
    assert third.holder() is None
    late = DeviceLock("chips", run(3), tmp_path)
    assert late.holder() == run(2)
    third.release()
    assert late.holder() is None
    late.release()
    other.release()
    assert {path.name for path in tmp_path.iterdir()} == {"chips.lock", "other.lock"}


@pytest.mark.parametrize("written", ["", '{"run": "a', '{"run": "a", "later": 1}', "[" * 10_000])
def test_damaged_lock_ticket_still_counts(tmp_path: Path, written: str) -> None:
    """The disk was full when it was written, or another version wrote it."""
    first, second = (DeviceLock("chips", run(n), tmp_path) for n in range(2))
    (tmp_path / "chips.1").write_text(written)
    holder = second.holder()
    assert holder is not None
    assert str(tmp_path / "chips.1") in holder.cores
    first.release()
    assert second.holder() is None
    second.release()


@pytest.mark.usefixtures("starts_processes")
def test_lock_of_a_dead_process_is_released(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TAKES, str(tmp_path), "theirs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has\n"
        ours = DeviceLock("chips", run("ours"), tmp_path)
        assert ours.holder() == RunDescription("theirs", "", 0.0)
        process.kill()
        process.wait()
        assert ours.holder() is None
        ours.release()
    assert [path.name for path in tmp_path.iterdir()] == ["chips.lock"]


def test_lock_folder_is_private_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = device_lock.lock_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_uid == os.getuid()

    monkeypatch.setattr(device_lock, "Path", lambda text: tmp_path / Path(text).name)
    assert device_lock.lock_folder() == tmp_path / folder.name
    (tmp_path / folder.name).chmod(0o755)
    with pytest.raises(PermissionError, match="not a folder that belongs to this user alone"):
        device_lock.lock_folder()
    (tmp_path / folder.name).rmdir()
    (tmp_path / folder.name).symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        device_lock.lock_folder()


def test_deleted_lock_folder_ends_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tickets"
    folder.mkdir()
    first, second = (DeviceLock("chips", run(n), folder) for n in range(2))
    shutil.rmtree(folder)  # a cleaner of /tmp, while runs wait
    assert second.holder() is None
    second.release()
    first.release()


def test_suspended_process_holding_the_queue_does_not_block(tmp_path: Path) -> None:
    first = DeviceLock("chips", run("first"), tmp_path)
    with open(tmp_path / "chips.lock") as stopped:  # a process stopped with SIGSTOP at this point
        fcntl.flock(stopped, fcntl.LOCK_EX)
        ours = DeviceLock("chips", run("ours"), tmp_path)
        cancelled = DeviceLock("chips", run("cancelled"), tmp_path)
        with pytest.raises(BlockingIOError):
            ours.holder()
        cancelled.release()
        first.release()
    assert ours.holder() is None
    late = DeviceLock("chips", run("late"), tmp_path)
    assert late.holder() == run("ours")
    late.release()
    ours.release()
    assert [path.name for path in tmp_path.iterdir()] == ["chips.lock"]
