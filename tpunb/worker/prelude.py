"""Runs the prelude's cells in a runner, and leaves copies of the process for later runs.

    fork server             has imported the libraries and run no cell; on an order, it leaves a
      │                     copy, the fork server of the run after, and becomes the runner:
      ├─ cell 1, copy       cell 1, copy, cell 2, copy, … then forks the ranks
      ╰─ cell 2, copy       becomes, in the same way, the runner of a later run with the same cells
                            1 and 2

No copy is left after the prelude has made something that would let runs influence each other:
processes, connections and memory that a process shares with its forks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from socket import socket
from typing import Any, NoReturn

from tpunb.backends.xla import spmd
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase
from tpunb.runs.protocol import (
    CellStarted,
    ForkRunner,
    Message,
    MessageWriter,
    OrderChannel,
    PreludeKept,
    PreludeNotKept,
    RunnerForked,
)
from tpunb.runs.spec import Block, RunSpec
from tpunb.utils import memory, processes
from tpunb.utils.modules import is_local_file
from tpunb.worker import fork_safety, script_end, shared_with_forks, stdio
from tpunb.worker.cells import Cells
from tpunb.worker.fork_safety import ForkSafetyCheck

EVERY_CELL = 8
"""The first cells that get a copy each, however short they are; a fork takes 10 ms."""
WORTH = 0.05
"""Seconds that later cells must have taken since the last copy to be worth another fork."""
PART = 0.25
"""Where copies for all cells would be too many: the part of the seconds so far that cells between
two copies take, and an edited cell costs again."""
LAST_CELLS = 3
"""Copies that are kept for the last cells, which are edited most: the one above, it, and the
values of a train cell below."""


class Prelude:
    """The prelude of a run, in the process that runs its cells."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self.cells = Cells(run, spec)
        self.cells.become_main()
        self.ran = 0
        """How many cells have run in this process."""
        self._before = shared_with_forks.find_all()
        self._modules = frozenset(sys.modules)
        self._folders = frozenset(shared_with_forks.temporary_folders())
        self._not_kept = ""
        self._files: dict[str, list[int]] = {}

    def switch_to_run(self, run: RunDir, spec: RunSpec) -> None:
        """Switch to another run, whose first cells are those that have run in this process."""
        self.cells.assign(run, spec)
        self.cells.become_main()

    def execute(self, run: RunDir, spec: RunSpec, copier: PreludeCopier, copy: Copy) -> str | None:
        """Run the cells that have not run yet; return why the ranks cannot be forked, or None.

        `copy` is what this process was before it became a runner, `copier` leaves others.
        """
        check = ForkSafetyCheck()
        blocks = self.cells.of("prelude")
        if self.ran < len(blocks):  # otherwise `runner.main` waits for it at the end
            copy.await_successor()
            self._before = shared_with_forks.find_all()
        copy.give_back_signals()
        self.cells.execute_header()
        if self.ran:
            spmd.check_prelude(spec, blocks[self.ran - 1].number)
        for index, block in enumerate(blocks[self.ran :], self.ran):
            copy.reports.send(CellStarted(block.number))
            run.emit(Phase.of_prelude(blocks, index))
            self.cells.execute_prelude(block)
            spmd.check_prelude(spec, block.number)
            if problem := check.problem():
                return f"cell [{block.number}] {problem}"
            self.ran += 1
            if not self._not_kept and (reason := shared_with_forks.describe_new(self._before)):
                self._not_kept = f"cell [{block.number}] {reason}"
                copy.reports.send(PreludeNotKept(self._not_kept))
            if not self._not_kept:
                copier.cell_ended(self, check, blocks[index:])
        check.close()
        copier.close()
        return None

    def local_modules(self) -> dict[str, list[int]]:
        """Files of modules that the cells have imported and that the user may edit.

        Each with the time of its last change in nanoseconds, and its size.
        """
        for name, module in list(sys.modules.items()):
            loader = getattr(module, "__loader__", None)
            file = getattr(loader, "archive", None) or getattr(module, "__file__", None)
            if name in self._modules or not isinstance(file, str) or not is_local_file(file):
                continue
            if file not in self._files:  # a later version is not the one that was imported
                with contextlib.suppress(OSError):  # deleted
                    status = os.stat(file)
                    self._files[file] = [status.st_mtime_ns, status.st_size]
        return dict(self._files)

    def temporary_folders(self) -> list[str]:
        """Temporary folders that the cells have made, and that a rank may remove at its end."""
        return sorted(set(shared_with_forks.temporary_folders()) - self._folders)


