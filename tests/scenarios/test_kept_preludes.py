"""Runs that begin in the prelude of an earlier one: when they do, and that nobody can tell."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from tests.drivers.kernel import until
from tests.support import Driver, Seen, fork_server, left_below, script_of
from tpunb.runs.events import Note, Output
from tpunb.runs.protocol import Preload
from tpunb.runs.spec import RunSpec
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


def test_nothing_runs_again_while_nothing_has_changed(notebook: Notebook) -> None:
    first, executed = notebook.run()
    assert executed == [0, 1, 2, 3]
    assert "kept for the next run: cells [1] to [4]" in notes(first)
    again, executed = notebook.run()
    assert executed == []
    assert notes(again) == "prelude: cells [1] to [4] kept from the run before"
    assert sorted(again.log) == sorted(first.log)
    _, executed = notebook.run("print('another train cell')")
    assert executed == []


@pytest.mark.parametrize(
    ("change", "executed", "told"),
    [
        ("edit", [2, 3], "cells [1] to [2] kept, cells [3] to [4] run: cell [3] has changed"),
        ("again", [2, 3], "cells [1] to [2] kept, cells [7] to [4] run: cell [7] was executed"),
        ("insert", [4, 2, 3], "cells [1] to [2] kept, cells [9] to [4] run: cell [9] is new"),
        ("delete", [3], "cells [1] to [2] kept, cell [4] runs: a cell above [4] is gone"),
        ("swap", [3, 2], "cells [1] to [2] kept, cells [4] to [3] run"),
        ("environment", [0, 1, 2, 3], "run: the variable CHANGED has changed"),
        ("directory", [0, 1, 2, 3], "run: the working directory has changed"),
    ],
)
def test_what_runs_again(
    notebook: Notebook, tmp_path: Path, change: str, executed: list[int], told: str
) -> None:
    notebook.run()
    options: dict[str, object] = {}
    cells, numbers = notebook.cells, notebook.numbers
    if change == "edit":
        cells[2] = "state[2] = 'edited'"
    elif change == "again":
        numbers[2] = 7
    elif change == "insert":
        notebook.insert(2, "state['new'] = 'b'", 9)
    elif change == "delete":
        notebook.delete(2)
    elif change == "swap":
        for each in (cells, numbers, notebook.ids):
            each[2:] = each[:1:-1]
    elif change == "environment":
        options["env"] = {"CHANGED": "1"}
    else:
        (tmp_path / "other").mkdir()
        options["cwd"] = str(tmp_path / "other")
    seen, ran = notebook.run(**options)
    assert (ran, seen.result.state) == (executed, "succeeded")
    assert told in notes(seen)
    _, ran = notebook.run(**options)
    assert ran == []


def test_what_importing_torch_xla_sets_makes_no_difference(notebook: Notebook) -> None:
    notebook.run()
    listing = "import json, os\nprint(json.dumps(dict(os.environ)))"
    code = "import json, os, torch_xla; print(json.dumps(dict(os.environ)))"
    # As small as it can be: this process may have imported torch_xla before, as a kernel may.
    # XLA_FLAGS: what is set already, importing adds to.
    named = ("PATH", "HOME", "XLA_FLAGS")
    small = {name: os.environ[name] for name in named if name in os.environ}
    done = subprocess.run([sys.executable, "-c", code], env=small, capture_output=True, text=True)
    env = {
        k: v for k, v in json.loads(done.stdout).items() if k not in ("PATH", "HOME", "LC_CTYPE")
    }
    assert env
    seen, executed = notebook.run(listing, env=env)
    assert executed == [], notes(seen)


def test_a_shorter_prelude_begins_in_the_middle_of_a_longer_one(notebook: Notebook) -> None:
    notebook.run()
    whole = notebook.cells, notebook.numbers, notebook.ids
    notebook.cells, notebook.numbers, notebook.ids = (each[:2] for each in whole)
    seen, executed = notebook.run()
    assert executed == []
    assert seen.log[0].endswith("[(0, 'a'), (1, 'a')]")
    notebook.cells, notebook.numbers, notebook.ids = whole
    assert notebook.run()[1] == []


def test_errors_are_in_the_cell_that_was_kept(notebook: Notebook) -> None:
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


def test_a_local_module_that_changes_has_everything_run_again(
    notebook: Notebook, tmp_path: Path
) -> None:
    module = tmp_path / "mine.py"
    module.write_text("VALUE = 'old'")
    notebook.cells[2] = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport mine"
    notebook.cells[3] = "state[3] = mine.VALUE"
    notebook.run()
    assert notebook.run()[1] == []
    module.write_text("VALUE = 'newer'")
    seen, executed = notebook.run()
    assert executed == [0, 1, 2, 3]
    assert "mine.py has changed" in notes(seen)
    assert "(3, 'newer')" in seen.log[0]


SEEDED = """
    import random, torch, numpy
    random.seed(1); torch.manual_seed(1); numpy.random.seed(1)
    random.random()
