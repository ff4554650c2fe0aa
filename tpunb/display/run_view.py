"""The view of a run in its cell: a status that is updated in place, the ranks' output below it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tpunb.display import formatters, html, output_budget
from tpunb.display.front_end import FrontEnd, ReplacedOutput, current_front_end
from tpunb.display.log_view import BURST, LogView, TracebackFilter
from tpunb.display.output_budget import OutputBudget
from tpunb.display.status import RunStatus
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Event, Figure, Note, Output, RankEnded, RanksStarted
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec, RunState
from tpunb.utils import files, terminal

# Seconds between updates. Together they cause about ten messages a second: lines are either
# written, or the newest are replaced.
LINES_EVERY = 0.125
NEWEST_EVERY = 0.25
STATUS_EVERY = 0.5
BATCH_EVERY = 2.0
"""Seconds between updates under papermill and nbclient, where no user is watching."""
BATCH_LINES_EVERY = 10.0
"""Seconds between writes there, each of which becomes an output of its own in the file."""
EARLIER = 10
"""Runs before it in a loop that have a line on the card."""
LARGEST_FIGURE = 8_000_000
"""Bytes of a figure's file that are read."""
TERMINAL_EVERY = 10.0
"""Seconds between status lines in a terminal, if only numbers have changed."""


