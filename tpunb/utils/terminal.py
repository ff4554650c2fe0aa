"""Text for people: plain everywhere, with what matters in colour at a terminal.

Whoever writes a text marks what matters in it, with `paint`. rich knows what a terminal can show,
and who wants no colours (`NO_COLOR`, `TERM=dumb`); it is imported only where standard output is a
terminal, because importing it takes its time.
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
    """What a part of a text means; the values are rich's styles."""

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
    """A string with styled parts. `paint` and `join` keep them; methods of `str` lose them."""

    spans: tuple[Span, ...] = ()


def paint(text: str, style: Style, *, end: int | None = None) -> PaintedText:
    """The text in a style, up to `end`, or all of it."""
    whole = Span(0, len(text) if end is None else end, style)
    inner = (s for s in _spans(text) if s.end > whole.end or s.style is not style)
    return _painted(text, (whole, *inner))


def paint_first_line(text: str, style: Style) -> PaintedText:
    """The text with its first line in a style."""
    return paint(text, style, end=len(text.partition("\n")[0]))


def join(separator: str, parts: Iterable[str]) -> PaintedText:
    """`separator.join(parts)`, with the styles of the parts."""
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
    """The text as rich prints it in colours; commands in backticks are coloured as well."""
    from rich.text import Text

    rich_text = Text(visible(text))
    commands = (Span(*match.span(), Style.COMMAND) for match in _COMMAND.finditer(text))
    for span in (*_spans(text), *commands):
        rich_text.stylize(span.style.value, span.start, span.end)
    return rich_text


def coloured(text: str) -> str:
    """The text for standard output: with colours if that is a terminal that shows them.

    What would steer the terminal, in a name or a line of a log, is a sign there.
    """
    if not sys.stdout.isatty():
        return text
    from rich.console import Console

    console = Console()
    with console.capture() as capture:
        console.print(styled(text), end="", soft_wrap=True)
    return capture.get()


class Printable(ABC):
    """Shown as its `str()` everywhere: by `print`, in a notebook, in a terminal and by rich."""

    @abstractmethod
    def __str__(self) -> str:
        """The first line says the most."""

    def __repr__(self) -> str:
        return str(self)

    def __rich__(self) -> Text:
        return styled(str(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(coloured(str(self)))
