"""Code cells as lint reads them: plain Python, and the part of the notebook they belong to."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tpunb.models import Cell, Snapshot
from tpunb.script.cells import SKIP_LINE, SKIP_TAGS, NotPythonError, magics, plain

DEBUG = re.compile(r"^%%tpu_debug\b", re.MULTILINE)

Part = Literal["prelude", "train", "kernel"]


@dataclass
class Page:
    """One code cell."""

    index: int
    """Position in the snapshot."""
    number: int
    """What a person sees beside the cell."""
    part: Part
    """`prelude`: runs once, above a train cell; `train`: on every core; `kernel`: in the
    notebook only. Without a train cell all are `prelude`, and the kernel runs them."""
    runs: bool
    """Whether it is part of the run of the snapshot's own train cell."""
    lines: list[str]
    """The cell as it was written."""
    tree: ast.Module
    """Empty where the cell is not Python."""
    left_out: list[int]
    """Lines (from 1) with magics and shell commands that are not Python."""
    problem: tuple[int, str] | None = None
    """Line and reason, where the cell is not Python."""

    def commands(self) -> Iterator[tuple[int, str]]:
        """Shell commands and magics: line and text, those of `%%bash` cells line by line."""
        for first in self.left_out:
            if self.lines[first - 1].startswith("%%"):
                yield from enumerate(self.lines[first - 1 :], first)
                return
            at = first
            while at <= len(self.lines):
                yield at, self.lines[at - 1]
                if not self.lines[at - 1].endswith("\\"):
                    break
                at += 1


def pages(snapshot: Snapshot) -> list[Page]:
    """The code cells of a snapshot, in order."""
    found = []
    code = [cell for cell in snapshot.cells if cell.kind == "code"]
    heads = {cell.index: magics(cell.source) for cell in code if "%%" in cell.source}
    trains = {index for index, names in heads.items() if "tpu_train" in names}
    if snapshot.train is not None:
        trains.add(snapshot.train)
    last = max(trains, default=None)
    for position, cell in enumerate(code, 1):
        names = heads.get(cell.index, [])
        part: Part = "prelude"
        if cell.index in trains:
            part = "train"
        elif _skipped(cell, names) or (last is not None and cell.index > last):
            part = "kernel"
        end = snapshot.train
        runs = end is not None and (cell.index == end or (part == "prelude" and cell.index < end))
        number = position if cell.number is None else cell.number
        found.append(_page(cell, number, part, runs))
    return found


def _skipped(cell: Cell, names: list[str]) -> bool:
    first = cell.source.lstrip().partition("\n")[0].strip()
    return bool(SKIP_TAGS & set(cell.tags)) or first == SKIP_LINE or "tpu_debug" in names


def _page(cell: Cell, number: int, part: Part, runs: bool) -> Page:
    source = cell.source.replace("\r\n", "\n").replace("\r", "\n")
    page = Page(
        cell.index, number, part, runs, source.split("\n"), ast.Module(body=[], type_ignores=[]), []
    )
    try:
        # The body of a %%tpu_debug cell is ordinary code too, though never part of a script.
        made = plain(DEBUG.sub("%%tpu_train", source, count=1))
    except NotPythonError as error:
        page.problem = error.line, error.reason
        return page
    page.left_out = sorted(line for line, _, _ in made.left_out)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warned about the cells when they ran
            page.tree = ast.parse("\n".join(made.lines))
    except SyntaxError as error:
        line = min(max(error.lineno or 1, 1), len(page.lines))
        page.problem = line, f"it is not Python: {error.msg}"
    except (ValueError, MemoryError, RecursionError, OverflowError) as error:
        page.problem = 1, f"Python cannot read it: {error}"
    return page
