"""The kernel's end of the pipes to a supervisor (tpunb.worker.supervisor)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, cast

from tpunb.runs import protocol
from tpunb.runs.protocol import (
    Broken,
    JoinHosts,
    Leaving,
    Message,
    MessageReader,
    Preload,
    Ready,
    RunFinished,
    StartRun,
    StopRun,
)
from tpunb.runs.spec import Stop, StopCause
from tpunb.utils import cpus, env_vars, interrupts, processes, records
from tpunb.utils.files import write_json
from tpunb.utils.modules import import_path

_SUPERVISOR = "from tpunb.worker.supervisor import main; main.main()"
_ROUNDS = 50
"""Rounds of killing left-over processes, 0.02 s each: another may be forked in the meantime."""
_TAIL = 3000
"""Bytes of a failed supervisor's last output that are kept."""

_ORDERS, _REPORTS, _ABOUT = "orders", "reports", "supervisor.json"
"""Files in the folder of a lent supervisor."""
_LENT = "tpunb-lent-"
"""Prefix of such a folder's name in the temporary directory."""

detached: list[SupervisorProcess] = []
"""Supervisors of detached runs; as children of this process, they must be reaped by it."""


def _popen(stdin: int, stdout: int, stderr: IO[bytes] | int) -> subprocess.Popen[bytes]:
    return interrupts.start_in_own_session(
        _SUPERVISOR,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd="/",  # modules in the notebook's folder must not replace those of the standard library
    )


