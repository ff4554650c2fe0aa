"""Libraries that bring their own training loop, unchanged, on rehearsal cores."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import Driver

pytestmark = [pytest.mark.usefixtures("lent")]  # the libraries alone take seconds to import


TRAINER = """
    import os
    import lightning as L, torch
    import torch_xla.core.xla_model as xm
    from accelerate import Accelerator, notebook_launcher
    from torch.utils.data import DataLoader, TensorDataset

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 2)
            self.seen = 0.0
        def training_step(self, batch, index):
            self.seen += batch[0].sum().item()
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
"""

USED = """
    rank = os.environ["RANK"]
    torch.manual_seed(int(rank))  # Lightning brings the weights of rank 0 to all
    trainer = L.Trainer(accelerator="tpu", devices="auto", max_epochs=1, **quiet)
    strategy = trainer.strategy
    print("before", type(strategy).__name__, trainer.world_size, trainer.global_rank)
    model = Model()
    first = model.net.weight.detach().clone()
    trainer.fit(model, data)
    print("after", trainer.world_size, trainer.global_rank, trainer.is_global_zero)
    weights = xm.mesh_reduce("weights", model.net.weight.detach().cpu(), list)
    seen = xm.mesh_reduce("seen", model.seen, list)
    print("equal", torch.equal(*weights), "changed", not torch.equal(weights[0], first))
    print("other data", seen[0] != seen[1], "steps", trainer.global_step)
    trainer.save_checkpoint("model.ckpt")
    xm.rendezvous("saved")
    again = L.Trainer(accelerator="tpu", devices=2, max_epochs=2, **quiet)
    again.fit(model, data, ckpt_path="model.ckpt")
    print("goes on", again.global_step)

    def fabricated(fabric, value):
        return fabric.world_size, fabric.all_gather(torch.tensor([value])).tolist()

    fabric = L.Fabric(accelerator="tpu", devices=2)
    print("fabric", fabric.launch(fabricated, fabric.global_rank))
    notebook_launcher(lambda: print("accelerate", Accelerator().num_processes), num_processes=2)
    try:
        L.Trainer(accelerator="tpu", devices=8)
    except ValueError as error:
        print("refused", error)
"""

PRINTED = [
    "before XLAStrategy 2 {rank}",
    "after 2 {rank} {zero}",
    "equal True changed True",
    "other data True steps 2",
    "goes on 4",
    "fabric (2, [0, 1])",
    "accelerate 2",
    "refused `devices` can only be 'auto', 1, 2 or [<0-1>] for TPUs. Got 8",
]


@pytest.mark.parametrize("way", ["fork", "replicate"])
def test_lightning_and_accelerate_know_their_rank(way: str, driver: Driver, tmp_path: Path) -> None:
    # In a fork they are imported before the ranks are, here after.
    device = ["import torch_xla", "torch_xla.device()"] if way == "replicate" else []
    seen = driver.run([*device, textwrap.dedent(TRAINER)], USED, cwd=str(tmp_path))
    assert seen.result.state == "succeeded", "\n".join(seen.log)
    assert seen.result.replicated == (way == "replicate")
    for rank in range(2):
        lines = [
            line.removeprefix(f"[{rank}] ") for line in seen.log if line.startswith(f"[{rank}]")
        ]
        expected = [line.format(rank=rank, zero=rank == 0) for line in PRINTED]
        kinds = tuple(line.split()[0] for line in expected)
        assert [line for line in lines if line.startswith(kinds)] == expected
        told = "rehearsal on CPU: libraries that count TPU cores see 2"
        assert lines.count(told) == (1 if rank == 0 else 0)


NAMES = """
    import importlib, inspect
    from tpunb.backends.xla import private_names

    libraries = ("accelerate", *private_names.TRAINER, *private_names.FABRIC)
    names = [name for name in private_names.NAMES if name.owner.startswith(libraries)]
    trainers = [f"{package}.strategies.launchers.xla" for package in private_names.TRAINER]
    for name in names:
        found = getattr(importlib.import_module(name.owner), name.name)
        if name.name == "_XLALauncher":
            assert "launch" in vars(found), name
            takes = inspect.signature(found.launch).parameters
            assert list(takes)[:3] == ["self", "function", "args"], name
            expected = {"kwargs"} | ({"trainer"} if name.owner in trainers else set())
            assert set(list(takes)[3:]) == expected, name
        elif name.name in ("XLAStrategy", "XLAFSDPStrategy"):
            assert "self._launched = False" in inspect.getsource(found.__init__), name
        elif name.name == "rank_zero_only":
            assert isinstance(found.rank, int), name
        elif name.name == "DDPStrategy":
            assert "self._start_method == " in inspect.getsource(found._configure_launcher), name
        elif name.owner in private_names.CONNECTORS:
            check = found._check_device_config_and_set_final_flags
            assert [*inspect.signature(check).parameters] == ["self", "devices", "num_nodes"], name
            assert found._choose_gpu_accelerator_backend, name
        elif name.name == "XLAAccelerator":
            assert found.auto_device_count.cache_clear and found.is_available.cache_clear
            assert "tpu.num_available_devices()" in inspect.getsource(found.auto_device_count)
        else:
            assert name.name == "notebook_launcher", name
    print(len(names))
"""


def test_private_names_of_libraries_exist() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NAMES)],
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "23\n"
