"""Notes of ranks on recompiled programs, and how the supervisor merges them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drivers.kernel import Kernel, kernel
from tpunb.runs.cell_lines import CellLines
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.utils.files import append_text
from tpunb.worker.recompiles import MOST, RecompileNote, StepMonitor, difference
from tpunb.worker.supervisor import recompile_notes
from tpunb.worker.supervisor.recompile_notes import INTERVAL, RecompileNotes

pytestmark = pytest.mark.usefixtures("lent")

LOOP = """
for step, rows in enumerate(sizes, 1):
    batch = {"x": torch.ones(rows, 6), "name": "ignored"}
    run(rows)
    end_of_step()
"""


class Counted:
    """Simulated counters of torch_xla, for a loop that states what it runs."""

    def __init__(self) -> None:
        self.programs: set[object] = set()
        self.tensors = 0

    def compilations_begun(self) -> int:
        return len(self.programs)

    def compile_seconds(self) -> float:
        return float(len(self.programs))

    def tensors_created(self) -> int:
        return self.tensors


def look_at(folder: Path, program: str, **names: Any) -> list[RecompileNote]:
    """The notes on a loop, which calls `run(program, tensors)` and `end_of_step()`."""
    counted = Counted()
    path, script = folder / "told.jsonl", folder / "script.py"
    script.write_text(program)
    code = compile(program, str(script), "exec")
    lines = CellLines(script, RunSpec("run", "run", 1, "CPU", "/", (), ()))
    monitor = StepMonitor(lines, path, counted)

    def run(program: object, tensors: int = 4) -> None:
        counted.programs.add(program)
        counted.tensors += tensors

    def end_of_step() -> None:
        monitor.end_step()

    names |= {"run": run, "end_of_step": end_of_step, "counted": counted, "monitor": monitor}
    exec(code, names)
    assert monitor.steps > 0
    lines = path.read_text().splitlines() if path.exists() else []
    return [RecompileNote(**json.loads(line)) for line in lines]


BY_OPERATIONS = "other operations ran than in the steps before; %%tpu_debug names the line"
EPOCHS = """
def reduce():
    monitor.computed()
for epoch in range(2):
    for step in range(6):
        power = 2 + (step == 4)
        {inside}
        run("rest")
        end_of_step()
    {after}
"""
COLLECTIVE = (
    "run(('step', {power})); monitor._before_marker = counted.compilations_begun(); reduce()"
)
Noted = list[tuple[int, str, str]]
"""Step, place and text of each note."""


def told(
    sizes: list[int], *notes: tuple[int, str], program: str = LOOP, line: int = 5
) -> tuple[str, Noted]:
    """A loop whose program is new for each new number of rows."""
    place = f"line {line} of script.py"
    noted = [(step, place, what) for step, what in notes]
    return f"sizes = {sizes}\n{program.strip()}", noted


CASES: dict[str, tuple[str, Noted]] = {
    "a tensor": told([32] * 9 + [17, 32], (10, "batch['x'] has 17 rows, 32 before")),
    "the first steps": told([8, 16, 32, 32, 32]),
    "a program that was there": told(
        [32, 32, 32, 32, 8, 32, 8, 32], (5, "batch['x'] has 8 rows, 32 before")
    ),
    "a number": (
        """
for step in range(12):
    power = 2 if step < 6 else 3
    scale = 0.1 * step
    run(power)
    end_of_step()
""",
        [(7, "line 6 of script.py", "power is 3, 2 before")],
    ),
    # If every step compiled something, it is not known how many tensors a step creates.
    "a number that changes at every step": (
        """
for step in range(6):
    loss = 0.5 / (1 + step)
    run(step)
    end_of_step()
""",
        [(n, "line 5 of script.py", f"step is {n - 1}, {n - 2} before") for n in (4, 5, 6)],
    ),
    "a new branch": (
        """
for step in range(12):
    loss = 1
    if step == 7:
        loss = 2
        run("another", 6)
    else:
        run("the usual", 4)
    end_of_step()
""",
        [(8, "line 9 of script.py", BY_OPERATIONS)],
    ),
    "operations that do not run": (
        """
run_it = run
for step in range(12):
    run_it("usual" if step != 7 else "less", 6 if step != 7 else 4)
    end_of_step()
""",
        [(8, "line 5 of script.py", BY_OPERATIONS)],
    ),
    "a rehearsed collective": (
        EPOCHS.format(inside=COLLECTIVE.format(power="power"), after=""),
        [(5, "line 9 of script.py", "power is 3, 2 before")],
    ),
    "accumulation": (
        """
for step in range(16):
    if step % 4 == 3:
        monitor.updated()
        run(("update", min(step, 8)), 6)
    else:
        run("piece", 4)
    end_of_step()
""",
        [],
    ),
    # A value that is read has a program of its own; the step's program is unchanged.
    "a value": (
        """
for step in range(12):
    run("step")
    monitor._before_marker = counted.compilations_begun()
    end_of_step()
    if step == 7:
        value = 3
        run("a value after the loop")
""",
        [],
    ),
    # Threads move batches to the device: the number of tensors shows nothing.
    "threads": (
        """
for step in range(12):
    run("step" if step != 9 else "other tensors are alive", 5 + step % 5)
    end_of_step()
