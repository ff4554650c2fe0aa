"""The ranks' output in the cell: whole lines with their ranks, equal ones folded.

In a notebook the output has a budget (`output_budget`): its first lines are shown, and then the
newest. So it stays below what front ends and a Jupyter server's limits can take (about 1 MB or
1,000 messages a second). A terminal gets every line, as run.log does.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tpunb.display.output_budget import MOST, NEWEST, OutputBudget
from tpunb.display.progress import strip_times
from tpunb.runs.directory import RunDir
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import RunState
from tpunb.utils.ansi import Lines, strip_ansi
from tpunb.utils.text import fold, name_ranks

SETTLE = 0.05
"""Seconds that lines wait for equal lines of other ranks."""
BURST = 2
"""Writes that may follow each other at once, so that tpunb's notes do not delay the first lines."""
PATIENCE = 1.0
"""Seconds after which an unfinished line is shown as it is."""
LAST_LINES = 20
"""Last lines of a failed rank's stderr that are always shown."""
_OF_LIBRARIES = re.compile(
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\."
    r"|\d+\.\d\ds - (?:Debugger warning: |make the debugger miss |to python to disable frozen "
    r"|Note: Debugging will proceed\.)"
)
"""What gloo and debugpy write when all is well; only run.log has these lines."""
_FEW = 32
"""Maximum number of ranks whose lines are folded before they are cut: folding saves space."""


@dataclass
class _Source:
    lines: Lines = field(default_factory=Lines)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    count: int = 0
    """Number of lines so far."""
    unseen: int = 0
    """Some of the first `unseen` lines may not have been shown."""
    since: float | None = None
    """Time at which the unfinished line began."""

    def feed(self, text: str, now: float, ends: tuple[int, int] | None) -> tuple[list[str], int]:
        """Return the new lines that may be shown, and the number of skipped lines.

        `ends`: in long text only this many characters at its beginning and at its end are split
        into lines.
        """
        lines: list[str] = []
        passed = 0
        if ends is not None and len(text) > sum(ends):
            # More than can be shown: the middle is only counted, which is fast.
            head, tail = ends
            first = text.find("\n", head) + 1
            start = text.find("\n", len(text) - tail) + 1
            if 0 < first < start:
                lines = self.lines.feed(text[:first])
                passed = text.count("\n", first, start)
                if not head:
                    passed, lines = passed + len(lines), []
                text = text[start:]
        lines += self.lines.feed(text)
        self.count += passed + len(lines)
        self.last.extend(lines[-LAST_LINES:])
        if not self.lines.unfinished():
            self.since = None
        elif self.since is None or lines:
            self.since = now
        return lines, passed

    def rest(self) -> list[str]:
        lines = self.lines.rest()
        self.count += len(lines)
        self.last.extend(lines)
        return lines

    def last_lines(self) -> list[str]:
        return list(self.last) if self.unseen > max(0, self.count - LAST_LINES) else []


