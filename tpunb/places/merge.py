"""Merges what several hosts send of one run into the local run folder.

The ranks' files are copied unchanged. Lines of `run.log` are sorted by time, corrected for the
hosts' clocks; an event that every host sends (`events.jsonl`) is written once.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tpunb.runs import events
from tpunb.runs.directory import RunDir
from tpunb.runs.events import (
    Ended,
    Event,
    Figure,
    Note,
    Phase,
    RankEnded,
    RanksStarted,
    Resumed,
    Stopping,
)
from tpunb.runs.spec import PhaseKind, RunSpec
from tpunb.runs.stream import MERGED, RESULT, Append, Replace, path_in_union
from tpunb.utils import files, records

HOLD = 0.5
"""Seconds that lines of `run.log` wait for older lines of other hosts."""
OFFSETS = "mirror.json"
"""File with the number of bytes received of each host's files, and the lengths of the merged files
with them. The next process that follows the run cuts the merged files to these lengths and
continues from there, so that every line is written once, however this process ends."""


class Merge:
    """Writes what the hosts send into the local run folder."""

    def __init__(
        self, run: RunDir, spec: RunSpec, skews: tuple[float, ...], *, again: bool = False
    ) -> None:
        """`again`: the run was followed before, by a process that is gone."""
        self._run = run
        self._spec = spec
        self._skews = skews or (0.0,) * len(spec.hosts)
        self.offsets: list[dict[str, int]] = [{} for _ in spec.hosts]
        """For each host, the number of bytes received of each file."""
        self._written: list[int] = [0] * len(spec.hosts)
        """For each host, how many bytes of its log are in run.log: lines wait for older ones."""
        self._lines: list[tuple[float, int, int, int, bytes]] = []
        """Waiting lines of run.log, a heap: time, number, host, offset of the line's end, line."""
        self._count = 0
        self._started: dict[int, set[int]] = {}
        """Hosts that have started their ranks, keyed by attempt."""
        self._seen: set[object] = set()
        """Events that were written already, with the number of attempts."""
        self.phase: PhaseKind | None = None
        """Latest phase of host 0."""
        self.problem = ""
        """Why something could not be written; '' if everything was written."""
        if again:
            self._restore()

    def _restore(self) -> None:
        """Restore the state and the merged files to the last saved offsets."""
        kept = records.read_dict(self._run.path / OFFSETS)
        lengths: Mapping[str, int] = {}
        try:
            lengths = records.convert(Mapping[str, int], kept["lengths"])
            offsets = records.convert(tuple[Mapping[str, int], ...], kept["offsets"])
            if len(offsets) == len(self._spec.hosts):
                self.offsets = [dict(each) for each in offsets]
        except (KeyError, ValueError):  # nothing was saved: everything is sent again
            lengths = {}
        log = self._run.log.name
        self._written = [offsets.get(log, 0) for offsets in self.offsets]
        for name in MERGED:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(self._run.path / name, lengths.get(name, 0))

    def save_offsets(self) -> None:
        """Save how much has been received and written."""
        lengths = {}
        for name in MERGED:
            with contextlib.suppress(FileNotFoundError):
                lengths[name] = (self._run.path / name).stat().st_size
        log = self._run.log.name
        offsets = [
            {**offsets, log: written} if log in offsets else offsets
            for offsets, written in zip(self.offsets, self._written, strict=True)
        ]
        with contextlib.suppress(OSError):  # a full disk: more is then sent again
            files.write_json(self._run.path / OFFSETS, {"offsets": offsets, "lengths": lengths})

    def add(self, host: int, line: Append | Replace, now: float) -> None:
        """Add a line that a host has sent; `now`: seconds since the epoch."""
        if isinstance(line, Append):
            known = self.offsets[host].get(line.file, 0)
            if line.at + len(line.data) <= known:
                return  # received before, over a connection that broke
            if line.at < known:
                line = replace(line, data=line.data[known - line.at :], at=known)
            self.offsets[host][line.file] = line.at + len(line.data)
        try:
            self._write(host, line, now)
        except OSError as error:
            self.problem = self.problem or f"{error.strerror or error} ({line.file})"

    def _write(self, host: int, line: Append | Replace, now: float) -> None:
        own = self._spec.ranks_on(host)
        place = self._run.path / path_in_union(line.file, host, own)
        if line.file in MERGED and isinstance(line, Append):
            if line.file == self._run.log.name:
                self._count += 1
                at = min(line.time - self._skews[host], now)
                end = line.at + len(line.data)
                heapq.heappush(self._lines, (at, self._count, host, end, line.data))
            elif line.file == self._run.events.name:
                for text in line.data.decode("utf-8", "replace").splitlines():
                    self._add_event(host, text)
            else:
                files.append_lines(place, line.data)
            return
        if line.file == RESULT and host == 0:
            place = self._run.path / "hosts" / "0" / RESULT  # the run's own is written at its end
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if isinstance(line, Replace):
            files.atomic_write(place, line.data)
            return
        fd = files.open_file(place, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(fd, line.data, line.at)
        finally:
            os.close(fd)

    def _add_event(self, host: int, text: str) -> None:
        try:
            event = events.from_line(text)
        except ValueError:  # cut off by a full disk on the host
            return
        if (merged := self._merged_event(host, event)) is not None:
            self._run.emit(merged)

    def _merged_event(self, host: int, event: Event) -> Event | None:
        """The event to write for an event of one host; None for none."""
        name = self._spec.hosts[host]
        match event:
            case RanksStarted(attempt):
                started = self._started.setdefault(attempt, set())
                started.add(host)
                if len(started) < len(self._spec.hosts):
                    return None
                # The hosts' pids mean nothing on this machine.
                return replace(event, pids=(0,) * self._spec.world_size)
            case RankEnded() | Figure():
                return event
            case Resumed():
                return self._once("resumed", event)
            case Stopping(step):
                return self._once(("stopping", step), event)
            case Note(text):
                told = event if host == 0 else replace(event, text=f"{name}: {text}")
                return self._once(text, told)
            case Phase(kind):
                self.phase = kind if host == 0 else self.phase
                ends = kind is PhaseKind.ENDED
                return None if ends else event if host == 0 else self._once(kind, event)
            case Ended():
                return None  # the mirror writes it once the result is written
        return None

    def _once(self, what: object, event: Event) -> Event | None:
        """The event, unless it was written in this attempt already."""
        key = (len(self._started), what)
        if key in self._seen:
            return None
        self._seen.add(key)
        return event

    def flush(self, now: float) -> None:
        """Write the lines of `run.log` that have waited long enough."""
        due = bytearray()
        # No line is from the future, unless the clock was set back since.
        while self._lines and not now - HOLD < self._lines[0][0] <= now:
            _, _, host, end, data = heapq.heappop(self._lines)
            self._written[host] = max(self._written[host], end)
            due += data
        if due:
            try:
                files.append_lines(self._run.log, bytes(due))
            except OSError as error:
                self.problem = self.problem or f"{error.strerror or error} (run.log)"

    def result_of(self, host: int) -> Path:
        """The path of a host's own result."""
        return self._run.path / "hosts" / str(host) / RESULT
