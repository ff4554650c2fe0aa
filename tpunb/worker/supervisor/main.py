"""The supervisor: starts, watches and ends every process of a run, and outlives none of them.

Standard library only, and none of the user's code. Its standard input is the kernel's lifeline:
the kernel's messages (tpunb.runs.protocol) arrive on it, and when it closes, the supervisor ends
everything below it and then itself. With a detached run it continues until that run has ended.
Requests of other processes arrive through the run folder (tpunb.runs.state).

    Supervisor       the fork server, kept preludes; one run at a time, the others queued
      QueuedRun      a run from the order to its turn, and its place in the queue for a device
      Supervision    a run from its turn to the written result
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from socket import socketpair
from typing import IO

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Event, Note, Phase
from tpunb.runs.protocol import (
    Alive,
    Broken,
    ForkRunner,
    ImportLibraries,
    ImportsFailed,
    Leaving,
    LibrariesImported,
    Message,
    MessageReader,
    OrderChannel,
    Outbox,
    Preload,
    PreludeKept,
    PreludeNotKept,
    Ready,
    RunFinished,
    RunnerForked,
    ShutDown,
    StartNode,
    StartRun,
    StopRun,
    decode_message,
)
from tpunb.runs.spec import PhaseKind, Stop, StopCause
from tpunb.runs.state import read_stops
from tpunb.utils import processes
from tpunb.utils.descriptors import wait_readable
from tpunb.utils.files import PACKAGE_ROOT, LineTail
from tpunb.utils.processes import Process
from tpunb.utils.text import duration
from tpunb.worker.supervisor import outcome
from tpunb.worker.supervisor.arm import FAREWELL, Arm
from tpunb.worker.supervisor.changes import Changes
from tpunb.worker.supervisor.device_lock import DeviceLock, RunDescription
from tpunb.worker.supervisor.import_files import ImportFiles
from tpunb.worker.supervisor.kept_preludes import KeptPreludes, Waiting
from tpunb.worker.supervisor.nodes import LocalNode
from tpunb.worker.supervisor.outcome import RunObservation
from tpunb.worker.supervisor.remote_node import Hosts
from tpunb.worker.supervisor.supervision import Supervision

log = logging.getLogger(__name__)

TICK = 0.02
"""Seconds between two steps of the current run: merging logs, checking waits."""
LIVELY = 1.0
"""Seconds without a message or a change in the run's folder after which steps are fewer."""
REST = 0.25
"""Seconds between two steps then, unless something happens."""
MEMORY_CHECK = 1.0
"""Seconds between two checks whether memory is scarce, during a run."""
DEVICE_CHECK = 0.2
"""Seconds between two checks whether a device is free."""
BUSY_NOTE = 5.0
"""Seconds for which another process keeps the queue for a device locked before it is reported."""
BUSY = RunDescription("", "", 0.0)
"""Stands for the run that has the device while the queue cannot be read."""

FORK_SERVER = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "from tpunb.worker import fork_server; fork_server.main()"
)


