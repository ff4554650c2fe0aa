from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpunb.machine import gpus, machine, tpu
from tpunb.runs.spec import BackendName, Device


def pci(root: Path, *devices: tuple[str, str]) -> Path:
    for number, (vendor, device) in enumerate(devices):
        path = root / f"sys/bus/pci/devices/0000:00:{number:02x}.0"
        path.mkdir(parents=True)
        (path / "vendor").write_text(f"{vendor}\n")
        (path / "device").write_text(f"{device}\n")
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/meminfo").write_text("MemAvailable: 1048576 kB\n")
    return root


def test_this_machine_has_no_tpu_and_rehearses() -> None:
    here = machine.detect_machine({})
    assert (here.device, here.chips) == ("CPU", 0)
    ranks = [replace(here, processors=number).default_cores for number in (1, 3, 16)]
    assert ranks == [2, 3, 4]
    assert here.memory > 2**30


def test_chips_are_counted_on_the_pci_bus_among_other_devices(tmp_path: Path) -> None:
    chips = [("0x1ae0", "0x0063")] * 8
    here = machine.detect_machine(
        {}, pci(tmp_path, ("0x8086", "0x0063"), *chips, ("0x1ae0", "0xffff"))
    )
    assert (here.device, here.chips, here.generation) == ("TPU", 8, "v5e")
    assert here.default_cores == 8


def test_the_persons_choice_of_device_counts(tmp_path: Path) -> None:
    one = pci(tmp_path, ("0x1ae0", "0x006f"))
    assert machine.detect_machine({"PJRT_DEVICE": "CPU"}, one).device == "CPU"
    assert machine.detect_machine({"PJRT_DEVICE": "TPU"}).device == "TPU"


def test_a_device_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    folder = pci(tmp_path, ("0x1ae0", "0x0063"))
    (folder / "0000:00:01.0").mkdir()
    assert machine.detect_machine({}, folder).chips == 1


def test_how_many_cores_can_run() -> None:
    laptop = machine.Machine("local", "CPU", 0, "", 2, 8 * 2**30)
    assert laptop.check_cores(1) is None
    assert laptop.check_cores(32) is None
    assert "at least 1" in str(laptop.check_cores(0))
    assert "at most 32 rehearsal ranks fit into the 8 GiB" in str(laptop.check_cores(9999))
    tpu = replace(laptop, device="TPU", chips=8)
    assert tpu.check_cores(8) is None
    assert tpu.check_cores(1) is None
    assert "--cores 1 or --cores all" in str(tpu.check_cores(4))


TPU = machine.Machine("local", "TPU", 8, "v5e", 2, 2**33, vfio_chips=8)
LAPTOP = machine.Machine("local", "CPU", 0, "", 2, 2**33)


@pytest.mark.parametrize(
    ("here", "devices"),
    [
        (TPU, {"xla": "TPU", "torchtpu": "TPU", "torch": "CPU"}),
        (replace(TPU, gpus=1), {"torch": "GPU"}),
        (replace(TPU, vfio_chips=0), {"torchtpu": "CPU"}),
        (replace(TPU, device="CPU", pjrt_device="CPU"), {"xla": "CPU", "torchtpu": "TPU"}),
        (replace(LAPTOP, gpus=2), {"xla": "CPU", "torchtpu": "CPU", "torch": "GPU"}),
        (replace(LAPTOP, gpus=2, cuda=False), {"torch": "CPU"}),
    ],
)
def test_each_backend_has_its_device(
    here: machine.Machine, devices: dict[BackendName, Device]
) -> None:
    for backend, device in devices.items():
        seen = here.with_backend(backend)
        assert (seen.backend, seen.device) == (backend, device)
        assert seen.with_backend("xla").device == here.device
        assert here.with_backend("torch", cpu=True).device == "CPU"


@pytest.mark.parametrize(
    ("changes", "backend", "possible", "words"),
    [
        ({}, "torchtpu", (1, 4, 8), "torch_tpu starts 1, 4 or 8 ranks on this host"),
        ({"chips": 1}, "torchtpu", (1,), "torch_tpu starts 1 rank on"),
        ({"generation": "v4", "chips": 4}, "torchtpu", (1, 2, 4), "1, 2 or 4 ranks"),
        ({"generation": "v7x", "chips": 4}, "torchtpu", (2, 4, 8), "(--cores all: 8)"),
        ({"generation": "v7x", "chips": 4, "workers": 2}, "torchtpu", (2,), "--cores 2 (one chip)"),
        ({"gpus": 2}, "torch", (1, 2), "may use 2 GPUs, and each rank needs its own"),
        ({"gpus": 1}, "torch", (1,), "may use 1 GPU,"),
    ],
)
def test_the_numbers_of_ranks_depend_on_the_backend(
    changes: dict[str, Any], backend: BackendName, possible: tuple[int, ...], words: str
) -> None:
    here = replace(TPU, **changes).with_backend(backend)
    assert tuple(n for n in range(1, 10) if here.check_cores(n) is None) == possible
    assert words in str(here.check_cores(9))
    assert here.default_cores == (8 if changes.get("workers") else possible[-1])


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("0,1", 2),
        ("1, 3", 2),
        ("", 0),
        ("0,-1,1", 1),
        ("NoDevFiles", 0),
        ("GPU-8932f937,GPU-d3a7", 2),
        ("0,1,2,3,GPU-8932f937", 4),
    ],
)
def test_gpus_are_counted_by_their_files_and_cudas_variable(
    visible: str | None, count: int, tmp_path: Path
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine.detect_machine(env, tmp_path).gpus == count


@pytest.mark.parametrize(
    ("version", "usable"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None", True),
        ("__version__ = '2.9.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'", False),
        ("cuda = (", True),
    ],
)
def test_a_torch_for_the_cpu_uses_no_gpu(
    version: str, usable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (("dev/nvidia0", ""), ("packages/torch/version.py", version)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "packages")])
    here = machine.detect_machine({}, tmp_path).with_backend("torch")
    assert (here.device == "GPU") is usable


def test_the_torch_of_these_tests_says_what_it_was_built_for() -> None:
    import torch

    assert gpus.has_cuda(sys.path) is torch.backends.cuda.is_built()


@pytest.mark.parametrize(
    ("label", "topology", "named"),
    [
        ("tpu-v6e-slice", "4x4", "v6e-16"),
        ("tpu-v5-lite-podslice", "2x4", "v5litepod-8"),
        ("tpu7x", "2x2x2", "tpu7x-16"),
        ("v5e", "4x4", "v5litepod-16"),
        ("tpu-v6e-slice", "", ""),
        ("tpu-v6e-slice", "4xx", ""),
        ("nvidia-l4", "1x1", ""),
    ],
)
def test_gkes_labels_are_accelerator_types(label: str, topology: str, named: str) -> None:
    assert tpu.type_of_slice(label, topology) == named
    assert not named or tpu.parse_accelerator_type(named) is not None
