"""The order to stop this machine when it is not needed any more: given, taken back, looked at.

A process of its own (`tpunb.platforms.watch`) carries it out, because the kernel that gave it may
be gone by then. They meet in a folder of the user's:

    order.json      what is to be stopped, and when; taken back by removing it
    state.json      what the watcher waits for, or how many seconds are left
    kernels/<pid>   of each kernel in which tpunb is loaded: whether a cell runs
    watcher.lock    held by the watcher
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpunb import rundir
from tpunb.errors import SetupError
from tpunb.platforms.tpu_vm import TpuVm

COUNTDOWN = 60.0
"""Seconds in which everybody can see it coming, and take the order back."""
LOOK = 1.0
"""Seconds between two looks of the watcher."""
ROOM = 200
"""Bytes for what a kernel says: the same each time, so that nothing of an older text remains."""
HANDOVER = 3.0
"""Seconds in which a watcher that is no longer needed has ended."""

_WATCHER = (
    "import sys; sys.path[0] = sys.argv.pop(1); from tpunb.platforms import watch; watch.main()"
)


@dataclass(frozen=True)
class Order:
    """What is to be stopped, and when."""

    vm: TpuVm
    runs: tuple[str, ...]
    """Folders of runs: while any in them goes on, nothing is stopped."""
    since: float
    """When it was given, in seconds since the epoch."""
    run: str | None = None
    """The folder of the run that it waits for; None: for one that ends after it was given."""
    idle: float | None = None
    """Seconds for which nothing may have happened; None: a run has ended, and a countdown."""
    countdown: float = COUNTDOWN
    look: float = LOOK
    root: str = "/"
    """Where the machine's files are."""

    @property
    def delay(self) -> float:
        """Seconds from the last sign of use to the stop."""
        return self.countdown if self.idle is None else max(self.idle, self.countdown)


@dataclass(frozen=True)
class Status:
    """What the watcher does."""

    phase: str
    """'waiting', 'counting', 'stopped', 'kept' or 'failed'."""
    why: str = ""
    """What it waits for, why it was kept, or what has failed."""
    left: float | None = None
    """Seconds until it stops the machine, if nothing happens until then."""
    vm: str = ""


def _place() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "tpunb" / "stop"


def folder() -> Path:
    """Where kernels and watcher of this user meet. Raises SetupError if it is not theirs alone."""
    path = _place()
    (path / "kernels").mkdir(parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise SetupError(f"{path} belongs to another user")
    path.chmod(0o700)
    return path


_watchers: list[subprocess.Popen[bytes]] = []
"""Children of this process, which has to take note of their end."""


def give(order: Order) -> None:
    """Have the machine stopped as the order says; it takes the place of an earlier one."""
    place = folder()
    (place / "state.json").unlink(missing_ok=True)
    rundir.write_json(place / "order.json", asdict(order))
    root = str(Path(__file__).resolve().parents[2])
    with open(place / "watcher.log", "ab") as log:
        watcher = subprocess.Popen(
            [sys.executable, "-c", _WATCHER, root, str(place)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,  # it outlives the kernel, and no interrupt key reaches it
        )
    _watchers[:] = [one for one in [*_watchers, watcher] if one.poll() is None]


def take_back() -> bool:
    """Stop nothing; whether there was an order."""
    try:
        (_place() / "order.json").unlink()
    except FileNotFoundError:
        return False
    return True


def given(place: Path | None = None) -> Order | None:
    """The order, if there is one."""
    try:
        values = json.loads(((place or _place()) / "order.json").read_text(encoding="utf-8"))
        vm, runs = TpuVm(**values.pop("vm")), tuple(values.pop("runs"))
        return Order(vm=vm, runs=runs, **values)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def status() -> Status | None:
    """What the watcher has said last; None if it has not begun yet."""
    try:
        return Status(**json.loads((_place() / "state.json").read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def alone(place: Path) -> Iterator[bool]:
    """Be the watcher; False if there is one that goes on.

    One that has just missed a new order ends at once, and this one takes its place.
    """
    deadline = time.monotonic() + HANDOVER
    with open(place / "watcher.lock", "a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(LOOK / 5)
                    continue
                yield False
                return
            yield True
            return


class Activity:
    """Says to the watcher whether a cell runs in this kernel, for as long as the kernel lives."""

    def __init__(self, name: str) -> None:
        """`name`: what to call this kernel."""
        self._name = name[: ROOM // 2]
        self._path = folder() / "kernels" / str(os.getpid())
        deadline = time.monotonic() + HANDOVER
        while not self._is_ours():
            # A watcher that looks just now takes it for what a kernel has left, and removes it.
            if time.monotonic() > deadline:
                raise SetupError(f"another process has {self._path}")
            time.sleep(0.01)

    def _is_ours(self) -> bool:
        self._file = open(self._path, "w", encoding="utf-8")  # noqa: SIM115 (as long as the kernel)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                return True
        self._file.close()
        return False

    def say(self, busy: bool) -> None:
        """A cell begins or has ended. In one write: who reads meanwhile must not find half."""
        text = json.dumps({"busy": busy, "name": self._name}).ljust(ROOM)
        os.pwrite(self._file.fileno(), text.encode(), 0)

    def close(self) -> None:
        """This kernel does not count any more."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def kernels(place: Path) -> dict[int, Mapping[str, Any]]:
    """What living kernels say, by pid; those that have ended are forgotten."""
    found: dict[int, Mapping[str, Any]] = {}
    for path in (place / "kernels").iterdir():
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                try:
                    found[int(path.name)] = json.loads(file.read())
                except ValueError:  # it has said nothing yet
                    found[int(path.name)] = {"busy": True, "name": "a new notebook"}
                continue
            path.unlink()
    return found
