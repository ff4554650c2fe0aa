"""The folder of a sweep: the sweep's definition, and the state of each trial.

    <runs>/sweeps/<notebook>-<digest>/
      sweep.json             the notebook and its search space (SweepSpec)
      <notebook>.ipynb       the notebook at the start of the sweep, which the trials run
      trials/0007.json       the state of trial 7 (Trial)
      trials/0007.ipynb      the notebook that trial 7 executed
      trials/0007.runs       the folders of its runs, one per line
      journal.log            Optuna's journal (--search)
      sweep.log              other output of papermill and the kernels
      sweep.lock             held while the sweep is running
    <runs>/sweeps/done/<key>     the sweep and number of the trial with this key

Files are written atomically, so after a kill at any moment the next call continues the sweep: ended
trials stay as they are, and a trial that was cut off runs again. A key identifies everything that
a trial depends on: code, parameters, packages, cores and place.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from tpunb.notebook.models import Cell, Snapshot
from tpunb.notebook.parsing import parse_cells
from tpunb.notebook.scopes import packages
from tpunb.notebook.trial_cells import for_trials
from tpunb.runs import directory, metrics, ownership, state
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.utils import files, records
from tpunb.utils.errors import TpunbError

FOLDER = "sweeps"
"""Folder of all sweeps, in the folder of the runs."""
_DONE = "done"
_MODULES = 20_000_000
"""Maximum bytes of a module of the user that are read for its digest."""


class TrialState(str, Enum):
    """The state of a trial; the values are shown to users too."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"
    PRUNED = "pruned"
    """Stopped early, because others were better at the same step."""

    def __str__(self) -> str:
        return self.value

    @property
    def over(self) -> bool:
        return self not in (TrialState.WAITING, TrialState.RUNNING)


class SweepKind(str, Enum):
    """The source of the parameters of a sweep's trials."""

    GRID = "grid"
    RANDOM = "random"
    SEARCH = "search"
    LIST = "list"


@dataclass(frozen=True)
class SweepSpec:
    notebook: str
    """Path of the notebook."""
    kind: SweepKind
    space: Mapping[str, Any]
    """The search space (`Choice.to_json`, `Range.to_json`), or {"trials": the list of trials}."""
    metric: str | None
    maximize: bool | None
    """None: decided by the metric's name."""
    place: str
    """The place of `--on`; '' for this machine."""
    cores: str
    code: str
    """Digest of the notebook's code, and of the user's modules that it imports."""
    packages: str
    """Digest of the names and versions of all installed packages."""
    again: int = 0
    """How often the sweep was started from the beginning with --again."""
    cell: str | None = None
    """Digest of the train cell, for trials that are runs of one kernel (`%%tpu_train --grid`)."""
    version: int = 1

    def digest(self) -> str:
        """Return a digest that identifies the sweep among those of the same notebook."""
        return _digest({**asdict(self), "again": 0})[:8]


@dataclass(frozen=True)
class Trial:
    """One run of the notebook, with parameters of its own."""

    number: int
    parameters: Mapping[str, Any]
    state: TrialState = TrialState.WAITING
    value: float | None = None
    """The best value of the sweep's metric."""
    step: int | None = None
    """The step at which `value` was logged."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The best value of each metric; the last one if its name does not show which is better."""
    started: float | None = None
    ended: float | None = None
    runs: tuple[str, ...] = ()
    """The run folders of the latest attempt."""
    attempts: int = 0
    """Number of attempts that have ended."""
    error: str = ""
    """First line of the error, if the trial failed."""
    device: str = ""
    cores: int = 0
    chips: int = 0
    """Number of TPU chips that its runs used at once."""
    cost: float | None = None
    """US dollars, if the machine's price is known."""
    copied_from: str = ""
    """Sweep and number of an earlier trial with the same key, whose result this trial has."""
    code: str = ""
    """`SweepSpec.code` at the start of the trial."""

    @property
    def duration(self) -> float | None:
        """Seconds from start to end; None until the trial has ended."""
        if self.started is None or self.ended is None:
            return None
        return self.ended - self.started

    @property
    def run(self) -> str:
        """The id of its last run; '' if it has no run."""
        return Path(self.runs[-1]).name if self.runs else ""

    @property
    def chip_hours(self) -> float | None:
        """Hours of TPU chips; None for a rehearsal."""
        took = self.duration
        return None if took is None or not self.chips else took * self.chips / 3600

    def result(self) -> RunResult | None:
        """Return the result of its last run; None if there is none."""
        return state.read_result(RunDir(self.runs[-1])) if self.runs else None


