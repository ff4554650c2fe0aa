"""Folders for temporary files that killed supervisors have left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpunb.utils.files import PACKAGE_ROOT

HOLD = """
from tpunb.worker.supervisor.import_files import ImportFiles
held = ImportFiles()
print(held.name, flush=True)
input()
"""


def hold(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with such a folder, and the folder."""
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": PACKAGE_ROOT}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_folders_of_dead_processes_are_removed_at_the_next_start(tmp_path: Path) -> None:
    killed, left = hold(tmp_path)
    end(killed)
    (left / "module.py").touch()
    anothers = tmp_path / f"tpunb-{killed.pid}-theirs"
    anothers.mkdir()
    os.chown(anothers, 65534, 65534)
    link, target = tmp_path / f"tpunb-{killed.pid}-link", tmp_path / "target"
    target.mkdir()
    link.symlink_to(target)
    other = tmp_path / f"tpunb-ahead-{killed.pid}"
    other.mkdir()
    first, in_use = hold(tmp_path)
    elsewhere = tmp_path / f"tpunb-{killed.pid}-locked"  # as of a process of another container
    in_use.rename(elsewhere)
    second, last = hold(tmp_path)
    assert not left.exists()
    assert all(path.exists() for path in (anothers, link, target, other, elsewhere, last))
    end(first)
    end(second)
