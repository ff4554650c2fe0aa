"""Notes on recompilations: the same note from several ranks becomes one line."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.utils import records
from tpunb.utils.files import LineTail
from tpunb.utils.text import describe_ranks

INTERVAL = 0.5
"""Seconds between two reads of the ranks' files."""
WAIT = 3.0
"""Seconds that a note waits for the same note from other ranks before it is shown."""
MOST = 6
"""Lines for one run; after them, one line says that there are more."""


@dataclass
class _PendingNote:
    since: float
    ranks: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """Compile time, in the rank that took the longest."""


class RecompileNotes:
    """Reads and merges the notes that the ranks of one attempt write (tpunb.worker.recompiles)."""

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        ranks: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._tails = {rank: LineTail(run.recompiled(attempt, rank)) for rank in ranks}
        self._pending: dict[tuple[int, str, str], _PendingNote] = {}
        self._count = 0
        self._next = clock()

    def read(self, *, last: bool = False) -> list[str]:
        """Return the lines to show now. `last`: the ranks have ended."""
        now = self._clock()
        if now < self._next and not last:
            return []
        self._next = now + INTERVAL
        for rank, tail in self._tails.items():
            for line in tail.read():
                with contextlib.suppress(ValueError, LookupError, TypeError):  # cut by a full disk
                    self._add(rank, records.parse(line), now)
        ready = [
            key
            for key, pending in self._pending.items()
            if last or len(pending.ranks) == len(self._tails) or now - pending.since > WAIT
        ]
        return [line for key in ready if (line := self._line(key))]

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    def _add(self, rank: int, note: dict[str, Any], now: float) -> None:
        key, seconds = (note["step"], note["place"], note["what"]), note["seconds"]
        pending = self._pending.setdefault(key, _PendingNote(now))
        pending.ranks.append(rank)
        pending.seconds = max(pending.seconds, seconds)

    def _line(self, key: tuple[int, str, str]) -> str:
        pending = self._pending.pop(key)
        self._count += 1
        if self._count > MOST:
            more = "more programs were recompiled; %%tpu_debug lists all of them with their causes"
            return more if self._count == MOST + 1 else ""
        step, place, what = key
        everyone = len(pending.ranks) == len(self._tails) > 1
        who = "the ranks" if everyone else describe_ranks(pending.ranks)
        return f"{who} recompiled at step {step} ({pending.seconds:.1f} s): {what} ({place})"
