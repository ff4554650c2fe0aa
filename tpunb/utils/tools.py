"""Call programs of others, such as ssh and gcloud, with limits.

Whatever a tool does, a call ends: it has a time-out, its output has a limit, and the interrupt key
ends it at once, even where presses are counted. Bytes that are not UTF-8 and characters that
control a terminal are replaced. A failure is a ToolError, which quotes what the tool printed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any

from tpunb.utils import ansi, interrupts, records
from tpunb.utils.errors import TpunbError

PATIENCE = 60.0
"""The default time-out in seconds."""
MOST = 64_000_000
"""The most bytes of output. All objects of a large cluster are a few megabytes."""
_QUOTED = 1000
"""The most characters of a quotation."""
_LINGER = 1.0
"""Seconds for the last output after a tool's end: a process that it has left may keep the pipe."""
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
class Printed:
    """What a tool has printed, without characters that control a terminal."""

    output: str
    errors: str


@dataclass(frozen=True)
class CompletedTool:
    """A tool that has ended: its exit code, and what it has printed."""

    returncode: int
    output: bytes
    errors: bytes


def call(command: Sequence[str], *, shown: str = "", **options: Any) -> Printed:
    """Run a tool to its end; see `run`.

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
    return Printed(output, errors)


def run(
    command: Sequence[str],
    *,
    shown: str = "",
    given: bytes | None = None,
    timeout: float = PATIENCE,
    most: int = MOST,
    cancelled: Callable[[], bool] = lambda: False,
    into: IO[bytes] | None = None,
    **options: Any,
) -> CompletedTool:
    """Run a tool to its end, whatever its exit code.

    Args:
        command: The tool and its arguments.
        shown: The call in messages; by default the command.
        given: Its standard input; None: empty.
        timeout: Seconds.
        most: The most bytes that it may print.
        cancelled: Returns True once the result is no longer wanted.
        into: A file for its output, which then has no limit.
        options: Options of `subprocess.Popen`.

    Raises ToolError if it cannot be called or exceeds a limit, and StoppedError.
    """
    process = start(command, given=given, **options)
    call = _ToolCall(shown or shlex.join(command), process, most, into)
    try:
        call.run(given or b"", timeout, cancelled)
    finally:
        call.end()
    return CompletedTool(process.returncode, *map(bytes, call.printed))


def start(
    command: Sequence[str], *, given: bytes | None = b"", **options: Any
) -> subprocess.Popen[bytes]:
    """Start a tool that the interrupt key does not reach; `given`: None for no standard input.

    Raises ToolError.
    """
    tool = os.path.basename(command[0])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    stdin = subprocess.DEVNULL if given is None else subprocess.PIPE
    try:
        return subprocess.Popen(
            command, stdin=stdin, start_new_session=True, **{**pipes, **options}
        )
    except FileNotFoundError:
        hint = _INSTALL.get(tool)
        then = f": {hint}" if hint else ", or not on PATH"
        raise ToolError(f"`{tool}` is not installed{then}", ToolProblem.MISSING) from None
    except OSError as error:
        raise ToolError(
            f"`{tool}` cannot be executed: {error.strerror or error}", ToolProblem.NOT_STARTED
        ) from None


class _ToolCall:
    def __init__(
        self, shown: str, process: subprocess.Popen[bytes], most: int, into: IO[bytes] | None
    ) -> None:
        self.shown = shown
        self.process = process
        self.printed = (bytearray(), bytearray())
        self._most = most
        self._into = into

    def run(self, given: bytes, timeout: float, cancelled: Callable[[], bool]) -> None:
        """Pass on its input, and read its output until it has ended."""
        process, rest = self.process, memoryview(given)
        deadline = time.monotonic() + timeout
        last: float | None = None
        in_main = threading.current_thread() is threading.main_thread()
        pressed = interrupts.presses()
        with selectors.DefaultSelector() as selector:
            output, errors = self.printed
            takers = (self._into.write if self._into else output.extend, errors.extend)
            for file, take in zip((process.stdout, process.stderr), takers, strict=True):
                if file is not None:
                    selector.register(file, selectors.EVENT_READ, take)
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while selector.get_map() or process.poll() is None:
                now = time.monotonic()
                if cancelled() or (in_main and interrupts.presses() > pressed):
                    raise StoppedError
                if now > deadline:
                    self._raise_for_silence(timeout)
                if process.poll() is not None:
                    last = last or now + _LINGER
                    if now > last:
                        break
                if not selector.get_map():
                    time.sleep(_LOOK / 10)
                for key, _ in selector.select(_LOOK):
                    if key.fileobj is process.stdin:
                        rest = self._write(selector, rest)
                        continue
                    data = os.read(key.fd, 1 << 16)
                    key.data(data)
                    if not data:
                        selector.unregister(key.fileobj)
                if sum(map(len, self.printed)) > self._most:
                    begins = self._quoted(self.printed)
                    raise ToolError(
                        f"`{self.shown}` has printed more than {self._most / 1e6:g} MB, and was "
                        f"ended. Its output begins with {begins}",
                        ToolProblem.TOO_LONG,
                        begins,
                    )

    def _write(self, selector: selectors.BaseSelector, rest: memoryview) -> memoryview:
        assert self.process.stdin is not None
        try:
            rest = rest[os.write(self.process.stdin.fileno(), rest[: 1 << 16]) :]
        except BlockingIOError:
            return rest
        except BrokenPipeError:  # it reads no more, and its exit code tells why
            rest = memoryview(b"")
        if not rest:
            selector.unregister(self.process.stdin)
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        return rest

    def _raise_for_silence(self, timeout: float) -> None:
        said = self._quoted(reversed(self.printed))
        so_far = f". It has printed {said}" if any(self.printed) else ""
        raise ToolError(
            f"`{self.shown}` has not answered in {timeout:g} s{so_far}", ToolProblem.SILENT
        )

    def _quoted(self, printed: Any) -> str:
        first = next((each for each in printed if each), b"")
        return quote(plain(bytes(first[: 4 * _QUOTED]).decode("utf-8", "replace")))

    def end(self) -> None:
        """End it if it has not ended, with the processes that it has started."""
        process = self.process
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (process.stdin, process.stdout, process.stderr):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


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
