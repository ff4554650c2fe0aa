"""What a rank tells of programs that were compiled again, and how the guard gathers it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels import Kernel, kernel
from tpunb.rundir import RunDir, append
from tpunb.worker import again
from tpunb.worker.again import Gathering
from tpunb.worker.marks import MOST, Marks, difference

LOOP = """
for step, rows in enumerate(sizes, 1):
    batch = {"x": torch.ones(rows, 6), "name": "ignored"}
    model_is_called(rows)
    end_of_step()
"""
IN_A_FUNCTION = "def train():" + LOOP.replace("\n", "\n    ") + "\ntrain()"


def told(folder: Path, sizes: list[int], program: str = LOOP) -> list[tuple[int, str]]:
    """What is told of a loop whose program is new for each new number of rows."""
    known: set[int] = set()
    path = folder / "told.jsonl"
    marks = Marks(
        "script.py", "line {}".format, path, lambda: len(known), lambda: float(len(known))
    )

    def end_of_step() -> None:
        marks.look()

    names = {
        "torch": torch,
        "sizes": sizes,
        "model_is_called": known.add,
        "end_of_step": end_of_step,
    }
    exec(compile(program, "script.py", "exec"), names)
    assert marks.steps == len(sizes)
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    assert all(one["place"] == "line 5" and one["seconds"] == 1.0 for one in found)
    return [(one["step"], one["what"]) for one in found]


@pytest.mark.parametrize("program", [LOOP, IN_A_FUNCTION], ids=["cell", "function"])
def test_the_step_and_the_tensor_are_named(tmp_path: Path, program: str) -> None:
    assert told(tmp_path, [32] * 9 + [17, 32], program) == [
        (10, "batch['x'] has 17 rows, 32 before")
    ]


def test_first_steps_and_equal_ones_are_no_news(tmp_path: Path) -> None:
    assert told(tmp_path, [8, 16, 32, 32, 32]) == []
    assert told(tmp_path, [32, 32, 32, 32, 8, 32, 8, 32]) == [
        (5, "batch['x'] has 8 rows, 32 before")
    ]


def test_what_is_new_at_every_step_is_told_a_few_times(tmp_path: Path) -> None:
    assert len(told(tmp_path, list(range(1, 60)))) == MOST


def test_differences() -> None:
    f32, i64 = torch.float32, torch.int64
    before = {"x": ((32, 6), f32), "y": ((32,), f32)}
    assert difference(before, before) == ""
    assert difference({"x": ((32, 8), f32)}, before) == "x is 32×8, 32×6 before"
    assert difference({"x": ((32, 6), f32), "y": ((32,), i64)}, before) == (
        "y is int64, float32 before"
    )
    assert difference({"z": ((1,), f32)}, before) == ""


def tell(run: RunDir, rank: int, step: int, what: str = "x has 17 rows, 32 before") -> None:
    path = run.recompiled(0, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    news = {"step": step, "place": "cell [4], line 9", "what": what, "seconds": 0.5 + rank}
    append(path, json.dumps(news) + "\n")


def test_equal_news_of_ranks_is_one_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    gathering = Gathering(run, 0, 3)
    assert gathering.read(last=True) == []
    for rank in range(3):
        tell(run, rank, 13)
    tell(run, 2, 400)
    assert gathering.read(last=True) == [
        "the ranks recompiled at step 13 (2.5 s): x has 17 rows, 32 before (cell [4], line 9)",
        "rank 2 recompiled at step 400 (2.5 s): x has 17 rows, 32 before (cell [4], line 9)",
    ]
    gathering.close()


def test_news_waits_for_the_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LOOK", 0.0)
    run = RunDir(tmp_path)
    gathering = Gathering(run, 0, 2)
    tell(run, 0, 13)
    assert gathering.read() == []
    tell(run, 1, 13)
    assert len(gathering.read()) == 1
    for step in range(20, 40):
        tell(run, 0, step)
    lines = gathering.read(last=True)
    assert len(lines) == again.MOST
    assert lines[-1].startswith("more programs")
    gathering.close()


TRAIN = """%%tpu_train --cores 2 --profile 1:3-4
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
device = torch_xla.device()
model = torch.nn.Linear(6, 2).to(device)
opt = torch.optim.SGD(model.parameters(), 0.01)
for step in range(1, 9):
    rows = 17 if xr.global_ordinal() == 1 and step == 7 else 32
    x = torch.ones(rows, 6, device=device)
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    torch_xla.sync()
"""


@pytest.fixture
def nb(tmp_path: Path) -> Iterator[Kernel]:
    with kernel(tmp_path, file=None) as notebook:
        notebook.run("%load_ext tpunb").good()
        yield notebook


@pytest.mark.slow
def test_a_run_says_which_rank_compiled_again_and_writes_its_trace(nb: Kernel) -> None:
    ran = nb.run(TRAIN).good()
    assert re.findall(r"\S+ \S+ recompiled.*", ran.stdout) == [
        re.search(r"rank 1 recompiled at step 7 \(\d+\.\d s\): x has 17 rows, 32 before "
                  rf"\(cell \[{ran.number}\], line 15\)", ran.stdout)[0]  # type: ignore[index]
    ]  # fmt: skip
    assert "[1] trace of steps 3 to 4:" in ran.stdout
    [trace] = nb.folder.glob("runs/*/profile/**/*.xplane.pb")
    assert trace.relative_to(nb.folder).parts[3] == "rank-1"
