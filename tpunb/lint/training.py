"""Loops that train."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpunb.lint.walk import LOOPS, Frame, Site

if TYPE_CHECKING:
    from tpunb.lint.book import Book


@dataclass(frozen=True)
class Loop:
    """A loop that trains: `backward` is called in it, perhaps in a function that it calls."""

    frame: Frame
    """The loop's body."""
    sites: tuple[Site, ...]
    """The calls in it."""
    called: tuple[Site, ...]
    """The calls in functions of the notebook that it calls."""

    @property
    def node(self) -> ast.For | ast.AsyncFor | ast.While:
        node = self.frame.node
        assert isinstance(node, ast.For | ast.AsyncFor | ast.While)
        return node


def loops(book: Book) -> list[Loop]:
    """The innermost loops around the calls of `backward`, in order."""
    found: dict[int, Frame] = {}
    for site in book.called.get("backward", ()):
        _around(book, site, found, set())
    inside = _calls_in(book, found)
    return [
        Loop(frame, tuple(inside[key]), tuple(_reached(book, inside[key])))
        for key, frame in found.items()
    ]


def _around(book: Book, site: Site, found: dict[int, Frame], seen: set[int]) -> None:
    """The loop around a call, or the loops around the calls of the function it is in."""
    frame = site.loop()
    if frame is not None:
        found.setdefault(id(frame.node), frame)
        return
    function = site.frame.function
    if function is None or id(function) in seen or not function.name:
        return
    seen.add(id(function))
    if len(seen) > 4 or len(book.functions[function.name]) > 1:
        return
    for caller in book.called.get(function.name, ()):
        if function in book.targets(caller):
            _around(book, caller, found, seen)


def _calls_in(book: Book, wanted: dict[int, Frame]) -> dict[int, list[Site]]:
    """The calls in the bodies of some loops, functions defined there left out."""
    found: dict[int, list[Site]] = {key: [] for key in wanted}
    for site in book.sites.calls if wanted else ():
        for frame in site.frame.outward():
            if id(frame.node) in found and isinstance(frame.node, LOOPS) and frame.part == "body":
                found[id(frame.node)].append(site)
    return found


def _reached(book: Book, sites: Iterable[Site]) -> list[Site]:
    """The calls in the notebook's functions that some calls lead to, by name."""
    found: list[Site] = []
    entered: set[int] = set()
    todo = list(sites)
    while todo:
        for function in book.targets(todo.pop()):
            if id(function) not in entered:
                entered.add(id(function))
                found += function.calls
                todo += function.calls
    return found
