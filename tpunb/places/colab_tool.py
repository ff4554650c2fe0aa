"""Google's command line for Colab (google-colab-cli, read and tried with 0.7.5), as a subprocess.

It is never imported: it needs packages and a Python of its own. It logs in by itself and keeps its
own credentials. What it prints may have them (the address of a request has the session's token), so
of what it says only a line is shown, without what follows a `?`. It is interrupted, not killed: it
writes the list of its sessions in place, and one that is cut short forgets them all.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpunb.places.errors import PlaceError
from tpunb.places.place import Cancelled
from tpunb.places.transport import HostProcess

TOOL = "colab"
QUICK, TRANSFER, ALLOCATION = 180.0, 900.0, 900.0
"""Seconds until a call is given up. Each request of `colab` waits up to 120 s; an allocation is
tried four times."""
LONGEST = 30 * 24 * 3600
"""Seconds for `--timeout` of `colab exec`: after it the real one waits on in a busy loop."""
_QUERY = re.compile(r"(https?://[^\s?#'\"]+)[?#][^\s'\"]+")
ENDING = 15.0
"""Seconds that it has to end by itself."""
_SESSION = re.compile(r"\[([^\]]+)\] (\S+) \| Hardware: (\S+) \| ")
_USAGE = re.compile(
    r"^Current balance: (?P<balance>[\d.]+) compute units$\s^Usage rate: (?P<rate>[\d.]+)/hr$", re.M
)


class ColabError(PlaceError):
    """`colab` says no, or nothing. `why` is its own last line; '' without one."""

    def __init__(self, reason: str, why: str = "") -> None:
        super().__init__(reason)
        self.why = why


@dataclass(frozen=True)
class Session:
    """One that the account has."""

    name: str
    """'?' if it was not allocated by `colab` on this machine, or `colab` has forgotten it."""
    endpoint: str
    """Colab's own name for it."""
    hardware: str
    """'V5E1', 'CPU', …"""


@dataclass(frozen=True)
class Usage:
    """Of the whole account, in compute units."""

    balance: float
    rate: float
    """An hour, of all sessions that it has now."""


def find_tool() -> str | None:
    """Where `colab` is; None if it is not installed."""
    return shutil.which(TOOL)


class ColabTool:
    """`colab`, with the account that it finds."""

    def __init__(self, auth: str = "") -> None:
        self._words = [TOOL, *(["--auth", auth] if auth else [])]

    def command(self, *words: str) -> list[str]:
        """The words of a call."""
        return [*self._words, *words]

    def run(
        self,
        *words: str,
        timeout: float,
        cancelled: Callable[[], bool] = lambda: False,
        pass_fds: Sequence[int] = (),
    ) -> str:
        """What a call prints. Raises ColabError, and Cancelled once `cancelled` says so."""
        shown = " ".join([TOOL, words[0]])
        try:
            process = subprocess.Popen(
                self.command(*words),
                stdin=subprocess.DEVNULL,  # it would wait for a code to log in with
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "COLUMNS": "1000", "NO_COLOR": "1"},
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ColabError(
                f"there is no `{TOOL}` here: `uv tool install google-colab-cli` installs it"
            ) from None
        deadline = time.monotonic() + timeout
        with process:
            while True:
                try:
                    output, errors = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    given_up = cancelled()
                    if given_up or time.monotonic() > deadline:
                        end(process.pid, lambda seconds: _wait(process, seconds))
                        process.kill()
                        process.communicate()
                        if given_up:
                            raise Cancelled from None
                        raise ColabError(f"`{shown}` has not answered in {timeout:g} s") from None
        text = output.decode("utf-8", "replace")
        if process.returncode:
            why = last_words(errors.decode("utf-8", "replace")) or last_words(text)
            raise ColabError(f"`{shown}` failed: {why or f'exit code {process.returncode}'}", why)
        return text

    def version(self) -> str:
        """'Version: 0.7.5', as `colab` says it."""
        return last_words(self.run("version", timeout=QUICK))

    def sessions(self) -> list[Session]:
        """The account's sessions. Raises ColabError, also where nobody is logged in."""
        try:
            text = self.run("sessions", timeout=QUICK)
        except ColabError as error:
            if not error.why:
                raise
            asked = " ".join(self.command("sessions"))
            raise ColabError(
                f"{str(error).rstrip('.')}. `{asked}` in a terminal logs in, or says what is wrong",
                error.why,
            ) from None
        found = [Session(*each.groups()) for each in _SESSION.finditer(text)]
        if len(found) < sum(" | " in line for line in text.splitlines()):
            # A session that is not seen would be taken for given back.
            raise ColabError(f"`{TOOL} sessions` lists sessions in a form that tpunb does not know")
        return found

    def usage(self) -> Usage | None:
        """Compute units; None if `colab` does not say."""
        try:
            found = _USAGE.search(self.run("usage", timeout=QUICK))
        except ColabError:
            return None
        return None if found is None else Usage(float(found["balance"]), float(found["rate"]))

    def new(self, name: str, accelerator: str) -> None:
        """Allocate a session. Not to be broken off: Colab might have given one by then."""
        tpu = [] if accelerator == "cpu" else ["--tpu", accelerator]
        self.run("new", "-s", name, *tpu, timeout=ALLOCATION)

    def stop(self, name: str) -> None:
        """Give a session back; nothing if there is none."""
        self.run("stop", "-s", name, timeout=QUICK)

    def upload(
        self, name: str, data: bytes, remote: str, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Bytes as a file in /content. They may be secrets, so no file here holds them."""
        with _in_memory(data) as descriptor:
            self.run(
                *("upload", "-s", name, f"/proc/self/fd/{descriptor}", f"content/{remote}"),
                timeout=TRANSFER,
                cancelled=cancelled,
                pass_fds=[descriptor],
            )

    def download(self, name: str, remote: str, local: Path) -> None:
        """A file of /content."""
        self.run("download", "-s", name, f"content/{remote}", str(local), timeout=TRANSFER)

    def execute(self, name: str, code: str) -> HostProcess:
        """Run code in the session's kernel; its standard output is the process's."""
        process = HostProcess(self.command("exec", "-s", name, "--timeout", str(LONGEST)))
        process.send(code.encode())
        process.close_input()
        return process


def end(pid: int, wait: Callable[[float], object]) -> None:
    """Have a call end by itself, if it does in time."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)
    wait(ENDING)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=seconds)


def last_words(text: str) -> str:
    """The last line of what `colab` said, without what may be a credential."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _QUERY.sub(r"\1", lines[-1]).removeprefix("[colab] ")[:400] if lines else ""


@contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    """The descriptor of a file that is in memory only."""
    descriptor = os.memfd_create("tpunb")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield descriptor
    finally:
        os.close(descriptor)
