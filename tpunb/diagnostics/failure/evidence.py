"""Decides which lines of a log may be the reason for a failure, and which only warn or inform.

The reason is in the exception that ended a rank, in a fatal line of native code, or in how a
process ended. In a log with none of these, any line that is more than a warning may be the reason.
"""

from __future__ import annotations

import bisect
import builtins
import functools
import itertools
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

from tpunb.diagnostics.failure.log import LinePattern, Log, compile_pattern

EXCEPTION = re.compile(
    r"^\s*(?:E\s+)?(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Pool)"
    r"|Exception|StopIteration|(?:_?queue\.)?Empty|(?:[a-z_]\w*\.)+[A-Z]\w*(?<!Warning))"
    r"(?::(?!:)|\s*$)"
)
"""A line that names an exception, such as the last line of a traceback."""
FATAL = re.compile(
    r"^F\d{4} |^\d{4}-\S+ \S+: F |^\[libprotobuf FATAL|^\s*what\(\): |^\*\*\* SIG(?!TERM|INT)"
    r"|^\*\*\* Aborted|^terminate called |^Fatal Python error|Segmentation fault"
    r"|^ERROR: Unexpected [\w -]+ encountered in worker"
    r"|\(core dumped\)|Out of memory: Killed|^(?:\S+: line \d+: +)?(?:\d+ )?Killed\b"
)
"""A line that native code or the system writes about a process that ends at this point."""

_HEADER = LinePattern.compile(r"Traceback \(most recent call last\)")
_CANDIDATE = LinePattern.compile(
    r"^\s*(?:E\s+)?[\w.]*(?:Error|Exception|Interrupt|Exit|\.Empty|ProcessPool)(?::|\s*$)"
    r"|^Exception in device=|^-- Process \d+ terminated with the following error"
)
_OF_LAUNCHER = re.compile(r"^Exception in device=|(?P<other>^-- Process \d+ terminated with)")
_ENDS_TRACEBACK = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?::\s|:$|\s*$)")
_IPYTHON = re.compile(r"^(?P<name>[A-Z]\w*)\s+Traceback \(most recent call last\)")
_CHAIN = re.compile(
    r"direct cause of the following|During handling of the above|Original Traceback"
)
_THREAD = re.compile(r"^Exception in thread ")
_REMARK = re.compile(r"^Exception ignored in|^--- Logging error ---|^Error in atexit")
_FOR_OTHERS = frozenset(
    "BrokenProcessPool CalledProcessError CellExecutionError ChildFailedError DeadKernelError"
    " Exception KeyboardInterrupt PapermillExecutionError ProcessExitedException"
    " ProcessRaisedException RemoteTraceback _RemoteTraceback SystemExit".split()
)
"""Exceptions that only report how another process ended; the reason is in that process's lines."""
_ENGINE = re.compile(r"Engine core initialization failed|See root cause above")
"""Messages of vLLM's server that do the same; the class of the exception is RuntimeError."""
_OF_SYSTEM = (RuntimeError, OSError, ImportError, MemoryError, SystemError)
_MESSAGE = 60
"""Maximal number of lines of an exception's message."""
_FRAMES = 600
"""Maximal number of lines of a traceback."""
_TRACEBACKS = 2000
"""Maximal number of tracebacks that are read, from the end of a log."""
_ABOVE = 8
"""Number of lines above a traceback that show its context."""


@functools.cache
def notices() -> tuple[re.Pattern[str], ...]:
    """The patterns of `notices.yaml`: lines that healthy runs write."""
    import yaml  # not needed before something has failed

    file = resources.files("tpunb.diagnostics.failure") / "notices.yaml"
    return tuple(map(compile_pattern, yaml.safe_load(file.read_text(encoding="utf-8"))))


@dataclass(frozen=True)
class LoggedException:
    """An exception as a log shows it."""

    name: str
    """Its class without the module; '' if a launcher omits it."""
    rank: int | None
    line: int
    """The line that names it."""
    end: int
    """The line after the last line of its message."""
    chained: bool
    """True if it was raised while the exception above it was being handled."""
    in_thread: bool
    """True if it ended a thread, which does not end a process."""

    of_another_process: bool
    """True if it only reports how another process ended."""


