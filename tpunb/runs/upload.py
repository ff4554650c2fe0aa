"""A run's folder in a bucket: written here first, copied there by a process of its own.

    python -c … RUN URL

`%tpu_setup --runs gs://bucket/runs` has it started for each run (`start_upload`); the URL is any
that fsspec supports. It only reads the folder, so nothing of the run waits for the bucket. It
outlives the kernel, tries again what fails, gives up on what hangs, and ends when all is there. The
result is copied last: who finds it there finds everything. `upload.json` says how it stands.
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
"""What says nothing elsewhere."""
EVERY = 10.0
"""Seconds between two copies of what grows; a file that takes long to copy waits ten times that."""
LOOK = 0.5
"""Seconds between two looks whether the run has ended."""
SETTLED = 1.5
"""Seconds after the end without a change after which nobody writes to the folder any more."""
PATIENCE = 120.0
"""Seconds that the bucket may take for a file, and a second for each `_SLOWEST` bytes …"""
_SLOWEST = 500_000
GIVE_UP = 1800.0
"""… and after the end of the run, seconds without any success after which it gives up."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two tries."""
_AT_ONCE = 8
"""Files: a run of many ranks has thousands of small ones."""
_WHOLE = 32_000_000
"""Bytes of a file that is read at once, as it is at one moment."""
_UPLOADER = "from tpunb.runs import upload; upload.main()"


@dataclass(frozen=True)
class UploadState:
    """How it stands."""

    url: str
    """Of the run's folder there."""
    done: bool = False
    files: int = 0
    bytes: int = 0
    """Copied so far; what was copied again counts again."""
    problem: str = ""
    """The newest failure, until something succeeds again."""
    pid: int = 0


class Bucket(Protocol):
    """Where the folder is copied to; calls raise whatever the library for it raises."""

    def put(self, source: Path, name: str) -> int:
        """Copy a file as it is now; its bytes."""

    def remove(self, name: str) -> int:
        """Remove a file, if there is one; 0 bytes."""


class FsspecBucket:
    """A folder in a file system of fsspec's."""

    def __init__(self, url: str) -> None:
        """Raises ImportError and ValueError for a URL that fsspec cannot do."""
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
        """For file systems that have folders; in a bucket it is nothing."""
        if folder not in self._made:
            self._system.makedirs(folder, exist_ok=True)
            self._made.add(folder)

    def remove(self, name: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._path}/{name}")
        return 0


class Uploader:
    """Keeps the copy of one run's folder. `clock`: seconds from any origin."""

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
        self._copied: dict[str, tuple[int, int]] = {}
        """What `stat` said of the files that are there."""
        self._due: dict[str, float] = {}
        self._hangs = False
        """Whether a call of this round has got no answer: the others are left for the next."""

    def copy(self, *, eager: bool = False) -> bool:
        """Copy what has changed and is due, or all of it; not `result.json`. False if one fails."""
        self._hangs = False
        here = dict(_files_of(self._run.path))
        here.pop(RESULT, None)
        gone = [name for name in self._copied if name not in here]
        new = [
            name
            for name, key in here.items()
            if self._copied.get(name) != key and (eager or self._clock() >= self._due.get(name, 0))
        ]
        if gone or new:
            self._changed_at = self._clock()
        with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            removed = list(pool.map(self._remove, gone))
            put = list(pool.map(self._put, new))
        for name in [name for name, fine in zip(gone, removed, strict=True) if fine]:
            del self._copied[name]
        for name in [name for name, fine in zip(new, put, strict=True) if fine]:
            self._copied[name] = here[name]
        return all(removed) and all(put)

    def finish(self) -> bool:
        """Copy `result.json`, if there is one: everything else is there. False if that fails."""
        return not (self._run.path / RESULT).exists() or self._put(RESULT)

    def _remove(self, name: str) -> bool:
        return self._try(lambda: self._bucket.remove(name)) is not None

    def _put(self, name: str) -> bool:
        source, began = self._run.path / name, self._clock()
        count = self._try(lambda: self._bucket.put(source, name))
        if count is None:
            return not source.exists()  # removed a moment ago: nothing to copy
        self._due[name] = self._clock() + max(EVERY, 10 * (self._clock() - began))
        with self._mutex:
            self._files, self._bytes = self._files + 1, self._bytes + count
        return True

    def _try(self, call: Callable[[], int]) -> int | None:
        if self._hangs:
            return None
        try:
            return call()
        # Each library has errors of its own, and all of them mean: try again.
        except Exception as error:
            if isinstance(error, TimeoutError):
                self._hangs = True
            self._problem = f"{type(error).__name__}: {error}".rstrip(": ")[:500]
            return None

    def save_state(self, *, done: bool = False) -> None:
        """Say how it stands."""
        told = UploadState(
            self._url, done, self._files, self._bytes, "" if done else self._problem, os.getpid()
        )
        if told != self._told:
            with contextlib.suppress(OSError):  # a full disk, a folder that is gone
                files.write_json(self._run.path / FILE, asdict(told))
                self._told = told

    def run(self, wait: Callable[[float], None] = time.sleep) -> bool:
        """Until everything is there, after the end of the run; False if it had to give up."""
        failing_since: float | None = None
        pause, told = _FIRST_PAUSE, False
        while self._run.path.exists():
            standing = state.run_state(self._run)
            ended = not standing.active or standing is RunState.AWAY
            fine = self.copy(eager=ended)
            settled = ended and self._clock() - self._changed_at >= SETTLED
            if fine and settled and (fine := self.finish()):
                self.save_state(done=True)
                return True
            if fine:
                failing_since, pause, self._problem = None, _FIRST_PAUSE, ""
                self.save_state()
                wait(LOOK)
                continue
            failing_since = self._clock() if failing_since is None else failing_since
            failing = self._clock() - failing_since
            if failing >= EVERY and not told:
                told = True
                self._tell()
            self.save_state()
            if ended and failing > GIVE_UP:
                return False
            wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return False

    def _tell(self) -> None:
        with contextlib.suppress(OSError):
            text = f"not copied to {self._url} so far, and tried again: {self._problem}"
            self._run.emit(Note(f"{text}. All of it is in {self._run.path}"))


