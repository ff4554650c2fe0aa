"""Capture in real kernels, started by the programs that people start them with."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.blocking.client import BlockingKernelClient
from nbformat import v4

from tests.drivers.kernel import PATIENCE
from tests.notebook.capture.fronts import (
    LOAD,
    TRAIN,
    code,
    environ,
    sources,
    started,
    write,
    written,
)
from tpunb.errors import NotebookError, NotebookNotFoundError
from tpunb.notebook.capture.capture import capture
from tpunb.notebook.capture.history import History


class Kernel:
    """A kernel that is talked to as JupyterLab talks to it."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self.client = client

    deleted: tuple[str, ...] = ()
    """Cells that were deleted since the last execution, as JupyterLab tells them."""

    def run(self, source: str, id: str | None = None, **options: Any) -> None:
        content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False}
        metadata = {"trusted": True, "deletedCells": [*self.deleted], "recordTiming": False}
        self.deleted = ()
        message = self.client.session.msg(
            "execute_request",
            content | {"user_expressions": {}, "stop_on_error": True} | options,
            metadata=metadata | ({} if id is None else {"cellId": id}),
        )
        self.client.shell_channel.send(message)
        reply = self.client._recv_reply(message["header"]["msg_id"], timeout=PATIENCE)
        assert reply["content"]["status"] == "ok", reply["content"]


@pytest.fixture
def kernel(
    starts_processes: None, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Kernel]:
    path = tmp_path / "lab.ipynb"
    with started(tmp_path, JPY_SESSION_NAME=str(path), JPY_PARENT_PID="1") as client:
        yield Kernel(client)


def test_as_jupyterlab_does(kernel: Kernel, tmp_path: Path) -> None:
    """Ids, unsaved edits, a late %load_ext, and requests of the front end's own."""
    write(
        tmp_path / "lab.ipynb",
        code("import math", id="a"),
        code("rate = 0.25", "parameters", id="b"),
        v4.new_markdown_cell("# Training"),
        code(LOAD, id="c"),
        code("never = 1", id="d"),
        code("def loop(rate): ...", id="e"),
        code(TRAIN, id="t"),
        code("plot()", id="f"),
    )
    kernel.run("import math", "a")
    kernel.run("rate = 0.25", "b")
    kernel.run(LOAD, "c")
    kernel.run("rate = 0.5", "b")  # edited, not saved
    kernel.run("internal = 1", store_history=False)
    kernel.run("internal = 2", silent=True, store_history=False)
    kernel.run("def loop(rate): ...", "e")
    kernel.run("unsaved = 1", "new")
    kernel.run(TRAIN, "t")
    found = written(tmp_path)
    assert [(cell["kind"], cell["source"], cell["number"]) for cell in found["cells"]] == [
        ("code", "import math", 1),
        ("code", "rate = 0.5", 4),
        ("markdown", "# Training", None),
        ("code", LOAD, 3),
        ("code", "def loop(rate): ...", 5),
        ("code", "unsaved = 1", 6),
        ("code", TRAIN, 7),
        ("code", "plot()", None),
    ]
    assert found["train"] == 6
    assert found["cells"][1]["tags"] == ["parameters"]
    assert found["origin"] == "JPY_SESSION_NAME"
    assert found["path"] == str(tmp_path / "lab.ipynb")
    assert found["notes"] == ["never ran in this kernel, so left out: cell [ ] (never = 1)"]

    # The train cell again, in the same kernel: edited, after one above it ran again.
    kernel.run("import math, os", "a")
    kernel.run(f"{TRAIN}\nmore()", "t")
    found = written(tmp_path)
    assert sources(found)[0] == "import math, os"
    assert found["cells"][found["train"]]["source"] == f"{TRAIN}\nmore()"
    assert found["cells"][found["train"]]["number"] == 9

    # A cell is deleted: its effects are in the kernel until the notebook is saved without it.
    kernel.deleted = ("e", "new")
    kernel.run(TRAIN, "t")
    found = written(tmp_path)
    assert "unsaved = 1" in sources(found)
    told = "deleted or moved since the notebook was saved, still part of this run: cells [5], [6]"
    assert told in found["notes"]
    path = write(
        tmp_path / "lab.ipynb",
        code("import math, os", id="a"),
        code("rate = 0.75", id="b"),
        code(LOAD, id="c"),
        code(TRAIN, id="t"),
    )
    later = time.time() + 1
    os.utime(path, (later, later))
    kernel.run(TRAIN, "t")
    found = written(tmp_path)
    assert sources(found) == ["import math, os", "rate = 0.5", LOAD, TRAIN]
    assert [(cell["source"], why) for cell, why in found["left_out"]] == [
        ("def loop(rate): ...", "it was deleted"),
        ("unsaved = 1", "it was deleted"),
    ]
    assert found["notes"] == [
        "ran and deleted since, so left out: cells [5], [6]",
        "cell [4] was edited after it ran; the version you ran is used",
    ]

    # A file that is broken now does not stop anybody.
    (tmp_path / "lab.ipynb").write_text('{"cells": [', encoding="utf-8")
    kernel.run(TRAIN, "t")
    found = written(tmp_path)
    assert found["origin"] == "executed cells"
    assert found["notes"][0].startswith("only the executed cells are used: ")
    assert "not valid JSON" in found["notes"][0]
    assert "unsaved = 1" in sources(found)
    assert found["train"] == sources(found).index(TRAIN)


