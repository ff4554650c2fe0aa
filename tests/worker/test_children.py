"""What a child by spawn or forkserver runs of a script. Real ones are in tests/scenarios."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tpunb.worker import children

SCRIPT = """
    # %% cell 1
    import os
    os.mkdir(folder)
    class Data:
        size = 3
    # %% cell 2, on every core tags=["a"]
    found = print("trains", 1 / 0)
    limit = -4
    import math as m
    class Own(Data):
        size = m.floor(limit)
    def needs(x=found): pass
    # %% cell 3
    later = found
    after = Data.size + 1
    run = _tpunb_launch(needs)
    # %% [markdown]
    # %% cell 4, on every core
    found = 2
"""


def run(folder: Path, namespace: dict[str, Any]) -> list[str]:
    script = folder / "script.py"
    told: list[str] = []
    script.write_text(dedent(SCRIPT))
    lines = children._train_lines(script.read_text())
    children._execute(str(script), lines, namespace, lambda error: told.append(str(error)))
    return told


def test_cells_and_definitions_run_without_the_train_cells(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()  # in the rank
    namespace: dict[str, Any] = {"folder": tmp_path / "made"}
    told = run(tmp_path, namespace)
    assert (namespace["Own"].size, namespace["limit"], namespace["after"]) == (-4, -4, 4)
    assert not {"run", "later", "needs"} & set(namespace)
    for name in ("needs", "run", "later"):
        with pytest.raises(RuntimeError, match=f"needs {name!r}, .*move it to a cell above"):
            namespace["__getattr__"](name)
    assert len(told) == 3
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        namespace["__getattr__"]("other")


def test_an_error_of_the_cells_above_is_raised(tmp_path: Path) -> None:
    with pytest.raises(NameError, match="folder"):
        run(tmp_path, {})
