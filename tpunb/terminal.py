"""Text for a person at a terminal: the same as everywhere, with what matters in colour.

rich knows what a terminal can show, and who wants no colours (`NO_COLOR`, `TERM=dumb`). It is
imported only where standard output is a terminal: that takes its time.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_GOOD, _BAD, _ODD, _DOING = "bold green", "bold red", "bold yellow", "bold blue"
_STYLES = (
    # How something stands, in its first line …
    (r"\A(?:RunResult )?succeeded\b", _GOOD),
    (r"\ARunResult (?!succeeded|stopped).*", _BAD),
    (r"\A(?:rank \d+|the prelude) .*?(?= · |$)", _BAD),
    (r"\A\w+Error: .*", _BAD),
    (r"\A(?:RunResult )?stopped [^·\n]*?(?= after | · |$)", _ODD),
    (r"\ASnapshot of .*", "bold"),
    (r"\AReady: .*", _GOOD),
    (r"\A(?:First mend this:|\d+ things to mend.*)", _BAD),
    # … or in a column of its own.
    (r"^\d{8}-\d{6}-\S+  +(succeeded)\b", _GOOD),
    (r"^\d{8}-\d{6}-\S+  +(failed|hung|timed_out|lost)\b", _BAD),
    (r"^\d{8}-\d{6}-\S+  +(interrupted|stopping)\b", _ODD),
    (r"^\d{8}-\d{6}-\S+  +(starting|waiting|running)\b", _DOING),
    (r"\Arun  +state  +.*", "bold"),
    # Causes of a failure, and what a look at a notebook has found.
    (r"(?:\A|\n\n)\S[^\n]*(?:\n\S[^\n]*)*? \[[a-z0-9-]+\]$", "bold"),
    (r"^cell \[\d+\], line \d+: (error):", _BAD),
    (r"^cell \[\d+\], line \d+: (warning):", _ODD),
    (r"^  \| .*|^  see .*", "dim"),
    # What to do, and where.
    (r"^(?:  → |  fix:|also:|note:)", "bold"),
    (r"`[^`\n]+`", "cyan"),
    (r"^❯.*", "bold"),
    (r"^(?!run )[a-z]+(?: left)?(?=  +\S)", "dim"),
)
"""What is found, or the group in it, and how it looks."""


def styled(text: str) -> Text:
    """The text as rich prints it in colours."""
    from rich.text import Text

    found = Text(text)
    for pattern, style in _STYLES:
        for match in re.finditer(pattern, text, re.MULTILINE):
            found.stylize(style, *match.span(match.lastindex or 0))
    return found


def coloured(text: str) -> str:
    """The text for standard output: with colours where that is a terminal that shows them."""
    if not sys.stdout.isatty():
        return text
    from rich.console import Console

    console = Console()
    with console.capture() as capture:
        console.print(styled(text), end="", soft_wrap=True)
    return capture.get()
