"""The run folder: where everything about a run is, and how it is written and followed.

    <runs>/<yyyymmdd-hhmmss>-<name>/
      spec.json  script.py  notebook.json  env.json       what was run
      events.jsonl                                        what happened (tpunb.events)
      run.log                                             all ranks, prefixed, in order of arrival
      attempts/<n>/<rank>/{stdout.log,stderr.log,prelude.log,error.json,
                          stacks.txt,crash.txt,pulse}
      attempts/<n>/prelude/{prelude.log,error.json}       the prelude that ran once for all ranks
      metrics.jsonl  checkpoints/  returns/               what it made
      running.lock  result.json                           whether it goes on; how it ended
      requests.jsonl                                      what others ask of it (tpunb.control)

Processes of a run only append to files here, and the kernel only reads: nothing that a
reader does can slow or block a rank.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpunb import events, records
from tpunb.errors import TpunbError
from tpunb.events import Event, Metric, Output
from tpunb.models import RunResult, RunSpec

PRELUDE = "prelude"
"""Name of the folder, in the place of a rank, for the prelude that runs once for all."""
ROOM = 1 << 16
"""Bytes that are set aside for a file that must be written even when the disk is full."""
_libc = ctypes.CDLL(None)
STREAMS = ("stdout", "stderr", PRELUDE)


class RunDir:
    """The paths of one run folder, and the files that more than one module reads or writes."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def script(self) -> Path:
        return self.path / "script.py"

    @property
    def snapshot(self) -> Path:
        return self.path / "notebook.json"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def lock(self) -> Path:
        return self.path / "running.lock"

    @property
    def stopping(self) -> Path:
        """There once the run is being stopped, so that its ranks are not started again."""
        return self.path / "stopping"

    @property
    def requests(self) -> Path:
        return self.path / "requests.jsonl"

    def is_running(self) -> bool:
        """Whether a guard watches over this run now. It holds a lock for as long as it lives."""
        try:
            with open(self.lock) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def returns(self) -> Path:
        return self.path / "returns"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def attempt(self, attempt: int, rank: int | None) -> Path:
        """The folder of a rank in an attempt; rank None: of the prelude that runs for all."""
        return self.path / "attempts" / str(attempt) / (PRELUDE if rank is None else str(rank))

    def error(self, attempt: int, rank: int | None) -> Path:
        """Where a process describes the exception that ended it."""
        return self.attempt(attempt, rank) / "error.json"

    def pulse(self, attempt: int, rank: int) -> Path:
        """Where a rank counts its signs of life (tpunb.worker.pulse)."""
        return self.attempt(attempt, rank) / "pulse"

    def collectives(self, attempt: int, rank: int) -> Path:
        """Where a rehearsal rank leaves word of its collectives (tpunb.worker.rehearsal.tally)."""
        return self.attempt(attempt, rank) / "collectives.json"

    def progress(self, attempt: int, rank: int) -> Path:
        """Where a rank says how far its loops have come (tpunb.training.track)."""
        return self.attempt(attempt, rank) / "progress.json"

    def saving(self, attempt: int, rank: int) -> Path:
        """Where a rank notes the seconds of each of its checkpoints (tpunb.training.timing)."""
        return self.attempt(attempt, rank) / "saving.txt"

    def recompiled(self, attempt: int, rank: int) -> Path:
        """Where a rank tells of programs that were compiled again (tpunb.worker.marks)."""
        return self.attempt(attempt, rank) / "recompiled.jsonl"

    def stacks(self, attempt: int, rank: int) -> Path:
        """Where a rank writes its stacks when it is asked to."""
        return self.attempt(attempt, rank) / "stacks.txt"

    def emit(self, event: Event) -> None:
        """Append an event, with the time if it has none."""
        line = events.to_line(event)
        if not getattr(event, "time", 1.0):
            line = line.replace('"time": 0.0', f'"time": {time.time()}', 1)
        append(self.events, line)

    def read_spec(self) -> RunSpec:
        return RunSpec.from_json(json.loads(self.spec.read_text(encoding="utf-8")))

    def read_result(self) -> RunResult | None:
        """The result as far as files say it (without values of returns); None if not ended."""
        if not self.result.exists():
            return None
        return RunResult.from_json(json.loads(self.result.read_text(encoding="utf-8")), self.path)

    def write_result(self, result: RunResult) -> None:
        write_json(self.result, result.to_json())


def create(runs: Path, name: str) -> RunDir:
    """Make a new run folder that only its user can read, with a unique id.

    Raises TpunbError if the folder cannot be written.
    """
    safe = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "run"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            path = runs / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            return RunDir(path)
    except OSError as error:
        raise TpunbError(
            f"cannot make a run folder in {runs}: {error.strerror}. "
            "Choose another place with `%tpu_setup --runs DIR`."
        ) from error
    raise TpunbError(f"there are already 1000 runs called {stem} in {runs}")