class QueuedRun:
    """A run that was ordered, or this host's part of one: it waits for its turn."""

    def __init__(self, order: StartRun | StartNode) -> None:
        self.order = order
        self.dir = RunDir(order.dir)
        self.env = order.env
        self.detached = isinstance(order, StartRun) and order.detached
        self.ahead = isinstance(order, StartRun) and order.ahead
        self.is_on_hosts = isinstance(order, StartNode) or order.pod is not None
        self.spec = self.dir.read_spec()
        self._ordered = time.time()
        self._requests = LineTail(self.dir.requests)
        self._lock: IO[str] | None = None
        self._phase = ""
        self._checked = -DEVICE_CHECK
        self._holder: RunDescription | None = None
        self._busy_since = float("inf")
        self._device_lock = self._queue_for(order.device)

    def emit(self, event: Event) -> None:
        """Write an event to the run folder. A full disk or a deleted folder stops no run."""
        with contextlib.suppress(OSError):
            self.dir.emit(event)

    def _queue_for(self, device: str | None) -> DeviceLock | None:
        if device is None:
            return None
        try:
            return DeviceLock(device, self.description)
        except OSError as error:
            self._note_no_queue(error)
            return None

    def _note_no_queue(self, error: OSError) -> None:
        self.emit(Note(f"runs cannot wait for each other on this machine: {error}"))

    @property
    def description(self) -> RunDescription:
        """The description of this run that is shown by the runs waiting for it."""
        cores = f"{self.spec.spmd or self.spec.world_size} {self.spec.device} cores"
        return RunDescription(self.dir.id, cores, self._ordered)

    def device_holder(self) -> RunDescription | None:
        """The run that has the device; None if it is this run's turn.

        BUSY if another process, perhaps a stopped one, keeps the queue for the device locked.
        """
        now = time.monotonic()
        if self._device_lock is not None and now - self._checked >= DEVICE_CHECK:
            self._checked = now
            try:
                self._holder = self._device_lock.holder()
                self._busy_since = float("inf")
            except BlockingIOError:
                self._holder = BUSY
                self._busy_since = min(self._busy_since, now)
            except OSError as error:
                self._note_no_queue(error)
                self._device_lock.release()
                self._device_lock = self._holder = None
        return self._holder

    def wait_for(self, other: RunDescription) -> None:
        """Report which run this one waits for, and hold the lock of a living run."""
        if self._lock is None:
            self._lock = self.dir.take_lock()
        since = time.strftime("%H:%M", time.localtime(other.since))
        text = f"waits for run {other.run} ({other.cores}, since {since})"
        if other is BUSY:
            if self._device_lock is None or time.monotonic() - self._busy_since < BUSY_NOTE:
                return
            text = (
                f"waits for a process that keeps {self._device_lock.path} locked: end it, or "
                "continue it if it is stopped"
            )
        if text != self._phase:
            self._phase = text
            log.info("%s %s", self.dir.id, text)
            self.emit(Phase(PhaseKind.QUEUED, text))

    def begin(self) -> None:
        """It is this run's turn: release its lock, which the Supervision takes."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            self.emit(Phase(PhaseKind.STARTING, "starting"))

    def stop_requests(self) -> Iterator[Stop]:
        """The stops that other processes have requested since the last call."""
        return read_stops(self._requests)

    def cancel(self, stop: Stop) -> None:
        """Write the result of a run that was stopped before its turn."""
        now = time.time()
        observation = RunObservation(
            started=self._ordered,
            ended=now,
            exits=[],
            stop=stop,
            stopped=now,
            attempt=0,
            replicate=self.spec.replicate,
            cell=None,
        )
        result = outcome.build_result(self.dir, self.spec, observation)
        with contextlib.suppress(OSError):
            self.dir.write_result(result)
        self.emit(Phase(PhaseKind.ENDED, result.state))
        self.emit(Ended(result.state))
        self.close()

    def close(self) -> None:
        """Close files, and give the device to the next run."""
        self._requests.close()
        if self._lock is not None:
            self._lock.close()
        if self._device_lock is not None:
            self._device_lock.release()


class Supervisor:
    """One fork server, and one run at a time; the others wait.

    On a host of a pod, what is called the kernel here is the run's supervisor (`Arm`).
    """

    def __init__(self) -> None:
        self.kernel = MessageReader(0)
        self._outbox = Outbox(1)
        reports, self._reporter = os.pipe()
        os.set_blocking(reports, False)
        self.reports = MessageReader(reports)
        """From the fork server and the processes that were made from it."""
        self._importing: Waiting | None = None
        """The first fork server, until it has imported the libraries."""
        self._imports_failed: ImportsFailed | None = None
        self.kept = KeptPreludes()
        self._becoming: Waiting | None = None
        """The process that has been ordered to become the runner."""
        self._idle_since = time.monotonic()
        self._memory_checked = 0.0
        self.run: Supervision | Arm | None = None
        self.node: LocalNode | None = None
        """This machine's part of the run; None if it is on other hosts only."""
        self.hosts: Hosts | None = None
        """The hosts of the run; None if it is on this machine."""
        self.current: QueuedRun | None = None
        """The order that `run` carries out."""
        self._changes: Changes | None = None
        """Of the current run's folder."""
        self._lively_until = 0.0
        self.queue: list[QueuedRun] = []
        self.leaving = ""
        """Why the supervisor is going to end; empty while it stays."""
        self._preload: Preload | None = None
        self._log = SupervisorLog()
        self._umask = os.umask(0o077)  # only this user may read what the supervisor writes
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._fork_server_output = tempfile.TemporaryFile()  # noqa: SIM115 (as long as this)
        # For temporary files of its imports (torch makes a folder for code that it may generate):
        # they are removed at a normal exit, which a fork server never has.
        self._import_files = ImportFiles()

    def main_loop(self, orders: Sequence[Message] = ()) -> None:
        """Run until the lifeline closes, and then until nothing is left. `orders`: the first."""
        processes.adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGCHLD, self._on_signal)  # a runner's end is noticed at once
        # If a terminal is closed, the lifeline decides. A handler, unlike SIG_IGN, is not
        # inherited by the fork server.
        signal.signal(signal.SIGHUP, _ignore)
        try:
            for order in orders:
                self._on_order(order)
            while not (self.leaving and self.run is None):
                self._wait()
                self._read_requests()
                if self.run is not None and self.run.step():
                    self._finish_run()
                self._look_after_ends()
                self._start_next()
                self._look_after_kept()
            log.info("leaving: %s", self.leaving)
            self._outbox.drain(FAREWELL)
        except BaseException:
            log.exception("the supervisor has failed")
            raise
        finally:
            self._kill_all()

    def _on_signal(self, number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):  # then it is awake already
            os.write(self._waker, bytes([number]))

    def _leave(self, reason: str) -> None:
        self._note_leaving(reason)
        for queued in self._runs():
            self._stop(queued, Stop(StopCause.KERNEL_GONE, reason))

    def _note_leaving(self, reason: str) -> None:
        """Take no more runs from now on, and tell the kernel so at once."""
        if not self.leaving:
            self.leaving = reason
            self._send(Leaving(reason))

    def _runs(self) -> list[QueuedRun]:
        return [*([] if self.current is None else [self.current]), *self.queue]

    def _wait(self) -> None:
        self._outbox.flush()
        sources = [self._wake, self.reports.fd]
        sources += [] if self.hosts is None else self.hosts.descriptors
        sources += [] if self.kernel.closed else [self.kernel.fd]
        patience = self._tick() if self._busy else self._patience()
        if patience == REST and self._changes is not None:
            sources.append(self._changes.fd)
        readable = wait_readable(sources, patience, writable=self._outbox.descriptor)
        if readable:
            self._lively_until = time.monotonic() + LIVELY
        if self._wake in readable and signal.SIGTERM in os.read(self._wake, 1 << 16):
            self._leave("the supervisor was terminated (SIGTERM)")
        if self.reports.fd in readable:
            self._read_reports()
        if self.kernel.fd in readable:
            for message in self.kernel.read():
                self._on_order(message)
            if self.kernel.closed and not any(queued.detached for queued in self._runs()):
                self._leave("the kernel has ended")

    @property
    def _busy(self) -> bool:
        return self.run is not None or bool(self.queue)

    def _tick(self) -> float:
        """Seconds until the current run's next step."""
        changes = self._changes
        if changes is None or self.queue or time.monotonic() < self._lively_until:
            return TICK
        if not isinstance(self.run, Supervision) or not self.run.waits:
            return TICK
        if changes.read():
            self._lively_until = time.monotonic() + LIVELY
            return TICK
        return REST if changes.told else TICK

    def _patience(self) -> float | None:
        """Seconds until something is due without a message; None if nothing is."""
        if self._preload is None or self._importing is not None:
            return None
        due = self._preload.idle / (2 if self.kept.processes else 1)
        return max(self._idle_since + due - time.monotonic(), 0.0)

    def _look_after_kept(self) -> None:
        """End kept preludes if memory is scarce or no run needed them for long."""
        now = time.monotonic()
        if self._busy or self._importing is not None:
            self._idle_since = now
        if now - self._memory_checked > MEMORY_CHECK:
            self._memory_checked = now
            self.kept.spare_memory()
            # A stopped one (SIGSTOP) would never become the runner.
            if self._busy and (due := self._importing or self._becoming):
                processes.send_signal(due.process, signal.SIGCONT)
        if self._preload is not None and not self._busy:
            idle, limit = now - self._idle_since, self._preload.idle
            if idle >= limit / 2:
                self.kept.end_all(f"nothing ran for {duration(limit / 2)}")
            if idle >= limit:
                self._note_leaving("nothing ran for long")

    def _look_after_ends(self) -> None:
        """Notice the end of the fork server, and of a process that is to become the runner."""
        waiting = self.kept.fork_server
        if waiting is not None and not processes.is_alive(waiting.process):
            log.warning("the fork server has ended; the next run gets another one")
            waiting.channel.close()
            self.kept.fork_server = None
        due = self._importing or self._becoming
        if due is None or processes.is_alive(due.process):
            return
        self._read_reports()  # its last messages
        if due is self._becoming and due.ran:
            log.warning("a kept prelude has ended before it became the runner")
            self._becoming = None
            if self.run is not None:
                self.run.begin()
        elif due is self._importing or due is self._becoming:
            self._importing = self._becoming = None
            self._on_fork_server_end(due.process)

    def _send(self, message: Message) -> None:
        log.info("to the kernel: %s", message)
        self._outbox.send(message)

    def _on_order(self, message: Message) -> None:
        match message:
            case Preload():
                log.info("preload, with %d processors", len(message.processors))
                self._preload = message
                # Ranks share all of these processors, not those of a pinned kernel thread.
                os.sched_setaffinity(0, message.processors)
                self._start_fork_server()
            case StartRun() | StartNode():
                try:
                    queued = QueuedRun(message)
                except (OSError, ValueError) as error:  # the folder was deleted a moment ago
                    log.error("%s cannot be read: %s", message.dir, error)
                    self._send(RunFinished(message.dir))
                    return
                self._log.open_run(queued.dir.path)
                log.info("run %s ordered (detached: %s)", queued.dir.id, queued.detached)
                if queued.ahead and not all(other.ahead for other in self._runs()):
                    self._remove(queued)
                    return
                self._end_those_ahead(queued)
                self.queue.append(queued)
                if self.leaving:
                    self._leave(self.leaving)
            case StopRun(folder, stop):
                for queued in self._runs():
                    if str(queued.dir.path) == folder:
                        self._stop(queued, stop)
            case _ if isinstance(self.run, Arm):
                self.run.on_order(message)
            case Alive():  # while this host's part waits for its turn
                self._outbox.send(message)
            case ShutDown():  # before it was this run's turn on its device
                for queued in self._runs():
                    self._stop(queued, Stop())
            case _:
                log.warning("not for a supervisor: %s", message)

    def _end_those_ahead(self, order: QueuedRun) -> None:
        """End preludes that run ahead, to make way for an order; the cells that have run are kept.

        The current one is not ended for another prelude that runs ahead, which has more cells: that
        one begins where this one ends.
        """
        for queued in self._runs():
            if queued.ahead and not (order.ahead and queued is self.current):
                self._stop(queued, Stop(reason="another run was ordered", now=True))

    def _remove(self, queued: QueuedRun) -> None:
        queued.close()
        self._log.close_run(queued.dir.path)
        shutil.rmtree(queued.dir.path, ignore_errors=True)

    def _read_requests(self) -> None:
        for queued in self._runs():
            for stop in queued.stop_requests():
                self._stop(queued, stop)

    def _stop(self, queued: QueuedRun, stop: Stop) -> None:
        log.info("%s: %s", queued.dir.id, stop)
        if queued is self.current and self.run is not None:
            self.run.stop(stop)
        elif queued in self.queue:
            self.queue.remove(queued)
            queued.cancel(stop)
            self._on_run_end(queued)

    def _start_next(self) -> None:
        """Begin the run whose turn it is, if any; the others report which run they wait for."""
        before = self.current
        for queued in list(self.queue):
            holder = queued.device_holder() if before is None else before.description
            if holder is not None:
                queued.wait_for(holder)
            else:
                self.queue.remove(queued)
                self._begin(queued)
            before = queued

    def _begin(self, queued: QueuedRun) -> None:
        log.info("begin %s", queued.dir.id)
        queued.begin()
        self.current, self._changes = queued, Changes(queued.dir.path)
        try:
            self._make_run(queued)
        except (OSError, ValueError) as error:
            log.error("%s cannot be read: %s", queued.dir.id, error)
            if self.node is not None:
                self.node.close()
            self._finish_run()
            return
        if self.kept.fork_server and self.node is not None and self.run is not None:
            self.run.begin()

    def _make_run(self, queued: QueuedRun) -> None:
        order, spec = queued.order, queued.spec
        if isinstance(order, StartRun) and order.pod is not None:
            self.hosts = Hosts(queued.dir, spec, order.pod)
            address = order.pod.nodes[0].start.address
            nodes = self.hosts.nodes
            self.run = Supervision(queued.dir, spec, nodes, hosts=self.hosts, address=address)
            return
        self._start_fork_server()
        number = order.node_rank if isinstance(order, StartNode) else 0
        self.node = LocalNode(
            number,
            spec.ranks_on(number) if isinstance(order, StartNode) else range(spec.world_size),
            queued.dir,
            self._fork_runner,
            self._waiting_processes,
            self.kept.awaits_successor,
            device=spec.device,
            env=queued.env,
        )
        if isinstance(order, StartNode):
            self.run = Arm(queued.dir, order, self.node, self._outbox)
        else:
            # Of a prelude that ran ahead, the next visible run reports it.
            kept = str if queued.ahead else self.kept.describe
            self.run = Supervision(queued.dir, spec, [self.node], kept)

    def _waiting_processes(self) -> list[Process]:
        """The processes that become runners: the fork server and kept preludes."""
        server = self._importing or self.kept.fork_server
        return [*([] if server is None else [server.process]), *self.kept.processes]

    def _fork_runner(self, replicate: str | None) -> None:
        """Have a process become the current run's runner: the one with most of its cells."""
        queued, run = self.current, self.run
        assert queued is not None and run is not None and self.node is not None
        if self.kept.fork_server is None:  # it was killed a moment ago: begin when there is another
            self._start_fork_server()
            return
        folder, env, start, cells = queued.dir, queued.env, queued.order, 0
        order = ForkRunner(str(folder.path), env, replicate, self.kept.next_copy, queued.ahead)
        if replicate is None and not isinstance(start, StartNode):
            taken, run.spec = self.kept.begin(folder, run.spec, env, queued.emit)
            cells = sum(block.role == "prelude" for block in run.spec.blocks)
        else:
            taken = self.kept.take_fork_server()
        assert taken is not None
        sockets = self.kept.make_sockets(taken, cells - taken.ran)
        if isinstance(start, StartNode):
            ours, theirs = socketpair()
            self.node.take_decisions(OrderChannel(ours))
            sockets.append(theirs)
            rank, address, port = start.node_rank, start.address, start.port
            order = replace(order, node_rank=rank, address=address, port=port)
        log.info("the runner: %s, after %d cells", taken.process, taken.ran)
        self._becoming = taken
        with contextlib.suppress(OSError):  # the main loop notices a dead process
            taken.channel.send(order, sockets)
        for each in sockets:
            each.close()
        taken.channel.close()

    def _read_reports(self) -> None:
        while messages := self.reports.read():
            for message in messages:
                self._on_report(message)

    def _on_report(self, message: Message) -> None:
        """Handle a message of the fork server or of a runner."""
        log.info("%s", message)
        if isinstance(message, ImportsFailed):
            self._imports_failed = message
        elif isinstance(message, LibrariesImported):
            self.kept.set_by_imports = message.variables
            self.kept.fork_server, self._importing = self._importing, None
            self._idle_since = time.monotonic()
            self._send(Ready())
            if self.node is not None and self.run is not None:
                self.run.begin()
        elif isinstance(message, PreludeKept):
            self.kept.add(message)
        elif self.node is not None:
            if isinstance(message, RunnerForked):
                self._becoming = None
            elif isinstance(message, PreludeNotKept):
                self.kept.note_not_kept(message.reason)
            self.node.on_message(message)

    def _start_fork_server(self) -> None:
        """Start a fork server, if there is none."""
        if self.kept.fork_server or self._importing:
            return
        assert self._preload is not None
        self._imports_failed = None
        ours, theirs = socketpair()
        orders = OrderChannel(ours)
        lifeline = os.dup(0)
        numbers = map(str, (os.getpid(), self._reporter, lifeline))
        started = subprocess.Popen(
            [sys.executable, "-c", FORK_SERVER, PACKAGE_ROOT, *numbers],
            stdin=theirs.fileno(),
            stdout=self._fork_server_output,
            stderr=self._fork_server_output,
            pass_fds=[self._reporter, lifeline],
            start_new_session=True,
            cwd="/",
            env=self._preload.env,
            umask=self._umask,
        )
        log.info("fork server started: pid %d", started.pid)
        process = processes.find_process(started.pid) or Process(started.pid, 0)  # it has ended
        started.returncode = 0  # it is to become a runner, whose exit code others wait for
        os.close(lifeline)
        theirs.close()
        self._importing = Waiting(process, orders, 0)
        with contextlib.suppress(OSError):  # the main loop notices a dead process
            orders.send(ImportLibraries(self._preload.sys_path, self._import_files.name))

    def _finish_run(self) -> None:
        queued, self.run, self.current = self.current, None, None
        self.node = self.hosts = None
        assert queued is not None
        self.kept.close_sockets()
        queued.close()
        if self._changes is not None:
            self._changes.close()
            self._changes = None
        self._on_run_end(queued)

    def _on_run_end(self, queued: QueuedRun) -> None:
        if queued.ahead:
            self._remove(queued)
            return
        self._send(RunFinished(str(queued.dir.path)))
        self._log.close_run(queued.dir.path)
        if queued.detached or queued.is_on_hosts:
            self.leaving = self.leaving or "its only run has ended"

    def _on_fork_server_end(self, process: Process) -> None:
        """The fork server has ended before it was ready, or before it became the runner."""
        code = processes.exit_code(process.pid)
        code = -signal.SIGKILL if code is None else code
        log.warning("the fork server has ended: exit code %d", code)
        self.kept.close_sockets()
        if code == -signal.SIGTERM:  # before it could handle it; this process is about to get it
            self._leave("the fork server was terminated (SIGTERM)")
        output, why = self._fork_server_tail(), self._imports_failed
        if self.node is not None:
            self.node.lose_fork_server(code, output, why)
        if self.queue and not self.leaving:
            return  # the queued runs get another one
        self._send(Broken(code, why.message if why is not None and why.of_tpunb else output))
        self.leaving = self.leaving or "the fork server has ended"

    def _fork_server_tail(self) -> str:
        """The end of the fork server's output."""
        size = self._fork_server_output.seek(0, os.SEEK_END)
        self._fork_server_output.seek(max(0, size - 3000))
        return self._fork_server_output.read().decode("utf-8", "replace").strip()

    def _kill_all(self) -> None:
        waiting = self._waiting_processes()
        for process in processes.descendants(os.getpid()):
            processes.signal_and_continue(process, signal.SIGKILL)
        for process in waiting:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, 0)
        self._import_files.cleanup()


