"""Run commands, and time them and their output."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SCRIPTS = Path(sysconfig.get_path("scripts"))
PYTHON = sys.executable
JUPYTER = str(_SCRIPTS / "jupyter")
TPUNB = str(_SCRIPTS / "tpunb")


class CommandError(Exception):
    """A command of a benchmark failed; the text is its output."""


@dataclass(frozen=True)
class Ran:
    """A command that succeeded. Times are those of `time.monotonic`."""

    started: float
    first: float | None
    """When the first line with the awaited words arrived; None if no words were awaited."""
    ended: float
    text: str
    """Its standard output."""


def run(
    command: Sequence[str],
    cwd: Path,
    *,
    await_words: str = "",
    env: Mapping[str, str] | None = None,
) -> Ran:
    """Run a command to its end. Raises CommandError if it fails or lacks the awaited words."""
    first, lines = None, []
    with tempfile.TemporaryFile("w+") as errors:
        started = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if await_words and first is None and await_words in line:
                    first = time.monotonic()
                lines.append(line)
        ended = time.monotonic()
        text = "".join(lines)
        if process.returncode != 0 or (await_words and first is None):
            errors.seek(0)
            output = f"exit code {process.returncode}\n{text}{errors.read()}"
            raise CommandError(f"{' '.join(command)}: {output}")
    return Ran(started, first, ended, text)


def free_port() -> int:
    """A port that is not in use: two launchers on the same port end each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def torchrun(ranks: int, script: str) -> list[str]:
    """The command that runs a script under torchrun, on its own port."""
    return [
        str(_SCRIPTS / "torchrun"),
        f"--nproc-per-node={ranks}",
        f"--master-port={free_port()}",
        script,
    ]


def told_by(
    script: Path, folder: Path, ranks: int, threads: int, rounds: int, samples: int
) -> dict[str, list[float]]:
    """Run a script under torchrun, and return the values that it prints, by name."""
    command = [*torchrun(ranks, str(script)), str(rounds), str(samples)]
    env = {"NPROC": str(threads), "OMP_NUM_THREADS": str(threads)}
    env["PYTHONPATH"] = str(script.parents[1])
    text = run(command, folder, env=env).text
    (line,) = [line for line in text.splitlines() if line.startswith("{")]
    found: dict[str, list[list[float]]] = json.loads(line)
    return {name: [value for part in times for value in part] for name, times in found.items()}
