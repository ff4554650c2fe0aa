"""With a TPU environment nothing of rehearsal is active: torch_xla is as it was imported.

There is no TPU here: its runtime is not started, torch_xla's own code does the rest. The
variables are those that Colab and Kaggle set on a v5e with 4 chips.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from typing import Any

import pytest

TPU = {
    "PJRT_DEVICE": "TPU",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
    "TPU_WORKER_ID": "0",
    "CLOUD_TPU_TASK_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
REHEARSAL = {
    "PJRT_DEVICE": "CPU",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def names() -> dict[str, Any]:
    """The objects behind all names that rehearsal replaces or sets; for operators, the dispatch."""
    import torch

    from tpunb.backends.xla.private_names import NAMES, OPS

    found: dict[str, Any] = {}
    for name in NAMES:
        if name.owner == OPS:
            found[f"{OPS}.{name.name}"] = torch._C._dispatch_dump(f"{OPS}::{name.name}")
        elif name.kind != "attribute" and name.owner.startswith("torch") and "." in name.owner:
            # _XLAC is a top-level extension module, not part of the package torch_xla.
            owner = importlib.import_module(name.owner.replace("torch_xla._XLAC", "_XLAC"))
            found[f"{name.owner}.{name.name}"] = getattr(owner, name.name)
    return found


def main(device: str) -> dict[str, Any]:
    """The names changed after a rank of this device has started, and the calls for a TPU."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader
    import torch_xla.distributed.xla_multiprocessing

    told: list[Any] = []
    if device == "TPU":
        # Functions that would start the runtime of a TPU.
        xm.get_xla_supported_devices = lambda *args: ["xla:0"]
        xm.set_replication = lambda *args: told.append(args)
        torch_xla.device = lambda *args: "xla:0"  # type: ignore[assignment]
        vars(torch_xla)["_XLAC"]._xla_num_devices = lambda: 1
    before = names()
    from tpunb import worker
    from tpunb.backends import xla
    from tpunb.backends.base import RankSetup
    from tpunb.backends.xla import xla_device as asked

    everything = [
        module.name
        for package in (worker, xla)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith(".child_main")  # a program
    ]
    if device == "TPU":
        for name in everything:
            importlib.import_module(name)
    setup = RankSetup(device, 1, 4, 1, 4)  # type: ignore[arg-type]
    asked.prepare_device(setup)
    asked.start_device(setup)
    after = names()
    changed = {
        name for name in before if before[name] is not after[name] and before[name] != after[name]
    }
    env = {name: value for name, value in os.environ.items() if "TPU_" in name or "PJRT" in name}
    return {
        "different": sorted(changed),
        "all": sorted(before),
        "modules": everything,
        "told": told,
        "env": env,
    }


def ran(device: str, env: dict[str, str]) -> dict[str, Any]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PJRT", "TPU", "XLA"))}
    done = subprocess.run(
        [sys.executable, "-m", __name__, device],
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.usefixtures("starts_processes")
def test_rehearsal_is_detected_by_the_same_check() -> None:
    found = ran("CPU", REHEARSAL)
    different = found["different"]
    assert "torch_xla._XLAC._xla_all_reduce" in different
    assert "torch_xla._XLAC._xla_get_num_processes" in different
    assert "_c10d_functional.all_reduce" in different
    assert found["env"]["PJRT_LOCAL_PROCESS_COUNT"] == "4"


@pytest.mark.usefixtures("starts_processes")
def test_torch_xla_is_untouched_and_each_rank_has_its_own_chip() -> None:
    found = ran("TPU", TPU)
    assert "tpunb.backends.xla.rehearsal.install_xla" in found["modules"]
    assert "torch_xla._XLAC._xla_all_reduce" in found["all"]
    assert "_c10d_functional.all_reduce" in found["all"]
    assert len(found["all"]) > 40
    assert found["different"] == []
    assert found["told"] == [["xla:0", ["xla:0"]]]
    env = found["env"]
    assert env["PJRT_DEVICE"] == "TPU"
    assert (env["PJRT_LOCAL_PROCESS_RANK"], env["PJRT_LOCAL_PROCESS_COUNT"]) == ("1", "4")
    assert env["TPU_VISIBLE_CHIPS"] == "1"
    assert env["TPU_PROCESS_PORT"] == "8477"
    assert "PJRT_NPROC" not in env


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
