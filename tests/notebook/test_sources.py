"""Each way to find the notebook of a kernel, and their order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tpunb.errors import NotebookNotFoundError
from tpunb.notebook.history import Execution
from tpunb.notebook.sources import Found, Kernel
from tpunb.notebook.sources import find as search
from tpunb.notebook.sources.jupyter import SessionName
from tpunb.notebook.sources.runners import CommandLine, PapermillParameters


def find(kernel: Kernel) -> Found | None:
    found, missed = search(kernel)
    assert missed == ()
    return found


def write(path: Path, *cells: str) -> Path:
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells]), path)
    return path


def kernel(
    notebook: str | None = None,
    executed: tuple[str, ...] = (),
    user_ns: dict[str, object] | None = None,
    **environ: str,
) -> Kernel:
    runs = tuple(Execution(source, number) for number, source in enumerate(executed, 1))
    return Kernel(notebook, environ, user_ns or {}, runs)


@contextmanager
def program(folder: Path, *command: str) -> Iterator[str]:
    """A process with this command line; the pid. Programs are found in `folder`."""
    words = [str(folder / command[0]), *command[1:]] if command[0] != "-m" else list(command)
    with subprocess.Popen(
        [sys.executable, *words], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()  # it is that program now
            yield str(process.pid)
        finally:
            process.stdin.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("papermill", "papermill.py", "jupyter-nbconvert", "jupyter", "jupyter-lab"):
        (tmp_path / name).write_text("print(flush=True); input()", encoding="utf-8")
    write(tmp_path / "in.ipynb", "a = 1", "b = 2")
    write(tmp_path / "out.ipynb", "a = 1", "# Parameters\na = 2", "b = 2")
    write(tmp_path / "other.ipynb", "a = 1")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("papermill in.ipynb out.ipynb", "in.ipynb by papermill"),
        ("papermill -p a 2 --cwd . in.ipynb out.ipynb", "in.ipynb by papermill"),
        ("-m papermill in.ipynb out.ipynb", "in.ipynb by papermill"),
        ("jupyter-nbconvert --execute --to notebook in.ipynb", "in.ipynb by nbconvert"),
        ("jupyter-nbconvert --execute other.ipynb in.ipynb", "in.ipynb by nbconvert"),
        ("jupyter nbconvert --execute in", "in.ipynb by nbconvert"),
        ("jupyter execute in.ipynb", "in.ipynb by jupyter execute"),
        ("jupyter execute ./in.ipynb", "in.ipynb by jupyter execute"),
        ("papermill gone.ipynb out2.ipynb", None),
        ("papermill - -", None),
        ("jupyter", None),
        ("jupyter lab in.ipynb", None),
        ("jupyter-lab in.ipynb", None),
    ],
)
def test_command_lines(folder: Path, command: str, found: str | None) -> None:
    with program(folder, *command.split()) as pid:
        executed = ("a = 1\n", "# Parameters\na = 2", "b = 2")
        result = CommandLine().find(kernel(JPY_PARENT_PID=pid, executed=executed))
    if found is None:
        assert result is None
    else:
        name, _, runner = found.partition(" by ")
        assert result == Found(f"the command line of {runner}", folder / name)


def test_a_command_line_whose_notebook_holds_none_of_the_cells(folder: Path) -> None:
    with program(folder, "papermill", "in.ipynb", "out.ipynb") as pid:
        assert CommandLine().find(kernel(JPY_PARENT_PID=pid, executed=("c = 3",))) is None


def test_a_runner_that_has_ended(folder: Path) -> None:
    with program(folder, "papermill", "in.ipynb", "out.ipynb") as pid:
        pass
    assert CommandLine().find(kernel(JPY_PARENT_PID=pid, executed=("a = 1",))) is None
    assert CommandLine().find(kernel(JPY_PARENT_PID="?", executed=("a = 1",))) is None


def test_papermill_parameters_are_relative_to_papermill(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    names: dict[str, object] = {"PAPERMILL_INPUT_PATH": "in.ipynb"}
    with program(folder, "papermill", "in.ipynb", "out.ipynb") as pid:
        monkeypatch.chdir(folder / "elsewhere")
        found = PapermillParameters().find(kernel(user_ns=names, JPY_PARENT_PID=pid))
        assert found == Found("PAPERMILL_INPUT_PATH", folder / "in.ipynb")
    assert PapermillParameters().find(kernel(user_ns=names)) is None
    monkeypatch.chdir(folder)
    names = {"PAPERMILL_INPUT_PATH": "s3://bucket/in.ipynb", "PAPERMILL_OUTPUT_PATH": "out.ipynb"}
    found = PapermillParameters().find(kernel(user_ns=names))
    assert found == Found("PAPERMILL_OUTPUT_PATH", folder / "out.ipynb")
    assert PapermillParameters().find(kernel(user_ns={"PAPERMILL_INPUT_PATH": 3})) is None


def test_session_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = folder / "in.ipynb"
    assert SessionName().find(kernel(JPY_SESSION_NAME=str(path))) == Found("JPY_SESSION_NAME", path)
    for name in ("", "in.ipynb", str(folder), str(folder / "renamed.ipynb")):
        assert SessionName().find(kernel(JPY_SESSION_NAME=name)) is None


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
        assert find(make(name)) == Found(origin, folder / "in.ipynb")
    for name in ("gone.ipynb", "~/gone.ipynb", str(folder)):
        with pytest.raises(NotebookNotFoundError) as caught:
            find(make(name))
        assert (caught.value.path, caught.value.origin) == (name, origin)


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
