"""`make check` finds the phrases that docs/words.md refuses, wherever people read them."""

from pathlib import Path

import nbformat
import pytest

from tests import words

PYTHON = '''
def check():
    """Return what
    has come."""
    whence = 1  # it is an identifier
    return f"{whence} goes on"  # Nobody waits
'''
FILES = {
    "module.py": (PYTHON, [(4, "has come"), (6, "Nobody"), (6, "goes on")]),
    "page.md": ("# Title\n\nIt is told once.", [(3, "is told")]),
    "rules.yaml": ("signs:\n- 'it goes on'\ncause: it goes on", [(3, "goes on")]),
    "book.ipynb": (
        nbformat.writes(
            nbformat.v4.new_notebook(
                cells=[
                    nbformat.v4.new_markdown_cell("Plain.\nIt goes on."),
                    nbformat.v4.new_code_cell("x = 1  # hence 1"),
                ]
            )
        ),
        [(1, "hence"), (2, "goes on")],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_refused_phrases_are_found(tmp_path: Path, name: str) -> None:
    text, refused = FILES[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert sorted(words.find_refused(path, words.read_table())) == refused
