"""The code blocks of README and docs are run, in order, as a reader would."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests import option_tables
from tpunb import cli
from tpunb.kernel.options import PARSERS

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "docs/guide.md",
    "docs/rehearsal.md",
    "docs/watching.md",
    "docs/training.md",
    "docs/debugging.md",
]
HOWTO = [
    f"docs/{target}"
    for target in re.findall(r"\]\((howto/\w+\.md)\)", (ROOT / "docs/howto.md").read_text())
]
SCRIPT = "# train.py"
"""The first line of blocks that are a script."""


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def notebook_of(cells: list[str]) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


@pytest.mark.usefixtures("lent")
@pytest.mark.timeout(1200)  # for a whole page
def test_python_blocks_of_the_readme_are_cells_of_a_notebook_that_runs(tmp_path: Path) -> None:
    notebook = run_page("README.md", tmp_path)
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.outputs)
    assert "on 4 cores" in printed
    final = notebook.cells[-1].outputs[0]["data"]["text/plain"]
    assert float(final.splitlines()[-2].split()[-1]) < 0.5  # it has learned


def run_page(page: str, folder: Path) -> nbformat.NotebookNode:
    """Run the Python blocks of a page as cells, and return the notebook with outputs."""
    cells = blocks(page, "python")
    assert cells
    notebook = notebook_of(cells)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def test_python_blocks_are_on_pages_that_are_run() -> None:
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
    elsewhere = {"docs/checkpoints.md"}  # tests/scenarios/test_checkpoint_runs.py
    known = {*PAGES, *HOWTO, "docs/coming_from.md", *elsewhere}
    assert {page for page in pages if blocks(page, "python")} <= known


def test_commands_that_are_not_run_are_ones_that_tpunb_takes() -> None:
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    magics = re.findall(r"^(%%?tpu_\w+)(?: (.*))?$", text, flags=re.MULTILINE)
    parsers = {parser.prog: parser for parser in PARSERS}
    for name, options in magics:
        parsers[name].parse_line(options, {})
    commands = re.findall(r"^(?:\$ | {4})tpunb ((?:.|\\\n)*?)$", text, flags=re.MULTILINE)
    for command in commands:
        cli.make_parser().parse_args(shlex.split(command.partition(" > ")[0], comments=True))
    assert len(magics) > 30
    assert len(commands) > 8


def headings(page: Path) -> set[str]:
    """The names by which links lead to a page's headings, as GitHub and the site make them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in found}


def test_links_lead_to_files_and_headings() -> None:
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        text = page.read_text(encoding="utf-8")
        for target, heading in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", text):
            path = page.parent / target if target else page
            assert path.exists(), f"{page}: {target}"
            assert not heading or heading in headings(path), f"{page}: {target}{heading}"


def test_option_tables_are_those_of_the_parsers() -> None:
    page = option_tables.GUIDE.read_text(encoding="utf-8")
    assert page == option_tables.rewritten(page), f"write them anew: {option_tables.COMMAND}"
