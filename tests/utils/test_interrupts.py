"""Processes that the interrupt key reaches, and processes that it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

SIGNALLED = """
    import os, subprocess, sys, time
    from tpunb.utils.interrupts import counted_interrupts, start_in_own_session

    # Another process presses the key all the time, as nobody can, so that a process that begins
    # has it in the moment that it belongs to this group.
    press = "import os, sys; g = int(sys.argv[1])\\nwhile os.getppid() == g: os.killpg(g, 2)"
    with counted_interrupts() as interrupts:
        pressing = [sys.executable, "-c", press, str(os.getpid())]
        key = subprocess.Popen(pressing, preexec_fn=os.setpgrp)
        while not interrupts.count:
            time.sleep(0.001)
        code = "import sys; sys.exit(int(sys.argv[1]))"
        codes = [start_in_own_session(code, str(n)).wait() for n in range(20)]
        key.kill()
        key.wait()
    print(codes)
"""


@pytest.mark.usefixtures("starts_processes")
def test_it_does_not_reach_a_process_that_was_started_apart() -> None:
    done = subprocess.run(
        [sys.executable, "-c", dedent(SIGNALLED)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == f"{list(range(20))}\n"


@pytest.mark.usefixtures("starts_processes")
def test_a_process_apart_can_be_interrupted_itself_and_finds_this_tpunb() -> None:
    from tpunb.utils.interrupts import start_in_own_session

    code = (
        "import tpunb.utils.interrupts, time; print(tpunb.__path__[0], flush=True); time.sleep(60)"
    )
    with start_in_own_session(
        code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/"
    ) as process:
        assert process.stdout is not None
        path = process.stdout.readline().decode().strip()
        assert Path(path) == Path(__file__).parents[2] / "tpunb"
        assert os.getsid(process.pid) == process.pid
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT  # as Python ends after KeyboardInterrupt
