"""The processors of this process, if OpenMP has pinned a thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tpunb.utils import cpus

# A thread as a kernel has: it is older than the import that pins.
PINNED = """
import json, os, threading
may_end = threading.Event()
threading.Thread(target=may_end.wait).start()
import torch
from tpunb.kernel import pipeline
from tpunb.utils import cpus
from tpunb.kernel.supervisor import SupervisorProcess
from tpunb.utils.processes import descendants
del os.environ["OMP_PROC_BIND"]
supervisor = SupervisorProcess(dict(os.environ))
while not supervisor.ready and not supervisor.broken:
    supervisor.poll()
    threading.Event().wait(0.05)
started = [supervisor.pid, *(each.pid for each in descendants(supervisor.pid))]
print(json.dumps({
    "thread": sorted(os.sched_getaffinity(0)),
    "allowed": sorted(cpus.allowed_cpus()),
    "started": [sorted(os.sched_getaffinity(pid)) for pid in started],
    "plan": list(pipeline._processors()),
}))
supervisor.close(60)
may_end.set()
"""


def test_of_a_process_that_nobody_has_pinned() -> None:
    assert cpus.allowed_cpus() == os.sched_getaffinity(0)


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without privileges")
def test_idle_scheduling_of_the_user_s_own_stays() -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            cpus.restore_priority()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.usefixtures("starts_processes")
def test_what_a_thread_was_pinned_to_is_not_what_ranks_get() -> None:
    given = sorted(os.sched_getaffinity(0))
    if len(given) < 2:
        pytest.skip("one processor cannot be a part of the processors")
    env = {**os.environ, "OMP_PROC_BIND": "true"}
    ended = subprocess.run(
        [sys.executable, "-c", PINNED], env=env, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert len(found["thread"]) == 1  # OpenMP does it
    assert found["allowed"] == given
    assert len(found["started"]) >= 2
    assert all(each == given for each in found["started"])
    [told] = found["plan"]
    assert told.startswith(f"processors: all {len(given)} of the kernel's process, although ")
