"""What ranks print, as the cell shows it: whole lines with their ranks, folded, and paced.

A front end is slow, and a Jupyter server drops what comes faster than about 1 MB or 1,000
messages a second (jupyter_server's iopub_data_rate_limit, iopub_msg_rate_limit), without
saying how much. So no more is sent than it takes, and what is left out is counted where it is
missing. Nothing is lost: run.log has every line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpunb.display.bars import without_times
from tpunb.display.lines import Lines, plain
from tpunb.display.paper import MOST, NEWEST, Paper
from tpunb.display.ranks import fold, name_ranks
from tpunb.models import Failure

RATE = 300_000
"""Bytes that are written in any one second, at most."""
RESERVE = 50_000
"""… of which so many are kept for the end of the run, which always comes: half of them for
lines, half for the last words of what failed."""
WINDOW = 1.0
SETTLE = 0.05
"""Seconds that lines wait for equal ones of other ranks."""
PATIENCE = 1.0
"""Seconds after which a line without an end is shown as it is."""
LAST_WORDS = 20
"""Lines of a failed rank's stderr that are shown whatever else was left out."""
_FEW = 32
"""Ranks whose lines are folded to see whether they are equal before they are cut."""
_PREFIX = 8
"""Bytes that rank and line end add to a line; about right is enough."""


@dataclass
class _Source:
    """One stream of one rank."""

    lines: Lines = field(default_factory=Lines)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_WORDS))
    count: int = 0
    """Lines so far."""
    unseen: int = 0
    """Of the lines up to this one, some may not have been shown."""
    since: float | None = None
    """When the unfinished line began."""

    def feed(self, text: str, now: float, head: int, tail: int) -> tuple[list[str], int]:
        """The new lines that may be shown, and how many were passed over.

        Of long text only the first `head` characters or none may be shown, and the last `tail`.
        """
        lines: list[str] = []
        passed = 0
        if len(text) > head + tail:
            # More than can ever be shown: line ends are counted, which is quick.
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
        self.last.extend(lines[-LAST_WORDS:])
        if not self.lines.unfinished():
            self.since = None
        elif self.since is None or lines:
            self.since = now
        return lines, passed

    def rest(self) -> list[str]:
        """The unfinished line as the last one."""
        lines = self.lines.rest()
        self.count += len(lines)
        self.last.extend(lines)
        return lines

    def last_words(self) -> list[str]:
        """The last lines, if any of them may not have been shown."""
        return list(self.last) if self.unseen > max(0, self.count - LAST_WORDS) else []


@dataclass
class _Waiting:
    """What a rank wrote since something was shown the last time: the newest of it."""

    lines: list[str] = field(default_factory=list)
    size: int = 0
    left_out: int = 0
    """Lines that were older than `lines`."""

    def cut(self, budget: int) -> int:
        """Leave out the oldest lines until `budget` bytes are kept. Returns how many went."""
        start, total = len(self.lines), 0
        while start and total + (size := _size(self.lines[start - 1])) <= budget:
            start, total = start - 1, total + size
        self.lines, self.size = self.lines[start:], total
        self.left_out += start
        return start


