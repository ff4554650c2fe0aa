"""The log of a run, searched and filtered, for the magics and the command line alike."""

from __future__ import annotations

import argparse
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tpunb import control
from tpunb.display.lines import plain
from tpunb.display.ranks import parse_ranks
from tpunb.errors import TpunbError
from tpunb.models import RunSpec
from tpunb.rundir import PRELUDE, LineTail, RunDir

_LINE = re.compile(r"\[(?:(?P<rank>\d+)(?P<err> err)?(?P<own> prelude)?|prelude|tpunb)\] ")
_BEGINS = "Traceback (most recent call last)"
# The words of logging and its relatives, exceptions and warnings by name, and the first letter
# of glog's lines ('E1121 20:13:30.123456'), in which XLA and libtpu write.
_ERROR = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL)\b|^[\w.]*(?:Error|Exception|Interrupt)\b|^[EF]\d{4} |^Fatal Python"
)
_WARNING = re.compile(r"\bWARN(?:ING)?\b|\b\w*Warning\b|^W\d{4} ")
MOST = 60_000
"""Bytes that a cell shows: a notebook is saved with them."""
_HIT, _RESET = "\x1b[1;31m", "\x1b[0m"


@dataclass(frozen=True)
class Search:
    """Which lines are wanted."""

    ranks: str = "all"
    stream: str | None = None
    """'stdout', 'stderr' or 'prelude'; None for all."""
    level: str | None = None
    """'warning': warnings and errors; 'error': errors, with their tracebacks."""
    pattern: re.Pattern[str] | None = None
    """What is searched for in the text of each line, without its rank and its colours."""
    context: int = 0
    """Lines that are wanted before and after each that was found."""
    tail: int | None = None
    """Only the last lines of all that are wanted."""

    @property
    def is_everything(self) -> bool:
        """Whether no line is left out."""
        return self == Search()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `%tpu_logs` and `tpunb logs`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="an id or any part of it (the latest)"
    )
    parser.add_argument("--rank", type=_ranks, default="all", metavar="R",
                        help="only the lines of these ranks, e.g. 1 or 0,3-5")  # fmt: skip
    parser.add_argument("--stream", choices=("stdout", "stderr", PRELUDE),
                        help="only what was written there")  # fmt: skip
    parser.add_argument("--level", choices=("warning", "error"),
                        help="only warnings and errors, or only errors with their "
                        "tracebacks")  # fmt: skip
    parser.add_argument("--grep", type=pattern, metavar="PATTERN",
                        help="only lines that match this regular expression; small letters "
                        "match capitals too")  # fmt: skip
    parser.add_argument("--context", type=whole, default=0, metavar="N",
                        help="and N lines before and after each")  # fmt: skip
    parser.add_argument("--tail", type=whole, metavar="N", help="only the last N lines")


def search_of(chosen: argparse.Namespace) -> Search:
    """What the options ask for."""
    return Search(
        chosen.rank, chosen.stream, chosen.level, chosen.grep, chosen.context, chosen.tail
    )


def _ranks(text: str) -> str:
    if not re.fullmatch(r"all|\d+(-\d+)?(,\d+(-\d+)?)*", text.replace(" ", ""), re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} does not name ranks, such as 1 or 0,3-5")
    return text


