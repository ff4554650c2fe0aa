"""Follow a run from another process: its outputs, events and metrics, and its ranks' state.

Everything is read from the run folder and /proc, so following cannot slow or block a rank.
"""

from __future__ import annotations

import codecs
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from tpunb.runs import events, heartbeat, metrics
from tpunb.runs.callbacks import RunCallbacks
from tpunb.runs.chips import read_chips
from tpunb.runs.directory import PRELUDE, RunDir
from tpunb.runs.events import (
    Ended,
    Event,
    Metric,
    Note,
    Output,
    RankSnapshot,
    RankSnapshots,
    RanksStarted,
)
from tpunb.runs.progress import Progress
from tpunb.runs.spec import RunSpec
from tpunb.runs.tensorboard import TensorBoardWriter
from tpunb.utils import processes, records
from tpunb.utils.files import LineTail, Tail
from tpunb.utils.text import size

STREAMS = ("stdout", "stderr", PRELUDE)
POLL_INTERVAL = 0.04
"""Seconds between two reads of the run folder: fast enough for people, and cheap."""
EAGER = 1.0
"""Seconds after a start in which it reads four times as often, because the first line is urgent."""
OLD_OUTPUT, OLD_METRICS = 1_000_000, 10_000_000
"""Bytes of each stream of a rank, and of all metrics, that are read on attaching: a second."""
SAMPLES = 0.5
"""Seconds between two samples of the ranks' state."""


class Outputs:
    """Follows the output of a run's processes, as Output events.

    Bytes that are not UTF-8 become replacement characters; a character that is split between two
    reads is put together.
    """

    def __init__(self, run: RunDir, ranks: Iterable[int]) -> None:
        self._run = run
        self._ranks = tuple(ranks)
        self._attempt = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")
        self._tails: list[tuple[int | None, str, Tail, codecs.IncrementalDecoder]] = []
        self._add()

    def _add(self) -> None:
        sources: list[tuple[int | None, str]] = [(None, PRELUDE)]
        sources += [(rank, stream) for rank in self._ranks for stream in STREAMS]
        for rank, stream in sources:
            path = self._run.attempt(self._attempt, rank) / f"{stream}.log"
            self._tails.append((rank, stream, Tail(path), self._decoder("replace")))

    def read(self) -> list[Output]:
        """Return the new output in order of rank; [] if there is none."""
        outputs = self._read_all()
        if not outputs and self._run.attempt(self._attempt + 1, 0).parent.exists():
            # The ranks of the attempt before have ended, and all their output was read.
            self.close()
            self._attempt += 1
            self._add()
            outputs = self._read_all()
        return outputs

    def _read_all(self) -> list[Output]:
        outputs = []
        for rank, stream, tail, decoder in self._tails:
            data = tail.read()
            if data and (text := decoder.decode(data)):
                outputs.append(Output(rank, stream, text))
        return outputs

    def skip_to_end(self, kept: int) -> int:
        """Skip all but the last `kept` bytes of each file; return the number of bytes skipped."""
        return sum(tail.skip_to_end(kept) for _, _, tail, _ in self._tails)

    def close(self) -> None:
        for _, _, tail, _ in self._tails:
            tail.close()
        self._tails.clear()


class Follower:
    """Follows a run from its start: kept events, metrics and outputs, as they are written."""

    def __init__(self, run: RunDir, ranks: int) -> None:
        self._events = LineTail(run.events)
        self._metrics = LineTail(run.metrics)
        self._outputs = Outputs(run, range(ranks))
        self.unreadable: Counter[str] = Counter()
        """The number of lines left out because they cannot be parsed, by file."""
        self.metrics_left_out = 0
        """The number of bytes of metrics left out."""

    def read(self) -> Iterator[Event]:
        """Yield the new events, outputs before kept events that were read at the same time."""
        kept = [event for line in self._events.read() if (event := self._event(line))]
        yield from self._outputs.read()
        for line in self._metrics.read():
            if (row := metrics.parse_row(line)) is not None:
                yield metrics.to_event(row)
            else:
                self.unreadable["metrics.jsonl"] += 1
        yield from kept

    def skip_old(self) -> str:
        """Skip output and metrics that are too much to show at once; describe them, '' for none."""
        outputs = self._outputs.skip_to_end(OLD_OUTPUT)
        self.metrics_left_out = self._metrics.skip_to_end(OLD_METRICS)
        what = [f"{size(outputs)} of output"] * (outputs > 0)
        what += [f"{size(self.metrics_left_out)} of metrics"] * (self.metrics_left_out > 0)
        return " and ".join(what)

    def _event(self, line: str) -> Event | None:
        try:
            return events.from_line(line)
        except ValueError:
            self.unreadable["events.jsonl"] += 1
            return None

    def close(self) -> None:
        self._events.close()
        self._metrics.close()
        self._outputs.close()


