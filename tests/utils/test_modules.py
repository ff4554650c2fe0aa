"""Names of libraries that may be loaded."""

from __future__ import annotations

import decimal
import sys
import types

import pytest

from tpunb.utils.literals import literal
from tpunb.utils.modules import is_a, loaded


def test_a_class_is_found_where_its_module_is_loaded() -> None:
    assert loaded("decimal", "Decimal") is decimal.Decimal
    assert loaded("decimal", "Decimal.sqrt") is decimal.Decimal.sqrt
    assert loaded("no_such_module", "Decimal") is None
    assert loaded("decimal", "Dezimal.sqrt") is None
    assert is_a(decimal.Decimal(1), "decimal", "Context", "Decimal")
    assert not is_a(1, "decimal", "Decimal", "Dezimal")
    assert not is_a(1, "no_such_module", "Decimal")


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_values_are_read_while_a_library_is_being_imported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background imports torch while the next train cell reads the kernel's values."""
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert literal(object()) is None