class Stream:
    """Takes text as it comes and writes lines when they are due. Times are in seconds."""

    def __init__(self, logs: frozenset[int], paper: Paper, *, interval: float = 0.125) -> None:
        self._logs = logs
        self._paper = paper
        self._interval = interval
        self._sources: dict[tuple[int | None, str], _Source] = {}
        self._notes: list[str] = []
        self._waiting: dict[int, _Waiting] = {}
        self._since: float | None = None
        """When the oldest of what waits came; None if nothing does."""
        self._written: deque[tuple[float, int]] = deque()
        """Times and bytes of what was written within the window; the newest always stays."""

    def feed(self, rank: int | None, stream: str, text: str, now: float) -> None:
        """Take text of a rank.

        That of preludes, and of ranks that nobody asked for, is shown only if they fail.
        """
        shown = rank in self._logs and stream != "prelude"
        if not shown and stream == "stdout":
            return
        source = self._sources.setdefault((rank, stream), _Source())
        paper = self._paper
        head, tail = (paper.room or 0, MOST) if paper.is_limited else (0, RATE)
        lines, passed = source.feed(text, now, head, tail)
        if rank is None or not shown:
            source.unseen = source.count
        elif lines or passed:
            self._keep(rank, lines, passed, now)

    def note(self, text: str, now: float) -> None:
        """Take a line of tpunb's own. It is never left out."""
        self._notes.append(text)
        self._since = now if self._since is None else self._since

    def flush(self, now: float) -> None:
        """Write what is due. To be called often, and cheap when nothing is."""
        if self._since is None or now - self._since < SETTLE:
            return
        if self._written and now - self._written[-1][0] < self._interval:
            return
        allowed = RATE - RESERVE - self._used(now)
        waiting = sum(waiting.size for waiting in self._waiting.values())
        # Too much for now is not too much for ever: it may fit once the window is free.
        if self._paper.is_limited or waiting <= allowed or allowed == RATE - RESERVE:
            self._emit(allowed, now)

    @property
    def count(self) -> int:
        """Lines that ranks which are shown have written."""
        return sum(
            source.count
            for (rank, stream), source in self._sources.items()
            if rank in self._logs and stream != "prelude"
        )

    def unfinished(self, now: float) -> dict[int, list[str]]:
        """Progress bars and other lines of each rank that have no end yet, without colours."""
        found: dict[int, list[str]] = {}
        for (rank, stream), source in self._sources.items():
            if rank is None or rank not in self._logs or stream == "prelude":
                continue
            if source.since is not None and (source.lines.is_bar or now - source.since >= PATIENCE):
                text = plain(source.lines.unfinished())
                if text.strip():
                    found.setdefault(rank, []).append(text)
        return found

    def finish(self, now: float, failure: Failure | None = None) -> None:
        """Write the last lines, and the last words of what failed first."""
        for (rank, stream), source in self._sources.items():
            if (lines := source.rest()) and rank in self._logs and stream != "prelude":
                assert rank is not None
                # Bars differ in their times only: without these, those of all ranks are one.
                self._keep(rank, [without_times(line) for line in lines], 0, now)
        self._emit(RATE - RESERVE // 2 - self._used(now), now)
        if failure is not None:
            self._paper.say(self._last_words(failure))

    def _keep(self, rank: int, lines: list[str], passed: int, now: float) -> None:
        waiting = self._waiting.setdefault(rank, _Waiting())
        self._since = now if self._since is None else self._since
        if self._paper.is_limited:
            waiting.lines += lines
            del waiting.lines[self._paper.most_lines : -NEWEST]
            return
        if passed:
            waiting.cut(0)
            waiting.left_out += passed
            self._hide(rank)
        waiting.lines += lines
        waiting.size += _size("\n".join(lines)) + _PREFIX * (len(lines) - 1)
        if waiting.size > 2 * RATE and waiting.cut(RATE):
            self._hide(rank)

    def _hide(self, rank: int) -> None:
        """Lines of a rank are left out. Which of its streams they are of is not kept."""
        if source := self._sources.get((rank, "stderr")):
            source.unseen = source.count

    def _used(self, now: float) -> int:
        """Bytes that were written within the last second."""
        while self._written and now - self._written[0][0] >= WINDOW:
            if len(self._written) == 1:
                return 0
            self._written.popleft()
        return sum(size for _, size in self._written)

    def _emit(self, budget: int, now: float) -> None:
        """Put all that waits on the paper; where that has no limit, lines of `budget` bytes."""
        notes = "".join(f"{note}\n" for note in self._notes)
        if self._paper.is_limited:
            lines = self._limited()
            self._paper.say(notes)
        else:
            lines, left_out = self._take(budget)
            if total := sum(left_out.values()):
                what = "1 line" if total == 1 else f"{total:,} lines"
                notes += f"[{name_ranks(left_out)}] … {what} left out here; all are in run.log\n"
            lines = notes + lines
        self._paper.add(lines)
        if self._paper.room == 0:  # only the newest of all can be seen at last
            for rank in self._waiting:
                self._hide(rank)
        self._written.append((now, len(lines.encode())))
        self._notes, self._waiting, self._since = [], {}, None

    def _limited(self) -> str:
        """The first lines that wait, as many as there may be room for, and the newest."""
        # Of few ranks as many lines as can be seen when all fold, else a share for each.
        share = max(1, NEWEST // max(1, len(self._waiting)))
        each = NEWEST if len(self._waiting) <= _FEW else share
        while True:
            for waiting in self._waiting.values():
                del waiting.lines[self._paper.most_lines : -each]
            lines = self._folded()
            if each <= share or lines.count("\n") <= self._paper.most_lines + NEWEST:
                return lines
            each = max(share, each // 2)

    def _take(self, budget: int) -> tuple[str, dict[int, int]]:
        """The lines that wait as text of at most `budget` bytes; how many are left out of each."""
        share = budget
        while len((lines := self._folded()).encode()) > budget:
            sizes = {rank: waiting.size for rank, waiting in self._waiting.items()}
            for rank, most in _shares(sizes, share).items():
                if self._waiting[rank].cut(most):
                    self._hide(rank)
            share = share * 3 // 4
        return lines, {rank: w.left_out for rank, w in self._waiting.items() if w.left_out}

    def _folded(self) -> str:
        written = {rank: waiting.lines for rank, waiting in self._waiting.items()}
        return "".join(f"[{name_ranks(ranks)}] {line}\n" for line, ranks in fold(written))

    def _last_words(self, failure: Failure) -> str:
        rank = failure.rank
        source = self._sources.get((rank, "stderr"))
        if source is not None and (lines := source.last_words()):
            return f"the last lines that rank {rank} wrote to stderr:\n" + "".join(
                f"[{rank}] {line}\n" for line in lines
            )
        # What was written before an exception says little beside its traceback.
        prelude = self._sources.get((rank, "prelude"))
        if source is None and prelude is not None and not failure.traceback:
            return "the last lines that the prelude wrote:\n" + "".join(
                f"{line}\n" for line in prelude.last_words()
            )
        return ""


def _size(text: str) -> int:
    """Bytes of a line with its rank and line end, or of several without theirs."""
    return _PREFIX + (len(text) if text.isascii() else len(text.encode()))


def _shares(sizes: Mapping[int, int], budget: int) -> dict[int, int]:
    """Bytes for each rank: all that it needs for those that need little, the rest evenly."""
    shares: dict[int, int] = {}
    for rank in sorted(sizes, key=sizes.__getitem__):
        shares[rank] = min(sizes[rank], budget // (len(sizes) - len(shares)))
        budget -= shares[rank]
    return shares