def pattern(text: str) -> re.Pattern[str]:
    """What is searched for; small letters match capitals too. Raises ArgumentTypeError."""
    try:
        # A capital is meant as one; without any, most people do not care.
        return re.compile(text, 0 if re.search(r"(?<!\\)[A-Z]", text) else re.IGNORECASE)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def whole(text: str) -> int:
    """A number of an option that counts something."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


class _Sieve:
    """Lets through what is wanted, line by line."""

    def __init__(self, search: Search, spec: RunSpec, *, colours: bool) -> None:
        """Raises TpunbError for a rank that the run has not."""
        try:
            self._ranks = parse_ranks(search.ranks, spec.world_size)
        except ValueError:
            raise TpunbError(
                f"run {spec.id} has no rank {search.ranks}: its ranks are 0 to "
                f"{spec.world_size - 1}"
            ) from None
        self._search = search
        self._by_source = search.ranks != "all" or search.stream is not None
        self._colours = colours
        self._before: deque[str] = deque(maxlen=search.context)
        self._after = 0
        self._gap = False
        """Lines were passed over since the last one that was let through."""
        self._any = False
        self._tracebacks: set[str] = set()
        """The prefixes of those that are in the middle of a traceback."""

    def take(self, lines: Iterable[str]) -> Iterator[str]:
        """Those of `lines` that are wanted, without their line ends."""
        if self._search.is_everything:
            yield from lines
            return
        for line in lines:
            found = _LINE.match(line)
            if self._by_source and not self._is_of(found):
                continue
            prefix = found[0] if found else ""
            if (shown := self._hit(prefix, line[len(prefix) :])) is not None:
                if self._gap and self._any and self._search.context:
                    yield "--"
                yield from self._before
                self._before.clear()
                yield prefix + shown
                self._any, self._gap, self._after = True, False, self._search.context
            elif self._after:
                self._after -= 1
                yield line
            else:
                self._gap = self._gap or len(self._before) == self._search.context
                self._before.append(line)

    def _is_of(self, found: re.Match[str] | None) -> bool:
        """Whether a line is of the ranks and the stream that are wanted."""
        if found is None or found[0] == "[tpunb] ":
            return False
        rank = found["rank"]
        if self._search.ranks != "all" and (rank is None or int(rank) not in self._ranks):
            return False
        if self._search.stream is None:
            return True
        if rank is None or found["own"]:
            return self._search.stream == PRELUDE
        return self._search.stream == ("stderr" if found["err"] else "stdout")

    def _hit(self, prefix: str, text: str) -> str | None:
        """The text as it is shown, if it is one that is searched for."""
        bare = plain(text)
        if self._search.level is not None and not self._is_bad(prefix, bare):
            return None
        if self._search.pattern is None:
            return text
        if not self._search.pattern.search(bare):
            return None
        if not self._colours:
            return text
        return self._search.pattern.sub(lambda hit: f"{_HIT}{hit[0]}{_RESET}" * bool(hit[0]), bare)

    def _is_bad(self, prefix: str, text: str) -> bool:
        """Whether a line is a warning or an error, or of the traceback of one."""
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


def read(run: RunDir, search: Search, *, colours: bool = False) -> Iterator[str]:
    """The lines of a run's log that are wanted, without their line ends.

    With `colours` what was searched for stands out. Raises TpunbError for a rank that the run
    has not.
    """
    sieve = _Sieve(search, control.read_spec(run), colours=colours)
    if not run.log.exists():
        return iter(())
    return _last(sieve.take(_lines(run)), search.tail)


def _lines(run: RunDir) -> Iterator[str]:
    with open(run.log, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")


def _last(lines: Iterator[str], tail: int | None) -> Iterator[str]:
    return lines if tail is None else iter(deque(lines, maxlen=tail))


def for_a_cell(run: RunDir, search: Search, most: int = MOST) -> str:
    """The same as text of at most `most` bytes: the last lines, and what there is to say."""
    text, left_out = _newest(read(run, search, colours=True), most)
    if left_out:
        what = "1 line" if left_out == 1 else f"{left_out:,} lines"
        text = f"… {what} left out here; {run.log} has all\n{text}"
    return text if text or search.tail == 0 else f"{nothing(run, search)}\n"


def nothing(run: RunDir, search: Search) -> str:
    """Why there is no line."""
    if search.is_everything:
        return f"the log of run {run.id} is empty"
    return f"no line of run {run.id} fits ({run.log})"


def _newest(lines: Iterable[str], most: int) -> tuple[str, int]:
    kept: deque[tuple[str, int]] = deque()
    size = left_out = 0
    for line in lines:
        length = len(line.encode("utf-8", "replace")) + 1
        kept.append((line, length))
        size += length
        while size > most and len(kept) > 1:
            size -= kept.popleft()[1]
            left_out += 1
    return "".join(f"{line}\n" for line, _ in kept), left_out


class Live:
    """The newest lines of a log that grows, of those that are wanted."""

    def __init__(self, run: RunDir, search: Search, most: int) -> None:
        """Raises TpunbError for a rank that the run has not."""
        self._sieve = _Sieve(search, control.read_spec(run), colours=False)
        self._lines = LineTail(run.log)
        self.newest: deque[str] = deque(maxlen=most)

    def read(self) -> bool:
        """Take in what has come, at most some megabytes at once; whether there is a new line."""
        found = list(self._sieve.take(self._lines.read()))
        self.newest.extend(found)
        return bool(found)

    def close(self) -> None:
        self._lines.close()


def follow(run: RunDir, search: Search, *, colours: bool = False) -> Iterator[list[str]]:
    """The same, from the log's start or its last lines, and as it grows until the run ends."""
    sieve = _Sieve(search, control.read_spec(run), colours=colours)
    lines = LineTail(run.log)
    first = True
    try:
        while True:
            over = control.state(run) not in control.ALIVE  # asked before the last look
            found: list[str] = []
            while new := lines.read():
                found += sieve.take(new)
            if first:
                found = list(_last(iter(found), search.tail))
            first = False
            if found:
                yield found
            if over:
                return
            time.sleep(control.LOOK)
    finally:
        lines.close()
