"""`tpunb doctor` and `%tpu_setup` as users see them, on fake machines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.kernel import ROOT, Kernel, kernel
from tests.fakes.machine import FakeMachine
from tests.machine.machines import machine

pytestmark = pytest.mark.usefixtures("lent")

FIRST = ["platform", "device", "chips", "cores", "accelerator_type", "versions", "problems"]
"""Keys that other programs read."""


def doctor(made: FakeMachine, *options: str) -> tuple[int, str]:
    env = made.env | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tpunb", "doctor", *options],
        cwd=made.root,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_doctor_of_a_laptop_is_ready(tmp_path: Path) -> None:
    with machine("laptop", tmp_path) as made:
        status, text = doctor(made)
        assert re.match("Ready: [234] rehearsal cores", text)
        assert status == 0
        status, text = doctor(made, "--json", "--runs", "elsewhere")
    told = json.loads(text)
    assert status == 0
    assert set(FIRST) <= told.keys()
    assert (told["platform"], told["device"], told["chips"]) == ("local", "CPU", 0)
    assert told["problems"] == told["advice"] == []
    assert told["disk"]["runs"] == "elsewhere"
    assert {"python", "torch", "torch_xla", "ipykernel", "tpunb"} <= told["versions"].keys()


def test_a_tpu_that_another_process_holds(tmp_path: Path) -> None:
    """This environment's packages are for machines without a TPU, which is also reported."""
    with machine("gke", tmp_path) as made:
        process = made.hold("vfio/2")
        status, text = doctor(made, "--json")
    told = json.loads(text)
    assert status == 1
    assert (told["platform"], told["chips"], told["hbm_per_chip_gib"]) == ("gke", 8, 16)
    assert [one["id"] for one in told["problems"]] == ["tpu-held", "libtpu-missing"]
    assert all(one.keys() == {"id", "message", "fix"} for one in told["problems"])
    assert [one["pid"] for one in told["held_by"]] == [process.pid]


@pytest.fixture(scope="module")
def made(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeMachine]:
    with machine("kaggle-tpu", tmp_path_factory.mktemp("machine")) as made:
        yield made


@pytest.fixture(scope="module")
def nb(made: FakeMachine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    env = {name: value for name, value in made.env.items() if name != "HOME"}
    with kernel(tmp_path_factory.mktemp("kernel"), **env) as nb:
        nb.run("%load_ext tpunb", "load").good()
        yield nb


class TestKernel:
    """A kernel on a Kaggle TPU whose metadata server refuses."""

    def test_setup_card_and_json_on_kaggle(self, nb: Kernel) -> None:
        ran = nb.run("%tpu_setup --no-warm", "setup").good()
        assert ran.status.splitlines()[1].startswith("  libtpu")
        rows = dict(re.findall(r"^(\w[\w ]*\w) {2,}(.+)$", ran.status, re.MULTILINE))
        assert rows["platform"] == "Kaggle, TPU runtime"
        assert rows["device"].startswith("v5litepod-8 · 8 chips on this host · 16 GiB HBM a chip")
        assert rows["kernel"] == "uses XLA on CPU, so runs can take the TPU"
        told = json.loads(nb.run("%tpu_setup --no-warm --json", "setup").good().stdout)
        assert (told["platform"], told["cores"], told["kernel_device"]) == ("kaggle", 8, "CPU")

    def test_dry_run_plan_gives_a_reason_for_each_variable(self, nb: Kernel) -> None:
        said = nb.run("%%tpu_train --dry-run\npass", "train").good().stdout
        for line in (
            "  TPU_PROCESS_ADDRESSES removed  (torch_xla would keep it in every rank)",
            "  TPU_SKIP_MDS_QUERY = 1  (from the PCI bus; no metadata server gives the topology)",
            "  TPU_CHIPS_PER_HOST_BOUNDS = 2,4,1  (from the PCI bus; no metadata server gives "
            "the topology)",
            "  PJRT_DEVICE = TPU  (the device of the ranks)",
        ):
            assert line in said.splitlines()
        assert "  TPUNB_XLA_CACHE = " in said
        assert nb.value("__import__('os').environ['TPU_PROCESS_ADDRESSES']") == "local"

    def test_device_busy_error_names_the_other_kernel(self, nb: Kernel, made: FakeMachine) -> None:
        process = made.hold("vfio/1", kernel="/home/me/other.ipynb")
        ran = nb.run("%%tpu_train\npass", "train")
        assert ran.traceback.startswith(
            "DeviceBusyError: the TPU is held by the kernel of other.ipynb (process "
            f"{process.pid} of "
        )
        assert (
            f"shut down that kernel (in the list of running kernels), or `kill {process.pid}`"
            in (ran.traceback)
        )
        made.release_lifelines(process)
        assert not (nb.folder / "runs").exists()


def test_device_busy_error_names_the_cell_that_took_the_tpu(nb: Kernel, made: FakeMachine) -> None:
    device = made.root / "dev/vfio/0"
    taking = f"import torch_xla\ntorch_xla.device()\nheld = open({str(device)!r})"
    nb.run("import torch", "import").good()
    number = nb.run(taking, "taking").good().number
    nb.run("1 + 1", "later").good()
    ran = nb.run("%%tpu_train\npass", "train")
    assert (
        f"DeviceBusyError: the TPU is held by this notebook's kernel (process {nb.pid}) since "
        f"cell [{number}]"
    ) in ran.traceback
    assert "restart this kernel" in ran.traceback
    card = nb.run("%tpu_setup --no-warm", "setup").good().status
    assert "the TPU is held by this notebook's kernel" in card
    nb.run("held.close()", "later").good()
    assert "is held by" not in nb.run("%tpu_setup --no-warm", "setup").good().status
