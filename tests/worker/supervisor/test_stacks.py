"""Stacks of ranks, from stand-ins for ranks that write them as faulthandler does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.drivers.kernel import until
from tests.support import script_of
from tpunb.runs import directory
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.utils import processes
from tpunb.worker.supervisor import stacks

SLOW = """
import signal, sys, time
file = open(sys.argv[1], "w", buffering=1)
def write(number, frame):
    for part in ("Thread 0x01 (most recent call first):\\n", '  File "wait.py", line 1 in wait\\n',
                 "\\nCurrent thread 0x02 (most recent call first):\\n",
                 '  File "sleep.py", line 7 in nap\\n', '  File "%s", line 3 in <module>\\n',
                 '  File "tpunb/worker/rank.py", line 9 in main\\n'):
        file.write(part % sys.argv[2] if "%" in part else part)
        time.sleep(0.3)
signal.signal(int(sys.argv[3]), write)
print("ready", flush=True)
while True:
    time.sleep(600)
"""
DEEP = """
import faulthandler, sys, threading, time
faulthandler.register(int(sys.argv[3]), open(sys.argv[1], "w"), all_threads=True)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def down(n):
    print("ready", flush=True)
    time.sleep(600)
exec(compile(open(sys.argv[2]).read(), sys.argv[2], "exec"))
"""


Begin = Callable[[str], processes.Process]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = directory.create_run(tmp_path, "n")
    made.stacks(0, 0).parent.mkdir(parents=True, exist_ok=True)
    return made


@pytest.fixture
def begin(starts_processes: None, run: RunDir) -> Iterator[Begin]:
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> processes.Process:
        rank = subprocess.Popen(
            [sys.executable, "-c", code, run.stacks(0, 0), run.script, str(int(stacks.DUMP))],
            stdout=subprocess.PIPE,
        )
        started.append(rank)
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"ready\n"
        found = processes.find_process(rank.pid)
        assert found is not None
        return found

    yield start
    for rank in started:
        rank.kill()
        rank.communicate()


def write(run: RunDir, train: str) -> RunSpec:
    script = script_of([], train)
    run.script.write_text(script.text)
    return RunSpec("id", "n", 1, "CPU", "/", (), script.blocks)


def where(run: RunDir, spec: RunSpec, rank: processes.Process) -> str:
    until(stacks.StackCollection(run, 0, {0: rank}).advance, "the stacks")
    return stacks.describe_stacks(run, spec, 0, {0: rank})[0]


def test_stacks_of_a_rank_that_writes_slowly(run: RunDir, begin: Begin) -> None:
    spec = write(run, "import sleep\nsleep.nap()")
    words = "rank 0: in sleep.nap, cell [1], line 2: sleep.nap()"
    assert where(run, spec, begin(SLOW)) == words


def test_stacks_of_a_deep_recursion_still_name_the_cell_line(run: RunDir, begin: Begin) -> None:
    spec = write(run, "def fall(n):\n    fall(n - 1) if n else down(0)\nfall(150)")
    words = "cell [1], line 2: fall(n - 1) if n else down(0)"
    assert words in where(run, spec, begin(DEEP))
