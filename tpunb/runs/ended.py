"""A run of the kernel that has ended, in the scripts of later runs: its result, values and handle.

A train cell that stands above another one is a few lines in the script of that one, which call the
functions here: `tpunb.notebook.convert.handed` writes them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from tpunb.runs import given, last_run, returns, state, summary
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState
from tpunb.utils import env_vars
from tpunb.utils.errors import TpunbError


def read_run(folder: str, *names: str) -> RunResult:
    """The result that the kernel got, with the values of `--returns`; now it is `tpunb.last_run`.

    Raises TpunbError if the run folder is not there any more, or if one of `names`, which the
    kernel got from it, cannot be rebuilt here.
    """
    run = RunDir(folder)
    if env_vars.RUN in os.environ:
        run = given.find(run, RunDir(os.environ[env_vars.RUN]))
    result = state.read_result(run)
    if result is None:
        raise TpunbError(
            f"the values of run {run.id} are not in {run.path.parent} any more: run its cell again"
        )
    whole = returns.collect_returns(result, state.read_spec(run))
    if failed := [name for name in names if name not in whole.returns]:
        raise TpunbError(
            f"`{failed[0]}`, which the notebook got from run {run.id}, cannot be rebuilt in this "
            f"run: {whole.returns_failed.get(failed[0], 'that run did not return it')}"
        )
    last_run.result = replace(whole, summary=summary.summarize(whole))
    return last_run.result


class EndedRun:
    """What the handle of a run in the background (`--bg --out`) is once the run has ended."""

    def __init__(self, folder: str, *names: str, raises: bool = True) -> None:
        """`names` as for `read_run`.

        `raises`: `wait` raises the error of a run that has failed (not with `--no-raise`).
        """
        self.dir = Path(folder)
        self.result: RunResult = read_run(folder, *names)
        self._raises = raises

    @property
    def id(self) -> str:
        """The run's id, as %tpu_runs lists it."""
        return self.dir.name

    @property
    def state(self) -> RunState:
        """How the run has ended."""
        return self.result.state

    def wait(self, timeout: float | None = None) -> RunResult:
        """Bind the values of `--returns` in the script; the result."""
        vars(sys.modules["__main__"]).update(self.result.returns)
        if self._raises:
            self.result.raise_for_failure()
        return self.result

    def stop(self) -> RunResult:
        """The result: there is nothing to stop any more."""
        return self.result

    def __repr__(self) -> str:
        """The run's state and the handle's methods."""
        return f"BackgroundRun {self.id}: {self.state} (.wait() .stop() .result .state)"
