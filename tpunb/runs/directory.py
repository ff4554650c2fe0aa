"""The run folder: its files and how a run is found.

    <runs>/<yyyymmdd-hhmmss>-<name>/
      spec.json  script.py  notebook.json  env.json       what was run
      kernel_values.json  parameters.json                 what the kernel held, and what was taken
      arguments.pt  arguments.json                        with which arguments (tpunb.launch)
      events.jsonl                                        what happened (tpunb.runs.events)
      run.log                                             all ranks, prefixed, in order of arrival
      supervisor.log                                      what the supervisor did and when
      attempts/<n>/<rank>/{stdout.log,stderr.log,prelude.log,error.json,
                          stacks.txt,crash.txt,pulse,numbers.json}
      attempts/<n>/prelude/{prelude.log,error.json}       the prelude that ran once for all ranks
      metrics.jsonl  checkpoints/  returns/               what it produced
      profile/plugins/profile/<steps>/rank-<n>.xplane.pb  the trace of --profile
      chips.json                                          what the TPU did (tpunb.runs.chips)
      running.lock  result.json                           whether it is running; how it ended
      requests.jsonl                                      requests to stop it (tpunb.runs.state)
      place.json  mirror.json  mirror.log  hosts/<n>/…    of a run at a place: where, and what
                                                          each host has besides (tpunb.places)

Processes of a run only append to files here, and the kernel only reads: nothing that a
reader does can slow or block a rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from tpunb.runs import events, ownership
from tpunb.runs.events import Event
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import RunSpec
from tpunb.utils import env_vars, files, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import append_text, write_json

PRELUDE = "prelude"
"""Name of the folder, in the place of a rank, for the prelude that runs once for all."""
MOST_EVENTS = 4_000_000
"""Bytes of events that are read at once; a run of weeks has a few thousand."""
_ID = re.compile(r"\d{8}-\d{6}-.")


class RunDir:
    """The paths of one run folder, and the files that more than one module reads or writes."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def script(self) -> Path:
        return self.path / "script.py"

    @property
    def snapshot(self) -> Path:
        return self.path / "notebook.json"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def kernel_values(self) -> Path:
        """What the kernel holds of the names that the train cell reads, if it is to be compared."""
        return self.path / "kernel_values.json"

    @property
    def parameters(self) -> Path:
        """What the run has taken of it, by name: JSON values."""
        return self.path / "parameters.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def lock(self) -> Path:
        return self.path / "running.lock"

    @property
    def stopping(self) -> Path:
        """Exists once the run is being stopped, so that its ranks are not started again."""
        return self.path / "stopping"

    @property
    def requests(self) -> Path:
        return self.path / "requests.jsonl"

    @property
    def place(self) -> Path:
        """Where the run is, if it is not on this machine (tpunb.places.place)."""
        return self.path / "place.json"

    def is_away(self) -> bool:
        """Whether it goes on at a place without anybody here."""
        return bool(records.read_dict(self.place).get("detached"))

    @property
    def copied(self) -> Path:
        """Of a run in a bucket: what was copied from there (tpunb.runs.download)."""
        return self.path / "copied.json"

    def is_running(self) -> bool:
        """True while a supervisor holds the lock, which it does for as long as it lives."""
        try:
            fd = files.open_file(self.lock)
        except (FileNotFoundError, PermissionError):
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def take_lock(self) -> IO[str] | None:
        """Hold the lock for as long as the file is open; None where it cannot be written.

        Who reads the folder can tell by it a run that goes on from one whose supervisor has died.
        """
        with contextlib.suppress(OSError):
            lock = open(self.lock, "w")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX)
            return lock
        return None

    @property
    def returns(self) -> Path:
        return self.path / "returns"

    @property
    def arguments(self) -> Path:
        """Arguments of `tpunb.launch` that are no literals (tpunb.runs.arguments)."""
        return self.path / "arguments.pt"

    @property
    def plain_arguments(self) -> Path:
        """The others, by the names of the function's parameters: JSON values."""
        return self.path / "arguments.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def attempt(self, attempt: int, rank: int | None) -> Path:
        """The folder of a rank in an attempt; rank None: of the prelude that ran for all."""
        return self.path / "attempts" / str(attempt) / (PRELUDE if rank is None else str(rank))

    def error(self, attempt: int, rank: int | None) -> Path:
        """Where a process describes the exception that ended it."""
        return self.attempt(attempt, rank) / "error.json"

    def read_error(self, attempt: int, rank: int | None) -> Failure | None:
        """What it describes; None if there is none, or a crash or full disk has left half of it."""
        ended = {"rank": rank, "pid": None, "exitcode": None, "signal": None}
        try:
            return Failure.from_json({**records.read_dict(self.error(attempt, rank)), **ended})
        except ValueError:
            return None

    def heartbeat(self, attempt: int, rank: int) -> Path:
        """Where a rank counts what it has done (tpunb.runs.heartbeat)."""
        return self.attempt(attempt, rank) / "pulse"

    def collectives(self, attempt: int, rank: int) -> Path:
        """Where a rehearsal rank counts its collectives (tpunb.xla.rehearsal.stats)."""
        return self.attempt(attempt, rank) / "collectives.json"

    def progress(self, attempt: int, rank: int) -> Path:
        """Where a rank says how far its loops have come (tpunb.runs.progress)."""
        return self.attempt(attempt, rank) / "progress.json"

    def memory(self, attempt: int, rank: int) -> Path:
        """Where another machine says how much memory the rank has there (bytes)."""
        return self.attempt(attempt, rank) / "memory.json"

    def saving(self, attempt: int, rank: int) -> Path:
        """Where a rank notes the seconds of each of its checkpoints (tpunb.training.checkpoint)."""
        return self.attempt(attempt, rank) / "saving.txt"

    @property
    def profile(self) -> Path:
        """The trace of `--profile`, of all ranks, as xprof and TensorBoard read it."""
        return self.path / "profile"

    def step_times(self, attempt: int, rank: int) -> Path:
        """Where a rank notes the times of the steps of its trace (tpunb.runs.trace)."""
        return self.attempt(attempt, rank) / "steps.json"

    def recompiled(self, attempt: int, rank: int) -> Path:
        """Where a rank reports programs that were compiled again (tpunb.worker.recompiles)."""
        return self.attempt(attempt, rank) / "recompiled.jsonl"

    def numbers(self, attempt: int, rank: int) -> Path:
        """Where a rank of a run on several hosts says its local rank and its ordinal."""
        return self.attempt(attempt, rank) / "numbers.json"

    def stacks(self, attempt: int, rank: int) -> Path:
        """Where a rank writes its stacks when it is asked to."""
        return self.attempt(attempt, rank) / "stacks.txt"

    def emit(self, event: Event) -> None:
        """Append an event, with the time if it has none."""
        line = events.to_line(event)
        if not getattr(event, "time", 1.0):
            line = line.replace('"time": 0.0', f'"time": {time.time()}', 1)
        append_text(self.events, line)

    def read_events(self) -> list[Event]:
        """The events so far, the newest `MOST_EVENTS` bytes of them.

        What is none is left out: a full disk or a crash has cut it off.
        """
        try:
            data = files.read_end(self.events, MOST_EVENTS)
        except (FileNotFoundError, PermissionError):
            return []
        read = []
        for line in data.decode("utf-8", "replace").split("\n"):
            with contextlib.suppress(ValueError):
                read.append(events.from_line(line))
        return read

    def read_spec(self) -> RunSpec:
        """What is to run. Raises OSError, and ValueError if the file does not say it."""
        return RunSpec.from_json(records.read(self.spec))

    def write_spec(self, spec: RunSpec) -> None:
        write_json(self.spec, spec.to_json())

    def read_result(self) -> RunResult | None:
        """The result without values of `--returns`; None if the run has not ended.

        Raises OSError, and ValueError if the file does not hold one.
        """
        try:
            return RunResult.from_json(records.read(self.result), self.path)
        except FileNotFoundError:
            return None

    def write_result(self, result: RunResult) -> None:
        write_json(self.result, result.to_json())