class Copy:
    """A process that has run the first cells, or none, and waits for a run that begins with them.

    It then becomes the runner of that run itself, and leaves a copy for the run after. A process
    needs two forks to be an orphan; the run waits for only one of them.
    """

    def __init__(
        self,
        prelude: Prelude | None,
        reports: MessageWriter,
        supervisor: int,
        run_on: RunOn,
        *,
        seconds: float = 0.0,
        lifeline: int | None = None,
    ) -> None:
        """Record, before the fork, the state that a fork changes or shares, for `restore`.

        `prelude`: None in the fork server, in which no cell has run; `lifeline`, which only the
        fork server has, is closed when the kernel has ended. `seconds`: how long the cells took
        that have run since the previous copy.
        """
        self.prelude = prelude
        self.reports = reports
        self.supervisor = supervisor
        self.run_on = run_on
        self._seconds = seconds
        self._lifeline = lifeline
        self._modules = {} if prelude is None else prelude.local_modules()
        self._folders = [] if prelude is None else prelude.temporary_folders()
        # A fork reseeds this generator, unlike numpy's and torch's.
        self._random = random.getstate()
        self._oom_score = memory.oom_score()
        self._offsets = shared_with_forks.file_offsets()
        self._between: int | None = None
        self._on_child: Any = None

    def restore(self) -> None:
        """Restore the recorded state, when this process becomes a runner."""
        random.setstate(self._random)
        memory.set_oom_score(self._oom_score)
        for fd, offset in self._offsets.items():
            os.lseek(fd, offset, os.SEEK_SET)

    def await_successor(self) -> None:
        """Wait for the end of the intermediate process that was forked to leave the next copy.

        If a fork handler of a library hangs in it, it is killed, and the run has no copy.
        """
        if self._between is not None:
            with contextlib.suppress(ChildProcessError):  # a thread waits for any child
                processes.wait_for_child(self._between, fork_safety.CHILD_WAIT)
            self._between = None

    def give_back_signals(self) -> None:
        """Restore the cells' handler for SIGCHLD."""
        if self._on_child is not None:  # otherwise it is C code, which Python cannot restore
            signal.signal(signal.SIGCHLD, self._on_child)

    def fork(self, number: int, *, wait: bool = True) -> int:
        """Fork an orphan, as `fork_orphan` does, and report it to the supervisor as this copy.

        The report is sent before the intermediate process ends, so before a run that waits for that
        process can end: the supervisor knows in time that the copy must not end with the run.
        """

        def tell(pid: int) -> None:
            ran = 0 if self.prelude is None else self.prelude.ran
            seconds = round(self._seconds, 3)
            self.reports.send(PreludeKept(pid, number, ran, seconds, self._modules, self._folders))

        return processes.fork_orphan(fork_safety.fork, tell, wait=wait)

    def wait(self, orders: OrderChannel) -> NoReturn:
        """Wait for an order, and become the runner. If memory runs out, copies are killed first."""
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            # A handler of the cells may wait for any child.
            self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            while True:
                self._settle()
                received = self._receive(orders)
                if received is None:
                    break
                order, sockets = received
                assert isinstance(order, ForkRunner)
                # A signal that arrives before the runner can record it waits until then; an
                # earlier one was not for this run.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
                signal.sigtimedwait({signal.SIGINT}, 0)
                number = order.first_copy
                if sockets and self._leave_successor(own := sockets.pop(0), number):
                    orders.close()
                    for each in sockets:
                        each.close()
                    orders = OrderChannel(own)
                    continue
                orders.close()
                if self._lifeline is not None:
                    os.close(self._lifeline)
                self.reports.send(RunnerForked(os.getpid()))
                self.run_on(order, PreludeCopier(self, sockets, number + 1), self)
        finally:
            os._exit(0)

    def _settle(self) -> None:
        """Prepare this process, which may just have been forked, for a long wait."""
        processes.die_with_adopter(self.supervisor)
        if os.getsid(0) != os.getpid():
            os.setsid()
        if self.prelude is None:
            script_end.stop_on_sigterm()  # it has no run to stop: nothing happens
        else:
            memory.set_oom_score(memory.FIRST_TO_GO)
            stdio.discard_output()
            faulthandler.disable()  # it holds a file of the run's folder open
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _receive(self, orders: OrderChannel) -> tuple[Message, list[socket]] | None:
        """Wait for an order. When the kernel has ended, continue a stopped supervisor (SIGSTOP)."""
        if self._lifeline is not None:
            poll = select.poll()
            poll.register(orders.fileno(), select.POLLIN)
            poll.register(self._lifeline, 0)  # only its end
            while not orders.waiting and [fd for fd, _ in poll.poll()] == [self._lifeline]:
                os.kill(self.supervisor, signal.SIGCONT)
                poll.unregister(self._lifeline)
        return orders.receive()

    def _leave_successor(self, end: socket, number: int) -> bool:
        """Fork a successor; True in the successor, which waits from now on."""
        with contextlib.suppress(OSError):  # if it fails, the next run begins in an earlier copy
            self._between = self.fork(number, wait=False)
            if self._between == 0:
                self._between = None
                return True
        end.close()
        return False


