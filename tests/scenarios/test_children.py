"""Processes that a rank starts itself: launchers are refused by name, all others go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.drivers.kernel import kernel
from tests.support import Driver

PRELUDE = """
import os, subprocess, sys, torch, torch.multiprocessing as mp
import torch.distributed as dist
from torch.distributed import init_process_group
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def work(rank, size, port=29511):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    init_process_group("gloo", rank=rank, world_size=size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    print("rank", rank, "of", size, total.item())
    dist.destroy_process_group()

def elastic(add):
    dist.init_process_group("gloo")
    return dist.get_rank() + add

def config(each):
    return LaunchConfig(1, 1, each, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="a")

def start(target, *each):
    started = [mp.Process(target=target, args=args) for args in each]
    [one.start() for one in started]
    [one.join() for one in started]
    print("codes", [one.exitcode for one in started])

def ask():
    return input("name? ")
"""
LOOP = "start(work, *((rank, 2) for rank in range(2)))"


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (LOOP, "init_process_group as rank . of 2, in a process that rank . has started"),
        (f"dist.init_process_group('gloo')\n{LOOP}", "Call the function in the train cell itself"),
        ("mp.start_processes(work, args=(2,), nprocs=2, start_method='fork')", "has started"),
        ("mp.spawn(work, (0,), nprocs=torch.cuda.device_count())", "pass int.os.environ"),
        ("elastic_launch(config(4), elastic)(0)", "4 processes in a run with 2 .*--cores 4"),
        ("elastic_launch(config(2), 't.py')()", "torchrun would start other processes"),
        ("subprocess.run([sys.executable, '-m', 'torch.distributed.run', 't.py'])", "Call the fun"),
        ("os.system('cd / && torchrun t.py')", "or with --cores 1"),
        ("ask()", "input.. cannot ask the user in a run: .*tpu-skip"),
    ],
)
def test_what_cannot_work_in_a_rank_is_refused(driver: Driver, train: str, words: str) -> None:
    seen = driver.run([PRELUDE], train)
    failure = seen.result.failure
    assert failure is not None, "\n".join(seen.log)
    assert failure.cell is not None
    assert re.search(words, failure.message), failure.message


WORKS = """
print("elastic", elastic_launch(config(2), elastic)(10))
own = int(os.environ["RANK"])
start(work, (own, 2))  # a child for each rank, as torch's asynchronous checkpoints have it
start(work, (0, 1, 29512 + own))
with mp.Pool(1) as pool:
    print("pool", pool.map(abs, [-1]))
print(subprocess.check_output("echo torchrun; which python", shell=True, text=True).split()[0])
"""


def test_what_works_in_a_rank_goes_on(driver: Driver) -> None:
    seen = driver.run([PRELUDE], WORKS)
    assert seen.result.state == "succeeded", "\n".join(seen.log)
    for rank in range(2):
        lines = f"elastic {{{rank}: {rank + 10}}}|codes [0]|rank {rank} of 2 3.0|pool [1]|torchrun"
        assert {f"[{rank}] {line}" for line in lines.split("|")} <= set(seen.log)


def test_one_rank_may_start_a_group_of_processes(driver: Driver) -> None:
    seen = driver.run([PRELUDE], LOOP, ranks=1)
    assert {"[0] rank 0 of 2 3.0", "[0] rank 1 of 2 3.0", "[0] codes [0, 0]"} <= set(seen.log)


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


@pytest.mark.usefixtures("starts_processes")
def test_children_of_ranks_run_the_cells_above_only(tmp_path: Path) -> None:
    with kernel(tmp_path) as nb:
        nb.run("%load_ext tpunb\n%tpu_setup --cores 2 --backend torch").good()
        nb.run(ABOVE).good()
        nb.run("scale = 3").good()
        ran = nb.run(f"%%tpu_train\n{TRAIN}").good()
        for line in ("spawn [5, 8, 11, 14]", "forkserver [3, 12]"):
            assert ran.stdout.count(line) in (1, 2), ran.screen()  # equal lines are folded
        assert "above" not in ran.stdout
        failed = nb.run(f"%%tpu_train\n{LATE}")
        assert "needs 'Late', which the train cell makes" in failed.red_line
        assert "move it to a cell above" in failed.red_line
