"""The runs of one process, which is a kernel or a terminal: start, follow, attach and stop them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpunb.display import front_end
from tpunb.display.run_view import RunView
from tpunb.kernel import calls, cost, panel
from tpunb.kernel.launcher import Attached, Launcher, Run
from tpunb.runs import bucket_copies, directory, listing, returns, state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState, Stop, StopOrigin
from tpunb.utils import env_vars, files
from tpunb.utils.errors import HandoffError, TpunbError
from tpunb.utils.interrupts import Interrupts

if TYPE_CHECKING:
    from tpunb.kernel.pipeline import RunRequest
    from tpunb.notebook.models import Snapshot

LAST_UPLOAD = 600.0
"""Seconds that a cell waits for its run's upload if the machine may end together with the cell."""


class Runs:
    """Runs that this process starts or attaches to, each with the view that shows it."""

    def __init__(self, interrupted: Stop) -> None:
        """`interrupted`: how an interrupt stops a run that was started here."""
        self.launcher = Launcher()
        self._interrupted = interrupted

    def start(
        self,
        request: RunRequest,
        runs: Path,
        interrupts: Interrupts,
        ask: Callable[[str], str],
        yes: str = "",
    ) -> Run | Attached:
        """Create a run folder in `runs`, and start the run.

        `ask` and `yes`: see `cost.confirm`. Raises LintError for code that would certainly fail,
        HandoffError for arguments that cannot be pickled, and TpunbError after an interrupt;
        nothing was started then.
        """
        from tpunb.notebook.convert import redaction

        request.notebook.raise_for_lint()
        if interrupts.count:
            raise TpunbError("interrupted before the run began: nothing was started")
        cost.confirm(request.target, request.options, ask, yes)
        snapshot = request.notebook.snapshot
        with directory.new_run(runs, request.name) as folder:
            _save_values(request, folder)
            spec = request.spec(folder.id)
            if spec.hosts:
                _keep_notebook(snapshot, folder)  # it is sent to the hosts
            run = self.launcher.begin(request, folder, spec, redaction.redacted_snapshot(snapshot))
        if (bucket := listing.bucket()) is not None:
            with suppress(OSError):  # too little memory: the local folder has everything
                bucket_copies.start_upload(folder, bucket)
        if not spec.hosts:
            _keep_notebook(snapshot, folder)
        if env_vars.RAN in os.environ:
            files.append_text(Path(os.environ[env_vars.RAN]), f"{folder.path}\n")
        return run

    def follow(
        self,
        run: Run,
        view: RunView,
        request: RunRequest,
        interrupts: Interrupts,
        missing: Callable[[], Iterable[str]] = tuple,
    ) -> RunResult:
        """Show a run that was started here until it has ended, and return its result.

        An interrupt stops the run; another one skips the grace period. `missing` returns lines
        about names that the notebook does not get from a successful run.
        """
        seen = 0
        for _ in panel.show_run(run, view):
            if interrupts.count > seen:
                run.stop(replace(self._interrupted, now=seen > 0))
                seen = interrupts.count
        result = _finish(run, view, missing)
        if listing.bucket() is not None and front_end.current_front_end().batch:
            count = interrupts.count
            left = bucket_copies.wait_for_upload(
                run.dir, LAST_UPLOAD, lambda: interrupts.count > count
            )
            if left:
                print(left)
        self.launcher.remember(request.notebook.script, result, run.spec)
        return result

    def close(self) -> None:
        """End all runs that were started here and are not detached, with time to save."""
        self.launcher.close()


def find_attached(runs: Path, wanted: str | None) -> Attached:
    """Find a run to attach to, wherever it runs: the only active one that `wanted` names."""
    return Attached(state.find_active(runs, wanted))


def follow_attached(run: Attached, view: RunView, interrupts: Interrupts) -> RunResult | None:
    """Show a run from its first line to its end, and return its result.

    An interrupt only leaves it: then the result is None.
    """
    for _ in panel.show_run(run, view):
        if interrupts.count:
            view.leave("still running; no longer shown here")
            return None
    return _finish(run, view)


def _finish(
    run: Run | Attached, view: RunView, missing: Callable[[], Iterable[str]] = tuple
) -> RunResult:
    """Return the result of a run that has ended, and show it in the run's card."""
    result = returns.collect_returns(run.result(), run.spec, run.dir)
    if result.state is RunState.SUCCEEDED:
        for line in missing():
            view.show(Note(line))
    view.finish(result)
    panel.show_result(result)
    return result


def stop(runs: Path, wanted: str | None, written: str, origin: StopOrigin) -> Iterator[str]:
    """Request a stop of a run, wait until it has ended, and yield lines on its way there."""
    return state.stop_run(state.find_active(runs, wanted), f"stopped with {written}", origin)


def _save_values(request: RunRequest, folder: RunDir) -> None:
    """Write what a run has from the kernel into its folder; if this fails, remove the folder."""
    call, parameters = request.call, request.notebook.parameters.values
    files.write_json(folder.values, {**parameters, **({} if call is None else call.plain)})
    if call is not None and call.arguments:
        try:
            calls.save_arguments(call.arguments, folder.arguments)
        except HandoffError:
            shutil.rmtree(folder.path)
            raise


def _keep_notebook(snapshot: Snapshot, folder: RunDir) -> None:
    """Write the notebook without outputs to `notebook.ipynb`; `notebook.json` holds the captured
    cells.

    Secrets are removed (`tpunb.notebook.convert.redaction`). A file that is not a notebook is
    not kept; nor is one that cannot be written, because the run does not need it.
    """
    from tpunb.notebook.convert.redaction import redacted_notebook
    from tpunb.notebook.errors import NotebookError
    from tpunb.notebook.files import cells_from_json, load_notebook

    with suppress(OSError, NotebookError):
        content = snapshot.content
        if content is None and snapshot.path is not None:
            content = load_notebook(snapshot.path)
        if content is not None:
            cells_from_json(content, "it")  # raises if it is not a notebook
            text = redacted_notebook(content)
            files.atomic_write(folder.path / "notebook.ipynb", text.encode("utf-8", "replace"))
