"""The run folder: its files, and how to find a run.

    <runs>/<yyyymmdd-hhmmss>-<name>/
      spec.json  script.py  notebook.json  env.json       what was run
      values.json  values.pt                              values from the kernel, and arguments of
                                                          tpunb.launch: plain ones, and others
      events.jsonl                                        what happened (tpunb.runs.events)
      run.log                                             all ranks, prefixed, in order of arrival
      supervisor.log                                      what the supervisor did and when
      attempts/<n>/<rank>/{stdout.log,stderr.log,prelude.log,error.json,
                          stacks.txt,crash.txt,pulse,figure-<n>.png}
      attempts/<n>/prelude/{prelude.log,error.json}       the prelude that ran once for all ranks
      metrics.jsonl  checkpoints/  returns/               what it produced
      profile/plugins/profile/<steps>/rank-<n>.xplane.pb  the trace of --profile
      chips.json                                          what the TPU did (tpunb.runs.chips)
      running.lock  result.json                           whether it is running; how it ended
      requests.jsonl                                      requests to stop it (tpunb.runs.state)
      place.json  hosts/<n>/…                             of a run at a place: where it is, and the
                                                          other files of each host (tpunb.places)

The processes of a run only append to files in it, and the kernel only reads them: nothing that a
reader does can slow or block a rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from tpunb.runs import events, ownership
from tpunb.runs.events import Event
from tpunb.runs.ownership import HeldFolder
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import VERSION, RunSpec
from tpunb.utils import env_vars, files, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import append_text, write_json

PRELUDE = "prelude"
"""The name of the folder, instead of a rank, of the prelude that runs once for all ranks."""
MOST_EVENTS = 4_000_000
"""The most bytes of events that are read; a run of weeks has a few thousand."""
RUN_ID = re.compile(r"\d{8}-\d{6}-.")
"""The beginning of a run's id, which is the name of its folder."""


class _File:
    """The path of a file in the run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: object = None) -> Path:
        return run.path / self._name


class _RankFile:
    """The path of a file of a rank in an attempt: `run.error(attempt, rank)`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: object = None) -> Callable[[int, int | None], Path]:
        return lambda attempt, rank: run.attempt(attempt, rank) / self._name


