"""Runs the blocks of a script in a `__main__` of their own, and describes what they raise."""

from __future__ import annotations
import __future__

import builtins
import contextlib
import os
import re
import sys
import time
import traceback
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from tpunb.models import Block, Role, RunSpec
from tpunb.rundir import RunDir, write_json

MOST_FRAMES = 30
"""Of a traceback that are shown: half from its top, half from its end (deep recursions)."""

_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag


class Cells:
    """The script of a run, cell by cell, in one namespace."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self._path = str(run.script)
        self._lines = run.script.read_text(encoding="utf-8").split("\n")
        self._blocks = spec.blocks
        self._flags = 0
        self.codes: list[CodeType] = []
        """Of the blocks that have run."""
        self.module = self._make_main()

    def _make_main(self) -> ModuleType:
        """A `__main__` like that of `python script.py`."""
        module = ModuleType("__main__")
        module.__dict__.update(__file__=self._path, __builtins__=builtins, __spec__=None)
        return module

    def become_main(self) -> None:
        """Make this process one that runs the script: sys.argv, sys.modules['__main__']."""
        sys.argv[:] = [self._path]
        sys.modules["__main__"] = self.module

    def of(self, role: Role) -> list[Block]:
        """The blocks of the header, the prelude, or the train cell, in order."""
        return [block for block in self._blocks if block.role == role]

    def _text(self, block: Block) -> str:
        return "\n".join(self._lines[block.first - 1 : block.last]) + "\n"

    def execute(self, block: Block) -> None:
        """Run a block as lines of script.py, so that tracebacks and linecache fit the file."""
        exec(self._compile(block), self.module.__dict__)

    def _compile(self, block: Block) -> CodeType:
        """The block's code. A `from __future__` import holds for all that follow, as in IPython."""
        source = "\n" * (block.first - 1) + self._text(block)
        code: CodeType = compile(source, self._path, "exec", flags=self._flags, dont_inherit=True)
        self._flags |= code.co_flags & _FUTURE
        self.codes.append(code)
        return code


def describe(error: BaseException, run: RunDir, spec: RunSpec) -> dict[str, Any]:
    """An exception in notebook terms, as `error.json` holds it.

    `cell` and `line` are those of the innermost frame that is a line of the notebook.
    """
    script = str(run.script)
    frames = _frames(error.__traceback__, script)
    cell = line = None
    for frame in frames:
        if frame.filename == script and frame.lineno is not None:
            cell, line = spec.locate(frame.lineno)
    if isinstance(error, SyntaxError) and error.filename == script and error.lineno:
        cell, line = spec.locate(error.lineno)
    return {
        "type": type(error).__name__,
        "message": _in_cells(_message(error), script, spec),
        "cell": cell,
        "line": line,
        "traceback": "".join(_chain(error, script, spec)),
        "time": time.time(),
    }


def write(error: BaseException, run: RunDir, spec: RunSpec, attempt: int, rank: int | None) -> None:
    """Leave the description of what ended this process in the run folder."""
    write_json(run.error(attempt, rank), describe(error, run, spec))


def show(error: BaseException, run: RunDir, spec: RunSpec) -> None:
    """Print an exception to standard error as the end of a script does, in notebook terms.

    A hook that the user's code has put in place gets it instead, without tpunb's own frames.
    Where standard error is closed nothing is printed; what `write` has left says it all.
    """
    with contextlib.suppress(OSError, ValueError):
        if sys.excepthook is sys.__excepthook__:
            print("".join(_chain(error, str(run.script), spec)), end="", file=sys.stderr)
            return
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename != str(run.script):
            tb = tb.tb_next
        sys.excepthook(type(error), error, tb)


def named_exit(error: SystemExit, consequence: str = "") -> SystemExit:
    """The same exit with a message that says what was called."""
    code = "" if error.code is None else repr(error.code)
    return SystemExit(f"sys.exit({code}){consequence}").with_traceback(error.__traceback__)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # a user's own __str__ may raise anything
        return f"<its text cannot be made: {type(broken).__name__}>"


def _frames(tb: TracebackType | None, script: str) -> list[traceback.FrameSummary]:
    """The frames of the notebook and of libraries, but none of tpunb's own.

    Without a line of the notebook among them it is tpunb that failed: then all.
    """
    frames = list(traceback.extract_tb(tb))
    for index, frame in enumerate(frames):
        if frame.filename == script:
            return [frame for frame in frames[index:] if not frame.filename.startswith(_OWN)]
    return frames


def _in_cells(text: str, script: str, spec: RunSpec) -> str:
    """A text in which lines of the script are named by their cell.

    Libraries put tracebacks of other processes into messages (a DataLoader's workers).
    """
    named = re.compile(rf'File "{re.escape(script)}", line (\d+)')
    return named.sub(lambda match: spec.place(int(match[1])), text)


def _chain(error: BaseException, script: str, spec: RunSpec) -> list[str]:
    """The traceback as Python shows it, with cells instead of the script's lines."""
    lines = []
    if error.__cause__ is not None:
        lines += _chain(error.__cause__, script, spec)
        lines.append("\nThe above exception was the direct cause of the following exception:\n\n")
    elif error.__context__ is not None and not error.__suppress_context__:
        lines += _chain(error.__context__, script, spec)
        lines.append("\nDuring handling of the above exception, another exception occurred:\n\n")
    lines.append("Traceback (most recent call last):\n")
    frames = _frames(error.__traceback__, script)
    left_out = range(MOST_FRAMES // 2, len(frames) - MOST_FRAMES // 2)
    for index, frame in enumerate(frames):
        if index in left_out:
            if index == left_out[0]:
                lines.append(f"  … {len(left_out)} frames left out …\n")
        elif frame.filename == script and frame.lineno is not None:
            lines.append(f"  {spec.place(frame.lineno)}, in {frame.name}\n")
        else:
            lines.append(
                f'  File "{_short(frame.filename)}", line {frame.lineno}, in {frame.name}\n'
            )
        if frame.line and index not in left_out:
            lines.append(f"    {frame.line}\n")
    only = "".join(traceback.format_exception_only(type(error), error))
    return [*lines, _in_cells(only, script, spec)]


def _short(filename: str) -> str:
    """A library's file without the path of the environment it is installed in."""
    _, found, tail = filename.rpartition("site-packages/")
    return tail if found else filename