class RunView:
    """Shows the events of one run; never waits, and calls the front end in the caller's thread."""

    def __init__(
        self,
        spec: RunSpec,
        run: RunDir,
        *,
        logs: frozenset[int],
        front: FrontEnd | None = None,
        clock: Callable[[], float] = time.monotonic,
        age: float = 0.0,
        stop: str = html.STOP,
        notes: Iterable[Note] = (),
        follows: RunView | None = None,
    ) -> None:
        """Show a run.

        Args:
            spec: The run's spec.
            run: Its folder.
            logs: The ranks whose output is shown.
            front: The front end; the running cell's by default.
            clock: Seconds from any origin.
            age: Seconds since the run began, if it is not followed from its start.
            stop: Label of the button that interrupts the cell.
            notes: Notes on the run as a whole, which its card shows.
            follows: The view of the run before it in the cell. If that has succeeded, its card
                becomes this run's, with a line for the run before.
        """
        self._front = current_front_end() if front is None else front
        self.panel_output = ReplacedOutput()
        """The place of the panel, below the card."""
        if follows is not None and follows.succeeded:
            self._front = replace(self._front, publish=follows._front.publish)
            self.panel_output = follows.panel_output
        self._clock = clock
        self._run = run
        batch = self._front.batch
        cost = output_budget.MESSAGE if batch else 0
        self._budget = OutputBudget(self._front.write, room=self._front.room, message=cost)
        every, burst = (BATCH_LINES_EVERY, 1) if batch else (LINES_EVERY, BURST)
        self._log = LogView(logs, self._budget, interval=every, burst=burst, name=spec.name_ranks)
        self._newest: tuple[float, list[str]] = (-math.inf, [])
        """The newest lines that were shown last, and the time when they were shown."""
        self._tracebacks = TracebackFilter(run)
        self._status = RunStatus(spec, relative_path(run.path), clock=clock, age=age, stop=stop)
        self._figures: dict[int, Path] = {}
        """Figures that are not shown yet, by number."""
        self._figures_named: set[int] = set()
        self._due = self._published = -math.inf
        self._content: tuple[str, ...] = ()
        self._state: tuple[str, ...] = ()
        if follows is not None and follows.succeeded:
            earlier = follows._status
            self._status.earlier = [*earlier.earlier, earlier.folded()][-EARLIER:]
        for note in notes:
            self._note(note, whole=True)

    def show(self, event: Event) -> None:
        """Handle an event. A later `tick` shows the change, once it is due."""
        if isinstance(event, Output):
            text = event.text
            if event.rank is not None and event.stream == "stderr":
                text = self._tracebacks.remove(event.rank, text)
            self._log.feed(event.rank, event.stream, text, self._clock())
        elif isinstance(event, Note):
            self._note(event)
        elif isinstance(event, Figure):
            self._figures[event.number] = self._run.figure(event.attempt, event.number)
        else:
            if isinstance(event, RanksStarted):
                self._feed(self._tracebacks.begin(event.attempt))
            self._status.show(event)
            if isinstance(event, RankEnded) and event.exitcode:
                self._status.blame(self._tracebacks.failure(event.rank))

    def _note(self, note: Note, *, whole: bool = False) -> None:
        """Show a note, on the card if it is about the `whole` run. Terminals show no minor one."""
        if note.minor or (whole and self._front.publish is not None):
            self._status.notes.append(note)
        else:
            self._log.note(note.text, self._clock())

    def _feed(self, tracebacks: Iterator[tuple[int, str]]) -> None:
        for rank, text in tracebacks:
            self._log.feed(rank, "stderr", text, self._clock())

    @property
    def succeeded(self) -> bool:
        """True once the run has succeeded, with nothing to be said about it."""
        return self._status.succeeded

    @property
    def shows_everything(self) -> bool:
        """True if the card shows everything about a failure, so that its error can be one line.

        A terminal has no card; papermill and nbclient report only the error.
        """
        return self._front.publish is not None and not self._front.batch

    def tick(self) -> None:
        """Show changes that are due. Call this about 20 times a second.

        Call it after all events that were read together, not between them, so that equal lines
        of their ranks are folded.
        """
        now = self._clock()
        if self._due > -math.inf:  # the status must be shown first: it is above the lines
            self._show_figures(now)
            self._log.flush(now)
        if now >= self._due:
            every = BATCH_EVERY if self._front.batch else STATUS_EVERY
            # Counted from the due time, not from now: otherwise the delays would add up.
            changed = self._publish(now)
            since = self._due if now - self._due < every else now
            self._due = since + every if changed else now + every / 4
        if now - self._newest[0] >= (BATCH_EVERY if self._front.batch else NEWEST_EVERY):
            self._show_newest(now)

    def _show_figures(self, now: float) -> None:
        """Show new figures below the lines before them. Those of other machines may come later."""
        for number, path in list(self._figures.items()):
            with suppress(OSError):
                png = files.read_start(path, LARGEST_FIGURE)
                del self._figures[number]
                if self._front.figure is not None:
                    self._log.flush(now, at_once=True)
                    self._front.figure(number, png, f"figure {number}: {relative_path(path)}")
                elif number not in self._figures_named:
                    self._figures_named.add(number)
                    self._log.note(f"figure {number}: {relative_path(path)}", now)

    def finish(self, result: RunResult) -> None:
        """Show the last lines and the result."""
        now = self._clock()
        self._show_figures(now)
        self._feed(self._tracebacks.end(result))
        self._log.finish(now, None if result.state == RunState.SUCCEEDED else result.failure)
        self._show_newest(now)
        self._status.end(result, traceback=self.shows_everything, link=self._front.links)
        self._publish(now)
        if isinstance(self._front.publish, ReplacedOutput):
            formatters.note_card(result.dir)

    def leave(self, text: str) -> None:
        """Show pending lines, and `text` as the state of the run, which is no longer followed."""
        now = self._clock()
        self._log.finish(now)
        self._show_newest(now)
        self._status.leave(text)
        self._publish(now)

    def _show_newest(self, now: float) -> None:
        """Replace the newest lines, if the budget is spent and there are new ones."""
        if self._front.newest is None or not self._budget.newest:
            return
        log = f"{relative_path(self._run.path)}/run.log"
        head = f"… the newest of {self._log.count:,} lines (all are in {log}; search: %tpu_logs):"
        lines = [head, *self._budget.newest]
        if lines != self._newest[1]:
            self._front.newest(head, lines[1:])
            self._newest = now, lines

    def _publish(self, now: float) -> bool:
        """Show the status; False if it has not changed."""
        if self._status.running:
            self._status.unfinished = self._log.unfinished(now)
        content, state = self._status.content(), self._status.state()
        if content == self._content:
            return False
        if self._front.publish is not None:
            card = self._status.html(stop=self._front.stops)
            bundle = {"text/html": card, "text/plain": self._status.text()}
            self._front.publish(bundle)
        elif state != self._state or now - self._published >= TERMINAL_EVERY:
            self._front.write(terminal.coloured(self._status.line()) + "\n")
        else:
            return False
        self._published, self._content, self._state = now, content, state
        return True


def show_waiting(front: FrontEnd, text: str) -> None:
    """Show a message before a run exists, in the place of its later status."""
    if front.publish is not None:
        card = html.Card(html.GREY, text, (), "", stop=html.STOP if front.stops else "")
        front.publish({"text/html": card.html(), "text/plain": text})
    else:
        front.write(f"{text}\n")


def relative_path(path: Path) -> str:
    """Return the path, relative to the working directory if it is below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
