"""The worker process that runs a sweep's trials one after the other (tpunb.sweeps.worker).

    worker    imports papermill, ipykernel and tpunb once; has one thread, and runs nothing else
      ├─ supervisor   lent to one kernel after the other, with its fork server and kept preludes
      ├─ papermill    a fork for each trial: runs the notebook and reports the end
      └─ kernel       a second fork: `python -m ipykernel_launcher` from after its imports on

An order is a JSON line on standard input, the reply one on standard output: {"failed", "error"}.
A trial's memory is released when its processes end.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from tpunb.kernel import papermill
from tpunb.kernel.backend_choice import choose_for
from tpunb.kernel.launcher import fingerprint_of
from tpunb.kernel.supervisor import LentSupervisor
from tpunb.machine import environment, machine
from tpunb.notebook.files import load_cells
from tpunb.notebook.trial_cells import note_kept
from tpunb.runs import state, tensorboard
from tpunb.runs.directory import RunDir
from tpunb.runs.ownership import HeldFolder
from tpunb.runs.spec import Stop
from tpunb.utils import env_vars, processes
from tpunb.utils.errors import TpunbError

_LAUNCHER = ["-m", "ipykernel_launcher"]
_MOST = 1 << 20
"""Maximum bytes of a request for a kernel: its command and environment."""
_LONGEST = 10_000
"""Maximum characters of an error, which must fit into one message of a socket."""
_PATIENCE = 30.0
"""Seconds that a kernel has to end after its papermill process has ended."""


def main() -> None:
    """Carry out orders until standard input closes."""
    processes.die_with_parent(int(sys.argv.pop(1)))
    worker = os.getpid()
    replies = os.dup(1)
    os.dup2(2, 1)  # keeps papermill's output apart from the replies
    del sys.path[0]  # the folder of this tpunb, which a kernel would not have
    first = sys.stdin.readline()
    if not first:
        return
    lent = _lend(json.loads(first))  # imports torch in the background
    _import_all()
    try:
        for line in chain([first], sys.stdin):
            order = json.loads(line)
            if not lent.alive:  # it ends after an hour without a run
                lent.close()
                lent = _lend(order)
            reply = _run(order, lent)
            _end_runs(Path(order["ran"]))
            os.write(replies, (json.dumps(reply) + "\n").encode())
    finally:
        if os.getpid() == worker:
            lent.close()


def _lend(order: Mapping[str, Any]) -> LentSupervisor:
    """Start a supervisor for the kernels of trials, which have this process's environment."""
    cells = load_cells(order["notebook"])
    code = [(cell.number, cell.source) for cell in cells if cell.kind == "code"]
    here = machine.detect_machine(os.environ).with_backend(choose_for(None, code).backend)
    env = environment.run_environment(os.environ, here.device, None, here, here.backend)
    return LentSupervisor(environment.fork_server_environment(env), fingerprint_of(env))


def _end_runs(ran: Path) -> None:
    """Stop the runs that a notebook has left: background runs, and all runs if its kernel died."""
    for run in map(RunDir, ran.read_text(encoding="utf-8").splitlines()):
        if state.run_state(run).active and not run.place.exists():
            state.request_stop(run, Stop(reason="its kernel has ended"))
            state.wait_for_end(run)


def _import_all() -> None:
    """Import modules for papermill and the kernels; none starts a thread or opens a socket."""
    papermill.warm_up()
    for name in ("ipykernel.kernelapp", "ipykernel.ipkernel", "tpunb.kernel.magics"):
        importlib.import_module(name)
    importlib.import_module("tpunb.kernel.session").preload()
    tensorboard.import_writer()


