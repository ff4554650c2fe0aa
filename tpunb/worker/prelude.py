"""Runs the prelude's cells in a runner, and leaves copies of the process for later runs.

    fork server ── runs nothing
      └─ runner of the first run     cell 1, copy, cell 2, copy, … then forks the ranks
           copy after cell 1         waits for orders, as the fork server does
           copy after cell 2         … the runner of a later run whose cells 1 and 2 are the same;
                                     before it begins, it leaves a copy for the run after that

What would make a later run differ from one that starts anew is looked for before a copy is left:
processes, connections and memory that a run shares with the process it was forked from.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from socket import socket
from typing import Any, NoReturn

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase
from tpunb.runs.protocol import (
    CellStarted,
    ForkRunner,
    MessageWriter,
    OrderChannel,
    PreludeKept,
    PreludeNotKept,
    RunnerForked,
)
from tpunb.runs.spec import RunSpec
from tpunb.utils import memory, processes
from tpunb.utils.files import PACKAGE_ROOT
from tpunb.worker import fork_safety, shared_with_forks, stdio
from tpunb.worker.cells import Cells
from tpunb.worker.fork_safety import ForkSafetyCheck
from tpunb.xla import spmd

EVERY_CELL = 8
"""So many cells get a copy each, whatever they take; a fork takes 10 ms."""
WORTH = 0.05
"""Seconds that cells took together for which a later copy is worth its fork."""
_PACKAGES = ("site-packages", "dist-packages")


class Prelude:
    """The cells above the train cell, in the process that runs them."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self.cells = Cells(run, spec)
        self.cells.become_main()
        self.ran = 0
        """How many of its cells have run in this process."""
        self._before = shared_with_forks.find_all()
        self._modules = frozenset(sys.modules)
        self._folders = frozenset(shared_with_forks.temporary_folders())
        self._not_kept = ""
        self.in_copy: Copy | None = None
        """What this process was before it became a runner; None: it began as one."""
        self._files: dict[str, list[int]] = {}

    def go_on_with(self, run: RunDir, spec: RunSpec) -> None:
        """Take up another run, whose first cells are those that have run in a copy."""
        assert self.in_copy is not None
        self.cells.assign(run, spec)
        self.cells.become_main()
        self.in_copy.restore()

    def execute(
        self, run: RunDir, spec: RunSpec, reports: MessageWriter, keeper: Keeper
    ) -> str | None:
        """Run the cells that have not run; what one of them did that forbids a fork, or None."""
        check = ForkSafetyCheck()
        blocks = self.cells.of("prelude")
        if self.in_copy is not None:
            if self.ran < len(blocks):  # else it is waited for at the end
                self.in_copy.await_successor()
                self._before = shared_with_forks.find_all()
            self.in_copy.give_back_signals()
        self.cells.execute_header()
        if self.ran:
            spmd.check_prelude(spec, blocks[self.ran - 1].number)
        for index, block in enumerate(blocks[self.ran :], self.ran):
            reports.send(CellStarted(block.number))
            run.emit(Phase.of_prelude(blocks, index))
            self.cells.execute_prelude(block)
            spmd.check_prelude(spec, block.number)
            if problem := check.problem():
                return f"cell [{block.number}] {problem}"
            self.ran += 1
            if not self._not_kept and (reason := shared_with_forks.describe_new(self._before)):
                self._not_kept = f"cell [{block.number}] {reason}"
                reports.send(PreludeNotKept(self._not_kept))
            if not self._not_kept:
                keeper.cell_ended(self, check, last=self.ran == len(blocks))
        check.close()
        keeper.close()
        return None

    def local_modules(self) -> dict[str, list[int]]:
        """The files of the modules that its cells have imported and that the user may edit.

        For each the time of its last change in nanoseconds, and its size.
        """
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name in self._modules or not isinstance(file, str) or not _is_local(file):
                continue
            if file not in self._files:  # what is there later may not be what was imported
                with contextlib.suppress(OSError):  # of a zip file, or deleted
                    status = os.stat(file)
                    self._files[file] = [status.st_mtime_ns, status.st_size]
        return dict(self._files)

    def temporary_folders(self) -> list[str]:
        """Those that its cells have made, and that a rank may remove at its end."""
        return sorted(set(shared_with_forks.temporary_folders()) - self._folders)


