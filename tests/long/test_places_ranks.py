"""A pod with torch in its ranks, from a notebook: the numbers, what comes back, hangs, resuming."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.drivers.kernel import Kernel, kernel
from tests.drivers.pods import ReachedPod, reached_pod
from tests.fakes.hosts import why_refused
from tpunb.runs import trace
from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.spec import Profile, RunState

pytestmark = pytest.mark.timeout(600)

PRELUDE = """
import helper
import torch
import torch.distributed as dist
import tpunb

torch.manual_seed(0)
x, y = torch.randn(64, 3), torch.randn(64, 1)
model = torch.nn.Linear(3, 1)
"""
TRAIN = """
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
averaged = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
part = slice(rank * 64 // world, (rank + 1) * 64 // world)
for step in range(5):
    optimizer.zero_grad()
    loss = ((averaged(x[part]) - y[part]) ** 2).mean()
    loss.backward()
    optimizer.step()
    tpunb.log(step=step, loss=loss)
weights = [p.detach() for p in model.parameters()]
helped = helper.NAME
tpunb.save({"step": 5}, step=5)
"""


@pytest.fixture(scope="module")
def pod(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReachedPod]:
    if refused := why_refused():
        pytest.skip(refused)
    with reached_pod(2, tmp_path_factory.mktemp("pod")) as pod:
        pod.set_place(cores=2, files=["*.py"], checkpoints=str(pod.folder / "shared"))
        (pod.project / "helper.py").write_text("NAME = 'a module that travelled'\n")
        yield pod


@pytest.fixture(scope="module")
def nb(pod: ReachedPod) -> Iterator[Kernel]:
    env = {**pod.environment(), "HOME": str(pod.folder)}
    with kernel(pod.project, "pod.ipynb", **env) as made:
        made.run("%load_ext tpunb\n%tpu_setup --backend torch", "load").good()
        made.run(PRELUDE, "prelude").good()
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(pod: ReachedPod) -> Iterator[None]:
    yield
    pod.wait_until_empty()


@pytest.fixture(scope="module")
def trained(nb: Kernel) -> RunDir:
    """The run on both hosts: its weights are `weights` in the kernel."""
    nb.run(f"%%tpu_train --on pod --profile 2-4 --returns weights,helped\n{TRAIN}", "train").good()
    return list_runs(nb.folder / "runs")[-1]


def test_profile_traces_of_all_hosts_are_merged(trained: RunDir) -> None:
    [session] = (trained.profile / "plugins" / "profile").iterdir()
    every = [f"rank-{rank}.pt.trace.json" for rank in range(4)]
    assert sorted(path.name for path in session.iterdir()) == every
    steps = trace.read_step_times(trained, Profile((), 2, 4), 4, 1)
    assert steps is not None
    assert (steps.first, steps.ranks) == (2, (0, 1, 2, 3))


SECOND = """
state = tpunb.load()
print("begins at", state["step"])
second = weights[0] + 1
"""


def test_resume_on_every_host_from_a_shared_checkpoint_with_returns(
    pod: ReachedPod, nb: Kernel, trained: RunDir
) -> None:
    assert list((pod.folder / "shared" / trained.id).glob("*.pt"))
    options = f"--on pod --returns second --resume {trained.id}"
    ran = nb.run(f"%%tpu_train {options}\n{SECOND}", "second").good()
    lines = [line for line in ran.stdout.splitlines() if "begins at" in line]
    assert all(line.endswith("begins at 5") for line in lines)
    assert all(host in " ".join(lines) for host in ("h0/", "h1/"))
    assert nb.value("torch.equal(second, weights[0] + 1)")


def test_launch_of_a_function_on_every_host(nb: Kernel) -> None:
    twice = "import os\ndef twice(x):\n    return x * 2 + int(os.environ['WORLD_SIZE'])"
    nb.run(twice, "twice").good()
    ran = nb.run("print(tpunb.launch(twice, args=(torch.tensor(3.0),), on='pod').returns)", "call")
    assert "{'value': tensor(10.)}" in ran.good().stdout


def test_hang_report_lists_waiting_ranks_of_every_host(nb: Kernel) -> None:
    body = (
        "import time\ndist.init_process_group('gloo')\nif dist.get_rank() == 3:\n"
        "    time.sleep(600)\ndist.barrier()"
    )
    ran = nb.run(f"%%tpu_train --on pod --hang-timeout 4\n{body}", "hang")
    [result] = [run.read_result() for run in list_runs(nb.folder / "runs")[-1:]]
    assert result is not None
    assert result.state is RunState.HUNG, ran.screen()
    text = result.failures[0].message
    waiting = r"h0/0-1,h1/2: in distributed_c10d.barrier, cell \[\d+\], line 6: dist.barrier"
    assert re.search(waiting, text), text
    assert re.search(r"h1/3: at cell \[\d+\], line 5: time.sleep", text), text
