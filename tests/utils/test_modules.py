"""Names of libraries that may be loaded."""

from __future__ import annotations

import decimal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tpunb.utils.literals import literal
from tpunb.utils.modules import is_a, is_local_file, loaded


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


@pytest.mark.usefixtures("starts_processes")
def test_what_is_installed_into_a_folder_is_not_the_users_own(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "my code"
    (source / "pack").mkdir(parents=True)
    (source / "pack/__init__.py").write_text("")
    (source / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['hatchling']\nbuild-backend = 'hatchling.build'\n"
        "[project]\nname = 'pack'\nversion = '1'\n"
    )
    install = ["uv", "pip", "install", "--quiet", "--offline", "--no-build-isolation"]
    python = ["--python", sys.executable, "--target", str(target)]
    subprocess.run([sys.executable, "-m", *install, *python, str(source)], check=True)
    (target / "mine.py").write_text("")
    assert not is_local_file(str(target / "pack/__init__.py"))
    assert is_local_file(str(target / "mine.py"))
    assert is_local_file(str(source / "pack/__init__.py"))
