"""Call programs of others, such as ssh and gcloud, with limits.

Whatever a tool does, a call ends: it has a time-out, its output has a limit, and the interrupt key
ends it at once, even where presses are counted. Input and output are files, so that nothing waits
for a pipe. Bytes that are not UTF-8 and characters that control a terminal are replaced. A failure
is a ToolError, which quotes what the tool printed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from tempfile import TemporaryFile
from typing import IO, Any

from tpunb.utils import ansi, interrupts, records
from tpunb.utils.errors import TpunbError

PATIENCE = 60.0
"""The default time-out in seconds."""
MOST = 64_000_000
"""The most bytes of output. All objects of a large cluster are a few megabytes."""
_QUOTED = 1000
"""The most characters of a quotation."""
_LOOK = 0.1
"""Seconds between two looks at the interrupt key and the time-out."""
_INSTALL = {
    "ssh": "install OpenSSH's client",
    "gcloud": "https://cloud.google.com/sdk/docs/install",
}


class ToolProblem(Enum):
    """Why a call gave no result."""

    MISSING = "it is not installed"
    NOT_STARTED = "it cannot be executed"
    SILENT = "it did not finish in time"
    TOO_LONG = "its output did not end"
    FAILED = "it ended with an error"
    UNREADABLE = "its output is not in the expected form"


class ToolError(TpunbError):
    """A tool cannot be called, or its call has failed.

    `problem`: how. `said`: what it printed about it, for people.
    """

    def __init__(self, message: str, problem: ToolProblem, said: str = "") -> None:
        super().__init__(message, problem, said)
        self.message = message
        self.problem = problem
        self.said = said

    def __str__(self) -> str:
        return self.message


class StoppedError(TpunbError):
    """A call was ended because its caller no longer wants it, or the interrupt key was pressed."""

    def __str__(self) -> str:
        return "interrupted"


@dataclass(frozen=True)
class CompletedTool:
    """A tool that has ended: its exit code, and what it has printed."""

    returncode: int
    output: bytes
    errors: bytes


def call(command: Sequence[str], *, shown: str = "", **options: Any) -> str:
    """Run a tool to its end (see `run`), and return its output, plain.

    Raises ToolError if it cannot be called, fails, or exceeds a limit, and StoppedError.
    """
    shown = shown or shlex.join(command)
    ended = run(command, shown=shown, **options)
    output, errors = (
        plain(each.decode("utf-8", "replace")) for each in (ended.output, ended.errors)
    )
    if ended.returncode:
        said = errors.strip() or output.strip()
        told = quote(said) if said else describe_exit(ended.returncode)
        raise ToolError(f"`{shown}` failed: {told}", ToolProblem.FAILED, said)
    return output


def run(
    command: Sequence[str],
    *,
    shown: str = "",
    given: bytes = b"",
    timeout: float = PATIENCE,
    cancelled: Callable[[], bool] = lambda: False,
    into: IO[bytes] | None = None,
) -> CompletedTool:
    """Run a tool to its end, whatever its exit code.

    Args:
        command: The tool and its arguments.
        shown: The call in messages; by default the command.
        given: Its standard input.
        timeout: Seconds.
        cancelled: Returns True once the result is no longer wanted.
        into: A file for its output, which then has no limit.

    Raises ToolError if it cannot be called or exceeds a limit, and StoppedError.
    """
    shown = shown or shlex.join(command)
    in_main = threading.current_thread() is threading.main_thread()
    pressed, deadline = interrupts.presses(), time.monotonic() + timeout
    with (
        TemporaryFile() as stdin,
        # Appended to, because a process that the tool has left may write while they are read.
        TemporaryFile("a+b") as output,
        TemporaryFile("a+b") as errors,
    ):
        stdin.write(given)
        stdin.seek(0)
        process = _start(command, stdin, into or output, errors)
        try:
            while process.poll() is None:
                if cancelled() or (in_main and interrupts.presses() > pressed):
                    raise StoppedError
                if time.monotonic() > deadline:
                    begins = _first(errors) or _first(output)
                    so_far = f". It has printed {begins}" if begins else ""
                    raise ToolError(
                        f"`{shown}` has not answered in {timeout:g} s{so_far}", ToolProblem.SILENT
                    )
                if sum(os.fstat(file.fileno()).st_size for file in (output, errors)) > MOST:
                    begins = _first(output) or _first(errors)
                    raise ToolError(
                        f"`{shown}` has printed more than {MOST / 1e6:g} MB, and was ended. Its "
                        f"output begins with {begins}",
                        ToolProblem.TOO_LONG,
                        begins,
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK)
        finally:
            if process.poll() is None:  # with the processes that it has started
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return CompletedTool(process.returncode, _read(output), _read(errors))


def _start(
    command: Sequence[str], stdin: IO[bytes], output: IO[bytes], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a tool that the interrupt key does not reach. Raises ToolError."""
    tool = os.path.basename(command[0])
    try:
        return subprocess.Popen(
            command, stdin=stdin, stdout=output, stderr=errors, start_new_session=True
        )
    except FileNotFoundError:
        hint = _INSTALL.get(tool)
        then = f": {hint}" if hint else ", or not on PATH"
        raise ToolError(f"`{tool}` is not installed{then}", ToolProblem.MISSING) from None
    except OSError as error:
        raise ToolError(
            f"`{tool}` cannot be executed: {error.strerror or error}", ToolProblem.NOT_STARTED
        ) from None


def _read(file: IO[bytes], most: int = -1) -> bytes:
    file.seek(0)
    return file.read(most)


def _first(file: IO[bytes]) -> str:
    """Return the beginning of what a tool has printed, plain; '' if that is nothing."""
    begins = _read(file, 4 * _QUOTED)
    return quote(begins.decode("utf-8", "replace")) if begins else ""


def plain(text: str) -> str:
    """Return text without control sequences and characters, except line ends and tabs."""
    lines = text.replace("\r\n", "\n").split("\n")
    text = "\n".join(ansi.strip_ansi(ansi.clean(line)) for line in lines)
    return text.encode("utf-8", "replace").decode()


def quote(text: str, most: int = _QUOTED) -> str:
    """Return what a tool has printed for a message: plain, whole or its end."""
    text = plain(text).strip()
    return f"… {text[-most:]}" if len(text) > most else text or "nothing"


def describe_exit(code: int) -> str:
    """Describe an exit code: 'exit code 3', 'it was ended by SIGKILL'."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def read_json(kind: Any, text: str, shown: str) -> Any:
    """Return a tool's output as a value of a type, such as a dataclass or `tuple[X, ...]`.

    `shown`: the call, for messages. Strings in it are plain. Raises ToolError, which quotes the
    output, if it is not JSON or of another form.
    """
    try:
        return records.convert(kind, _plain_strings(records.parse(text)))
    except (ValueError, RecursionError):
        raise ToolError(
            f"the output of `{shown}` cannot be read. It has printed {quote(text[:_QUOTED])}",
            ToolProblem.UNREADABLE,
            text[:_QUOTED],
        ) from None


def _plain_strings(value: Any) -> Any:
    """Return a JSON value whose strings contain nothing that controls a terminal."""
    if isinstance(value, str):
        return plain(value) if value else value
    if isinstance(value, list):
        return [_plain_strings(each) for each in value]
    if isinstance(value, Mapping):
        return {plain(key): _plain_strings(each) for key, each in value.items()}
    return value
