"""More of tests/scenarios/test_kept_preludes.py, which takes longer."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scenarios.test_kept_preludes import (
    DRAW,
    SEEDED,
    Notebook,
    kept_processes,
    notebook,
    notes,
)
from tests.support import Driver
from tpunb.runs.events import Output
from tpunb.runs.protocol import Preload
from tpunb.utils import processes


@pytest.mark.parametrize(
    ("change", "executed", "told"),
    [
        ("edit", [2, 3], "2 of 4 cells reused: cell [3] has changed"),
        ("again", [2, 3], "2 of 4 cells reused: cell [7] was executed"),
        ("insert", [4, 2, 3], "2 of 5 cells reused: cell [9] is new"),
        ("delete", [3], "2 of 3 cells reused: a cell above [4] is gone"),
        ("environment", [0, 1, 2, 3], "reused: the variable CHANGED has changed"),
    ],
)
def test_prelude_cells_that_rerun_after_a_change(
    notebook: Notebook, change: str, executed: list[int], told: str
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
    else:
        options["env"] = {"CHANGED": "1"}
    seen, ran = notebook.run(**options)
    assert (ran, seen.result.state) == (executed, "succeeded")
    assert told in notes(seen)
    _, ran = notebook.run(**options)
    assert ran == []


def test_kept_prelude_ignores_variables_set_by_importing_torch_xla(notebook: Notebook) -> None:
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


def test_prelude_reruns_when_a_local_module_changes(notebook: Notebook, tmp_path: Path) -> None:
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


def test_kept_prelude_gives_the_random_numbers_of_a_fresh_one(notebook: Notebook) -> None:
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


# The process that leaves the second run's copy, three forks below the one that ran this cell, does
# so after the runner has been killed.
LATE_COPY = """
import os, time
forks = []

def wait():
    runner, until = os.getppid(), time.monotonic() + 1.5
    while len(forks) == 3 and os.getppid() == runner and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2 if len(forks) == 3 else 0.0)

os.register_at_fork(before=wait, after_in_child=lambda: forks.append(1))
"""


@pytest.mark.parametrize("train", ["raise ValueError", "import os; os.kill(os.getppid(), 9)"])
def test_kept_prelude_survives_a_failed_run(notebook: Notebook, train: str) -> None:
    if "getppid" in train:
        notebook.cells[0] = LATE_COPY
    notebook.run()
    seen, _ = notebook.run(train)
    assert seen.result.state == "failed"
    seen, executed = notebook.run()
    assert (executed, seen.result.state) == ([], "succeeded")


def test_kept_prelude_processes_may_be_killed_at_any_time(notebook: Notebook) -> None:
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


def test_replicate_does_not_use_or_replace_kept_preludes(notebook: Notebook) -> None:
    notebook.run()
    seen, executed = notebook.run(replicate="asked")
    assert (sorted(executed), seen.result.state) == ([0, 0, 1, 1, 2, 2, 3, 3], "succeeded")
    assert notebook.run()[1] == []


def test_idle_kept_preludes_and_their_supervisor_end(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
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
