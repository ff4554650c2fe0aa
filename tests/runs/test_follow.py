from __future__ import annotations

import json
import os
from pathlib import Path

from tpunb.runs import directory, follow, heartbeat
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Bar, Metric, Output, Phase
from tpunb.runs.follow import Follower
from tpunb.runs.heartbeat import Heartbeat
from tpunb.runs.spec import PhaseKind
from tpunb.utils import files, processes


def test_follower_gives_everything_once_with_outputs_before_events(tmp_path: Path) -> None:
    run = directory.create_run(tmp_path, "x")
    follower = Follower(run, 2)
    assert list(follower.read()) == []
    for rank in (0, 1):
        run.attempt(0, rank).mkdir(parents=True)
        (run.attempt(0, rank) / "stdout.log").write_bytes("é".encode()[:1] if rank else b"hi\n")
    run.emit(Phase(PhaseKind.TRAINING, "training"))
    row = {"rank": 1, "attempt": 2, "step": 3, "time": 1.5, "reduce": {"loss": "max"}, "loss": 0.5}
    files.append_text(run.metrics, json.dumps(row) + "\n")
    output, metric, phase = follower.read()
    assert output == Output(0, "stdout", "hi\n")
    assert metric == Metric(1, 3, {"loss": 0.5}, {"loss": "max"}, 1.5, 2)
    assert isinstance(phase, Phase)
    assert phase.time > 0
    with open(run.attempt(0, 1) / "stdout.log", "ab") as file:
        file.write("é".encode()[1:])
    assert list(follower.read()) == [Output(1, "stdout", "é")]
    follower.close()


def test_sample_ranks_reads_heartbeats_progress_and_memory(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempt(1, 0).mkdir(parents=True)
    data = bytearray(heartbeat.SIZE)
    Heartbeat(1, 5, 4, 9, 3, 2, 1_500_000_000).pack_into(data)
    run.heartbeat(1, 0).write_bytes(data)
    run.progress(1, 0).write_text(
        '{"bars": [{"name": "epoch", "done": 1, "total": 3}], "samples": 64}'
    )
    first, other = follow.sample_ranks(run, 1, [os.getpid(), 2**22 + 1]).ranks
    assert other is None
    assert first is not None
    assert (first.begun, first.steps, first.collectives, first.waiting) == (True, 9, 4, True)
    assert (first.compiling, first.compilations, first.compile_seconds) == (True, 2, 1.5)
    assert (first.bars, first.samples) == ((Bar("epoch", 1, 3),), 64)
    assert 1_000_000 < first.memory < 10**12
    assert processes.resident_bytes(2**22 + 1) == 0
    # On another machine: what is said there.
    [there] = follow.sample_ranks(run, 1, [0]).ranks
    assert there is not None
    assert there.memory == 0
    run.memory(1, 0).write_text("1230000000\n")
    [there] = follow.sample_ranks(run, 1, [0]).ranks
    assert there is not None
    assert there.memory == 1_230_000_000
