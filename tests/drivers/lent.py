"""One supervisor, which has imported torch_xla, for the kernels of many tests.

A kernel with a supervisor of its own takes 5 s of a processor for that import. The test process
starts a `LentSupervisor`; a kernel with IPYTHONDIR=`folder` uses it in the place of its own,
through two FIFOs that the lender keeps open.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import cast

from tpunb.kernel import launcher, supervisor
from tpunb.kernel.supervisor import SupervisorProcess
from tpunb.runs import protocol
from tpunb.runs.protocol import Preload
from tpunb.runs.spec import Stop, StopCause
from tpunb.utils import cpus, env_vars, processes, records
from tpunb.utils.files import write_json
from tpunb.utils.modules import import_path

_ORDERS, _REPORTS, _ABOUT = "orders", "reports", "supervisor.json"
"""Files in the folder of a lent supervisor."""


class LentSupervisor:
    """A supervisor that serves one kernel after the other and keeps its preludes between them.

    The lending process keeps the ends of two FIFOs open that the borrowers also open, so a
    borrower's end does not end the supervisor. `env`: as for SupervisorProcess.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tpunb-lent-"))
        for name in (_ORDERS, _REPORTS):
            os.mkfifo(self.folder / name, 0o600)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        orders = os.open(self.folder / _ORDERS, os.O_RDONLY | flags)
        self._orders = os.open(self.folder / _ORDERS, os.O_WRONLY | os.O_CLOEXEC)
        self._reports = os.open(self.folder / _REPORTS, os.O_RDONLY | flags)
        reports = os.open(self.folder / _REPORTS, os.O_WRONLY | os.O_CLOEXEC)
        os.set_blocking(orders, True)
        self._process = supervisor._popen(orders, reports, subprocess.DEVNULL)
        os.close(orders)
        os.close(reports)
        marked = {**env, env_vars.SUPERVISOR: f"{self._process.pid}-{time.time_ns()}"}
        preload = Preload(marked, import_path(), sorted(cpus.allowed_cpus()))
        os.write(self._orders, protocol.encode_message(preload))
        about = {"pid": self._process.pid, "fingerprint": launcher.fingerprint_of(env)}
        write_json(self.folder / _ABOUT, about)
        startup = self.folder / "profile_default" / "startup" / "lent.py"
        startup.parent.mkdir(parents=True)
        # One expression, which leaves no name in the notebook.
        call = f"borrow_once(__import__('pathlib').Path({str(self.folder)!r}))"
        startup.write_text(f"__import__('tests.drivers.lent').drivers.lent.{call}\n")

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


def borrow_once(folder: Path) -> None:
    """Have the first supervisor of this kernel be the lent one, if it fits and lives."""
    about = records.read_dict(folder / _ABOUT)

    def make(env: dict[str, str]) -> SupervisorProcess:
        launcher.SupervisorProcess = SupervisorProcess  # type: ignore[misc]
        if about.get("fingerprint") == launcher.fingerprint_of(env):
            with suppress(OSError):
                return BorrowedSupervisor(folder, about["pid"])
        return SupervisorProcess(env)

    launcher.SupervisorProcess = make  # type: ignore[assignment, misc]
