"""The kernel's end of a guard: start it, tell it what to do, hear how it is."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

from tpunb import processors

_GUARD = "import sys; sys.path[0] = sys.argv.pop(1); from tpunb.worker import guard; guard.main()"


_living: weakref.WeakSet[GuardProcess] = weakref.WeakSet()
_left: list[GuardProcess] = []
"""Guards of detached runs: still children of this process, which has to take note of their end."""


def _let_go() -> None:
    """In a process that the kernel forks: the lifeline is the kernel's alone.

    A DataLoader worker of the kernel that outlives it would keep the pipe open.
    """
    for guard in _living:
        guard.let_go()


os.register_at_fork(after_in_child=_let_go)


class GuardProcess:
    """A guard with its agent. Its standard input is the lifeline: closed, it ends everything.

    `env` is the complete environment of the agent. The agent begins to import torch and
    torch_xla at once; `ready` turns True when it has.
    """

    def __init__(self, env: dict[str, str]) -> None:
        package_root = str(Path(__file__).resolve().parent.parent)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the guard)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _GUARD, package_root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # the interrupt key signals the kernel's whole group
            cwd="/",  # no module of the notebook's folder may stand in for a standard one
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._mutex = threading.RLock()  # runs in the background are followed by threads
        self._rest = b""
        self.ready = False
        self.broken = ""
        """What the agent said before it ended by itself; empty while it lives."""
        self._runs: set[str] = set()
        self._ended: dict[str, dict[str, Any]] = {}
        _living.add(self)
        use = sorted(processors.allowed())
        self._tell({"do": "warm", "env": env, "sys_path": list(sys.path), "processors": use})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def busy(self) -> bool:
        """Whether a run goes on, or waits."""
        return bool(self._runs)

    def is_done_with(self, folder: Path) -> bool:
        """Whether a run has ended, as the guard says, or must have, as the guard itself has."""
        with self._mutex:
            self._hear()
            if self._process.poll() is not None:
                self._hear()  # its last words
                self._runs.clear()
            return str(folder) not in self._runs

    def said_of(self, folder: Path) -> dict[str, Any]:
        """What the guard said of the end of a run: 'result' and 'problem', see the guard."""
        return self._ended.get(str(folder), {})

    def run(
        self, folder: Path, env: dict[str, str], *, device: str | None = None,
        detached: bool = False,
    ) -> None:  # fmt: skip
        """Have what is in a run folder run, after those that were ordered before.

        `device` names what only one run of this user on this machine may use. A run that is
        `detached` outlives this process; the guard ends with it, and takes no other.
        """
        self._runs.add(str(folder))
        order = {"do": "run", "dir": str(folder), "env": env}
        self._tell({**order, "device": device, "detached": detached})

    def stop(self, folder: Path, why: str, reason: str, *, now: bool = False) -> None:
        """Begin the stop ladder for a run; `now` skips what is left of the grace period."""
        order = {"do": "stop", "dir": str(folder), "why": why}
        self._tell({**order, "reason": reason, "now": now})

    def _tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._mutex:
            try:
                self._process.stdin.write((json.dumps(command) + "\n").encode())
                self._process.stdin.flush()
            except BrokenPipeError:
                self._note_death()

    def hear(self) -> None:
        """Take in what the guard has said since the last call; does not wait."""
        with self._mutex:
            self._hear()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        try:
            data = self._process.stdout.read()
        except ValueError:  # closed
            return
        if data == b"" and self._process.poll() is not None:
            self._note_death()
        *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["state"] == "ready":
                self.ready = True
            elif message["state"] == "ended":
                self._runs.discard(message["dir"])
                if message["problem"] or message["result"]:
                    self._ended[message["dir"]] = message
            elif message["state"] == "broken":
                output = message["output"] or f"exit code {message['code']}"
                self.broken = f"the agent has ended: {output}"

    def let_go(self) -> None:
        """Close this process's ends of the pipes, and nothing else."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, with something unread
            self._process.stdin.close()
        self._process.stdout.close()

    def forget(self) -> None:
        """Leave a guard whose run is detached to itself."""
        with self._mutex:
            self.let_go()
            self._errors.close()
            self._runs.clear()
        _left.append(self)
        _left[:] = [guard for guard in _left if guard._process.poll() is None]

    def _note_death(self) -> None:
        if not self.broken:
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", "replace").strip()
            code = self._process.poll()
            self.broken = f"the guard has ended (exit code {code})\n{said}".strip()
        self._runs.clear()

    def close(self, wait: float = 60.0) -> None:
        """Close the lifeline and wait until the guard has ended everything below it.

        Raises subprocess.TimeoutExpired if that takes longer than `wait` seconds.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._mutex:
            try:
                self._process.stdin.close()
            except BrokenPipeError:  # it ended before, with something unread
                self._hear()
        self._process.wait(wait)
        with self._mutex:
            self._process.stdout.close()
            self._errors.close()
            self._runs.clear()
