"""A rank: the train cell on one core, in a process like that of a script run alone."""

from __future__ import annotations

import atexit
import faulthandler
import os
import random
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from tpunb import rundir
from tpunb.models import RunSpec
from tpunb.rundir import RunDir
from tpunb.worker import (
    autograd,
    bars,
    cells,
    counters,
    device,
    launchers,
    loaders,
    processes,
    pulse,
    returns,
    spmd,
    stacks,
    stdio,
)
from tpunb.worker.cells import Cells
from tpunb.worker.marks import Marks
from tpunb.worker.messages import Reporter
from tpunb.worker.rehearsal import calls, tally
from tpunb.worker.tracing import Tracing


@dataclass(frozen=True)
class Assignment:
    """What a rank is and what it has to do."""

    run: RunDir
    spec: RunSpec
    cells: Cells
    attempt: int
    rank: int
    local_rank: int
    local_world_size: int
    env: Mapping[str, str]
    """What torchrun sets for this rank, and where its run is."""
    replicate: bool
    """The rank runs the prelude itself."""
    signals: Mapping[int, object]
    """Signal handlers that a script run alone would have here."""
    random: tuple[Any, ...]
    """The state of Python's generator of random numbers before the fork."""
    runner: int
    """The pid of the process that this one was forked from."""


def main(task: Assignment, report: Reporter) -> NoReturn:
    """Become the rank, run the cell, and end the process. SIGINT is blocked when this begins.

    The way back up the stack belongs to the process that this one was forked from, so nothing
    may return or be raised from here.
    """
    code = 1
    try:
        try:
            _become(task, report)
            code = _work(task)
        except BaseException as error:
            # Only what goes wrong before or after the cells: their own exceptions end in _work.
            _tell(error, task)
        pulse.settle()
        tally.save(task.run.collectives(task.attempt, task.rank), task.rank)
        _exit_like_an_interpreter()
    finally:
        stdio.flush()
        os._exit(code)


def _become(task: Assignment, report: Reporter) -> None:
    """Take on everything in which this process differs from the one that it was forked from."""
    os.setsid()  # so that its children can be told apart, and no other group's signals reach it
    processes.die_with_parent(task.runner)
    report.close()
    os.environ.update(task.env)
    folder = task.run.attempt(task.attempt, task.rank)
    first = "prelude.log" if task.replicate else "stdout.log"
    stdio.redirect(folder / first, folder / (first if task.replicate else "stderr.log"))
    faulthandler.enable(open(folder / "crash.txt", "w"), all_threads=False)  # noqa: SIM115
    rundir.keep_room(task.run.error(task.attempt, task.rank))
    written = open(task.run.stacks(task.attempt, task.rank), "w")  # noqa: SIM115
    faulthandler.register(stacks.DUMP, written, all_threads=True)
    pulse.start(task.run.pulse(task.attempt, task.rank), counters.look)
    torch.set_num_threads(int(task.env["OMP_NUM_THREADS"]))
    device.prepare(
        task.spec.device,
        task.rank,
        task.spec.world_size,
        task.local_rank,
        task.local_world_size,
        task.spec.hang_timeout,
        task.spec.spmd,
    )
    calls.name_places(str(task.run.script), task.spec.place)
    autograd.start_xla_before_backward()
    loaders.tell_of_errors()
    _watch_steps(task)
    launchers.install(task.rank)
    bars.install()
    random.setstate(task.random)  # a fork reseeds this generator, unlike numpy's and torch's
    task.cells.become_main()


def _watch_steps(task: Assignment) -> None:
    """Notice the ends of steps: what is compiled again, and where a trace begins and ends."""
    run, attempt, rank = task.run, task.attempt, task.rank
    watched = Marks(
        str(run.script),
        task.spec.place,
        run.recompiled(attempt, rank),
        counters,
        task.cells.codes,
    )
    profile = task.spec.profile
    if profile is not None and rank in profile.ranks:
        folder = run.path / "profile" / f"rank-{rank}"
        told = partial(print, flush=True)
        watched.acts.append(Tracing(profile, folder, told).after)
    watched.install()


def _work(task: Assignment) -> int:
    """Run the cells; the exit code that a script with them would have."""
    try:
        for number, handler in task.signals.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if task.replicate:
            for block in [*task.cells.of("header"), *task.cells.of("prelude")]:
                task.cells.execute(block)
            folder = task.run.attempt(task.attempt, task.rank)
            stdio.redirect(folder / "stdout.log", folder / "stderr.log")
        device.begin(task.spec.device, task.local_rank, task.local_world_size, task.spec.spmd)
        pulse.begin()
        for block in task.cells.of("train"):
            task.cells.execute(block)
        return _finish(task)
    except SystemExit as error:
        if error.code in (None, 0):
            return _finish(task)
        _tell(cells.named_exit(error), task)
        return error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt as error:
        _tell(error, task)
        return 130
    except BaseException as error:
        _tell(error, task)
        return 1


def _tell(error: BaseException, task: Assignment) -> None:
    """Leave word of what ended the cell, for the kernel and on the rank's standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a stop comes too late to matter
    cells.write(error, task.run, task.spec, task.attempt, task.rank)
    if not isinstance(error, KeyboardInterrupt):
        cells.show(error, task.run, task.spec)


def _finish(task: Assignment) -> int:
    """After a train cell that ended well: metrics are written, values wait for the kernel."""
    device.end(task.spec.device, task.spec.world_size)
    returns.settle()
    if task.spec.spmd and (unused := spmd.unused()):
        print(unused, file=sys.stderr)
    log = sys.modules.get("tpunb.training.log")
    if log is not None:
        log.flush()
    if task.rank == 0 and task.spec.returns:
        returns.save(vars(task.cells.module), task.spec.returns, task.run)
    return 0


def _exit_like_an_interpreter() -> None:
    """Wait for threads and run exit handlers, as at the end of a script.

    Private names, checked on Python 3.10 to 3.13: `threading._shutdown` waits for threads that
    are not daemons, `atexit._run_exitfuncs` runs what was registered.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