class RunDir:
    """The paths in a run folder, and access to the files that several modules read or write."""

    spec = _File("spec.json")
    script = _File("script.py")
    snapshot = _File("notebook.json")
    env = _File("env.json")
    values = _File("values.json")
    """The run's parameters, as the kernel has them, and the plain arguments of `tpunb.launch`."""
    events = _File("events.jsonl")
    metrics = _File("metrics.jsonl")
    log = _File("run.log")
    result = _File("result.json")
    lock = _File("running.lock")
    stopping = _File("stopping")
    """A file that exists once the run is being stopped, so that no attempt starts after it."""
    requests = _File("requests.jsonl")
    place = _File("place.json")
    """A file that names the place of a run that is not on this machine (tpunb.places.place)."""
    returns = _File("returns")
    arguments = _File("values.pt")
    """The arguments of `tpunb.launch` that are not literals (tpunb.runs.arguments)."""
    checkpoints = _File("checkpoints")
    profile = _File("profile")
    """The trace of `--profile` of all ranks, as xprof and TensorBoard read it."""

    # Files in the folder of a rank; rank None: of the prelude that ran for all ranks.

    error = _RankFile("error.json")
    """The file in which a process describes the exception that ended it."""
    heartbeat = _RankFile("pulse")
    """The heartbeat file of a rank (tpunb.runs.heartbeat)."""
    collectives = _RankFile("collectives.json")
    """The file in which a rehearsal rank counts collectives (tpunb.backends.rehearsal.stats)."""
    models = _RankFile("models.json")
    """Digests of the parameters that a rank has stepped (tpunb.runs.trained_models)."""
    progress = _RankFile("progress.json")
    """The file with the progress of a rank's loops (tpunb.runs.progress)."""
    memory = _RankFile("memory.json")
    """The file with the memory in bytes of a rank on another machine."""
    saving = _RankFile("saving.txt")
    """The file with the seconds of each of a rank's checkpoints (tpunb.training.checkpoint)."""
    step_times = _RankFile("steps.json")
    """The file with the times of the steps in a rank's trace (tpunb.runs.trace)."""
    recompiled = _RankFile("recompiled.jsonl")
    """The file in which a rank reports recompiled programs (tpunb.worker.recompiles)."""
    """The file with the local rank and ordinal of a rank, in runs on several hosts."""
    stacks = _RankFile("stacks.txt")
    """The file to which a rank writes its stacks on request."""

    def __init__(self, path: Path | str, held: HeldFolder | None = None) -> None:
        self.path = Path(path).absolute()
        self.held = held
        """The folder itself, open since the run began, in the process that began it."""

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def bucket(self) -> Path:
        """The file beside runs that come from a bucket, with its URL (tpunb.runs.bucket_copies)."""
        return self.path.with_name("bucket.json")

    def attempt(self, attempt: int, rank: int | None) -> Path:
        """The folder of a rank in an attempt; with None, of the prelude that ran for all ranks."""
        return self.path / "attempts" / str(attempt) / (PRELUDE if rank is None else str(rank))

    def host(self, node_rank: int) -> RunDir:
        """The folder for a host's files that are not the whole run's (runs.folder_stream)."""
        return RunDir(self.path / "hosts" / str(node_rank))

    def is_running(self) -> bool:
        """True while a supervisor holds the lock, which it does until it ends."""
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
        """Take the lock, which is held while the file is open; return None if it cannot be written.

        It lets readers distinguish a running run from one whose supervisor has died.
        """
        with contextlib.suppress(OSError):
            lock = open(self.lock, "w", opener=files.opener)  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX)
            return lock
        return None

    def read_error(self, attempt: int, rank: int | None) -> Failure | None:
        """Read the failure in `error`; None if it does not exist or was only written in part."""
        ended = {"rank": rank, "pid": None, "exitcode": None, "signal": None}
        try:
            return records.build(Failure, {**records.read_dict(self.error(attempt, rank)), **ended})
        except ValueError:
            return None

    def figure(self, attempt: int, number: int) -> Path:
        """The file with a figure that rank 0 has drawn, counted from 1."""
        return self.attempt(attempt, 0) / f"figure-{number}.png"

    def emit(self, event: Event) -> None:
        """Append an event; set its time if it has none."""
        line = events.to_line(event)
        if not getattr(event, "time", 1.0):
            line = line.replace('"time": 0.0', f'"time": {time.time()}', 1)
        append_text(self.events, line)

    def read_events(self) -> list[Event]:
        """Return the events so far, from the newest `MOST_EVENTS` bytes.

        Lines that a full disk or a crash has cut off are left out.
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
        """Read `spec.json`. Raises OSError, and ValueError if the file holds no spec."""
        return RunSpec.from_json(records.read(self.spec))

    def write_spec(self, spec: RunSpec) -> None:
        write_json(self.spec, {"version": VERSION, **vars(spec)})

    def read_result(self) -> RunResult | None:
        """Read the result, without values of `--returns`; None if the run has not ended.

        Raises OSError, and ValueError if the file holds no result.
        """
        try:
            return RunResult.from_json(records.read(self.result), self.path)
        except FileNotFoundError:
            return None

    def write_result(self, result: RunResult) -> None:
        write_json(self.result, result.to_json())


class RankOfRun(NamedTuple):
    """The run, rank and attempt of this process."""

    run: RunDir
    rank: int
    attempt: int


def rank_of_run() -> RankOfRun | None:
    """Return the run and rank of this process; None in the kernel or under plain torchrun."""
    run, rank = os.environ.get(env_vars.RUN), os.environ.get("RANK")
    if not run or rank is None:
        return None
    return RankOfRun(RunDir(run), int(rank), int(os.environ.get(env_vars.ATTEMPT, "0")))


def create_run(runs: Path, name: str) -> RunDir:
    """Create a run folder with a unique id that only its user can read, and hold it open.

    Raises TpunbError if the folder cannot be written, or is another user's.
    """
    safe = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "run"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
    try:
        make_runs(runs)
        for attempt in range(1, 1000):
            path = (runs / (stem if attempt == 1 else f"{stem}-{attempt}")).absolute()
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                return RunDir(path, HeldFolder(path))
    except OSError as error:
        raise TpunbError(
            f"cannot make a run folder in {runs}: {error.strerror}. "
            "Choose another folder with `%tpu_setup --runs DIR`."
        ) from error
    raise TpunbError(f"there are already 1000 runs called {stem} in {runs}")


def make_runs(runs: Path) -> None:
    """Create a folder for runs if necessary. Raises OSError; TpunbError for another user's."""
    runs.mkdir(mode=0o755, parents=True, exist_ok=True)
    ownership.require_trusted(runs)