class SupervisorLog(logging.Handler):
    """Writes log lines to `supervisor.log` of every open run; to stderr if there is none.

    Each line is a single write; a line that cannot be written (a full disk) is dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Path, int] = {}
        self.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", "%H:%M:%S"))
        root = logging.getLogger("tpunb")
        root.addHandler(self)
        root.setLevel(logging.INFO)

    def open_run(self, folder: Path) -> None:
        """Write lines to the folder of this run, too, from now on."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            self._files[folder] = os.open(folder / "supervisor.log", flags, 0o600)

    def close_run(self, folder: Path) -> None:
        """Stop writing to the folder of this run."""
        if folder in self._files:
            os.close(self._files.pop(folder))

    def emit(self, record: logging.LogRecord) -> None:
        line = (self.format(record) + "\n").encode("utf-8", "replace")
        # Python itself writes an exception that ends the process to stderr.
        for fd in [*self._files.values()] or ([] if record.exc_info else [2]):
            with contextlib.suppress(OSError):
                os.write(fd, line)


def _ignore(number: int, frame: object) -> None:
    """Handle a signal by doing nothing."""


def main() -> None:
    """Run a supervisor on this process's standard input and output.

    With an argument, it is the number of a descriptor from which the first messages are read.
    """
    orders: list[Message] = []
    if len(sys.argv) > 1:
        with open(int(sys.argv[1]), "rb") as given:
            orders = [order for line in given if (order := decode_message(line))]
    Supervisor().main_loop(orders)
