"""Lines of cells, found by their files' names, and the conditions or loops around them."""

from __future__ import annotations

import linecache
from types import SimpleNamespace
from typing import Any

import pytest

from tpunb.diagnostics.cell import places
from tpunb.diagnostics.cell.frames import SourceLine
from tpunb.diagnostics.cell.places import Places

SOURCE = """%%tpu_debug
for x in data:
    if x > 3:
        a(x)
    else:
        b(x)
    c = d(x) if x else 1
e(x)
"""


def shell(**compile_: Any) -> Any:
    history = SimpleNamespace(input_hist_raw=["", "a", "b"], input_hist_parsed=["", "a\n", "b\n"])
    return SimpleNamespace(compile=SimpleNamespace(**compile_), history_manager=history)


def test_newer_versions_of_ipython_know_the_names() -> None:
    known = {"file": 3}
    assert places.cell_files(shell(_filename_map=known)) is known


def test_older_versions_give_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_debugged", {})
    places.remember_cell("debugged", 3)
    old = shell(get_code_name=lambda raw, code, number: f"{raw}{number}")
    assert places.cell_files(old) == {"a1": 1, "b2": 2, "debugged": 3}


@pytest.mark.parametrize(("line", "decides"), [(4, 3), (6, 3), (3, 2), (2, None), (8, None)])
def test_the_branch_of_a_line_is_found(line: int, decides: int | None) -> None:
    name = "a cell of test_places"
    linecache.cache[name] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), name)
    found = Places(shell(_filename_map={name: 7}))
    assert found.branch(SourceLine(name, line)) == (SourceLine(name, decides) if decides else None)
    assert found.name(SourceLine(name, line)) == f"cell [7], line {line}"
    assert found.source(SourceLine(name, 4)) == "a(x)"