@contextlib.contextmanager
def new_run(runs: Path, name: str) -> Iterator[RunDir]:
    """Create a run folder for a block that fills it and starts the run.

    If the block fails, the folder is removed, because nothing would ever write to it. Raises
    TpunbError if the folder cannot be written.
    """
    run = create_run(runs, name)
    try:
        yield run
    except BaseException as error:
        shutil.rmtree(run.path, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise TpunbError(
            f"nothing was started: {error.strerror or error} in {run.path}. Free some space there, "
            "or choose another folder with `%tpu_setup --runs DIR`."
        ) from error


def list_runs(runs: Path) -> list[RunDir]:
    """Return all runs of this user in a folder, oldest first. Only folders with a spec count.

    Raises TpunbError if the folder cannot be read.
    """
    found = []
    for path in list_folders(runs):
        run = RunDir(path)
        with contextlib.suppress(OSError):  # it has no spec, or was just removed
            found.append((run.spec.lstat().st_mtime_ns, run.id, run))
    return [run for *_, run in sorted(found, key=lambda entry: entry[:2])]


def list_folders(runs: Path) -> list[Path]:
    """Return possible run folders: those of this user, without links to such.

    Raises TpunbError if `runs` cannot be read.
    """
    return [path for path in _entries(runs) if not ownership.why_refused(path)]


def describe_refused(runs: Path) -> str:
    """Describe folders that are not used: 'left out: ID, another user's (ann)'; '' for none."""
    found: dict[str, list[str]] = {}
    for path in _entries(runs):
        if RUN_ID.match(path.name) and (why := ownership.why_refused(path)):
            found.setdefault(why, []).append(path.name)
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


def shown_place(runs: Path) -> str:
    """Return the folder of runs as users know it: its URL if it is a copy from a bucket."""
    bucket = RunDir(runs / "any").bucket
    return str(records.read(bucket)) if bucket.exists() else str(runs)


def find_run(runs: Path, wanted: str | None) -> RunDir:
    """Return the run whose id contains `wanted`; with None, the latest run.

    Raises TpunbError, with the ids, if no run or more than one matches, and for a run that is not
    this user's.
    """
    every = list_runs(runs)
    if wanted and not any(wanted in run.id for run in every):
        for path in filter(lambda path: RUN_ID.match(path.name), _entries(runs)):
            if wanted in path.name:
                ownership.require_own(path)
    if not every:
        refused = describe_refused(runs)
        where = shown_place(runs)
        raise TpunbError(f"there are no runs in {where}" + (f" ({refused})" if refused else ""))
    if wanted is None:
        return every[-1]
    matches = [run for run in every if run.id == wanted] or [r for r in every if wanted in r.id]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        known = ", ".join(run.id for run in every[-5:])
        raise TpunbError(
            f"no run in {shown_place(runs)} has {wanted!r} in its id; the latest are: {known}"
        )
    several = ", ".join(run.id for run in matches[-5:])
    raise TpunbError(f"{wanted!r} matches several runs: {several}")
