"""Runs that begin in the prelude of an earlier one: when they do, and that nobody can tell."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from tests.drivers.kernel import until
from tests.support import Driver, Seen, fork_server, left_below, script_of
from tpunb.runs.events import Note, Output
from tpunb.runs.spec import RunSpec, Stop
from tpunb.utils import memory, processes

READ = "print(sorted(state.items(), key=str))"


class Notebook:
    """Cells that count how often they were executed, and a train cell that shows their state."""

    def __init__(self, driver: Driver, folder: Path, cells: int) -> None:
        self.driver = driver
        self.folder = folder
        self.log = folder / "executed.txt"
        self.log.touch()
        self.cells = [f"state[{number}] = 'a'" for number in range(cells)]
        self.numbers = list(range(1, cells + 1))
        self.ids = list(range(cells))

    def sources(self) -> list[str]:
        """Each cell notes in a file that it runs."""
        head = f"state = globals().setdefault('state', {{}})\nlog = {str(self.log)!r}\n"
        return [
            f"{head}open(log, 'a').write('{each} ')\n{dedent(source)}"
            for each, source in zip(self.ids, self.cells, strict=True)
        ]

    def insert(self, at: int, source: str, number: int) -> None:
        self.cells.insert(at, source)
        self.numbers.insert(at, number)
        self.ids.insert(at, max(self.ids, default=-1) + 1)

    def delete(self, at: int) -> None:
        del self.cells[at], self.numbers[at], self.ids[at]

    def run(self, train: str = READ, **options: object) -> tuple[Seen, list[int]]:
        """A run, and the ids of the cells that it executed: their positions at first."""
        before = self.log.read_text()
        seen = self.driver.run(
            self.sources(),
            train,
            numbers=self.numbers,
            cwd=options.pop("cwd", str(self.folder)),  # type: ignore[arg-type]
            **options,  # type: ignore[arg-type]
        )
        executed = self.log.read_text().removeprefix(before)
        return seen, [int(word) for word in executed.split()]


@pytest.fixture
def notebook(driver: Driver, tmp_path: Path) -> Notebook:
    return Notebook(driver, tmp_path, 4)


def notes(seen: Seen) -> str:
    return "\n".join(note.text for note in seen.of(Note))


def test_kept_prelude_is_reused_while_no_cell_has_changed(notebook: Notebook) -> None:
    first, executed = notebook.run()
    assert executed == [0, 1, 2, 3]
    assert "kept for the next run: 4 cells (" in notes(first)
    again, executed = notebook.run()
    assert executed == []
    assert notes(again) == "prelude: 4 of 4 cells reused"
    assert sorted(again.log) == sorted(first.log)
    _, executed = notebook.run("print('another train cell')")
    assert executed == []


def test_kept_prelude_serves_a_shorter_prelude(notebook: Notebook) -> None:
    notebook.run()
    whole = notebook.cells, notebook.numbers, notebook.ids
    notebook.cells, notebook.numbers, notebook.ids = (each[:2] for each in whole)
    seen, executed = notebook.run()
    assert executed == []
    assert seen.log[0].endswith("[(0, 'a'), (1, 'a')]")
    notebook.cells, notebook.numbers, notebook.ids = whole
    assert notebook.run()[1] == []


def test_edited_last_cell_of_a_long_prelude_runs_alone(driver: Driver, tmp_path: Path) -> None:
    notebook = Notebook(driver, tmp_path, 60)
    notebook.run()
    for text in ("edited", "edited again"):
        notebook.cells[-1] = f"state[59] = {text!r}"
        assert notebook.run()[1] == [59]


def test_failure_in_a_kept_prelude_cell_names_cell_and_line(notebook: Notebook) -> None:
    notebook.cells[1] = "\ndef fail():\n    raise ValueError('here')"
    notebook.run()
    notebook.cells[3] = "\n\nstate[3] = 'longer'"
    seen, executed = notebook.run("fail()")
    assert executed == [3]
    failure = seen.result.failure
    assert failure is not None
    # Three lines stand above each cell's own. It was compiled from the script of the run before.
    assert (failure.cell, failure.line, failure.message) == (2, 6, "here")
    assert "cell [2], line 6, in fail\n    raise ValueError('here')" in failure.traceback
    assert "cell [5], line 1" in failure.traceback
    assert "    raise ValueError('here')" in [text for _, text in failure.source]


SEEDED = """
    import random, torch, numpy
    random.seed(1); torch.manual_seed(1); numpy.random.seed(1)
    random.random()
"""
DRAW = """
print(random.random(), torch.rand(1).item(), numpy.random.rand())
"""


def test_kept_prelude_is_unchanged_by_ranks(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"abcdef")
    notebook.cells[1] = "import os\nstate['list'] = []\nos.environ['MINE'] = 'prelude'"
    notebook.cells[2] = "data = open('data.bin', 'rb', buffering=0)\ndata.read(2)"
    train = """
if os.environ['RANK'] == '0':
    print(data.read(2), os.environ['MINE'], state['list'])
    state['list'].append(1)
    os.environ['MINE'] = 'rank'
    os.chdir('/')