class Copy:
    """A process that has run the first cells, and waits until a run that begins with them comes.

    It then becomes that run's runner itself, and leaves one like it for the run after: of the two
    forks that a process needs to be nobody's child, the run waits for one.
    """

    def __init__(
        self,
        prelude: Prelude,
        reports: MessageWriter,
        supervisor: int,
        seconds: float,
        run_on: RunOn,
    ) -> None:
        """Before the fork: what that changes or shares, and each run must find as it was.

        `seconds`: how long the cells took that have run since the copy before.
        """
        self._prelude = prelude
        self._reports = reports
        self._supervisor = supervisor
        self._seconds = seconds
        self._run_on = run_on
        self._modules = prelude.local_modules()
        self._folders = prelude.temporary_folders()
        # A fork reseeds this generator, unlike numpy's and torch's.
        self._random = random.getstate()
        self._oom_score = memory.oom_score()
        self._offsets = shared_with_forks.file_offsets()
        self._between: int | None = None
        self._on_child: Any = None

    def restore(self) -> None:
        """As it was, when a runner goes on in this process."""
        random.setstate(self._random)
        memory.set_oom_score(self._oom_score)
        for fd, offset in self._offsets.items():
            os.lseek(fd, offset, os.SEEK_SET)

    def await_successor(self) -> None:
        """Wait until no process is left that was started to leave the next copy."""
        if self._between is not None:
            with contextlib.suppress(ChildProcessError):  # a thread waits for any child
                os.waitpid(self._between, 0)
            self._between = None

    def give_back_signals(self) -> None:
        """From now on ends of children are the cells' business."""
        if self._on_child is not None:  # else it is C code's, and Python cannot put it back
            signal.signal(signal.SIGCHLD, self._on_child)

    def fork(self, number: int, *, wait: bool = True) -> int:
        """As `fork_orphan`; the supervisor is told of the copy, which has this number.

        It is told before the process between the two ends, so before a run can end that has
        waited for that one: it knows that the copy is not to end with the run.
        """

        def tell(pid: int) -> None:
            ran, seconds = self._prelude.ran, round(self._seconds, 3)
            self._reports.send(PreludeKept(pid, number, ran, seconds, self._modules, self._folders))

        return processes.fork_orphan(fork_safety.fork, tell, wait=wait)

    def wait(self, orders: OrderChannel) -> NoReturn:
        """The life of a copy; it is the first process to go when memory runs out."""
        try:
            self._prelude.in_copy = self
            # A handler that the cells have set may wait for any child.
            self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            while True:
                processes.die_with_adopter(self._supervisor)
                os.setsid()
                memory.set_oom_score(memory.FIRST_TO_GO)
                stdio.discard_output()
                faulthandler.disable()  # it holds a file of the run's folder open
                received = orders.receive()
                if received is None:
                    break
                order, sockets = received
                assert isinstance(order, ForkRunner)
                number = order.first_copy
                if sockets and self._leave_successor(own := sockets.pop(0), number):
                    orders.close()
                    for each in sockets:
                        each.close()
                    orders = OrderChannel(own)
                    continue
                orders.close()
                self._reports.send(RunnerForked(os.getpid()))
                keeper = Keeper(self._reports, sockets, number + 1, self._supervisor, self._run_on)
                self._run_on(order, keeper, self._reports, self._prelude)
        finally:
            os._exit(0)

    def _leave_successor(self, end: socket, number: int) -> bool:
        """True in the process that waits from now on."""
        with contextlib.suppress(OSError):  # then the run after begins in an earlier copy
            self._between = self.fork(number, wait=False)
            if self._between == 0:
                self._between = None
                return True
        end.close()
        return False


class Keeper:
    """Leaves copies of a runner: after each of the first cells, then where it saves time."""

    def __init__(
        self,
        reports: MessageWriter,
        sockets: list[socket],
        first: int,
        supervisor: int,
        run_on: RunOn,
    ) -> None:
        """One socket for each copy that may be left; the first copy's number is `first`.

        `run_on` is what a copy does that becomes a runner.
        """
        self._reports = reports
        self._sockets = sockets
        self._number = first
        self._supervisor = supervisor
        self._run_on = run_on
        self._since = time.monotonic()

    def cell_ended(self, prelude: Prelude, check: ForkSafetyCheck, *, last: bool) -> None:
        """A cell has run; `last`: of the prelude."""
        seconds = time.monotonic() - self._since
        # One socket is spared for the last cell: from there the next run is most likely to begin.
        spare = len(self._sockets) > 1
        if last or (spare and (prelude.ran <= EVERY_CELL or seconds >= WORTH)):
            with contextlib.suppress(OSError):  # it costs time only
                self._leave_copy(prelude, check, seconds)
            self._since = time.monotonic()

    def _leave_copy(self, prelude: Prelude, check: ForkSafetyCheck, seconds: float) -> None:
        if not self._sockets:
            return
        copy = Copy(prelude, self._reports, self._supervisor, seconds, self._run_on)
        own, number = self._sockets.pop(0), self._number
        self._number += 1
        stdio.flush_output()
        # In a copy it stays blocked: no runner may miss one that comes early.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            if copy.fork(number) == 0:
                check.close()
                self.close()
                copy.wait(OrderChannel(own))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            own.close()

    def take_socket(self) -> OrderChannel:
        """The one that came for something else."""
        return OrderChannel(self._sockets.pop(0))

    def close(self) -> None:
        """No other copy is left."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()


RunOn = Callable[[ForkRunner, Keeper, MessageWriter, Prelude | None], NoReturn]
"""`runner.main`: the way from an order to the end of its run."""


def _is_local(file: str) -> bool:
    """Whether a module's file is neither of an installed package nor of Python."""
    parts = file.split(os.sep)
    standard = os.path.dirname(os.__file__)
    own = os.path.join(PACKAGE_ROOT, "tpunb") + os.sep
    return not (
        any(name in parts for name in _PACKAGES) or file.startswith((standard + os.sep, own))
    )
