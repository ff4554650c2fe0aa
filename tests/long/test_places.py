"""More of tests/scenarios/test_places.py, which takes longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from tests.drivers.kernel import Kernel, kernel, until
from tests.drivers.places import mirrors, result_of
from tests.drivers.pods import ROOT, ReachedPod
from tests.scenarios.test_places import (
    BEGUN,
    EVERY,
    GO_ON,
    _nothing_left,
    begun,
    last,
    nb,
    newest,
    pod,
    tpunb,
    train,
    variables,
    who,
)
from tpunb.runs import chips, state
from tpunb.runs.directory import list_runs
from tpunb.runs.spec import FailureKind, RunState, StopCause

TOLD = """
import os, pathlib, time
told = pathlib.Path(os.environ["TPUNB_RUN"], "chips.json")
while not told.exists():
    time.sleep(0.05)
"""


def test_chip_usage_of_every_host_is_collected(pod: ReachedPod, nb: Kernel) -> None:
    """Each host asks its own ports: nobody else can reach them."""
    command = [sys.executable, "-m", "tests.fakes.libtpu", "18431"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    servers = [
        pod[n].popen([*command, str((n + 1) * 10**9), "50"], cwd=ROOT, **pipes) for n in (0, 1)
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == b"serves\n"
        train(nb, TOLD, "--env TPU_RUNTIME_METRICS_PORTS=18431").good()
    finally:
        for server in servers:
            server.communicate()
    known = chips.read_chips(last(nb).dir, ("h0", "h1"))
    assert [(chip.name, chip.peak) for chip in known] == [("h0/0", 10**9), ("h1/0", 2 * 10**9)]


def test_lost_host_ends_the_run_and_is_named(pod: ReachedPod, nb: Kernel) -> None:
    ran = train(nb, GO_ON, until_begun=4)
    pod[1].kill()
    nb.wait(ran)
    result = last(nb)
    assert result.state is RunState.FAILED
    assert "h1" in [each.host for each in result.failures if each.kind is FailureKind.HOST_LOST]
    told = "lost the connection to h1: ssh has ended without a message (exit code 255)"
    assert told in ran.screen()
    assert "ranks h1/2-3 lost" in ran.status


def test_kernel_death_stops_the_hosts(pod: ReachedPod) -> None:
    with kernel(pod.project, "killed.ipynb", **variables(pod)) as made:
        made.run("%load_ext tpunb\n%tpu_setup --backend torch", "load").good()
        train(made, GO_ON, until_begun=4)
        run = newest(made)
        assert run is not None
        os.kill(made.pid, signal.SIGKILL)
        until(lambda: not state.run_state(run).active, "the end")
    result = result_of(run)
    assert result.stop is not None
    assert result.stop.cause is StopCause.KERNEL_GONE


def test_detached_run_is_attached_again_after_its_mirror_died(pod: ReachedPod, nb: Kernel) -> None:
    ran = train(
        nb,
        f"{BEGUN}\nwhile not os.path.exists({str(pod.folder / 'go')!r}):\n    time.sleep(0.05)\n"
        "print('went on')",
        "--detach",
    ).good()
    assert "continues without this notebook, on 4 rehearsal cores on 2 hosts" in ran.stdout
    run = newest(nb)
    assert run is not None
    until(lambda: run.log.exists() and begun(run) == 4, "ranks that have begun")
    for pid in mirrors(run):
        os.kill(pid, signal.SIGKILL)
    until(lambda: state.run_state(run) is RunState.AWAY, "nobody who follows it")
    assert "running" in tpunb(pod, "runs").stdout  # which found it again
    (pod.folder / "go").touch()
    attached = nb.run(f"%tpu_attach {run.id}").good()
    assert who(attached, "went on") == EVERY
    assert run.log.read_text().count("went on") == 4
    assert begun(run) == 4


def test_detached_run_at_a_place_is_stopped_from_a_terminal(pod: ReachedPod, nb: Kernel) -> None:
    train(nb, GO_ON, "--detach").good()
    run = newest(nb)
    assert run is not None
    until(lambda: run.log.exists() and begun(run) == 4, "ranks that have begun")
    stopped = tpunb(pod, "stop", run.id)
    assert "interrupted" in stopped.stdout, stopped.stderr
    assert state.run_state(run) is RunState.INTERRUPTED


def test_files_option_copies_only_changed_files_to_hosts(pod: ReachedPod, nb: Kernel) -> None:
    (pod.project / "data").mkdir(exist_ok=True)
    (pod.project / "data" / "numbers.txt").write_text("1 2 3")
    (pod.project / "data" / "big.bin").write_text("not this one")
    pod.set_place(cores=2, files=["data", "- *.bin"])
    body = "import os\nprint(open('data/numbers.txt').read(), sorted(os.listdir('data')))"
    ran = train(nb, body).good()
    assert who(ran, "1 2 3 ['numbers.txt']") == EVERY
    (pod.project / "data" / "numbers.txt").write_text("4 5 6 7")
    assert who(train(nb, body).good(), "4 5 6 7 ['numbers.txt']") == EVERY


def test_the_doctor_of_a_place(pod: ReachedPod) -> None:
    told = tpunb(pod, "doctor", "--on", "pod")
    assert told.returncode == 0, told.stdout
    assert "ready: %%tpu_train --on pod runs on 4 rehearsal cores on 2 hosts" in told.stdout
    pod.change("h1", refuses="no route to host")
    told = tpunb(pod, "doctor", "--on", "pod")
    assert told.returncode == 1
    assert "problem: h1: no route to host" in told.stdout
