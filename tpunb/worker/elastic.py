"""The ranks as a torch elastic agent sees them, which is what torchrun is.

Rendezvous, ranks, their environment and restarts come from torch elastic; this subclass starts
a rank by forking and hands stopping to the guard's ladder. `elastic_launch` is not used: it
waits for return values that never come when a forked rank ends by os._exit.

`SimpleElasticAgent` says what a subclass may override, and its methods have leading
underscores by design; checked on torch 2.8 and 2.9.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from tpunb.rundir import RunDir
from tpunb.worker.messages import Reporter

Become = Callable[[int, int, int, dict[str, str]], NoReturn]
"""Called in a new process with rank, local rank, attempt and the rank's environment."""

LOOK = 0.03
"""Seconds between two looks at the ranks."""


class ForkingAgent(SimpleElasticAgent):
    """Forks the ranks of one run and watches them."""

    def __init__(self, spec: WorkerSpec, run: RunDir, report: Reporter, become: Become) -> None:
        super().__init__(spec)
        self._run_dir = run
        self._report = report
        self._become = become
        self._living: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._attempt = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self._attempt = worker_group.spec.max_restarts - self._remaining_restarts
        self._living, self._codes, self._ranks = {}, {}, {}
        # A SIGINT that comes before a rank has its handlers waits until it has.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        gate, gatekeeper = os.pipe()
        for worker in worker_group.workers:
            pid = _fork()
            if pid == 0:
                # Not before all are forked: a rank that connects to the store keeps its thread
                # busy in this process, and the next child may inherit a lock that it holds
                # (measured: 3 of 434 rounds of 4 forks hung).
                os.close(gatekeeper)
                os.read(gate, 1)
                os.close(gate)
                env = self._environment(worker_group, worker.local_rank)
                self._become(worker.global_rank, worker.local_rank, self._attempt, env)
            self._living[worker.local_rank] = pid
            self._ranks[worker.local_rank] = worker.global_rank
        os.close(gatekeeper)
        os.close(gate)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        pids = dict(self._living)
        self._report.tell("ranks", attempt=self._attempt, pids=list(pids.values()))
        return pids

    def _environment(self, group: WorkerGroup, local_rank: int) -> dict[str, str]:
        """What torchrun gives a worker (LocalElasticAgent._start_workers)."""
        worker, spec = group.workers[local_rank], group.spec
        values = {
            "LOCAL_RANK": local_rank,
            "RANK": worker.global_rank,
            "GROUP_RANK": group.group_rank,
            "ROLE_RANK": worker.role_rank,
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "WORLD_SIZE": worker.world_size,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")
            or max(1, len(os.sched_getaffinity(0)) // spec.local_world_size),
        }
        return {name: str(value) for name, value in values.items()}

    def _reap(self) -> None:
        for local_rank, pid in list(self._living.items()):
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended:
                del self._living[local_rank]
                code = os.waitstatus_to_exitcode(status)
                self._codes[local_rank] = code
                self._report.tell(
                    "rank_exit",
                    rank=self._ranks[local_rank],
                    exitcode=code,
                    at=time.time(),
                    peak=used.ru_maxrss * 1024,  # Linux counts kilobytes
                )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._reap()
        if any(self._codes.values()) or self._any_error():
            if self._run_dir.stopping.exists():
                self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        if self._living:
            return RunResult(state=WorkerState.HEALTHY)
        done = {self._ranks[local_rank]: None for local_rank in self._codes}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=done)

    def _any_error(self) -> bool:
        """Whether a rank has failed, even if it is still busy ending (exit handlers, threads)."""
        return any(
            self._run_dir.error(self._attempt, self._ranks[local]).exists()
            for local in self._living
        )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._living:
            self._report.tell("stop_ranks")
        while self._living:
            time.sleep(LOOK)
            self._reap()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Nothing is left to do: ranks end by themselves or on the guard's ladder."""


def launch(world_size: int, retries: int, run: RunDir, report: Reporter, become: Become) -> bool:
    """Fork `world_size` ranks on this machine and wait for all of them; True if none failed.

    After a failure the ranks are ended and forked anew, `retries` times at most.
    """
    handler = _rendezvous(run.id)
    spec = WorkerSpec(
        role="default",
        local_world_size=world_size,
        rdzv_handler=handler,
        fn=become,  # forked, not called by torch elastic; it takes the name from here
        max_restarts=retries,
        monitor_interval=LOOK,
    )
    result = ForkingAgent(spec, run, report, become).run()
    return not result.is_failed()


def _rendezvous(run_id: str) -> RendezvousHandler:
    """One host meets itself on a free port of the loopback interface.

    The static kind has no threads in Python and takes 5 ms; c10d takes 0.2 s (measured).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="static",
            endpoint=f"127.0.0.1:{port}",
            run_id=run_id,
            min_nodes=1,
            max_nodes=1,
            rank=0,
        )
    )


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of any other thread. The only ones here are those of torch's
        # TCPStore, which ranks do not use: they connect to it anew.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
