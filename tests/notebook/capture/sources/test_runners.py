"""Runners of whole notebooks, known by their command lines and by papermill's parameters.

The real programs are in `tests/notebook/capture/test_capture.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.capture.fronts import kernel, program
from tpunb.notebook.capture.sources import LocatedNotebook
from tpunb.notebook.capture.sources.runners import from_command_line, from_parameters

pytestmark = pytest.mark.usefixtures("starts_processes")


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("papermill in.ipynb out.ipynb", "in.ipynb by papermill"),
        ("papermill -p a 2 --cwd kernels in.ipynb out.ipynb", "in.ipynb by papermill"),
        ("-m papermill in.ipynb out.ipynb", "in.ipynb by papermill"),
        ("jupyter-nbconvert --execute --to notebook in.ipynb", "in.ipynb by nbconvert"),
        ("jupyter-nbconvert --execute other.ipynb in.ipynb", "in.ipynb by nbconvert"),
        ("jupyter nbconvert --execute in", "in.ipynb by nbconvert"),
        ("jupyter execute in.ipynb", "in.ipynb by jupyter execute"),
        ("papermill gone.ipynb out2.ipynb", None),
        ("jupyter", None),
        ("jupyter-lab in.ipynb", None),
    ],
)
def test_command_lines(folder: Path, command: str, found: str | None) -> None:
    with program(folder, *command.split()) as pid:
        executed = ("a = 1\n", "# Parameters\na = 2", "b = 2")
        result = from_command_line(kernel(JPY_PARENT_PID=pid, executed=executed))
    if found is None:
        assert result is None
    else:
        name, _, runner = found.partition(" by ")
        assert result == LocatedNotebook(f"the command line of {runner}", folder / name)


def test_a_command_line_whose_notebook_holds_none_of_the_cells(folder: Path) -> None:
    with program(folder, "papermill", "in.ipynb", "out.ipynb") as pid:
        assert from_command_line(kernel(JPY_PARENT_PID=pid, executed=("c = 3",))) is None


def test_a_runner_that_has_ended(folder: Path) -> None:
    with program(folder, "papermill", "in.ipynb", "out.ipynb") as pid:
        pass
    assert from_command_line(kernel(JPY_PARENT_PID=pid, executed=("a = 1",))) is None
    assert from_command_line(kernel(JPY_PARENT_PID="?", executed=("a = 1",))) is None


def test_papermill_parameters_are_relative_to_papermill(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    names: dict[str, object] = {"PAPERMILL_INPUT_PATH": "in.ipynb"}
    with program(folder, "papermill", "in.ipynb", "out.ipynb") as pid:
        monkeypatch.chdir(folder / "elsewhere")
        found = from_parameters(kernel(user_ns=names, JPY_PARENT_PID=pid))
        assert found == LocatedNotebook("PAPERMILL_INPUT_PATH", folder / "in.ipynb")
    assert from_parameters(kernel(user_ns=names)) is None
    monkeypatch.chdir(folder)
    names = {"PAPERMILL_INPUT_PATH": "s3://bucket/in.ipynb", "PAPERMILL_OUTPUT_PATH": "out.ipynb"}
    found = from_parameters(kernel(user_ns=names))
    assert found == LocatedNotebook("PAPERMILL_OUTPUT_PATH", folder / "out.ipynb")
    assert from_parameters(kernel(user_ns={"PAPERMILL_INPUT_PATH": 3})) is None
