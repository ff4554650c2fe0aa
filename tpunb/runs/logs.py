"""Search and filter the log of a run: `%tpu_logs`, `tpunb logs` and the panel."""

from __future__ import annotations

import argparse
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.utils import files
from tpunb.utils.ansi import clean, strip_ansi
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import LineTail
from tpunb.utils.text import parse_ranks, size

_LINE = re.compile(r"\[(?:(?P<rank>\d+)(?: err)?(?: prelude)?|prelude|tpunb)\] ")
_BEGINS = "Traceback (most recent call last)"
# The level names of logging and similar libraries, names of exceptions and warnings, and the first
# letter of glog's lines ('E1121 20:13:30.123456'), the format of XLA and libtpu.
_ERROR = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL)\b|^[\w.]*(?:Error|Exception|Interrupt)\b|^[EF]\d{4} |^Fatal Python"
)
_WARNING = re.compile(r"\bWARN(?:ING)?\b|Warning\b|^W\d{4} ")
_MAY_BE_BAD = re.compile(
    r"rror|ERROR|WARN|Warning|Exception|Traceback|CRITICAL|FATAL|Fatal|Interrupt"
    r"|\] [EFW]|^[EFW]|\x1b"
)
"""Does not match only lines that neither begin a traceback nor match `_ERROR` or `_WARNING`."""
MOST = 60_000
"""The most bytes that a cell shows, because they are saved in the notebook."""
SEARCHED = 50_000_000
"""The most bytes of a log that a cell searches, which takes about a second."""


@dataclass(frozen=True)
class LogSearch:
    """A selection of lines of a log."""

    ranks: str = "all"
    level: str | None = None
    """'warning': warnings and errors; 'error': errors, with their tracebacks."""
    pattern: re.Pattern[str] | None = None
    """The expression that lines must match, without their rank and colours."""
    tail: int | None = None
    """The number of last lines to show; None for all."""

    @property
    def is_unfiltered(self) -> bool:
        """True if all lines match, apart from `tail`."""
        return replace(self, tail=None).is_everything

    @property
    def is_everything(self) -> bool:
        """True if all lines are shown."""
        return self == LogSearch()


def parse_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression, case-insensitive if it has no capitals.

    Raises ArgumentTypeError.
    """
    try:
        return re.compile(text, 0 if re.search(r"(?<!\\)[A-Z]", text) else re.IGNORECASE)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


class _Filter:
    """Filters lines one at a time."""

    def __init__(self, search: LogSearch, spec: RunSpec) -> None:
        """Raises TpunbError for a rank that the run does not have."""
        try:
            self._ranks = parse_ranks(search.ranks, spec.world_size)
        except ValueError:
            raise TpunbError(
                f"run {spec.id} has no rank {search.ranks}: its ranks are 0 to "
                f"{spec.world_size - 1}"
            ) from None
        self._search = search
        self._tracebacks: set[str] = set()
        """The prefixes of ranks that are in the middle of a traceback."""

    def take(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the matching lines."""
        if self._search.is_everything:
            yield from lines
            return
        for line in lines:
            if self._search.level and not self._tracebacks and not _MAY_BE_BAD.search(line):
                # Nearly all lines are of this kind, and this is ten times as fast as a full match.
                continue
            match = _LINE.match(line)
            if self._search.ranks != "all":
                rank = match["rank"] if match else None
                if rank is None or int(rank) not in self._ranks:
                    continue
            prefix = match[0] if match else ""
            if self._is_hit(prefix, strip_ansi(line[len(prefix) :])):
                yield line

    def _is_hit(self, prefix: str, text: str) -> bool:
        """True if the text matches, which is without the line's prefix and colours."""
        if self._search.level is not None and not self._is_bad(prefix, text):
            return False
        return self._search.pattern is None or self._search.pattern.search(text) is not None

    def _is_bad(self, prefix: str, text: str) -> bool:
        """True for a warning, an error or a line of a traceback."""
        if _BEGINS in text:
            self._tracebacks.add(prefix)
            return True
        if prefix in self._tracebacks:
            if text[:1] not in (" ", "|", "+"):  # the exception itself
                self._tracebacks.discard(prefix)
            return True
        if _ERROR.search(text):
            return True
        return self._search.level == "warning" and _WARNING.search(text) is not None


