"""Writes `run.log`: the output of all ranks, prefixed, in the order in which it arrives."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tpunb.runs.directory import PRELUDE, RunDir
from tpunb.runs.events import Output
from tpunb.utils.files import opener

LONGEST = 1_000_000
"""Characters of a line; longer text without a newline is split into several lines."""


class RunLog:
    """Collects Output events into whole lines and appends them to `run.log`.

    A line gets a prefix: `[2] ` for rank 2, `[2 err] ` for its standard error, `[prelude] `
    for the prelude. Only the last state of a progress bar drawn with carriage returns is kept.
    """

    def __init__(self, run: RunDir) -> None:
        self.problem = ""
        """Why lines are missing; empty while none are."""
        self._file = self._open(run.log)
        self._parts: dict[tuple[int | None, str], str] = {}
        """The beginnings of lines that have no newline yet."""

    def _open(self, path: Path) -> IO[str]:
        try:
            return open(path, "a", encoding="utf-8", errors="replace", opener=opener)
        except OSError as error:
            self.problem = error.strerror or str(error)
            return open(os.devnull, "a", encoding="utf-8", errors="replace")

    @staticmethod
    def prefix(rank: int | None, stream: str) -> str:
        who = [] if rank is None else [str(rank)]
        what = {"stdout": [], "stderr": ["err"], PRELUDE: [PRELUDE]}[stream]
        return f"[{' '.join(who + what)}] "

    def say(self, text: str) -> None:
        """Write lines in tpunb's own name."""
        lines = "".join(f"[tpunb] {line}\n" for line in text.splitlines())
        self._try(lambda: self._file.write(lines))
        self._try(self._file.flush)

    def add(self, outputs: list[Output]) -> None:
        """Write the whole lines among these pieces, and keep the rest."""
        for output in outputs:
            source = (output.rank, output.stream)
            head, newline, rest = (self._parts.pop(source, "") + output.text).rpartition("\n")
            if newline:
                self._write(source, head)
            if "\r" in rest:  # overwritten text is never shown
                rest = _last_state(rest) + ("\r" if rest.endswith("\r") else "")
            while len(rest) > LONGEST:
                self._write(source, rest[:LONGEST])
                rest = rest[LONGEST:]
            if rest:
                self._parts[source] = rest
        self._try(self._file.flush)

    def _try(self, act: Callable[[], object]) -> None:
        """Call `act`. A log that cannot be written does not end the run: ranks have their own."""
        try:
            act()
        except OSError as error:
            self.problem = self.problem or (error.strerror or str(error))

    def _write(self, source: tuple[int | None, str], text: str) -> None:
        if self.problem:
            return
        prefix = self.prefix(*source)
        if "\r" in text:
            text = "\n".join(_last_state(line) for line in text.split("\n"))
        line = prefix + text.replace("\n", f"\n{prefix}") + "\n"
        self._try(lambda: self._file.write(line))

    def close(self) -> None:
        """Write the lines that never got their newline, and close the file."""
        for source, text in self._parts.items():
            self._write(source, text)
        self._try(self._file.close)


def _last_state(line: str) -> str:
    """The part of a line that a terminal shows after carriage returns."""
    states = [state for state in line.split("\r") if state]
    return states[-1] if states else ""
