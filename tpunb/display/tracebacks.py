"""Tracebacks that ended ranks, taken out of what they wrote: the end of the run shows the first.

A rank describes its end in `error.json` before it prints it (`worker.rank`), so the text to look
for is known before its first byte is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from tpunb.models import Failure, RunResult
from tpunb.rundir import RunDir


@dataclass
class _Wanted:
    """The traceback of one rank, and how much of it has come."""

    failure: Failure
    begun: str = ""
    """Text that may be its beginning."""
    found: bool = False


class Tracebacks:
    """Of the ranks of one run; their `run.log` keeps everything."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._attempt = 0
        self._ranks: dict[int, _Wanted] = {}

    def failure(self, rank: int) -> Failure | None:
        """How a rank says that it has failed; None if it does not."""
        if rank not in self._ranks:
            path = self._run.error(self._attempt, rank)
            if not path.exists():
                return None
            told = json.loads(path.read_text(encoding="utf-8"))
            self._ranks[rank] = _Wanted(Failure(rank, None, None, None, **told))
        return self._ranks[rank].failure

    def without(self, rank: int, text: str) -> str:
        """What a rank wrote to its standard error, without the traceback that ended it."""
        failure = self.failure(rank)
        if failure is None or (wanted := self._ranks[rank]).found:
            return text
        traceback = failure.traceback
        text = wanted.begun + text
        before, wanted.found, after = _parted(text, traceback)
        if wanted.found:
            wanted.begun = ""
            return before + after
        longest = min(len(text), len(traceback) - 1)
        held = next(size for size in range(longest, -1, -1)
                    if traceback.startswith(text[len(text) - size :]))  # fmt: skip
        wanted.begun = text[len(text) - held :]
        return text[: len(text) - held]

    def begin(self, attempt: int) -> Iterator[tuple[int, str]]:
        """Another attempt begins. Gives what was taken out of the ranks of the last one."""
        if attempt != self._attempt:
            yield from self._rest(None)
            self._attempt = attempt

    def end(self, result: RunResult) -> Iterator[tuple[int, str]]:
        """The run is over. Gives what was taken out and is not told with the first failure."""
        yield from self._rest(result.failure if result.state == "failed" else None)

    def _rest(self, told: Failure | None) -> Iterator[tuple[int, str]]:
        for rank, wanted in self._ranks.items():
            text = wanted.failure.traceback if wanted.found else wanted.begun
            if told is None or not wanted.failure.is_like(told):
                yield rank, text
        self._ranks = {}


def _parted(text: str, middle: str) -> tuple[str, bool, str]:
    before, found, after = text.partition(middle)
    return before, bool(found), after
