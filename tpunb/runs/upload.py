"""Copy a run's folder to a bucket, in a separate process, while the run writes it locally.

    python -c … RUN URL

With `%tpu_setup --runs gs://bucket/runs`, `start_upload` starts the process for each run; fsspec
must support the URL. The process only reads the folder, so the run never waits for the bucket. It
outlives the kernel, repeats calls that fail, gives up calls that hang, and ends when everything is
copied. The result is copied last, so a bucket with the result is complete. `upload.json` holds the
state of the copy.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.spec import RunState
from tpunb.utils import files, interrupts, patience, processes, records, secrets
from tpunb.utils.errors import TpunbError

FILE = "upload.json"
RESULT = "result.json"
_OWN = frozenset([FILE, "running.lock", "stopping", "requests.jsonl", "copied.json"])
"""Files that are of no use in a bucket."""
EVERY = 10.0
"""Seconds between two copies of a growing file, or ten times the duration of its last copy."""
POLL_INTERVAL = 0.5
"""Seconds between two checks of the run folder."""
SETTLED = 1.5
"""Seconds without a change after the end of a run after which its folder counts as complete."""
PATIENCE = 120.0
"""Seconds that a call may take, plus a second for each `_SLOWEST` bytes."""
_SLOWEST = 500_000
GIVE_UP = 1800.0
"""Seconds of failures after the end of the run after which the process gives up."""
LATE = 30.0
"""Seconds after a failed call in which the bucket may still carry it out."""
LATEST = 120.0
"""The same for a call without an answer, which continues in its thread."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two attempts after a failure."""
_AT_ONCE = 8
"""The number of concurrent calls: a run of many ranks has thousands of small files."""
_WHOLE = 32_000_000
"""The most bytes of a file that is read at once, so that the copy is from one moment."""
_UPLOADER = "from tpunb.runs import upload; upload.main()"


@dataclass(frozen=True)
class UploadState:
    """The content of `upload.json`: the state of the copy."""

    url: str
    """The URL of the run's folder in the bucket."""
    done: bool = False
    files: int = 0
    bytes: int = 0
    """The bytes copied so far, including repeated copies."""
    problem: str = ""
    """The latest failure; '' once all calls succeed again."""
    pid: int = 0
    """The process that copies."""


class Bucket(Protocol):
    """The destination of the copy; calls may raise any error of the bucket's library."""

    def put(self, source: Path, name: str) -> int:
        """Copy the current content of a file; return the number of bytes."""

    def remove(self, name: str) -> int:
        """Remove a file if it exists; return 0."""


Version = tuple[int, int]
"""Size and time of change of a file, as `stat` reports them."""


class FsspecBucket:
    """A folder in an fsspec file system."""

    def __init__(self, url: str) -> None:
        """Raises ImportError and ValueError for a URL that fsspec does not support."""
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url, skip_instance_cache=True)
        self._system: Any = system
        self._path: str = path.rstrip("/")
        self._made: set[str] = set()

    def put(self, source: Path, name: str) -> int:
        place = f"{self._path}/{name}"
        self._make_folder(place.rpartition("/")[0])
        length = source.stat().st_size
        if length > _WHOLE:
            self._system.put_file(str(source), place)
            return length
        data = files.read_start(source, _WHOLE)
        self._system.pipe_file(place, data)
        return len(data)

    def _make_folder(self, folder: str) -> None:
        """Make a folder in file systems that have folders; do nothing in a bucket."""
        if folder not in self._made:
            self._system.makedirs(folder, exist_ok=True)
            self._made.add(folder)

    def remove(self, name: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._path}/{name}")
        return 0


