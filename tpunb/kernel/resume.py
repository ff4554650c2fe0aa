"""`--resume`: the checkpoints from which a run continues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tpunb.kernel.options import LAST
from tpunb.runs import directory
from tpunb.runs.directory import RunDir
from tpunb.utils import records
from tpunb.utils.errors import TpunbError

if TYPE_CHECKING:
    from tpunb.places.target import Target


def find_checkpoints(
    resume: str, runs: Path, notebook: str | None, target: Target
) -> tuple[str, str]:
    """Return the checkpoints that `--resume` names, and the id of their run.

    If `resume` is a folder or URL, return it twice. `notebook`: the path of the notebook, for
    `last`; `target`: what must find the checkpoints. Raises TpunbError.
    """
    if "://" in resume:
        return resume, resume
    if Path(resume).is_dir() or (target.hosts and resume.startswith("/")):
        return (str(Path(resume).absolute()),) * 2
    run = _latest_saved(runs, notebook) if resume == LAST else directory.find_run(runs, resume)
    return target.resume(run), run.id


def _latest_saved(runs: Path, notebook: str | None) -> RunDir:
    """Return the latest run of a notebook that has saved a checkpoint, and is no trial."""
    trials = False
    for run in reversed(directory.list_runs(runs)):
        saved = any(run.path.glob("attempts/*/*/saving.txt")) and run.checkpoints.is_dir()
        # `...` equals no path: of a snapshot that cannot be read, nothing is known.
        if saved and records.read_dict(run.snapshot).get("path", ...) == notebook:
            if not records.read_dict(run.spec).get("trial"):
                return run
            trials = True
    other = "but trials of --grid have; to continue one of them" if trials else ""
    raise TpunbError(
        f"--resume {LAST}: no run of this notebook in {runs} has saved a checkpoint"
        f"{', ' if trials else '; '}{other or 'to continue another run'}, name it with "
        "--resume RUN (%tpu_runs lists all runs)"
    )
