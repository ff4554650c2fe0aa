"""A torch elastic agent that forks its ranks; torchrun is such an agent, too.

Ranks, their environment and restarts come from torch elastic; this subclass starts a rank by
forking and leaves stopping to the supervisor. `elastic_launch` is not used: it waits for return
values that never come when a forked rank ends by os._exit.

`SimpleElasticAgent` documents what a subclass may override, and these methods have leading
underscores by design; checked on torch 2.8 and 2.9.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
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

from tpunb.backends import current
from tpunb.runs.directory import RunDir
from tpunb.runs.protocol import (
    AbandonAttempt,
    AllFinished,
    AttemptFinished,
    AttemptReady,
    MessageWriter,
    OrderChannel,
    RankExited,
    RanksForked,
    StartAttempt,
    StopRanks,
    store_ports,
)
from tpunb.runs.spec import RunSpec
from tpunb.utils import descriptors, env_vars
from tpunb.utils.errors import SetupError
from tpunb.utils.name_service import restore_sources, use_hosts_file_only
from tpunb.worker import fork_safety
from tpunb.worker.rank_marks import RankEnd, RankMark, RankMarks

Become = Callable[[int, int, int, dict[str, str], RankMark], NoReturn]
"""Called in a new process with rank, local rank, attempt, the rank's environment and its mark."""

INTERVAL = 0.03
"""Seconds between two checks of the ranks."""


