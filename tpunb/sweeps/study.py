"""`tpunb.sweep` and `tpunb sweep`: run a sweep and return a Study."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.machine import machine
from tpunb.notebook import parameters
from tpunb.notebook.files import load_cells
from tpunb.places import kinds
from tpunb.places.config import find_place
from tpunb.places.confirm import confirm_cost
from tpunb.runs import listing
from tpunb.sweeps import folder as folders
from tpunb.sweeps import space as spaces
from tpunb.sweeps.folder import SweepDir, SweepKind, SweepSpec, Trial
from tpunb.sweeps.planner import Listed, OptunaPlanner, Planner
from tpunb.sweeps.scheduler import Scheduler
from tpunb.sweeps.space import Choice, Range
from tpunb.sweeps.table import SweepTable
from tpunb.sweeps.view import make_view
from tpunb.utils import env_vars
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import append_text
from tpunb.utils.interrupts import counted_interrupts
from tpunb.utils.options import parse_duration
from tpunb.utils.terminal import Printable, Style, join, paint

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_STOPPING = "stopping: running trials have time to save; interrupt again to end them at once"
_HURRIED = "ending the running trials without time to save"
Values = Mapping[str, Any]


@dataclass(frozen=True)
class SweepOrder:
    """The options of a sweep, from the command line or from Python."""

    notebook: Path
    space: Mapping[str, Choice | Range]
    known: Values
    """Defaults of the notebook's parameters, by name."""
    trials: Sequence[Values] | None = None
    """A list of trials instead of a space."""
    random: int | None = None
    search: int | None = None
    metric: str | None = None
    maximize: bool | None = None
    jobs: int = 1
    on: str | None = None
    cores: str | None = None
    timeout: float | None = None
    retries: int = 0
    again: bool = False
    yes: bool = False
    """True to start without a confirmation, even above the place's `ask_above`."""

    @property
    def kind(self) -> SweepKind:
        if self.trials is not None:
            return SweepKind.LIST
        if self.search is not None:
            return SweepKind.SEARCH
        return SweepKind.GRID if self.random is None else SweepKind.RANDOM

    def check(self) -> None:
        """Raise TpunbError for options that contradict each other or do not fit the notebook."""
        if self.jobs < 1:
            raise TpunbError(f"jobs={self.jobs}: must be at least 1")
        if self.random is not None and self.search is not None:
            raise TpunbError("--random and --search cannot be combined: use one of them")
        for option, count in (("random", self.random), ("search", self.search)):
            if count is not None and not 1 <= count <= spaces.MOST:
                raise TpunbError(f"--{option} {count}: must be between 1 and {spaces.MOST:,}")
        if self.search is not None and self.metric is None:
            raise TpunbError("--search needs --metric NAME, the name of a metric of tpunb.log")
        if self.trials is not None and (self.space or self.random or self.search):
            raise TpunbError("trials= cannot be combined with grid, space, random or search")
        if not self.space and not self.trials:
            raise TpunbError("no parameters: add --grid NAME=V,V or --space NAME=LOW..HIGH")
        if self.search is None and self.maximize is not None and self.metric is None:
            raise TpunbError("--maximize needs --metric NAME, the name of a metric of tpunb.log")
        names = [*self.space, *(name for trial in self.trials or () for name in trial)]
        option = "parameter" if self.trials is not None else "--grid, --space:"
        parameters.refuse_unknown(self.notebook, dict.fromkeys(names), option)
        if self.on is not None:
            find_place(self.on, Path.cwd())

    def code(self) -> Callable[[], str]:
        """Return a function for the digest of the notebook's current code and its modules.

        The modules are read at each call of the function, the notebook only now.
        """
        cells = load_cells(self.notebook)
        places = tuple(dict.fromkeys((Path.cwd(), self.notebook.absolute().parent)))
        return lambda: folders.code_digest(cells, places)

    def spec(self) -> SweepSpec:
        space: Any = {name: values.to_json() for name, values in self.space.items()}
        if self.trials is not None:
            space = {"trials": [dict(trial) for trial in self.trials]}
        return SweepSpec(
            notebook=str(self.notebook.absolute()),
            kind=self.kind,
            space=space,
            metric=self.metric,
            maximize=self.maximize,
            place=self.on or "",
            cores=self.cores or "",
            code=self.code()(),
            packages=folders.packages_digest(),
        )

    def planner(self, folder: SweepDir, spec: SweepSpec) -> Planner:
        if self.search is not None:
            return OptunaPlanner(folder, spec, self.space, self.search)
        if self.trials is not None:
            return Listed(self.trials)
        if self.random is not None:
            return Listed(
                list(islice(spaces.random_trials(self.space, spec.digest()), self.random))
            )
        return Listed(spaces.grid_trials(self.space))


