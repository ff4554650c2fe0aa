"""Refuses the left column of the last table of CONTRIBUTING.md: `python -m tests.words`."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "CONTRIBUTING.md"
OTHERS_WORDS = re.compile(r"^\s*(?:- )*\[?'")
"""Patterns of diagnose's rules: they quote the logs of other programs."""


def read_table() -> dict[str, str]:
    """Return what to write, by each phrase of the left column."""
    table = TABLE.read_text(encoding="utf-8").partition("\n## Words\n")[2]
    rows = re.findall(r"^\| (`.+) \| (.+) \|$", table, re.MULTILINE)
    return {phrase: instead for left, instead in rows for phrase in re.findall("`(.+?)`", left)}


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that people read, with their numbers from 1."""
    text = path.read_text(encoding="utf-8")
    if path == TABLE:
        text = text.partition("\n## Words\n")[0]
    if path.suffix == ".py":
        yield from _python_lines(text)
    elif path.suffix == ".ipynb":
        for cell in nbformat.reads(text, as_version=4).cells:
            yield from enumerate(cell.source.split("\n"), 1)
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if not (path.suffix == ".yaml" and OTHERS_WORDS.match(line)):
                yield number, line


def _python_lines(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.split("\n")):
                yield node.lineno + offset, line


def find_refused(path: Path, table: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each refused phrase in a file."""
    phrases = re.compile(rf"\b({'|'.join(map(re.escape, table))})\b", re.IGNORECASE)
    for number, line in read_lines(path):
        yield from ((number, phrase) for phrase in phrases.findall(line))


def main() -> int:
    """Print each use of a refused phrase; return 1 if there are any."""
    table = read_table()
    files = [*ROOT.glob("*.md"), *ROOT.glob("tpunb/**/*.py"), *ROOT.glob("tpunb/**/*.yaml")]
    files += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/**/*.ipynb")]
    found = 0
    for path in sorted(set(files)):
        for number, phrase in find_refused(path, table):
            found += 1
            place = f"{path.relative_to(ROOT)}:{number}"
            print(f"{place}: {phrase!r}: write {table[phrase.lower()]} ({TABLE.name})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
