"""Runs the blocks of a script in a `__main__` of their own, and describes what they raise."""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from tpunb.backends.rehearsal.errors import (
    CollectiveError,
    PeerLostError,
    WaitedTooLongError,
    is_of_torch_distributed,
)
from tpunb.runs.cell_lines import CellLines
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.spec import Block, FailureKind, Role, RunSpec
from tpunb.utils import modules
from tpunb.utils.errors import SetupError
from tpunb.utils.files import read_text, write_json
from tpunb.worker import figures, replay, script_end, stdio

MOST_FRAMES = 30
"""Frames shown of a traceback: half from its top, half from its end (deep recursions)."""

LONGEST_MESSAGE = 10_000
"""Characters kept of an exception's own text, half from each end."""
MOST_LINES = 200
"""Lines that are kept of it."""
MOST_CAUSES = 10
"""Exceptions shown in one traceback, each raised while the one before was handled."""

_PEER_LOST = (PeerLostError, WaitedTooLongError, CollectiveError)
"""Errors that ranks raise because another rank is missing."""
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_STANDARD = f"{Path(contextlib.__file__).parent}{os.sep}"
FUTURE = 0
"""All flags of `from __future__` imports."""
for _name in __future__.all_feature_names:
    FUTURE |= getattr(__future__, _name).compiler_flag


class Cells:
    """The script of a run, cell by cell, in one namespace."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self._flags = 0
        self.header = ""
        """The header that was executed last."""
        self.module = ModuleType("__main__")  # as that of `python script.py`
        self.module.__dict__.update(__builtins__=builtins, __spec__=None)
        self.assign(run, spec)

    def assign(self, run: RunDir, spec: RunSpec) -> None:
        """Continue with the script of another run, whose first cells have run in this process."""
        self.report_of_fork: Callable[[BaseException], None] = partial(
            print_error, run=run, spec=spec
        )
        """Called with an exception that ends a process that a cell has forked."""
        self._run = run
        self.lines = CellLines(run.script, spec)
        self._blocks = spec.blocks
        self._take(read_text(run.script))
        self.module.__dict__["__file__"] = self.lines.script

    def _take(self, text: str) -> None:
        self.text = text
        self._lines = text.split("\n")
        # A kept prelude may outlive the file: tracebacks and inspect still show its lines.
        linecache.cache[self.lines.script] = (
            *(len(text), None, [f"{line}\n" for line in self._lines]),
            self.lines.script,
        )

    def become_main(self) -> None:
        """Make the script this process's main program: sys.argv, sys.modules['__main__']."""
        sys.argv[:] = [self.lines.script]
        sys.modules["__main__"] = self.module

    def of(self, role: Role) -> list[Block]:
        """The blocks with this role (header, prelude, train cell, …), in order."""
        return [block for block in self._blocks if block.role == role]

    def _source(self, block: Block) -> str:
        return "\n".join(self._lines[block.first - 1 : block.last]) + "\n"

    def execute_header(self) -> None:
        """Run the lines above the cells, unless this process has run the same lines before."""
        blocks = self.of("header")
        header = "".join(self._source(block) for block in blocks)
        if header != self.header:
            for block in blocks:
                self.execute(block)
            self.header = header

    def execute(self, block: Block) -> None:
        """Run a block as lines of script.py, so that tracebacks and linecache match the file.

        It runs in the folder in which the cell ran in the kernel. In a process that the block has
        forked with os.fork, this does not return.
        """
        code, process = self.compile(block), os.getpid()
        self._enter_folder(block)
        replay.begin_cell(prelude=block.role == "prelude")
        error: BaseException | None = None
        try:
            exec(code, self.module.__dict__)
        except BaseException as raised:
            if os.getpid() == process:
                raise
            error = raised
        if os.getpid() != process:
            script_end.end_fork(error, self.report_of_fork)

    def _enter_folder(self, block: Block) -> None:
        """Change to the folder of a cell; if that is gone, the cell stays where the last ended."""
        try:
            if block.cwd:
                modules.change_folder(block.cwd)
        except OSError as error:
            if os.environ.get("RANK", "0") == "0":
                line = f"cell [{block.number}] runs in another folder than in the kernel"
                self._run.emit(Note(f"{line}: {error.strerror}: {block.cwd}"))

    def execute_prelude(self, block: Block) -> None:
        """Run a cell above the train cell, in which an exit is an error whatever its code."""
        try:
            self.execute(block)
        except SystemExit as error:
            end = " ends the prelude before the train cell is reached"
            raise named_exit(error, end) from None
        figures.close_open()
        stdio.fill_closed()

    def execute_parameters(self) -> None:
        """Assign the values that the run has from the kernel."""
        for block in self.of("parameters"):
            self.execute(block)

    def compile(self, block: Block) -> CodeType:
        """Return a block's code.

        A `from __future__` import holds for all blocks that follow, as in IPython.
        """
        source, path = "\n" * (block.first - 1) + self._source(block), self.lines.script
        tree: str | ast.Module = source
        if block.role == "prelude" and replay.may_change(source):
            only = self._flags | ast.PyCF_ONLY_AST
            tree = replay.tolerate_repetition(
                compile(source, path, "exec", flags=only, dont_inherit=True)
            )
        code: CodeType = compile(tree, path, "exec", flags=self._flags, dont_inherit=True)
        self._flags |= code.co_flags & FUTURE
        return code