class SweepDir:
    """The folder of one sweep: its paths, and methods that read and write its files."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def trials(self) -> Path:
        return self.path / "trials"

    @property
    def journal(self) -> Path:
        return self.path / "journal.log"

    @property
    def log(self) -> Path:
        return self.path / "sweep.log"

    @property
    def notebook(self) -> Path:
        return self.path / Path(self.read_spec().notebook).name

    def executed(self, number: int) -> Path:
        return self.trials / f"{number:04}.ipynb"

    def runs_file(self, number: int) -> Path:
        return self.trials / f"{number:04}.runs"

    def record(self, number: int) -> Path:
        return self.trials / f"{number:04}.json"

    def runs_of(self, number: int) -> tuple[str, ...]:
        try:
            return tuple(files.read_text(self.runs_file(number)).splitlines())
        except OSError:
            return ()

    def clear(self, number: int) -> None:
        """Remove the files of an earlier attempt at a trial. Raises TpunbError."""
        try:
            self.executed(number).unlink(missing_ok=True)
            files.atomic_write(self.runs_file(number), b"")
        except OSError as error:
            raise _not_written(self.runs_file(number), error) from error

    def read_spec(self) -> SweepSpec:
        """Read the sweep's definition. Raises TpunbError if it cannot be read."""
        try:
            return records.build(SweepSpec, records.read(self.path / "sweep.json"))
        except (OSError, ValueError) as error:
            raise TpunbError(f"{self.path} is not the folder of a sweep: {error}") from None

    def read_trials(self) -> dict[int, Trial]:
        """Read every trial that was begun, by number."""
        found = {}
        for path in sorted(self.trials.glob("*.json")):
            with contextlib.suppress(OSError, ValueError):  # a file of another version
                trial = records.build(Trial, records.read(path))
                found[trial.number] = trial
        return found

    def write_trial(self, trial: Trial) -> None:
        """Write the state of a trial. Raises TpunbError, for example for a full disk."""
        try:
            files.write_json(self.record(trial.number), asdict(trial))
        except OSError as error:
            raise _not_written(self.record(trial.number), error) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager: lock the sweep. Raises TpunbError if another process runs it."""
        try:
            file = open(self.path / "sweep.lock", "a+", opener=files.opener)  # noqa: SIM115
        except OSError as error:
            raise _not_written(self.path / "sweep.lock", error) from error
        with file as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise TpunbError(
                    f"this sweep is already running, in process {lock.read().strip() or '?'}: "
                    f"{self.path}"
                ) from None
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    # Trials that need not run again

    def note_done(self, key: str, trial: Trial) -> None:
        """Record a complete trial, whose result later trials with the same key can use."""
        done = self.path.parent / _DONE
        try:
            done.mkdir(mode=0o700, exist_ok=True)
            ownership.require_own(done)
            files.write_json(done / key, {"sweep": self.id, "number": trial.number})
        except OSError as error:
            raise _not_written(done / key, error) from error

    def find_done(self, key: str, trial: Trial, spec: SweepSpec) -> Trial | None:
        """Return the trial as complete if one with the same key has run, in any sweep."""
        noted = records.read_dict(self.path.parent / _DONE / key)
        sweep, number = noted.get("sweep"), noted.get("number")
        if not isinstance(sweep, str) or not isinstance(number, int):
            return None
        if (sweep == self.id and number == trial.number) or Path(sweep).name != sweep:
            return None
        try:
            other = own_sweep(self.path.parent / sweep)
            earlier = records.build(Trial, records.read(other.record(number)))
            theirs = other.read_spec()
        except (OSError, ValueError, TpunbError):  # removed, or written by another version
            return None
        if earlier.state is not TrialState.COMPLETE:
            return None
        if (theirs.metric, theirs.maximize) != (spec.metric, spec.maximize):
            earlier = replace(earlier, value=None, step=None)  # they belong to another metric
        measured = measure(earlier, spec)
        if spec.metric is not None and measured.value is None:
            return None  # its run folder was removed, or its run did not log this metric
        return replace(
            measured,
            number=trial.number,
            parameters=trial.parameters,
            copied_from=earlier.copied_from or f"{sweep}/{number}",
        )


def _not_written(path: Path, error: OSError) -> TpunbError:
    return TpunbError(
        f"cannot write {path}: {error.strerror}. Run the same command again to continue the sweep"
    )


def open_sweep(runs: Path, spec: SweepSpec, *, again: bool, copy: bool = True) -> SweepDir:
    """Return the folder of a sweep that was already begun, or create one; `again`: always create.

    `copy`: copy the notebook into it. Raises TpunbError if the folder cannot be written, or if
    another user has made it or could replace it.
    """
    stem = re.sub(r"[^\w.-]+", "-", Path(spec.notebook).stem).strip("-.")[:60] or "sweep"
    name = f"{stem}-{spec.digest()}"
    place = runs.absolute() / FOLDER
    try:
        with directory.opened_runs(runs.absolute()) as within:
            with contextlib.suppress(FileExistsError):
                os.mkdir(FOLDER, 0o700, dir_fd=within)
            ownership.require_own(place)
    except OSError as error:
        raise TpunbError(f"cannot create {place}: {error.strerror}") from error
    number = 0
    while (place / (f"{name}-{number + 1}" if number else name) / "sweep.json").exists():
        number += 1
    if number and not again:
        return own_sweep(place / (f"{name}-{number}" if number > 1 else name))
    path = place / (f"{name}-{number + 1}" if number else name)
    try:
        for part in (path, path / "trials"):
            with contextlib.suppress(FileExistsError):  # a crash left it without sweep.json
                part.mkdir(mode=0o700)
            ownership.require_own(part)
        # The notebook first: sweep.json marks the folder as complete.
        if copy:
            text = Path(spec.notebook).read_text(encoding="utf-8-sig")
            made = for_trials(text, spec.notebook).encode("utf-8", "replace")
            files.atomic_write(path / Path(spec.notebook).name, made)
        begun = max(number, 1) if again else 0  # not 0: trials of other sweeps run again too
        files.write_json(path / "sweep.json", asdict(replace(spec, again=begun)))
    except OSError as error:
        raise TpunbError(f"cannot create {path}: {error.strerror}") from error
    return SweepDir(path)


def own_sweep(path: Path) -> SweepDir:
    """Return the folder of a sweep. Raises TpunbError unless it is this user's alone."""
    folder = SweepDir(path)
    for part in (folder.path, folder.trials):
        if part.is_symlink() or part.exists():
            ownership.require_own(part)
    return folder


