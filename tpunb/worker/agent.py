"""The agent: has torch and torch_xla imported and waits; every run is forked from it.

It never runs the user's code itself, so it stays clean for the next run: one thread, no XLA
runtime, no autograd engine, and with OpenMP at one thread no thread pool. Each run gets a
runner, a fork of it, that may be spoiled at will.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import tempfile

from tpunb.worker import processes
from tpunb.worker.messages import Reporter

AHEAD = (
    "torch",
    "torch_xla",
    "torch_xla.core.xla_model",
    "torch_xla.distributed.parallel_loader",
    "torch_xla.distributed.xla_multiprocessing",
    "torch_xla.runtime",
    "tpunb.worker.rehearsal.install",
    "tpunb.worker.runner",
)
"""What is imported before a run asks for it. None of them starts a thread or touches a device."""


def main() -> None:
    """The agent's life. Its arguments: the guard's pid, and the file descriptor to report to."""
    guard, writer = (int(argument) for argument in sys.argv[-2:])
    processes.die_with_parent(guard)
    # The guard ignores SIGINT, which a child inherits; a script run alone does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report = Reporter(writer)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "import":
            sys.path[1:] = order["sys_path"]  # the first is where tpunb itself is
            tempfile.tempdir = order["tmp"]
            _import_ahead()
            tempfile.tempdir = None  # what runs write is theirs
            report.tell("ready")
        else:
            _run(order, report)


def _import_ahead() -> None:
    for name in AHEAD:
        importlib.import_module(name)
    # Objects made so far live as long as the process: keep the collector, which writes to
    # every object it looks at, from copying their pages in each fork.
    gc.collect()
    gc.freeze()


def _run(order: dict[str, object], report: Reporter) -> None:
    agent = os.getpid()
    # A SIGINT that comes before the runner can leave word of it waits until it can.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if pid == 0:
        from tpunb.worker import runner

        processes.die_with_parent(agent)
        runner.main(order, report)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    report.tell("runner", pid=pid)
    _, status = os.waitpid(pid, 0)
    report.tell("runner_exit", code=os.waitstatus_to_exitcode(status))
