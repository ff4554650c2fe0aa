"""Earlier runs' values in the folder of a later one, which is going to another machine."""

from __future__ import annotations

import shutil

from tpunb.runs.directory import RunDir

FOLDER = "given"


def give(earlier: RunDir, run: RunDir) -> None:
    """Copy what a later run's script reads of an earlier one. Raises OSError."""
    folder = run.path / FOLDER / earlier.id
    folder.mkdir(parents=True, mode=0o700)
    for path in (earlier.spec, earlier.result):
        shutil.copy(path, folder)
    if earlier.returns.is_dir():
        shutil.copytree(earlier.returns, folder / earlier.returns.name)


def find(earlier: RunDir, run: RunDir) -> RunDir:
    """An earlier run where it is: where the script says, or in the folder of the later one."""
    copy = RunDir(run.path / FOLDER / earlier.id)
    return copy if not earlier.path.exists() and copy.path.exists() else earlier
