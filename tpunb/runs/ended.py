"""An ended run of the kernel in the scripts of later runs: its result, values and handle.

In the script of a train cell, a train cell above it is a few lines that call these functions:
`tpunb.notebook.convert.earlier_values` writes them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from tpunb.runs import copied_values, last_run, returns, state, summary
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState
from tpunb.utils import env_vars
from tpunb.utils.errors import TpunbError


def read_run(folder: str, *names: str) -> RunResult:
    """Return the result that the kernel got, with `--returns`, and make it `tpunb.last_run`.

    Raises TpunbError if the run folder no longer exists, or if one of `names`, which the kernel
    got from it, cannot be rebuilt in this process.
    """
    run = RunDir(folder)
    if env_vars.RUN in os.environ:
        run = copied_values.locate(run, RunDir(os.environ[env_vars.RUN]))
    result = state.read_result(run)
    if result is None:
        raise TpunbError(
            f"the values of run {run.id} are no longer in {run.path.parent}: run its cell again"
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
    """The handle of a background run (`--bg --out`) after the run has ended."""

    def __init__(self, folder: str, *names: str, raises: bool = True) -> None:
        """`names`: as for `read_run`. `raises`: False with `--no-raise`; see `wait`."""
        self.dir = Path(folder)
        self.result: RunResult = read_run(folder, *names)
        self._raises = raises

    @property
    def id(self) -> str:
        """The run's id, as `%tpu_runs` lists it."""
        return self.dir.name

    @property
    def state(self) -> RunState:
        """The state in which the run ended."""
        return self.result.state

    def wait(self, timeout: float | None = None) -> RunResult:
        """Bind the values of `--returns` in the script and return the result.

        Raises RunError if the run failed, unless the handle has `raises=False`.
        """
        vars(sys.modules["__main__"]).update(self.result.returns)
        if self._raises:
            self.result.raise_for_failure()
        return self.result

    def stop(self) -> RunResult:
        """Return the result: the run has already ended."""
        return self.result

    def __repr__(self) -> str:
        """The run's state and the handle's methods."""
        return f"BackgroundRun {self.id}: {self.state} (.wait() .stop() .result .state)"
