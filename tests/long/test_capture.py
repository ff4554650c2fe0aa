"""More of tests/notebook/capture/test_capture.py, which takes longer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.notebook.capture.fronts import TRAIN, code, sources, write, written
from tests.notebook.capture.test_capture import NOTEBOOK, RUNNERS, run


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(("command", "runner"), RUNNERS.values(), ids=RUNNERS)
def test_runners_are_found_by_their_command_line(
    command: list[str], runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command[-2:] == ["in.ipynb", "in.ipynb"]:
        monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    write(tmp_path / "in.ipynb", *NOTEBOOK)
    write(tmp_path / "other.ipynb", code("other = 1"))
    run(command, tmp_path)
    found = written(tmp_path)
    assert sources(found) == [cell.source for cell in NOTEBOOK]
    assert [cell["number"] for cell in found["cells"]] == [1, None, 2, 3, None, 4, None]
    assert found["cells"][3]["tags"] == ["tpu-skip"]
    assert found["train"] == 5
    assert found["path"] == str(tmp_path / "in.ipynb")
    assert found["origin"] == f"the command line of {runner}"
    assert found["notes"] == []


@pytest.mark.usefixtures("starts_processes")
def test_papermill_parameters_stay_where_they_ran(tmp_path: Path) -> None:
    write(tmp_path / "in.ipynb", *NOTEBOOK)
    run(["papermill", "in.ipynb", "out.ipynb", "-p", "rate", "3"], tmp_path)
    found = written(tmp_path)
    injected = "# Parameters\nrate = 3"
    assert sources(found) == [NOTEBOOK[0].source, injected, *(c.source for c in NOTEBOOK[1:])]
    assert found["path"] == str(tmp_path / "in.ipynb")

    # Run again from its own output: papermill replaces the cell that it injected before.
    run(["papermill", "out.ipynb", "out2.ipynb", "-p", "rate", "4"], tmp_path)
    found = written(tmp_path)
    assert sources(found)[:2] == ["rate = 1", "# Parameters\nrate = 4"]
    assert found["notes"] == []
    assert found["cells"][1]["tags"] == ["injected-parameters"]
    assert len(found["cells"]) == len(NOTEBOOK) + 1


@pytest.mark.usefixtures("starts_processes")
def test_programs_that_call_papermill_and_nbclient(tmp_path: Path) -> None:
    """Their command line says nothing; the parameters of `--inject-paths` do."""
    write(tmp_path / "in.ipynb", *NOTEBOOK)
    api = "import papermill; papermill.execute_notebook('in.ipynb', 'out.ipynb', {})"
    run([sys.executable, "-c", api.format("{'PAPERMILL_INPUT_PATH': 'in.ipynb'}")], tmp_path)
    found = written(tmp_path)
    assert found["origin"] == "PAPERMILL_INPUT_PATH"
    assert found["cells"][found["train"]]["source"] == TRAIN
    assert "tpu-skip" in [tag for cell in found["cells"] for tag in cell["tags"]]

    run([sys.executable, "-c", api.format("{}")], tmp_path)
    found = written(tmp_path)
    assert found["origin"] == "executed cells"
    assert found["path"] is None
    assert sources(found) == [c.source for c in NOTEBOOK[:6] if c.cell_type == "code"]
    assert "%tpu_setup --notebook" in found["notes"][0]

    api = "import nbclient, nbformat; nbclient.execute(nbformat.read('in.ipynb', 4))"
    run([sys.executable, "-c", api], tmp_path)
    assert sources(written(tmp_path)) == sources(found)
