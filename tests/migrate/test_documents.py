"""Files keep every byte that is not part of a changed source."""

from __future__ import annotations

import json

import pytest

from tests.migrate.notebooks import notebook
from tpunb.errors import NotebookError
from tpunb.migrate import migrate, migrate_text

OLD = "import torch_xla\nimport torch_xla.core.xla_model as xm\nxm.save(xm.xla_device())  # é"
NEW = OLD.replace("xm.xla_device", "torch_xla.device")

STYLES = {
    "as Jupyter writes it": {"indent": 1, "ensure_ascii": False},
    "indented by two, sorted": {"indent": 2, "sort_keys": True},
    "with tabs": {"indent": "\t", "ensure_ascii": False},
    "in one line": {"indent": None},
    "without any space": {"indent": None, "separators": (",", ":")},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("lists", [True, False])
def test_only_the_text_of_a_changed_source_differs(style: str, end: str, lists: bool) -> None:
    given = notebook("markdown: # É", OLD, "print('\\u00e9')")
    given["metadata"] = {"z": 1.50, "a": [1, {"cells": [], "source": "xm.xla_device"}]}
    for cell in given["cells"]:
        if lists:
            cell["source"] = cell["source"].splitlines(keepends=True)
    text = json.dumps(given, **STYLES[style]) + end  # type: ignore[arg-type]
    text = text.replace("1.5", "1.50")
    made = migrate_text(text)
    assert made.text == text.replace("xm.xla_device())", "torch_xla.device())")
    assert json.loads(made.text) == made.migration.notebook
    assert migrate_text(made.text).text == made.text


def test_a_new_cell_is_indented_as_the_others() -> None:
    start = "import torch_xla\ntorch_xla.launch(f)"
    given = notebook("markdown: # Title", start)
    text = json.dumps(given, indent=1, sort_keys=True) + "\n"
    made = migrate_text(text, train=True)
    assert made.text == json.dumps(made.migration.notebook, indent=1, sort_keys=True) + "\n"
    assert [cell["source"] for cell in json.loads(made.text)["cells"]] == [
        "# Title",
        "%load_ext tpunb",
        f"%%tpu_train\n{start}",
    ]
    assert "--- a new cell\n+++ a new cell\n" in made.diff
    assert "--- cell [1]\n" in made.diff


def test_report_and_diff_are_those_of_the_migration() -> None:
    made = migrate_text(json.dumps(notebook(OLD)))
    assert made.report == migrate(notebook(OLD)).report()
    assert made.diff == migrate(notebook(OLD)).diff()
    assert NEW.splitlines()[-1] in made.diff


@pytest.mark.parametrize(("text", "words"), [("{", "not even JSON"), ("[]", "no JSON object")])
def test_what_is_no_notebook_is_refused(text: str, words: str) -> None:
    with pytest.raises(NotebookError, match=words):
        migrate_text(text)
