"""The processes of a sweep's trials."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_ownership import as_another, as_root, shared
from tpunb.kernel import papermill, trials
from tpunb.notebook.errors import NotebookError
from tpunb.notebook.files import load_cells

__all__ = ["shared"]


def reply(folder: Path, log: Path) -> dict[str, Any]:
    """The end of a trial of the notebook in this folder, in a process of its own."""
    for part in (folder, folder / "trials"):
        part.mkdir(mode=0o700, exist_ok=True)
    names = "ran cores on trials".split()
    order: dict[str, Any] = {
        **dict.fromkeys(names, "x"),
        "notebook": str(folder / "nb.ipynb"),
        "output": str(folder / "trials" / "0000.ipynb"),
        "parameters": {},
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        lent: Any = SimpleNamespace(folder=folder)
        trials._become_papermill(order, theirs, parent, lent)
    theirs.close()
    with ours:
        said: dict[str, Any] = json.loads(ours.recv(1 << 20) or "{}")
    os.waitpid(pid, 0)
    return said


@pytest.mark.usefixtures("starts_processes")
def test_papermill_error_fails_the_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error such as a full disk, with a message of any length."""

    def execute(*arguments: Any, **options: Any) -> None:
        raise OSError("no space left" + 1_000_000 * " on device")

    monkeypatch.setattr(papermill, "execute", execute)
    said = reply(tmp_path / "sweep", tmp_path / "log")
    assert said.get("failed")
    assert said["error"].startswith("OSError: no space left on device")


@pytest.mark.usefixtures("starts_processes")
@as_root
def test_a_trial_does_not_open_the_notebook_of_another_user(shared: Path) -> None:
    """He who can rename a folder above has laid his own in its place after the sweep began."""
    above = shared / "above"
    folder = above / "sweep"
    assert as_another(lambda: (above.mkdir(), folder.mkdir(), (folder / "trials").mkdir()))
    said = reply(folder, shared / "log")
    assert said == {
        "failed": True,
        "error": f"{folder} is another user's (nobody): only they can follow or stop it",
    }
    assert list((folder / "trials").iterdir()) == []
    assert as_another(lambda: (folder / "nb.ipynb").write_text('{"cells": []}'))
    assert load_cells(folder / "nb.ipynb") == ()
    with pytest.raises(NotebookError, match="another user's file"):  # the trial's kernel
        load_cells(folder / "nb.ipynb", own=True)


@pytest.mark.usefixtures("starts_processes")
def test_a_trial_keeps_to_its_folder_when_another_one_is_put_in_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between the check and papermill's first look at the notebook, or before it writes it."""
    folder = tmp_path / "sweep"

    def execute(notebook: Path, output: Path, *rest: Any, **options: Any) -> None:
        folder.rename(tmp_path / "away")
        (folder / "trials").mkdir(parents=True)
        (folder / "nb.ipynb").write_text("laid")
        (folder / "trials" / "0000.ipynb").symlink_to(tmp_path / "victim")
        output.write_text(json.dumps({"cells": [], "read": notebook.read_text()}))

    monkeypatch.setattr(papermill, "execute", execute)
    folder.mkdir(mode=0o700)
    (folder / "nb.ipynb").write_text("own")
    assert not reply(folder, tmp_path / "log")["failed"]
    assert json.loads((tmp_path / "away/trials/0000.ipynb").read_text())["read"] == "own"
    assert not (tmp_path / "victim").exists()
