"""Notebook files as text: only what was changed differs, to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json.decoder import WHITESPACE, JSONDecodeError, scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from tpunb.errors import NotebookError
from tpunb.migrate.changes import Migration
from tpunb.migrate.notebook import migrate

DECODER = json.JSONDecoder()


class Span(NamedTuple):
    """A piece of the file's text."""

    start: int
    end: int


@dataclass(frozen=True)
class MigratedText:
    """A migrated notebook file."""

    text: str
    """The new content of the file."""
    diff: str
    """Cell by cell; empty if nothing changed."""
    report: str
    """What was done, and what is left to do."""
    migration: Migration


def migrate_text(text: str, *, train: bool = False) -> MigratedText:
    """Migrate a notebook given as the text of its file: see `migrate`.

    Indentation, order of keys, escapes and the end of the file stay as they are. Raises
    NotebookError if the text is no JSON or no notebook of format 4.
    """
    try:
        notebook = json.loads(text)
    except JSONDecodeError as error:
        raise NotebookError(f"this is no notebook, it is not even JSON: {error}") from error
    if not isinstance(notebook, dict):
        raise NotebookError("this is no notebook: the file holds no JSON object")
    made = migrate(notebook, train=train)
    result = _spliced(text, made)
    if json.loads(result) != made.notebook:
        raise AssertionError("the file's text does not hold the migrated notebook")
    return MigratedText(result, made.diff(), made.report(), made)


def _spliced(text: str, made: Migration) -> str:
    cells = next(span for key, span in _members(text, _skip(text, 0)) if key == "cells")
    spans = iter(_elements(text, cells.start))
    pieces: list[str] = []
    done = 0
    waiting: list[Mapping[str, Any]] = []
    for old, cell in made.pairs():
        if old is None:
            waiting.append(cell)
            continue
        span = next(spans)
        lead = text[_before(text, span.start) : span.start]
        for new in waiting:
            pieces += [text[done : span.start], _dumped(text, new, lead), ",", lead]
            done = span.start
        waiting.clear()
        if cell != old:
            source = next(one for key, one in _members(text, span.start) if key == "source")
            pieces += [text[done : source.start], _source(text, source, cell["source"])]
            done = source.end
    return "".join([*pieces, text[done:]])


def _source(text: str, span: Span, source: str | list[str]) -> str:
    """A source as JSON, in the style of the one in its place."""
    ascii_only = text.isascii()
    if isinstance(source, str):
        return json.dumps(source, ensure_ascii=ascii_only)
    items = list(_elements(text, span.start))
    first = text[span.start + 1 : items[0].start]
    last = text[items[-1].end : span.end - 1]
    between = text[items[0].end : items[1].start] if len(items) > 1 else f",{first or ' '}"
    lines = [json.dumps(line, ensure_ascii=ascii_only) for line in source]
    return f"[{first}{between.join(lines)}{last}]"


def _dumped(text: str, cell: Mapping[str, Any], lead: str) -> str:
    """A new cell as JSON, indented as its neighbours (`lead`: the white space before them)."""
    if "\n" not in lead:
        return json.dumps(cell, ensure_ascii=text.isascii())
    margin = lead.rpartition("\n")[2]
    # A notebook's cells are two levels deep.
    indent = margin[: max(len(margin) // 2, 1)]
    made = json.dumps(cell, ensure_ascii=text.isascii(), indent=indent, sort_keys=True)
    return made.replace("\n", f"\n{margin}")


def _skip(text: str, at: int) -> int:
    return int(WHITESPACE.match(text, at).end())


def _before(text: str, at: int) -> int:
    """Where the white space before a place begins."""
    while text[at - 1] in " \t\r\n":
        at -= 1
    return at


def _members(text: str, start: int) -> Iterator[tuple[str, Span]]:
    """The keys of the JSON object that starts at a place, and where their values are."""
    at = _skip(text, start + 1)
    while text[at] == '"':
        key, at = scanstring(text, at + 1, True)
        value = _skip(text, _skip(text, at) + 1)
        _, end = DECODER.raw_decode(text, value)
        yield key, Span(value, end)
        at = _skip(text, end)
        if text[at] != ",":
            return
        at = _skip(text, at + 1)


def _elements(text: str, start: int) -> Iterator[Span]:
    """Where the elements of the JSON list are that starts at a place."""
    at = _skip(text, start + 1)
    while text[at] != "]":
        _, end = DECODER.raw_decode(text, at)
        yield Span(at, end)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
