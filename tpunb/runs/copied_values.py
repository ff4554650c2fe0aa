"""Copies of earlier runs' values in the folder of a later run that is sent to another machine."""

from __future__ import annotations

import shutil

from tpunb.runs.directory import RunDir

FOLDER = "given"


def copy_into(earlier: RunDir, run: RunDir) -> None:
    """Copy the files of an earlier run that a later run's script reads. Raises OSError."""
    folder = run.path / FOLDER / earlier.id
    folder.mkdir(parents=True, mode=0o700)
    for path in (earlier.spec, earlier.result):
        shutil.copy(path, folder)
    if earlier.returns.is_dir():
        shutil.copytree(earlier.returns, folder / earlier.returns.name)


def locate(earlier: RunDir, run: RunDir) -> RunDir:
    """Return an earlier run: at its own path if it exists, otherwise the copy in the later run."""
    copy = RunDir(run.path / FOLDER / earlier.id)
    return copy if not earlier.path.exists() and copy.path.exists() else earlier
