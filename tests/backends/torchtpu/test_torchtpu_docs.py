"""The code blocks of the documentation with the info string `python torchtpu` are run."""

from __future__ import annotations

from pathlib import Path

import pytest
from nbclient import NotebookClient

from tests.test_docs import ROOT, blocks, notebook_of

MARK = "python torchtpu"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    if blocks(str(path.relative_to(ROOT)), MARK)
)
pytestmark = [pytest.mark.usefixtures("starts_processes"), pytest.mark.timeout(600)]


def test_pages_about_torchtpu_are_run() -> None:
    assert "docs/torchtpu.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_blocks_for_torchtpu_are_cells_of_a_notebook_that_runs(page: str, tmp_path: Path) -> None:
    notebook = notebook_of(blocks(page, MARK))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
