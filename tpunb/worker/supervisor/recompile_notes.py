"""Notes on recompilations: the same news of several ranks becomes one line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.utils.files import LineTail
from tpunb.utils.text import describe_ranks

INTERVAL = 0.5
"""Seconds between two looks into the ranks' files."""
WAIT = 3.0
"""Seconds that other ranks have for the same news before it is shown without them."""
MOST = 6
"""Lines for a run; then one that says that there is more."""


@dataclass
class _News:
    ranks: list[int] = field(default_factory=list)
    seconds: float | None = None
    """None: nothing was compiled, it is what the loop does at every step."""
    since: float = 0.0


class RecompileNotes:
    """Reads what the ranks of one attempt write (tpunb.worker.recompiles)."""

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        ranks: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._tails = {rank: LineTail(run.recompiled(attempt, rank)) for rank in ranks}
        self._news: dict[tuple[int, str, str], _News] = {}
        self._count = 0
        self._next = clock()

    def read(self, *, last: bool = False) -> list[str]:
        """Lines to show now. `last`: the ranks have ended."""
        now = self._clock()
        if now < self._next and not last:
            return []
        self._next = now + INTERVAL
        for rank, tail in self._tails.items():
            for line in tail.read():
                self._add(rank, json.loads(line), now)
        ready = [
            key
            for key, news in self._news.items()
            if last or len(news.ranks) == len(self._tails) or now - news.since > WAIT
        ]
        return [line for key in ready if (line := self._line(key))]

    def close(self) -> None:
        """Close the ranks' files."""
        for tail in self._tails.values():
            tail.close()

    def _add(self, rank: int, note: dict[str, Any], now: float) -> None:
        key = (note["step"], note["place"], note["what"])
        news = self._news.setdefault(key, _News(since=now))
        news.ranks.append(rank)
        if note["seconds"] is not None:
            news.seconds = max(news.seconds or 0.0, note["seconds"])

    def _line(self, key: tuple[int, str, str]) -> str:
        news = self._news.pop(key)
        self._count += 1
        if self._count > MOST:
            more = "more programs were compiled again; %%tpu_debug names all, with their causes"
            return more if self._count == MOST + 1 else ""
        step, place, what = key
        everyone = len(news.ranks) == len(self._tails) > 1
        who = "the ranks" if everyone else describe_ranks(news.ranks)
        if news.seconds is None:
            return f"{who}: {what} ({place})"
        return f"{who} recompiled at step {step} ({news.seconds:.1f} s): {what} ({place})"
