from __future__ import annotations

from pathlib import Path

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
    assert compiles == Heartbeat(1, 1, 1, 3, 2, 1, 500, activity=4, tensors=7)
    assert compiles.compiling
    assert not compiles.waiting
    writer.flush()
    assert read_heartbeat(path) == Heartbeat(1, 1, 1, 5, 2, 2, 900, activity=6, tensors=9)


def test_heartbeat_file_reserves_its_disk_block(tmp_path: Path) -> None:
    """Otherwise the first write to the memory would end the rank (SIGBUS)."""
    HeartbeatWriter(tmp_path / "pulse", lambda: (0, 0, 0, 0, 0, 0))
    assert (tmp_path / "pulse").stat().st_blocks > 0
