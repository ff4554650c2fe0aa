"""Train cells on a pod, from a notebook: two hosts behind stand-ins for ssh, a real kernel.

The ranks are plain Python where torch is not what matters (tests/fakes/torchless.py): a host is
ready in a second then.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.kernel import Kernel, Ran, kernel, until
from tests.drivers.pods import ROOT, ReachedPod, reached_pod
from tests.fakes.hosts import why_refused
from tpunb.runs import chips, state
from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.result import RunResult
from tpunb.runs.spec import FailureKind, RunState, StopCause

BEGUN = "import os, time\nprint('begun', flush=True)\n"
GO_ON = f"{BEGUN}time.sleep(600)"
SLOW_TO_END = f"""{BEGUN}
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("saving", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def pod(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReachedPod]:
    if refused := why_refused():
        pytest.skip(refused)
    with reached_pod(2, tmp_path_factory.mktemp("pod")) as pod:
        pod.set_place(cores=2)
        pod.without_torch()
        yield pod


@pytest.fixture(scope="module")
def nb(pod: ReachedPod) -> Iterator[Kernel]:
    with kernel(pod.project, "pod.ipynb", **variables(pod)) as made:
        made.run("%load_ext tpunb", "load").good()
        yield made


def variables(pod: ReachedPod) -> dict[str, str]:
    return {**pod.environment(), "HOME": str(pod.folder)}


@pytest.fixture(autouse=True)
def _nothing_left(pod: ReachedPod) -> Iterator[None]:
    yield
    pod.set_place(cores=2)
    for host in pod.names:
        pod.change(host, refuses=None, slow=None)
    pod.wait_until_empty()


def train(nb: Kernel, body: str, options: str = "", *, until_begun: int = 0) -> Ran:
    ran = nb.send(f"%%tpu_train --on pod {options}\n{body}", "train")
    if until_begun:
        run = until(lambda: newest(nb), "a run")
        until(lambda: run.log.exists() and begun(run) >= until_begun, "ranks that have begun")
        return ran
    return nb.wait(ran)


def begun(run: RunDir) -> int:
    return run.log.read_text().count("] begun")


def newest(nb: Kernel) -> RunDir | None:
    active = [run for run in list_runs(nb.folder / "runs") if state.run_state(run).active]
    return active[-1] if active else None


def last(nb: Kernel) -> RunResult:
    result = list_runs(nb.folder / "runs")[-1].read_result()
    assert result is not None
    return result


def who(ran: Ran, line: str) -> list[str]:
    """Which ranks are shown to have written a line, as `host/rank`."""
    found = []
    for names in re.findall(rf"^\[(\S+)\] {re.escape(line)}$", ran.stdout, re.MULTILINE):
        for host, first, last_one in re.findall(r"(\w+)/(\d+)(?:-(\d+))?", names):
            found += [f"{host}/{n}" for n in range(int(first), int(last_one or first) + 1)]
    return sorted(found)


EVERY = ["h0/0", "h0/1", "h1/2", "h1/3"]


def tpunb(pod: ReachedPod, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tpunb", *words],
        cwd=pod.project,
        env={**os.environ, **variables(pod)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_train_cell_runs_on_every_host(nb: Kernel) -> None:
    ran = train(nb, "import os\nprint('same')\nprint('rank', os.environ['RANK'])").good()
    assert who(ran, "same") == EVERY
    assert who(ran, "rank 3") == ["h1/3"]
    assert "4 ranks" in ran.status
    result = last(nb)
    assert (result.state, result.world_size) == (RunState.SUCCEEDED, 4)
    assert (result.hosts, result.place) == (("h0", "h1"), "pod")
    run = RunDir(result.dir)
    for rank in range(4):
        assert f"rank {rank}" in (run.attempt(0, rank) / "stdout.log").read_text()
    assert run.log.read_text().count("rehearsal on CPU: no TPU takes part in this run") == 1
    lines = [line for line in run.log.read_text().splitlines() if "[tpunb]" not in line]
    assert sorted(lines) == sorted(
        line for rank in range(4) for line in (f"[{rank}] same", f"[{rank}] rank {rank}")
    )


TOLD = """
import os, pathlib, time
told = pathlib.Path(os.environ["TPUNB_RUN"], "chips.json")
while not told.exists():
    time.sleep(0.05)
"""


def test_the_chips_of_every_host_are_told_here(pod: ReachedPod, nb: Kernel) -> None:
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


def test_a_failure_names_host_rank_cell_and_line(nb: Kernel) -> None:
    ran = train(nb, "import os\nif os.environ['RANK'] == '3':\n    raise ValueError('bad batch')")
    assert re.search(
        r"rank h1/3 failed in cell \[\d+\], line 4: ValueError: bad batch", ran.screen()
    )
    assert "Traceback" not in "".join(text for _, text in ran.texts)  # the card has it
    [failure] = [each for each in last(nb).failures if each.type == "ValueError"]
    assert (failure.rank, failure.host) == (3, "h1")


def test_the_interrupt_key_stops_every_host(nb: Kernel) -> None:
    ran = train(nb, GO_ON, until_begun=4)
    run = newest(nb)
    assert run is not None
    until(lambda: all(run.memory(0, rank).exists() for rank in range(4)), "the ranks' memory")
    nb.interrupt()
    nb.wait(ran)
    result = last(nb)
    assert result.state is RunState.INTERRUPTED
    assert result.stop is not None
    assert result.stop.cause is StopCause.USER


def test_a_second_interrupt_skips_the_grace_period(nb: Kernel) -> None:
    ran = train(nb, SLOW_TO_END, "--grace 10m", until_begun=4)
    run = newest(nb)
    assert run is not None
    nb.interrupt()
    until(lambda: run.log.read_text().count("saving") == 4, "ranks that save")
    nb.interrupt()
    nb.wait(ran)
    assert last(nb).state is RunState.INTERRUPTED


def test_an_interrupt_while_hosts_are_asked_starts_nothing(pod: ReachedPod, nb: Kernel) -> None:
    before = len(list_runs(nb.folder / "runs"))
    pod.change("h1", slow=300)
    calls = len(pod.calls())
    ran = nb.send(f"%%tpu_train --on pod\n{GO_ON}", "train")
    until(lambda: sum("-G" not in call for call in pod.calls()[calls:]) >= 2, "questions")

    def told() -> bool:
        nb.read(ran)
        return ran.statuses() == ["waiting for the hosts of place pod to answer: h0, h1"]

    until(told, "what it waits for")
    nb.interrupt()
    assert "interrupted before the run began: nothing was started" in nb.wait(ran).traceback
    assert ran.status == ""  # the error says it all
    assert len(list_runs(nb.folder / "runs")) == before


def test_an_interrupt_while_hosts_start_ends_them(pod: ReachedPod, nb: Kernel) -> None:
    ran = nb.send(f"%%tpu_train --on pod\n{GO_ON}", "train")
    until(lambda: newest(nb), "a run")
    nb.interrupt()
    nb.wait(ran)
    assert last(nb).state is RunState.INTERRUPTED


def test_a_host_that_differs_is_refused_before_anything_starts(pod: ReachedPod, nb: Kernel) -> None:
    before = len(list_runs(nb.folder / "runs"))
    pod.change("h1", refuses="Permission denied (publickey).")
    ran = train(nb, GO_ON)
    assert "h1: Permission denied (publickey)." in ran.traceback
    assert len(list_runs(nb.folder / "runs")) == before


def test_retries_start_all_hosts_again(nb: Kernel) -> None:
    body = (
        "import os\nif os.environ['RANK'] == '2' and os.environ['TPUNB_ATTEMPT'] == '0':\n"
        "    raise ValueError('once')\nprint('attempt', os.environ['TPUNB_ATTEMPT'])"
    )
    ran = train(nb, body, "--retries 1").good()
    assert who(ran, "attempt 1") == EVERY
    assert last(nb).attempts == 2


def test_a_lost_host_ends_the_run_by_its_name(pod: ReachedPod, nb: Kernel) -> None:
    ran = train(nb, GO_ON, until_begun=4)
    pod[1].kill()
    nb.wait(ran)
    result = last(nb)
    assert result.state is RunState.FAILED
    assert "h1" in [each.host for each in result.failures if each.kind is FailureKind.HOST_LOST]
    told = "lost the connection to h1: ssh has ended without a message (exit code 255)"
    assert told in ran.screen()
    assert "ranks h1/2-3 lost" in ran.status


def test_losing_host_0_is_said_by_what_is_left(pod: ReachedPod, nb: Kernel) -> None:
    ran = train(nb, GO_ON, until_begun=4)
    pod[0].kill()
    nb.wait(ran)
    result = last(nb)
    assert result.state is RunState.FAILED
    assert "h0" in [each.host for each in result.failures if each.kind is FailureKind.HOST_LOST]


def test_when_the_kernel_is_killed_the_hosts_end(pod: ReachedPod) -> None:
    with kernel(pod.project, "killed.ipynb", **variables(pod)) as made:
        made.run("%load_ext tpunb", "load").good()
        train(made, GO_ON, until_begun=4)
        run = newest(made)
        assert run is not None
        os.kill(made.pid, signal.SIGKILL)
        until(lambda: not state.run_state(run).active, "the end")
    result = run.read_result()
    assert result is not None
    assert result.stop is not None
    assert result.stop.cause is StopCause.KERNEL_GONE


def test_a_run_in_the_background(nb: Kernel) -> None:
    train(nb, "print('here')", "--bg --out handle").good()
    assert nb.run("handle.wait().state").good().shown == "'succeeded'"


def test_a_detached_run_is_found_again_when_its_mirror_is_gone(pod: ReachedPod, nb: Kernel) -> None:
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


def mirrors(run: RunDir) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.exists() else []
            if str(run.path).encode() in words and any(b"places import mirror" in w for w in words):
                found.append(int(entry.name))
    return found


def test_a_detached_run_is_stopped_from_a_terminal(pod: ReachedPod, nb: Kernel) -> None:
    train(nb, GO_ON, "--detach").good()
    run = newest(nb)
    assert run is not None
    until(lambda: run.log.exists() and begun(run) == 4, "ranks that have begun")
    stopped = tpunb(pod, "stop", run.id)
    assert "interrupted" in stopped.stdout, stopped.stderr
    assert state.run_state(run) is RunState.INTERRUPTED


def test_files_travel_and_only_what_changed(pod: ReachedPod, nb: Kernel) -> None:
    (pod.project / "data").mkdir(exist_ok=True)
    (pod.project / "data" / "numbers.txt").write_text("1 2 3")
    (pod.project / "data" / "big.bin").write_text("not this one")
    pod.set_place(cores=2, files=["data", "- *.bin"])
    body = "import os\nprint(open('data/numbers.txt').read(), sorted(os.listdir('data')))"
    ran = train(nb, body).good()
    assert who(ran, "1 2 3 ['numbers.txt']") == EVERY
    (pod.project / "data" / "numbers.txt").write_text("4 5 6 7")
    assert who(train(nb, body).good(), "4 5 6 7 ['numbers.txt']") == EVERY


def test_submit_with_parameters_and_fetch(pod: ReachedPod) -> None:
    import nbformat
    from nbformat import v4

    cells = [
        v4.new_code_cell("rate = 1", metadata={"tags": ["parameters"]}),
        v4.new_code_cell(
            "%%tpu_train\nimport os\n"
            "os.makedirs(os.environ['TPUNB_RUN'] + '/checkpoints', exist_ok=True)\n"
            "open(os.environ['TPUNB_RUN'] + f\"/checkpoints/{os.environ['RANK']}\", 'w').write('x')"
        ),
    ]
    nbformat.write(v4.new_notebook(cells=cells), pod.project / "sent.ipynb")
    sent = tpunb(pod, "submit", "sent.ipynb", "--on", "pod", "-p", "rate", "0.5")
    assert sent.returncode == 0, sent.stderr
    run = list_runs(pod.project / "runs")[-1]
    assert "rate = 0.5" in run.script.read_text()
    assert not run.checkpoints.exists()
    fetched = tpunb(pod, "fetch", run.id)
    assert fetched.returncode == 0, fetched.stderr
    names = sorted(Path(line).relative_to(run.path).as_posix() for line in fetched.stdout.split())
    assert names == [
        *("checkpoints/0", "checkpoints/1"),
        *("hosts/1/checkpoints/2", "hosts/1/checkpoints/3"),
    ]


def test_a_sweep_at_a_place(pod: ReachedPod) -> None:
    import nbformat
    from nbformat import v4

    cells = [
        v4.new_code_cell("%load_ext tpunb"),
        v4.new_code_cell("rate = 1", metadata={"tags": ["parameters"]}),
        v4.new_code_cell("%%tpu_train\nimport tpunb\ntpunb.log(0, loss=1.0)"),
    ]
    nbformat.write(v4.new_notebook(cells=cells), pod.project / "swept.ipynb")
    words = ["--grid", "rate=2,3", "--metric", "loss", "--on", "pod"]
    swept = tpunb(pod, "sweep", "swept.ipynb", *words)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert "2 trials: 2 complete · best loss 1 in trial 0" in swept.stdout
    for run, rate in zip(list_runs(pod.project / "runs")[-2:], (2, 3), strict=True):
        assert f"rate = {rate}" in run.script.read_text()
        result = run.read_result()
        assert result is not None
        assert (result.place, len(result.hosts)) == ("pod", 2)


def test_the_doctor_of_a_place(pod: ReachedPod) -> None:
    told = tpunb(pod, "doctor", "--on", "pod")
    assert told.returncode == 0, told.stdout
    assert "ready: %%tpu_train --on pod runs on 4 rehearsal cores on 2 hosts" in told.stdout
    pod.change("h1", refuses="no route to host")
    told = tpunb(pod, "doctor", "--on", "pod")
    assert told.returncode == 1
    assert "problem: h1: no route to host" in told.stdout
