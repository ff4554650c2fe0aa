"""A rank: the train cell on one core, in a process like that of a script run alone."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from tpunb.backends import current, launchers
from tpunb.backends.base import RankSetup
from tpunb.backends.rehearsal import call, install, stats
from tpunb.backends.torch.steps import steps
from tpunb.backends.xla import counters, restored_names, spmd
from tpunb.runs import arguments, callbacks, heartbeat
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note, Phase
from tpunb.runs.protocol import MessageWriter
from tpunb.runs.spec import PhaseKind, RunSpec
from tpunb.utils import descriptors, files, processes
from tpunb.worker import (
    cells,
    children,
    figures,
    fork_safety,
    returns,
    rich_progress,
    script_end,
    stdio,
    untied,
)
from tpunb.worker.cells import Cells
from tpunb.worker.rank_marks import RankMark
from tpunb.worker.recompiles import StepMonitor
from tpunb.worker.step_trace import StepTrace
from tpunb.worker.stepped import stepped_models
from tpunb.worker.supervisor import stacks


@dataclass(frozen=True)
class Assignment:
    """The identity of a rank, and everything that it needs to do its work."""

    run: RunDir
    spec: RunSpec
    cells: Cells
    attempt: int
    rank: int
    local_rank: int
    local_world_size: int
    env: Mapping[str, str]
    """The variables that torchrun sets for a rank, and those that locate its run."""
    replicate: bool
    """The rank runs the prelude itself."""
    mark: RankMark
    signals: Mapping[int, object]
    """The signal handlers that the prelude has set, as a script on its own would have them."""
    quiet: contextlib.ExitStack
    """Closing it restores the prelude's warning filters."""
    random: tuple[Any, ...]
    """The state of Python's random number generator before the fork."""
    runner: int
    """The pid of the process that this one was forked from."""

    @property
    def setup(self) -> RankSetup:
        spec, cores = self.spec, self.spec.spmd
        return RankSetup(
            spec.device,
            self.rank,
            spec.world_size,
            self.local_rank,
            self.local_world_size,
            None if cores is None else cores // max(1, len(spec.hosts)),
        )


def main(task: Assignment, reports: MessageWriter) -> NoReturn:
    """Become the rank, run the cell, and end the process. SIGINT is blocked when this begins.

    The stack above belongs to the process that this one was forked from, so this never returns
    and never raises.
    """
    code = 1
    try:
        try:
            _become(task, reports)
            code = _work(task)
        except BaseException as error:
            # Errors before or after the cells: _work handles exceptions of the cells.
            _report_error(error, task)
        with contextlib.suppress(OSError):  # missing counts are no reason to fail
            heartbeat.complete_counts()
            stats.save_collectives(task.run.collectives(task.attempt, task.rank), task.rank)
        script_end.exit_like_an_interpreter()
        if code == 0:
            try:
                install.end_rehearsal()
            except Exception as error:
                code = 1
                _report_error(error, task)
    finally:
        stdio.flush_output()
        os._exit(code)


def _become(task: Assignment, reports: MessageWriter) -> None:
    """Set up everything in which this process differs from the one that it was forked from."""
    os.setsid()  # its children can be told apart, and signals to other groups do not reach it
    processes.die_with_parent(task.runner)
    processes.set_title(f"rank {task.rank}", task.spec.name)
    reports.close()
    script_end.disown_children()
    os.environ.update(task.env)
    folder = task.run.attempt(task.attempt, task.rank)
    first = "prelude.log" if task.replicate else "stdout.log"
    stdio.redirect_output(folder / first, folder / (first if task.replicate else "stderr.log"))
    faulthandler.enable(open(folder / "crash.txt", "w", opener=files.opener), all_threads=False)  # noqa: SIM115
    files.reserve_blocks(task.run.error(task.attempt, task.rank))
    file = task.run.stacks(task.attempt, task.rank)
    written = open(file, "w", opener=files.opener)  # noqa: SIM115
    faulthandler.register(stacks.DUMP, written, all_threads=True)
    backend = current.backend()
    heartbeat.start_writer(task.run.heartbeat(task.attempt, task.rank), backend.counts)
    fork_safety.limit_threads(int(task.env["OMP_NUM_THREADS"]))
    backend.prepare(task.setup)
    call.name_cell_lines(task.cells.lines)
    after_step = _watch_programs(task) if backend.has_programs else steps.after_step
    profile = task.spec.profile
    if profile is not None and profile.has(task.rank):
        after_step.append(StepTrace(profile, task.run, task.attempt, task.rank).after)
    if task.spec.world_size > 1 and task.spec.spmd is None:
        stepped_models.watch(groups=backend.name != "xla")
    if task.rank == 0:
        untied.report_to(lambda line: task.run.emit(Note(line)))
    launchers.redirect_launchers(task.rank, report=partial(_fail, task=task))
    children.leave_out_train_cell()
    rich_progress.follow_rich_bars()
    random.setstate(task.random)  # a fork reseeds this generator, unlike numpy's and torch's
    task.cells.become_main()
    task.cells.report_of_fork = partial(_report_error_of_fork, task=task)
    descriptors.keep_own()


