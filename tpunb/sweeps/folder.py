"""A sweep on disk: what it tries, and how each trial stands.

    <runs>/sweeps/<notebook>-<digest>/
      sweep.json             what is tried, of which notebook (SweepSpec)
      <notebook>.ipynb       the notebook as it was when the sweep began: trials run this
      trials/0007.json       how trial 7 stands (Trial)
      trials/0007.ipynb      the notebook as it ran
      trials/0007.runs       the folders of its runs, a line each
      journal.log            Optuna's, of --search
      sweep.log              what papermill and kernels wrote besides
      sweep.lock             held while the sweep goes on
    <runs>/sweeps/done/<key>     where the trial with this key is

Every file is whole whenever it exists, so a sweep that was killed, at whatever moment, goes on with
the next call: trials that have ended stay as they are, one that was cut off runs again. A key
stands for all that a trial depends on: code, parameters, packages, cores and place.
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

from tpunb.notebook.lint.walk import parse_cells
from tpunb.notebook.models import Cell, Snapshot
from tpunb.notebook.trial_cells import for_trials
from tpunb.runs import metrics, state
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.utils import files, records
from tpunb.utils.errors import TpunbError

FOLDER = "sweeps"
"""Of all sweeps, in the folder of the runs."""
_DONE = "done"
_MODULES = 20_000_000
"""Bytes of the notebook's own modules that are read to see whether they have changed."""


class TrialState(str, Enum):
    """How a trial stands; the values are for people too."""

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
        """Whether it will not run again."""
        return self not in (TrialState.WAITING, TrialState.RUNNING)


class Kind(str, Enum):
    """Where the parameters of a sweep's trials come from."""

    GRID = "grid"
    RANDOM = "random"
    SEARCH = "search"
    LIST = "list"


@dataclass(frozen=True)
class SweepSpec:
    """What a sweep tries."""

    notebook: str
    """The file that it was made of."""
    kind: Kind
    space: Mapping[str, Any]
    """As `Choice.to_json` and `Range.to_json` say; of a list of trials, the list."""
    metric: str | None
    maximize: bool | None
    """None: the metric's name says it."""
    place: str
    """What `--on` named; '' for this machine."""
    cores: str
    code: str
    """Digest of the notebook's code, and of its own modules."""
    packages: str
    """Digest of the names and versions of all that is installed."""
    again: int = 0
    """How often it was started from nothing."""
    cell: str | None = None
    """The train cell whose trials run in the kernel that asked (`%%tpu_train --grid`)."""
    version: int = 1

    def digest(self) -> str:
        """What tells it from others of the same notebook."""
        return _digest({**asdict(self), "again": 0})[:8]


@dataclass(frozen=True)
class Trial:
    """One run of the notebook, with parameters of its own."""

    number: int
    parameters: Mapping[str, Any]
    state: TrialState = TrialState.WAITING
    value: float | None = None
    """The best value of the sweep's metric …"""
    step: int | None = None
    """… and at which step it was logged."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The best value of every metric, or its last if its name does not say which is better."""
    started: float | None = None
    ended: float | None = None
    runs: tuple[str, ...] = ()
    """The folders of its runs, the latest attempt's."""
    attempts: int = 0
    """How often it was started and came to an end."""
    error: str = ""
    """Its first line, if it failed."""
    device: str = ""
    cores: int = 0
    chips: int = 0
    """Of a TPU, that its runs used at once."""
    cost: float | None = None
    """US dollars, where the machine's price is known."""
    copied_from: str = ""
    """The sweep and the number of the trial that ran with the same parameters before."""
    code: str = ""
    """Digest of the notebook's code and its own modules when it began (`SweepSpec.code`)."""

    @property
    def duration(self) -> float | None:
        """Seconds."""
        if self.started is None or self.ended is None:
            return None
        return self.ended - self.started

    @property
    def run(self) -> str:
        """The id of its last run; '' if it has made none."""
        return Path(self.runs[-1]).name if self.runs else ""

    @property
    def chip_hours(self) -> float | None:
        """Hours of TPU chips; None of a rehearsal."""
        took = self.duration
        return None if took is None or not self.chips else took * self.chips / 3600

    def result(self) -> RunResult | None:
        """How its last run ended; None without one."""
        return state.read_result(RunDir(self.runs[-1])) if self.runs else None


