"""A pod with torch in its ranks, from a notebook: the numbers, what comes back, hangs, resuming."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.kernel import Kernel, kernel
from tests.drivers.pods import ReachedPod, reached_pod
from tests.fakes.hosts import why_refused
from tpunb.runs.directory import list_runs
from tpunb.runs.spec import RunState

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PRELUDE = """
import helper
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
import tpunb

torch.manual_seed(0)
x, y = torch.randn(64, 3), torch.randn(64, 1)
model = torch.nn.Linear(3, 1)
"""
TRAIN = """
device, rank, world = torch_xla.device(), xr.global_ordinal(), xr.world_size()
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
part = slice(rank * 64 // world, (rank + 1) * 64 // world)
a, b = x[part].to(device), y[part].to(device)
for step in range(5):
    optimizer.zero_grad()
    loss = ((model(a) - b) ** 2).mean()
    loss.backward()
    xm.optimizer_step(optimizer)
    tpunb.log(step=step, loss=loss)
weights = [p.detach().cpu() for p in model.parameters()]
helped = helper.NAME
"""
ONE_PROCESS = """
torch.manual_seed(0)
x, y = torch.randn(64, 3), torch.randn(64, 1)
alone = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    ((alone(x) - y) ** 2).mean().backward()
    optimizer.step()
close = [torch.allclose(a, b, atol=1e-6) for a, b in zip(on_pod, alone.parameters())]
"""


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReachedPod]:
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
        made.run("%load_ext tpunb", "load").good()
        made.run(PRELUDE, "prelude").good()
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(pod: ReachedPod) -> Iterator[None]:
    yield
    pod.wait_until_empty()


def test_two_hosts_of_two_give_the_numbers_of_four_and_of_one(nb: Kernel) -> None:
    nb.run(f"%%tpu_train --on pod --returns weights,helped\n{TRAIN}", "train").good()
    nb.run("on_pod = weights", "keep").good()
    assert nb.value("helped") == "a module that travelled"
    nb.run(f"%%tpu_train --cores 4 --returns weights,helped\n{TRAIN}", "train").good()
    same = "all(torch.equal(a, b) for a, b in zip(on_pod, weights))"
    assert nb.value(same)
    nb.run(f"# tpu: skip\n{ONE_PROCESS}", "alone").good()
    assert nb.value("close") == [True, True]
    runs = [result for run in list_runs(nb.folder / "runs") if (result := run.read_result())]
    pod, here = (run.metrics().groupby("step")["loss"].mean() for run in runs[-2:])
    assert pod.tolist() == pytest.approx(here.tolist())


def test_a_later_train_cell_has_what_an_earlier_one_returned(nb: Kernel) -> None:
    nb.run("%%tpu_train --on pod --returns first\nfirst = torch.ones(2)", "first").good()
    ran = nb.run("%%tpu_train --on pod --returns second\nsecond = first + 1", "second").good()
    assert nb.value("second.tolist()") == [2.0, 2.0], ran.screen()


def test_a_hang_says_who_waits_where_on_every_host(nb: Kernel) -> None:
    body = "import time\nif xr.global_ordinal() == 3:\n    time.sleep(600)\nxm.rendezvous('all')"
    ran = nb.run(f"%%tpu_train --on pod --hang-timeout 4\n{body}", "hang")
    [result] = [run.read_result() for run in list_runs(nb.folder / "runs")[-1:]]
    assert result is not None
    assert result.state is RunState.HUNG, ran.screen()
    text = result.failures[0].message
    assert re.search(r"h1/3.*cell \[\d+\], line 4", text, re.DOTALL), text
    assert re.search(r"h0/0.*cell \[\d+\], line 5", text, re.DOTALL), text


SAVES = """
state = tpunb.load()
begun = 0 if state is None else state["step"]
print("begins at", begun)
tpunb.save({"step": begun + 5}, step=begun + 5)
"""


def test_every_host_resumes_from_the_shared_checkpoint(pod: ReachedPod, nb: Kernel) -> None:
    nb.run(f"%%tpu_train --on pod\n{SAVES}", "saves").good()
    first = list_runs(nb.folder / "runs")[-1]
    assert list((Path(pod.folder) / "shared" / first.id).glob("*.pt"))
    resumed = nb.run(f"%%tpu_train --on pod --resume {first.id}\n{SAVES}", "saves").good()
    lines = [line for line in resumed.stdout.splitlines() if "begins at" in line]
    assert all(line.endswith("begins at 5") for line in lines)
    named = " ".join(lines)
    assert "h0/" in named
    assert "h1/" in named