def _run(order: Mapping[str, Any], lent: LentSupervisor) -> dict[str, Any]:
    """Run a notebook and return the reply."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_papermill(order, theirs, worker, lent)
    theirs.close()
    kernels: list[int] = []
    said: dict[str, Any] = {"failed": True, "error": "papermill's process was killed"}
    with ours:
        while data := ours.recv(_MOST):
            request = json.loads(data)
            if "failed" in request:
                said = request
                continue
            kernel = os.fork()
            if kernel == 0:
                ours.detach()
                _become_kernel(request, worker)
            kernels.append(kernel)
            ours.send(json.dumps(kernel).encode())
    os.waitpid(pid, 0)
    for kernel in kernels:
        _end(kernel)
    return said


def _end(kernel: int) -> None:
    """Wait until a kernel whose papermill process has ended ends too; kill it after a while."""
    until = time.monotonic() + _PATIENCE
    while os.waitpid(kernel, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.kill(kernel, signal.SIGKILL)
        time.sleep(0.01)


# The notebook's client


def _become_papermill(
    order: Mapping[str, Any], worker: socket.socket, pid: int, lent: LentSupervisor
) -> NoReturn:
    try:
        processes.die_with_parent(pid)
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        variables = {
            env_vars.NOTEBOOK: order["notebook"],
            env_vars.RAN: order["ran"],
            env_vars.CORES: order["cores"],
            env_vars.ON: order["on"],
            env_vars.TRIALS: str(order["trials"]),
            env_vars.LENT: str(lent.folder),
        }
        notebook, output = Path(order["notebook"]), Path(order["output"])
        try:
            # papermill opens both by their names, the output after each cell.
            sweep, executed = HeldFolder(notebook.parent), HeldFolder(output.parent)
            output = executed.path_of(output.name)
            with papermill.environment(variables):
                failure = papermill.execute(
                    sweep.path_of(notebook.name),
                    output,
                    order["parameters"],
                    kernel_manager_class=_kernel_manager(worker, pid),
                )
            with suppress(OSError):
                note_kept(output)
            error = "" if failure is None else failure.headline
        except TpunbError as refused:
            error = str(refused).partition("\n")[0]
        except Exception as problem:  # such as a full disk; not reported in any other way
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        reply = {"failed": bool(error), "error": error[:_LONGEST]}
        worker.send(json.dumps(reply).encode())
        sys.stderr.flush()
    finally:
        os._exit(0)


def _kernel_manager(worker: socket.socket, pid: int) -> type[Any]:
    """Return a class of jupyter_client kernel managers that fork the worker if they can."""
    from jupyter_client.manager import AsyncKernelManager

    class ForkedKernels(AsyncKernelManager):
        """A kernel manager that forks the worker; kernels of other interpreters start as usual."""

        async def _async_launch_kernel(self, kernel_cmd: list[str], **kw: Any) -> None:
            if not _is_ours(kernel_cmd):
                await super()._async_launch_kernel(kernel_cmd, **kw)
                return
            env = {**os.environ, **(kw.get("env") or {}), "JPY_PARENT_PID": str(pid)}
            request = {
                "argv": kernel_cmd[3:],
                "env": env,
                "cwd": str(kw.get("cwd") or os.getcwd()),
            }
            worker.send(json.dumps(request).encode())
            kernel = json.loads(worker.recv(_MOST))
            provisioner: Any = self.provisioner
            provisioner.process = _Forked(kernel)
            provisioner.pid = provisioner.pgid = kernel
            self._reconcile_connection_info(provisioner.connection_info)

    return ForkedKernels


def _is_ours(command: Sequence[str]) -> bool:
    """True for the command of an IPython kernel of this environment."""
    return command[:1] == [sys.executable] and list(command[1:3]) == _LAUNCHER


class _Forked:
    """A forked kernel with the methods of subprocess.Popen that jupyter_client uses."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = processes.find_process(pid)

    def poll(self) -> int | None:
        """Return None while the kernel lives, then 0: only its parent knows its exit status."""
        if self._process is None or processes.process_state(self._process) in ("", "Z"):
            return 0
        return None

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        return 0

    def send_signal(self, number: int) -> None:
        """Send a signal if the kernel lives."""
        if self._process is not None:
            processes.send_signal(self._process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


# The kernel


def _become_kernel(request: Mapping[str, Any], worker: int) -> NoReturn:
    """Become a process like `python -m ipykernel_launcher` after its imports; never return."""
    os.setsid()
    processes.die_with_parent(worker)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in os.listdir("/proc/self/fd"):  # the limit of descriptors may be 1,000,000,000
        if int(name) > 2:
            with suppress(OSError):  # the descriptor of listdir itself is closed already
                os.close(int(name))
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # Python reseeds its own generator after every fork
    # Runs after the kernel's exit handlers, and skips Python's clean-up, which takes seconds.
    atexit.register(os._exit, 0)
    sys.argv = ["ipykernel_launcher", *request["argv"]]
    from ipykernel.kernelapp import IPKernelApp

    handle = f"--IPKernelApp.parent_handle={worker}"  # the default was set at the import
    IPKernelApp.launch_instance([*request["argv"], handle])
    sys.exit()
