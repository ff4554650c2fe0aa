"""Decides which lines of a log may be the reason for a failure, and which only warn or inform.

The reason is in the exception that ended a rank, in a fatal line of native code, or in how a
process ended. In a log with none of these, any line that is more than a warning may be the reason.
"""

from __future__ import annotations

import bisect
import builtins
import itertools
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from tpunb.diagnostics.failure.log import Log, LogLines

EXCEPTION = re.compile(
    r"^\s*(?:E\s+)?(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Pool)"
    r"|Exception|StopIteration|(?:_?queue\.)?Empty|(?:[a-z_]\w*\.)+[A-Z]\w*(?<!Warning))"
    r"(?::(?!:)|\s*$)"
)
"""A line that names an exception, such as the last line of a traceback."""
FATAL = re.compile(
    r"^F\d{4} |^\d{4}-\S+ \S+: F |^\[libprotobuf FATAL|^[ \t]*what\(\): |^\*\*\* SIG(?!TERM|INT)"
    r"|^\*\*\* Aborted|^terminate called |^Fatal Python error|Segmentation fault"
    r"|^ERROR: Unexpected [\w -]+ encountered in worker"
    r"|\(core dumped\)|Out of memory: Killed|^(?:\S+: line \d+: +)?(?:\d+ )?Killed\b",
    re.MULTILINE,
)
"""A line that native code or the system writes about a process that ends at this point."""

_HEADER = re.compile(r"Traceback \(most recent call last\)")
_CANDIDATE = re.compile(
    r"^[ \t]*(?:E\s+)?[\w.]*(?:Error|Exception|Interrupt|Exit|\.Empty|ProcessPool)(?::|\s*$)",
    re.MULTILINE,
)
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
_WARNS = re.compile(
    # Levels below an error, as glog, absl, c10d, pip and Python's logging and warnings write them
    r"^\[?[IW] ?\d{4}|^[IW] .*\.(?:cc|cpp|h|py):\d+|^\d{4}-\S+ \S+: [IW] "
    r"|^\[?(?:INFO|WARNING|DEBUG|NOTICE)\]?[: |]"
    r"|^(?:\d{4}-\d\d-\d\d )?\S*\d\d:\d\d\S* (?:\S+ ){0,5}\[?(?:INFO|WARN(?:ING)?|DEBUG)\b"
    r"|(?<!')\b\w*Warning: |^\s*(?:warnings\.)?warn\(|^wandb: "
    # Retries, slow operations that continue, and libtpu's search for credentials that it may lack
    r"|\b(?:re-?trying|will retry|retry) (?:in|after|again|\d)|\battempt \d+ ?(?:of|/) ?\d+"
    r"|slow_operation_alarm\.cc|oauth2_credentials\.cc",
    re.IGNORECASE,
)
"""Lines that healthy runs write too: they are never the reason, whatever they name."""
_OF_SYSTEM = (RuntimeError, OSError, ImportError, MemoryError, SystemError)
_MESSAGE = 60
"""Maximal number of lines of an exception's message."""
_FRAMES = 600
"""Maximal number of lines of a traceback."""
_TRACEBACKS = 2000
"""Maximal number of tracebacks that are read, from the end of a log."""
_FIRST, _LAST = 200, 1000
"""Number of different lines that are searched in a log without an exception."""
_ALIKE = 64
"""Number of lines that are searched of those that differ in digits only."""
_ABOVE = 8
"""Number of lines above a traceback that show its context."""