""",
        [],
    ),
}


@pytest.mark.parametrize(("program", "noted"), CASES.values(), ids=CASES)
def test_recompile_notes_of_a_loop(tmp_path: Path, program: str, noted: Noted) -> None:
    found = look_at(tmp_path, program, torch=torch)
    assert [(note.step, note.place, note.what) for note in found] == noted
    assert all(note.seconds == 1.0 for note in found)


def test_recompile_notes_are_limited_if_every_step_is_new(tmp_path: Path) -> None:
    program, _ = told(list(range(1, 60)))
    assert len(look_at(tmp_path, program, torch=torch)) == MOST


def test_recompile_difference_in_words() -> None:
    f32, i64 = torch.float32, torch.int64
    before = {"x": ((32, 6), f32), "y": ((32,), f32)}
    assert difference(before, before) == ""
    assert difference({"x": ((32, 8), f32)}, before) == "x is 32×8, 32×6 before"
    assert difference({"x": ((32, 6), f32), "y": ((32,), i64)}, before) == (
        "y is int64, float32 before"
    )
    assert difference({"z": ((1,), f32)}, before) == ""


def tell(run: RunDir, rank: int, step: int) -> None:
    path = run.recompiled(0, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    note = RecompileNote(step, "cell [4], line 9", "x has 17 rows, 32 before", 2.5)
    append_text(path, json.dumps(asdict(note)) + "\n")


def test_recompile_notes_of_ranks_are_joined(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    notes = RecompileNotes(run, 0, range(3))
    assert notes.read(last=True) == []
    for rank in range(3):
        tell(run, rank, 13)
    tell(run, 2, 400)
    assert notes.read(last=True) == [
        "the ranks recompiled at step 13 (2.5 s): x has 17 rows, 32 before (cell [4], line 9)",
        "rank 2 recompiled at step 400 (2.5 s): x has 17 rows, 32 before (cell [4], line 9)",
    ]
    notes.close()


def test_recompile_notes_wait_for_the_other_ranks(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    time = 0.0
    notes = RecompileNotes(run, 0, range(2), clock=lambda: time)
    tell(run, 0, 13)
    assert notes.read() == []
    time += INTERVAL
    tell(run, 1, 13)
    assert len(notes.read()) == 1
    tell(run, 0, 14)
    time += INTERVAL
    assert notes.read() == []
    time += recompile_notes.WAIT + 0.1
    assert [line.partition(" recompiled")[0] for line in notes.read()] == ["rank 0"]
    for step in range(20, 40):
        tell(run, 0, step)
    lines = notes.read(last=True)
    assert len(lines) == recompile_notes.MOST - 1
    assert lines[-1].startswith("more programs")
    notes.close()


TRAIN = """%%tpu_train --cores 2 --profile 3-4 --out run
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
power = 2
x = torch.ones(8, 6, device=device)
for step in range(1, 13):
    if step == 6:
        power = 3
    loss = (model(x) ** power).mean()
    if step == 9:
        loss = loss + model(x).abs().mean()
    opt.zero_grad()
    loss.backward()
    xm.optimizer_step(opt)
    torch_xla.sync()
"""


@pytest.fixture
def nb(starts_processes: None, tmp_path: Path) -> Iterator[Kernel]:
    with kernel(tmp_path, file=None) as notebook:
        notebook.run("%load_ext tpunb").good()
        yield notebook


def test_recompile_notes_and_profile_trace_of_a_run(nb: Kernel) -> None:
    ran = nb.run(TRAIN).good()
    cell = f"cell [{ran.number}], line"
    constant = f"power is 3, 2 before ({cell} 27)"
    branch = f"{BY_OPERATIONS} ({cell} 27)"
    # The ranks' notes are one line, unless one of them is seconds behind.
    found = re.findall(r"(\S+ \S+) recompiled at step (\d+) \(\d+\.\d s\): (.*)", ran.stdout)
    assert {(step, what) for _, step, what in found} == {
        ("7", f"x has 17 rows, 32 before ({cell} 15)"),
        ("6", constant),
        ("9", branch),
    }, ran.stdout
    assert [who for who, step, _ in found if step == "7"] == ["rank 1"]
    # One session of xprof, with the parts of all ranks.
    [folder] = nb.folder.glob("runs/*/profile/plugins/profile/*")
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-0.xplane.pb",
        "rank-1.xplane.pb",
    ]
    shown = nb.run("print(run); steps = run.summary.steps; steps").good()
    assert f"xprof --logdir {folder.parents[2]}" in shown.stdout
    steps = re.search(r"steps 3 to 4: ([\d.]+) ms each: (.*)", shown.stdout)
    assert steps is not None, shown.stdout
    parts = {name: float(took) for name, took in re.findall(r"([\w ]+) ([\d.]+)", steps[2])}
    assert abs(sum(parts.values()) - float(steps[1])) < 0.5
    assert any(name.strip() == "Python" for name in parts)


@pytest.mark.parametrize("line", ['{"step": 1, "pla', "[1]", '{"step": 1}', "7"])
def test_recompile_note_cut_off_by_a_full_disk_is_skipped(tmp_path: Path, line: str) -> None:
    run = RunDir(tmp_path)
    notes = RecompileNotes(run, 0, range(2))
    tell(run, 0, 13)
    append_text(run.recompiled(0, 0), line + "\n")
    tell(run, 0, 14)
    assert len(notes.read(last=True)) == 2
    notes.close()
