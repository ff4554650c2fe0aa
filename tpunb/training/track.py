"""`tpunb.track`: the progress of a loop, on the card of its run.

In a rank it is written to a small file a few times a second, which whoever shows the run
reads; nothing is printed. Elsewhere tqdm shows it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from tpunb.events import Bar
from tpunb.rundir import RunDir

T = TypeVar("T")
EVERY = 0.25
"""Seconds between two writes."""


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
    rank, run = os.environ.get("RANK"), os.environ.get("TPUNB_RUN")
    if run and rank is not None:
        folder = RunDir(run)
        path = folder.progress(int(os.environ.get("TPUNB_ATTEMPT", "0")), int(rank))
        return _Written.of(path).follow(iterable, Bar(name or "step", 0, total))
    if rank not in (None, "0"):
        return iter(iterable)
    from tqdm.auto import tqdm  # papermill brings it

    return iter(tqdm(iterable, desc=name or None, total=total))


class _Written:
    """The bars of this rank, outermost first, and the file that holds them."""

    _current: _Written | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bars: list[dict[str, Any]] = []
        self._samples = 0
        self._next = 0.0

    @classmethod
    def of(cls, path: Path) -> _Written:
        if cls._current is None or cls._current._path != path:
            cls._current = cls(path)
        return cls._current

    def follow(self, iterable: Iterable[T], bar: Bar) -> Iterator[T]:
        mine = asdict(bar)
        self._bars.append(mine)
        self._next = 0.0
        try:
            for item in iterable:
                if self._bars[-1] is mine:
                    self._samples += _rows(item)
                self._write()
                yield item
                mine["done"] += 1
            self._next = 0.0
            self._write()
        finally:
            del self._bars[self._bars.index(mine) :]

    def _write(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        text = json.dumps({"bars": self._bars, "samples": self._samples})
        part = self._path.with_suffix(".part")
        part.write_text(text)
        part.replace(self._path)


def _rows(item: Any) -> int:
    """The first dimension of the first tensor of a batch; 0 for what is no batch."""
    while isinstance(item, (list, tuple)) and item:
        item = item[0]
    if isinstance(item, dict) and item:
        return _rows(next(iter(item.values())))
    shape = getattr(item, "shape", ())
    return int(shape[0]) if shape else 0
