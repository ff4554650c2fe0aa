"""Capture the notebook at the moment its train cell runs."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tpunb.notebook.capture import sources
from tpunb.notebook.capture.history import Execution, History
from tpunb.notebook.capture.overlay import overlay
from tpunb.notebook.capture.sources import LocatedNotebook
from tpunb.notebook.errors import NotebookError
from tpunb.notebook.files import cell_magics, cells_from_json, load_cells, without_outputs
from tpunb.notebook.models import Cell, Snapshot

SETTLED = 1.0
"""Seconds without a write after which a file counts as saved."""


def capture(
    history: History,
    train_source: str | None = None,
    *,
    notebook: str | None = None,
    user_ns: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Snapshot:
    """Return the current notebook with the executed texts, for the train cell that is running.

    While its magic runs, the train cell is the last execution in `history`. `train_source`, the
    body passed to the magic, is used to verify this: a cell that called the magic from code is
    not the train cell itself. `notebook` is the path the user gave. `user_ns` and `environ`
    default to those of the shell and of this process.

    The document comes from the first of `tpunb.notebook.capture.sources.SOURCES` that knows it:
    a file, or JSON sent by a front end. If there is no document, or if it cannot be read (a note
    reports this), the executed cells alone are the notebook, without those that failed.

    The executions are laid over the document. A cell is identified by the id that the front end
    sends with it or, if there is no id, by equal text, in order:

    - A cell that ran has the text and the number of its last execution, at its position in the
      document, however often it ran. A note names cells whose text in the document differs.
    - A code cell above the train cell that never ran in this kernel is left out, with a note.
      Cells below the train cell stay, but they are not part of a run.
    - A cell that ran and is not in the document (unsaved, or injected by papermill) is placed
      after the cell that ran before it; so is the train cell itself.
    - A cell that ran and was deleted is part of the run, because its effects are in the kernel,
      until the document shows that it is gone: the document was saved, or sent, after the cell
      ran, contains ids, and does not contain this id. Then the cell is left out, with a note.
    - An execution without an id whose text is not in the document belongs to an edited cell if a
      similar cell at its position has not run. If a user executes the cells one by one and a
      similar cell ran later, the execution is an older version of that cell and is left out;
      so is an execution that failed.
    - Tags, markdown and raw cells come from the document.

    Raises NotebookNotFoundError if the user named a file that does not exist, and
    NotebookError if nothing was executed.
    """
    executed = history.executions()
    if train_source is not None and not (executed and _is_train(executed[-1], train_source)):
        # The magic was called by code, or by a front end that keeps no history of it.
        source, cwd = f"%%tpu_train\n{train_source}", os.getcwd()
        executed += (Execution(source, None, time=time.time(), cwd=cwd),)
    if not executed:
        raise NotebookError("no cell has been executed in this kernel")
    located, missed = sources.locate_notebook(
        sources.Kernel(
            notebook,
            os.environ if environ is None else environ,
            history.shell.user_ns if user_ns is None else user_ns,
            executed,
            history.shell,
            _connection_file(),
        )
    )
    if located is not None:
        try:
            laid = _laid(located, executed, history.deleted())
        except NotebookError as error:
            missed = (*missed, str(error))
        else:
            return replace(laid, notes=(*missed, *laid.notes))
    laid = overlay((), executed)
    if missed:
        note = f"only the executed cells are used: {'; '.join(missed)}"
    else:
        note = (
            "no notebook file was found, so the tags of cells are not known: "
            "name the file with `%tpu_setup --notebook PATH`"
        )
    if located is not None:
        laid = replace(laid, path=_path(located), name=located.name)
    return replace(laid, notes=(note, *laid.notes))


def _laid(
    located: LocatedNotebook, executed: Sequence[Execution], deleted: Mapping[str, float]
) -> Snapshot:
    """Lay the executions over a located notebook."""
    if located.path is not None:
        (cells, saved), content = _read(located.path), None
    else:
        cells, saved = cells_from_json(located.content, f"what {located.origin} sent"), math.inf
        content = without_outputs(located.content or {})
    laid = overlay(cells, executed, saved=saved, deleted=deleted)
    return replace(
        laid, path=_path(located), origin=located.origin, name=located.name, content=content
    )


def _read(path: Path) -> tuple[tuple[Cell, ...], float]:
    """Return the cells of a file and the time it was saved.

    Servers overwrite a notebook in place, so a notebook that is being saved is incomplete for a
    moment: it is read again until nothing has been written for a while.
    """
    deadline = time.monotonic() + SETTLED
    while True:
        try:
            saved = path.stat().st_mtime
        except OSError as error:
            raise NotebookError(f"cannot read {path}: {error.strerror}") from error
        try:
            return load_cells(path), saved
        except NotebookError:
            if time.time() - saved > SETTLED or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _path(located: LocatedNotebook) -> str | None:
    return None if located.path is None else str(located.path)


def _connection_file() -> str | None:
    """The absolute path of this kernel's connection file; None if this is not a kernel."""
    if "ipykernel.kernelapp" not in sys.modules:
        return None
    from ipykernel.connect import get_connection_file

    try:
        return os.path.abspath(get_connection_file())
    except (RuntimeError, OSError):  # another program's kernel, or the file was removed
        return None


def _is_train(run: Execution, body: str) -> bool:
    """True if an execution is that of a train cell with this body, whatever is above the body."""
    lines = [line.strip() for line in run.source.strip().splitlines()]
    wanted = [line.strip() for line in body.strip().splitlines()]
    return "tpu_train" in cell_magics(run.source) and lines[len(lines) - len(wanted) :] == wanted
