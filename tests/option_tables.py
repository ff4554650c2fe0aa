"""The tables of options in docs/guide.md, made from the parsers.

`python -m tests.option_tables` writes them anew; tests/test_docs.py fails where they differ.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from tpunb import cli
from tpunb.kernel.options import PARSERS
from tpunb.utils.options import Declaration, declarations

GUIDE = Path(__file__).parents[1] / "docs/guide.md"
COMMAND = "python -m tests.option_tables"
_BLOCK = re.compile(
    r"<!-- options of (?P<name>\S+): written by `.*?` -->\n(?P<table>.*?)<!-- end -->\n", re.DOTALL
)


def tables() -> dict[str, str]:
    """By the name of the magic, and `tpunb` for the command line."""
    magics = {parser.prog: _table(declarations(parser.options)) for parser in PARSERS}
    return {name: table for name, table in magics.items() if table} | {"tpunb": _commands()}


def rewritten(page: str) -> str:
    """The page with all its tables anew."""
    made = tables()

    def write(match: re.Match[str]) -> str:
        name = match["name"]
        head = f"<!-- options of {name}: written by `{COMMAND}` -->"
        return f"{head}\n{made.pop(name)}<!-- end -->\n"

    page = _BLOCK.sub(write, page)
    assert not made, f"docs/guide.md has no table for {', '.join(made)}"
    return page


def _table(fields: list[tuple[Any, Declaration]]) -> str:
    if not any(declared.names for _, declared in fields):
        return ""
    rows, group = [("option", ""), ("---", "---")], ""
    for _, declared in fields:
        if declared.group != group:
            group = declared.group
            rows.append((f"**{group}**", ""))
        rows.append((f"`{usage(declared)}`", declared.help.replace("%%", "%")))
    return _markdown(rows)


def usage(declared: Declaration) -> str:
    """'--cores N|all'."""
    value = declared.keywords.get("metavar") or "|".join(declared.keywords.get("choices", ()))
    words = [value] if isinstance(value, str) else list(value)
    return " ".join([*declared.names[-1:], *filter(None, words)])


def _commands() -> str:
    rows = [("command", ""), ("---", "---")]
    [commands] = [
        action
        for action in cli.make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    for parser in commands.choices.values():
        words = " ".join(parser.format_usage().removeprefix("usage: ").split())
        rows.append((f"`{words.replace(' [-h]', '')}`", str(parser.description)))
    return _markdown(rows)


def _markdown(rows: list[tuple[str, str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {left} | {right} |\n" for left, right in cells)


if __name__ == "__main__":
    GUIDE.write_text(rewritten(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
