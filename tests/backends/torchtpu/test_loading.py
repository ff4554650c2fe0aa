"""A rehearsed TPU where torch_tpu is installed, too, which torch loads when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tests.drivers.kernel import ROOT, Kernel, kernel
from tests.fakes import torch_tpu
from tests.fakes.machine import FakeMachine
from tpunb.backends.torchtpu.loading import AUTOLOAD
from tpunb.runs.directory import list_runs

pytestmark = pytest.mark.usefixtures("starts_processes")

PRELUDE = """
import torch.distributed as dist
x = torch.ones(2, device=torch.device("tpu"))
print(x.sin()[0].item() == torch.ones(1).sin().item(), x.device, torch.tpu is not None)
"""
TRAIN = """%%tpu_train
import os
if "RANK" in os.environ and not dist.is_initialized():
    dist.init_process_group("tpu_dist")
total = torch.ones({count}, device="tpu")
if dist.is_initialized():
    dist.all_reduce(total)
print(f"total {{total.tolist()}} {{total.sin().device}}" + chr(10), end="")
"""


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, str]:
    """The environment in which torch_tpu is installed."""
    return {"PYTHONPATH": f"{ROOT}:{torch_tpu.install_beside_torch(tmp_path / 'packages')}"}


def train_twice(nb: Kernel) -> None:
    for count in (1, 2):
        ran = nb.run(TRAIN.format(count=count), f"train-{count}").good()
        assert f" total {[2.0] * count} tpu:0\n" in ran.stdout
        assert list_runs(nb.folder / "runs")[-1].read_spec().backend == "torchtpu"


@pytest.mark.parametrize("autoload", ["", "1"])
def test_kernel_and_ranks_have_the_rehearsed_tpu(
    packages: dict[str, str], autoload: str, tmp_path: Path
) -> None:
    env = packages | ({AUTOLOAD: autoload} if autoload else {})
    with kernel(tmp_path, **env) as nb:
        nb.run("%load_ext tpunb", "load").good()
        nb.run("import torch_tpu\nimport torch", "import").good()
        nb.run("%tpu_setup --cores 2", "setup").good()
        assert nb.run(PRELUDE, "prelude").good().stdout == "True tpu:0 True\n"
        train_twice(nb)
        ran = nb.run(TRAIN.format(count=3).replace("train", f"train --env {AUTOLOAD}=1"), "fails")
        said = "torch_tpu is loaded in this process, so no TPU can be rehearsed in it: set "
        assert said in ran.red_line
        assert "os._exit" not in ran.screen()
        run = list_runs(nb.folder / "runs")[-1]
        assert f"[tpunb] {said}" in run.log.read_text()
        nb.run("import tpunb", "ask").good()
        assert nb.value("tpunb.last_run.failure.type") == "SetupError"
        assert nb.value("tpunb.last_run.diagnoses") == ()


def test_a_kernel_that_has_loaded_torch_tpu_starts_runs(
    packages: dict[str, str], tmp_path: Path
) -> None:
    with kernel(tmp_path, **packages) as nb:
        nb.run("import torch", "import").good()
        said = "torch_tpu was loaded before tpunb, so the kernel has no rehearsed TPU"
        assert said in nb.run("%load_ext tpunb", "load").good().stderr
        setup = nb.run("%tpu_setup --cores 2", "setup").good()
        assert said not in setup.screen()  # once is enough
        assert "has loaded torch_tpu" in setup.screen()
        nb.run("import torch.distributed as dist", "prelude").good()
        train_twice(nb)


def test_the_kernel_can_have_the_real_tpu(packages: dict[str, str], tmp_path: Path) -> None:
    here = FakeMachine(tmp_path / "machine", packages).chips("v5e", 4)
    with kernel(tmp_path, **here.env) as nb:
        nb.run("%load_ext tpunb", "load").good()
        nb.run("%tpu_setup --kernel tpu --no-warm", "setup").good()
        nb.run("import torch, torch_tpu", "import").good()
        assert nb.value("hasattr(torch_tpu, '_loader')")


def test_scripts_and_the_doctor(packages: dict[str, str], tmp_path: Path) -> None:
    def run(*command: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, **packages, **env},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    cells = [
        v4.new_code_cell(f"import tpunb, torch{PRELUDE}"),
        v4.new_code_cell(TRAIN.format(count=1)),
    ]
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "nb.ipynb")
    run("-m", "tpunb", "convert", "nb.ipynb", "-o", "script.py")
    assert "total [1.0] tpu:0" in run("script.py")
    assert "total [1.0] tpu:0" in run("script.py", **{AUTOLOAD: "1"})
    launch = "-m torch.distributed.run --standalone --nproc-per-node=2".split()
    assert run(*launch, "script.py").count("total [2.0] tpu:0") == 2
    shown = run("-m", "tpunb", "doctor")
    assert "torchtpu (because torch_tpu is installed)" in shown