def _watch_programs(task: Assignment) -> list[Callable[[int], None]]:
    """Watch the ends of steps, to notice recompilations; return what is called after each."""
    path = task.run.recompiled(task.attempt, task.rank)
    monitor = StepMonitor(task.cells.lines, path, counters)
    monitor.install()
    return monitor.after_step


def _work(task: Assignment) -> int:
    """Run the cells; return the exit code that a script with them would have."""
    try:
        for number, handler in task.signals.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        task.quiet.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if task.replicate:
            _replicate_prelude(task)
            task.cells.execute_parameters()
            folder = task.run.attempt(task.attempt, task.rank)
            stdio.redirect_output(folder / "stdout.log", folder / "stderr.log")
        current.backend().start(task.setup)
        heartbeat.begin_training()
        callbacks.forget()
        figures.begin(task.run, task.attempt, task.rank)
        if task.run.arguments.exists():
            vars(task.cells.module)[arguments.NAME] = arguments.Arguments(task.run.arguments)
        if code := _train(task):
            return code
        try:
            _finish(task)
        except SystemExit as error:  # raised by an object that is being returned
            _report_error(cells.named_exit(error), task)
            return script_end.exit_code(error) or 1
        return 0
    except KeyboardInterrupt as error:
        _report_error(error, task)
        return 130
    except BaseException as error:
        install.name_departed(error, task.spec.world_size)
        _report_error(error, task)
        return 1


def _train(task: Assignment) -> int:
    """Run the train cell; return the code of its sys.exit(), or 0.

    sys.exit(0) is a success, and its line is printed; but not in the handler of a signal, unless
    the run is being stopped: the cell was cut short.
    """
    for block in task.cells.of("train"):
        try:
            task.cells.execute(block)
        except SystemExit as error:
            by = script_end.interrupting_signal(error)
            named = cells.named_exit(error, f" in the handler of {by}" if by else "")
            code = script_end.exit_code(error)
            if code or (by and not task.run.stopping.exists()):
                _report_error(named, task)
                return code or 1
            described = cells.describe_error(named, task.run, task.spec)
            if described["line"] != block.last - block.first + 1:
                where = f"cell [{described['cell']}], line {described['line']}"
                print(f"{where}: {described['message']} has ended the train cell", file=sys.stderr)
            break
    return 0


def _replicate_prelude(task: Assignment) -> None:
    task.cells.execute_header()
    prelude = task.cells.of("prelude")
    where = " on every rank, rank 0 at" if task.spec.world_size > 1 else ""
    for index, block in enumerate(prelude):
        if task.rank == 0:
            task.run.emit(Phase.of_prelude(prelude, index, where))
        task.cells.execute_prelude(block)
    for name in task.spec.restored:
        os.environ.pop(name, None)
    if task.rank == 0:
        task.run.emit(Phase(PhaseKind.TRAINING, "training"))


def _report_error(error: BaseException, task: Assignment) -> None:
    """Describe the error in error.json and on the rank's standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a stop is too late to matter
    _fail(error, task)
    if not isinstance(error, KeyboardInterrupt):
        cells.print_error(error, task.run, task.spec)


def _fail(error: BaseException, task: Assignment) -> None:
    """Let the run fail with this error, also from a process that the cell has forked."""
    task.mark.fail(
        cells.describe_error(error, task.run, task.spec), task.run.error(task.attempt, task.rank)
    )


def _report_error_of_fork(error: BaseException, task: Assignment) -> None:
    """Report an error of a process that the cell has forked: part of the rank's work failed."""
    if isinstance(error, Exception):
        _report_error(error, task)


def _finish(task: Assignment) -> None:
    """After a train cell that ended well: write metrics, and the values for the kernel."""
    install.leave_rehearsal()
    current.backend().finish()
    stepped_models.save(task.run.models(task.attempt, task.rank))
    if task.spec.spmd and (unused := spmd.unused_warning()):
        print(unused, file=sys.stderr)
    log = sys.modules.get("tpunb.training.log")
    if log is not None:
        log.flush_metrics()
    if task.rank == 0 and task.spec.returns:
        returns.save_returns(vars(task.cells.module), task.spec.returns, task.run)
    if task.rank == 0:
        for line in restored_names.describe_used():
            task.run.emit(Note(line))
    figures.finish()
    task.mark.finish()