"""
    first, _ = notebook.run(train)
    again, executed = notebook.run(train)
    assert executed == []
    assert first.log == again.log == ["[0] b'cd' prelude []"]


def test_prelude_cell_with_resources_that_forks_share_reruns(notebook: Notebook) -> None:
    notebook.cells[2] = "import subprocess\np = subprocess.Popen(['sleep', '600'])"
    notebook.run()
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([2, 3], "succeeded")
    told = "2 of 4 cells reused: cell [3] has started a process"
    assert told in notes(seen)
    assert left_below(notebook.driver.supervisor_pid) == []


def test_prelude_reruns_if_ranks_remove_its_temporary_folder(notebook: Notebook) -> None:
    notebook.cells[2] = """
        import os, tempfile
        folder = tempfile.TemporaryDirectory()
        open(os.path.join(folder.name, 'x'), 'w').close()
    """
    train = "print(os.listdir(folder.name))"
    assert notebook.run(train, ranks=1)[0].log == ["[0] ['x']"]
    seen, executed = notebook.run(train, ranks=1)
    assert seen.log == ["[0] ['x']"]
    assert executed == [0, 1, 2, 3]


def test_kept_prelude_survives_a_failed_cell_below(notebook: Notebook) -> None:
    notebook.cells[2] = "1 / 0"
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([0, 1, 2], "failed")
    notebook.cells[2] = "1 / 1"
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([2, 3], "succeeded")


def test_stop_does_not_end_kept_preludes(notebook: Notebook) -> None:
    notebook.run()
    seen, _ = notebook.run(
        "print('there', flush=True)\nimport time\ntime.sleep(600)",
        when=lambda event: isinstance(event, Output) and "there" in event.text,
        then=lambda run: run.stop(Stop(reason="enough", now=True)),
    )
    assert seen.result.state == "interrupted"
    notebook.cells[3] = "import time\ntime.sleep(600)"
    seen, executed = notebook.run(
        when=lambda event: "cell 4 of 4" in getattr(event, "text", ""),
        then=lambda run: run.stop(Stop(reason="enough", now=True)),
    )
    assert (executed, seen.result.state) == ([3], "interrupted")
    notebook.cells[3] = "pass"
    assert notebook.run()[1] == [3]


def kept_processes(driver: Driver) -> list[processes.Process]:
    supervisor = driver.supervisor_pid
    busy = left_below(supervisor)
    server = fork_server(supervisor)
    waiting = [p for p in processes.descendants(supervisor) if p not in (*busy, server)]
    return sorted(waiting, key=lambda process: process.started)


def test_kept_preludes_are_killed_first_when_memory_runs_out(notebook: Notebook) -> None:
    notebook.run()
    kept = kept_processes(notebook.driver)
    assert len(kept) == 4
    for process in kept:
        score = Path(f"/proc/{process.pid}/oom_score_adj").read_text()
        assert score.strip() == memory.FIRST_TO_GO
    seen, _ = notebook.run("print(open('/proc/self/oom_score_adj').read().strip())", ranks=1)
    assert seen.log == [f"[0] {memory.oom_score()}"]


def run_ahead(notebook: Notebook) -> None:
    """As the kernel does after a cell, until the prelude has run as far as `executed` says."""
    driver = notebook.driver
    script = script_of(notebook.sources(), "pass", notebook.numbers)
    spec = RunSpec(
        *("ahead", "ahead", 2, "CPU", str(notebook.folder), tuple(sys.path)), script.blocks
    )
    driver.launcher.run_ahead(spec, script, driver.env())


def wait_for(notebook: Notebook, words: int) -> None:
    deadline = time.monotonic() + 60
    while len(notebook.log.read_text().split()) < words:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_prelude_run_ahead_of_the_train_cell_is_used(notebook: Notebook) -> None:
    notebook.cells[1] = "import os\nstate[1] = os.sched_getscheduler(0) in (3, 5)"
    run_ahead(notebook)
    wait_for(notebook, 4)
    until(lambda: not left_below(notebook.driver.supervisor_pid), "its last copy is kept")
    seen, executed = notebook.run(f"import os\nprint(os.sched_getscheduler(0))\n{READ}", ranks=1)
    assert executed == []
    # 3 and 5: batch and idle, which other processes go before.
    assert seen.log == ["[0] 0", "[0] [(0, 'a'), (1, True), (2, 'a'), (3, 'a')]"]


def test_prelude_run_ahead_continues_with_the_next_cell(notebook: Notebook) -> None:
    whole = notebook.cells, notebook.numbers, notebook.ids
    notebook.cells[1] = "import time\ntime.sleep(1.5)"
    for count in (2, 3, 4):
        notebook.cells, notebook.numbers, notebook.ids = (each[:count] for each in whole)
        run_ahead(notebook)
    wait_for(notebook, 4)
    until(lambda: not left_below(notebook.driver.supervisor_pid), "its last copy is kept")
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([], "succeeded")
    assert notebook.log.read_text().split() == ["0", "1", "2", "3"]


def test_prelude_run_ahead_does_not_delay_a_run(notebook: Notebook) -> None:
    notebook.cells[2] = "import time, os\ntime.sleep(600 if os.sched_getscheduler(0) else 0)"
    before = set(kept_processes(notebook.driver))
    run_ahead(notebook)
    wait_for(notebook, 3)
    until(
        lambda: len(set(kept_processes(notebook.driver)) - before) == 2,
        "a copy after each of two cells is kept",
        patience=60.0,
    )
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([2, 3], "succeeded")
    run_ahead(notebook)  # nothing is left to do
    assert notebook.run()[1] == []