def describe_error(error: BaseException, run: RunDir, spec: RunSpec) -> dict[str, Any]:
    """An exception in notebook terms, as `error.json` holds it.

    `cell`, `line` and `column` are those of the innermost frame that is a line of the notebook.
    """
    lines = CellLines(run.script, spec)
    cell = line = column = None
    for frame in _frames(error.__traceback__, lines):
        if frame.filename in lines and frame.lineno is not None:
            found = lines.locate(frame.filename, frame.lineno)
            if found[0] is not None:  # not in the script's header, which a `!` line calls
                (cell, line), column = found, _column(frame)
    if isinstance(error, SyntaxError) and error.filename in lines and error.lineno:
        cell, line = lines.locate(error.filename or "", error.lineno)
        column = (error.offset or 1) - 1
    return {
        "type": type(error).__name__,
        "message": _in_cells(_message(error), lines),
        "cell": cell,
        "line": line,
        "column": column,
        "traceback": "".join(_chain(error, lines)),
        # Not time.time: the user's code may have it stand still (freezegun).
        "time": time.clock_gettime(time.CLOCK_REALTIME),
        "kind": _kind(error, cell),
    }


def _kind(error: BaseException, cell: int | None) -> FailureKind:
    if isinstance(error, SetupError) and cell is None:  # before or between the cells
        return FailureKind.LOST
    return FailureKind.PEER_LOST if _is_peer_lost(error) else FailureKind.EXCEPTION


def _is_peer_lost(error: BaseException) -> bool:
    """True if the error follows from another rank's end, judging by its type and origin."""
    return type(error) in _PEER_LOST or is_of_torch_distributed(error)


def write_error(
    error: BaseException, run: RunDir, spec: RunSpec, attempt: int, rank: int | None
) -> None:
    """Write the description of what ended this process to the run folder, if possible.

    The first description stays.
    """
    file = run.error(attempt, rank)
    if not file.exists():
        with contextlib.suppress(OSError):
            write_json(file, describe_error(error, run, spec))


def print_error(error: BaseException, run: RunDir, spec: RunSpec) -> None:
    """Print an exception to standard error as Python does at the end of a script, in cell terms.

    An excepthook of the user's code gets it instead, without tpunb's own frames; if the hook
    itself fails, both exceptions are printed. If standard error is closed, nothing is printed;
    `write_error` has the description.
    """
    lines = CellLines(run.script, spec)
    # torch's own, which torch.distributed sets, only adds the rank to each line.
    of_torch = getattr(sys.excepthook, "__module__", "").partition(".")[0] == "torch"
    if sys.excepthook is not sys.__excepthook__ and not of_torch:
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename not in lines:
            tb = tb.tb_next
        try:
            sys.excepthook(type(error), error, tb)
        except BaseException as broken:  # anything: it is the user's code
            _print("Error in sys.excepthook:\n" + "".join(_chain(broken, lines)))
            _print("\nOriginal exception was:\n")
        else:
            return
    _print("".join(_chain(error, lines)))


def _print(text: str) -> None:
    with contextlib.suppress(Exception):  # a stream of the user's own may raise anything
        print(text, end="", file=sys.stderr)


def named_exit(error: SystemExit, consequence: str = "") -> SystemExit:
    """The same exception with a message that names the call: 'sys.exit(2)' and `consequence`."""
    code = "" if error.code is None else repr(error.code)
    return SystemExit(f"sys.exit({code}){consequence}").with_traceback(error.__traceback__)


def _message(error: BaseException) -> str:
    try:
        return _shortened(str(error))
    except Exception as broken:  # a user's own __str__ may raise anything
        return f"<no text: its __str__ raised {type(broken).__name__}>"