class SweepDir:
    """The paths of one sweep's folder, and what is read and written in it."""

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
        """The notebook of a trial, as it ran."""
        return self.trials / f"{number:04}.ipynb"

    def runs_file(self, number: int) -> Path:
        """Where the folder of each of its runs is written."""
        return self.trials / f"{number:04}.runs"

    def record(self, number: int) -> Path:
        """How it stands."""
        return self.trials / f"{number:04}.json"

    def runs_of(self, number: int) -> tuple[str, ...]:
        """The folders of the runs that a trial has made, in order."""
        try:
            return tuple(self.runs_file(number).read_text(encoding="utf-8").splitlines())
        except OSError:
            return ()

    def clear(self, number: int) -> None:
        """Forget what an earlier attempt at a trial has left. Raises TpunbError."""
        try:
            self.executed(number).unlink(missing_ok=True)
            self.runs_file(number).write_text("")
        except OSError as error:
            raise _not_written(self.runs_file(number), error) from error

    def read_spec(self) -> SweepSpec:
        """What it tries. Raises TpunbError if it cannot be read."""
        try:
            return records.build(SweepSpec, records.read(self.path / "sweep.json"))
        except (OSError, ValueError) as error:
            raise TpunbError(f"{self.path} is not the folder of a sweep: {error}") from None

    def read_trials(self) -> dict[int, Trial]:
        """Every trial that was begun, by number."""
        found = {}
        for path in sorted(self.trials.glob("*.json")):
            with contextlib.suppress(OSError, ValueError):  # another version's
                trial = records.build(Trial, records.read(path))
                found[trial.number] = trial
        return found

    def write_trial(self, trial: Trial) -> None:
        """Write how a trial stands. Raises TpunbError, say of a full disk."""
        try:
            files.write_json(self.record(trial.number), asdict(trial))
        except OSError as error:
            raise _not_written(self.record(trial.number), error) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """A block in which no other process goes on with this sweep. Raises TpunbError."""
        with open(self.path / "sweep.lock", "a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise TpunbError(
                    f"this sweep is running already, in process {lock.read().strip() or '?'}: "
                    f"{self.path}"
                ) from None
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    # Trials that need not run again

    def note_done(self, key: str, trial: Trial) -> None:
        """Keep where a trial is whose result will do for all that depend on the same."""
        done = self.path.parent / _DONE
        try:
            done.mkdir(mode=0o700, exist_ok=True)
            files.write_json(done / key, {"sweep": self.id, "number": trial.number})
        except OSError as error:
            raise _not_written(done / key, error) from error

    def find_done(self, key: str, trial: Trial, spec: SweepSpec) -> Trial | None:
        """The trial as complete, if one with the same key has run, in whichever sweep."""
        noted = records.read_dict(self.path.parent / _DONE / key)
        sweep, number = noted.get("sweep"), noted.get("number")
        if not isinstance(sweep, str) or not isinstance(number, int):
            return None
        if sweep == self.id and number == trial.number:
            return None
        other = SweepDir(self.path.parent / sweep)
        try:
            earlier = records.build(Trial, records.read(other.record(number)))
            theirs = other.read_spec()
        except (OSError, ValueError, TpunbError):  # removed, or another version's
            return None
        if earlier.state is not TrialState.COMPLETE:
            return None
        if (theirs.metric, theirs.maximize) != (spec.metric, spec.maximize):
            earlier = replace(earlier, value=None, step=None)  # of another metric
        measured = measure(earlier, spec)
        if spec.metric is not None and measured.value is None:
            return None  # its run folder was removed, or logged no such metric
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
    """The folder of this sweep: the one that was begun, or a new one; `again`: a new one.

    `copy`: keep the notebook's file there. Raises TpunbError if it cannot be written.
    """
    stem = re.sub(r"[^\w.-]+", "-", Path(spec.notebook).stem).strip("-.")[:60] or "sweep"
    name = f"{stem}-{spec.digest()}"
    place = runs.absolute() / FOLDER
    number = 0
    while (place / (f"{name}-{number + 1}" if number else name) / "sweep.json").exists():
        number += 1
    if number and not again:
        return SweepDir(place / (f"{name}-{number}" if number > 1 else name))
    path = place / (f"{name}-{number + 1}" if number else name)
    try:
        (path / "trials").mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
        # The notebook first: with sweep.json the sweep is there.
        if copy:
            text = Path(spec.notebook).read_text(encoding="utf-8-sig")
            made = for_trials(text, spec.notebook).encode("utf-8", "replace")
            files.atomic_write(path / Path(spec.notebook).name, made)
        begun = max(number, 1) if again else 0  # `again` holds for what other sweeps ran, too
        files.write_json(path / "sweep.json", asdict(replace(spec, again=begun)))
    except OSError as error:
        raise TpunbError(f"cannot make {path}: {error.strerror}") from error
    return SweepDir(path)


def measure(trial: Trial, spec: SweepSpec) -> Trial:
    """The trial with what its runs have logged: the best value of the metric, and of all others.

    What is known already stays if the run folders are gone.
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
    """A row for each step that a run has logged; of very many, of some."""
    return metrics.reduce_rows(metrics.read_rows(RunDir(run).metrics), whole=True)


def is_better(spec: SweepSpec) -> Any:
    """True for (a, b) if a is the better value of the sweep's metric; less is, if nothing says."""
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
    """Of a trial with these parameters; `known`: the notebook's defaults of the others."""
    depends = (spec.code, spec.packages, spec.place, spec.cores, spec.cell, {**known, **trial})
    return _digest(depends)[:32]


def code_digest(cells: tuple[Cell, ...], folders: tuple[Path, ...]) -> str:
    """Of a notebook's code cells, and of the modules in these folders that they import, and that
    those import in turn.
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
    """The top names of the modules that it imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _read_module(path: Path) -> tuple[str, set[str]]:
    """The digest of a module's files, and the modules that they import themselves."""
    found, imported = hashlib.sha256(), set()
    room = _MODULES
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            data = files.read_start(file, room)
            room -= len(data)
            found.update(f"{file.relative_to(path.parent)}\0".encode() + data)
            with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of its escape sequences, say
                imported |= _imported(ast.parse(data))
    return found.hexdigest(), imported


def packages_digest() -> str:
    """Of what is installed for this interpreter: the names of its dist-info folders have versions.

    Packages installed for development count by their version only.
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
