from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.drivers.kernel import PATIENCE, until
from tpunb.kernel.supervisor import SupervisorProcess
from tpunb.runs.spec import Stop
from tpunb.utils import processes

pytestmark = pytest.mark.usefixtures("starts_processes")

FORKS = """
import os, time
from tpunb.kernel import supervisor as module
from tpunb.kernel.supervisor import SupervisorProcess
supervisor = SupervisorProcess(dict(os.environ))
child = os.fork()
if child == 0:
    time.sleep(600)
print(supervisor.pid, child, flush=True)
time.sleep(600)
"""


def wait_until_gone(gone: processes.Process) -> None:
    until(lambda: not processes.is_alive(gone), f"{gone} has ended")


@pytest.mark.usefixtures("starts_processes")
def test_supervisor_ends_with_the_kernel_despite_a_surviving_child() -> None:
    kernel = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    supervisor, child = (
        processes.find_process(int(pid)) for pid in kernel.stdout.readline().split()
    )
    assert supervisor is not None
    assert child is not None
    kernel.kill()
    kernel.wait()
    wait_until_gone(supervisor)
    assert processes.send_signal(child, signal.SIGKILL)
    kernel.stdout.close()


def test_supervisor_ignores_notebook_modules_named_like_standard_ones(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        supervisor = SupervisorProcess(dict(os.environ))
    finally:
        os.chdir(before)
    supervisor.run(tmp_path, {})  # no run is there, which the supervisor will report
    until(lambda: supervisor.has_finished(tmp_path), "the supervisor has read its orders")
    assert (supervisor.broken, supervisor.has_exited) == ("", False)
    supervisor.close(PATIENCE)


def test_a_fork_server_that_cannot_import_reports_why(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('this torch is broken')")
    sys.path.insert(0, str(tmp_path))
    try:
        supervisor = SupervisorProcess(dict(os.environ))
    finally:
        sys.path.remove(str(tmp_path))
    until(lambda: supervisor.poll() or supervisor.broken, "the supervisor says what is wrong")
    assert "this torch is broken" in supervisor.broken
    supervisor.close(PATIENCE)


@pytest.mark.usefixtures("starts_processes")
def test_the_kernel_ends_the_processes_that_a_killed_supervisor_leaves(tmp_path: Path) -> None:
    """Processes that a rank started in sessions of their own, and temporary folders."""
    supervisor = SupervisorProcess(dict(os.environ))
    until(lambda: processes.descendants(supervisor.pid), "it has started its fork server")
    [folder] = Path(tempfile.gettempdir()).glob(f"tpunb-{supervisor.pid}-*")
    os.kill(supervisor.pid, signal.SIGSTOP)  # it reads no order, so the run has no files
    supervisor.run(tmp_path, {})
    daemon = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "TPUNB_RUN": str(tmp_path)}, start_new_session=True
    )
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "TPUNB_RUN": "/elsewhere"})
    supervisor.poll()
    assert daemon.poll() is None
    os.kill(supervisor.pid, signal.SIGKILL)
    until(lambda: supervisor.has_finished(tmp_path) and supervisor.broken, "the kernel sees it")
    assert daemon.wait(PATIENCE) == -signal.SIGKILL
    assert not folder.exists()
    assert other.poll() is None
    other.kill()
    other.wait()
    supervisor.close(PATIENCE)


def test_stop_reaches_a_suspended_supervisor_and_its_end_is_reported_at_once(
    tmp_path: Path,
) -> None:
    supervisor = SupervisorProcess(dict(os.environ))
    process = processes.find_process(supervisor.pid)
    assert process is not None
    until(lambda: processes.descendants(supervisor.pid), "it has started its fork server")
    os.kill(supervisor.pid, signal.SIGSTOP)
    until(lambda: processes.process_state(process) == "T", "it is suspended")
    supervisor.stop(tmp_path, Stop(reason="enough"))
    until(lambda: processes.process_state(process) != "T", "it continues")
    os.kill(supervisor.pid, signal.SIGTERM)
    until(lambda: supervisor.poll() or supervisor.broken, "the supervisor reports its end")
    assert supervisor.broken == (
        "the supervisor has ended: the supervisor was terminated (SIGTERM)"
    )
    supervisor.close(PATIENCE)