class PreludeCopier:
    """Leaves copies of a runner: after each of the first cells, later only if it saves time."""

    def __init__(self, runner: Copy, sockets: list[socket], first: int) -> None:
        """`runner`: what this process was until now.

        `sockets` has one socket for each copy that may be left; `first` is the first's number.
        """
        self._runner = runner
        self._sockets = sockets
        self._number = first
        self._began = self._since = time.monotonic()

    def cell_ended(self, prelude: Prelude, check: ForkSafetyCheck, blocks: Sequence[Block]) -> None:
        """Leave a copy after a cell, the first of `blocks`, if it is worth it."""
        now = time.monotonic()
        seconds = now - self._since
        if self._is_worth(prelude.ran, seconds, now - self._began, blocks):
            with contextlib.suppress(OSError):  # without a copy, the next run only takes longer
                self._leave_copy(prelude, check, seconds)
            self._since = time.monotonic()

    def _is_worth(self, ran: int, seconds: float, elapsed: float, blocks: Sequence[Block]) -> bool:
        cell, *below = blocks
        left = sum(not block.values for block in below)
        if cell.values or left <= 1:
            return not (cell.values and below)
        enough = len(self._sockets) > len(below)
        if not enough and len(self._sockets) <= LAST_CELLS:
            return False
        least = WORTH if enough else max(WORTH, PART * elapsed)
        return ran <= EVERY_CELL or seconds >= least

    def _leave_copy(self, prelude: Prelude, check: ForkSafetyCheck, seconds: float) -> None:
        if not self._sockets:
            return
        now = self._runner
        copy = Copy(prelude, now.reports, now.supervisor, now.run_on, seconds=seconds)
        own, number = self._sockets.pop(0), self._number
        self._number += 1
        stdio.flush_output()
        # It stays blocked in a copy.
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
        """Take the socket that came for the decisions of all hosts, not for a copy."""
        return OrderChannel(self._sockets.pop(0))

    def close(self) -> None:
        """Close the remaining sockets: no further copy is left."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()


RunOn = Callable[[ForkRunner, PreludeCopier, Copy], NoReturn]
"""`runner.main`, which carries out an order to the end of its run."""
