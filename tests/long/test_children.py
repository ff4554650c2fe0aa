"""Children by spawn and forkserver: of ranks, and of exported scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.kernel import kernel

ABOVE = """
import multiprocessing as mp, os, torch
from concurrent.futures import ProcessPoolExecutor
from torch.utils.data import DataLoader, Dataset
os.makedirs("out", exist_ok=True)
print("above")
scale = 1

class Data(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i * scale

def collate(batch):
    return torch.tensor(batch)

def square(x):
    return x * x * scale
"""
TRAIN = """
import torch.distributed as dist

class Own(Data):
    def __getitem__(self, i):
        return super().__getitem__(i) + offset

offset = 5
dist.init_process_group("gloo")
options = dict(collate_fn=collate, num_workers=1)
loader = DataLoader(Own(), 4, multiprocessing_context="spawn", **options)
print("spawn", *(batch.tolist() for batch in loader))
with ProcessPoolExecutor(1, mp_context=mp.get_context("forkserver")) as pool:
    print("forkserver", list(pool.map(square, [1, 2])))
dist.barrier()
"""
LATE = """
size = len(os.sep)
def late(): return size
Late = type("Late", (), {"__module__": "__main__"})
child = mp.get_context("spawn").Process(target=print, args=(Late(),))
child.start(); child.join(); print("joined")
"""


def lines(scale: int) -> list[str]:
    return [
        f"spawn {[5, scale + 5, 2 * scale + 5, 3 * scale + 5]}",
        f"forkserver {[scale, 4 * scale]}",
    ]


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("backend", ["torch", "xla"])
def test_children_of_ranks_run_the_cells_above_only(tmp_path: Path, backend: str) -> None:
    with kernel(tmp_path) as nb:
        nb.run(f"%load_ext tpunb\n%tpu_setup --cores 2 --backend {backend}").good()
        nb.run(ABOVE).good()
        nb.run("scale = 3").good()
        ran = nb.run(f"%%tpu_train\n{TRAIN}").good()
        for line in lines(3):
            assert ran.stdout.count(line) in (1, 2), ran.screen()  # equal lines are folded
        assert "above" not in ran.stdout
        failed = nb.run(f"%%tpu_train\n{LATE}")
        assert "needs 'Late', which the train cell makes" in failed.red_line
        assert "move it to a cell above" in failed.red_line
