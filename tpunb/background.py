"""`--bg`: a handle to a run that goes on while other cells run."""

from __future__ import annotations

import html
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tpunb
from tpunb import control, panel
from tpunb.display.frontend import FrontEnd, Shared, here
from tpunb.display.lines import plain
from tpunb.display.view import View
from tpunb.events import Note
from tpunb.handoff import returns
from tpunb.launcher import Run
from tpunb.models import RunResult

LINES = 10
"""Newest lines that the handle shows below the status."""
LONGEST = 200


class _Board:
    """The one output of a handle: status and newest lines. A background thread prints nothing."""

    def __init__(self, name: str) -> None:
        self._output = Shared(name)
        self._notes: deque[str] = deque(maxlen=LINES)
        self._lines: Sequence[str] = ()
        self._last_words = ""
        self.show = self._output.show

    def front(self) -> FrontEnd:
        return FrontEnd(self.write, self.publish, newest=self.newest, room=0)

    def write(self, text: str) -> None:
        """Keep what tpunb says; the status is published often enough to bring it along."""
        self._notes.extend(plain(line)[:LONGEST] for line in text.splitlines())

    def newest(self, head: str, lines: Sequence[str]) -> None:
        """Keep the newest lines of ranks."""
        self._lines = [plain(line)[:LONGEST] for line in lines[-LINES:]]

    def publish(self, bundle: dict[str, str]) -> None:
        """Replace what is shown, wherever it is."""
        lines = self._last_words or "\n".join([*self._notes, *self._lines])
        style = "margin:0;padding:0 0 0 11px;white-space:pre-wrap;opacity:0.7"
        below = f'<pre style="{style}">{html.escape(lines)}</pre>'
        self._output({
            "text/plain": "\n".join(filter(None, [bundle["text/plain"], lines])),
            "text/html": bundle["text/html"] + (below if lines else ""),
        })  # fmt: skip

    def end(self, text: str) -> None:
        """In place of the newest lines, what there is to say about a failure."""
        self._last_words = text


class BackgroundRun:
    """A run in the background: it shows itself, and ends with the kernel.

    Nothing of it enters the notebook's variables unless `wait` is called.
    """

    def __init__(
        self,
        run: Run,
        *,
        logs: frozenset[int],
        notes: tuple[str, ...],
        raises: bool,
        bind: Callable[[Mapping[str, Any]], None],
        ended: Callable[[RunResult], None],
    ) -> None:
        """`bind` takes the values of `--returns`, in the thread of who waits.

        `ended` is called in the thread that follows the run. `raises`: so does `wait` where
        the run has failed.
        """
        self.dir = run.dir.path
        self._run = run
        self._raises = raises
        self._bind = bind
        self._ended = ended
        self._over = threading.Event()
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._collected = threading.Lock()
        self._board = _Board(run.dir.id)
        self._view = View(run.spec, run.dir, logs=logs, front=self._board.front())
        for note in notes:
            self._view.show(Note(note))
        self._view.tick()
        self._live = here().publish is not None
        self._panel = panel.Aside(run.spec, run.dir)
        self._show()
        threading.Thread(target=self._follow, name=f"tpunb-{run.dir.id}", daemon=True).start()

    @property
    def id(self) -> str:
        """The run's id, as %tpu_runs lists it."""
        return self._run.dir.id

    @property
    def state(self) -> str:
        """'starting', 'waiting', 'running', 'stopping', or how it has ended."""
        return self._result.state if self._result else control.state(self._run.dir)

    @property
    def result(self) -> RunResult | None:
        """How it ended, with the values of `--returns` in `.returns`; None while it goes on."""
        return self._collect() if self._over.is_set() else None

    def wait(self, timeout: float | None = None) -> RunResult:
        """Wait for the end, and bring the values of `--returns` into the notebook.

        Raises the run's error if it has failed, unless it was started with `--no-raise`, and
        TimeoutError if it has not ended within `timeout` seconds. It goes on then, as it does
        when the waiting is interrupted.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"run {self.id} has not ended within {timeout:g} s and goes on")
        result = self._collect()
        self._bind(result.returns)
        if self._raises:
            result.raise_for_failure()
        return result

    def stop(self) -> RunResult:
        """Stop it as the interrupt key stops a cell, and wait until it has ended.

        Called again while ranks save, what is left of their time is skipped.
        """
        if not self._over.is_set():
            control.ask_to_stop(self._run.dir, "stopped with .stop()")
        self._over.wait()
        return self._collect()

    def _follow(self) -> None:
        """In a thread: nothing here may print, or touch the notebook's variables."""
        try:
            try:
                for event in self._run.events():
                    for shown in (self._view, self._panel.panel):
                        shown.tick() if event is None else shown.show(event)
            finally:
                self._panel.panel.end()
            result = self._run.result()
            self._ended(result)
            tpunb.last_run = self._result = result
            if result.state != "succeeded":
                self._board.end(result.explain(traceback=False))
            self._view.finish(result)
            panel.keep(result)
        except BaseException as error:  # told to whoever waits: a thread has nobody to tell
            self._error = error
        finally:
            self._over.set()

    def _collect(self) -> RunResult:
        """The result with the values that came back: read once, in the thread of who asks."""
        with self._collected:
            if self._result is None:
                assert self._error is not None
                raise self._error
            if not (self._result.returns or self._result.returns_failed):
                whole = returns.collect(self._result, self._run.spec)
                if tpunb.last_run is self._result:
                    tpunb.last_run = whole
                self._result = whole
            return self._result

    def __repr__(self) -> str:
        """What it is, and what can be done with it."""
        return f"BackgroundRun {self.id}: {self.state} (.wait() .stop() .result .state)"

    def _ipython_display_(self) -> None:
        """Show it here too, live; in a terminal, which cannot replace an output, as text."""
        if self._live:
            self._show()
        else:
            print(repr(self))

    def _show(self) -> None:
        if self._live:
            self._board.show()
            self._panel.show()
