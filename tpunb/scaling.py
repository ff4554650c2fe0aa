"""`tpunb.compare`: the table of a paper, 1 core, N cores, and what others measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb import comparison, control, listings, records
from tpunb.errors import TpunbError
from tpunb.models import RunResult
from tpunb.platforms import chips, machine
from tpunb.records import FLOPS, SPEED
from tpunb.rundir import RunDir

if TYPE_CHECKING:
    import pandas as pd


def compare(
    *which: RunResult | str | pd.DataFrame,
    others: Mapping[str, float] | None = None,
    peak: float | None = None,
    folder: Path | str | None = None,
) -> pd.DataFrame:
    """How speed grows with cores: a row for each run, the fewest cores first.

    `which`: results, ids, or rows of `tpunb.runs()`, of runs that have measured themselves with
    `tpunb.training.Throughput`. `others`: samples per second measured elsewhere, by name, on a
    GPU say. `peak`: teraflops of one core; by default those of bfloat16 of the TPU that the run,
    or else this machine, has.

    Columns: `cores`, `device`, `samples_per_second` of all cores, `per_core`, `speedup` over the
    first row, `efficiency` (the speedup for each core that was added), and, where it is known,
    `mfu` (the share of the peak that the model's own operations use) and `dollars` for a million
    samples. On rehearsal cores speedups are those of processors that the ranks share.

    Raises TpunbError for a run that has measured nothing.
    """
    import pandas as pd

    place = listings.default_folder() if folder is None else Path(folder)
    rows = sorted((_row(run, peak) for run in comparison.chosen(which, place)), key=_cores)
    if not rows:
        raise TpunbError("tpunb.compare: which runs? tpunb.compare(one_core, four_cores)")
    rows += [{"run": name, "samples_per_second": speed} for name, speed in (others or {}).items()]
    first = rows[0]
    for row in rows:
        row["speedup"] = row["samples_per_second"] / first["samples_per_second"]
        if "cores" in row:
            row["per_core"] = row["samples_per_second"] / row["cores"]
            row["efficiency"] = row["per_core"] / (first["samples_per_second"] / first["cores"])
    columns = ["run", "cores", "device", "samples_per_second", "per_core", "speedup", "efficiency"]
    columns += [name for name in ("mfu", "dollars") if any(name in row for row in rows)]
    frame = pd.DataFrame(rows, columns=columns).set_index("run")
    return frame.astype({"cores": "Int64"})


def _cores(row: Mapping[str, Any]) -> int:
    return int(row["cores"])


def _row(run: RunDir, peak: float | None) -> dict[str, Any]:
    spec, result = control.read_spec(run), control.read_result(run)
    steps = records.of_all_ranks(records.read(run.metrics))
    measured = [row for row in steps if not math.isnan(row.get(SPEED, math.nan))]
    if not measured:
        raise TpunbError(
            f"run {run.id} has not measured its speed: in the train cell "
            "`speed = tpunb.training.Throughput()`, in the loop `speed.add(len(x))`, behind it "
            "`speed.stop()`"
        )
    speed, flops = measured[-1][SPEED], measured[-1].get(FLOPS)
    cores = spec.spmd or spec.world_size
    row = {"run": run.id, "cores": cores, "device": spec.device, "samples_per_second": speed}
    if peak is None and spec.device == "TPU":
        peak = _peak(run)
    if peak is not None and flops is not None:
        row["mfu"] = speed * flops / (cores * peak * 1e12)
    if result is not None and result.price is not None:
        row["dollars"] = result.price.cost(1e6 / speed)
    return row


def _peak(run: RunDir) -> float | None:
    """Teraflops of a core of the TPU that a run had."""
    env = json.loads(run.env.read_text(encoding="utf-8"))
    parsed = chips.parse(env.get("TPU_ACCELERATOR_TYPE", ""))
    made = machine.detect(env).made if parsed is None else parsed[0]
    return None if made is None else made.teraflops / made.devices
