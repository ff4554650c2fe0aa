"""Writes `run.log`: the output of all ranks, prefixed, in the order in which it arrives."""

from __future__ import annotations

from collections.abc import Callable

from tpunb.events import Output
from tpunb.rundir import PRELUDE, RunDir


class RunLog:
    """Collects Output events into whole lines and appends them to `run.log`.

    A line gets a prefix: `[2] ` for rank 2, `[2 err] ` for its standard error, `[prelude] `
    for the prelude. Of a progress bar drawn with carriage returns the last state is kept.
    """

    def __init__(self, run: RunDir) -> None:
        self._file = open(run.log, "a", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.problem = ""
        """Why lines are missing; empty while none is."""
        self._parts: dict[tuple[int | None, str], list[str]] = {}

    @staticmethod
    def prefix(rank: int | None, stream: str) -> str:
        """What stands before each line of this source."""
        who = [] if rank is None else [str(rank)]
        what = {"stdout": [], "stderr": ["err"], PRELUDE: [PRELUDE]}[stream]
        return f"[{' '.join(who + what)}] "

    def say(self, text: str) -> None:
        """A line of tpunb's own."""
        self._guarded(lambda: self._file.write(f"[tpunb] {text}\n"))
        self._guarded(self._file.flush)

    def add(self, outputs: list[Output]) -> None:
        """Write the whole lines among these pieces, and keep the rest."""
        for output in outputs:
            source = (output.rank, output.stream)
            head, newline, rest = output.text.rpartition("\n")
            parts = self._parts.setdefault(source, [])
            if not newline:
                parts.append(rest)
                continue
            text = "".join([*parts, head])
            self._parts[source] = [rest] if rest else []
            self._write(source, text)
        self._guarded(self._file.flush)

    def _guarded(self, act: Callable[[], object]) -> None:
        """A log that cannot be written must not end the run: every rank has files of its own."""
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
        self._guarded(lambda: self._file.write(line))

    def close(self) -> None:
        """Write what never got its newline."""
        for source, parts in self._parts.items():
            if text := "".join(parts):
                self._write(source, text)
        self._guarded(self._file.close)


def _last_state(line: str) -> str:
    """What a terminal shows of a line that was drawn over with carriage returns."""
    states = [state for state in line.split("\r") if state]
    return states[-1] if states else ""