class Uploader:
    """Keeps the copy of a run's folder up to date. `clock`: returns seconds from any origin."""

    def __init__(
        self, run: RunDir, bucket: Bucket, url: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._bucket = bucket
        self._clock = clock
        self._url = url
        self._files = self._bytes = 0
        self._problem = ""
        self._told: UploadState | None = None
        self._changed_at = clock()
        self._mutex = threading.Lock()
        self._copied: dict[str, Version | None] = {}
        """The version of each file in the bucket; None: not known, because a call failed."""
        self._suspect: dict[str, float] = {}
        """Files with a failed call, and when the bucket can no longer carry it out: each is copied
        or removed once more then."""
        self._due: dict[str, float] = {}
        self._hangs = False
        """True if a call of this round got no answer: other calls are left for the next round."""

    def copy(self, *, eager: bool = False) -> bool:
        """Copy files that have changed and are due (`eager`: all that have changed), remove others.

        `result.json` is not copied. Return False if a call failed.
        """
        self._hangs = False
        here = dict(_files_of(self._run.path))
        here.pop(RESULT, None)
        gone = [name for name in self._copied if name not in here]
        new = [
            name
            for name, version in here.items()
            if self._copied.get(name) != version
            and (eager or self._clock() >= self._due.get(name, 0))
        ]
        if gone or new:
            self._changed_at = self._clock()
        over = {name for name, last in self._suspect.items() if self._clock() >= last}
        gone += [name for name in over if name not in here and name not in gone]
        new += [name for name in over if name in here and name not in new]
        with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            removed = list(pool.map(self._remove, gone))
            put = list(pool.map(self._put, new))
        for name, fine in zip(gone, removed, strict=True):
            if fine:
                self._copied.pop(name, None)
        for name, fine in zip(new, put, strict=True):
            self._copied[name] = here[name] if fine else None
        for name, fine in zip([*gone, *new], [*removed, *put], strict=True):
            if fine and name in over:
                self._suspect.pop(name, None)
        return all(removed) and all(put)

    def finish(self) -> bool:
        """Copy `result.json`, if it exists, after everything else. Return False if that fails."""
        # Its content never changes, so a failed call that is carried out late does no harm.
        fine = not (self._run.path / RESULT).exists() or self._put(RESULT)
        self._suspect.pop(RESULT, None)
        return fine

    def _remove(self, name: str) -> bool:
        return self._try(name, lambda: self._bucket.remove(name)) is not None

    def _put(self, name: str) -> bool:
        source, began = self._run.path / name, self._clock()

        def put() -> int:
            try:
                return self._bucket.put(source, name)
            except FileNotFoundError:
                if source.exists():  # then something is missing in the bucket
                    raise
                return 0  # just removed: nothing to copy, and nothing arrives late

        count = self._try(name, put)
        if count is None:
            return not source.exists()
        self._due[name] = self._clock() + max(EVERY, 10 * (self._clock() - began))
        with self._mutex:
            self._files, self._bytes = self._files + 1, self._bytes + count
        return True

    def _try(self, name: str, call: Callable[[], int]) -> int | None:
        """Call the bucket; None if that fails."""
        if self._hangs:
            return None
        try:
            return call()
        # Each library has errors of its own, and after all of them the call is repeated.
        except Exception as error:
            late = LATE
            if isinstance(error, TimeoutError):
                self._hangs, late = True, LATEST
            self._suspect[name] = max(self._suspect.get(name, 0.0), self._clock() + late)
            self._problem = f"{type(error).__name__}: {error}".rstrip(": ")[:500]
            return None

    def save_state(self, *, done: bool = False) -> None:
        """Write `upload.json` if it has changed."""
        told = UploadState(
            self._url, done, self._files, self._bytes, "" if done else self._problem, os.getpid()
        )
        if told != self._told:
            with contextlib.suppress(OSError):  # a full disk, a folder that is gone
                files.write_json(self._run.path / FILE, asdict(told))
                self._told = told

    def run(self, wait: Callable[[float], None] = time.sleep) -> bool:
        """Copy until the run has ended and everything is copied; return False after giving up."""
        failing_since: float | None = None
        pause, told = _FIRST_PAUSE, False
        while self._run.path.exists():
            standing = state.run_state(self._run)
            ended = not standing.active or standing is RunState.AWAY
            fine = self.copy(eager=ended)
            quiet = self._clock() - self._changed_at >= SETTLED
            settled = ended and quiet and not self._suspect
            if fine and settled and (fine := self.finish()):
                self.save_state(done=True)
                return True
            if fine:
                failing_since, pause, self._problem = None, _FIRST_PAUSE, ""
                self.save_state()
                wait(POLL_INTERVAL)
                continue
            failing_since = self._clock() if failing_since is None else failing_since
            failing = self._clock() - failing_since
            if failing >= EVERY and not told:
                told = True
                self._report_problem()
            self.save_state()
            if ended and failing > GIVE_UP:
                return False
            wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return False

    def _report_problem(self) -> None:
        with contextlib.suppress(OSError):
            text = f"not copied to {self._url} yet, retrying: {self._problem}"
            self._run.emit(Note(f"{text}. All files are in {self._run.path}"))


def _files_of(folder: Path) -> Iterator[tuple[str, Version]]:
    """Yield the names and versions of files, without hidden files: those are not complete yet."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            if name.startswith(".") or name == "pulse" or relative in _OWN:
                continue
            with contextlib.suppress(OSError):  # just removed
                status = path.lstat()
                if path.is_file() and not path.is_symlink():
                    yield relative, (status.st_size, status.st_mtime_ns)


class PatientBucket:
    """A bucket whose calls end: a call that hangs is left in its thread and raises TimeoutError."""

    def __init__(self, url: str, within: float = PATIENCE) -> None:
        self._url = url
        self._patience = within
        self._connect()

    def _connect(self) -> None:
        """Connect, also after a call that hangs, which makes connection and thread unusable."""
        self._bucket = patience.start(lambda: FsspecBucket(self._url))

    def put(self, source: Path, name: str) -> int:
        limit = self._patience + source.stat().st_size / _SLOWEST
        return self._within(limit, lambda bucket: bucket.put(source, name))

    def remove(self, name: str) -> int:
        return self._within(self._patience, lambda bucket: bucket.remove(name))

    def _within(self, limit: float, call: Callable[[FsspecBucket], int]) -> int:
        bucket = self._bucket
        answer = patience.start(lambda: call(bucket.result()))
        futures.wait([answer], limit)
        done = answer.done()
        if self._bucket is bucket and (not done or (bucket.done() and bucket.exception())):
            self._connect()
        if not done:
            raise TimeoutError(f"no answer for {limit:.0f} s")
        return answer.result()


def main() -> None:
    """Run the uploader of one run, in its own process."""
    folder, url = sys.argv[1:]
    os.nice(10)
    uploader = Uploader(RunDir(folder), PatientBucket(url), url)
    complete = uploader.run()
    sys.stdout.flush()
    # Without waiting for threads of calls that hang.
    os._exit(0 if complete else 1)


_started: dict[Path, subprocess.Popen[bytes]] = {}
"""The uploaders that this process has started, by run folder."""


def start_upload(run: RunDir, url: str) -> None:
    """Start a process that copies a run's folder to a folder below `url` until the run's end.

    Raises OSError if no process can be started.
    """
    for done in [path for path, process in _started.items() if process.poll() is not None]:
        del _started[done]
    place = f"{url.rstrip('/')}/{run.id}"
    _started[run.path] = interrupts.start_in_own_session(
        _UPLOADER,
        str(run.path),
        place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )


def wait_for_upload(run: RunDir, most: float, stopped: Callable[[], bool]) -> str:
    """Wait until a run's folder is in its bucket; return '', or a message if it is not.

    It is for programs that end after the cell, such as papermill, maybe followed by the machine.
    """
    deadline, process = time.monotonic() + most, _started.get(run.path)
    while True:
        gone = process is not None and process.poll() is not None
        told = read_state(run)
        if told is not None and told.done:
            return ""
        if gone or stopped() or time.monotonic() > deadline:
            break
        time.sleep(POLL_INTERVAL / 5)
    problem = f": {told.problem}" if told is not None and told.problem else ""
    return f"not all of {run.path} is in the bucket yet{problem}"


def is_copying(run: RunDir) -> bool:
    """True if a process is copying the run now."""
    told = read_state(run)
    return told is not None and not told.done and _alive(told.pid)


def _alive(pid: int) -> bool:
    return processes.find_process(pid) is not None


def read_state(run: RunDir) -> UploadState | None:
    """Return the state of a run's upload; None if there is none, or it has not begun."""
    try:
        told: UploadState = records.build(UploadState, records.read(run.path / FILE))
    except (OSError, ValueError):
        return None
    return told


def check_url(url: str) -> None:
    """Raise TpunbError if fsspec does not support the URL, or lacks a package for it.

    A URL with a secret is refused too: it would be in the run folder and in the process list.
    """
    if secrets.is_secret_text(url) or secrets.kept_value("", url) == secrets.HIDDEN:
        raise TpunbError(
            "--runs: the URL contains a password or a key, which would be stored with each "
            "run. Leave it out, and set it in the environment variables of this bucket's library "
            "(such as AWS_SECRET_ACCESS_KEY), or in a file in ~/.config/fsspec"
        )
    from fsspec.core import split_protocol
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(split_protocol(url)[0])
    except (ImportError, ValueError) as error:  # «Please install gcsfs to access Google Storage»
        raise TpunbError(f"{url}: {error}") from None
