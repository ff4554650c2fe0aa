"""The fork server: has torch and torch_xla imported and waits; runners are forked from it.

It never runs the user's code itself, so it stays clean for the next run: no XLA runtime, no
autograd engine, and of threads only OpenBLAS's, which end at a fork. Each run gets a runner: a
fork of it, or a copy that an earlier runner has left (tpunb.worker.prelude), which waits for
orders as this process does.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import tempfile
from socket import socket

from tpunb.runs.protocol import (
    ForkRunner,
    ImportLibraries,
    LibrariesImported,
    MessageWriter,
    OrderChannel,
    RunnerForked,
)
from tpunb.utils import processes

MODULES = (
    "torch",
    "torch_xla",
    "torch_xla.core.xla_model",
    "torch_xla.distributed.parallel_loader",
    "torch_xla.distributed.xla_multiprocessing",
    "torch_xla.runtime",
    "tpunb.xla.rehearsal.install",
    "tpunb.worker.runner",
)
"""Imported before a run asks for them. None of them starts a thread or touches a device."""


def main() -> None:
    """Wait for orders. Arguments: the supervisor's pid, and the file descriptor to report to.

    Standard input is the socket on which orders come.
    """
    supervisor, writer = (int(argument) for argument in sys.argv[-2:])
    processes.die_with_parent(supervisor)
    # The supervisor ignores SIGINT, which a child inherits; a script run alone does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reports = MessageWriter(writer)
    orders = OrderChannel(socket(fileno=os.dup(0)))
    os.set_inheritable(orders.fileno(), False)
    received = orders.receive()
    if received is None or not isinstance(received[0], ImportLibraries):
        return
    sys.path[1:] = received[0].sys_path  # the first is where tpunb itself is
    tempfile.tempdir = received[0].tmp
    before = dict(os.environ)
    _import_libraries()
    variables = {
        name: [before[name], value] if name in before else [value]
        for name, value in os.environ.items()
        if before.get(name) != value
    }
    tempfile.tempdir = None  # what runs write is theirs
    reports.send(LibrariesImported(variables))
    serve(orders, reports, supervisor)


def _import_libraries() -> None:
    # Nothing of an import is garbage: the collector would look in vain, for a sixth of its time.
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    # Objects made so far live as long as the process: keep the collector, which writes to
    # every object it looks at, from copying their pages in each fork.
    gc.collect()
    gc.freeze()
    gc.enable()


def serve(orders: OrderChannel, reports: MessageWriter, supervisor: int) -> None:
    """Fork a runner for each order, until the supervisor has gone."""
    from tpunb.worker import fork_safety, runner  # loaded by now
    from tpunb.worker.prelude import Keeper

    def tell(pid: int) -> None:
        reports.send(RunnerForked(pid))

    while (received := orders.receive()) is not None:
        order, sockets = received
        if isinstance(order, ForkRunner):
            # A SIGINT that comes before the runner can leave word of it waits until it can.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            if processes.fork_orphan(fork_safety.fork, tell) == 0:
                orders.close()
                processes.die_with_adopter(supervisor)
                keeper = Keeper(reports, sockets, order.first_copy, supervisor, runner.main)
                runner.main(order, keeper, reports, None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for each in sockets:
            each.close()
