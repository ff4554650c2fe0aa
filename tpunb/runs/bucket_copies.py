"""Copies of run folders in a bucket (`%tpu_setup --runs gs://bucket/runs`), and reading them.

For each run, `start_upload` starts a process that copies what has changed in the folder, with
fsspec. The process only reads the folder, so the run never waits for the bucket. It outlives the
kernel, repeats what fails, and ends when everything is copied: the result last, so a bucket with
the result is complete.

`tpunb runs --runs URL` and `tpunb logs --runs URL` read a folder in the user's cache that has the
files that they need of each run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tpunb.runs import state
from tpunb.runs.directory import RUN_ID, RunDir
from tpunb.runs.events import Note
from tpunb.runs.spec import RunState
from tpunb.utils import files, interrupts, processes, records, secrets
from tpunb.utils.errors import TpunbError

RESULT = "result.json"
_PROCESS = "upload.json"
"""The file with the number of the process that copies the run."""
_NOT_COPIED = frozenset([_PROCESS, "running.lock", "stopping", "requests.jsonl", "pulse"])
EVERY = 10.0
"""Seconds between two rounds, or ten times the duration of the last one."""
POLL_INTERVAL = 0.5
"""Seconds between two looks at whether the run has ended."""
SETTLED = 1.5
"""Seconds after the end of a run in which its last files are written."""
TELL, GIVE_UP = 4, 35
"""Failures in a row, at growing intervals, after which the run's cell says so (15 s); after which
the copy of a run that has ended is given up (half an hour)."""
AT_ONCE = 8
"""Files that are copied at the same time."""
SMALL = 2_000_000
"""The most bytes of a file that is downloaded for a list of runs."""
_LISTED = ("spec.json", "values.json", "metrics.jsonl", RESULT)
_LOGS = ("run.log", "events.jsonl")


def is_url(text: str) -> bool:
    """True if the text is a URL, not a folder of this machine."""
    return "://" in text


def check_url(url: str) -> None:
    """Raise TpunbError if fsspec does not support the URL, or lacks a package for it.

    A URL with a secret is refused too: it would be in the run folder and in the process list.
    """
    if secrets.is_secret_text(url) or secrets.kept_value("", url) == secrets.HIDDEN:
        raise TpunbError(
            "--runs: the URL contains a password or a key, which would be stored with each run. "
            "Set it in the environment instead (such as AWS_SECRET_ACCESS_KEY)"
        )
    from fsspec.core import split_protocol
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(split_protocol(url)[0])
    except (ImportError, ValueError) as error:  # «Please install gcsfs to access Google Storage»
        raise TpunbError(f"{url}: {error}") from None


def _open(url: str) -> tuple[Any, str]:
    """Return a new connection to the file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    system, place = url_to_fs(url, skip_instance_cache=True)
    system.auto_mkdir = True  # only folders of this machine have to be made
    return system, place.rstrip("/")


# --- Copying a run ---


def copy_run(run: RunDir, url: str, wait: Callable[[float], None] = time.sleep) -> bool:
    """Copy until the run has ended and everything is copied; return False after giving up."""
    copied: dict[str, tuple[int, int]] = {}
    connection, failures = None, 0
    while run.path.exists():
        standing, began = state.run_state(run), time.monotonic()
        ended = not standing.active or standing is RunState.AWAY
        try:
            system, place = connection = connection or _open(url)
            _copy_changed(run, system, place, copied)
            if ended:
                wait(SETTLED)
                _copy_changed(run, system, place, copied)  # what others have still written
                if (run.path / RESULT).exists():
                    system.put_file(str(run.path / RESULT), f"{place}/{RESULT}")
                return True
        except Exception as error:  # each library has errors of its own
            connection, failures = None, failures + 1
            if failures == TELL:
                problem = f"not copied to {url} yet, retrying: {type(error).__name__}: {error}"
                with contextlib.suppress(OSError):
                    run.emit(Note(f"{problem[:500]}. All files are in {run.path}"))
            if ended and failures > GIVE_UP:
                return False
            wait(min(2.0 ** (failures - 1), 60.0))
            continue
        failures = 0
        left = max(EVERY, 10 * (time.monotonic() - began))
        while left > 0 and state.run_state(run).active:
            wait(POLL_INTERVAL)
            left -= POLL_INTERVAL
    return False


