"""One mark for each rank: what it does now, and which one is not like the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tpunb.display.ranks import name_ranks
from tpunb.events import RankLife

BEHIND = 3
"""Steps that a rank may be behind the others before it is said …"""
LATE = 1.5
"""… and seconds: each rank tells its steps twice a second, at moments of its own."""
NUMBERED = 32
"""Up to so many ranks each mark has its number …"""
MOST_ODD = 16
"""… and of more, so many of those that are not like the others: a card is at most 10 kB."""
MOST_NAMED = 60
"""Characters of the names of ranks that do the same."""
_GLYPHS = {
    "running": "●", "compiling": "◐", "waiting": "◦", "behind": "▲", "awaited": "▲",
    "starting": "·", "done": "✓", "failed": "✕", "stopped": "○",
}  # fmt: skip
_COLOURS = {
    "running": "#2da44e", "compiling": "#2f81f7", "waiting": "#2da44e",
    "behind": "#bf8700", "awaited": "#bf8700",
    "starting": "#808080", "done": "#2da44e", "failed": "#e5534b", "stopped": "#808080",
}  # fmt: skip
_ODD = ("failed", "behind", "awaited")


@dataclass(frozen=True)
class Mark:
    """What one rank does, in a word and in a few."""

    word: str
    detail: str = ""

    @property
    def glyph(self) -> str:
        return _GLYPHS[self.word]

    def __str__(self) -> str:
        return f"{self.word} ({self.detail})" if self.detail else self.word


def marks(
    size: int,
    life: Sequence[RankLife | None],
    exits: Mapping[int, int],
    failed: Iterable[int],
    speed: float = 0.0,
    *,
    hung: bool = False,
) -> list[Mark]:
    """The marks of ranks 0 to `size`. `exits`: codes of those that ended; `failed`: the guilty.

    `speed`: steps a second of the quickest. `hung`: it ended so; then the ranks are told that the
    others waited for.
    """
    guilty = set(failed)
    waited = {rank for rank, one in enumerate(life) if hung and one is not None and one.waiting}
    alive = [one for rank, one in enumerate(life) if one is not None and rank not in exits]
    furthest = max((one.steps for one in alive), default=0)
    found = []
    for rank in range(size):
        one = life[rank] if rank < len(life) else None
        if rank in guilty:
            mark = Mark("failed")
        elif waited and rank not in waited:
            mark = Mark("awaited", "the others waited for it")
        elif rank in exits:
            mark = Mark("done" if exits[rank] == 0 else "stopped")
        elif one is None or not one.begun:
            mark = Mark("starting")
        elif furthest - one.steps >= max(BEHIND, LATE * speed):
            mark = Mark("behind", f"step {one.steps:,} of {furthest:,}")
        elif one.compiling:
            mark = Mark("compiling")
        else:
            mark = Mark("running")
        found.append(mark)
    return found


def in_words(found: Sequence[Mark]) -> str:
    """'ranks 0-14,16 running · rank 15 behind (step 40 of 52)': the many first."""
    groups: dict[Mark, list[int]] = {}
    for rank, mark in enumerate(found):
        groups.setdefault(mark, []).append(rank)
    parts = [
        f"rank{'s' if len(ranks) > 1 else ''} {_some(ranks)} {mark}"
        for mark, ranks in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]
    return " · ".join([*parts[:5], *([f"and {len(parts) - 5} more"] if len(parts) > 5 else [])])


def _some(ranks: Sequence[int]) -> str:
    """Their names, '0,2,4,…' where these would be long."""
    names = name_ranks(ranks)
    return names if len(names) <= MOST_NAMED else f"{names[:MOST_NAMED].rpartition(',')[0]},…"


def html(found: Sequence[Mark]) -> str:
    """The marks, and below them the same in words."""
    shown = _boxes(found) if len(found) <= NUMBERED else _row(found)
    return f'{shown}<div style="opacity:0.7">{escape(in_words(found))}</div>'


def _boxes(found: Sequence[Mark]) -> str:
    """One box with its number for each rank."""
    pieces = []
    for rank, mark in enumerate(found):
        odd = mark.word in _ODD
        style = (
            f"display:inline-block;border:{2 if odd else 1}px solid {_COLOURS[mark.word]};"
            "border-radius:4px;padding:0 6px;margin:0 4px 3px 0"
        )
        text = f"{mark.glyph} {rank}"
        title = escape(f"rank {rank}: {mark}", quote=True)
        pieces.append(
            f'<span title="{title}" style="{style}">{f"<b>{text}</b>" if odd else text}</span>'
        )
    return f"<div>{' '.join(pieces)}</div>"


def _row(found: Sequence[Mark]) -> str:
    """For many: glyphs alone, and the odd ones with their numbers."""
    pieces = []
    odd = 0
    for rank, mark in enumerate(found):
        odd += mark.word in _ODD
        if mark.word in _ODD and odd <= MOST_ODD:
            title = escape(f"rank {rank}: {mark}", quote=True)
            style = f"border:2px solid {_COLOURS[mark.word]};border-radius:4px;padding:0 2px"
            pieces.append(f' <b title="{title}" style="{style}">{mark.glyph} {rank}</b> ')
        else:
            pieces.append(mark.glyph)
    style = "font-family:monospace;word-break:break-all;line-height:1.5"
    return f'<div style="{style}">{"".join(pieces)}</div>'
