"""The ranks as a torch elastic agent sees them, which is what torchrun is.

Rendezvous, ranks, their environment and restarts come from torch elastic; this subclass starts
a rank by forking and leaves stopping to the supervisor. `elastic_launch` is not used: it
waits for return values that never come when a forked rank ends by os._exit.

`SimpleElasticAgent` says what a subclass may override, and its methods have leading
underscores by design; checked on torch 2.8 and 2.9.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from tpunb.runs.directory import RunDir
from tpunb.runs.protocol import MessageWriter, RankExited, RanksForked, StopRanks
from tpunb.utils import env_vars
from tpunb.worker import fork_safety
from tpunb.worker.rank_marks import Mark, RankMark, RankMarks

Become = Callable[[int, int, int, dict[str, str], RankMark], NoReturn]
"""Called in a new process with rank, local rank, attempt, the rank's environment and its mark."""

INTERVAL = 0.03
"""Seconds between two looks at the ranks."""


class ForkingAgent(SimpleElasticAgent):
    """Forks the ranks of one run and watches them."""

    def __init__(
        self,
        spec: WorkerSpec,
        host: OneHost,
        run: RunDir,
        reports: MessageWriter,
        become: Become,
    ) -> None:
        super().__init__(spec)
        self._host = host
        self._board = os.memfd_create("tpunb-board")
        self._run_dir = run
        self._reports = reports
        self._become = become
        self._living: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._marks = RankMarks(spec.local_world_size)
        self._ranks: dict[int, int] = {}
        self._attempt = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self._attempt = worker_group.spec.max_restarts - self._remaining_restarts
        self._living, self._codes, self._ranks = {}, {}, {}
        self._marks = RankMarks(len(worker_group.workers))
        # A SIGINT that comes before a rank has its handlers waits until it has.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        gate, gatekeeper = os.pipe()
        fork_safety.pause_thread_pools()
        for worker in worker_group.workers:
            pid = fork_safety.fork_paused()
            if pid == 0:
                # Not before all are forked: a rank that connects to the store keeps its thread
                # busy in this process, and the next child may inherit a lock that it holds
                # (measured: 3 of 434 rounds of 4 forks hung).
                os.close(gatekeeper)
                os.read(gate, 1)
                os.close(gate)
                env = self._environment(worker_group, worker.local_rank)
                mark = self._marks.of(worker.local_rank)
                self._become(worker.global_rank, worker.local_rank, self._attempt, env, mark)
            self._living[worker.local_rank] = pid
            self._ranks[worker.local_rank] = worker.global_rank
        os.close(gatekeeper)
        os.close(gate)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        pids = dict(self._living)
        self._reports.send(RanksForked(self._attempt, list(pids.values())))
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
            env_vars.BOARD: self._board,
        }
        return {name: str(value) for name, value in values.items()}

    def _reap(self) -> None:
        for local_rank, pid in list(self._living.items()):
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended:
                del self._living[local_rank]
                code = os.waitstatus_to_exitcode(status)
                self._codes[local_rank] = code
                rank, mark = self._ranks[local_rank], self._marks.of(local_rank)
                mark.save_description(self._run_dir.error(self._attempt, rank))
                peak = used.ru_maxrss * 1024  # Linux counts kilobytes
                finished = mark.read() is Mark.FINISHED
                # Not time.time: a cell may have it stand still (freezegun).
                now = time.clock_gettime(time.CLOCK_REALTIME)
                self._reports.send(RankExited(rank, code, now, peak, finished))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._reap()
        self._host.serve_if_asked()
        if self._any_failed():
            if self._run_dir.stopping.exists():
                self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        if self._living:
            return RunResult(state=WorkerState.HEALTHY)
        done = {self._ranks[local_rank]: None for local_rank in self._codes}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=done)

    def _any_failed(self) -> bool:
        """Whether a rank has failed, even if it is still busy ending (exit handlers, threads)."""
        marks = [self._marks.of(local_rank).read() for local_rank in self._codes]
        unfinished = any(mark is not Mark.FINISHED for mark in marks)
        return unfinished or any(self._codes.values()) or self._marks.any_failed()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._living:
            self._reports.send(StopRanks())
        while self._living:
            time.sleep(INTERVAL)
            self._reap()
            self._host.serve_if_asked()

    def _construct_event(
        self, state: str, source: EventSource, *args: object, **kwargs: object
    ) -> Event:
        """For torch elastic's log, which nobody reads; its own looks up this host's name."""
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata={})

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Nothing is left to do: ranks end by themselves or are ended by the supervisor."""


class OneHost(RendezvousHandler):
    """The rendezvous of one host, which meets nobody, and the store that it serves for ranks.

    torch elastic's own listen on all interfaces, and look up the name of the address that they
    connect to, which takes 10 s where no DNS server answers (torch 2.8, 2.9). Here a socket
    listens on the loopback interface alone, and torch's TCPStore begins to serve it when a rank
    connects, with torch.distributed on a TPU: rehearsal ranks do not.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = HashStore()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
        self._port: int = self._listener.getsockname()[1]
        self._server: TCPStore | None = None
        self._starts: threading.Thread | None = None

    def serve_if_asked(self) -> None:
        """Start the store once somebody has connected to its port."""
        if self._starts is None and select.select([self._listener], [], [], 0)[0]:
            # In a thread, because TCPStore connects to itself.
            self._starts = threading.Thread(target=self._serve, daemon=True)
            self._starts.start()

    def _serve(self) -> None:
        self._server = TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """This host is the first of one."""
        if self._starts is not None:  # ranks are forked next
            self._starts.join()
        address = RendezvousStoreInfo("127.0.0.1", self._port)
        return RendezvousInfo(self._store, 0, 1, address)

    def get_backend(self) -> str:
        return "one-host"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def launch_ranks(
    world_size: int, retries: int, run: RunDir, reports: MessageWriter, become: Become
) -> bool:
    """Fork `world_size` ranks on this machine and wait for all of them; True if none failed.

    After a failure the ranks are ended and forked anew, `retries` times at most.
    """
    host = OneHost(run.id)
    spec = WorkerSpec(
        role="default",
        local_world_size=world_size,
        rdzv_handler=host,
        fn=become,  # forked, not called by torch elastic; it takes the name from here
        max_restarts=retries,
        monitor_interval=INTERVAL,
    )
    result = ForkingAgent(spec, host, run, reports, become).run()
    return not result.is_failed()
