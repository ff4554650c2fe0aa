"""The notebook that is pushed: readable, and complete in itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tpunb.places.kaggle import MOST_SOURCE
from tpunb.places.kaggle_notebook import write_notebook
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.utils.version import __version__

SCRIPT = "# %% cell 1\nprint('{not filled in}')\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "20261123-051425-train")
    run.path.mkdir()
    run.script.write_text(SCRIPT)
    run.write_spec(RunSpec(run.id, "train", 8, "TPU", ".", (), ()))
    (run.path / "given").mkdir()
    (run.path / "given" / "values.pt").write_bytes(b"\x00values")
    (run.path / "notebook.ipynb").write_text("not sent")
    return run


def cells(text: str) -> list[Any]:
    notebook = nbformat.reads(text, 4)
    nbformat.validate(notebook)
    return list(notebook.cells)


def test_kaggle_notebook_is_readable_and_names_no_image(run: RunDir) -> None:
    text = write_notebook(run, "train", {"seconds": 60}, [["kaggle://datasets/me/cats"]])
    about, script, packed, data, last = cells(text)
    assert about.source.startswith("# train\n")
    assert f"tpunb {__version__}" in about.source
    assert script.source == f"%%writefile script.py\n{SCRIPT}"
    assert packed.metadata["_kg_hide-input"] is True
    assert data.source == "kaggle_session.bring('kaggle://datasets/me/cats')"
    assert last.source == "kaggle_session.run()"
    metadata = json.loads(text)["metadata"]
    assert metadata["kernelspec"]["name"] == "python3"
    assert "kaggle" not in metadata
    assert len(text) < 0.8 * MOST_SOURCE


OLDER = """
import tarfile
del tarfile.data_filter  # as before Python 3.10.12 and 3.11.4
_extract = tarfile.TarFile.extractall
tarfile.TarFile.extractall = lambda self, path: _extract(self, path, filter="fully_trusted")
"""


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("python", ["", OLDER])
def test_kaggle_notebook_payload_needs_no_installed_package(
    run: RunDir, tmp_path: Path, python: str
) -> None:
    """Without site-packages, as if nothing was installed: the node's command, and the session."""
    (tmp_path / "helper.py").write_text("X = 1\n")
    files = {"deep/helper.py": tmp_path / "helper.py"}
    _, _, packed, _ = cells(write_notebook(run, "train", {"seconds": 60}, files=files))
    code = f"""{python}{packed.source}
import pathlib, tpunb, tpunb.cli, tpunb.kernel.node, tpunb.worker.supervisor.main
folder = pathlib.Path(sys.path[0])
assert pathlib.Path(tpunb.__file__).parent == folder / "tpunb", tpunb
print(*sorted(str(path.relative_to(folder)) for path in folder.rglob("*")
              if path.is_file() and path.parts[len(folder.parts)] != "tpunb"))
"""
    (tmp_path / "cell.py").write_text(code)
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-I", "-S", str(tmp_path / "cell.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert names == ["files/deep/helper.py", "run/given/values.pt", "run/spec.json", "session.json"]
