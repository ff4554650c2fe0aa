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
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

from tpunb.diagnostics.failure.log import LinePattern, Log, LogLines, compile_pattern

EXCEPTION = re.compile(
    r"^\s*(?:E\s+)?(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Pool)"
    r"|Exception|StopIteration|(?:_?queue\.)?Empty|(?:[a-z_]\w*\.)+[A-Z]\w*(?<!Warning))"
    r"(?::(?!:)|\s*$)"
)
"""A line that names an exception, such as the last line of a traceback."""
FATAL = LinePattern.compile(
    r"(?-i:^F\d{4} |^\d{4}-\S+ \S+: F |^\[libprotobuf FATAL|^\s*what\(\): |^\*\*\* SIG(?!TERM|INT)"
    r"|^\*\*\* Aborted|^terminate called |^Fatal Python error|Segmentation fault"
    r"|^ERROR: Unexpected [\w -]+ encountered in worker"
    r"|\(core dumped\)|Out of memory: Killed|^(?:\S+: line \d+: +)?(?:\d+ )?Killed\b)"
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
_PLACE = re.compile(r'^\s+File "[^"]+", line \d+')
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
_FIRST, _LAST = 200, 1000
"""Number of different lines that are searched in a log without an exception."""
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
    name: str
    """Its class without the module; '' if a launcher omits it."""
    rank: int | None
    start: int
    """The first line of its traceback, or the line that names it if no traceback is shown."""
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
    module: str = ""
    """The module of its class; '' if it is built in, or not shown."""


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
        self.candidates = LogLines(self._log, list(self._find_candidates()))
        """The lines to search for reasons; `counts` has the last word on each."""

    def _find_candidates(self) -> Sequence[Sequence[int]]:
        if self._told:
            return [[number] for number in sorted(self._names | self._messages | self.fatal)]
        shapes = self._log.shapes
        # Failures come last; the first lines show how the run was started.
        return [*shapes[:_FIRST], *shapes[max(_FIRST, len(shapes) - _LAST) :]]

    @cached_property
    def fatal(self) -> frozenset[int]:
        return frozenset(self._log.find(FATAL))

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

    def exception_of(self, lines: Sequence[int]) -> LoggedException | None:
        """The exception whose message contains one of these lines, one with a traceback first."""
        found = [
            one for one in self.exceptions if any(one.line <= number < one.end for number in lines)
        ]
        return max(found, key=lambda one: one.line > one.start, default=None)

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
                starts[number] = (self._start_without_header(number), match["name"])
            elif match := _OF_LAUNCHER.match(log.body(number)):
                starts[number] = (number, "ProcessRaisedException" if match["other"] else "")
        used: set[int] = set()
        named = -2
        for line in sorted(starts):
            start, full_name = starts[line]
            name = full_name.rpartition(".")[2]
            near = list(self._above(start))
            above = [log.body(n) for n in near]
            remark = next((n for n in near[:2] if _REMARK.match(log.body(n))), None)
            if remark is not None and remark not in used:  # it is about the first exception below
                used.add(remark)
                self._remarks.update(range(start, self._end_of_message(line, starts, short=True)))
                continue
            end = self._end_of_message(line, starts, short=_is_plain(name))
            inside = start == line == named + 1  # a part of the message above
            named = line
            of_another = name in _FOR_OTHERS or bool(_ENGINE.search(log.body(line)))
            raised = start < line or inside or of_another or not name
            if not raised and self._is_only_printed(line, end):
                continue
            yield LoggedException(
                name,
                log.writer(line),
                start,
                line,
                end,
                inside or any(_CHAIN.search(text) for text in [log.body(start), *above]),
                any(_THREAD.match(text) for text in above[:2]),
                of_another,
                full_name.rpartition(".")[0],
            )

    def _is_only_printed(self, line: int, end: int) -> bool:
        """True for a line without a traceback after which the process continues: it was handled."""
        log = self._log
        rank = log.writer(line)
        following = range(end, min(len(log.lines), end + _FRAMES))
        return any(log.body(n).strip() and rank in (None, log.writer(n)) for n in following)

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

    def _start_without_header(self, line: int) -> int:
        """The first frame above the line that names an exception; that line if there is none.

        Of a traceback that was copied or cut, the header may be missing.
        """
        log, start = self._log, line
        for number in range(line - 1, max(-1, line - _FRAMES), -1):
            if log.writer(number) != log.writer(line):
                continue
            body = log.body(number)
            if not body[:1].isspace():
                break
            if _PLACE.match(body):
                start = number
        return start

    def _end_of_message(self, line: int, starts: dict[int, tuple[int, str]], *, short: bool) -> int:
        """The end of a message: a blank line or, for a `short` one, an unindented line."""
        log = self._log
        rank = log.writer(line)
        for number in range(line + 1, min(len(log.lines), line + _MESSAGE)):
            body, other = log.body(number), log.writer(number)
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
            if log.writer(number) == log.writer(start) and log.body(number).strip():
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
