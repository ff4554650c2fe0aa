"""Text for users: plain in general, with important parts coloured at a terminal.

The code that makes a text marks its important parts with `paint`. rich detects the abilities of
the terminal and whether colours are wanted (`NO_COLOR`, `TERM=dumb`). It is imported only if
standard output is a terminal, because the import is slow.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from tpunb.utils.ansi import visible

if TYPE_CHECKING:
    from rich.text import Text

_COMMAND = re.compile("`[^`\n]+`")
"""Commands and names in a text, as in Markdown."""


class Style(str, Enum):
    """The meaning of a part of a text; the values are rich's styles."""

    GOOD = "bold green"
    BAD = "bold red"
    ODD = "bold yellow"
    ACTIVE = "bold blue"
    STRONG = "bold"
    FAINT = "dim"
    COMMAND = "cyan"


class Span(NamedTuple):
    """A part of a text, from `start` to before `end`, and its style."""

    start: int
    end: int
    style: Style


class PaintedText(str):
    """A string with styled parts. `paint` and `join` keep styles; methods of `str` drop them."""

    spans: tuple[Span, ...] = ()


def paint(text: str, style: Style, *, end: int | None = None) -> PaintedText:
    """Return the text in a style, up to `end` or all of it."""
    whole = Span(0, len(text) if end is None else end, style)
    inner = (s for s in _spans(text) if s.end > whole.end or s.style is not style)
    return _painted(text, (whole, *inner))


def paint_first_line(text: str, style: Style) -> PaintedText:
    """Return the text with its first line in a style."""
    return paint(text, style, end=len(text.partition("\n")[0]))


def join(separator: str, parts: Iterable[str]) -> PaintedText:
    """Return `separator.join(parts)` with the styles of the parts."""
    spans: list[Span] = []
    position = 0
    parts = list(parts)
    for part in parts:
        spans += [Span(s.start + position, s.end + position, s.style) for s in _spans(part)]
        position += len(part) + len(separator)
    return _painted(separator.join(parts), tuple(spans))


def _spans(text: str) -> tuple[Span, ...]:
    return text.spans if isinstance(text, PaintedText) else ()


def _painted(text: str, spans: tuple[Span, ...]) -> PaintedText:
    painted = PaintedText(text)
    painted.spans = spans
    return painted


def styled(text: str) -> Text:
    """Convert the text to rich's, with its styles; commands in backticks are coloured as well."""
    from rich.text import Text

    rich_text = Text(visible(text))
    commands = (Span(*match.span(), Style.COMMAND) for match in _COMMAND.finditer(text))
    for span in (*_spans(text), *commands):
        rich_text.stylize(span.style.value, span.start, span.end)
    return rich_text


def coloured(text: str) -> str:
    """Return the text for standard output, with colours if that is a terminal with colours.

    Control characters, as in names or lines of a log, become visible symbols there.
    """
    if not sys.stdout.isatty():
        return text
    from rich.console import Console

    console = Console()
    with console.capture() as capture:
        console.print(styled(text), end="", soft_wrap=True)
    return capture.get()


class Printable(ABC):
    """Base of objects shown as their `str()` by `print`, notebooks, terminals and rich."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the text; its first line is the most important."""

    def __repr__(self) -> str:
        return str(self)

    def __rich__(self) -> Text:
        return styled(str(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(coloured(str(self)))
