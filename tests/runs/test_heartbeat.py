from __future__ import annotations

from pathlib import Path

import pytest

from tpunb.runs.heartbeat import Heartbeat, HeartbeatWriter, read_heartbeat


def test_heartbeat_counters_are_readable_at_once(tmp_path: Path) -> None:
    counts = [(3, 2, 1, 500, 4, 7), (5, 2, 2, 900, 6, 9)]
    path = tmp_path / "pulse"
    assert read_heartbeat(path) is None
    writer = HeartbeatWriter(path, lambda: counts.pop(0))
    assert read_heartbeat(path) == Heartbeat()
    writer.begin_training()
    with writer.collective():
        waits = read_heartbeat(path)
    assert waits is not None
    assert waits.waiting
    writer.flush()
    compiles = read_heartbeat(path)
    assert compiles == Heartbeat(1, 1, 1, 3, 2, 1, 500, activity=4, on_device=7)
    assert compiles.compiling
    assert not compiles.waiting
    writer.flush()
    assert read_heartbeat(path) == Heartbeat(1, 1, 1, 5, 2, 2, 900, activity=6, on_device=9)


def test_heartbeat_counts_a_failed_write_as_ended(tmp_path: Path) -> None:
    """Otherwise its run would never be called hung."""
    path = tmp_path / "pulse"
    writer = HeartbeatWriter(path, lambda: (0, 0, 0, 0, 0, 0))
    during: list[Heartbeat | None] = []

    def write() -> None:
        with writer.storing():
            during.append(read_heartbeat(path))
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write()
    assert [beat is not None and beat.writing for beat in during] == [True]
    assert read_heartbeat(path) == Heartbeat(writes_begun=1, writes_ended=1)


def test_heartbeat_file_reserves_its_disk_block(tmp_path: Path) -> None:
    """Otherwise the first write to the memory would end the rank (SIGBUS)."""
    HeartbeatWriter(tmp_path / "pulse", lambda: (0, 0, 0, 0, 0, 0))
    assert (tmp_path / "pulse").stat().st_blocks > 0
