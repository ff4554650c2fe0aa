"""The process in which a sweep's trials run, one after the other (tpunb.sweeps.worker).

An order is a JSON line on standard input, the reply one on standard output: {"failed", "error"}.
papermill and this process's environment serve one notebook at a time, so trials that run beside
each other have a process each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tpunb.kernel import papermill
from tpunb.utils import env_vars, processes
from tpunb.utils.errors import TpunbError


def main() -> None:
    """Run what is ordered until standard input closes."""
    processes.die_with_parent(int(sys.argv.pop(1)))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what papermill prints is no reply
    papermill.warm_up()
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=replies, flush=True)


def _run(order: dict[str, Any]) -> dict[str, Any]:
    variables = {
        env_vars.NOTEBOOK: order["notebook"],
        env_vars.RAN: order["ran"],
        env_vars.CORES: order["cores"],
        env_vars.ON: order["on"],
    }
    try:
        with papermill.environment(variables):
            error = papermill.execute(
                Path(order["notebook"]), Path(order["output"]), order["parameters"]
            )
    except TpunbError as refused:
        return {"failed": True, "error": str(refused).partition("\n")[0]}
    return {"failed": error is not None, "error": "" if error is None else error.headline}