def runs_in(runs: Path) -> list[RunDir]:
    """All runs in a folder, oldest first. Only folders that hold a spec count."""
    if not runs.is_dir():
        return []
    found = [RunDir(path.parent) for path in runs.glob("*/spec.json")]
    return sorted(found, key=lambda run: (run.spec.stat().st_mtime_ns, run.id))


def find(runs: Path, wanted: str | None) -> RunDir:
    """The run whose id contains `wanted`; the latest for None.

    Raises TpunbError, with the ids, if there is none or more than one.
    """
    every = runs_in(runs)
    if not every:
        raise TpunbError(f"there are no runs in {runs}")
    if wanted is None:
        return every[-1]
    matches = [run for run in every if run.id == wanted] or [r for r in every if wanted in r.id]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        known = ", ".join(run.id for run in every[-5:])
        raise TpunbError(f"no run in {runs} has {wanted!r} in its id; the latest are: {known}")
    raise TpunbError(f"{wanted!r} fits several runs: {', '.join(run.id for run in matches[-5:])}")


def append(path: Path, text: str) -> None:
    """Append with a single write, so that lines of several processes never mix."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode("utf-8", "replace"))
    finally:
        os.close(fd)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file that is whole whenever it exists.

    Into the room that `keep_room` has kept for it, if it has: then also on a full disk.
    """
    text = (json.dumps(data, indent=1) + "\n").encode("utf-8", "replace")
    try:
        handle, name = os.open(_room(path), os.O_WRONLY | os.O_CLOEXEC), str(_room(path))
    except FileNotFoundError:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    os.replace(name, path)


def keep_room(path: Path, *, appended: bool = False) -> None:
    """Have the file system set blocks aside for a file that must be written in the end.

    Either for `write_json`, or for what is `appended`. Where it cannot (the disk is full
    already, or the file system does not know how), nothing is kept.
    """
    file = path if appended else _room(path)
    fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # os.posix_fallocate would make the file longer; the 1 is FALLOC_FL_KEEP_SIZE.
        _libc.fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(ROOM))
    finally:
        os.close(fd)


def give_up_room(path: Path) -> None:
    """What was kept for a file that is not needed."""
    _room(path).unlink(missing_ok=True)


def _room(path: Path) -> Path:
    return path.with_name(f".{path.name}.room")


class Tail:
    """Follows a file that others append to: `read` gives what is new, as bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._fd: int | None = None

    def read(self, most: int = 4_000_000) -> bytes:
        """What was appended since the last call, at most `most` bytes; b'' if nothing."""
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
        data = os.pread(self._fd, most, self.offset)
        self.offset += len(data)
        return data

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LineTail:
    """Follows a file of lines: `read` gives the whole lines that are new."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._rest = b""

    def read(self) -> list[str]:
        data = self._rest + self._tail.read()
        *lines, self._rest = data.split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines if line]

    def close(self) -> None:
        self._tail.close()


class Outputs:
    """Follows what the processes of a run write, as Output events.

    Bytes that are not UTF-8 are shown as replacement characters; a character that is split
    between two reads is not.
    """

    def __init__(self, run: RunDir, ranks: int) -> None:
        import codecs

        self._run = run
        self._ranks = ranks
        self._attempt = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")
        self._tails: list[tuple[int | None, str, Tail, codecs.IncrementalDecoder]] = []
        self._add()

    def _add(self) -> None:
        sources: list[tuple[int | None, str]] = [(None, PRELUDE)]
        sources += [(rank, stream) for rank in range(self._ranks) for stream in STREAMS]
        for rank, stream in sources:
            path = self._run.attempt(self._attempt, rank) / f"{stream}.log"
            self._tails.append((rank, stream, Tail(path), self._decoder("replace")))

    def read(self) -> list[Output]:
        """What is new, in the order of ranks; empty if nothing is."""
        if self._run.attempt(self._attempt + 1, 0).parent.exists():
            self._attempt += 1
            self._add()
        found = []
        for rank, stream, tail, decoder in self._tails:
            data = tail.read()
            if data and (text := decoder.decode(data)):
                found.append(Output(rank, stream, text))
        return found

    def close(self) -> None:
        for _, _, tail, _ in self._tails:
            tail.close()


class Follower:
    """Follows a run from its start: kept events, metrics and outputs, as they come."""

    def __init__(self, run: RunDir, ranks: int) -> None:
        self._events = LineTail(run.events)
        self._metrics = LineTail(run.metrics)
        self._outputs = Outputs(run, ranks)

    def read(self) -> Iterator[Event]:
        """What is new. Outputs come before the events that were read with them."""
        kept = [events.from_line(line) for line in self._events.read()]
        yield from self._outputs.read()
        for line in self._metrics.read():
            data = json.loads(line)
            yield Metric(
                data["rank"], data.get("step"), records.metrics_of(data), data.get("reduce", {}),
                data["time"], data.get("attempt", 0),
            )  # fmt: skip
        yield from kept

    def close(self) -> None:
        self._events.close()
        self._metrics.close()
        self._outputs.close()