def _copy_changed(run: RunDir, system: Any, place: str, copied: dict[str, tuple[int, int]]) -> None:
    """Copy files that have changed, and remove those that are gone; not the result.

    `copied`: the versions in the bucket, which are updated.
    """
    here = dict(_files_of(run.path))
    here.pop(RESULT, None)
    changed = [name for name, version in here.items() if copied.get(name) != version]
    copied.update(dict.fromkeys(changed, (-1, 0)))  # a part of them may be there after an error

    def put(name: str) -> None:
        try:
            system.put_file(str(run.path / name), f"{place}/{name}")
        except FileNotFoundError:
            if (run.path / name).exists():
                raise  # the bucket is not there; otherwise the training has just removed the file
        copied[name] = here[name]

    # Not fsspec's put() of many files: after an error it leaves the others going, and what they
    # write then may replace what the next round has written.
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tries = [pool.submit(put, name) for name in changed]
    for each in tries:
        each.result()
    for name in copied.keys() - here.keys():
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(f"{place}/{name}")
        del copied[name]


def _files_of(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name, size and time of change of each file, without hidden ones: not complete."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.name in _NOT_COPIED or any(part.startswith(".") for part in name.parts):
            continue
        with contextlib.suppress(OSError):  # just removed
            status = path.lstat()
            if path.is_file() and not path.is_symlink():
                yield name.as_posix(), (status.st_size, status.st_mtime_ns)


def main() -> None:
    """Copy a run, in a process of its own."""
    run, url = RunDir(sys.argv[1]), sys.argv[2]
    processes.set_title("copying", run.path.name)
    os.nice(10)
    with contextlib.suppress(OSError):  # a full disk
        files.write_json(run.path / _PROCESS, os.getpid())
    complete = copy_run(run, url)
    (run.path / _PROCESS).unlink(missing_ok=True)
    os._exit(0 if complete else 1)


_started: dict[Path, subprocess.Popen[bytes]] = {}
"""The copying processes that this process has started, by run folder."""


def start_upload(run: RunDir, url: str) -> None:
    """Start a process that copies a run's folder to a folder below `url` until the run's end.

    Raises OSError if no process can be started.
    """
    for done in [path for path, process in _started.items() if process.poll() is not None]:
        del _started[done]
    _started[run.path] = interrupts.start_in_own_session(
        "from tpunb.runs import bucket_copies; bucket_copies.main()",
        str(run.path),
        f"{url.rstrip('/')}/{run.id}",
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
    while process is not None and process.poll() is None:
        if stopped() or time.monotonic() > deadline:
            break
        time.sleep(POLL_INTERVAL / 5)
    complete = process is not None and process.poll() == 0
    return "" if complete else f"not all of {run.path} is in the bucket yet"


def is_copying(run: RunDir) -> bool:
    """True if a process is copying the run now."""
    try:
        return processes.find_process(int(records.read(run.path / _PROCESS))) is not None
    except (OSError, ValueError, TypeError):
        return False


# --- Reading runs ---


def cached_runs(url: str) -> Path:
    """Return a local folder with the current runs at a URL and the files that lists of runs need.

    Raises TpunbError if the bucket cannot be read.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    cache = Path(base) / "tpunb" / "runs" / name
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.write_json(RunDir(cache / name).bucket, url)
    with _explained(url):
        system, root = _open(url)
        try:
            names = [Path(place).name for place in system.ls(root, detail=False)]
        except FileNotFoundError:  # in a bucket, there are no empty folders
            names = []
        found = list(filter(RUN_ID.match, names))
        for run in (cache / name for name in found):
            if not (run / RESULT).exists():  # a run with a result is complete
                _fetch(system, f"{root}/{run.name}", run, _LISTED, SMALL)
    for folder in cache.iterdir():
        if folder.is_dir() and folder.name not in found:  # removed from the bucket
            shutil.rmtree(folder, ignore_errors=True)
    return cache


def load_log(run: RunDir) -> None:
    """Download the log of a run in `cached_runs`; do nothing for a run of this machine.

    Raises TpunbError if the bucket cannot be read.
    """
    if run.bucket.exists():
        url = str(records.read(run.bucket))
        with _explained(url):
            system, root = _open(url)
            _fetch(system, f"{root}/{run.id}", run.path, _LOGS)


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each library has errors of its own
        raise TpunbError(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def _fetch(
    system: Any, place: str, folder: Path, names: Sequence[str], most: float = float("inf")
) -> None:
    """Download files of a run, in order, if they exist and have no more than `most` bytes."""
    sizes = {Path(info["name"]).name: info["size"] for info in system.ls(place, detail=True)}
    if "spec.json" not in sizes:
        return  # another folder, or a run that has just begun
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in names:
        if name in sizes and sizes[name] <= most:
            files.atomic_write(folder / name, system.cat_file(f"{place}/{name}"))