def _shortened(text: str) -> str:
    """The beginning and the end of a text that is too long for a page."""
    left_out = len(text) - LONGEST_MESSAGE
    if left_out > 0:
        half = LONGEST_MESSAGE // 2
        text = f"{text[:half]}\n… {left_out:,} characters left out …\n{text[-half:]}"
    lines = text.split("\n")
    if len(lines) > MOST_LINES:
        left_out = len(lines) - MOST_LINES
        lines[MOST_LINES // 2 : -MOST_LINES // 2] = [f"… {left_out:,} lines left out …"]
    return "\n".join(lines)


def _frames(tb: TracebackType | None, lines: CellLines) -> list[traceback.FrameSummary]:
    """The frames of the notebook and of libraries, without tpunb's own.

    If no frame is of the notebook, tpunb itself has failed: all frames.
    """
    frames, kept = list(traceback.extract_tb(tb)), list[traceback.FrameSummary]()
    inside = False
    for frame in frames:
        file = frame.filename
        # Nor what tpunb calls of Python's standard library.
        standard = file.startswith(_STANDARD) and "-packages" not in file
        inside = file.startswith(_OWN) or (inside and standard)
        if file in lines or (kept and not inside):
            kept.append(frame)
    return kept or frames


def _column(frame: traceback.FrameSummary) -> int | None:
    """Characters before the expression that a frame was at; None on Python 3.10."""
    encoded: int | None = getattr(frame, "colno", None)
    if encoded is None or frame.lineno is None:
        return None
    line = linecache.getline(frame.filename, frame.lineno)
    return len(line.encode()[:encoded].decode(errors="replace"))


def _in_cells(text: str, lines: CellLines) -> str:
    """The text with each line of the script named by its cell.

    Libraries put tracebacks of other processes into messages (a DataLoader's workers).
    """
    files = "|".join(re.escape(file) for file in lines.files)
    named = re.compile(rf'File "({files})", line (\d+)')
    return named.sub(lambda match: lines.describe(match[1], int(match[2])), text)


def _chain(error: BaseException, known: CellLines) -> list[str]:
    """The traceback as Python shows it, with cells instead of the script's lines."""
    causes = list(_causes(error))
    if any(frame.filename in known for frame in traceback.extract_tb(error.__traceback__)):
        causes = [each for each in causes if each[0] is error or not _is_own(each[0])]
    lines: list[str] = []
    if len(causes) > MOST_CAUSES:
        lines.append("… earlier exceptions left out …\n\n")
    for each, link in reversed(causes[:MOST_CAUSES]):
        lines += _traceback(each, known)
        if link:
            lines.append(f"\n{link}\n\n")
    return lines


def _is_own(error: BaseException) -> bool:
    """True if an exception was raised and handled in tpunb's own code."""
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    return bool(files) and all(file.startswith(_OWN) for file in files)


def _causes(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """The exception, then its causes; each with the line that Python prints below it."""
    seen: set[int] = set()  # causes may form a circle
    cause: BaseException | None = error
    link = ""
    while cause is not None and id(cause) not in seen and len(seen) <= MOST_CAUSES:
        seen.add(id(cause))
        yield cause, link
        if cause.__cause__ is not None:
            link = "The above exception was the direct cause of the following exception:"
            cause = cause.__cause__
        else:
            link = "During handling of the above exception, another exception occurred:"
            cause = None if cause.__suppress_context__ else cause.__context__


def _traceback(error: BaseException, known: CellLines) -> list[str]:
    lines = ["Traceback (most recent call last):\n"]
    frames = _frames(error.__traceback__, known)
    left_out = range(MOST_FRAMES // 2, len(frames) - MOST_FRAMES // 2)
    for index, frame in enumerate(frames):
        if index in left_out:
            if index == left_out[0]:
                lines.append(f"  … {len(left_out)} frames left out …\n")
        elif frame.filename in known and frame.lineno is not None:
            where = known.describe(frame.filename, frame.lineno)
            lines.append(f"  {where}, in {frame.name}\n")
        else:
            lines.append(
                f'  File "{_short(frame.filename)}", line {frame.lineno}, in {frame.name}\n'
            )
        if frame.line and index not in left_out:
            lines.append(f"    {_shortened(frame.line)}\n")
    only = "".join(traceback.format_exception_only(type(error), error))
    return [*lines, _in_cells(_shortened(only), known)]


def _short(filename: str) -> str:
    """A library's file without the path of the environment that it is installed in."""
    _, found, tail = filename.rpartition("site-packages/")
    return tail if found else filename
