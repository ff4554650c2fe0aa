"""Three ways to start the same ranks from a notebook: tpunb, accelerate, nbconvert."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import v4

from benchmarks.commands import JUPYTER, PYTHON, free_port
from benchmarks.kernel import Kernel
from tests.drivers.kernel import Ran
from tests.support import is_kept
from tpunb.utils import processes
from tpunb.utils.processes import Process

JOB = "job.json"
HERE = "here."
TICK = 0.01
"""Seconds between two polls of the processes."""
PATIENCE = 120.0
"""Seconds in which all ranks must have started."""
# Every rank reports that it has started, waits for the others, and does its job. The folder is an
# absolute path, because forks, scripts and runs may have different working directories.
RANK = """\
import json
import os
import time
from pathlib import Path

folder = Path({folder!r})


def job():
    return json.loads((folder / "job.json").read_text())


def work(rank):
    known = job()
    (folder / f"here.{{rank}}").touch()
    while not all((folder / f"here.{{each}}").exists() for each in range(known["ranks"])):
        time.sleep(0.01)
    do(rank, **known["given"])"""


@dataclass(frozen=True)
class Way:
    """A way to start ranks: the cells before, and the cell that starts them."""

    label: str
    before: tuple[str, ...]
    start: str


TPUNB = "%%tpu_train"
WAYS = {
    TPUNB: Way(
        TPUNB,
        ("%load_ext tpunb\n%tpu_setup",),
        '%%tpu_train --cores {ranks}\nwork(int(os.environ["RANK"]))',
    ),
    "accelerate": Way(
        "accelerate's notebook_launcher",
        ("from accelerate import notebook_launcher",),
        'notebook_launcher(lambda: work(int(os.environ["RANK"])), '
        'num_processes=job()["ranks"], use_port=job()["port"])',
    ),
    "nbconvert": Way(
        "nbconvert, then !python",
        (),
        # The ranks are in a second notebook, because a converted first one would start itself.
        f"!{JUPYTER} nbconvert --to python other.ipynb && {PYTHON} other.py",
    ),
}
# This launcher reports the first failing rank at once. torch_xla's own, which such a notebook would
# use on a TPU, is slower to report it: it waits for the ranks in their order.
START_PROCESSES = """\
from torch.multiprocessing import start_processes

start_processes(work, nprocs=job()["ranks"], start_method="fork")"""


@contextmanager
def notebook(folder: Path, name: str, do: str) -> Iterator[Bench]:
    """A kernel that is ready to start ranks in one way; `do` is the source of their job."""
    way = WAYS[name]
    code = [RANK.format(folder=str(folder)), do]
    _write(folder / "other.ipynb", [*code, START_PROCESSES])
    path = _write(folder / f"{name.strip('%')}.ipynb", [*way.before, *code, way.start])
    with Kernel(path) as kernel:
        for index in range(len(way.before) + len(code)):
            kernel.cell(index)
        if name == TPUNB:
            kernel.wait_until_warm()
        yield Bench(kernel, folder, len(way.before) + len(code))


@dataclass
class Bench:
    """A kernel that is ready to start ranks."""

    kernel: Kernel
    folder: Path
    start: int
    """Index of the cell that starts the ranks."""

    def begin(self, ranks: int, given: dict[str, object], words: list[str]) -> Started:
        """Send the cell, and return once all ranks have started."""
        for path in self.folder.glob(f"{HERE}*"):
            path.unlink()
        known = {"ranks": ranks, "given": given, "port": str(free_port())}
        (self.folder / JOB).write_text(json.dumps(known))
        self.kernel.do(f"ranks = {ranks}")
        before = set(self.kernel.processes())
        running = self.kernel.start(self.start, await_words=words)
        started = Started(self.kernel, running, before)
        here = [self.folder / f"{HERE}{rank}" for rank in range(ranks)]
        if not started.read_until(lambda: all(path.exists() for path in here), PATIENCE):
            raise AssertionError(f"the ranks did not start:\n{running.error}\n{running.printed()}")
        started.look()
        return started


class Started:
    """A running cell and the processes of its ranks: all new ones below the kernel."""

    def __init__(self, kernel: Kernel, running: Ran, before: set[Process]) -> None:
        self.kernel = kernel
        self.running = running
        self._before = before
        self._new: set[Process] = set()
        self.gone: float | None = None
        """When the last of the processes ended."""

    def look(self) -> None:
        """Remember the processes that exist now."""
        self._new |= set(self.kernel.processes()) - self._before

    def read_until(self, true: Callable[[], object], seconds: float) -> bool:
        """Read the cell's output until `true()` holds; False if it does not in this time."""
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                return False
            self.kernel.read(self.running, TICK)
        return True

    def read_to_the_end(self, seconds: float) -> bool:
        """Read until the cell and all its processes have ended; False if they have not in time."""
        return self.read_until(lambda: self._is_gone() and self.running.idle is not None, seconds)

    def _is_gone(self) -> bool:
        if self.gone is None and not self.left():
            self.gone = time.monotonic()
        return self.gone is not None

    def left(self) -> list[Process]:
        """The processes that are still running, except those that wait for the next run."""
        return [p for p in self._new if processes.is_alive(p) and not _waits(p)]

    def end(self) -> None:
        """Kill the remaining processes by pid; if the cell does not end then, kill its kernel."""
        self.look()
        for process in self.left():
            processes.signal_and_continue(process, signal.SIGKILL)
        if not self.read_until(lambda: self.running.idle is not None, 5.0):
            self.kernel.kill()


def _waits(process: Process) -> bool:
    """Whether it is a kept prelude, or the copy that the fork server has left in its place."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return is_kept(process) or "fork ser" in Path(f"/proc/{process.pid}/comm").read_text()
    return False


def _write(path: Path, sources: list[str]) -> Path:
    cells = [v4.new_code_cell(source) for source in sources]
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path
