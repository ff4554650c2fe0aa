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
    "kaggle-cpu": ["no-tpu-runtime"],
    "kaggle-gpu": ["no-tpu-runtime"],
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
    assert ids(found) == (["cores"] if dump.workers > 1 else [], EXPECTED_ADVICE.get(name, []))


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