"""
DRAW = """
print(random.random(), torch.rand(1).item(), numpy.random.rand())
"""


def test_random_numbers_are_those_of_a_prelude_that_runs_anew(notebook: Notebook) -> None:
    notebook.cells[1] = SEEDED
    first, _ = notebook.run(DRAW)
    kept, executed = notebook.run(DRAW)
    assert (executed, sorted(kept.log)) == ([], sorted(first.log))
    notebook.cells[3] = "x = random.random(), torch.rand(1)"
    part, executed = notebook.run(DRAW)
    assert executed == [3]
    notebook.numbers = [number + 10 for number in notebook.numbers]
    anew, executed = notebook.run(DRAW)
    assert executed == [0, 1, 2, 3]
    assert sorted(part.log) == sorted(anew.log) != sorted(kept.log)


def test_what_ranks_change_is_gone_with_them(notebook: Notebook, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("import subprocess\np = subprocess.Popen(['sleep', '600'])", "has started a process"),
        ("import socket\ns = socket.create_server(('127.0.0.1', 0))", "holds a connection"),
        ("import os\npipe = os.pipe()", "holds a pipe open"),
        ("file = open('written.txt', 'w')", "has written.txt open for writing"),
        ("import torch\nt = torch.zeros(3).share_memory_()", "has a temporary file open, or mem"),
        ("import multiprocessing\nv = multiprocessing.Value('i')", "has a temporary file open, or"),
        ("import mmap\nm = mmap.mmap(-1, 100)", "has memory that processes share"),
    ],
    ids=["process", "socket", "pipe", "file", "shared tensor", "shared value", "mapping"],
)
def test_what_runs_would_share_is_made_anew(notebook: Notebook, cell: str, told: str) -> None:
    notebook.cells[2] = cell
    notebook.run()
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([2, 3], "succeeded")
    assert f"cells [1] to [2] kept, cells [3] to [4] run: cell [3] {told}" in notes(seen)
    assert left_below(notebook.driver.supervisor_pid) == []


def test_a_temporary_folder_that_ranks_remove_is_made_anew(notebook: Notebook) -> None:
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


@pytest.mark.parametrize(
    "train",
    [
        "raise ValueError",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getppid(), 9)",
        "import sys; sys.exit(3)",
    ],
    ids=["raises", "killed", "runner killed", "exits"],
)
def test_a_run_that_fails_leaves_the_prelude(notebook: Notebook, train: str) -> None:
    notebook.run()
    seen, _ = notebook.run(train)
    assert seen.result.state == "failed"
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([], "succeeded")


def test_a_cell_that_fails_leaves_those_above(notebook: Notebook) -> None:
    notebook.cells[2] = "1 / 0"
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([0, 1, 2], "failed")
    notebook.cells[2] = "1 / 1"
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([2, 3], "succeeded")


def test_a_stop_ends_the_run_and_not_what_was_kept(notebook: Notebook) -> None:
    notebook.run()
    seen, _ = notebook.run(
        "print('there', flush=True)\nimport time\ntime.sleep(600)",
        when=lambda event: isinstance(event, Output) and "there" in event.text,
        then=lambda run: run.stop("interrupt", "enough", now=True),
    )
    assert seen.result.state == "interrupted"
    notebook.cells[3] = "import time\ntime.sleep(600)"
    seen, executed = notebook.run(
        when=lambda event: "cell 4 of 4" in getattr(event, "text", ""),
        then=lambda run: run.stop("interrupt", "enough", now=True),
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


def test_kept_preludes_may_die_at_any_time(notebook: Notebook) -> None:
    notebook.run()

    def kill_all(run: object) -> None:
        for process in kept_processes(notebook.driver):
            processes.send_signal(process, signal.SIGKILL)

    seen, executed = notebook.run(
        "print('there', flush=True)\nimport time\ntime.sleep(0.5)\nprint('through')",
        when=lambda event: isinstance(event, Output) and "there" in event.text,
        then=kill_all,
    )
    assert (executed, seen.result.state) == ([], "succeeded")
    assert "[0] through" in seen.log
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([0, 1, 2, 3], "succeeded")


def test_one_that_does_not_answer_is_not_waited_for(notebook: Notebook) -> None:
    notebook.run()
    longest = kept_processes(notebook.driver)[-1]
    processes.send_signal(longest, signal.SIGSTOP)
    run, _ = notebook.driver.start(
        notebook.sources(), READ, numbers=notebook.numbers, cwd=str(notebook.folder)
    )
    time.sleep(0.3)
    processes.send_signal(longest, signal.SIGKILL)
    for _ in run.events():
        pass
    assert run.result().state == "succeeded"


def test_replicate_keeps_nothing_and_needs_nothing(notebook: Notebook) -> None:
    notebook.run()
    seen, executed = notebook.run(replicate="asked")
    assert (sorted(executed), seen.result.state) == ([0, 0, 1, 1, 2, 2, 3, 3], "succeeded")
    assert notebook.run()[1] == []


def test_retries_begin_in_what_was_kept(notebook: Notebook) -> None:
    notebook.run()
    train = "import os\nif os.environ['TPUNB_ATTEMPT'] == '0': raise ValueError\nprint('second')"
    seen, executed = notebook.run(train, retries=1)
    assert (executed, seen.result.state, seen.result.attempts) == ([], "succeeded", 2)


def test_a_detached_run_begins_in_what_was_kept(notebook: Notebook) -> None:
    notebook.run()
    run, _ = notebook.driver.start(
        notebook.sources(),
        READ,
        numbers=notebook.numbers,
        cwd=str(notebook.folder),
        detached=True,
    )
    for _ in run.events():
        pass
    assert run.result().state == "succeeded"
    assert len(notebook.log.read_text().split()) == 4
    assert notebook.run()[1] == [0, 1, 2, 3]


def test_the_first_that_goes_when_memory_runs_out(notebook: Notebook) -> None:
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


def test_a_prelude_that_has_run_ahead(notebook: Notebook) -> None:
    notebook.cells[1] = "import os\nstate[1] = os.sched_getscheduler(0) in (3, 5)"
    run_ahead(notebook)
    wait_for(notebook, 4)
    until(lambda: not left_below(notebook.driver.supervisor_pid), "its last copy is kept")
    seen, executed = notebook.run(f"import os\nprint(os.sched_getscheduler(0))\n{READ}", ranks=1)
    assert executed == []
    # 3 and 5: batch and idle, which other processes go before.
    assert seen.log == ["[0] 0", "[0] [(0, 'a'), (1, True), (2, 'a'), (3, 'a')]"]


def test_a_prelude_that_runs_ahead_goes_on_with_the_next_cell(notebook: Notebook) -> None:
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


def test_a_run_does_not_wait_for_a_prelude_that_runs_ahead(notebook: Notebook) -> None:
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


def test_those_that_nobody_uses_end(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(notebook.folder / "runs")
    preload = Preload.__init__

    def impatient(self: Preload, *args: object, **named: object) -> None:
        preload(self, *args, **{**named, "idle": 2.0})  # type: ignore[arg-type]

    monkeypatch.setattr(Preload, "__init__", impatient)
    driver.warm()
    notebook.driver = driver
    notebook.run()
    supervisor = processes.find_process(driver.supervisor_pid)
    assert supervisor is not None
    everyone = [supervisor, *processes.descendants(supervisor.pid)]
    deadline = time.monotonic() + 60
    while any(map(processes.is_alive, everyone)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([0, 1, 2, 3], "succeeded")
    driver.launcher.close()


def test_what_each_run_finds_follows_from_the_cells(notebook: Notebook) -> None:
    """Random edits, executions and runs beside a model of the rules."""
    dice = random.Random(20)
    kept: list[tuple[int, str]] = []
    notebook.cells, notebook.numbers, notebook.ids = [], [], []
    train = "print(globals().get('state', {}).get('seen'))"
    highest, stamp = 0, 0
    for _ in range(25):
        for _ in range(dice.randrange(3)):
            action = dice.choice(["edit", "again", "insert", "delete"])
            if action == "insert" or not notebook.cells:
                at = dice.randint(0, len(notebook.cells))
                notebook.insert(at, "pass", 0)
            else:
                at = dice.randrange(len(notebook.cells))
            highest, stamp = highest + 1, stamp + 1
            if action == "delete":
                notebook.delete(at)
            elif action == "edit":
                # Executed in the kernel too, as a cell that was edited has to be.
                notebook.cells[at] = f"state.setdefault('seen', []).append({stamp})"
                notebook.numbers[at] = highest
            else:
                notebook.numbers[at] = highest
        seen, executed = notebook.run(train, ranks=1)
        now = list(zip(notebook.numbers, notebook.sources(), strict=True))
        same = next((i for i, (a, b) in enumerate(zip(kept, now, strict=False)) if a != b), None)
        first = min(len(kept), len(now)) if same is None else same
        assert executed == notebook.ids[first:]
        # A longer one that was kept is still there if this one is its beginning.
        kept = kept if same is None and len(kept) > len(now) else now
        values = [int(cell.split("(")[-1][:-1]) for cell in notebook.cells if "seen" in cell]
        assert seen.log == [f"[0] {values or None}"]
