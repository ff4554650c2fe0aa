"""The variables that describe the ranks of a run and their TPU to torch_tpu.

torch_tpu's `torch.tpu.distributed.set_tpu_launch_env` makes them (0.2.0; experimental). It never
changes a variable that is set, and its C++ reads each one only once, so it is called in a fork of
this process for each run: 0.1 s if torch_tpu is loaded, as in a fork server on a TPU; importing it
takes 5 to 10 s more. It opens no device and starts no thread.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from tpunb.backends.torchtpu.loading import AUTOLOAD
from tpunb.utils import processes
from tpunb.utils.errors import SetupError

PATIENCE = 120.0
"""Seconds for the fork."""
_OF_ELASTIC = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Set for several hosts; torch elastic, which starts the ranks, has its own."""
_OF_SEVERAL_HOSTS = ("JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES")
"""With either, it describes all hosts of a slice or cluster, even if the run has only this one."""


def launch_environment(
    env: Mapping[str, str], ranks: int, node_rank: int = 0, hosts: Sequence[str] = ()
) -> dict[str, str]:
    """Return the variables that a run's environment lacks. Call it once for each run, on each host.

    Args:
        env: The environment of the run; what it has of these variables stays as it is.
        ranks: The number of ranks on this host.
        node_rank: The number of this host in the run.
        hosts: The addresses of the run's hosts, in order of node rank; () for this host only.

    Raises:
        SetupError: torch_tpu finds no TPU, cannot divide it so, or fails.
    """
    options: dict[str, int] = {"nproc_per_node": ranks}
    left = {name: value for name, value in env.items() if name not in _OF_SEVERAL_HOSTS}
    # It neither opens the TPU nor asks which host this is.
    left |= {AUTOLOAD: "0"}
    if hosts:
        options["nnodes"] = len(hosts)
        left |= {"TPU_WORKER_HOSTNAMES": ",".join(hosts), "NODE_RANK": str(node_rank)}
    answer = _ask(left, options)
    if "refused" in answer:
        raise SetupError(
            f"torch_tpu cannot start {ranks} rank{'s' if ranks != 1 else ''} on this host: "
            f"{answer['refused']}. "
            "`tpunb doctor` shows the TPU, and the numbers of ranks that it can have"
        )
    return {name: value for name, value in answer["set"].items() if name not in _OF_ELASTIC}


def _ask(env: Mapping[str, str], options: Mapping[str, int]) -> Any:
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as output:
        with processes.own_children():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns if there are other threads
                pid = os.fork()
            if pid == 0:
                _call(env, options, answer, output.fileno())
            code = os.waitstatus_to_exitcode(processes.wait_for_child(pid, PATIENCE))
        output.seek(0)
        if code == -signal.SIGKILL:
            raise SetupError(
                f"torch_tpu's set_tpu_launch_env did not return within {PATIENCE:.0f} s, or was "
                "killed. `tpunb doctor --import` finds out whether torch_tpu can be imported"
            )
        if code:
            raise SetupError(_why(code, output.read().decode("utf-8", "replace")))
        answer.seek(0)
        return json.load(answer)


def _call(
    env: Mapping[str, str], options: Mapping[str, int], answer: IO[bytes], output: int
) -> NoReturn:
    """In the fork: call it, and write what it has set or refused."""
    code = 1
    try:
        faulthandler.disable()  # a crash here is none of the process that was forked
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(env)
        for name in ("torch", "torch_tpu"):
            importlib.import_module(name)
        distributed: Any = importlib.import_module("torch.tpu.distributed")
        before = dict(os.environ)
        found: dict[str, Any] = {}
        try:
            distributed.set_tpu_launch_env(**options)
        except (ValueError, RuntimeError) as error:
            found["refused"] = str(error)
        found["set"] = {
            name: value for name, value in os.environ.items() if before.get(name) != value
        }
        answer.write(json.dumps(found).encode())
        answer.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _why(code: int, output: str) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F0")] or lines[-1:] or ["no message"]
    return (
        f"the process that calls torch_tpu's set_tpu_launch_env {how}: {fatal[0]}. "
        "`tpunb doctor --import` shows whether torch, torch_tpu and libtpu fit together"
    )
