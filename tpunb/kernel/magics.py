"""The magics: each parses its options, calls the session and returns the result."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.display import display

from tpunb import data
from tpunb.data import DataOptions
from tpunb.diagnostics import cell as debug
from tpunb.display import formatters, front_end
from tpunb.kernel import completion, options
from tpunb.kernel.background import BackgroundRun
from tpunb.kernel.options import (
    AttachOptions,
    DebugCellOptions,
    HelpShown,
    LogsOptions,
    MagicParser,
    RunsOptions,
    SetupOptions,
    StopOptions,
    TrainOptions,
)
from tpunb.kernel.session import Session
from tpunb.runs import directory, listing, logs
from tpunb.runs.result import RunResult

_Options = TypeVar("_Options")
_ALONE = re.compile(r"%%tpu_(train|debug)\b(?!\?)")
_OURS = re.compile(r"^\s*(%%?)(tpu_\w+)", re.MULTILINE)


def _line(
    parser: MagicParser[_Options],
) -> Callable[[Callable[[TpuMagics, _Options], Any]], Callable[..., Any]]:
    """Make a method with parsed options a line magic; `%tpu_setup?` shows the parser's help."""

    def decorate(method: Callable[[TpuMagics, _Options], Any]) -> Callable[..., Any]:
        def magic(self: TpuMagics, line: str) -> Any:
            try:
                return method(self, parser.parse_line(line, self.session.shell.user_ns))
            except HelpShown:
                return None

        return _documented(line_magic, magic, method.__name__, parser)

    return decorate


def _cell(
    parser: MagicParser[_Options],
) -> Callable[[Callable[[TpuMagics, _Options, str], Any]], Callable[..., Any]]:
    """Make a method with parsed options and the cell's body a cell magic.

    The line magic of that name exists for --help.
    """

    def decorate(method: Callable[[TpuMagics, _Options, str], Any]) -> Callable[..., Any]:
        name = method.__name__

        def magic(self: TpuMagics, line: str, cell: str | None = None) -> Any:
            try:
                parsed = parser.parse_line(line, self.session.shell.user_ns)
            except HelpShown:
                return None
            if cell is None:
                raise UsageError(
                    f"%{name}: write %%{name} (with two %) as the cell's first line, code below it"
                )
            if not cell.strip():
                raise UsageError(f"%%{name}: there is no code below the cell's first line")
            return method(self, parsed, cell)

        return _documented(line_cell_magic, magic, name, parser)

    return decorate


def _documented(
    kind: Callable[..., Any], magic: Callable[..., Any], name: str, parser: MagicParser[Any]
) -> Callable[..., Any]:
    magic.__name__, magic.__doc__ = name, parser.format_help()
    registered: Callable[..., Any] = kind(magic)
    return registered


@magics_class
class TpuMagics(Magics):
    """The magics that `%load_ext tpunb` registers."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.session = Session(shell)

    @_line(options.SETUP)
    def tpu_setup(self, chosen: SetupOptions) -> None:
        self.session.setup(chosen)

    @_line(options.DATA)
    def tpu_data(self, chosen: DataOptions) -> None:
        data.run(chosen, print)

    @_cell(options.TRAIN)
    def tpu_train(self, chosen: TrainOptions, cell: str) -> RunResult | BackgroundRun | None:
        return self.session.train(chosen, cell)

    @_cell(options.DEBUG)
    def tpu_debug(self, chosen: DebugCellOptions, cell: str) -> Any:
        backend = self.session.backend_of_debug(chosen, cell)
        if backend == "xla" and (change := self.session.choose_device()):
            print(change)
        runs = self.session.defaults.runs
        wanted = debug.DebugSettings(
            report=None
            if chosen.no_report
            else lambda report: front_end.show_bundle(report.bundle()),
            steps=chosen.steps,
            nan=chosen.nan,
            profile=debug.new_profile_folder(runs) if chosen.profile else None,
            backend=backend,
        )
        return debug.run_cell(self.session.shell, cell, wanted)

    @_line(options.RUNS)
    def tpu_runs(self, chosen: RunsOptions) -> None:
        display(listing.list_runs(self.session.defaults.runs, whole=chosen.whole))

    @_line(options.LOGS)
    def tpu_logs(self, chosen: LogsOptions) -> None:
        run = directory.find_run(self.session.defaults.runs, chosen.run)
        print(logs.read_for_cell(run, chosen.search()), end="")

    @_line(options.STOP)
    def tpu_stop(self, chosen: StopOptions) -> None:
        self.session.stop(chosen.run)

    @_line(options.ATTACH)
    def tpu_attach(self, chosen: AttachOptions) -> RunResult | None:
        return self.session.attach(chosen)


def _with_body(lines: list[str]) -> list[str]:
    """Give a cell of one line a body, without which IPython refuses even `%%tpu_train --help`."""
    code = [line for line in lines if line.strip()]
    if len(code) == 1 and _ALONE.match(code[0]):
        return [f"{code[0].rstrip()}\n", "\n"]
    return lines


# IPython then leaves it out where a terminal asks whether more lines are to come.
_with_body.has_side_effects = True  # type: ignore[attr-defined]


def _name_what_was_meant(result: ExecutionResult | None) -> None:
    """After a cell with a magic that does not exist: print which one does, or where it must be.

    IPython reads `%%tpu_train` below other lines as a line magic named `%tpu_train`.
    """
    if result is None or not isinstance(result.error_in_exec, UsageError):
        return
    magics = {parser.prog.lstrip("%"): parser.prog for parser in options.PARSERS}
    text = str(getattr(result.info, "raw_cell", ""))
    for kind, name in _OURS.findall(text):
        if name not in magics:
            known = ", ".join(magics.values())
            meant = f"%tpu_runs lists runs, and %tpu_attach shows one. All magics: {known}"
        elif kind == "%%" and not text.lstrip().startswith("%%"):
            meant = f"{magics[name]} must be the first line of its cell, above comments, too"
        else:
            continue
        print(meant, file=sys.stderr)
        return


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext tpunb.kernel.magics`. Loading it again changes nothing."""
    if _loaded(shell) is None:
        magics = TpuMagics(shell)
        shell.register_magics(magics)
        completion.register_completers(shell, lambda: magics.session.defaults.runs)
        formatters.register_formatters(shell)
        shell.input_transformers_cleanup.insert(0, _with_body)
        shell.events.register("post_run_cell", _name_what_was_meant)


def load_session(shell: InteractiveShell) -> Session:
    """Load the magics if necessary, and return the session that they share."""
    load_ipython_extension(shell)
    magics = _loaded(shell)
    assert magics is not None
    return magics.session


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext tpunb.kernel.magics`: end the session's processes and remove the magics."""
    magics = _loaded(shell)
    if magics is not None:
        magics.session.close()
        formatters.unregister_formatters(shell)
        shell.input_transformers_cleanup.remove(_with_body)
        shell.events.unregister("post_run_cell", _name_what_was_meant)
        completion.unregister_completers(shell)
        for kind in ("line", "cell"):
            table = shell.magics_manager.magics[kind]
            for name in [n for n in table if getattr(table[n], "__self__", None) is magics]:
                del table[name]
        del shell.magics_manager.registry[TpuMagics.__name__]


def _loaded(shell: InteractiveShell) -> TpuMagics | None:
    magics: TpuMagics | None = shell.magics_manager.registry.get(TpuMagics.__name__)
    return magics
