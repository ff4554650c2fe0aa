"""Notebook files of all kinds, and those that are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tpunb.errors import NotebookError, NotebookNotFoundError
from tpunb.notebook.files import (
    cell_magics,
    cells_from_json,
    load_cells,
    load_notebook,
    load_snapshot,
)
from tpunb.notebook.models import Cell

CODE = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
CELLS = [
    {**CODE, "id": "a", "source": ["x = 1\n", "y = 2"], "execution_count": 3},
    {"cell_type": "markdown", "metadata": {}, "source": "# Title", "id": "m"},
    {**CODE, "id": "t1", "source": "%%tpu_train\nfirst()", "execution_count": 5},
    {"cell_type": "raw", "metadata": {}, "source": "raw", "id": "r"},
    {**CODE, "id": "b", "source": "z = 3", "metadata": {"tags": ["tpu-skip"]}},
    {**CODE, "id": "7", "source": "%%time\n%%tpu_train\nlast()", "execution_count": 2},
    {**CODE, "id": "c", "source": "print()", "execution_count": 3},
]


def write(path: Path, cells: list[dict[str, Any]], minor: int = 5) -> Path:
    nb = {"nbformat": 4, "nbformat_minor": minor, "metadata": {}, "cells": cells}
    path.write_text(json.dumps(nb), encoding="utf-8")
    return path


def test_cells_of_a_notebook(tmp_path: Path) -> None:
    assert load_cells(write(tmp_path / "nb.ipynb", CELLS)) == (
        Cell(0, "code", "x = 1\ny = 2", 3, "a"),
        Cell(1, "markdown", "# Title", None, "m"),
        Cell(2, "code", "%%tpu_train\nfirst()", 5, "t1"),
        Cell(3, "raw", "raw", None, "r"),
        Cell(4, "code", "z = 3", None, "b", ("tpu-skip",)),
        Cell(5, "code", "%%time\n%%tpu_train\nlast()", 2, "7"),
        Cell(6, "code", "print()", 3, "c"),
    )


def test_a_byte_order_mark_and_missing_ids_do_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path / "nb.ipynb", [{**CODE, "source": "x = 'ä'"}])
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert load_cells(path) == (Cell(0, "code", "x = 'ä'"),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not valid JSON"),
        ("[" * 200_000, "not valid JSON"),
        ('{"cells": [', r"not valid JSON \(.*line 1 column"),
        ("[]", "not a notebook"),
        ('{"nbformat": 4, "cells": [3]}', "not a notebook"),
        ('{"nbformat": 99, "cells": []}', "nbformat version 99"),
        ('{"nbformat": 4, "metadata": {}, "cells": [{"cell_type": "code"}]}', "not a notebook"),
        (
            '{"nbformat": 4, "metadata": {}, "cells": [{"cell_type": "x", "metadata": {}, '
            '"source": ""}]}',
            "cell 1 has the unknown type 'x'",
        ),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_files_that_are_no_notebooks(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = tmp_path / "bad.ipynb"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(NotebookError, match=rf"bad\.ipynb.*{words}"):
        load_cells(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotebookNotFoundError, match=r"gone\.ipynb"):
        load_snapshot(tmp_path / "gone.ipynb")
    with pytest.raises(NotebookError, match=r"cannot read .* directory"):
        load_snapshot(tmp_path)


@pytest.mark.parametrize(
    ("name", "train"),
    [
        (None, 5),  # the last %%tpu_train cell
        ("a", 0),  # an id
        ("7", 5),  # an id that looks like a number
        ("5", 2),  # the number shown beside it
        ("1", 0),  # nothing shows 1: the first code cell
        ("4", 5),  # … the fourth
    ],
)
def test_the_train_cell(tmp_path: Path, name: str | None, train: int) -> None:
    snapshot = load_snapshot(write(tmp_path / "nb.ipynb", CELLS), name)
    assert snapshot.train == train
    assert snapshot.path == str(tmp_path / "nb.ipynb")
    assert len(snapshot.cells) == len(CELLS)


def test_a_notebook_without_a_train_cell(tmp_path: Path) -> None:
    assert load_snapshot(write(tmp_path / "nb.ipynb", CELLS[:2])).train is None
    assert load_snapshot(write(tmp_path / "nb.ipynb", [])).cells == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("m", r"no code cell 'm'.*\[3\], \[5\], 3, \[2\], \[3\]"),  # markdown is not to be run
        ("99", "no code cell '99'"),
        ("-1", "no code cell '-1'"),
        ("3", r"2 cells .* show the number \[3\].*by its id: a, c"),
    ],
)
def test_cells_that_cannot_be_named_so(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(NotebookError, match=words):
        load_snapshot(write(tmp_path / "nb.ipynb", CELLS), name)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = 1\n%%time", []),
        ("%%tpu_train --cores 2\nx", ["tpu_train"]),
        ("\n# note\n%%time\n%%capture out\n\n%%tpu_train", ["time", "capture", "tpu_train"]),
        ("# a line separator\u2028%%time\nx", []),
        ("%%time\r\n%%capture\r\nx", ["time", "capture"]),
    ],
)
def test_cell_magics(source: str, names: list[str]) -> None:
    assert cell_magics(source) == names


def test_sources_in_lines_and_ids_in_metadata_as_colab_writes_them(tmp_path: Path) -> None:
    cell = {**CODE, "source": ["x = 1\n", "y = 2\n", "z"], "metadata": {"id": "Xy", "tags": ["a"]}}
    expected = (Cell(0, "code", "x = 1\ny = 2\nz", None, "Xy", ("a",)),)
    assert load_cells(write(tmp_path / "nb.ipynb", [cell], minor=0)) == expected
    notebook = {"nbformat": 4, "nbformat_minor": 0, "metadata": {}, "cells": [cell]}
    assert cells_from_json(notebook, "Colab") == expected
    with pytest.raises(NotebookError, match=r"^what Colab sent is JSON but not a notebook"):
        cells_from_json({"cells": [{}]}, "what Colab sent")
    with pytest.raises(NotebookError, match="source of cell 1 is not text"):
        load_cells(write(tmp_path / "nb.ipynb", [{**CODE, "source": 3}]))


@pytest.mark.usefixtures("starts_processes")
def test_outputs_are_not_looked_at(tmp_path: Path) -> None:
    """Neither large ones nor such as no front end would write; nbformat is not even loaded."""
    outputs = [{"output_type": "display_data", "data": {"image/png": "A" * 1_000_000}}, 3, None]
    path = write(tmp_path / "nb.ipynb", [{**CODE, "source": "x", "id": "a", "outputs": outputs}])
    program = (
        "import sys; from tpunb.notebook.files import load_cells;"
        "print(load_cells(sys.argv[1])[0].source);"
        "print(sorted({'nbformat', 'jsonschema', 'http.client'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["x", "[]"]


def test_a_file_is_read_once_until_it_changes_and_without_its_outputs(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    shown = {"output_type": "stream", "name": "stdout", "text": "x" * 1_000_000}

    def save(source: str, time: float | None = None) -> None:
        other = write(tmp_path / "other.ipynb", [{**CODE, "source": source, "outputs": [shown]}])
        os.utime(other, None if time is None else (time, time))
        os.replace(other, path)

    for source in ("a = 1", "a = 2", "a = 3"):  # within a second
        save(source)
        assert load_cells(path)[0].source == source
    for source in ("a = 4", "a = 5"):  # of one size, and of one time
        save(source, 1e9)
        assert load_cells(path)[0].source == source
        assert load_notebook(path) is load_notebook(path)
    assert load_notebook(path)["cells"][0]["outputs"] == []
    path.unlink()
    with pytest.raises(NotebookNotFoundError):
        load_cells(path)
