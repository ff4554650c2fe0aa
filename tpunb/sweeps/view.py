"""Views of a running sweep: a table that is updated in place, in a notebook or a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from IPython.core.getipython import get_ipython

from tpunb.display.front_end import FrontEnd, current_front_end
from tpunb.display.run_view import BATCH_EVERY, STATUS_EVERY
from tpunb.sweeps.folder import Trial, TrialState
from tpunb.sweeps.table import SweepTable
from tpunb.utils import terminal

_ROWS_LEFT = 5
"""Lines of a terminal besides the trials: headline, column names, number of other rows, news."""


class SweepView(AbstractContextManager["SweepView"]):
    """Base class of the three views of a sweep's trials."""

    def __init__(self, table: SweepTable, notes: Sequence[str]) -> None:
        self.table = table
        self.notes = notes
        self.news = ""
        """What the sweep is doing, if it does more than run trials."""

    def __exit__(self, *about: Any) -> None:
        pass

    def show(self, trials: Mapping[int, Trial]) -> None:
        self.table = replace(self.table, trials=dict(trials))

    def tell(self, news: str, trials: Mapping[int, Trial]) -> None:
        """Show at once, and until the end, what the sweep is doing."""
        self.news = news
        self.show(trials)

    def finish(self, trials: Mapping[int, Trial], *, stopped: bool) -> None:
        """Show the final state of the trials."""
        self.show(trials)

    @property
    def stopped(self) -> str:
        how = " without --again (again=True)" if self.table.spec.again else ""
        return f"stopped; run it again{how} to continue"

    @property
    def shows_everything(self) -> Callable[[], bool] | None:
        """A function that is True in the cell that shows the table; None outside notebooks."""
        return None


class _Notebook(SweepView):
    def __init__(self, table: SweepTable, notes: Sequence[str], front: FrontEnd) -> None:
        super().__init__(table, notes)
        self._front = front
        self._cell = _execution_count()
        self._shown = 0.0
        self._every = BATCH_EVERY if front.batch else STATUS_EVERY

    def show(self, trials: Mapping[int, Trial]) -> None:
        super().show(trials)
        if time.monotonic() - self._shown >= self._every:
            self._publish(self.news)

    def tell(self, news: str, trials: Mapping[int, Trial]) -> None:
        super().tell(news, trials)
        self._publish(news)

    def finish(self, trials: Mapping[int, Trial], *, stopped: bool) -> None:
        super().show(trials)
        self._publish(self.stopped if stopped else "")

    def _publish(self, note: str) -> None:
        assert self._front.publish is not None
        began = time.monotonic()
        text = "\n".join([*self.notes, *([note] if note else [])])
        plain = "\n".join(filter(None, [str(self.table.text()), text]))
        self._front.publish({"text/html": self.table.html(text), "text/plain": plain})
        # Tables of thousands of trials are slow to make: spend a twentieth of the time on them.
        self._shown = time.monotonic() + 20 * (time.monotonic() - began)

    @property
    def shows_everything(self) -> Callable[[], bool] | None:
        return lambda: _execution_count() == self._cell


class _Terminal(SweepView):
    def __init__(self, table: SweepTable, notes: Sequence[str]) -> None:
        super().__init__(table, notes)
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> SweepView:
        for note in self.notes:
            print(note)
        self._live.start()
        return self

    def __exit__(self, *about: Any) -> None:
        self._live.stop()

    def show(self, trials: Mapping[int, Trial]) -> None:
        super().show(trials)
        rows = max(self._console.height - _ROWS_LEFT, 4)
        # The terminal prints ^C after the last line: wrapped to a new line, it would shift the
        # table and leave its first line on the screen.
        text = terminal.styled(self.table.text(rows, self._console.width - len("^C")))
        if self.news:
            text.append(f"\n{self.news}")
        text.no_wrap, text.overflow = True, "ellipsis"
        self._live.update(text, refresh=True)

    def finish(self, trials: Mapping[int, Trial], *, stopped: bool) -> None:
        self._live.stop()
        self.table = replace(self.table, trials=dict(trials))
        print(terminal.coloured(self.table.text(width=self._console.width)))
        if stopped:
            print(self.stopped)


class _LineView(SweepView):
    """View for files and pipes: a line for each trial that ends, and the table at the end."""

    def __init__(self, table: SweepTable, notes: Sequence[str]) -> None:
        super().__init__(table, notes)
        self._told: set[int] | None = None
        """The trials that have ended, and have a line that says so."""
        self._running: set[int] = set()
        for note in notes:
            print(note, flush=True)

    def show(self, trials: Mapping[int, Trial]) -> None:
        super().show(trials)
        over = {trial.number: trial for trial in trials.values() if trial.state.over}
        if self._told is None:  # trials that ended before this call
            self._told = {n for n, trial in over.items() if not trial.copied_from}
            print(self.table.headline(), flush=True)
        for number in sorted(over.keys() - self._told):
            self._told.add(number)
            print(self._describe(over[number]), flush=True)
        running = {n for n, trial in trials.items() if trial.state is TrialState.RUNNING}
        for number in sorted(running - self._running):
            print(self._describe(trials[number]), flush=True)
        self._running = running

    def tell(self, news: str, trials: Mapping[int, Trial]) -> None:
        super().tell(news, trials)
        print(news, flush=True)

    def _describe(self, trial: Trial) -> str:
        given = ", ".join(f"{name}={value}" for name, value in trial.parameters.items())
        value = self.table.value(trial)
        shown = "" if value is None else f" · {self.table.metric} {value:.4g}"
        error = f" · {trial.error}" if trial.state is TrialState.FAILED else ""
        before = " (ran before)" if trial.copied_from else ""
        return f"trial {trial.number}: {given} · {trial.state}{before}{shown}{error}"

    def finish(self, trials: Mapping[int, Trial], *, stopped: bool) -> None:
        self.show(trials)
        print(self.table.text())
        if stopped:
            print(self.stopped)


def make_view(table: SweepTable, notes: Sequence[str]) -> SweepView:
    """Return the view for the caller's output: a cell, a terminal, or a file."""
    front = current_front_end()
    if front.publish is not None:
        return _Notebook(table, notes, front)
    if sys.stdout.isatty():
        return _Terminal(table, notes)
    return _LineView(table, notes)


def _execution_count() -> int:
    # get_ipython has no types in the older versions that Colab uses.
    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    return int(shell.execution_count)
