"""`tpunb.track`: the progress of a loop, on the card of its run.

In a rank it is written to a small file a few times a second, which whoever shows the run
reads; nothing is printed. Elsewhere tqdm shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tpunb.advance import Advance, file_of_this_rank
from tpunb.events import Bar

T = TypeVar("T")


def track(iterable: Iterable[T], total: int | None = None, *, name: str = "") -> Iterator[T]:
    """Go through `iterable` and show how far it has come: `for x, y in tpunb.track(loader):`.

    `total`: the number of items, where `len(iterable)` does not say it. `name`: what an item
    is called, 'epoch' for example; by default 'step'. Loops may be nested: the outermost gives
    the progress of the run, the innermost the samples per second.
    """
    if total is None:
        try:
            total = len(iterable)  # type: ignore[arg-type]
        except TypeError:
            total = None
    if (path := file_of_this_rank()) is not None:
        return _Loops.of(path).follow(iterable, name or "step", total)
    if os.environ.get("RANK") not in (None, "0"):
        return iter(iterable)
    from tqdm.auto import tqdm  # papermill brings it

    return iter(tqdm(iterable, desc=name or None, total=total))


class _Loops:
    """The loops of this rank, outermost first, and the file that tells of them."""

    _current: _Loops | None = None

    def __init__(self, path: Path) -> None:
        self._advance = Advance(path)
        self._bars: list[Bar] = []
        self._samples = 0

    @classmethod
    def of(cls, path: Path) -> _Loops:
        if cls._current is None or cls._current._advance.path != path:
            cls._current = cls(path)
        return cls._current

    def follow(self, iterable: Iterable[T], name: str, total: int | None) -> Iterator[T]:
        depth, done = len(self._bars), 0
        self._bars.append(Bar(name, done, total))
        # Short loops within another one are written no oftener than others.
        first = outermost = depth == 0
        try:
            for item in iterable:
                if len(self._bars) == depth + 1:
                    self._samples += _rows(item)
                self._tell(now=first)
                first = False
                yield item
                done += 1
                self._bars[depth] = Bar(name, done, total)
            self._tell(now=outermost)
        finally:
            del self._bars[depth:]

    def _tell(self, *, now: bool) -> None:
        self._advance.tell(lambda: self._bars, self._samples, now=now)


def _rows(item: Any) -> int:
    """The first dimension of the first tensor of a batch; 0 for what is no batch."""
    while isinstance(item, (list, tuple)) and item:
        item = item[0]
    if isinstance(item, dict) and item:
        return _rows(next(iter(item.values())))
    shape = getattr(item, "shape", ())
    return int(shape[0]) if shape else 0
