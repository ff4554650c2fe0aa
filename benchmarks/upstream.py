"""Run pytorch/xla's own multi-process tests in a rehearsal; prints a Markdown table of results.

`python -m benchmarks.upstream CLONE [--ranks 2,4] [--logs FOLDER] [SCRIPT …]`: CLONE is a
clone of pytorch/xla at the tag of the installed torch_xla. The default scripts are those of
`upstream.txt`. Each is started by torchrun, like a converted notebook. Hardware queries of the
tests are answered as on a TPU with one chip for each rank.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_name("upstream.txt")
PATIENCE = 600
"""Seconds allowed for a script."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upstream", description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--ranks", default="2,4", type=lambda text: text.split(","))
    parser.add_argument("--logs", type=Path, help="folder for the output of the scripts")
    parser.add_argument(
        "script", nargs="*", help="'test_mp_all_gather.py', after its settings, with its arguments"
    )
    options = parser.parse_intermixed_args()
    lines = LIST.read_text().splitlines()
    scripts = options.script or [line for line in lines if line and line[0] != "#"]
    print("| script | " + " | ".join(f"{count} ranks" for count in options.ranks) + " |")
    print("|---" * (1 + len(options.ranks)) + "|")
    with tempfile.TemporaryDirectory(prefix="tpunb-upstream-") as kept:
        logs = (options.logs or Path(kept)).resolve()
        logs.mkdir(exist_ok=True)
        for script in scripts:
            results = [
                _run(options.clone.resolve() / "test", script, n, logs) for n in options.ranks
            ]
            print(f"| {script} | " + " | ".join(results) + " |", flush=True)


def _run(tests: Path, script: str, ranks: str, logs: Path) -> str:
    """Run one script; returns 'pass, 12 s', 'fail (1), 12 s' or 'stopped after 600 s'."""
    own = "from benchmarks.upstream import rank; rank()"
    words = script.split()
    settings = [word.split("=", 1) for word in words if re.match("[A-Z_]+=", word)]
    name, *arguments = words[len(settings) :]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "--no-python", sys.executable, "-c", own, str(tests / name), *arguments]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tests}", "PJRT_DEVICE": "CPU"}
    env.update(dict(settings))
    start = time.monotonic()
    with (logs / f"{name.replace('/', '.')}.{ranks}.log").open("w") as log:
        process = subprocess.Popen(
            command, env=env, cwd=logs, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # torchrun ends its ranks
            process.wait()
            return f"stopped after {PATIENCE} s"
    took = f"{time.monotonic() - start:.0f} s"
    return f"pass, {took}" if code == 0 else f"fail ({code}), {took}"


def rank() -> None:
    """Make this process, started by torchrun, a rehearsal rank, and run the script in it."""
    from tpunb.worker.standalone import prepare

    prepare()
    _answer_as_a_tpu(int(os.environ["WORLD_SIZE"]))
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _answer_as_a_tpu(chips: int) -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from torch_xla._internal import tpu

    answers: dict[str, Callable[..., Any]] = {
        "num_available_devices": lambda: chips,
        "num_available_chips": lambda: chips,
        "num_expected_global_devices": lambda: chips,
        "num_local_processes": lambda: chips,
        "num_tpu_workers": lambda: 1,
        "num_logical_cores_per_chip": lambda: 1,
        "version": lambda: 4,
        "worker_id": lambda: 0,
        "task_id": lambda: 0,
        "get_worker_ips": lambda: ["localhost"],
        "discover_master_worker_ip": lambda use_localhost=True: "localhost",
        "configure_topology": lambda *args: None,
    }
    vars(tpu).update(answers)
    xm.xla_device_hw = lambda device: "TPU"
    xr.device_type = lambda: "TPU"


if __name__ == "__main__":
    main()
