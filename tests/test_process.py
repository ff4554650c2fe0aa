from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.kernels import PATIENCE, until
from tpunb.process import GuardProcess
from tpunb.worker import processes

FORKS = """
import os, time
from tpunb.process import GuardProcess
guard = GuardProcess(dict(os.environ))
child = os.fork()
if child == 0:
    time.sleep(600)
print(guard.pid, child, flush=True)
time.sleep(600)
"""


def wait_until_gone(gone: processes.Process) -> None:
    until(lambda: not processes.alive(gone), f"{gone} has ended")


def test_a_child_that_outlives_the_kernel_does_not_keep_the_guard() -> None:
    kernel = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    guard, child = (processes.find(int(pid)) for pid in kernel.stdout.readline().split())
    assert guard is not None
    assert child is not None
    kernel.kill()
    kernel.wait()
    wait_until_gone(guard)
    assert processes.send(child, signal.SIGKILL)
    kernel.stdout.close()


def test_modules_of_the_notebooks_folder_do_not_stand_in_for_standard_ones(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        guard = GuardProcess(dict(os.environ))
    finally:
        os.chdir(before)
    guard.run(tmp_path, {})  # there is no such run: the guard says what it thinks of it
    until(lambda: guard.hear() or guard.broken, "the guard says what is wrong")
    assert "FileNotFoundError" in guard.broken
    assert "wrong json" not in guard.broken
    guard.close(PATIENCE)


def test_an_agent_that_cannot_import_says_why(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('this torch is broken')")
    sys.path.insert(0, str(tmp_path))
    try:
        guard = GuardProcess(dict(os.environ))
    finally:
        sys.path.remove(str(tmp_path))
    until(lambda: guard.hear() or guard.broken, "the guard says what is wrong")
    assert "this torch is broken" in guard.broken
    guard.close(PATIENCE)