class LogView:
    """Collects the ranks' text and writes lines when they are due. Times are in seconds."""

    def __init__(
        self,
        logs: frozenset[int],
        budget: OutputBudget,
        *,
        interval: float = 0.125,
        burst: int = BURST,
        name: Callable[[Iterable[int]], str] = name_ranks,
    ) -> None:
        """`name`: returns the label of the lines of ranks."""
        self._name = name
        self._logs = logs
        self._budget = budget
        self._interval = interval
        self._burst = burst
        self._sources: dict[tuple[int | None, str], _Source] = {}
        self._notes: list[str] = []
        self._pending: dict[int, list[str]] = {}
        """The newest lines of each rank that have not been shown yet."""
        self._since: float | None = None
        """Time at which the oldest pending line came; None if no line is pending."""
        self._last: deque[float] = deque(maxlen=burst)
        """Times of the last writes."""

    def feed(self, rank: int | None, stream: str, text: str, now: float) -> None:
        """Add text of a rank.

        Text of preludes, and of ranks outside `logs`, is shown only if they fail.
        """
        shown = rank in self._logs and stream != "prelude"
        if not shown and stream == "stdout":
            return
        source = self._sources.setdefault((rank, stream), _Source())
        budget = self._budget
        ends = (budget.room or 0, MOST) if budget.is_limited else None
        lines, passed = source.feed(text, now, ends)
        lines = [line for line in lines if not _OF_LIBRARIES.match(line)]
        if rank is None or not shown:
            source.unseen = source.count
        elif lines or passed:
            self._keep(rank, lines, now)

    def note(self, text: str, now: float) -> None:
        """Add a line of tpunb itself, which is never left out."""
        self._notes.append(text)
        self._since = now if self._since is None else self._since

    def flush(self, now: float, *, at_once: bool = False) -> None:
        """Write lines that are due, or `at_once` all that are pending.

        Call this often; it costs little if no line is due.
        """
        if self._since is None:
            return
        if not at_once:
            if now - self._since < SETTLE and not self._all_have_written:
                return
            pause = self._burst * self._interval
            if len(self._last) == self._burst and now - self._last[0] < pause:
                return
        self._emit(now)

    @property
    def _all_have_written(self) -> bool:
        """True if all shown ranks have equally many pending lines, so that none need wait."""
        counts = {len(lines) for lines in self._pending.values()}
        return len(self._pending) == len(self._logs) and len(counts) == 1

    @property
    def count(self) -> int:
        """Number of lines that the shown ranks have written."""
        return sum(
            source.count
            for (rank, stream), source in self._sources.items()
            if rank in self._logs and stream != "prelude"
        )

    def unfinished(self, now: float) -> dict[int, list[str]]:
        """Return each rank's unfinished lines, including progress bars, without colours."""
        lines: dict[int, list[str]] = {}
        for (rank, stream), source in self._sources.items():
            if rank is None or rank not in self._logs or stream == "prelude":
                continue
            if source.since is not None and (source.lines.is_bar or now - source.since >= PATIENCE):
                text = strip_ansi(source.lines.unfinished())
                if text.strip():
                    lines.setdefault(rank, []).append(text)
        return lines

    def finish(self, now: float, failure: Failure | None = None) -> None:
        """Write the pending lines, and the last lines of the rank that failed first."""
        for (rank, stream), source in self._sources.items():
            if (lines := source.rest()) and rank in self._logs and stream != "prelude":
                assert rank is not None
                # The ranks' bars differ only in their times; without these they can be folded.
                self._keep(rank, [strip_times(line) for line in lines], now)
        self._emit(now)
        if failure is not None:
            self._budget.write_always(self._last_lines(failure))

    def _keep(self, rank: int, lines: list[str], now: float) -> None:
        self._since = now if self._since is None else self._since
        pending = self._pending.setdefault(rank, [])
        pending += lines
        if self._budget.is_limited:
            del pending[self._budget.most_lines : -NEWEST]

    def _emit(self, now: float) -> None:
        """Write all pending lines for which the budget has room."""
        lines = self._limited() if self._budget.is_limited else self._folded()
        self._budget.write_always("".join(f"{note}\n" for note in self._notes))
        self._budget.add(lines)
        if self._budget.room == 0:  # only the newest lines of all ranks are visible
            for rank in self._pending:
                if source := self._sources.get((rank, "stderr")):
                    source.unseen = source.count
        self._last.append(now)
        self._notes, self._pending, self._since = [], {}, None

    def _limited(self) -> str:
        """Return the first pending lines that may fit, and the newest."""
        # For few ranks, keep as many lines as are visible if all fold; otherwise a share of each.
        share = max(1, NEWEST // max(1, len(self._pending)))
        each = NEWEST if len(self._pending) <= _FEW else share
        while True:
            for pending in self._pending.values():
                del pending[self._budget.most_lines : -each]
            lines = self._folded()
            if each <= share or lines.count("\n") <= self._budget.most_lines + NEWEST:
                return lines
            each = max(share, each // 2)

    def _folded(self) -> str:
        return "".join(f"[{self._name(ranks)}] {line}\n" for line, ranks in fold(self._pending))

    def _last_lines(self, failure: Failure) -> str:
        rank = failure.rank
        source = self._sources.get((rank, "stderr"))
        if source is not None and (lines := source.last_lines()):
            name = "" if rank is None else self._name([rank])
            return f"last lines of rank {name} on stderr:\n" + "".join(
                f"[{name}] {line}\n" for line in lines
            )
        # If there is a traceback, the lines before it add little.
        prelude = self._sources.get((rank, "prelude"))
        if source is None and prelude is not None and not failure.traceback:
            return "last lines of the prelude:\n" + "".join(
                f"{line}\n" for line in prelude.last_lines()
            )
        return ""


# Tracebacks, removed from the ranks' output: the end of the run shows the first one


@dataclass
class _ExpectedTraceback:
    """The traceback that one rank will print, and how much of it was printed."""

    failure: Failure
    held: str = ""
    """Text held back because it may be the beginning of the traceback."""
    seen: bool = False


class TracebackFilter:
    """Removes from the ranks' output the tracebacks that ended them; run.log keeps them.

    A rank writes its failure to `error.json` before it prints the traceback (`worker.rank`), so
    the text to search for is known before its first byte is read.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._attempt = 0
        self._ranks: dict[int, _ExpectedTraceback] = {}

    def failure(self, rank: int) -> Failure | None:
        if rank not in self._ranks:
            failure = self._run.read_error(self._attempt, rank)
            if failure is None:
                return None
            self._ranks[rank] = _ExpectedTraceback(failure)
        return self._ranks[rank].failure

    def remove(self, rank: int, text: str) -> str:
        """Return a rank's text on standard error without the traceback that ended it."""
        failure = self.failure(rank)
        if failure is None or (expected := self._ranks[rank]).seen:
            return text
        traceback = failure.traceback
        text = expected.held + text
        before, middle, after = text.partition(traceback)
        if middle:
            expected.seen, expected.held = True, ""
            return before + after
        start = _beginning(traceback, text)
        expected.held = text[start:]
        return text[:start]

    def begin(self, attempt: int) -> Iterator[tuple[int, str]]:
        """Begin an attempt; yield the text that was removed in the attempt before."""
        if attempt != self._attempt:
            yield from self._rest(None)
            self._attempt = attempt

    def end(self, result: RunResult) -> Iterator[tuple[int, str]]:
        """End the run; yield the removed text that is not shown with the first failure."""
        yield from self._rest(result.failure if result.state == RunState.FAILED else None)

    def _rest(self, shown: Failure | None) -> Iterator[tuple[int, str]]:
        for rank, expected in self._ranks.items():
            text = expected.failure.traceback if expected.seen else expected.held
            if shown is None or not expected.failure.is_like(shown):
                yield rank, text
        self._ranks = {}


def _beginning(traceback: str, text: str) -> int:
    """Return where the start of the traceback may be at the end of a text; or the text's length."""
    start = text.find(traceback[:1], max(len(text) - len(traceback) + 1, 0))
    while start >= 0:
        if traceback.startswith(text[start:]):
            return start
        start = text.find(traceback[:1], start + 1)
    return len(text)