def measure(trial: Trial, spec: SweepSpec) -> Trial:
    """Return the trial with the best value of each metric that its runs have logged.

    If the run folders are gone, the values that the trial already has stay.
    """
    best: dict[str, float] = {}
    value, step = trial.value, trial.step
    better = is_better(spec)
    for folder in trial.runs:
        rows = read_steps(folder)
        best |= {each.name: each.value for each in metrics.best_values(rows)}
        found = _best_of(rows, spec.metric, better) if spec.metric else None
        if found is not None:
            value, step = found
    return replace(trial, value=value, step=step, metrics=best or trial.metrics)


def read_steps(run: str) -> list[metrics.Row]:
    """Return a row for each step that a run has logged; if there are very many, for some."""
    return metrics.reduce_rows(metrics.read_rows(RunDir(run).metrics), whole=True)


def is_better(spec: SweepSpec) -> Any:
    """Return a function that is True for (a, b) if a is the better value of the sweep's metric.

    Lower values are better, unless `maximize` or the metric's name shows otherwise.
    """
    if spec.maximize is None and spec.metric is not None:
        return metrics.comparison(spec.metric) or float.__lt__
    return float.__gt__ if spec.maximize else float.__lt__


def _best_of(rows: list[metrics.Row], name: str, better: Any) -> tuple[float, int | None] | None:
    found: tuple[float, int | None] | None = None
    for row in rows:
        value = row.get(name)
        if value is None or value != value:
            continue
        if found is None or better(float(value), found[0]):
            found = float(value), row.get("step")
    return found


# What a trial depends on


def trial_key(spec: SweepSpec, known: Mapping[str, Any], trial: Mapping[str, Any]) -> str:
    """Return the key of a trial; `known`: the notebook's defaults of parameters not in `trial`."""
    depends = (spec.code, spec.packages, spec.place, spec.cores, spec.cell, {**known, **trial})
    return _digest(depends)[:32]


def code_digest(cells: tuple[Cell, ...], folders: tuple[Path, ...]) -> str:
    """Return the digest of a notebook's code cells and of the modules in these folders that they
    import, directly or indirectly.
    """
    code = [(cell.source, "parameters" in cell.tags) for cell in cells if cell.kind == "code"]
    waiting: set[str] = set()
    for cell in parse_cells(Snapshot(cells, None, "", "the notebook file")):
        waiting |= _imported(cell.tree)
    modules: dict[str, list[str]] = {}
    while waiting:
        name = waiting.pop()
        modules[name] = []
        for path in (path for folder in folders for path in (folder / f"{name}.py", folder / name)):
            if path.exists():
                digest, imported = _read_module(path)
                modules[name].append(digest)
                waiting |= imported
        waiting -= modules.keys()
    return _digest((code, {name: own for name, own in modules.items() if own}))


def _imported(tree: ast.AST) -> set[str]:
    """Return the top-level names of the modules that a tree imports."""
    return set().union(*map(packages, ast.walk(tree)))


def _read_module(path: Path) -> tuple[str, set[str]]:
    """Return the digest of a module's files, and the modules that they import."""
    found, imported = hashlib.sha256(), set()
    room = _MODULES
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            data = files.read_start(file, room, anyones=True)
            room -= len(data)
            found.update(f"{file.relative_to(path.parent)}\0".encode() + data)
            with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as those about escape sequences
                imported |= _imported(ast.parse(data))
    return found.hexdigest(), imported


def packages_digest() -> str:
    """Return the digest of the installed packages' dist-info folder names, which contain versions.

    So changes in a package installed for development count only if its version changes.
    """
    installed = set()
    for folder in map(Path, sys.path):
        if folder.name in ("site-packages", "dist-packages"):
            with contextlib.suppress(OSError):
                installed |= {
                    entry
                    for entry in os.listdir(folder)
                    if entry.endswith((".dist-info", ".egg-info"))
                }
    return _digest((sys.version, sorted(installed)))


def _digest(data: object) -> str:
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
