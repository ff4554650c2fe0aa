"""More of tests/test_docs.py, which takes longer."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from tests.test_docs import HOWTO, PAGES, SCRIPT, blocks, notebook_of, run_page


@pytest.mark.usefixtures("lent")
@pytest.mark.timeout(1200)  # for a whole page
@pytest.mark.parametrize("page", PAGES[1:])
def test_python_blocks_are_cells_of_a_notebook_that_runs(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.usefixtures("lent")
@pytest.mark.timeout(1200)  # for all pages
def test_python_blocks_of_all_how_to_pages_run_in_one_notebook(tmp_path: Path) -> None:
    cells = ["%load_ext tpunb", *(cell for page in HOWTO for cell in blocks(page, "python"))]
    notebook = notebook_of(cells)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    ends = [
        out["data"]["text/plain"]
        for cell in notebook.cells
        if cell.source.startswith("%%tpu_train")
        for out in cell.outputs
        if out.output_type == "execute_result"
    ]
    assert len(ends) == 4
    [unequal] = [end for end in ends if not end.startswith("RunResult succeeded")]
    assert "rank" in unequal  # the page on rehearsals shows what a TPU would hang in


@pytest.mark.usefixtures("lent")
def test_the_script_and_the_cells_side_by_side_train_to_the_same_weights(tmp_path: Path) -> None:
    script, *cells = blocks("docs/coming_from.md", "python")
    assert script.startswith(SCRIPT)
    (tmp_path / "train.py").write_text(script)
    env = {**os.environ, "PJRT_DEVICE": "CPU"}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, check=True)

    notebook = notebook_of([*cells, "torch.save(weights, 'cells.pt')"])
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()

    expected, in_cells = torch.load(tmp_path / "weights.pt"), torch.load(tmp_path / "cells.pt")
    assert in_cells.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(in_cells[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("lent")
@pytest.mark.timeout(1200)  # for all commands
def test_bash_blocks_run(tmp_path: Path) -> None:
    train = "%%tpu_train --cores {cores}\nprint('epochs', epochs)"
    notebook = notebook_of(["cores, epochs = 1, 1", "%load_ext tpunb", train])
    notebook.cells[0].metadata.tags = ["parameters"]
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    for cell in (train_cell := nbformat.from_dict(notebook)).cells[:1]:
        cell.source += "; lr = 1"
    nbformat.write(train_cell, tmp_path / "train.ipynb")
    (tmp_path / "run.log").write_text("OSError: [Errno 28] No space left on device\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    commands = [
        line
        for page in [*PAGES, "docs/setup.md", *HOWTO]
        for block in blocks(page, "bash")
        for line in block.splitlines()
    ]
    assert "make demo" in commands  # what CI and people run; too long for this test
    once = {tuple(shlex.split(command, comments=True)): command for command in commands}
    for command in once.values():
        if command.startswith(("tpunb ", "for ")):
            done = subprocess.run(
                ["bash", "-c", command.replace("RUN", "notebook")],
                cwd=tmp_path,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "notebook.py").exists()
