"""VS Code: a window that sends what VS Code sends, to a real kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.front_ends.vscode import Window
from tests.notebook.capture.fronts import LOAD, TRAIN, code, sources, started, write, written


@pytest.fixture
def window(starts_processes: None, tmp_path: Path) -> Iterator[Window]:
    with started(tmp_path) as client:
        yield Window(client, tmp_path / "my notebook.ipynb")


def run(window: Window, source: str, cell: int) -> None:
    reply = window.execute(source, cell)
    assert reply["status"] == "ok", reply


def test_the_file_is_known_from_the_start_and_by_the_cells_after_a_rename(
    window: Window, tmp_path: Path
) -> None:
    write(window.notebook, LOAD, code("rate = 1", "parameters", id="a"), "never = 1", TRAIN)
    window.start()
    run(window, LOAD, 0)
    run(window, "rate = 1", 1)
    run(window, "rate = 2", 1)  # edited, not saved
    run(window, TRAIN, 3)
    found = written(tmp_path)
    assert sources(found) == [LOAD, "rate = 2", TRAIN]
    assert found["cells"][1]["tags"] == ["parameters"]
    assert (found["path"], found["origin"]) == (str(window.notebook), "VS Code")
    assert found["notes"] == ["never ran in this kernel, so left out: cell [ ] (never = 1)"]

    window.notebook = window.notebook.rename(tmp_path / "100% ä#1.ipynb")
    run(window, TRAIN, 3)
    assert written(tmp_path)["path"] == str(window.notebook)


def test_a_kernel_that_was_there_before_and_one_without_cells_of_vscode(
    window: Window, tmp_path: Path
) -> None:
    write(window.notebook, LOAD, TRAIN)
    run(window, LOAD, 0)  # no start-up code in a kernel that VS Code did not start
    run(window, TRAIN, 1)
    assert written(tmp_path)["origin"] == "VS Code"

    window.notebook = Path("Untitled-1.ipynb")
    run(window, "a = 1", 2)
    run(window, TRAIN, 1)
    found = written(tmp_path)
    assert found["origin"] == "executed cells"
    assert found["path"] is None
