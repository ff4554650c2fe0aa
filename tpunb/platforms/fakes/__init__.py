"""Machines that are made up, for tests: their files, processes, metadata server and packages.

    with FakeMachine(folder).chips("v5e", 8) as machine:
        machine.hold("vfio/3")                           # a process that has a chip
        report.look(machine.env, root=machine.root, …)

Everything is real but the hardware: files in a folder, processes, sockets. A whole process sees
such a machine where TPUNB_ROOT names its folder (`machine.env` has it).
"""

from tpunb.platforms.fakes.dumps import DUMPS, Dump, build
from tpunb.platforms.fakes.machine import FakeMachine
from tpunb.platforms.fakes.metadata import Server

__all__ = ["DUMPS", "Dump", "FakeMachine", "Server", "build"]