def _files_of(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and what `stat` says of them; nothing hidden: those are still being written."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            if name.startswith(".") or name == "pulse" or relative in _OWN:
                continue
            with contextlib.suppress(OSError):  # removed a moment ago
                status = path.lstat()
                if path.is_file() and not path.is_symlink():
                    yield relative, (status.st_size, status.st_mtime_ns)


class PatientBucket:
    """A bucket whose calls end: one that hangs is left alone in its thread, and is an error."""

    def __init__(self, url: str, within: float = PATIENCE) -> None:
        self._url = url
        self._patience = within
        self._late: dict[str, futures.Future[int]] = {}
        """Calls that were given up, by the file that they may still write."""
        self._connect()

    def _connect(self) -> None:
        """Anew: after a call that hangs, its connections and its thread are of no use."""
        self._bucket = patience.start(lambda: FsspecBucket(self._url))

    def put(self, source: Path, name: str) -> int:
        limit = self._patience + source.stat().st_size / _SLOWEST
        return self._within(limit, name, lambda bucket: bucket.put(source, name))

    def remove(self, name: str) -> int:
        return self._within(self._patience, name, lambda bucket: bucket.remove(name))

    def _within(self, limit: float, name: str, call: Callable[[FsspecBucket], int]) -> int:
        if (late := self._late.pop(name, None)) is not None:
            futures.wait([late], 4 * limit)  # or what it does, which is older, would come last
        bucket = self._bucket
        answer = patience.start(lambda: call(bucket.result()))
        futures.wait([answer], limit)
        done = answer.done()
        if self._bucket is bucket and (not done or (bucket.done() and bucket.exception())):
            self._connect()
        if not done:
            self._late[name] = answer
            raise TimeoutError(f"no answer for {limit:.0f} s")
        return answer.result()


def main() -> None:
    """In the process of one run."""
    folder, url = sys.argv[1:]
    os.nice(10)
    uploader = Uploader(RunDir(folder), PatientBucket(url), url)
    complete = uploader.run()
    sys.stdout.flush()
    # A thread of a call that hangs is not waited for.
    os._exit(0 if complete else 1)


_started: dict[Path, subprocess.Popen[bytes]] = {}
"""Children of this process, which takes note of their end, by the run's folder."""


def start_upload(run: RunDir, url: str) -> None:
    """Have a run's folder copied to a folder of its name below `url`, from now to its end.

    Raises OSError if no process can be started.
    """
    for done in [path for path, process in _started.items() if process.poll() is not None]:
        del _started[done]
    place = f"{url.rstrip('/')}/{run.id}"
    _started[run.path] = interrupts.start_apart(
        _UPLOADER,
        str(run.path),
        place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )


def wait_for_upload(run: RunDir, most: float, stopped: Callable[[], bool]) -> str:
    """Wait until a run's folder is in its bucket; what to tell if it is not, '' if it is.

    For whoever ends with the cell, as papermill does, and with it maybe the machine.
    """
    deadline, process = time.monotonic() + most, _started.get(run.path)
    while True:
        gone = process is not None and process.poll() is not None
        told = read_state(run)
        if told is not None and told.done:
            return ""
        if gone or stopped() or time.monotonic() > deadline:
            break
        time.sleep(LOOK / 5)
    problem = f": {told.problem}" if told is not None and told.problem else ""
    return f"not all of {run.path} is in the bucket yet{problem}"


def is_copying(run: RunDir) -> bool:
    """Whether a process is at it now."""
    told = read_state(run)
    return told is not None and not told.done and _alive(told.pid)


def _alive(pid: int) -> bool:
    return processes.find_process(pid) is not None


def read_state(run: RunDir) -> UploadState | None:
    """How the upload of a run stands; None if it has none, or it has not begun."""
    try:
        told: UploadState = records.build(UploadState, records.read(run.path / FILE))
    except (OSError, ValueError):
        return None
    return told


def check_url(url: str) -> None:
    """Raise TpunbError if fsspec does not know such places, or lacks a package for them.

    Also for a URL with a secret: it would be in the run's folder, and in the list of processes.
    """
    if secrets.is_secret_text(url) or secrets.kept_value("", url) == secrets.HIDDEN:
        raise TpunbError(
            "--runs: the URL holds a password or a key, which each run would write down. Leave it "
            "out, and give it to the library for this kind of bucket: in its variables (as "
            "AWS_SECRET_ACCESS_KEY), or in a file in ~/.config/fsspec"
        )
    from fsspec.core import split_protocol
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(split_protocol(url)[0])
    except (ImportError, ValueError) as error:  # «Please install gcsfs to access Google Storage»
        raise TpunbError(f"{url}: {error}") from None
