"""Write a run folder as many ranks would: a single process simulates all of them.

`python -m benchmarks.simulated FOLDER RANKS LINES SECONDS`: each rank prints LINES lines
a second, counts its steps, and reports its progress and its loss once a second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tpunb.runs import follow
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Phase, RankEnded, RanksStarted
from tpunb.runs.heartbeat import SIZE, Heartbeat
from tpunb.runs.spec import PhaseKind, RunState
from tpunb.utils.files import append_text, write_json

EVERY = 0.05
"""Seconds between two writes."""


def play(run: RunDir, ranks: int, lines: float, seconds: float) -> None:
    """Write what `ranks` ranks would for `seconds` seconds; then all succeed."""
    run.emit(Phase(PhaseKind.TRAINING, "training"))
    for rank in range(ranks):
        run.attempt(0, rank).mkdir(parents=True)
    run.emit(RanksStarted(0, (os.getpid(),) * ranks))
    for rank in range(ranks):
        for stream in follow.STREAMS:
            (run.attempt(0, rank) / f"{stream}.log").touch()
    logs = [(run.attempt(0, rank) / "stdout.log").open("ab", buffering=0) for rank in range(ranks)]
    pulse = bytearray(SIZE)
    began = time.monotonic()
    written, logged = 0, 0
    while (now := time.monotonic() - began) < seconds:
        due = int(now * lines)
        steps = int(now * 10)
        for rank, file in enumerate(logs):
            if due > written:
                text = "".join(
                    f"rank {rank} line {number:07d}: loss 0.123456, rate 0.001000\n"
                    for number in range(written, due)
                )
                file.write(text.encode())
            # The last rank is behind, so that the card has an outlier to show.
            Heartbeat(train=1, steps=max(0, steps - 5 * (rank == ranks - 1))).pack_into(pulse)
            run.heartbeat(0, rank).write_bytes(pulse)
        written = max(written, due)
        if now >= logged:
            logged += 1
            for rank in range(ranks):
                row = {"step": steps, "rank": rank, "time": time.time(), "loss": 1 / (1 + now)}
                append_text(run.metrics, json.dumps(row) + "\n")
                bars = [{"name": "step", "done": steps, "total": int(seconds * 10)}]
                write_json(run.progress(0, rank), {"bars": bars, "samples": 32 * steps})
        time.sleep(EVERY)
    for rank in range(ranks):
        run.emit(RankEnded(0, rank, 0))
    run.emit(Ended(RunState.SUCCEEDED))


if __name__ == "__main__":
    folder, ranks, lines, seconds = sys.argv[1:]
    play(RunDir(Path(folder)), int(ranks), float(lines), float(seconds))
