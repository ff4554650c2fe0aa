"""More of tests/scenarios/test_launcher.py, which takes longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.kernel import until
from tests.scenarios.test_launcher import WAITING, ended, says, written
from tests.support import Driver, fork_server, left_below
from tpunb.kernel.launcher import Attached
from tpunb.kernel.supervisor import detached
from tpunb.runs import returns, state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Output
from tpunb.runs.spec import Stop, StopCause
from tpunb.utils import processes

pytestmark = pytest.mark.usefixtures("starts_processes")


def test_crash_of_fork_server_and_of_supervisor_during_a_run(tmp_path: Path) -> None:
    """A run survives the one, and tells of the other; the next run gets new ones."""
    driver = Driver(tmp_path)
    driver.warm()
    supervisor = driver.supervisor_pid
    server = fork_server(supervisor)
    assert server is not None
    seen = driver.run(
        ["import time"],
        "print('at work')\ntime.sleep(1)\nprint('through')",
        when=says("at work"),
        then=lambda run: os.kill(server.pid, signal.SIGKILL),
    )
    assert seen.result.state == "succeeded"
    assert "[0] through" in seen.log
    seen = driver.run(
        ["import time"],
        "print('at work')\ntime.sleep(600)",
        when=says("at work"),
        then=lambda run: os.kill(run._supervisor.pid, signal.SIGKILL),
    )
    assert seen.result.state == "failed"
    assert seen.result.failure is not None
    assert "the supervisor has ended" in seen.result.failure.message
    assert sorted(driver.run([], "print(1)").log) == ["[0] 1", "[1] 1"]
    driver.launcher.close()


def test_queued_run_gets_a_new_fork_server_after_a_crash(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    first, _ = driver.start(["import time"], WAITING)
    second, _ = driver.start([], "print('second')")
    until(lambda: "at work" in written(first.dir.log), "the first works")
    supervisor = driver.supervisor_pid
    server = fork_server(supervisor)
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    first.stop(Stop(StopCause.USER, "enough"))
    assert ended(first).state == "interrupted"
    assert ended(second).state == "succeeded"
    driver.launcher.close()


def test_supervisor_that_no_later_run_can_use_ends_with_its_run(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    first, _ = driver.start(["import time"], WAITING)
    supervisor = driver.supervisor_pid
    until(lambda: "at work" in written(first.dir.log), "the first works")
    seen = driver.run([], "print('other')", env={"PYTHONHASHSEED": "7"})
    assert seen.result.state == "succeeded"
    assert state.run_state(first.dir) == "running"
    first.stop(Stop(StopCause.USER, "enough"))
    assert ended(first).state == "interrupted"
    driver.launcher.retire()
    assert processes.find_process(supervisor) is None
    assert driver.launcher._retired == []
    driver.launcher.close()


DETACHES = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who started the tests may ignore it (nohup)
from pathlib import Path
from tests.support import Driver
driver = Driver(Path(sys.argv[1]))
driver.warm()
first = driver.launcher.supervisor
run, _ = driver.start(["import os, time"], sys.argv[2], returns=("n",), detached=True)
second = driver.launcher.supervisor
assert first is not None and second is not None and second is not first
print(run.dir.path, first.pid, second.pid, flush=True)
time.sleep(600)
"""
COUNTS = """
for i in range(40):
    print("line", i, flush=True)
    while i == 3 and not os.path.exists(os.environ["TPUNB_RUN"] + "/go on"):
        time.sleep(0.05)
n = int(os.environ["RANK"]) + 7
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGHUP])
def test_detached_run_outlives_its_kernel(tmp_path: Path, how: signal.Signals) -> None:
    """A killed kernel, and a terminal that is closed."""
    kernel = subprocess.Popen(
        [sys.executable, "-c", DETACHES, str(tmp_path), COUNTS],
        stdout=subprocess.PIPE,
        text=True,
        cwd=os.getcwd(),
        start_new_session=True,
    )
    assert kernel.stdout is not None
    folder, pid, again = kernel.stdout.readline().split()
    run, supervisor = RunDir(folder), processes.find_process(int(pid))
    assert supervisor is not None
    at_work = ("[0] line 3\n", "[1] line 3\n")
    until(lambda: all(line in written(run.log) for line in at_work), "the ranks work")
    everyone = [supervisor, *processes.descendants(supervisor.pid)]
    assert len(left_below(supervisor.pid)) == 3  # runner, two ranks
    os.killpg(kernel.pid, how)
    if how == signal.SIGHUP:
        os.kill(supervisor.pid, how)
    kernel.wait()
    kernel.stdout.close()
    attached = Attached(run)
    assert state.run_state(run) == "running"
    (run.path / "go on").touch()
    lines: dict[int | None, str] = {}
    for event in attached.events():
        if isinstance(event, Output):
            lines[event.rank] = lines.get(event.rank, "") + event.text
    result = attached.result()
    assert result.state == "succeeded"
    assert lines == dict.fromkeys((0, 1), "".join(f"line {i}\n" for i in range(40)))
    assert returns.collect_returns(result, attached.spec).returns == {"n": 7}
    until(lambda: not any(map(processes.is_alive, everyone)), "nothing of it is left")
    until(lambda: processes.find_process(int(again)) is None, "nor of the other supervisor")
