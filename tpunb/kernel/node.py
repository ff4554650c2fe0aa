"""`tpunb node`: this host's part of a run, for a supervisor at the other end of an ssh pipe.

    supervisor ── stdin: StartNode, then orders ──> this process, which becomes a supervisor
               <── stdout: messages and files ──    (tpunb.worker.supervisor.arm)

Here only the environment of the ranks is made up, which needs to know this machine.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tpunb.kernel.supervisor import SUPERVISOR
from tpunb.machine import environment
from tpunb.machine.machine import Machine, detect_machine
from tpunb.machine.metadata import PATIENCE
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.protocol import Preload, StartNode, decode_message, encode_message
from tpunb.runs.spec import RunSpec
from tpunb.utils import cpus, interrupts
from tpunb.utils.errors import TpunbError
from tpunb.utils.modules import import_path
from tpunb.utils.version import installed_versions


def run_node() -> NoReturn:
    """Read the first order, and become the supervisor of this host's part.

    Raises TpunbError if it cannot be carried out.
    """
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # reads not a byte more
        order = decode_message(stdin.readline())
    if not isinstance(order, StartNode):
        raise TpunbError("the first line of standard input does not start a run")
    run = RunDir(order.dir)
    machine = detect_machine(os.environ, patience=PATIENCE)
    spec = _localized(run)
    env = _environment(spec, machine, order.env)
    server = environment.fork_server_environment(env)
    preload = Preload(server, import_path(), sorted(cpus.allowed_cpus()))
    device = "tpu" if spec.device == "TPU" else None
    start = replace(order, env=env, device=device, facts=facts(run, spec, machine))
    given = os.memfd_create("tpunb-orders", 0)  # not in a file: variables may be secrets
    with open(given, "wb", closefd=False) as file:
        file.write(encode_message(start) + encode_message(preload))
    os.lseek(given, 0, os.SEEK_SET)
    os.chdir("/")  # modules in another folder must not replace those of the standard library
    interrupts.become_in_own_session(SUPERVISOR, str(given))


def _localized(run: RunDir) -> RunSpec:
    """Write and return the spec with this machine's paths."""
    spec = state.read_spec(run)
    cwd = Path(spec.cwd).expanduser().absolute()
    cwd.mkdir(parents=True, exist_ok=True)
    own = [entry for entry in sys.path if entry]
    given = [str(cwd / Path(entry).expanduser()) for entry in spec.sys_path]
    sys_path = dict.fromkeys([*given, *own])
    spec = replace(spec, cwd=str(cwd), sys_path=("", *sys_path))
    run.write_spec(spec)
    return spec


def _environment(spec: RunSpec, machine: Machine, variables: dict[str, str]) -> dict[str, str]:
    if spec.spmd is not None:
        cores = spec.spmd // len(spec.hosts)
        made = environment.spmd_environment(os.environ, variables, machine, cores, "the run's spec")
        assert made is not None
        return dict(made.env)
    return environment.run_environment(os.environ, spec.device, variables, machine, spec.backend)


def facts(run: RunDir, spec: RunSpec, machine: Machine) -> dict[str, str]:
    """Return facts that must be the same on all hosts of a run, with names for error messages."""
    return {
        **installed_versions(),
        "chips": str(machine.chips),
        "device": spec.device,
        "ranks on each host": str(spec.local_world_size),
        "the script": hashlib.sha256(run.script.read_bytes()).hexdigest()[:12],
    }
