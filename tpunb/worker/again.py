"""What ranks tell of programs that were compiled again, gathered: one line for equal news.

Standard library only: the guard uses it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tpunb.rundir import LineTail, RunDir

LOOK = 0.5
"""Seconds between two looks into the ranks' files."""
WAIT = 3.0
"""Seconds that others have for the same news, before it is told without them."""
MOST = 6
"""Lines for a run; then it is told once that there is more."""


@dataclass
class _News:
    ranks: list[int] = field(default_factory=list)
    seconds: float | None = None
    """None: nothing was compiled, it is what the loop does at every step."""
    since: float = 0.0


class Gathering:
    """Follows the ranks of one attempt."""

    def __init__(self, run: RunDir, attempt: int, ranks: int) -> None:
        self._tails = [LineTail(run.recompiled(attempt, rank)) for rank in range(ranks)]
        self._news: dict[tuple[int, str, str], _News] = {}
        self._told = 0
        self._next = 0.0

    def read(self, *, last: bool = False) -> list[str]:
        """Lines to tell the person now. `last`: the ranks have ended."""
        now = time.monotonic()
        if now < self._next and not last:
            return []
        self._next = now + LOOK
        for rank, tail in enumerate(self._tails):
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
        for tail in self._tails:
            tail.close()

    def _add(self, rank: int, told: dict[str, Any], now: float) -> None:
        key = (told["step"], told["place"], told["what"])
        news = self._news.setdefault(key, _News(since=now))
        news.ranks.append(rank)
        if told["seconds"] is not None:
            news.seconds = max(news.seconds or 0.0, told["seconds"])

    def _line(self, key: tuple[int, str, str]) -> str:
        news = self._news.pop(key)
        self._told += 1
        if self._told > MOST:
            more = "more programs were compiled again; %%tpu_debug names all, with their causes"
            return more if self._told == MOST + 1 else ""
        step, place, what = key
        who = "the ranks" if len(news.ranks) == len(self._tails) > 1 else _ranks(news.ranks)
        if news.seconds is None:
            return f"{who}: {what} ({place})"
        return f"{who} recompiled at step {step} ({news.seconds:.1f} s): {what} ({place})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