@dataclass(frozen=True)
class LoggedException:
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
        found = list(self._read())
        if recorded_from is not None:
            found = [one for one in found if one.line >= recorded_from] or found
        self.exceptions = _ending(found)
        """Those that ended a rank, in the log's order."""
        self._messages = {
            number
            for one in self.exceptions
            for number in range(one.line, one.end)
            if log.rank(number) in (one.rank, None)
        }
        self._names = {one.line for one in self.exceptions}
        self._told = any(not one.of_another_process for one in self.exceptions)
        self.candidates = LogLines(log, [n for n in self._searched() if self._counts(n)])
        """The lines that may be the reason."""

    def _searched(self) -> Sequence[int]:
        if self._told:
            return sorted(self._messages | self.fatal)
        shapes = self._log.shapes
        # Failures come last; the first lines show how the run was started.
        searched = [*shapes[:_FIRST], *shapes[max(_FIRST, len(shapes) - _LAST) :]]
        return sorted(number for alike in searched for number in alike[:_ALIKE])

    def _counts(self, number: int) -> bool:
        if number in self._names:
            return True
        if _WARNS.search(self._log.bodies[number]):
            return False
        if number in self._messages or number in self.fatal:
            return True
        return not (number in self._remarks or self._is_frame(number))

    @cached_property
    def fatal(self) -> frozenset[int]:
        return frozenset(self._log.all.find(FATAL))

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
        headers = log.all.find(_HEADER)[-_TRACEBACKS:]
        for header, following in itertools.pairwise([*headers, len(log.lines)]):
            if (found := self._end_of_traceback(header, following)) is not None:
                starts[found[0]] = (header, found[1])
                self._tracebacks.append((header, found[0]))
        for number in log.all.find(_CANDIDATE)[-_TRACEBACKS:]:
            match = EXCEPTION.match(log.bodies[number])
            if match and number not in starts and not self._is_frame(number):
                starts[number] = (number, match["name"])
        used: set[int] = set()
        named = -2
        for line in sorted(starts):
            start, name = starts[line]
            name = name.rpartition(".")[2]
            near = list(self._above(start))
            above = [log.bodies[n] for n in near]
            remark = next((n for n in near[:2] if _REMARK.match(log.bodies[n])), None)
            if remark is not None and remark not in used:  # it is about the first exception below
                used.add(remark)
                self._remarks.update(range(start, self._end_of_message(line, starts, short=True)))
                continue
            end = self._end_of_message(line, starts, short=_is_plain(name))
            inside = start == line == named + 1  # a part of the message above
            named = line
            of_another = name in _FOR_OTHERS
            # Of a traceback that was copied or cut, the header may be missing.
            cut = bool(above) and above[0][:1].isspace()
            raised = start < line or inside or of_another or cut
            if not raised and self._is_only_printed(line, end):
                continue
            yield LoggedException(
                log.rank(line),
                line,
                end,
                inside or any(_CHAIN.search(text) for text in [log.bodies[start], *above]),
                any(_THREAD.match(text) for text in above[:2]),
                of_another,
            )

    def _is_only_printed(self, line: int, end: int) -> bool:
        """True for a line without a traceback after which the process continues: it was handled."""
        log = self._log
        rank = log.rank(line)
        following = range(end, min(len(log.lines), end + _FRAMES))
        return any(log.bodies[n].strip() and rank in (None, log.rank(n)) for n in following)

    def _end_of_traceback(self, header: int, following: int) -> tuple[int, str] | None:
        """The line that names the exception, and the name; None for a truncated traceback."""
        log = self._log
        rank, shown = log.rank(header), _IPYTHON.match(log.bodies[header])
        for number in range(header + 1, min(following, header + _FRAMES)):
            if log.rank(number) != rank:
                continue
            match = _ENDS_TRACEBACK.match(log.bodies[number])
            if match and (shown is None or match["name"].rpartition(".")[2] == shown["name"]):
                return number, match["name"]
        return None

    def _end_of_message(self, line: int, starts: dict[int, tuple[int, str]], *, short: bool) -> int:
        """The end of a message: a blank line or, for a `short` one, an unindented line."""
        log = self._log
        rank = log.rank(line)
        for number in range(line + 1, min(len(log.lines), line + _MESSAGE)):
            body, other = log.bodies[number], log.rank(number)
            if other != rank and rank is not None and other is not None:
                continue  # another rank's line in between
            margin = short and not body[:1].isspace()
            if other != rank or not body.strip() or number in starts or margin:
                return number
        return min(len(log.lines), line + _MESSAGE)

    def _above(self, start: int) -> Iterator[int]:
        """Yield the non-blank lines of the same rank above a traceback, the nearest first."""
        log = self._log
        for number in range(start - 1, max(-1, start - 1 - _ABOVE), -1):
            if log.rank(number) == log.rank(start) and log.bodies[number].strip():
                yield number


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
    handled; all of them if the last one only reports another process.
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
    return sorted(ending, key=lambda one: one.line)
