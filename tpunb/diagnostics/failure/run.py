"""Diagnoses a failed run from its folder, or a log file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tpunb.diagnostics.failure.engine import diagnose
from tpunb.diagnostics.failure.facts import Facts
from tpunb.machine import machine, tpu, tpu_users
from tpunb.machine.metadata import Metadata
from tpunb.machine.platform import find_platform
from tpunb.notebook.convert.cells import skip_reason
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import Cell
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.result import Diagnosis, Failure, RunResult
from tpunb.runs.spec import FailureKind, RunState
from tpunb.utils import files, records

_JUST_NOW = 60.0
"""Seconds after a run's end in which a process that holds its device may have held it before."""
MAX_BYTES = 20_000_000
"""Number of bytes that are read, from the end of a log: failures come last."""


def diagnose_run(result: RunResult) -> list[Diagnosis]:
    """Return the known causes of a run's failure, the likeliest first; what the notebook shows
    comes before causes from the log.
    """
    log, facts = read_end(RunDir(result.dir).log), observed_facts(result)
    known = diagnose(log, result.returncode, facts=facts)
    found = unfinished_cause(result)
    return known if found is None else [found, *known]


def diagnose_log(path: Path, returncode: int | None) -> list[Diagnosis] | None:
    """Return the known causes in a log; None if nothing failed.

    For the log of a run, its result is used as well, unless `returncode` is given.
    """
    path = path.resolve()
    run = RunDir(path.parent)
    result = state.read_result(run) if path.name == run.log.name else None
    if returncode is None and result is not None:
        return None if result.state == RunState.SUCCEEDED else diagnose_run(result)
    if returncode == 0:
        return None
    return diagnose(read_end(path), returncode, facts=Facts(platform=_platform()))


def unfinished_cause(result: RunResult) -> Diagnosis | None:
    """Return the cell above the train cell that did not finish in the kernel, if the run failed in
    it, or if its ranks did not find each other after it.
    """
    first = result.failure
    cells, train = _cells(result)
    for cell in cells[:train]:
        if first is None or not cell.failed or skip_reason(cell.source, cell.tags) is not None:
            continue
        if "tpu_train" in cell_magics(cell.source):
            continue  # another train cell, which is no part of this run
        if first.cell == cell.number or first.kind is FailureKind.PEER_LOST:
            return Diagnosis(
                "unfinished-cell",
                f"Cell [{cell.number}] did not finish in the kernel, and is part of the run.",
                "Correct it and run it again, or leave it out of runs: tag it tpu-skip, or begin "
                "it with the line `# tpu: skip`.",
                (),
                0.95,
                "",
            )
    return None


def _cells(result: RunResult) -> tuple[tuple[Cell, ...], int | None]:
    """The cells of the run as they are saved in its folder, and the index of the train cell."""
    try:
        kept = records.read(RunDir(result.dir).snapshot)
        cells = tuple(records.build(Cell, cell) for cell in kept["cells"])
        train = kept["train"]
    except (OSError, ValueError, LookupError, TypeError):  # an older run, a damaged folder
        return (), None
    return cells, train if isinstance(train, int) else None


def observed_facts(result: RunResult) -> Facts:
    """The facts that the run itself has recorded."""
    run = RunDir(result.dir)
    at_work = run.metrics.exists() or run.checkpoints.exists()
    return Facts(
        state=result.state,
        exits={
            failure.rank: failure.exitcode
            for failure in result.failures
            if failure.rank is not None and failure.exitcode is not None
        },
        trained=at_work,
        exceptions=_exceptions(result),
        platform=_platform(),
        backend=result.backend,
        oom_killed=any(failure.kind is FailureKind.OUT_OF_MEMORY for failure in result.failures)
        or None,
        memory_peak=sum(result.peak_memory) or None,
        memory_limit=result.memory_limit or None,
        lost_hosts=tuple(
            failure.headline()
            for failure in result.failures
            if failure.kind is FailureKind.HOST_LOST
        ),
        device_holder=_holder(result),
    )


def _exceptions(result: RunResult) -> tuple[str, ...]:
    """The exceptions that ended ranks, as a log shows them; lost peers only as a last resort."""
    for kind in (FailureKind.EXCEPTION, FailureKind.PEER_LOST):
        if failures := [failure for failure in result.failures if failure.kind is kind]:
            return tuple(map(_as_logged, failures))
    return ()


def _as_logged(failure: Failure) -> str:
    last = f"{failure.type}: {failure.message}"
    text = failure.traceback.rstrip()
    if last.partition("\n")[0] not in text:
        text = f"{text}\n{last}".lstrip()
    prefix = "" if failure.rank is None else f"[{failure.rank}] "
    return "\n".join(f"{prefix}{line}" for line in text.splitlines())


def _platform() -> str | None:
    """This machine's platform, by which fixes differ; None on the user's own machine."""
    root = machine.root_of(os.environ)
    name = find_platform(os.environ, root, Metadata(), tpu.count_chips(root)[0]).name
    return {"colab": "colab", "kaggle": "kaggle", "local": None}.get(name, "gcp")


def _holder(result: RunResult) -> str | None:
    """The other processes that hold the TPU on which a run has just failed."""
    if result.device != "TPU" or time.time() - result.ended > _JUST_NOW:
        return None
    holders = tpu_users.find_tpu_users(machine.root_of(os.environ))
    return ", ".join(holder.describe() for holder in holders) or None


def read_end(path: Path) -> str:
    """The last `MAX_BYTES` of a file as text; '' if there is no file."""
    try:
        return files.read_end(path, MAX_BYTES, anyones=True).decode("utf-8", "replace")
    except (FileNotFoundError, PermissionError):
        return ""
