"""The variables that describe the ranks of a run and their TPU to torch_tpu.

torch_tpu's `torch.tpu.distributed.set_tpu_launch_env` makes them (0.2.0; experimental). It never
changes a variable that is set, and its C++ reads each one only once, so it is called in a new
process for each run. This takes as long as importing torch and torch_tpu: 5 to 10 s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tpunb.utils.errors import SetupError

PATIENCE = 120.0
"""Seconds for the process."""
_CODE = """\
import json, os, sys
import torch, torch_tpu
from torch.tpu import distributed
before = dict(os.environ)
answer = {}
try:
    distributed.set_tpu_launch_env(**json.loads(sys.argv[2]))
except (ValueError, RuntimeError) as error:
    answer["refused"] = str(error)
answer["set"] = {name: value for name, value in os.environ.items() if before.get(name) != value}
with open(int(sys.argv[1]), "w") as pipe:
    json.dump(answer, pipe)
"""
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
    left |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
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
    ours, theirs = os.pipe()
    command = [sys.executable, "-c", _CODE, str(theirs), json.dumps(options)]
    with open(ours, encoding="utf-8") as pipe:
        try:
            done = subprocess.run(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs],
                timeout=PATIENCE,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise SetupError(
                f"torch_tpu's set_tpu_launch_env has not returned after {PATIENCE:.0f} s. "
                "`tpunb doctor --import` finds out whether torch_tpu can be imported"
            ) from None
        finally:
            os.close(theirs)
        if done.returncode:
            raise SetupError(_why(done))
        return json.load(pipe)


def _why(done: subprocess.CompletedProcess[str]) -> str:
    code = done.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F0")] or lines[-1:] or ["no message"]
    return (
        f"the process that calls torch_tpu's set_tpu_launch_env {how}: {fatal[0]}. "
        "`tpunb doctor --import` shows whether torch, torch_tpu and libtpu fit together"
    )
