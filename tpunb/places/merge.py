"""What several hosts say of one run, put together in its folder here.

The files of ranks are copied as they are. Lines of `run.log` are put in order of time, by clocks
that are set right first; of what every host tells (`events.jsonl`), each thing is told once.
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
from tpunb.runs.events import Ended, Event, Note, Phase, RankEnded, RanksStarted, Stopping
from tpunb.runs.spec import PhaseKind, RunSpec
from tpunb.runs.stream import MERGED, RESULT, Append, Replace, place_in_union
from tpunb.utils import files, records

HOLD = 0.5
"""Seconds that lines of `run.log` wait for older ones of other hosts."""
OFFSETS = "mirror.json"
"""How many bytes of which file of each host are here, and how long the merged files are with them:
who follows the run later cuts these to that length, and goes on from there, so that every line is
there once, however this process ends."""


class Merge:
    """Writes what hosts say into the run's folder here."""

    def __init__(
        self, run: RunDir, spec: RunSpec, skews: tuple[float, ...], *, again: bool = False
    ) -> None:
        """`again`: the run was followed before, by a process that is gone."""
        self._run = run
        self._spec = spec
        self._skews = skews or (0.0,) * len(spec.hosts)
        self.offsets: list[dict[str, int]] = [{} for _ in spec.hosts]
        """How many bytes of which file have come, by host."""
        self._written: list[int] = [0] * len(spec.hosts)
        """How many of them are in run.log: its lines wait for older ones."""
        self._lines: list[tuple[float, int, int, int, bytes]] = []
        """Of run.log, a heap by time: with a number, the host, and the offset of their end."""
        self._count = 0
        self._earlier: list[dict[str, int]] = [{} for _ in spec.hosts]
        """How long each host's files here were when the place had started it again."""
        self.first_attempt = 0
        """Of the attempts since then, in the union."""
        self._started: dict[int, set[int]] = {}
        """Which hosts have started their ranks, by attempt."""
        self._told: set[object] = set()
        self.phase: PhaseKind | None = None
        """What host 0 was doing last."""
        self.problem = ""
        """Why something could not be written; '' if everything was."""
        if again:
            self._go_on()

    def _go_on(self) -> None:
        """Take the folder back to where it was when it was noted last."""
        kept = records.read_dict(self._run.path / OFFSETS)
        lengths: Mapping[str, int] = {}
        try:
            lengths = records.convert(Mapping[str, int], kept["lengths"])
            offsets = records.convert(tuple[Mapping[str, int], ...], kept["offsets"])
            earlier = records.convert(tuple[Mapping[str, int], ...], kept["earlier"])
            first = records.convert(int, kept["first_attempt"])
            if len(offsets) == len(earlier) == len(self._spec.hosts):
                self.offsets = [dict(each) for each in offsets]
                self._earlier = [dict(each) for each in earlier]
                self.first_attempt = first
        except (KeyError, ValueError):  # nothing was noted: everything comes again
            lengths = {}
        log = self._run.log.name
        self._written = [offsets.get(log, 0) for offsets in self.offsets]
        for name in MERGED:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(self._run.path / name, lengths.get(name, 0))

    def save_offsets(self) -> None:
        """Note how much is here."""
        lengths = {}
        for name in MERGED:
            with contextlib.suppress(FileNotFoundError):
                lengths[name] = (self._run.path / name).stat().st_size
        log = self._run.log.name
        offsets = [
            {**offsets, log: written} if log in offsets else offsets
            for offsets, written in zip(self.offsets, self._written, strict=True)
        ]
        with contextlib.suppress(OSError):  # a full disk: then more comes again
            kept = {
                "offsets": offsets,
                "lengths": lengths,
                "earlier": self._earlier,
                "first_attempt": self.first_attempt,
            }
            files.write_json(self._run.path / OFFSETS, kept)

    def restart(self) -> None:
        """What the hosts send from now on begins anew, and comes after what is here."""
        self.flush(float("inf"))
        for host, offsets in enumerate(self.offsets):
            for file, length in offsets.items():
                earlier = self._earlier[host].get(file, 0)
                self._earlier[host][file] = earlier + length
            offsets.clear()
        self._written = [0] * len(self._written)
        attempts = [int(each.name) for each in self._run.path.glob("attempts/[0-9]*")]
        self.first_attempt = max(attempts, default=self.first_attempt - 1) + 1
        self._started.clear()
        self._told.clear()
        self.save_offsets()

    def _renumbered(self, file: str) -> str:
        """A file of a host with the number that its attempt has in the union."""
        parts = file.split("/")
        if parts[0] == "attempts" and len(parts) > 2 and parts[1].isdecimal():
            parts[1] = str(int(parts[1]) + self.first_attempt)
        return "/".join(parts)

    def add(self, host: int, line: Append | Replace, now: float) -> None:
        """Take in what a host has sent; `now` in seconds since the epoch."""
        if isinstance(line, Append):
            known = self.offsets[host].get(line.file, 0)
            if line.at + len(line.data) <= known:
                return  # it has come before, over a connection that broke
            if line.at < known:
                line = replace(line, data=line.data[known - line.at :], at=known)
            self.offsets[host][line.file] = line.at + len(line.data)
        try:
            self._write(host, line, now)
        except OSError as error:
            self.problem = self.problem or f"{error.strerror or error} ({line.file})"

    def _write(self, host: int, line: Append | Replace, now: float) -> None:
        own = self._spec.ranks_on(host)
        file = self._renumbered(line.file)
        place = self._run.path / place_in_union(file, host, own)
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
            earlier = 0 if file != line.file else self._earlier[host].get(line.file, 0)
            os.pwrite(fd, line.data, earlier + line.at)
        finally:
            os.close(fd)

    def _add_event(self, host: int, text: str) -> None:
        try:
            event = events.from_line(text)
        except ValueError:  # cut off by a full disk there
            return
        if (told := self._to_tell(host, event)) is not None:
            self._run.emit(told)

    def _to_tell(self, host: int, event: Event) -> Event | None:
        """What the run's followers here are to know of an event of one host."""
        name = self._spec.hosts[host]
        match event:
            case RanksStarted(own):
                attempt = own + self.first_attempt
                started = self._started.setdefault(attempt, set())
                started.add(host)
                if len(started) < len(self._spec.hosts):
                    return None
                # Their pids say nothing here.
                return replace(event, attempt=attempt, pids=(0,) * self._spec.world_size)
            case RankEnded(own):
                return replace(event, attempt=own + self.first_attempt)
            case Stopping(step):
                return self._once(("stopping", step), event)
            case Note(text):
                return self._once(text, event if host == 0 else Note(f"{name}: {text}", event.time))
            case Phase(kind):
                self.phase = kind if host == 0 else self.phase
                ends = kind is PhaseKind.ENDED
                return None if ends else event if host == 0 else self._once(kind, event)
            case Ended():
                return None  # said of the whole run, once its result is written
        return None

    def _once(self, what: object, event: Event) -> Event | None:
        """The event, unless it was told in this attempt."""
        told = (len(self._started), what)
        if told in self._told:
            return None
        self._told.add(told)
        return event

    def flush(self, now: float) -> None:
        """Write the lines of `run.log` that have waited long enough."""
        due = bytearray()
        # None is of a time to come, unless the clock was set back since.
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
        """Where a host's own result is."""
        return self._run.path / "hosts" / str(host) / RESULT
