"""`--pdb`: the debugger at an exception, in the cell's frames."""

from __future__ import annotations

from collections.abc import Container
from types import TracebackType

from IPython.core.error import StdinNotImplementedError  # IPython's name for "no input here"
from IPython.core.interactiveshell import InteractiveShell


def open_debugger(shell: InteractiveShell, error: BaseException, files: Container[str]) -> None:
    """Open IPython's debugger where the notebook raised an exception, or called what raised it.

    `files`: the names under which the notebook's cells were compiled. Says so where the front
    end cannot ask the person for input.
    """
    frames: list[TracebackType] = []
    tb = error.__traceback__
    while tb is not None:
        frames.append(tb)
        tb = tb.tb_next
    while frames and frames[-1].tb_frame.f_code.co_filename not in files:
        frames.pop()
    shown = None
    for one in reversed(frames):
        if one.tb_frame.f_code.co_filename in files:
            shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    if shown is None:
        return
    print(f"{type(error).__name__}: {error}")
    debugger = shell.InteractiveTB.debugger_cls()
    debugger.reset()
    debugger.botframe = shown.tb_frame
    try:
        debugger.interaction(None, shown)
    except StdinNotImplementedError:  # what ipykernel raises where a front end takes no input
        print("--pdb: nobody can be asked here (papermill, nbclient), so no debugger was opened")
