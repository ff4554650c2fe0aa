"""The sweep's end of the pipes to a worker process that runs trials (tpunb.kernel.trials)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpunb.utils import env_vars, files, interrupts
from tpunb.utils.files import LineBuffer

_WORKER = "from tpunb.kernel import trials; trials.main()"


@dataclass(frozen=True)
class Reply:
    """The end of a trial's notebook."""

    failed: bool
    error: str = ""
    """The error of its cell, in one line."""


class Worker:
    """A process that runs notebooks with papermill.

    `mark` is in the environment of every process that it starts, as `env_vars.SWEEP`.
    """

    def __init__(self, mark: str, runs: Path, log: Path) -> None:
        self.mark = f"{env_vars.SWEEP}={mark}"
        with open(log, "ab", opener=files.opener) as file:
            # Ctrl-C must reach only the sweep, which stops the runs with time to save.
            self._process = interrupts.start_in_own_session(
                _WORKER,
                str(os.getpid()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, env_vars.SWEEP: mark, env_vars.RUNS: str(runs)},
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._lines = LineBuffer()

    def order(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `poll` will report the worker's end
            self._process.stdin.write((json.dumps(order) + "\n").encode())
            self._process.stdin.flush()

    def poll(self) -> Reply | None:
        """Return the reply to the order, or None if there is none yet, without waiting."""
        assert self._process.stdout is not None
        ended = self._process.poll()
        lines = self._lines.feed(self._process.stdout.read() or b"")
        if lines:
            said = json.loads(lines[0])
            return Reply(bool(said["failed"]), str(said["error"]))
        if ended is not None:
            how = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
            return Reply(True, f"the process that ran the notebook has ended ({how})")
        return None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the worker; its kernel notices and ends too, and with the kernel its runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let the worker finish its order, and wait for its end; kill it after 20 s."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()