def sweep(
    notebook: Path | str,
    *,
    grid: Mapping[str, Any] | None = None,
    space: Mapping[str, Any] | None = None,
    trials: Iterable[Mapping[str, Any]] | None = None,
    random: int | None = None,
    search: int | None = None,
    metric: str | None = None,
    maximize: bool | None = None,
    jobs: int = 1,
    on: str | None = None,
    cores: int | str | None = None,
    timeout: float | str | None = None,
    retries: int = 0,
    again: bool = False,
    yes: bool = False,
    runs: Path | str | None = None,
) -> Study:
    """Run a notebook once for each combination of parameters, and compare the logged metrics.

    A trial is a papermill run with its own run folder and executed notebook. If a sweep was
    stopped or killed, the same call continues it; a trial that already ran with the same notebook,
    parameters and packages is not run again.

    Args:
        notebook: The notebook; its parameters are in the cell tagged `parameters`.
        grid: Values by name: {"lr": [1e-3, 1e-4], "seed": range(5)}. All combinations are run.
        space: Ranges by name, for `random` and `search`: {"lr": "1e-5..1e-2:log"} or
            {"lr": (1e-5, 1e-2, "log")}; integers if both ends are integers.
        trials: The parameters of each trial, instead of `grid` and `space`.
        random: Number of trials to draw.
        search: Number of trials that Optuna proposes, each after an earlier one has ended.
        metric: Name of a metric of `tpunb.log`; trials are compared by its best value.
        maximize: Whether higher values are better; by default judged by the metric's name,
            otherwise lower values are.
        jobs: Number of trials that run at the same time; on one TPU always 1.
        on: A place of places.toml.
        cores: Ranks of every run, overriding the cells.
        timeout: Seconds, or "5m", after which a trial is stopped.
        retries: How often a failed trial is run again.
        again: Run all trials again, even complete ones.
        yes: Start without a confirmation, even if all runs may cost more than the place's
            ask_above.
        runs: Folder of the run folders; the sweep is in its folder `sweeps`.

    Raises TpunbError before anything starts for parameters that the notebook does not have, or of
    another type; MissingPackageError for `search` without Optuna. The interrupt key stops the
    sweep, with time to save; the Study contains the trials that have ended.
    """
    path = Path(notebook)
    known = parameters.defaults(load_cells(path))
    listed = None
    if trials is not None:
        listed = [spaces.plain_trial(trial, known) for trial in trials]
    order = SweepOrder(
        path,
        spaces.from_python(grid or {}, space or {}, known),
        known,
        trials=listed,
        random=random,
        search=search,
        metric=metric,
        maximize=maximize,
        jobs=jobs,
        on=on,
        cores=None if cores is None else str(cores),
        timeout=parse_duration(timeout) if isinstance(timeout, str) else timeout,
        retries=retries,
        again=again,
        yes=yes,
    )
    return run_sweep(order, listing.default_folder() if runs is None else Path(runs))


def run_sweep(order: SweepOrder, runs: Path) -> Study:
    """Run the trials that are not complete yet, and show the progress.

    Raises TpunbError before anything starts, and for a full disk.
    """
    order.check()
    if order.kind is SweepKind.GRID:
        spaces.grid_trials(order.space)  # raises for a wrong grid before a folder is created
    spec, jobs, notes = order.spec(), order.jobs, []
    if jobs > 1 and order.on is None and machine.detect_machine(os.environ).device == "TPU":
        notes.append(f"--jobs {jobs}: one TPU runs one trial at a time")
        jobs = 1
    folder = folders.open_sweep(runs, spec, again=order.again)
    with folder.locked():
        spec = folder.read_spec()
        planner = order.planner(folder, spec)
        view = make_view(SweepTable(spec, {}, planner.total), notes)
        scheduler = Scheduler(
            folder,
            spec,
            planner,
            order.known,
            code=order.code(),
            jobs=jobs,
            timeout=order.timeout,
            retries=order.retries,
            show=view.show,
        )
        scheduler.prepare()
        if order.on is not None and not order.yes:
            _confirm_cost(order.on, order.timeout, scheduler.runs_left())
        with view, counted_interrupts() as pressed:
            seen = 0
            for _ in scheduler.run():
                if pressed.count > seen:
                    scheduler.stop(now=seen > 0)
                    view.tell(_HURRIED if seen else _STOPPING, scheduler.trials)
                    seen = pressed.count
            view.finish(scheduler.trials, stopped=scheduler.stopped)
    study = Study(folder, planner.total, shown=view.shows_everything)
    if env_vars.RAN in os.environ:  # `tpunb run` reports the trials' runs as the notebook's
        ran = "".join(f"{run}\n" for trial in study.trials for run in trial.runs)
        append_text(Path(os.environ[env_vars.RAN]), ran)
    return study


