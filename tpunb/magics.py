"""The magics: options in, result out."""

from __future__ import annotations

import json
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from tpunb import debug, options, rundir, runs
from tpunb.session import Session


@magics_class
class TpuMagics(Magics):
    """What `%load_ext tpunb` brings."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.session = Session(shell)

    @line_magic
    def tpu_setup(self, line: str) -> None:
        """Say where we are and what will be used; see %tpu_setup --help."""
        with options.help_ends():
            chosen = options.parse(options.SETUP, line)
            self.session.setup(chosen)
            found = self.session.found()
            print(json.dumps(found, indent=1) if chosen.json else self.session.describe(found))

    @cell_magic
    def tpu_train(self, line: str, cell: str) -> Any:
        """Run this notebook up to this cell, and this cell on every core; see --help."""
        with options.help_ends():
            return self.session.train(options.parse(options.TRAIN, line))

    @cell_magic
    def tpu_debug(self, line: str, cell: str) -> Any:
        """Run this cell in the kernel on one core; see %%tpu_debug --help."""
        with options.help_ends():
            options.parse(options.DEBUG, line)
            if said := debug.kernel_device():
                print(said)
            return debug.run_cell(self.session.shell, cell)

    @line_magic
    def tpu_runs(self, line: str) -> None:
        """List the runs; see %tpu_runs --help."""
        with options.help_ends():
            options.parse(options.RUNS, line)
            print(runs.table(self.session.runs))

    @line_magic
    def tpu_logs(self, line: str) -> None:
        """Show the log of a run; see %tpu_logs --help."""
        with options.help_ends():
            chosen = options.parse(options.LOGS, line)
            print(runs.log(rundir.find(self.session.runs, chosen.run), chosen.rank, chosen.tail))


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext tpunb.magics`. Loading it again changes nothing."""
    if _loaded(shell) is None:
        shell.register_magics(TpuMagics(shell))


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext tpunb.magics`: the warm agent ends; the magics say that they are gone."""
    magics = _loaded(shell)
    if magics is not None:
        magics.session.close()
        for kind in ("line", "cell"):
            table = shell.magics_manager.magics[kind]
            for name in [n for n in table if getattr(table[n], "__self__", None) is magics]:
                del table[name]
        del shell.magics_manager.registry[TpuMagics.__name__]


def _loaded(shell: InteractiveShell) -> TpuMagics | None:
    found: TpuMagics | None = shell.magics_manager.registry.get(TpuMagics.__name__)
    return found
