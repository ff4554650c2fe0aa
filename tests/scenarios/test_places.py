"""Train cells on a pod, from a notebook: two hosts behind stand-ins for ssh, a real kernel.

The ranks are plain Python where torch is not what matters (tests/fakes/torchless.py): a host is
ready in a second then.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers import places
from tests.drivers.kernel import Kernel, Ran, kernel, until
from tests.drivers.places import result_of
from tests.drivers.pods import ReachedPod, reached_pod
from tests.fakes.hosts import why_refused
from tpunb.runs import state
from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState, StopCause

BEGUN = "import os, time\nprint('begun', flush=True)\n"
GO_ON = f"{BEGUN}time.sleep(600)"


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
        made.run("%load_ext tpunb\n%tpu_setup --backend torch", "load").good()
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
    result = result_of(list_runs(nb.folder / "runs")[-1])
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
    return places.tpunb(pod.project, {**os.environ, **variables(pod)}, *words)


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
    assert run.log.read_text().count("rehearsal on CPU: this run uses no TPU") == 1
    lines = [line for line in run.log.read_text().splitlines() if "[tpunb]" not in line]
    assert sorted(lines) == sorted(
        line for rank in range(4) for line in (f"[{rank}] same", f"[{rank}] rank {rank}")
    )


def test_torch_xla_without_a_tpu_is_refused_on_several_hosts(nb: Kernel) -> None:
    before = len(list_runs(nb.folder / "runs"))
    nb.run("%tpu_setup --backend xla").good()
    ran = nb.run("%%tpu_train --on pod\nprint('never')", "refused")
    nb.run("%tpu_setup --backend torch").good()
    assert "torch_xla is rehearsed on one host, and these are 2 hosts without a TPU" in ran.screen()
    assert "`%tpu_setup --backend torch`" in ran.screen()
    assert len(list_runs(nb.folder / "runs")) == before


def test_interrupt_stops_every_host(nb: Kernel) -> None:
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


def test_host_that_refuses_ssh_is_named_before_anything_starts(pod: ReachedPod, nb: Kernel) -> None:
    before = len(list_runs(nb.folder / "runs"))
    pod.change("h1", refuses="Permission denied (publickey).")
    ran = train(nb, GO_ON)
    assert "h1: Permission denied (publickey)." in ran.traceback
    assert len(list_runs(nb.folder / "runs")) == before


def test_submit_with_parameters_and_fetch(pod: ReachedPod) -> None:
    import nbformat
    from nbformat import v4

    cells = [
        v4.new_code_cell("rate = 1", metadata={"tags": ["parameters"]}),
        v4.new_code_cell(
            "%%tpu_train\nimport os\nbackend = 'gloo'\n"
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


def test_detached_run_outlives_its_kernel_and_is_attached_again(
    pod: ReachedPod, nb: Kernel
) -> None:
    with kernel(pod.project, "left.ipynb", **variables(pod)) as made:
        made.run("%load_ext tpunb\n%tpu_setup --backend torch", "load").good()
        go = str(pod.folder / "go")
        ran = train(
            made,
            f"{BEGUN}\nwhile not os.path.exists({go!r}):\n    time.sleep(0.05)\nprint('went on')",
            "--detach",
        ).good()
        assert "continues without this notebook, on 4 rehearsal cores on 2 hosts" in ran.stdout
        run = newest(made)
        assert run is not None
        until(lambda: run.log.exists() and begun(run) == 4, "ranks that have begun")
    assert "running" in tpunb(pod, "runs").stdout
    Path(go).touch()
    attached = nb.run(f"%tpu_attach {run.id}").good()
    assert who(attached, "went on") == EVERY
    assert begun(run) == 4


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
