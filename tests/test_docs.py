"""The code blocks of README and docs are run, in order, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests import option_tables

pytestmark = pytest.mark.usefixtures("lent")

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "docs/guide.md",
    "docs/rehearsal.md",
    "docs/watching.md",
    "docs/training.md",
    "docs/debugging.md",
    "docs/sweeps.md",
]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def notebook_of(cells: list[str]) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


@pytest.mark.slow
@pytest.mark.timeout(1200)  # for a whole page
@pytest.mark.parametrize(
    "page",
    [*PAGES[:2], *(pytest.param(page, marks=pytest.mark.long) for page in PAGES[2:])],
)
def test_python_blocks_are_cells_of_a_notebook_that_runs(page: str, tmp_path: Path) -> None:
    cells = blocks(page, "python")
    assert cells
    notebook = notebook_of(cells)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.outputs)
    if page == "README.md":
        assert "on 4 cores" in printed
        final = notebook.cells[-1].outputs[0]["data"]["text/plain"]
        assert float(final.splitlines()[-2].split()[-1]) < 0.5  # it has learned


@pytest.mark.long
@pytest.mark.timeout(1200)  # for all commands
def test_bash_blocks_run(tmp_path: Path) -> None:
    train = "%%tpu_train --cores {cores}\nprint('epochs', epochs)"
    notebook = notebook_of(["cores, epochs = 1, 1", "%load_ext tpunb", train])
    notebook.cells[0].metadata.tags = ["parameters"]
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    nbformat.write(notebook_of(["import torch_xla.core.xla_model as xm"]), tmp_path / "old.ipynb")
    (tmp_path / "run.log").write_text("OSError: [Errno 28] No space left on device\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    commands = [
        line
        for page in [*PAGES, "docs/setup.md"]
        for block in blocks(page, "bash")
        for line in block.splitlines()
    ]
    assert "make demo" in commands  # what CI and people run; too long for this test
    for command in commands:
        if command.startswith("tpunb "):
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


def test_links_lead_to_files() -> None:
    for page in [
        *PAGES,
        *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
        "CONTRIBUTING.md",
    ]:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_option_tables_are_those_of_the_parsers() -> None:
    page = option_tables.GUIDE.read_text(encoding="utf-8")
    assert page == option_tables.rewritten(page), f"write them anew: {option_tables.COMMAND}"