class PossibleReasons:
    """The lines of a log that may be the reason for a failure."""

    def __init__(self, log: Log, recorded_from: int | None = None) -> None:
        """`recorded_from`: the line at which the run's own record of its exceptions starts.

        No exception above that line has then ended a rank.
        """
        self._log = log
        self._tracebacks: list[tuple[int, int]] = []
        """First line, and the line that names the exception."""
        self._remarks: set[int] = set()
        self._notices: dict[int, bool] = {}
        """Keyed by the first line of a shape."""
        found = list(self._read())
        if recorded_from is not None:
            found = [one for one in found if one.line >= recorded_from] or found
        self._all = found
        self._set(_ending(found))

    def widen(self) -> bool:
        """Count every exception as a reason; False if this adds none.

        Used if the last exception is only a consequence: in logs without rank prefixes it is not
        known which exceptions ended a rank.
        """
        before = len(self.exceptions)
        self._set([one for one in self._all if not one.in_thread])
        return len(self.exceptions) > before

    def _set(self, exceptions: list[LoggedException]) -> None:
        log = self._log
        self.exceptions = exceptions
        """Those that ended a rank, in the log's order."""
        self._messages = {
            number
            for one in self.exceptions
            for number in range(one.line, one.end)
            if log.writer(number) in (one.rank, None)
        }
        self._names = {one.line for one in self.exceptions}
        self._told = any(not one.of_another_process for one in self.exceptions)

    @cached_property
    def fatal(self) -> frozenset[int]:
        """The fatal lines."""
        log = self._log
        return frozenset(
            number
            for alike in log.by_shape()
            if FATAL.search(log.body(alike[0]))
            for number in alike
        )

    def _is_notice(self, number: int) -> bool:
        first = self._log.alike(number)
        if first not in self._notices:
            body = self._log.body(number)
            self._notices[first] = any(one.search(body) for one in notices())
        return self._notices[first]

    def counts(self, number: int, *, notices_too: bool = False) -> bool:
        """True if the line may be a reason; `notices_too`: also if it only warns."""
        if number in self._names:
            return True
        if number in self._messages or number in self.fatal:
            return not self._is_notice(number)
        if self._told or number in self._remarks or self._is_frame(number):
            return False
        return (notices_too and not self.exceptions) or not self._is_notice(number)

    def unexplained(self, lines: Set[int]) -> bool:
        """True if the message of an exception that ended a rank contains none of these lines."""
        return any(
            lines.isdisjoint(range(one.line, one.end))
            for one in self.exceptions
            if not one.of_another_process
        )

    def _is_frame(self, number: int) -> bool:
        at = bisect.bisect_right(self._tracebacks, (number, len(self._log.lines))) - 1
        return at >= 0 and self._tracebacks[at][0] <= number < self._tracebacks[at][1]

    def _read(self) -> Iterator[LoggedException]:
        """Yield the exceptions of the log in order, without those that Python only reports."""
        log = self._log
        starts: dict[int, tuple[int, str]] = {}
        """Keyed by the line that names an exception: first line of its traceback, and its name."""
        headers = log.find(_HEADER)[-_TRACEBACKS:]
        for header, following in itertools.pairwise([*headers, len(log.lines)]):
            if (found := self._end_of_traceback(header, following)) is not None:
                starts[found[0]] = (header, found[1])
                self._tracebacks.append((header, found[0]))
        for number in log.find(_CANDIDATE)[-_TRACEBACKS:]:
            if number in starts or self._is_frame(number):
                continue
            if match := EXCEPTION.match(log.body(number)):
                starts[number] = (number, match["name"])
            elif match := _OF_LAUNCHER.match(log.body(number)):
                starts[number] = (number, "ProcessRaisedException" if match["other"] else "")
        for line in sorted(starts):
            start, full_name = starts[line]
            name = full_name.rpartition(".")[2]
            end = self._end_of_message(line, name, starts)
            above = list(self._above(start))
            if any(_REMARK.match(text) for text in above[:2]):
                self._remarks.update(range(start, end))
                continue
            yield LoggedException(
                name,
                log.writer(line),
                line,
                end,
                any(_CHAIN.search(text) for text in [log.body(start), *above]),
                any(_THREAD.match(text) for text in above[:2]),
                name in _FOR_OTHERS or bool(_ENGINE.search(log.body(line))),
            )

    def _end_of_traceback(self, header: int, following: int) -> tuple[int, str] | None:
        """The line that names the exception, and the name; None for a truncated traceback."""
        log = self._log
        rank, shown = log.writer(header), _IPYTHON.match(log.body(header))
        for number in range(header + 1, min(following, header + _FRAMES)):
            if log.writer(number) != rank:
                continue
            match = _ENDS_TRACEBACK.match(log.body(number))
            if match and (shown is None or match["name"].rpartition(".")[2] == shown["name"]):
                return number, match["name"]
        return None

    def _end_of_message(self, line: int, name: str, starts: dict[int, tuple[int, str]]) -> int:
        """The end of a message: a blank line or, for Python's own errors, an unindented line."""
        log = self._log
        rank, short = log.writer(line), _is_plain(name)
        for number in range(line + 1, min(len(log.lines), line + _MESSAGE)):
            body, other = log.body(number), log.writer(number)
            if other != rank and rank is not None and other is not None:
                continue  # another rank's line in between
            margin = short and not body[:1].isspace()
            if other != rank or not body.strip() or number in starts or margin:
                return number
        return min(len(log.lines), line + _MESSAGE)

    def _above(self, start: int) -> Iterator[str]:
        """Yield the non-blank lines of the same rank above a traceback, the nearest first."""
        log = self._log
        for number in range(start - 1, max(-1, start - 1 - _ABOVE), -1):
            if log.writer(number) == log.writer(start) and log.body(number).strip():
                yield log.body(number)


def _is_plain(name: str) -> bool:
    """True for exceptions that Python itself raises in wrong code: KeyError, TypeError, etc."""
    kind = getattr(builtins, name, None)
    return (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and kind is not Exception
        and not issubclass(kind, _OF_SYSTEM)
    )


def _ending(found: list[LoggedException]) -> list[LoggedException]:
    """The exceptions that ended a rank.

    For each rank, the last exception and those from which it was raised, because others were
    handled; all of them if the last one only reports another process; and each exception that a
    launcher reports.
    """
    if any(not one.in_thread for one in found):
        found = [one for one in found if not one.in_thread]
    ending: list[LoggedException] = []
    for rank in dict.fromkeys(one.rank for one in found):
        own = [one for one in found if one.rank == rank]
        if own[-1].of_another_process:
            ending += own
            continue
        for one in reversed(own):
            ending.append(one)
            if not one.chained:
                break
        ending += [one for one in own if not one.name and one not in ending]
    return sorted(ending, key=lambda one: one.line)
