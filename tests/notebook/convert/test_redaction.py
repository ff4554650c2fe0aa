"""Secrets do not go into run folders by way of the notebook."""

from __future__ import annotations

import json

import pytest

from tpunb.notebook.convert.convert import convert
from tpunb.notebook.convert.redaction import NOT_KEPT, redacted_notebook, redacted_snapshot
from tpunb.notebook.models import Cell, LeftOut, Snapshot

SKIPPED = [
    ("# tpu: skip\ntoken = 's3cret'", ()),
    ("token = 's3cret'", ("tpu-skip",)),
    ("token = 's3cret'", ("active-ipynb",)),
]
COMMANDS = [
    "%%tpu_train --env MY_TOKEN=s3cret --cores 2\nx = 1",
    "x = 1\n!git clone https://s3cret@h/a",
    "!curl \\\n  -H 'X-Api-Key: s3cret' u",
    "%%bash\nexport TOKEN=s3cret\ncurl -H 'Authorization: Bearer s3cret' u\nls",
    "# note\n%%time\n  %%sh\nA_KEY=s3cret x",
    '%%file k.json\n{"key": "s3cret"}',
]
PYTHON = ["lr = 1  # at 5% !", "%%time\ntoken = read('TOKEN')"]


@pytest.mark.parametrize(
    ("source", "tags", "kept"),
    [
        *((*each, NOT_KEPT) for each in SKIPPED),
        *((source, (), source.replace("s3cret", "…")) for source in (*COMMANDS, *PYTHON)),
    ],
)
def test_what_is_written_of_a_cell(source: str, tags: tuple[str, ...], kept: str) -> None:
    cell = Cell(0, "code", source, tags=tags)
    left_out = ((cell, LeftOut.FAILED),)
    snapshot = Snapshot((cell,), None, None, "test", left_out=left_out, content={"x": "s3cret"})
    written = redacted_snapshot(snapshot)
    assert written.cells[0].source == kept
    assert written.left_out[0][0].source == kept
    assert written.content is None
    lines = source.splitlines(keepends=True)
    code = {"cell_type": "code", "source": lines, "metadata": {"tags": list(tags)}}
    notebook = {"cells": [code, {"cell_type": "markdown", "source": "# tpu: skip"}]}
    made = json.loads(redacted_notebook(notebook))
    assert "".join(made["cells"][0]["source"]) == kept
    assert (made == notebook) == (kept == source)
    assert made["cells"][1] == notebook["cells"][1]


def test_options_are_in_the_script_without_secrets() -> None:
    cells = (Cell(0, "code", "%%tpu_train --env MY_TOKEN=s3cret --cores 2\nx = 1", 1),)
    text = convert(Snapshot(cells, 0, None, "test")).text
    assert "# magic: %%tpu_train --env MY_TOKEN=… --cores 2\nx = 1\n" in text
    assert "s3cret" not in text
