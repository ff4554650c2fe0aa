"""The notebook at the moment its train cell runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from tpunb.errors import NotebookError
from tpunb.models import Snapshot
from tpunb.notebook import sources
from tpunb.notebook.files import cell_magics, load
from tpunb.notebook.history import Execution, History
from tpunb.notebook.overlay import overlay


def capture(
    history: History,
    train_source: str | None = None,
    *,
    notebook: str | None = None,
    user_ns: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Snapshot:
    """The current notebook, with what was executed, cut for the train cell that is running.

    While its magic runs, the train cell is the last execution in `history`. `train_source`,
    the body that the magic gets, is there to check that: a cell that called the magic from
    code is not the train cell itself. `notebook` is the path the user gave. `user_ns` and
    `environ` are those of the shell and of this process, unless given.

    The document comes from the first of `tpunb.notebook.sources.SOURCES` that knows it:
    `notebook`, TPUNB_NOTEBOOK, JPY_SESSION_NAME, the command line of the program that started
    the kernel, papermill's injected paths. Without one, and where it cannot be read (a note
    says so), the executed cells alone are the notebook, those that failed left out.

    What was executed is laid over it. A cell is known by the id that the front end sends
    with it, and where there is none by equal text, in order:

    - A cell that ran has the text and the number of its last execution, at its place in the
      document, however often it ran. A note names cells whose text in the file differs.
    - A code cell above the train cell that never ran in this kernel is left out, with a note.
      Cells below the train cell stay, but they are not part of a run.
    - A cell that ran and is not in the file (unsaved, or injected by papermill) stands after
      the cell that ran before it; so does the train cell itself.
    - An execution without an id whose text is not in the file is of an edited cell if an
      alike one at its place has not run. If it ran before `%load_ext tpunb`, and an alike
      cell ran later, it is an older version of that one and is left out.
    - Tags, markdown and raw cells come from the file.

    Raises NotebookNotFoundError if the user named a file that does not exist, and
    NotebookError if nothing was executed.
    """
    executed = history.executions()
    if train_source is not None and not (executed and _is_train(executed[-1], train_source)):
        # The magic was called by code, or by a front end that keeps no history of it.
        executed += (Execution(f"%%tpu_train\n{train_source}", None),)
    if not executed:
        raise NotebookError("no cell has been executed in this kernel")
    found = sources.find(
        sources.Kernel(
            notebook,
            os.environ if environ is None else environ,
            history.shell.user_ns if user_ns is None else user_ns,
            tuple(run.source for run in executed),
        )
    )
    note = (
        "no notebook file was found, so tags are not known: "
        "name it with `%tpu_setup --notebook PATH`"
    )
    if found is not None:
        try:
            laid = overlay(load(found.path), executed)
            return replace(laid, path=str(found.path), origin=found.origin)
        except NotebookError as error:
            note = f"the executed cells alone are used: {error}"
    laid = overlay((), executed)
    path = None if found is None else str(found.path)
    return replace(laid, path=path, notes=(note, *laid.notes))


def _is_train(run: Execution, body: str) -> bool:
    """Whether a cell is the train cell with this body, whatever stands above the body."""
    lines = [line.strip() for line in run.source.strip().splitlines()]
    wanted = [line.strip() for line in body.strip().splitlines()]
    return "tpu_train" in cell_magics(run.source) and lines[len(lines) - len(wanted) :] == wanted