class SupervisorProcess:
    """A supervisor with its fork server. When its standard input, the lifeline, closes, all end.

    `env` is the complete environment of the fork server, which starts to import torch and
    torch_xla at once; `ready` is True when it has finished.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the supervisor)
        self._connect(_popen(subprocess.PIPE, subprocess.PIPE, self._stderr))
        marked = {**env, **dict(mark.split("=", 1) for mark in self._marks)}
        self._send(Preload(marked, import_path(), sorted(cpus.allowed_cpus())))

    def _connect(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._reader = MessageReader(process.stdout.fileno())
        self._mutex = threading.RLock()  # runs in the background are followed by threads
        self.ready = False
        self.broken = ""
        """The reason why no further run can start; empty if one can."""
        self._runs: set[str] = set()
        self._marks = {f"{env_vars.SUPERVISOR}={self._process.pid}-{time.time_ns()}"}
        """Entries in the environment of every process that the supervisor starts."""
        self._folders: set[Path] = set()
        """Folders of preludes that run ahead, which the supervisor removes."""
        interrupts.close_in_children(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def busy(self) -> bool:
        """True while a run is active or waits."""
        return bool(self._runs)

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    def has_finished(self, folder: Path) -> bool:
        """True if the supervisor has reported the end of a run, or has ended itself."""
        with self._mutex:
            self.poll()
            if self.has_exited:
                self.poll()  # reads the last messages
                self._runs.clear()
            return str(folder) not in self._runs

    def run(
        self,
        folder: Path,
        env: dict[str, str],
        *,
        device: str | None = None,
        detached: bool = False,
        join: JoinHosts | None = None,
    ) -> None:
        """Order the run in a run folder, to be started after the earlier orders.

        `device` names a device that only one run of this user on this machine may use at a time. A
        `detached` run outlives this process; the supervisor ends with it and takes no other run.
        `join`: this machine is one of several hosts of the run.
        """
        self._runs.add(str(folder))
        self._marks.add(f"{env_vars.RUN}={folder}")
        if join is not None:
            self._send(join)
        self._send(StartRun(str(folder), env, device, detached))

    def run_ahead(self, folder: Path, env: dict[str, str]) -> None:
        """Order only the prelude in a run folder; the supervisor removes the folder."""
        self._folders.add(folder)
        self._marks.add(f"{env_vars.RUN}={folder}")
        self._send(StartRun(str(folder), env, ahead=True))

    def stop(self, folder: Path, stop: Stop) -> None:
        """Begin the shutdown sequence of a run, or continue it without a grace period."""
        self._send(StopRun(str(folder), stop))
        self._process.send_signal(signal.SIGCONT)  # a suspended supervisor reads no messages

    def _send(self, message: Message) -> None:
        assert self._process.stdin is not None
        with self._mutex:
            try:
                self._process.stdin.write(protocol.encode_message(message))
                self._process.stdin.flush()
            except BrokenPipeError:
                self._on_exit()

    def poll(self) -> None:
        """Handle the messages since the last call, without waiting."""
        with self._mutex:
            assert self._process.stdout is not None
            if self._process.stdout.closed:
                return
            while messages := self._reader.read():
                for message in messages:
                    self._on_message(message)
            if self._reader.closed and self.has_exited:
                self._on_exit()
                self._clean_up()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Ready):
            self.ready = True
        elif isinstance(message, RunFinished):
            self._runs.discard(message.dir)
        elif isinstance(message, Broken):
            output = message.output or f"exit code {message.code}"
            self.broken = f"the fork server has ended: {output}"
        elif isinstance(message, Leaving):
            self.broken = f"the supervisor has ended: {message.reason}"

    def _clean_up(self) -> None:
        """Clean up, once, after a supervisor that was killed.

        Its runner and ranks end with it, but not the processes that they have started.
        """
        if not self._process.returncode:
            self._marks.clear()
        for _ in range(_ROUNDS):
            if not self._marks or not (left := processes.with_variables(self._marks)):
                break
            for process in left:
                processes.send_signal(process, signal.SIGKILL)
            time.sleep(0.02)
        self._marks.clear()
        name = protocol.IMPORT_FILES.format(self.pid)
        for folder in (*self._folders, *Path(tempfile.gettempdir()).glob(f"{name}*")):
            shutil.rmtree(folder, ignore_errors=True)
        self._folders.clear()

    def _on_exit(self) -> None:
        if not self.broken:
            code = self._process.poll()
            self.broken = f"the supervisor has ended (exit code {code})"
            if code is None or code >= 0:  # after a signal, its output explains nothing
                self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _TAIL))
                said = self._stderr.read().decode("utf-8", "replace").strip()
                self.broken = f"{self.broken}\n{said}".strip()
        self._runs.clear()

    def close_pipes(self) -> None:
        """Close only this process's ends of the pipes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the supervisor ended with unread messages
            self._process.stdin.close()
        self._process.stdout.close()

    def begin_close(self) -> None:
        """Begin to end all processes, without waiting: several supervisors can do so at once."""
        self.close_pipes()

    def detach(self) -> None:
        """Disconnect from a supervisor whose run is detached."""
        with self._mutex:
            self.close_pipes()
            self._stderr.close()
            self._runs.clear()
        detached.append(self)
        detached[:] = [supervisor for supervisor in detached if not supervisor.has_exited]

    def close(self, wait: float = 60.0) -> None:
        """Close the lifeline and wait until the supervisor has ended everything below it.

        Raises subprocess.TimeoutExpired if that takes longer than `wait` seconds.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._mutex:
            try:
                self._process.stdin.close()
            except BrokenPipeError:  # the supervisor ended with unread messages
                self.poll()
        self._process.wait(wait)
        with self._mutex:
            self._process.stdout.close()
            self._stderr.close()
            self._runs.clear()


class LentSupervisor:
    """A supervisor that serves one kernel after the other and keeps its preludes between them.

    The lending process keeps the ends of two FIFOs open that the borrowers also open, so a
    borrower's end does not end the supervisor. `env`: as for SupervisorProcess. `fingerprint`:
    identifies the packages and variables that its fork server cannot change.
    """

    def __init__(self, env: dict[str, str], fingerprint: str) -> None:
        _remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=_LENT))
        for name in (_ORDERS, _REPORTS):
            os.mkfifo(self.folder / name, 0o600)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        orders = os.open(self.folder / _ORDERS, os.O_RDONLY | flags)
        self._orders = os.open(self.folder / _ORDERS, os.O_WRONLY | os.O_CLOEXEC)
        self._reports = os.open(self.folder / _REPORTS, os.O_RDONLY | flags)
        reports = os.open(self.folder / _REPORTS, os.O_WRONLY | os.O_CLOEXEC)
        os.set_blocking(orders, True)
        self._process = _popen(orders, reports, subprocess.DEVNULL)
        os.close(orders)
        os.close(reports)
        marked = {**env, env_vars.SUPERVISOR: f"{self._process.pid}-{time.time_ns()}"}
        preload = Preload(marked, import_path(), sorted(cpus.allowed_cpus()))
        os.write(self._orders, protocol.encode_message(preload))
        write_json(self.folder / _ABOUT, {"pid": self._process.pid, "fingerprint": fingerprint})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self, wait: float = 20.0) -> None:
        """End the supervisor and all its processes."""
        os.close(self._orders)
        try:
            self._process.wait(wait)
        finally:
            os.close(self._reports)
            shutil.rmtree(self.folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove the folders of lenders that were killed: their supervisors ended with them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_LENT}*"):
        pid = records.read_dict(folder / _ABOUT).get("pid")  # other users' folders: unreadable
        if isinstance(pid, int) and processes.find_process(pid) is None:
            shutil.rmtree(folder, ignore_errors=True)


class BorrowedSupervisor(SupervisorProcess):
    """A kernel's connection to a lent supervisor, which survives `close`.

    Raises OSError if the supervisor has ended, and BlockingIOError while another kernel has
    borrowed it, as when a notebook runs another one: each would read the other's messages.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self._lock = open(folder / _ABOUT, "rb")  # noqa: SIM115 (as long as it is borrowed)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            borrowed = _Borrowed(folder, pid)
        except OSError:
            self._lock.close()
            raise
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._connect(cast("subprocess.Popen[bytes]", borrowed))
        self.ready = True  # if it is not yet, a run waits for it
        self._closing = False

    @classmethod
    def find(cls, fingerprint: str) -> BorrowedSupervisor | None:
        """Connect to the supervisor lent to this kernel; None if it does not fit or has ended."""
        folder = Path(os.environ.get(env_vars.LENT, ""))
        about = records.read_dict(folder / _ABOUT) if folder.name else {}
        if about.get("fingerprint") != fingerprint:
            return None
        try:
            return cls(folder, int(about["pid"]))
        except OSError:
            return None

    def close_pipes(self) -> None:
        """Close this process's ends of the pipes, so that another kernel can borrow it."""
        super().close_pipes()
        self._lock.close()

    def begin_close(self) -> None:
        """Stop the runs of this kernel, once: a second stop would leave them no time to save."""
        closing, self._closing = self._closing, True
        for run in [] if closing else list(self._runs):
            self.stop(Path(run), Stop(StopCause.KERNEL_GONE, "the kernel has ended"))

    def close(self, wait: float = 60.0) -> None:
        """Disconnect from the supervisor once the runs of this kernel have ended."""
        self.begin_close()
        until = time.monotonic() + wait
        while self._runs and time.monotonic() < until:
            self.poll()
            time.sleep(0.01)
        self.close_pipes()
        self._stderr.close()


class _Borrowed:
    """The part of subprocess.Popen that SupervisorProcess uses, for another process's child."""

    returncode: int | None = None

    def __init__(self, folder: Path, pid: int) -> None:
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self.pid = pid
        self.stdin = open(os.open(folder / _ORDERS, os.O_WRONLY | flags), "wb")  # noqa: SIM115
        os.set_blocking(self.stdin.fileno(), True)
        self.stdout = open(os.open(folder / _REPORTS, os.O_RDONLY | flags), "rb")  # noqa: SIM115
        self._process = processes.find_process(pid)

    def poll(self) -> int | None:
        """Return None while the process lives, then 1: only its parent knows its exit status."""
        if self.returncode is None and (
            self._process is None or processes.process_state(self._process) in ("", "Z")
        ):
            self.returncode = 1
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return at once: only the lender can wait for the process."""
        return self.poll() or 0

    def send_signal(self, number: int) -> None:
        """Send a signal if the process lives."""
        if self._process is not None:
            processes.send_signal(self._process, number)
