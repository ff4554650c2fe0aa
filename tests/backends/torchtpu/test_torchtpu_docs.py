"""The code blocks of the documentation with the info string `python torchtpu` are run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from nbclient import NotebookClient

from tests.test_docs import ROOT, SCRIPT, blocks, notebook_of

MARK = "python torchtpu"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    if blocks(str(path.relative_to(ROOT)), MARK)
)
AS_ONE_PROCESS = """
import runpy
from tpunb.backends.torchtpu.rehearsal.rehearsed_device import install
install()
from tpunb.backends.torchtpu.rehearsal.tpu_dist import install_process_groups
install_process_groups()
runpy.run_path("train.py", run_name="__main__")
"""
pytestmark = [pytest.mark.usefixtures("starts_processes"), pytest.mark.timeout(600)]


def test_pages_about_torchtpu_are_run() -> None:
    assert {"docs/torchtpu.md", "docs/coming_from.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_for_torchtpu_are_cells_of_a_notebook_that_runs(page: str, tmp_path: Path) -> None:
    import torch

    both = blocks(page, MARK)
    scripts = [block for block in both if block.startswith(SCRIPT)]
    cells = [block for block in both if not block.startswith(SCRIPT)]
    save = ["# tpu: skip\ntorch.save(weights, 'cells.pt')"] if scripts else []
    notebook = notebook_of([*cells, *save])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for script in scripts:
        run_alone(script, tmp_path)
        alone, on_ranks = torch.load(tmp_path / "weights.pt"), torch.load(tmp_path / "cells.pt")
        assert alone.keys() == on_ranks.keys()
        for name in alone:
            torch.testing.assert_close(on_ranks[name], alone[name], rtol=1e-5, atol=1e-6)


def run_alone(script: str, folder: Path) -> None:
    """Run a script for several ranks as the only one, on a rehearsed device."""
    (folder / "train.py").write_text(script)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    numbers = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    subprocess.run(
        [sys.executable, "-c", AS_ONE_PROCESS],
        cwd=folder,
        env={**os.environ, **numbers},
        check=True,
    )
