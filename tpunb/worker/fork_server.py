"""The first process of a supervisor: imports the backend's libraries, then waits for a run.

From then on it is a copy like those that runners leave (tpunb.worker.prelude), but of zero cells:
any run can begin in it.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import sysconfig
import tempfile
from socket import socket

from tpunb.backends import current
from tpunb.runs.protocol import (
    ImportLibraries,
    ImportsFailed,
    LibrariesImported,
    MessageWriter,
    OrderChannel,
)
from tpunb.utils import modules, processes
from tpunb.utils.errors import TpunbError
from tpunb.worker import script_end

_LONGEST = 2000
"""Characters of an error's message: a report has to fit into a pipe."""


def main() -> None:
    """Wait for orders. Arguments: the supervisor's pid, and the descriptors for reports and of the
    supervisor's lifeline.

    Standard input is the socket on which orders arrive.
    """
    supervisor, writer, lifeline = (int(argument) for argument in sys.argv[-3:])
    os.set_inheritable(lifeline, False)
    processes.die_with_parent(supervisor)
    processes.set_title("fork server")
    # The supervisor ignores SIGINT, which a child inherits; a script on its own does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    script_end.stop_on_sigterm()
    reports = MessageWriter(writer)
    orders = OrderChannel(socket(fileno=os.dup(0)))
    os.set_inheritable(orders.fileno(), False)
    received = orders.receive()
    if received is None or not isinstance(received[0], ImportLibraries):
        return
    # The kernel has loaded the standard library before its cells could put a folder in front of it.
    standard = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib") + "/lib-dynload"]
    modules.use_import_path([*standard, *received[0].sys_path])
    tempfile.tempdir = received[0].tmp
    before = dict(os.environ)
    try:
        _import_libraries()
    except Exception as error:
        kind, message = type(error).__name__, str(error)[:_LONGEST]
        reports.send(ImportsFailed(kind, message, isinstance(error, TpunbError)))
        raise
    variables = {
        name: [before[name], value] if name in before else [value]
        for name, value in os.environ.items()
        if before.get(name) != value
    }
    tempfile.tempdir = None  # temporary files of runs do not belong in this folder
    reports.send(LibrariesImported(variables))
    from tpunb.worker import prelude, runner  # loaded by now

    prelude.Copy(None, reports, supervisor, runner.main, lifeline=lifeline).wait(orders)


def _import_libraries() -> None:
    # Imports leave no garbage: the collector would take a sixth of their time for nothing.
    gc.disable()
    backend = current.backend()
    for name in (*backend.modules, "tpunb.worker.runner"):
        importlib.import_module(name)
    backend.warm(current.device())
    if backend.name != "torch":
        importlib.import_module("tpunb.worker.untied").watch()
    # Objects made so far live as long as the process: keep the collector, which writes to
    # every object that it visits, from copying their pages in each fork.
    gc.collect()
    gc.freeze()
    gc.enable()
