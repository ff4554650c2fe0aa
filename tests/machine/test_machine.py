from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tpunb.machine import machine, tpu


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
    assert (here.device, here.chips, here.default_cores) == ("CPU", 0, 4)
    assert here.processors >= 1
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


@pytest.mark.parametrize(
    ("env", "platform"),
    [
        ({}, "local"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, "colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "kaggle"),
    ],
)
def test_platforms(env: dict[str, str], platform: str) -> None:
    assert machine.detect_machine(env).platform == platform


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


@pytest.mark.parametrize(
    ("label", "topology", "named"),
    [
        ("tpu-v6e-slice", "4x4", "v6e-16"),
        ("tpu-v5-lite-podslice", "2x4", "v5litepod-8"),
        ("tpu-v5-lite-device", "2x2", "v5litepod-4"),
        ("tpu-v5p-slice", "2x2x2", "v5p-16"),
        ("tpu-v4-podslice", "2x2x4", "v4-32"),
        ("tpu7x", "2x2x2", "tpu7x-16"),
        ("v6e-slice", "2x2", "v6e-4"),
        ("v5e", "4x4", "v5litepod-16"),
        ("tpu-v6e-slice", "", ""),
        ("tpu-v6e-slice", "4xx", ""),
        ("nvidia-l4", "1x1", ""),
        ("", "4x4", ""),
    ],
)
def test_gkes_labels_are_accelerator_types(label: str, topology: str, named: str) -> None:
    assert tpu.type_of_slice(label, topology) == named
    assert not named or tpu.parse_accelerator_type(named) is not None