class ForkingAgent(SimpleElasticAgent):
    """Forks the ranks of one run and watches them."""

    def __init__(
        self, spec: WorkerSpec, host: Host, run: RunDir, reports: MessageWriter, become: Become
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
        self._launch: Mapping[str, str] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self._attempt = worker_group.spec.max_restarts - self._remaining_restarts
        self._living, self._codes, self._ranks = {}, {}, {}
        self._marks = RankMarks(len(worker_group.workers))
        group: Any = worker_group  # whose types leave out that it has numbers by now
        self._launch = current.backend().launch_environment(
            len(group.workers), group.group_rank, group.group_world_size
        )
        # A SIGINT that arrives before a rank has its handlers waits until then.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        gate, gatekeeper = os.pipe()
        fork_safety.pause_thread_pools()
        for worker in worker_group.workers:
            pid = fork_safety.fork_paused()
            if pid == 0:
                # Wait until all are forked: a rank that connects to the store keeps the store's
                # thread busy in the agent, and the next child may inherit a lock that this thread
                # holds (measured: 3 of 434 rounds of 4 forks hung).
                os.close(gatekeeper)
                os.read(gate, 1)
                os.close(gate)
                restore_sources()
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
        """The variables that torchrun sets for a worker (LocalElasticAgent._start_workers)."""
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
            "OMP_NUM_THREADS": fork_safety.thread_count(os.environ.get("OMP_NUM_THREADS"))
            or max(1, len(os.sched_getaffinity(0)) // spec.local_world_size),
            env_vars.BOARD: self._board,
            **self._host.environment(),
            **self._launch,
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
                finished = mark.read() is RankEnd.FINISHED
                # Not time.time: a cell may have it stand still (freezegun).
                now = time.clock_gettime(time.CLOCK_REALTIME)
                self._reports.send(RankExited(rank, code, now, peak, finished))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._reap()
        self._host.serve_on_first_connection()
        if self._any_failed() or self._host.is_abandoned(self._attempt):
            if self._run_dir.stopping.exists():
                self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        if self._living or not self._host.all_finished(self._attempt):
            return RunResult(state=WorkerState.HEALTHY)
        done = {self._ranks[local_rank]: None for local_rank in self._codes}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=done)

    def _any_failed(self) -> bool:
        """True if a rank has failed, even if it is still ending (exit handlers, threads)."""
        marks = [self._marks.of(local_rank).read() for local_rank in self._codes]
        unfinished = any(mark is not RankEnd.FINISHED for mark in marks)
        return unfinished or any(self._codes.values()) or self._marks.any_failed()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._living:
            self._reports.send(StopRanks())
        while self._living:
            time.sleep(INTERVAL)
            self._reap()
            self._host.serve_on_first_connection()

    def _assign_worker_ranks(
        self, store: object, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks. All hosts have equally many, so no store has to be queried."""
        local, world = spec.local_world_size, group_world_size * spec.local_world_size
        return [
            Worker(rank, group_rank * local + rank, group_rank * local + rank, world, world)
            for rank in range(local)
        ]

    def _exit_barrier(self) -> None:
        """Do nothing: ranks have finished on all hosts, or were abandoned (`all_finished`)."""

    def _construct_event(
        self, state: str, source: EventSource, *args: object, **kwargs: object
    ) -> Event:
        """An event for torch elastic's unused log. The original looks up this host's name."""
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata={})

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, **kwargs: object) -> None:
        """Do nothing: ranks end by themselves or are ended by the supervisor."""


class Host(RendezvousHandler):
    """The rendezvous of one host, and the store that the first host serves for all ranks.

    torch elastic's own store listens on all interfaces. This one listens only on the address that
    is used, and torch's TCPStore begins to serve it when a rank connects, which rehearsal ranks of
    one host do not.
    """

    def __init__(self, run_id: str, address: str) -> None:
        self._run_id = run_id
        self._address = address
        self._store = HashStore()
        self._listener: socket.socket | None = None
        self._port = 0
        self._server: TCPStore | None = None
        self._starts: threading.Thread | None = None

    def _listen(self, ports: Iterable[int]) -> None:
        """Listen on the first free one of these ports; call it right before forking the ranks.

        A kept copy of this process would continue to listen.
        """
        if self._listener is not None:
            return
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        tried = []
        for port in ports:
            try:
                self._listener = socket.create_server(
                    (self._address, port), family=family, backlog=socket.SOMAXCONN
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                tried.append(port)
                continue
            self._port = self._listener.getsockname()[1]
            return
        raise SetupError(
            f"the ranks' store needs a port of {self._address}, but all ports reserved for it are "
            f"in use: {', '.join(map(str, tried))}. Give the place another `port`"
        )

    def serve_on_first_connection(self) -> None:
        """Start the store once a rank has connected to its port."""
        listener = self._listener
        if listener is None or self._starts is not None:
            return
        if descriptors.wait_readable([listener.fileno()], 0.0):
            # In a thread, because TCPStore connects to itself.
            self._starts = threading.Thread(target=self._serve, args=[listener], daemon=True)
            self._starts.start()

    def _serve(self, listener: socket.socket) -> None:
        use_hosts_file_only()
        self._server = TCPStore(
            self._address,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def settle(self) -> None:
        """Wait until the store has started, if it is starting: ranks are forked next."""
        if self._starts is not None:
            self._starts.join()

    def environment(self) -> dict[str, str]:
        """Variables that this host's ranks need in their environment."""
        return {}

    def is_abandoned(self, attempt: int) -> bool:
        """True if the attempt was abandoned because a rank of another host has failed."""
        return False

    def all_finished(self, attempt: int) -> bool:
        """True if the ranks of all other hosts have finished; those of this host have."""
        return True

    def leave(self) -> None:
        """In a rank: close the sockets that belong to its agent."""
        if self._listener is not None:
            self._listener.close()

    def get_backend(self) -> str:
        return "tpunb"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other host can join anyway."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class SingleHost(Host):
    """The only host of a run: there is no other to meet."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id, "127.0.0.1")

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once: this host is number 0 of 1."""
        self.settle()
        self._listen([0])
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(self._address, self._port))


class HostOfSeveral(Host):
    """One host of several, with a static node rank given by the run, as with torchrun.

    Hosts do not meet in a store, unlike torchrun's: there, no agent notices a host that vanishes
    (torch 2.9: after 136 s none had ended), and a host that is done waits 300 s for the others.
    The supervisor decides (tpunb.worker.supervisor.remote_node) and sends its decisions to this
    class.
    """

    def __init__(
        self,
        run: RunDir,
        spec: RunSpec,
        node_rank: int,
        address: str,
        port: int,
        decisions: OrderChannel,
        reports: MessageWriter,
    ) -> None:
        """`port`: the first of the ports at which host 0 may serve the store."""
        super().__init__(run.id, address)
        self._run = run
        self._first_port = port
        self._node_rank = node_rank
        self._nnodes = len(spec.hosts)
        self._decisions = decisions
        self._reports = reports
        self._attempt = -1
        self._abandoned = -1
        self._finished = -1
        self._all_finished = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all hosts are ready for the next attempt."""
        self.settle()
        if self._node_rank == 0:
            self._listen(store_ports(self._first_port))
        self._attempt += 1
        self._reports.send(AttemptReady(self._attempt, self._port))
        while (start := self._hear(INTERVAL)) is None or start.attempt != self._attempt:
            if self._run.stopping.exists():
                raise _StoppedError
        where = RendezvousStoreInfo(start.address, start.port)
        return RendezvousInfo(self._store, self._node_rank, self._nnodes, where)

    def _hear(self, patience: float) -> StartAttempt | None:
        """Handle a decision; return the order to begin, if that was it. Waits `patience` s."""
        fd = self._decisions.fileno()
        if not self._decisions.waiting and not descriptors.wait_readable([fd], patience):
            return None
        received = self._decisions.receive()
        match received and received[0]:
            case StartAttempt() as start:
                return start
            case AbandonAttempt(attempt):
                self._abandoned = attempt
            case AllFinished():
                self._all_finished = True
            case None:  # the supervisor has ended, and this process ends with it
                raise _StoppedError
        return None

    def environment(self) -> dict[str, str]:
        return {env_vars.ADDRESS: self._address}

    def is_abandoned(self, attempt: int) -> bool:
        self._hear(0)
        return self._abandoned == attempt

    def all_finished(self, attempt: int) -> bool:
        if self._finished != attempt:
            self._finished = attempt
            self._reports.send(AttemptFinished(attempt))
        self._hear(0)
        return self._all_finished

    def leave(self) -> None:
        super().leave()
        self._decisions.close()


class _StoppedError(Exception):
    """The run was stopped while hosts waited for each other."""


def launch_ranks(
    local_world_size: int,
    retries: int,
    host: Host,
    run: RunDir,
    reports: MessageWriter,
    become: Become,
) -> bool:
    """Fork this host's ranks and wait until those of all hosts have ended; True if none failed.

    After a failure the ranks are ended and forked again, `retries` times at most.
    """
    spec = WorkerSpec(
        role="default",
        local_world_size=local_world_size,
        rdzv_handler=host,
        fn=become,  # not called by torch elastic, which only reads its name
        max_restarts=retries,
        monitor_interval=INTERVAL,
    )
    try:
        result = ForkingAgent(spec, host, run, reports, become).run()
    except _StoppedError:
        return False
    return not result.is_failed()
