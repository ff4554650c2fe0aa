"""The magics: options in, result out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser

from tpunb import debug, listings, logs, options, rundir, terminal
from tpunb.data import command
from tpunb.display import frontend, shown
from tpunb.session import Session

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _documented(parser: MagicArgumentParser) -> Callable[[_Function], _Function]:
    """The options are what `%%tpu_train?` shows."""

    def give(function: _Function) -> _Function:
        function.__doc__ = parser.format_help()
        return function

    return give


@magics_class
class TpuMagics(Magics):
    """What `%load_ext tpunb` brings."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.session = Session(shell)

    @line_magic
    @_documented(options.SETUP)
    def tpu_setup(self, line: str) -> None:
        with options.help_ends():
            chosen = options.parse(options.SETUP, line, self.session.shell.user_ns)
            self.session.setup(chosen)
            self.session.show(chosen)
            self.session.stop_when_done(chosen)

    @line_magic
    @_documented(options.DATA)
    def tpu_data(self, line: str) -> None:
        with options.help_ends():
            chosen = options.parse(options.DATA, line, self.session.shell.user_ns)
            command.run(chosen, os.environ, print)

    # IPython refuses a cell magic without a body, `%%tpu_train --help` too, and points to the
    # line magic of that name: there is one, for --help.
    @line_cell_magic
    @_documented(options.TRAIN)
    def tpu_train(self, line: str, cell: str | None = None) -> Any:
        with options.help_ends():
            chosen = options.parse(options.TRAIN, line, self.session.shell.user_ns)
            return self.session.train(chosen, _body("tpu_train", cell))

    @line_cell_magic
    @_documented(options.DEBUG)
    def tpu_debug(self, line: str, cell: str | None = None) -> Any:
        with options.help_ends():
            chosen = options.parse(options.DEBUG, line, self.session.shell.user_ns)
            body = _body("tpu_debug", cell)
            if said := self.session.kernel_device():
                print(said)
            wanted = debug.Wanted(
                report=None if chosen.no_report else lambda made: frontend.show(made.bundle()),
                steps=chosen.steps,
                nan=chosen.nan,
                pdb=chosen.pdb,
                profile=debug.new_folder(self.session.runs) if chosen.profile else None,
            )
            return debug.run_cell(self.session.shell, body, wanted)

    @line_magic
    @_documented(options.RUNS)
    def tpu_runs(self, line: str) -> None:
        with options.help_ends():
            options.parse(options.RUNS, line, self.session.shell.user_ns)
            print(terminal.coloured(listings.table(self.session.runs)))

    @line_magic
    @_documented(options.LOGS)
    def tpu_logs(self, line: str) -> None:
        with options.help_ends():
            chosen = options.parse(options.LOGS, line, self.session.shell.user_ns)
            run = rundir.find(self.session.runs, chosen.run)
            print(logs.for_a_cell(run, logs.search_of(chosen)), end="")

    @line_magic
    @_documented(options.STOP)
    def tpu_stop(self, line: str) -> None:
        with options.help_ends():
            self.session.stop(options.parse(options.STOP, line, self.session.shell.user_ns).run)

    @line_magic
    @_documented(options.ATTACH)
    def tpu_attach(self, line: str) -> Any:
        with options.help_ends():
            chosen = options.parse(options.ATTACH, line, self.session.shell.user_ns)
            return self.session.attach(chosen)


def _body(name: str, cell: str | None) -> str:
    if cell is None:
        raise UsageError(f"%{name}: write %%{name} (two %) into a cell's first line, code below it")
    return cell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext tpunb.magics`. Loading it again changes nothing."""
    if _loaded(shell) is None:
        shell.register_magics(TpuMagics(shell))
        shown.register(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext tpunb.magics`: the warm agent ends; the magics say that they are gone."""
    magics = _loaded(shell)
    if magics is not None:
        magics.session.close()
        shown.unregister(shell)
        for kind in ("line", "cell"):
            table = shell.magics_manager.magics[kind]
            for name in [n for n in table if getattr(table[n], "__self__", None) is magics]:
                del table[name]
        del shell.magics_manager.registry[TpuMagics.__name__]


def _loaded(shell: InteractiveShell) -> TpuMagics | None:
    found: TpuMagics | None = shell.magics_manager.registry.get(TpuMagics.__name__)
    return found
