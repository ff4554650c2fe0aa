"""`--bg`: a handle to a run that continues while other cells run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tpunb.display.front_end import NOTHING, FrontEnd, SharedOutput, current_front_end
from tpunb.display.run_view import RunView
from tpunb.kernel import panel
from tpunb.kernel.launcher import Run, show_events
from tpunb.runs import last_run, returns, state
from tpunb.runs.events import Note
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState, Stop, StopOrigin
from tpunb.utils.ansi import strip_ansi

LINES = 10
"""Number of newest lines that the handle shows below the status."""
LONGEST = 200
"""Maximum number of characters of such a line."""


class _HandleOutput:
    """The outputs of a handle: status, panel and newest lines. Its thread prints nothing."""

    def __init__(self, name: str) -> None:
        self._status, self._below = SharedOutput(name), SharedOutput(f"{name}-lines")
        self.panel = SharedOutput(f"{name}-panel")
        self._below(NOTHING)
        self._notes: deque[str] = deque(maxlen=LINES)
        self._lines: Sequence[str] = ()

    def show(self) -> None:
        """Show all in the running cell."""
        for output in (self._status, self.panel, self._below):
            output.show()

    def front_end(self) -> FrontEnd:
        """Return a front end that writes to these outputs."""
        return FrontEnd(self.write, self._status, newest=self.newest, room=0)

    def write(self, text: str) -> None:
        """Show lines from tpunb itself."""
        self._notes.extend(strip_ansi(line)[:LONGEST] for line in text.splitlines())
        self._show_lines()

    def newest(self, head: str, lines: Sequence[str]) -> None:
        """Show the newest lines of ranks."""
        self._lines = [strip_ansi(line)[:LONGEST] for line in lines[-LINES:]]
        self._show_lines()

    def _show_lines(self) -> None:
        self._below({"text/plain": "\n".join([*self._notes, *self._lines])})


class BackgroundRun:
    """A background run, which ends with the kernel.

    A notebook displays it as the run's live status. No variable of the notebook changes until
    `wait` is called.
    """

    def __init__(
        self,
        run: Run,
        *,
        logs: frozenset[int],
        notes: Iterable[Note],
        raises: bool,
        bind: Callable[[RunResult], None],
        ended: Callable[[RunResult], None],
    ) -> None:
        """`bind` is called with the result and its values, in the thread that calls `wait`.

        `ended` is called in the thread that follows the run. `raises`: `wait` raises the error
        of a run that has failed.
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
        self._output = _HandleOutput(run.dir.id)
        self._view = RunView(
            run.spec, run.dir, logs=logs, front=self._output.front_end(), notes=notes
        )
        self._view.tick()
        self._live = current_front_end().publish is not None
        self._panel = panel.background_panel(run.spec, run.dir, self._output.panel)
        self._show()
        threading.Thread(target=self._follow, name=f"tpunb-{run.dir.id}", daemon=True).start()

    @property
    def id(self) -> str:
        """The run's id, as %tpu_runs lists it."""
        return self._run.dir.id

    @property
    def state(self) -> RunState:
        """The current state of the run, or its final one."""
        return self._result.state if self._result else state.run_state(self._run.dir)

    @property
    def result(self) -> RunResult | None:
        """The result, with the values of `--returns`; None until the run has ended."""
        return self._collect() if self._over.is_set() else None

    def wait(self, timeout: float | None = None) -> RunResult:
        """Wait for the run's end, set the variables of `--returns`, and return the result.

        Raises the run's error if it has failed, unless it was started with `--no-raise`, and
        TimeoutError if it has not ended within `timeout` seconds. The run continues after a
        TimeoutError, and after an interrupt of this call.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"run {self.id} has not ended within {timeout:g} s; it continues")
        result = self._collect()
        self._bind(result)
        if self._raises:
            result.raise_for_failure()
        return result

    def stop(self) -> RunResult:
        """Stop the run as the interrupt key stops a cell, and wait until it has ended.

        A second call, while the ranks save, skips the rest of the grace period.
        """
        if not self._over.is_set():
            hurry = self.state is RunState.STOPPING
            stop = Stop(reason="stopped with .stop()", origin=StopOrigin.HANDLE, now=hurry)
            state.request_stop(self._run.dir, stop)
        self._over.wait()
        return self._collect()

    def _follow(self) -> None:
        """Follow the run, in a thread: it must not print or touch the notebook's variables."""
        try:
            try:
                for _ in show_events(self._run, self._view, self._panel):
                    pass
            finally:
                self._panel.end()
            result = self._run.result()
            self._ended(result)
            last_run.result = self._result = result
            self._view.finish(result)
            panel.show_result(result)
        except BaseException as error:  # this is a thread: `wait` raises it to the user
            self._error = error
        finally:
            self._over.set()

    def _collect(self) -> RunResult:
        """Return the result with the values of `--returns`, which are read once."""
        with self._collected:
            if self._result is None:
                assert self._error is not None
                raise self._error
            if not (self._result.returns or self._result.returns_failed):
                whole = returns.collect_returns(self._result, self._run.spec, self._run.dir)
                if last_run.result is self._result:
                    last_run.result = whole
                self._result = whole
            return self._result

    def __repr__(self) -> str:
        """The run's state and the handle's methods."""
        return f"BackgroundRun {self.id}: {self.state} (.wait() .stop() .result .state)"

    def _ipython_display_(self) -> None:
        """Display the live status; a terminal, which cannot replace outputs, gets one line."""
        if self._live:
            self._show()
        else:
            print(repr(self))

    def _show(self) -> None:
        if self._live:
            self._output.show()
