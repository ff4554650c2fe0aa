"""What skipped cells change is told where the run reads it, and only there."""

from __future__ import annotations

import pytest

from tests.notebook.convert.notebooks import notebook
from tpunb.notebook.convert.convert import convert

MADE = "model = {}\nitems = []"
NOT_RUN = "%%tpu_train --returns model\nmodel.update(a=1)"
TOLD = {
    "by the train cell": ([], "print(model)", "the train cell"),
    "by a function": (["def f():\n    return model"], "f()", "the train cell"),
    "by a function that a function calls": (
        ["def f():\n    return model\ndef g():\n    return f()"],
        "g()",
        "the train cell",
    ),
    "by a method": (["class A:\n    def f(self):\n        return model"], "A()", "the train cell"),
    "by a lambda": ([], "f = lambda: model", "the train cell"),
    "by a cell of the prelude": (["size = len(model)"], "print(size)", "cell [3]"),
    "changed": ([], "model['b'] = 1", "the train cell"),
}


@pytest.mark.parametrize(("cells", "train", "reader"), TOLD.values(), ids=TOLD)
def test_a_change_that_the_run_does_not_have(cells: list[str], train: str, reader: str) -> None:
    script = convert(notebook(MADE, NOT_RUN, *cells, f"%%tpu_train\n{train}"), {})
    [change] = script.missing_changes
    assert (change.name, change.cell, change.reader) == ("model", "cell [2]", reader)
    assert str(change).startswith(f"{reader} reads `model` as it is above cell [2], ")


NOT_TOLD = {
    "nobody reads it": ([], "print(items)"),
    "it is made anew": (["model = {}"], "print(model)"),
    "it is made anew by the train cell": ([], "model = {}\nprint(model)"),
    "a function has its own": (["def f(model):\n    return model"], "f(1)"),
    "a function makes it": (["def f():\n    model = 1\n    return model"], "f()"),
}


@pytest.mark.parametrize(("cells", "train"), NOT_TOLD.values(), ids=NOT_TOLD)
def test_a_change_that_does_not_matter(cells: list[str], train: str) -> None:
    assert not convert(notebook(MADE, NOT_RUN, *cells, f"%%tpu_train\n{train}"), {}).missing_changes


def test_a_name_that_the_run_has_not_got_above() -> None:
    script = convert(notebook(NOT_RUN, "model = 1", "%%tpu_train\nprint(model)"), {})
    assert not script.missing_changes
