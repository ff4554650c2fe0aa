"""The tables of docs/migrate.md are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpunb.notebook import removed_apis

DOCS = Path(__file__).parents[3] / "docs" / "migrate.md"


@pytest.mark.parametrize("table", ["NAMES", "MODULES", "VARIABLES"])
def test_each_row_of_the_code_is_in_the_docs(table: str) -> None:
    lines = DOCS.read_text().splitlines()
    for row in getattr(removed_apis, table):
        now = f"`{row.new}`" if row.new else row.advice
        assert f"| `{row.old}` | {now} | {row.state} |" in lines


def test_the_docs_have_no_other_rows() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    tables = (removed_apis.NAMES, removed_apis.MODULES, removed_apis.VARIABLES)
    assert len(rows) == sum(map(len, tables))
