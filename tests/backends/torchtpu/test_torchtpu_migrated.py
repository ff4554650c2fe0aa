"""Migrated notebooks train on a rehearsed TPU with the losses that they had with torch_xla."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.torchtpu.rehearsal.test_process_groups import free_port
from tests.notebook.migrate.notebooks import notebook, sources
from tests.notebook.migrate.torchtpu.examples import COMPLETE, LOSSES
from tpunb.notebook.migrate import migrate

RUN = """
import json, os, sys, types
from tpunb.backends.torchtpu.rehearsal.device import install
install()
from tpunb.backends.torchtpu.rehearsal.process_groups import install_process_groups
install_process_groups()
import torch.distributed as dist
sys.modules.setdefault("torch_tpu", types.ModuleType("torch_tpu"))
losses = {}
for port, (name, cells) in zip(sys.argv[2:], json.load(open(sys.argv[1])).items(), strict=True):
    os.environ["MASTER_PORT"] = port
    names = {"__name__": "__main__"}
    for cell in cells:
        lines = (line for line in cell.split("\\n") if not line.startswith(("!", "%")))
        exec("\\n".join(lines), names)
    losses[name] = names["losses"]
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
print(json.dumps(losses))
"""


def free_ports() -> list[str]:
    """One for each notebook."""
    return [str(free_port()) for _ in COMPLETE]


def start(folder: Path, rank: int, world: int, ports: list[str]) -> subprocess.Popen[str]:
    """Run the notebooks of `notebooks.json` in one rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    variables = {name: str(number) for name, number in numbers.items()}
    own = folder / str(rank)
    own.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder / "notebooks.json"), *ports],
        cwd=own,
        env={**os.environ, **variables, "MASTER_ADDR": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses_of(process: subprocess.Popen[str]) -> dict[str, list[float]]:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    losses: dict[str, list[float]] = json.loads(out.splitlines()[-1])
    return losses


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = {
        name: sources(migrate(notebook(*cells), to="torchtpu")) for name, cells in COMPLETE.items()
    }
    (tmp_path / "notebooks.json").write_text(json.dumps(made))
    return tmp_path


@pytest.mark.usefixtures("starts_processes")
def test_one_core_has_the_losses_of_torch_xla(folder: Path) -> None:
    losses = losses_of(start(folder, 0, 1, free_ports()))
    assert losses.keys() == LOSSES.keys()
    for name in COMPLETE:
        assert losses[name] == pytest.approx(LOSSES[name], abs=1e-4), name


@pytest.mark.usefixtures("starts_processes")
def test_two_cores_train_together(folder: Path) -> None:
    """With the same batches on both ranks the mean of their gradients is that of one core."""
    ports = free_ports()
    processes = [start(folder, rank, 2, ports) for rank in range(2)]
    first, second = map(losses_of, processes)
    for name in COMPLETE:
        if name != "xmp.spawn with ParallelLoader":  # which divides the data
            assert first[name] == pytest.approx(LOSSES[name], abs=1e-4), name
            assert second[name] == pytest.approx(LOSSES[name], abs=1e-4), name
    assert first["xmp.spawn with ParallelLoader"] != second["xmp.spawn with ParallelLoader"]
