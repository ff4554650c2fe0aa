"""Duration of `tpunb doctor` on a simulated machine of each platform."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.commands import PYTHON, TPUNB
from benchmarks.table import Samples, met, table
from tests.fakes.dumps import DUMPS, build
from tests.fakes.metadata import FakeMetadataServer

GOAL = 0.5
"""Seconds, on each platform."""
STALLED = "v5e-8, its metadata server stalls"


def measure(folder: Path, rounds: int, names: tuple[str, ...] = (*DUMPS, STALLED)) -> str:
    """Measure all machines alternately, `rounds` times, and a Python that does nothing."""
    seconds: dict[str, Samples] = {name: Samples() for name in names}
    worked: dict[str, Samples] = {name: Samples() for name in names}
    nothing = Samples()
    commands = {name: folder / str(number) for number, name in enumerate(names)}
    with contextlib.ExitStack() as stack:
        environments = {}
        for name, place in commands.items():
            dump = DUMPS["v5e-8" if name == STALLED else name]
            machine = stack.enter_context(build(dump, place))
            env = {"PATH": os.environ["PATH"]} | machine.env
            behaviour = "stalls" if name == STALLED else dump.behaviour
            if behaviour is not None:
                server = stack.enter_context(FakeMetadataServer(dump.metadata, behaviour))
                env["GCE_METADATA_HOST"] = server.host
            environments[name] = env
        for _ in range(rounds):
            nothing.add([_run([PYTHON, "-c", "pass"], os.environ.copy())[0]])
            for name, env in environments.items():
                took, work = _run([TPUNB, "doctor", "--json"], env)
                seconds[name].add([took])
                worked[name].add([work])
    return _report(seconds, worked, nothing)


def _run(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Elapsed seconds, and processor seconds, which do not include other work on the machine."""
    before = _work()
    began = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    took = time.monotonic() - began
    # 1 means that there is a problem, such as packages for a TPU missing from this machine.
    if done.returncode not in (0, 1) or done.stderr:
        sys.exit(f"{command} ended with {done.returncode}: {done.stderr}")
    return took, _work() - before


def _work() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _report(seconds: dict[str, Samples], worked: dict[str, Samples], nothing: Samples) -> str:
    rows = [("tpunb doctor", "seconds", "of a processor", "x python -c pass")]
    for name, samples in seconds.items():
        work = worked[name].text(2)
        rows.append((name, samples.text(2), work, samples.over(nothing).text(1)))
    rows.append(("python -c pass", nothing.text(2), "", ""))
    slowest = max(seconds.values(), key=Samples.median)
    goals = [
        ("goal", "measured", ""),
        (f"≤ {GOAL} s on each", f"{slowest.median():.2f} s", met(slowest, most=GOAL)),
    ]
    return f"Doctor: the whole command.\n\n{table(rows)}\n\n{table(goals)}"
