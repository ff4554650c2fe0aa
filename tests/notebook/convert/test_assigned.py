from __future__ import annotations

import pytest

from tests.notebook.convert.notebooks import notebook
from tpunb.notebook.convert.assigned import refusal
from tpunb.notebook.convert.convert import convert


@pytest.mark.parametrize(
    "cells",
    [
        ["weights = 1"],
        ["if x:\n    weights = 1"],
        ["def f():\n    global weights\n    weights = 1"],
        ["from lib import weights"],
        ["from lib import *"],
        ["globals()[name] = 1"],
        ["(weights := 1)"],
        ["model.weights = weights"],
        ["weights = 1", "%%tpu_train\npass"],
        ["%unknown_magic weights", "%%tpu_train\npass"],
    ],
)
def test_what_may_be_there_at_the_end(cells: list[str]) -> None:
    *_, last = cells = cells if len(cells) > 1 else ["x = 1", *cells]
    held = {"weights"} if "model.weights" in last else set()
    assert refusal(convert(notebook(*cells)), ["weights"], held) is None


@pytest.mark.parametrize(
    ("cells", "hint"),
    [
        (["weights = 1"], "; did you mean weights?"),
        (["wieghts = 1", "%%tpu_train\npass", "x = 1"], None),
        (["def f():\n    wieghts = 1"], ""),
        (["print(wieghts)"], ""),
        (["[wieghts for wieghts in data]"], ""),
    ],
)
def test_what_is_surely_not_assigned(cells: list[str], hint: str | None) -> None:
    found = refusal(convert(notebook(*cells, train=min(1, len(cells) - 1))), ["wieghts"], set())
    if hint is None:
        assert found is None
    else:
        assert found == (
            f"wieghts: neither the train cell nor a cell above it assigns 'wieghts'{hint}"
        )
