"""Every platform is recognised, and has no problems if it is set up correctly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.dumps import DUMPS
from tests.machine.machines import OF_KAGGLE, PAIR, ids, look, machine
from tpunb.machine import platform
from tpunb.machine.metadata import Metadata

EXPECTED_ADVICE = {
    "colab-cpu": ["no-tpu-runtime"],
    "colab-gpu": ["no-tpu-runtime"],
    "colab-enterprise": ["no-tpu-runtime"],
    "colab-tpu": ["metadata"],
    "kaggle-cpu": ["no-tpu-runtime"],
    "kaggle-gpu": ["no-tpu-runtime"],
    "kaggle-tpu": ["metadata"],
    "v2-8": ["two-devices"],
    "v3-8": ["two-devices"],
    "vertex": ["metadata"],
    "container": ["metadata"],
}


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("name", DUMPS)
def test_each_platform(name: str, tmp_path: Path) -> None:
    dump = DUMPS[name]
    packages = OF_KAGGLE if dump.platform == "kaggle" and dump.chips else PAIR
    with machine(name, tmp_path) as made:
        found = look(made, packages)
    here = found.machine
    assert (here.platform, here.kind) == (dump.platform, dump.kind)
    assert (here.chips, here.generation) == (dump.chips, dump.generation)
    assert here.device == ("TPU" if dump.chips else "CPU")
    assert here.accelerator_type == dump.accelerator_type
    assert (here.workers, here.worker, here.spot) == (dump.workers, dump.worker, dump.spot)
    assert ids(found) == (["pod"] if dump.workers > 1 else [], EXPECTED_ADVICE.get(name, []))
    signs = [sign for sign in here.signs if sign.startswith(dump.platform)]
    assert len(signs) >= 2 or dump.platform == "local"


def test_no_sign_alone_is_needed(tmp_path: Path) -> None:
    for name, dump in DUMPS.items():
        for left_out in dump.env:
            if dump.platform in ("colab", "kaggle") and not name.endswith("enterprise"):
                env = {key: value for key, value in dump.env.items() if key != left_out}
                root = tmp_path / name
                for folder in dump.folders:
                    (root / folder).mkdir(parents=True, exist_ok=True)
                place = platform.find_platform(env, root, Metadata(), dump.chips)
                assert place.name == dump.platform, left_out


def test_one_folder_is_not_enough(tmp_path: Path) -> None:
    (tmp_path / "content").mkdir()
    assert platform.find_platform({}, tmp_path, Metadata(), 0).name == "local"


@pytest.mark.usefixtures("starts_processes")
def test_what_is_known_of_a_chip(tmp_path: Path) -> None:
    facts = {}
    for name in ("v2-8", "v4-8", "v5e-8", "v5p-8", "v6e-8"):
        with machine(name, tmp_path / name) as made:
            told = look(made).to_json()
        keys = ("cores_per_chip", "devices_per_chip", "hbm_per_chip_gib")
        facts[name] = [told[key] for key in keys]
    assert facts == {
        "v2-8": [2, 2, 16],
        "v4-8": [2, 1, 32],
        "v5e-8": [1, 1, 16],
        "v5p-8": [2, 1, 95],
        "v6e-8": [1, 1, 32],
    }
