"""More of tests/notebook/migrate/test_migrate_lint.py, which takes longer."""

from __future__ import annotations

import json

from hypothesis import given, settings

from tests.notebook.migrate.notebooks import notebook
from tests.notebook.migrate.test_migrate_lint import ROOT, assert_not_worse, findings, undefined
from tests.notebook.migrate.test_migrate_properties import calm, cells


@settings(calm, max_examples=25)
@given(cells)
def test_notebooks_of_any_shape(sources: list[str]) -> None:
    assert_not_worse(notebook(*sources))


def test_the_notebooks_of_this_repository() -> None:
    for path in sorted(ROOT.glob("notebooks/**/*.ipynb")):
        made = json.loads(path.read_text(encoding="utf-8"))
        assert not undefined(findings(made)), path.name
        assert_not_worse(made)
