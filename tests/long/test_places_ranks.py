"""A pod with torch in its ranks, from a notebook: what comes back, and resuming."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.drivers.kernel import Kernel, kernel
from tests.drivers.pods import ReachedPod, reached_pod
from tests.fakes.hosts import why_refused
from tpunb.runs.directory import RunDir, list_runs

pytestmark = pytest.mark.timeout(600)

PRELUDE = """
import helper, torch, tpunb
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
"""
TRAIN = """
total = xm.all_reduce("sum", xr.global_ordinal() * torch.ones(1, device="xla")).cpu()
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
        made.run("%load_ext tpunb", "load").good()
        made.run(PRELUDE, "prelude").good()
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(pod: ReachedPod) -> Iterator[None]:
    yield
    pod.wait_until_empty()


@pytest.fixture(scope="module")
def trained(nb: Kernel) -> RunDir:
    """The run on both hosts, which has returned `total` and `helped`."""
    nb.run(f"%%tpu_train --on pod --returns total,helped\n{TRAIN}", "train").good()
    return list_runs(nb.folder / "runs")[-1]


SECOND = """
state = tpunb.load()
print("begins at", state["step"])
second = total + 1
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
    assert nb.value("second.item(), helped") == (7.0, "a module that travelled")


def test_launch_of_a_function_on_every_host(nb: Kernel) -> None:
    nb.run("def twice(x):\n    return x * 2 + xr.world_size()", "twice").good()
    ran = nb.run("print(tpunb.launch(twice, args=(torch.tensor(3.0),), on='pod').returns)", "call")
    assert "{'value': tensor(10.)}" in ran.good().stdout