NOTEBOOK = (
    code("rate = 1", "parameters"),
    v4.new_markdown_cell("# A notebook"),
    code(LOAD),
    code("skipped = 1", "tpu-skip"),
    v4.new_raw_cell("raw"),
    code(TRAIN),
    code("later = 1"),
)
RUNNERS = {
    "papermill": (["papermill", "--cwd", "kernels", "in.ipynb", "out.ipynb"], "papermill"),
    "papermill in place, as a batch run on Kaggle": (
        [sys.executable, "-m", "papermill", "in.ipynb", "in.ipynb"],
        "papermill",
    ),
    "nbconvert of two": (
        ["jupyter-nbconvert", "--to", "html", "--execute", "other.ipynb", "in.ipynb"],
        "nbconvert",
    ),
    "jupyter execute": (["jupyter", "execute", "in.ipynb"], "jupyter execute"),
}


def run(command: list[str], tmp_path: Path) -> None:
    env = environ(tmp_path, PWD=str(tmp_path))
    (tmp_path / "kernels").mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_file_that_the_user_names_must_exist(shell: InteractiveShell, tmp_path: Path) -> None:
    history = History(shell)
    shell.run_cell("a = 1", store_history=True)
    with pytest.raises(NotebookNotFoundError, match=r"gone\.ipynb.*--notebook"):
        capture(history, "b = 2", notebook=str(tmp_path / "gone.ipynb"), environ={})
    with pytest.raises(NotebookNotFoundError, match="TPUNB_NOTEBOOK"):
        capture(history, "b = 2", environ={"TPUNB_NOTEBOOK": str(tmp_path / "gone.ipynb")})
    with pytest.raises(NotebookError, match="no cell"):
        capture(History(InteractiveShell()), environ={})


def test_a_file_that_is_being_saved_is_read_when_it_is_whole(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tpunb.notebook.capture.capture.SETTLED", PATIENCE
    )  # this machine may be busy
    path = write(tmp_path / "nb.ipynb", code("a = 1", "mine"), TRAIN)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[:100], encoding="utf-8")
    history = History(shell)
    shell.run_cell("a = 1", store_history=True)
    saving = threading.Timer(0.2, path.write_text, (text, "utf-8"))
    saving.start()
    found = capture(history, "loop(rate)", notebook=str(path), environ={})
    saving.join()
    assert found.origin == "%tpu_setup --notebook"
    assert found.cells[0].tags == ("mine",)


def test_a_magic_that_code_calls_is_a_cell_of_its_own(shell: InteractiveShell) -> None:
    history = History(shell)
    shell.run_cell("a = 1", store_history=True)
    snapshot = capture(history, "loop()\n", environ={})
    assert [cell.source for cell in snapshot.cells] == ["a = 1", "%%tpu_train\nloop()\n"]
    assert snapshot.train == 1


@pytest.mark.parametrize("head", ["%%tpu_train", "%%time\n%%tpu_train --cores 2", "\n%%tpu_train"])
@pytest.mark.parametrize("body", ["loop()\n", "\n"])
def test_the_running_cell_is_the_train_cell(shell: InteractiveShell, head: str, body: str) -> None:
    history = History(shell)
    snapshots = []
    shell.register_magic_function(
        lambda line, cell: snapshots.append(capture(history, cell, environ={})), "cell", "tpu_train"
    )
    shell.register_magic_function(lambda line, cell: None, "cell", "tpu_debug")
    shell.run_cell("%%tpu_debug\nx", store_history=True)
    source = f"{head}\n{body}"
    shell.run_cell(source, store_history=True)
    (snapshot,) = snapshots
    assert [cell.source for cell in snapshot.cells] == ["%%tpu_debug\nx", source]
