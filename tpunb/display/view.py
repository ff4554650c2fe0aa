"""A run as the person sees it: a status that is updated in place, and below it the lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tpunb import terminal
from tpunb.display import card, paper, shown
from tpunb.display.frontend import FrontEnd, Replaced, here
from tpunb.display.paper import Paper
from tpunb.display.status import Status
from tpunb.display.stream import Stream
from tpunb.display.tracebacks import Tracebacks
from tpunb.events import Event, Note, Output, RankEnded, RanksStarted
from tpunb.models import RunResult, RunSpec
from tpunb.rundir import RunDir

# Together ten messages a second: either lines are written, or the newest replaced.
LINES_EVERY = 0.125
NEWEST_EVERY = 0.25
STATUS_EVERY = 0.5
BATCH_EVERY = 2.0
"""Seconds between two updates where nobody looks …"""
BATCH_LINES_EVERY = 10.0
"""… and between two texts, of which each becomes an output of its own in the file."""
TERMINAL_EVERY = 10.0
"""Seconds between two lines of status in a terminal, if only numbers have changed."""


class View:
    """Shows the events of one run. Never waits, and calls the front end in the caller's thread."""

    def __init__(
        self,
        spec: RunSpec,
        run: RunDir,
        *,
        logs: frozenset[int],
        front: FrontEnd | None = None,
        clock: Callable[[], float] = time.monotonic,
        age: float = 0.0,
        stop: str = card.STOP,
    ) -> None:
        """`logs`: the ranks whose lines are shown. `front`: the cell's own, unless given.

        `age`: the seconds since the run began, where it is not followed from its start. `stop`:
        what the button says that interrupts the cell.
        """
        self._front = here() if front is None else front
        self._clock = clock
        self._run = run
        batch = self._front.batch
        cost = paper.MESSAGE if batch else 0
        self._paper = Paper(self._front.write, room=self._front.room, message=cost)
        every = BATCH_LINES_EVERY if batch else LINES_EVERY
        self._stream = Stream(logs, self._paper, interval=every)
        self._shown: tuple[float, list[str]] = (-math.inf, [])
        """When the newest lines were shown, and which."""
        self._tracebacks = Tracebacks(run)
        self._status = Status(spec, short(run.path), clock=clock, age=age, stop=stop)
        self._due = self._published = -math.inf
        self._content: tuple[str, ...] = ()
        self._state: tuple[str, ...] = ()

    def show(self, event: Event) -> None:
        """Take in an event. What it changes is shown by the next `tick` for which it is due."""
        if isinstance(event, Output):
            text = event.text
            if event.rank is not None and event.stream == "stderr":
                text = self._tracebacks.without(event.rank, text)
            self._stream.feed(event.rank, event.stream, text, self._clock())
        elif isinstance(event, Note):
            self._stream.note(event.text, self._clock())
        else:
            if isinstance(event, RanksStarted):
                self._show(self._tracebacks.begin(event.attempt))
            self._status.show(event)
            if isinstance(event, RankEnded) and event.exitcode:
                self._status.blame(self._tracebacks.failure(event.rank))

    def _show(self, tracebacks: Iterator[tuple[int, str]]) -> None:
        for rank, text in tracebacks:
            self._stream.feed(rank, "stderr", text, self._clock())

    @property
    def folds(self) -> bool:
        """Whether the card holds the traceback of a failure: where nobody watches it would
        only be read twice, and a terminal has no card.
        """
        return self._front.publish is not None and not self._front.batch

    def tick(self) -> None:
        """Show what is due. To be called often, about 20 times a second.

        Called whenever all that is known was shown, and not between the lines of two ranks
        that were read together: those that are equal fold.
        """
        now = self._clock()
        if now >= self._due:
            every = BATCH_EVERY if self._front.batch else STATUS_EVERY
            # From when it was due, not from now: or else each look would be a little later.
            shown = self._publish(now)
            since = self._due if now - self._due < every else now
            self._due = since + every if shown else now + every / 4
        self._stream.flush(now)
        if now - self._shown[0] >= (BATCH_EVERY if self._front.batch else NEWEST_EVERY):
            self._show_newest(now)

    def finish(self, result: RunResult) -> None:
        """Show the last lines and how the run ended."""
        now = self._clock()
        self._show(self._tracebacks.end(result))
        self._stream.finish(now, None if result.state == "succeeded" else result.failure)
        self._show_newest(now)
        self._status.end(result, folds=self.folds, links=self._front.links)
        self._publish(now)
        if isinstance(self._front.publish, Replaced):
            shown.stands_here(result.dir)

    def leave(self, text: str) -> None:
        """Show what waits, and in place of the run's phase that it is followed no more."""
        now = self._clock()
        self._stream.finish(now)
        self._show_newest(now)
        self._status.leave(text)
        self._publish(now)

    def _show_newest(self, now: float) -> None:
        """The newest lines, where the cell has no room for more, if there are new ones."""
        if self._front.newest is None or not self._paper.newest:
            return
        log = f"{short(self._run.path)}/run.log"
        head = (
            f"… the newest of {self._stream.count:,} lines ({log} has all, %tpu_logs searches it):"
        )
        lines = [head, *self._paper.newest]
        if lines != self._shown[1]:
            self._front.newest(head, lines[1:])
            self._shown = now, lines

    def _publish(self, now: float) -> bool:
        """Show the status; False if it has not changed."""
        if self._status.running:
            self._status.unfinished = self._stream.unfinished(now)
        content, state = self._status.content(), self._status.state()
        if content == self._content:
            return False
        if self._front.publish is not None:
            html = self._status.html(stop=self._front.stops)
            bundle = {"text/html": html, "text/plain": self._status.text()}
            self._front.publish(bundle)
        elif state != self._state or now - self._published >= TERMINAL_EVERY:
            self._front.write(terminal.coloured(self._status.line()) + "\n")
        else:
            return False
        self._published, self._content, self._state = now, content, state
        return True


def short(path: Path) -> str:
    """A path as it is read best: from the working directory, if it lies below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
