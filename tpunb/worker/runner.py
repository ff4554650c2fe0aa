"""The runner: runs the rest of the prelude, then forks the ranks and watches them.

It was the fork server, or a kept copy of an earlier runner. If every rank runs the prelude itself
(replicate), it only forks them. If the prelude does something that forbids a fork, the runner
reports that and ends, and the next fork server becomes another runner, which replicates.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import random
import signal
import warnings
from typing import NoReturn

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase
from tpunb.runs.protocol import ForkRunner, MessageWriter, PreludeNotForkable, RunnerExits
from tpunb.runs.spec import PhaseKind, RunSpec
from tpunb.utils import cpus, descriptors, env_vars, files, modules, processes
from tpunb.worker import cells, elastic, figures, fork_safety, kept_device, rank, script_end, stdio
from tpunb.worker.cells import Cells
from tpunb.worker.elastic import Host, HostOfSeveral, SingleHost
from tpunb.worker.prelude import Copy, Prelude, PreludeCopier
from tpunb.worker.rank_marks import RankMark


def main(order: ForkRunner, copier: PreludeCopier, copy: Copy) -> NoReturn:
    """Carry out an order, and end the process with the exit code of the run.

    `copier` leaves copies of this process; `copy` is what it was until now, whose prelude's first
    cells have run. SIGINT and SIGTERM are blocked when this begins.
    """
    run = RunDir(order.dir)
    spec = run.read_spec()
    processes.set_title("prelude", spec.name)  # before threads are named after this process
    host: Host = SingleHost(run.id)
    if order.node_rank is not None:
        decisions = copier.take_socket()
        host = HostOfSeveral(
            run, spec, order.node_rank, order.address, order.port, decisions, copy.reports
        )
    code = 1
    try:
        code = _run(run, spec, order, copier, copy, host)
    except KeyboardInterrupt as error:
        cells.write_error(error, run, spec, 0, None)
        code = 130
    except BaseException as error:
        cells.write_error(error, run, spec, 0, None)
        cells.print_error(error, run, spec)
    finally:
        stdio.flush_output()
        copy.await_successor()
        copy.reports.send(RunnerExits(code))
        os._exit(code)


def _run(
    run: RunDir,
    spec: RunSpec,
    order: ForkRunner,
    copier: PreludeCopier,
    copy: Copy,
    host: Host,
) -> int:
    folder = run.attempt(0, None)
    stdio.redirect_output(folder / "prelude.log", folder / "prelude.log")
    faulthandler.enable(open(folder / "crash.txt", "w", opener=files.opener), all_threads=False)  # noqa: SIM115
    files.reserve_blocks(run.error(0, None))
    env = order.env
    prelude = copy.prelude
    if prelude is None:
        os.environ.clear()
        os.environ.update({**env, env_vars.RUN: str(run.path)})
        if spec.device == "CPU":
            kept_device.keep_cpu()
        if threads := fork_safety.thread_count(env.get("OMP_NUM_THREADS")):
            fork_safety.limit_threads(threads)  # libraries loaded before do not read it
        modules.change_folder(spec.cwd)
        modules.use_import_path(spec.sys_path)
        figures.follow_figures()
        prelude = Prelude(run, spec)
    else:  # changes made by the cells stay, except to the variables that each run has for itself
        for name in env_vars.PER_RUN:
            os.environ.pop(name, None)
        own = {str(name): env[name] for name in env_vars.PER_RUN if name in env}
        os.environ.update({**own, env_vars.RUN: str(run.path)})
        importlib.invalidate_caches()  # folders of modules may have been made since
        prelude.switch_to_run(run, spec)
        copy.restore()
    if order.ahead:
        cpus.lower_priority()
    else:  # this process may be a fork of a prelude that has run ahead
        cpus.restore_priority()
    script_end.stop_on_sigterm()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    descriptors.keep_own()
    if order.replicate is None:
        problem = prelude.execute(run, spec, copier, copy)
        descriptors.note_users()
        if problem is not None:
            copy.reports.send(PreludeNotForkable(problem))
            return 0
    if order.ahead:
        return 0
    replicate = order.replicate is not None
    return _ranks(run, spec, prelude.cells, copy.reports, host, replicate=replicate)


def _ranks(
    run: RunDir,
    spec: RunSpec,
    script: Cells,
    reports: MessageWriter,
    host: Host,
    *,
    replicate: bool,
) -> int:
    # The prelude's warning filters apply in the ranks; in this process they could turn torch
    # elastic's own warnings into errors.
    quiet = contextlib.ExitStack()
    quiet.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    if not replicate:
        for name in spec.restored:
            os.environ.pop(name, None)
        script.execute_parameters()
    handlers = _take_signals()
    runner, state = os.getpid(), random.getstate()

    def become(
        number: int, local_rank: int, attempt: int, env: dict[str, str], mark: RankMark
    ) -> NoReturn:
        host.leave()
        task = rank.Assignment(
            run=run,
            spec=spec,
            cells=script,
            attempt=attempt,
            rank=number,
            local_rank=local_rank,
            local_world_size=int(env["LOCAL_WORLD_SIZE"]),
            env={**env, env_vars.ATTEMPT: str(attempt)},
            replicate=replicate,
            mark=mark,
            signals=handlers,
            quiet=quiet,
            random=state,
            runner=runner,
        )
        rank.main(task, reports)

    if not replicate:
        run.emit(Phase(PhaseKind.TRAINING, "training"))
    ended_well = elastic.launch_ranks(
        spec.local_world_size, spec.retries, host, run, reports, become
    )
    return 0 if ended_well else 1


def _take_signals() -> dict[int, object]:
    """Remove the prelude's signal handlers, and return them for the ranks.

    This process is ended by the supervisor, and waits for its children itself.
    """
    taken: dict[int, object] = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            taken[number] = handler
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGCHLD and handler is not None:
            taken[number] = handler
        if number == signal.SIGCHLD:  # if it is ignored, a process cannot wait for its children
            signal.signal(number, signal.SIG_DFL)
    return taken
