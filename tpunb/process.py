"""The kernel's end of a guard: start it, tell it what to do, hear how it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

_GUARD = "import sys; sys.path[0] = sys.argv.pop(1); from tpunb.worker import guard; guard.main()"


_living: weakref.WeakSet[GuardProcess] = weakref.WeakSet()


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
        self._rest = b""
        self.ready = False
        self.broken = ""
        """What the agent said before it ended by itself; empty while it lives."""
        self.busy = False
        _living.add(self)
        self._tell({"do": "warm", "env": env, "sys_path": list(sys.path)})

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, folder: Path, env: dict[str, str]) -> None:
        """Have what is in a run folder run. One run at a time."""
        self.busy = True
        self._tell({"do": "run", "dir": str(folder), "env": env})

    def stop(self, why: str, reason: str, *, now: bool = False) -> None:
        """Begin the stop ladder for the run; `now` skips what is left of the grace period."""
        self._tell({"do": "stop", "why": why, "reason": reason, "now": now})

    def _tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(command) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            self._note_death()

    def hear(self) -> None:
        """Take in what the guard has said since the last call; does not wait."""
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
                self.busy = False
            elif message["state"] == "broken":
                output = message["output"] or f"exit code {message['code']}"
                self.broken = f"the agent has ended: {output}"

    def let_go(self) -> None:
        """Close this process's ends of the pipes, and nothing else."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def _note_death(self) -> None:
        if not self.broken:
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", "replace").strip()
            code = self._process.poll()
            self.broken = f"the guard has ended (exit code {code})\n{said}".strip()
        self.busy = False

    def close(self, wait: float = 5.0) -> None:
        """Close the lifeline and wait until the guard has ended everything below it.

        Raises subprocess.TimeoutExpired if that takes longer than `wait` seconds.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:  # it ended before, with something unread
            self.hear()
        self._process.wait(wait)
        self._process.stdout.close()
        self._errors.close()
