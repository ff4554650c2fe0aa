"""The kernel's end of the pipes to a supervisor (tpunb.worker.supervisor)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from tpunb.runs import protocol
from tpunb.runs.protocol import (
    Broken,
    Leaving,
    Message,
    MessageReader,
    Pod,
    Preload,
    Ready,
    RunFinished,
    StartRun,
    StopRun,
)
from tpunb.runs.spec import Stop
from tpunb.utils import cpus, env_vars, interrupts, processes
from tpunb.utils.modules import import_path

SUPERVISOR = (
    "from tpunb.utils import processes; processes.set_title('supervisor'); "
    "from tpunb.worker.supervisor import main; main.main()"
)
_ROUNDS = 50
"""Rounds of killing left-over processes, 0.02 s each: another may be forked in the meantime."""
_TAIL = 3000
"""Bytes of a failed supervisor's last output that are kept."""

detached: list[SupervisorProcess] = []
"""Supervisors of detached runs; as children of this process, they must be reaped by it."""


def _popen(stdin: int, stdout: int, stderr: IO[bytes] | int) -> subprocess.Popen[bytes]:
    return interrupts.start_in_own_session(
        SUPERVISOR,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd="/",  # modules in the notebook's folder must not replace those of the standard library
    )


class SupervisorProcess:
    """A supervisor with its fork server. When its standard input, the lifeline, closes, all end.

    `env` is the complete environment of the fork server, which starts to import torch and
    torch_xla at once; `ready` is True when it has finished. None: there is no fork server, for a
    run on other hosts.
    """

    def __init__(self, env: dict[str, str] | None) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the supervisor)
        self._connect(_popen(subprocess.PIPE, subprocess.PIPE, self._stderr))
        if env is None:
            return
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
        pod: Pod | None = None,
    ) -> None:
        """Order the run in a run folder, to be started after the earlier orders.

        `device` names a device that only one run of this user on this machine may use at a time. A
        `detached` run outlives this process; the supervisor ends with it and takes no other run.
        `pod`: the run's hosts, if it is not on this machine.
        """
        self._runs.add(str(folder))
        self._marks.add(f"{env_vars.RUN}={folder}")
        self._send(StartRun(str(folder), env, device, detached, pod=pod))

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
