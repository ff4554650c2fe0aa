"""More of tests/machine/test_packages.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpunb.machine import packages
from tpunb.machine.machine import detect_machine


@pytest.mark.usefixtures("starts_processes")
def test_the_pair_is_imported_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "IMPORT_TIMEOUT", 500.0)
    here, have = detect_machine({}), packages.read_installed()
    env = {"PATH": "/usr/bin:/bin"}
    assert packages.import_problem(env, here, have) is None
    broken = tmp_path / "torch_xla"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN2at')")
    problem = packages.import_problem(env, here, have, [str(tmp_path)])
    assert problem is not None
    assert problem.id == "import-fails"
    assert "ImportError: undefined symbol: _ZN2at" in problem.message
    (broken / "__init__.py").write_text("import os; os.abort()")
    problem = packages.import_problem(env, here, have, [str(tmp_path)])
    assert problem is not None
    assert "signal 6" in problem.message
