"""The causes of a run's failure, from its folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tpunb.diagnosis.engine import diagnose
from tpunb.diagnosis.finding import Diagnosis, Facts
from tpunb.models import RunResult
from tpunb.platforms import holders, machine
from tpunb.rundir import RunDir

_JUST_NOW = 60.0
"""Seconds after a run's end in which those who hold its device may have had it meanwhile."""
MOST = 20_000_000
"""Bytes of a log that are read, from its end: a failure is told last."""


def of_run(result: RunResult) -> list[Diagnosis]:
    """What is known about why a run failed, the likeliest first; empty if nothing is."""
    log = RunDir(result.dir).log
    said = [failure.message for failure in result.failures] + [
        failure.traceback for failure in result.failures if failure.rank is None
    ]
    return diagnose(end_of(log) + "\n" + "\n".join(said), result.returncode, facts=facts(result))


def of_log(path: Path, returncode: int | None) -> list[Diagnosis]:
    """What is known about a log; one in a run folder is read with how the run ended."""
    run = RunDir(path.parent)
    result = run.read_result() if path.name == run.log.name else None
    if result is not None and returncode is None:
        return of_run(result)
    return diagnose(end_of(path), returncode)


def facts(result: RunResult) -> Facts:
    """What the run itself has observed."""
    run = RunDir(result.dir)
    at_work = run.metrics.exists() or run.checkpoints.exists()
    return Facts(
        state=result.state,
        exits={
            failure.rank: failure.exitcode
            for failure in result.failures
            if failure.rank is not None and failure.exitcode is not None
        },
        stage="step" if at_work else None,
        device=result.device,
        oom_killed=any("because memory ran out (" in f.message for f in result.failures) or None,
        memory_peak=sum(result.peak_memory) or None,
        memory_limit=result.memory_limit or None,
        device_holder=_holder(result),
    )


def _holder(result: RunResult) -> str | None:
    """Who else has the TPU on which a run has just failed."""
    if result.device != "TPU" or time.time() - result.ended > _JUST_NOW:
        return None
    held = holders.look(machine.root_of(os.environ)).holders
    return ", ".join(holder.describe() for holder in held) or None


def end_of(path: Path) -> str:
    """The end of a file as text; '' if there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MOST))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
