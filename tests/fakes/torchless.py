"""A fork server, runners and ranks without torch: the processes of a run start in no time.

They say to the supervisor what the real ones say, so everything above them is real: `tpunb node`,
supervisors, what hosts tell each other, streams, results. A rank runs the script's train cell as
plain Python, with RANK, LOCAL_RANK, WORLD_SIZE and TPUNB_ATTEMPT in its environment.

    python -m tests.fakes.torchless node …    `tpunb node …` with all this below it
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from socket import socket
from typing import NoReturn

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase
from tpunb.runs.protocol import (
    AbandonAttempt,
    AllFinished,
    AttemptFinished,
    AttemptReady,
    ForkRunner,
    LibrariesImported,
    MessageWriter,
    OrderChannel,
    RankExited,
    RanksForked,
    RunnerExits,
    StartAttempt,
    StopRanks,
)
from tpunb.runs.spec import PhaseKind
from tpunb.utils import env_vars, files, processes
from tpunb.worker.prelude import Copy, PreludeCopier

ROOT = str(Path(__file__).resolve().parents[2])
_PATH = f"import sys; sys.path.insert(0, {ROOT!r}); "


def main() -> None:
    """The command."""
    from tpunb import cli

    install()
    sys.exit(cli.main(sys.argv[1:]))


def install() -> None:
    """In this process, supervisors are started with all this below them."""
    from tpunb.kernel import supervisor

    supervisor.SUPERVISOR = _PATH + "from tests.fakes import torchless; torchless.supervise()"


def supervise() -> None:
    """The supervisor, with another fork server."""
    from tpunb.worker.supervisor import device_lock
    from tpunb.worker.supervisor import main as supervisor

    # No run here has a TPU, which only one on this machine could use.
    device_lock.lock_folder = _own_locks

    supervisor.FORK_SERVER = _PATH + (
        "sys.argv.pop(1); from tests.fakes import torchless; torchless.serve()"
    )
    supervisor.main()


def _own_locks() -> Path:
    folder = Path.home() / ".tpunb-locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def serve() -> None:
    """The fork server."""
    parent, writer, lifeline = (int(argument) for argument in sys.argv[-3:])
    processes.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reports = MessageWriter(writer)
    orders = OrderChannel(socket(fileno=os.dup(0)))
    orders.receive()
    reports.send(LibrariesImported({}))
    Copy(None, reports, parent, _begin, lifeline=lifeline).wait(orders)


def _begin(order: ForkRunner, copier: PreludeCopier, copy: Copy) -> NoReturn:
    # A run of one host has sockets for copies of the runner, which this one leaves none of.
    decisions = None if order.node_rank is None else copier.take_socket()
    copier.close()
    _Runner(order, decisions, copy).main()


class _Runner:
    def __init__(self, order: ForkRunner, decisions: OrderChannel | None, copy: Copy) -> None:
        self.run = RunDir(order.dir)
        self.spec = self.run.read_spec()
        self.ranks = self.spec.ranks_on(order.node_rank or 0)
        self.decisions = decisions
        self.reports = copy.reports
        self.await_successor = copy.await_successor
        self.abandoned = -1
        self.all_finished = decisions is None
        os.environ.clear()
        os.environ.update({**order.env, env_vars.RUN: str(self.run.path)})
        os.environ[env_vars.ADDRESS] = order.address

    def main(self) -> NoReturn:
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
            os.chdir(self.spec.cwd)
            code = 0 if self.attempts() else 1
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            self.await_successor()
            self.reports.send(RunnerExits(code))
            os._exit(code)

    def attempts(self) -> bool:
        for attempt in range(self.spec.retries + 1):
            if self.decisions is not None:
                self.reports.send(AttemptReady(attempt, 0))
                while not self.hear(0.02, attempt):
                    if self.run.stopping.exists():
                        return False
            if attempt == 0:
                with contextlib.suppress(OSError):
                    self.run.emit(Phase(PhaseKind.TRAINING, "training"))
            if self.attempt(attempt):
                return True
            if self.run.stopping.exists():
                return False
        return False

    def hear(self, patience: float, attempt: int) -> bool:
        """True for the order to begin."""
        channel = self.decisions
        if channel is None:
            return False
        if not channel.waiting and not select.select([channel], [], [], patience)[0]:
            return False
        received = channel.receive()
        match received and received[0]:
            case StartAttempt(number):
                return number == attempt
            case AbandonAttempt(number):
                self.abandoned = number
            case AllFinished():
                self.all_finished = True
        return False

    def attempt(self, attempt: int) -> bool:
        living = {}
        runner = os.getpid()
        for local_rank, rank in enumerate(self.ranks):
            pid = os.fork()
            if pid == 0:
                processes.die_with_parent(runner)
                self.become(attempt, rank, local_rank)
            living[pid] = rank
        self.reports.send(RanksForked(attempt, list(living)))
        failed = stopped = told = False
        while True:
            for pid in list(living):
                ended, status, used = os.wait4(pid, os.WNOHANG)
                if ended:
                    rank = living.pop(pid)
                    code = os.waitstatus_to_exitcode(status)
                    failed = failed or code != 0
                    peak = used.ru_maxrss * 1024
                    self.reports.send(RankExited(rank, code, time.time(), peak, code == 0))
            self.hear(0, attempt)
            failed = failed or self.abandoned == attempt
            if failed and living and not stopped:
                stopped = True
                self.reports.send(StopRanks())
            if failed and not living:
                if not stopped:
                    self.reports.send(StopRanks())
                return False
            if not living:
                if not told:
                    told = True
                    if self.decisions is not None:
                        self.reports.send(AttemptFinished(attempt))
                if self.all_finished:
                    return True
            time.sleep(0.01)

    def become(self, attempt: int, rank: int, local_rank: int) -> NoReturn:
        code = 130  # where a stop comes before the error has been written
        try:
            os.setsid()
            folder = self.run.attempt(attempt, rank)
            folder.mkdir(parents=True, exist_ok=True)
            for fd, name in ((1, "stdout.log"), (2, "stderr.log")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), fd)
            files.reserve_blocks(self.run.error(attempt, rank))
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(local_rank),
                WORLD_SIZE=str(self.spec.world_size),
                **{env_vars.ATTEMPT: str(attempt)},
            )
            script = self.run.script.read_text(encoding="utf-8")
            block = next(block for block in self.spec.blocks if block.role == "train")
            names: dict[str, object] = {"__name__": "__main__"}
            for each in [block] if self.decisions is not None else self.spec.blocks:
                lines = script.splitlines()[each.first - 1 : each.last]
                exec(compile("\n".join(lines), "cell", "exec"), names)
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a rank does: it is too late to matter
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            where = [f.lineno for f in traceback.extract_tb(error.__traceback__) if
                     f.filename == "cell"]  # fmt: skip
            told = {
                "type": type(error).__name__,
                "message": str(error),
                "cell": block.number,
                "line": where[-1] if where else None,
                "traceback": traceback.format_exc(),
                "time": time.time(),
                "kind": "exception",
            }
            with contextlib.suppress(OSError):
                files.write_json(self.run.error(attempt, rank), told)
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(code)


if __name__ == "__main__":
    main()
