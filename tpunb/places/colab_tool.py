"""Calls Google's command line tool for Colab (google-colab-cli, checked with 0.7.5).

Runs it as a subprocess and never imports it: it needs packages and a Python of its own. It logs in
by itself and keeps its own credentials. Its output may contain them (the URL of a request has the
session's token), so only one line of it is shown, without the part of URLs after `?`. It is
interrupted, not killed: it writes the list of its sessions in place, and would lose all of them if
it was cut short.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpunb.places.errors import PlaceError
from tpunb.places.place import Cancelled
from tpunb.places.transport import HostProcess
from tpunb.utils import tools
from tpunb.utils.tools import StoppedError, ToolError, ToolProblem

TOOL = "colab"
QUICK, TRANSFER, ALLOCATION = 180.0, 900.0, 900.0
"""Time-outs of calls in seconds. Each request of `colab` waits up to 120 s; an allocation is tried
four times."""
LONGEST = 30 * 24 * 3600
"""Seconds for `--timeout` of `colab exec`, which continues in a busy loop after it."""
_QUERY = re.compile(r"(https?://[^\s?#'\"]+)[?#][^\s'\"]+")
ENDING = 15.0
"""Seconds in which an interrupted call should end by itself."""
_SESSION = re.compile(r"\[([^\]]+)\] (\S+) \| Hardware: (\S+) \| ")
_USAGE = re.compile(
    r"^Current balance: (?P<balance>[\d.]+) compute units$\s^Usage rate: (?P<rate>[\d.]+)/hr$", re.M
)


class ColabError(PlaceError):
    """A call of `colab` has failed or timed out. `why`: its last line of output, or ''."""

    def __init__(self, reason: str, why: str = "") -> None:
        super().__init__(reason)
        self.why = why


@dataclass(frozen=True)
class Session:
    """A session of the account."""

    name: str
    """'?' if `colab` on this machine did not allocate it, or has lost its name."""
    endpoint: str
    """Colab's own name of the session."""
    hardware: str
    """'V5E1', 'CPU', …"""


@dataclass(frozen=True)
class Usage:
    """Compute units of the whole account."""

    balance: float
    rate: float
    """Compute units per hour of all present sessions."""


def find_tool() -> str | None:
    """The path of `colab`; None if it is not installed."""
    return shutil.which(TOOL)


class ColabTool:
    """The calls of `colab`, with the account that it finds."""

    def __init__(self, auth: str = "") -> None:
        self._words = [TOOL, *(["--auth", auth] if auth else [])]

    def command(self, *words: str) -> list[str]:
        """The command line of a call."""
        return [*self._words, *words]

    def run(
        self,
        *words: str,
        timeout: float,
        cancelled: Callable[[], bool] = lambda: False,
        pass_fds: Sequence[int] = (),
    ) -> str:
        """Return a call's output. Raises ColabError, and Cancelled if `cancelled` returns True."""
        shown = " ".join([TOOL, words[0]])
        try:
            return tools.call(
                self.command(*words),  # without input: otherwise it would wait for a login code
                shown=shown,
                timeout=timeout,
                gentle=ENDING,
                cancelled=cancelled,
                env={**os.environ, "COLUMNS": "1000", "NO_COLOR": "1"},
                pass_fds=pass_fds,
            ).output
        except StoppedError:
            raise Cancelled from None
        except ToolError as error:
            if error.problem is not ToolProblem.FAILED:
                raise ColabError(_QUERY.sub(r"\1", str(error))) from None
            why = last_words(error.said)
            told = f"`{shown}` failed: {why.removesuffix('.')}" if why else str(error)
            raise ColabError(told, why) from None

    def version(self) -> str:
        """The version as `colab` prints it: 'Version: 0.7.5'."""
        return last_words(self.run("version", timeout=QUICK))

    def sessions(self) -> list[Session]:
        """The account's sessions. Raises ColabError, also without a login."""
        try:
            text = self.run("sessions", timeout=QUICK)
        except ColabError as error:
            if not error.why:
                raise
            asked = " ".join(self.command("sessions"))
            raise ColabError(
                f"{error}. Run `{asked}` in a terminal to log in, or to see the problem",
                error.why,
            ) from None
        found = [Session(*each.groups()) for each in _SESSION.finditer(text)]
        if len(found) < sum(" | " in line for line in text.splitlines()):
            # A session that was overlooked would be considered released.
            raise ColabError(
                f"tpunb cannot read the output of `{TOOL} sessions`: install google-colab-cli 0.7.5"
            )
        return found

    def usage(self) -> Usage | None:
        """The account's compute units; None if `colab` does not report them."""
        try:
            found = _USAGE.search(self.run("usage", timeout=QUICK))
        except ColabError:
            return None
        return None if found is None else Usage(float(found["balance"]), float(found["rate"]))

    def new(self, name: str, accelerator: str) -> None:
        """Allocate a session. Cannot be cancelled: Colab might have allocated it already."""
        tpu = [] if accelerator == "cpu" else ["--tpu", accelerator]
        self.run("new", "-s", name, *tpu, timeout=ALLOCATION)

    def stop(self, name: str) -> None:
        """Release a session; do nothing if there is none."""
        self.run("stop", "-s", name, timeout=QUICK)

    def upload(
        self, name: str, data: bytes, remote: str, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Write data to a file in /content. It may be secret, so no local file holds it."""
        with _in_memory(data) as descriptor:
            self.run(
                *("upload", "-s", name, f"/proc/self/fd/{descriptor}", f"content/{remote}"),
                timeout=TRANSFER,
                cancelled=cancelled,
                pass_fds=[descriptor],
            )

    def download(self, name: str, remote: str, local: Path) -> None:
        """Download a file of /content."""
        self.run("download", "-s", name, f"content/{remote}", str(local), timeout=TRANSFER)

    def execute(self, name: str, code: str) -> HostProcess:
        """Run code in the session's kernel; the process's standard output is the code's."""
        process = HostProcess(self.command("exec", "-s", name, "--timeout", str(LONGEST)))
        process.send(code.encode())
        process.close_input()
        return process


def end(pid: int, wait: Callable[[float], object]) -> None:
    """Interrupt a call, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)
    wait(ENDING)


def last_words(text: str) -> str:
    """The last line of `colab`'s output, without parts that may be credentials."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _QUERY.sub(r"\1", lines[-1]).removeprefix("[colab] ")[:400] if lines else ""


@contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    """A file in memory only; yields its descriptor."""
    descriptor = os.memfd_create("tpunb")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield descriptor
    finally:
        os.close(descriptor)