def follow_run(
    run: RunDir, spec: RunSpec, gone: Callable[[], bool], *, attached: bool = False
) -> Iterator[Event | None]:
    """Yield the events of a run from its start, None whenever nothing happened, last `Ended`.

    `gone` is called before each read: if it returns True, nothing more will be written, and the
    iteration ends without `Ended` once everything was read. TensorBoard's file is written, and
    metrics are passed on to `tpunb.on_log`. `attached`: skip all but the newest output and metrics
    of a run that has written much.
    """
    ranks = spec.world_size
    follower, tensorboard = Follower(run, ranks), TensorBoardWriter(run, ranks)
    callbacks = RunCallbacks(run, ranks)
    started: RanksStarted | None = None
    looked, eager = 0.0, time.monotonic() + EAGER
    try:
        if attached and (left_out := follower.skip_old()):
            yield Note(f"the first {left_out} are not shown; everything is in {run.path}")
        end: Event | None = None
        while True:
            last = gone()  # called before the files are read, so that the last data is read below
            anything = False
            for event in follower.read():
                anything = True
                if isinstance(event, Ended):
                    end = event
                    continue
                if isinstance(event, RanksStarted):
                    started, looked, eager = event, 0.0, time.monotonic() + EAGER
                if isinstance(event, Metric) and not follower.metrics_left_out:
                    tensorboard.add(event)
                    callbacks.add(event)
                yield event
            if started is not None and end is None and time.monotonic() - looked >= SAMPLES:
                snapshots = sample_ranks(run, started.attempt, started.pids)
                yield replace(snapshots, chips=read_chips(run.path, spec.hosts))
                looked = time.monotonic()
            if not anything and (end is not None or last):
                for name, count in follower.unreadable.items():
                    lines = "1 line" if count == 1 else f"{count:,} lines"
                    yield Note(f"{lines} of {name} cannot be read: incomplete or edited")
            if not anything and end is not None:
                if tensorboard.problem:
                    yield Note(f"TensorBoard's file is not complete: {tensorboard.problem}")
                callbacks.finish()
                if callbacks.problem:
                    yield Note(callbacks.problem)
                yield end
                return
            if not anything and last:
                return
            if not anything or end is None:
                yield None
                time.sleep(POLL_INTERVAL / 4 if time.monotonic() < eager else POLL_INTERVAL)
    finally:
        tensorboard.close()
        callbacks.close()
        follower.close()


def sample_ranks(run: RunDir, attempt: int, pids: Sequence[int]) -> RankSnapshots:
    """Read the current heartbeats, progress and memory of an attempt's ranks."""
    return RankSnapshots(
        tuple(_sample_rank(run, attempt, rank, pid) for rank, pid in enumerate(pids))
    )


def _sample_rank(run: RunDir, attempt: int, rank: int, pid: int) -> RankSnapshot | None:
    heartbeat_file, progress_file, memory_file = _paths(run.path, attempt, rank)
    last = heartbeat.read_heartbeat(heartbeat_file)
    if last is None:
        return None
    progress = _read_progress(progress_file)
    return RankSnapshot(
        begun=bool(last.train),
        steps=last.steps,
        collectives=last.collectives_ended,
        waiting=last.waiting,
        compiling=last.compiling,
        compilations=last.compilations_ended,
        compile_seconds=last.compile_nanoseconds / 1e9,
        memory=processes.resident_bytes(pid) if pid else _read_memory(memory_file),
        bars=progress.bars,
        samples=progress.samples,
        input_seconds=last.input_nanoseconds / 1e9,
    )


@lru_cache(maxsize=1024)
def _paths(folder: Path, attempt: int, rank: int) -> tuple[str, str, str]:
    """Paths of a rank's files; cached, because with many ranks they take longer than reading."""
    run = RunDir(folder)
    files = (run.heartbeat, run.progress, run.memory)
    heartbeat_file, progress_file, memory_file = (str(file(attempt, rank)) for file in files)
    return heartbeat_file, progress_file, memory_file


def _read_progress(path: str) -> Progress:
    try:
        return records.build(Progress, records.read(path))
    except (OSError, ValueError):  # it does not exist, or a crash has left half of it
        return Progress()


def _read_memory(path: str) -> int:
    """Read the bytes of memory that another machine reported for its rank; 0 before it has."""
    try:
        reported: int = records.convert(int, records.read(path))
        return reported
    except (OSError, ValueError):
        return 0
