"""What the user names, and the order of all sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebook.capture.fronts import kernel, program, write
from tpunb.errors import NotebookNotFoundError
from tpunb.notebook.capture import sources
from tpunb.notebook.capture.sources import SOURCES, Kernel, LocatedNotebook
from tpunb.notebook.capture.sources.base import UnavailableError


def find(kernel: Kernel) -> LocatedNotebook | None:
    found, missed = sources.locate_notebook(kernel)
    assert missed == ()
    return found


@pytest.mark.parametrize(
    ("make", "origin"),
    [
        (lambda name: kernel(notebook=name), "%tpu_setup --notebook"),
        (lambda name: kernel(TPUNB_NOTEBOOK=name), "TPUNB_NOTEBOOK"),
    ],
)
def test_what_the_user_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[str], Kernel], origin: str
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    for name in ("in.ipynb", "~/in.ipynb", str(folder / "in.ipynb")):
        assert find(make(name)) == LocatedNotebook(origin, folder / "in.ipynb")
    for name in ("gone.ipynb", "~/gone.ipynb", str(folder)):
        with pytest.raises(NotebookNotFoundError) as caught:
            find(make(name))
        assert (caught.value.path, caught.value.origin) == (name, origin)


@pytest.mark.usefixtures("starts_processes")
def test_the_first_source_that_knows_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    a, b, c = (str(write(folder / f"{name}.ipynb", "a = 1")) for name in "abc")
    with program(folder, "papermill", "in.ipynb", "out.ipynb") as pid:
        environ = {"TPUNB_NOTEBOOK": b, "JPY_SESSION_NAME": c, "JPY_PARENT_PID": pid}
        names: dict[str, object] = {"PAPERMILL_INPUT_PATH": "other.ipynb"}
        origins = [find(kernel(a, ("a = 1",), names, **environ))]
        while environ:  # taking them away one by one
            origins.append(find(kernel(None, ("a = 1",), names, **environ)))
            del environ[next(iter(environ))]
        origins.append(find(kernel(None, ("a = 1",), names)))
        origins.append(find(kernel(None, ("a = 1",))))
    assert [found and f"{found.path.stem}: {found.origin}" for found in origins] == [
        "a: %tpu_setup --notebook",
        "b: TPUNB_NOTEBOOK",
        "c: JPY_SESSION_NAME",
        "in: the command line of papermill",
        "other: PAPERMILL_INPUT_PATH",
        None,
    ]


def test_a_source_that_does_not_answer_is_told_and_the_next_one_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(kernel: Kernel) -> LocatedNotebook | None:
        raise UnavailableError("it said no")

    session = kernel(JPY_SESSION_NAME=str(folder / "in.ipynb"))
    monkeypatch.setattr(sources, "SOURCES", (broken, *SOURCES, broken))
    found = LocatedNotebook("JPY_SESSION_NAME", folder / "in.ipynb")
    assert sources.locate_notebook(session) == (found, ("it said no",))
    assert sources.locate_notebook(kernel()) == (None, ("it said no", "it said no"))