def read_lines(run: RunDir, search: LogSearch) -> Iterator[str]:
    """Return the matching lines of a run's log, without their line ends.

    Raises TpunbError for a rank that the run does not have.
    """
    line_filter = _Filter(search, state.read_spec(run))
    if search.tail is not None and search.is_unfiltered:
        return iter(_last_lines(run, search.tail))
    return _tail(line_filter.take(_lines(run)), search.tail)


def _lines(run: RunDir, newest: int | None = None) -> Iterator[str]:
    """Yield the lines of the log, or of its last `newest` bytes."""
    with suppress(FileNotFoundError, PermissionError):
        yield from files.read_lines(run.log, newest)


def _last_lines(run: RunDir, count: int) -> list[str]:
    """Return the last lines of the log without reading more of a large log than needed."""
    newest, whole = 1 << 20, _size(run)
    while newest < whole:
        lines = list(_lines(run, newest))
        if len(lines) >= count:
            return lines[len(lines) - count :]
        newest *= 8
    return list(deque(_lines(run), maxlen=count))


def _size(run: RunDir) -> int:
    try:
        return run.log.lstat().st_size
    except OSError:
        return 0


def _tail(lines: Iterator[str], tail: int | None) -> Iterator[str]:
    return lines if tail is None else iter(deque(lines, maxlen=tail))


def read_for_cell(run: RunDir, search: LogSearch, most: int = MOST) -> str:
    """Return the matching lines as text for a cell: the last `most` bytes, with a note if cut.

    Only the newest `SEARCHED` bytes of the log are searched.
    """
    line_filter = _Filter(search, state.read_spec(run))
    beyond = _size(run) - SEARCHED
    lines = _lines(run, SEARCHED if beyond > 0 else None)
    text, left_out = _newest(_tail(line_filter.take(lines), search.tail), most)
    if left_out:
        what = "1 line" if left_out == 1 else f"{left_out:,} lines"
        text = f"… {what} not shown; all are in {run.log}\n{text}"
    if beyond > 0:
        note = f"the first {size(beyond)} of {run.log} were not searched; `tpunb logs` searches all"
        text = f"… {note}\n{text}"
    return text if text or search.tail == 0 else f"{no_match_message(run, search)}\n"


def no_match_message(run: RunDir, search: LogSearch) -> str:
    if search.is_everything:
        return f"the log of run {run.id} is empty"
    return f"no matching lines in run {run.id} ({run.log})"


def _newest(lines: Iterable[str], most: int) -> tuple[str, int]:
    kept: deque[tuple[str, int]] = deque()
    total = left_out = 0
    for line in lines:
        data = line.encode("utf-8", "replace")
        if len(data) >= most:
            line = "…" + data[len(data) - most + 4 :].decode("utf-8", "ignore")
        length = min(len(data) + 1, most)
        kept.append((line, length))
        total += length
        while total > most and len(kept) > 1:
            total -= kept.popleft()[1]
            left_out += 1
    return "".join(f"{clean(line)}\n" for line, _ in kept), left_out


class LiveLog:
    """The newest matching lines of a growing log."""

    def __init__(self, run: RunDir, search: LogSearch, most: int) -> None:
        """Raises TpunbError for a rank that the run does not have."""
        self._filter = _Filter(search, state.read_spec(run))
        self._lines = LineTail(run.log)
        self._lines.skip_to_end(SEARCHED)
        self.newest: deque[str] = deque(maxlen=most)

    def read(self) -> bool:
        """Read the new lines, a few megabytes at most; return True if a line matches."""
        new = list(self._filter.take(self._lines.read()))
        self.newest.extend(new)
        return bool(new)

    def close(self) -> None:
        self._lines.close()


def follow_lines(run: RunDir, search: LogSearch) -> Iterator[list[str]]:
    """Yield matching lines as `read_lines` does, in batches, until the run has ended."""
    line_filter = _Filter(search, state.read_spec(run))
    lines = LineTail(run.log)
    newest = search.tail
    if newest is not None and search.is_unfiltered:
        lines.skip_to_end(SEARCHED)
    try:
        while True:
            over = not state.run_state(run).active  # read before the last lines are
            kept: deque[str] = deque(maxlen=newest)
            while new := lines.read():
                kept.extend(line_filter.take(new))
                if newest is None and kept:
                    yield list(kept)
                    kept.clear()
            if kept:
                yield list(kept)
            newest = None
            if over:
                return
            time.sleep(state.POLL_INTERVAL)
    finally:
        lines.close()