class RankOfRun(NamedTuple):
    """This process's place in a run."""

    run: RunDir
    rank: int
    attempt: int


def rank_of_run() -> RankOfRun | None:
    """Which rank of which run this process is; None in the kernel or under plain torchrun."""
    run, rank = os.environ.get(env_vars.RUN), os.environ.get("RANK")
    if not run or rank is None:
        return None
    return RankOfRun(RunDir(run), int(rank), int(os.environ.get(env_vars.ATTEMPT, "0")))


def create_run(runs: Path, name: str) -> RunDir:
    """Make a new run folder that only its user can read, with a unique id.

    Raises TpunbError if the folder cannot be written.
    """
    safe = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "run"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            path = runs / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            return RunDir(path)
    except OSError as error:
        raise TpunbError(
            f"cannot make a run folder in {runs}: {error.strerror}. "
            "Choose another place with `%tpu_setup --runs DIR`."
        ) from error
    raise TpunbError(f"there are already 1000 runs called {stem} in {runs}")


@contextlib.contextmanager
def new_run(runs: Path, name: str) -> Iterator[RunDir]:
    """A block that fills a new run folder and starts the run.

    If it fails, the folder is removed: nothing would ever write to it. Raises TpunbError if the
    folder cannot be written.
    """
    run = create_run(runs, name)
    try:
        yield run
    except BaseException as error:
        shutil.rmtree(run.path, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise TpunbError(
            f"nothing was started: {error.strerror or error} in {run.path}. Make room there, or "
            "choose another place with `%tpu_setup --runs DIR`."
        ) from error


def list_runs(runs: Path) -> list[RunDir]:
    """All runs of this user in a folder, oldest first. Only folders that hold a spec count.

    Raises TpunbError if the folder cannot be read.
    """
    found = []
    for path in list_folders(runs):
        run = RunDir(path)
        with contextlib.suppress(OSError):  # it holds none, or was removed a moment ago
            found.append((run.spec.lstat().st_mtime_ns, run.id, run))
    return [run for *_, run in sorted(found, key=lambda entry: entry[:2])]


def list_folders(runs: Path) -> list[Path]:
    """What may be run folders: folders that are this user's alone, not links to such.

    Raises TpunbError if `runs` cannot be read.
    """
    return [path for path in _entries(runs) if not ownership.why_refused(path)]


def describe_refused(runs: Path) -> str:
    """'left out: ID, another user's (ann)': folders that are not used; '' if there are none."""
    found: dict[str, list[str]] = {}
    for path in _entries(runs):
        if _ID.match(path.name) and (refusal := ownership.why_refused(path)):
            found.setdefault(refusal.what, []).append(path.name)
    return "\n".join(
        f"left out: {ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}, {what}"
        for what, ids in found.items()
    )


def _entries(runs: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(runs)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise TpunbError(f"cannot read {runs}: {error.strerror}") from None


def find_run(runs: Path, wanted: str | None) -> RunDir:
    """The run whose id contains `wanted`; the latest for None.

    Raises TpunbError, with the ids, if there is none or more than one, and for one that is not
    this user's.
    """
    every = list_runs(runs)
    if wanted and not any(wanted in run.id for run in every):
        for path in filter(lambda path: _ID.match(path.name), _entries(runs)):
            if wanted in path.name and (refusal := ownership.why_refused(path)):
                raise TpunbError(f"run {path.name} is {refusal.what}: {refusal.then}")
    if not every:
        refused = describe_refused(runs)
        raise TpunbError(f"there are no runs in {runs}" + (f" ({refused})" if refused else ""))
    if wanted is None:
        return every[-1]
    matches = [run for run in every if run.id == wanted] or [r for r in every if wanted in r.id]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        known = ", ".join(run.id for run in every[-5:])
        raise TpunbError(f"no run in {runs} has {wanted!r} in its id; the latest are: {known}")
    several = ", ".join(run.id for run in matches[-5:])
    raise TpunbError(f"{wanted!r} matches several runs: {several}")
