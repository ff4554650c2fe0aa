"""`tpunb.track`: show the progress of a loop on the card of its run.

A rank writes its progress to a small file a few times a second, and the card reads the file;
nothing is printed. Outside a run, tqdm shows the progress.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tpunb.runs import heartbeat
from tpunb.runs.events import Bar
from tpunb.runs.progress import ProgressFile, progress_path

T = TypeVar("T")


def track(iterable: Iterable[T], total: int | None = None, *, name: str = "") -> Iterator[T]:
    """Iterate and show the progress: `for x, y in tpunb.track(loader):`.

    `total`: the number of items, if `len(iterable)` is not known. `name`: the name of an item, for
    example 'epoch'; 'step' by default. Loops may be nested: the outermost loop is the progress of
    the run, and samples per second are counted in the innermost.
    """
    if total is None:
        try:
            total = len(iterable)  # type: ignore[arg-type]
        except TypeError:
            total = None
    if (path := progress_path()) is not None:
        return _Loops.of(path).follow(iterable, name or "step", total)
    if os.environ.get("RANK") not in (None, "0"):
        return iter(iterable)
    from tqdm.auto import tqdm  # a dependency of papermill

    return iter(tqdm(iterable, desc=name or None, total=total))


class _Loops:
    """The running loops of this rank, outermost first, and their progress file."""

    _current: _Loops | None = None

    def __init__(self, path: Path) -> None:
        self._file = ProgressFile(path)
        self._bars: list[Bar] = []
        self._samples = 0

    @classmethod
    def of(cls, path: Path) -> _Loops:
        if cls._current is None or cls._current._file.path != path:
            cls._current = cls(path)
        return cls._current

    def follow(self, iterable: Iterable[T], name: str, total: int | None) -> Iterator[T]:
        depth, done = len(self._bars), 0
        self._bars.append(Bar(name, done, total))
        # Only the outermost loop is written at its start and end: inner loops may be short.
        outermost = depth == 0

        def begin(item: T) -> T:
            nonlocal done
            heartbeat.note_activity()
            if len(self._bars) == depth + 1:
                self._samples += _rows(item)
            self._bars[depth] = Bar(name, done, total)
            self._report(now=outermost and not done)
            done += 1
            return item

        try:
            yield from map(begin, iterable)  # a variable of this function would keep the item alive
            self._bars[depth] = Bar(name, done, total)
            self._report(now=outermost)
        finally:
            del self._bars[depth:]

    def _report(self, *, now: bool) -> None:
        self._file.write(lambda: self._bars, self._samples, now=now)


def _rows(item: Any) -> int:
    """The first dimension of the first tensor of a batch; 0 if there is none."""
    while isinstance(item, (list, tuple)) and item:
        item = item[0]
    if isinstance(item, dict) and item:
        return _rows(next(iter(item.values())))
    shape = getattr(item, "shape", ())
    return int(shape[0]) if shape else 0
