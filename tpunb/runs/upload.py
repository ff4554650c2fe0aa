"""Copy a run's folder to a bucket, in a separate process, while the run writes it locally.

    python -c … RUN URL

With `%tpu_setup --runs gs://bucket/runs`, `start_upload` starts the process for each run; fsspec
must support the URL. The process only reads the folder, so the run never waits for the bucket. It
outlives the kernel, repeats what fails, and ends when everything is copied: the result last, so a
bucket with the result is complete. `upload.json` holds the state of the copy.
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
from typing import Any

from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.spec import RunState
from tpunb.utils import files, interrupts, processes, records, secrets
from tpunb.utils.errors import TpunbError

FILE = "upload.json"
RESULT = "result.json"
_OWN = frozenset([FILE, "running.lock", "stopping", "requests.jsonl", "copied.json"])
"""Files that are of no use in a bucket."""
EVERY = 10.0
"""Seconds between two rounds, or ten times the duration of the last one."""
POLL_INTERVAL = 0.5
"""Seconds between two looks at whether the run has ended."""
SETTLED = 1.5
"""Seconds after the end of a run in which its last files are written."""
GIVE_UP = 1800.0
"""Seconds of failures after the end of the run, or without an answer, after which it gives up."""
_LONGEST_PAUSE = 60.0
_WHOLE = 32_000_000
"""The most bytes of a file that is read at once, so that its copy is from one moment."""
_AT_ONCE = 8
"""The number of concurrent calls: a run of many ranks has thousands of small files."""
_UPLOADER = "from tpunb.runs import upload; upload.main()"


@dataclass(frozen=True)
class UploadState:
    """The content of `upload.json`: the state of the copy."""

    url: str
    """The URL of the run's folder in the bucket."""
    done: bool = False
    files: int = 0
    """The files copied so far, including repeated copies."""
    problem: str = ""
    """The latest failure; '' once copies succeed again."""
    pid: int = 0
    """The process that copies."""


Version = tuple[int, int]
"""Size and time of change of a file, as `stat` reports them."""


class Uploader:
    """Keeps the copy of a run's folder up to date. `clock`: returns seconds from any origin."""

    def __init__(self, run: RunDir, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._url = url
        self._clock = clock
        self._copied: dict[str, Version] = {}
        """The version of each file in the bucket."""
        self._folders: set[str] = set()
        """Those that have been made, where the file system has folders."""
        self._files = 0
        self._connected: tuple[Any, str] | None = None
        """The file system, and the folder in it; made again after a failure."""
        self.answered = clock()
        """When the bucket last answered, or was not asked."""

    def copy(self) -> None:
        """Copy files that have changed, and remove those that are gone; not `result.json`.

        Raises any error of the bucket's library, after all calls have ended.
        """
        here = dict(_files_of(self._run.path))
        here.pop(RESULT, None)
        changed = [name for name, version in here.items() if self._copied.get(name) != version]

        def put(name: str) -> None:
            self._put(name)
            self._copied[name] = here[name]

        with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            calls = [pool.submit(put, name) for name in changed]
        for call in calls:
            call.result()
        system, place = self._connect()
        for name in self._copied.keys() - here.keys():
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(f"{place}/{name}")
            del self._copied[name]

    def _connect(self) -> tuple[Any, str]:
        if self._connected is None:
            from fsspec.core import url_to_fs

            system, place = url_to_fs(self._url, skip_instance_cache=True)
            self._connected = system, place.rstrip("/")
        return self._connected

    def _put(self, name: str) -> None:
        system, place = self._connect()
        source, folder = self._run.path / name, f"{place}/{name}".rpartition("/")[0]
        if folder not in self._folders:
            system.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        with contextlib.suppress(FileNotFoundError):  # just removed
            if source.stat().st_size > _WHOLE:
                system.put_file(str(source), f"{place}/{name}")
            else:
                system.pipe_file(f"{place}/{name}", files.read_start(source, _WHOLE))
        self._files += 1
        self.answered = self._clock()

    def run(self, wait: Callable[[float], None] = time.sleep) -> bool:
        """Copy until the run has ended and everything is copied; return False after giving up."""
        failing_since: float | None = None
        pause, told = 1.0, False
        while self._run.path.exists():
            standing = state.run_state(self._run)
            ended = not standing.active or standing is RunState.AWAY
            began = self.answered = self._clock()
            try:
                self.copy()
                if ended:
                    wait(SETTLED)
                    self.copy()  # what others have still written
                    if (self._run.path / RESULT).exists():
                        self._put(RESULT)
                    self._save_state(done=True)
                    return True
            except Exception as error:  # each library has errors of its own
                self._connected = None
                failing_since = began if failing_since is None else failing_since
                problem = f"{type(error).__name__}: {error}".rstrip(": ")[:500]
                self._save_state(problem)
                if not told and self._clock() - failing_since >= EVERY:
                    told = True
                    text = f"not copied to {self._url} yet, retrying: {problem}"
                    with contextlib.suppress(OSError):
                        self._run.emit(Note(f"{text}. All files are in {self._run.path}"))
                if ended and self._clock() - failing_since > GIVE_UP:
                    return False
                wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            failing_since, pause = None, 1.0
            self._save_state()
            due = self._clock() + max(EVERY, 10 * (self._clock() - began))
            while self._clock() < due and state.run_state(self._run).active:
                self.answered = self._clock()
                wait(POLL_INTERVAL)
        return False

    def _save_state(self, problem: str = "", *, done: bool = False) -> None:
        told = UploadState(self._url, done, self._files, problem, os.getpid())
        with contextlib.suppress(OSError):  # a full disk, a folder that is gone
            files.write_json(self._run.path / FILE, asdict(told))


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


def main() -> None:
    """Run the uploader of one run, in its own process."""
    folder, url = sys.argv[1:]
    os.nice(10)
    uploader = Uploader(RunDir(folder), url)

    def end_a_hang() -> None:
        while time.monotonic() - uploader.answered < GIVE_UP:
            time.sleep(POLL_INTERVAL)
        os._exit(1)

    threading.Thread(target=end_a_hang, daemon=True).start()
    os._exit(0 if uploader.run() else 1)


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