def _confirm_cost(place: str, timeout: float | None, runs: int) -> None:
    """Ask the user to confirm if all runs together may cost more than the place's `ask_above`."""
    if find_place(place, Path.cwd()).settings.ask_above is None or not runs:
        return
    target = kinds.find_target(place, Path.cwd(), print, lambda: False)
    confirm_cost(target, timeout, input, "--yes (yes=True)", runs=runs)


class Study(Printable):
    """The trials of a sweep, read from its folder."""

    def __init__(
        self, folder: SweepDir, total: int = 0, *, shown: Callable[[], bool] | None = None
    ):
        self._folder = folder
        self._total = total
        self._shown = shown

    @classmethod
    def load(cls, path: Path | str) -> Study:
        """Load a sweep from its folder. Raises TpunbError if it is no sweep of this user."""
        folder = folders.own_sweep(Path(path))
        folder.read_spec()
        return cls(folder)

    @property
    def dir(self) -> Path:
        """Folder with the trials' notebooks and, for a search, Optuna's journal."""
        return self._folder.path

    @property
    def trials(self) -> list[Trial]:
        """Every trial that was begun, by number."""
        table = self._table()
        return [replace(trial, value=table.value(trial)) for trial in table.trials.values()]

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best value of the metric; None while there is none.

        `.parameters`, `.value`, `.step`, `.run` (the run's id), `.result()` (its RunResult).
        """
        table = self._table()
        best = table.best
        return None if best is None else replace(best, value=table.value(best))

    def table(self) -> pd.DataFrame:
        """Return a row for each trial, the best first; the index is the trial's number.

        Columns: the parameters that differ, `state`, the metric, `step`, `duration` (seconds),
        `chip_hours` and `cost` (US dollars) if known, `where`, `run`, `notebook` (the executed
        one), `error`.
        """
        import pandas as pd

        table = self._table()
        names = table.parameters
        rows = []
        for trial in table.sorted():
            executed = self._folder.executed(trial.number)
            rows.append(
                {
                    "trial": trial.number,
                    **{name: trial.parameters.get(name) for name in names},
                    "state": str(trial.state),
                    table.metric or "value": table.value(trial),
                    "step": trial.step,
                    "duration": trial.duration,
                    "chip_hours": trial.chip_hours,
                    "cost": trial.cost,
                    "where": table.spec.place or "here",
                    "run": trial.run or None,
                    "notebook": str(executed) if executed.exists() else None,
                    "error": trial.error or None,
                }
            )
        frame = pd.DataFrame(rows)
        if rows:
            unknown = [name for name in ("chip_hours", "cost") if frame[name].isna().all()]
            frame = frame.drop(columns=unknown).set_index("trial")
        return frame

    def plot(self) -> Figure:
        """Draw a matplotlib figure: the metric over the trials, parallel coordinates of the
        parameters, and, if Optuna is installed and there are enough trials, their importance.

        Raises MissingPackageError without matplotlib, ValueError if no trial is complete.
        """
        from tpunb.sweeps.figures import draw

        return draw(self._table())

    def __str__(self) -> str:
        return join("\n", [self._table().text(), paint(f"sweep: {self.dir}", Style.FAINT)])

    def _repr_html_(self) -> str:
        table = self._table()
        if self._shown is not None and self._shown():  # right above, in the same cell
            return ""
        return table.html(str(self.dir))

    def _table(self) -> SweepTable:
        trials = self._folder.read_trials()
        return SweepTable(self._folder.read_spec(), trials, max(self._total, len(trials)))
