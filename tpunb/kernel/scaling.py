"""`tpunb.scaling`: a table of the speed on 1 core, on N cores, and of other measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.machine import machine, tpu
from tpunb.runs import compare as comparison
from tpunb.runs import listing, metrics, state
from tpunb.runs.directory import RunDir
from tpunb.runs.metrics import FLOPS, SPEED
from tpunb.runs.result import RunResult
from tpunb.utils import records
from tpunb.utils.errors import TpunbError

if TYPE_CHECKING:
    import pandas as pd


def scaling(
    *runs: RunResult | str | pd.DataFrame,
    others: Mapping[str, float] | None = None,
    peak: float | None = None,
    folder: Path | str | None = None,
) -> pd.DataFrame:
    """Compare the speed of runs on different numbers of cores, one row each, fewest cores first.

    `runs`: results, ids, or rows of `tpunb.runs()`; the runs must have measured their speed with
    `tpunb.training.Throughput`. `others`: samples per second measured elsewhere, for example on a
    GPU, by name. `peak`: bfloat16 teraflops of one core; by default those of the run's TPU, or of
    this machine's.

    Columns: `cores`, `device`, `samples_per_second` of all cores, `per_core`, `speedup` over the
    first row, `efficiency` (`per_core` relative to the first row), and, if known, `mfu` (the share
    of the peak that the model's own operations use) and `dollars` per million samples.
    Rehearsal cores share this machine's processors: their speedup does not predict that of a TPU.

    Raises TpunbError for a run without a measurement.
    """
    import pandas as pd

    place = listing.default_folder() if folder is None else Path(folder)
    rows = sorted((_row(run, peak) for run in comparison.find_selected(runs, place)), key=_cores)
    if not rows:
        raise TpunbError("tpunb.scaling needs runs, as in tpunb.scaling(one_core, four_cores)")
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
    spec, result = state.read_spec(run), state.read_result(run)
    steps = metrics.reduce_rows(metrics.read_rows(run.metrics))
    measured = [row for row in steps if not math.isnan(row.get(SPEED, math.nan))]
    if not measured:
        raise TpunbError(
            f"run {run.id} has not measured its speed: write `speed = "
            "tpunb.training.Throughput()` in the train cell, `speed.add(len(x))` in its loop, and "
            "`speed.stop()` after the loop"
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
    """Return the bfloat16 teraflops of one core of the run's TPU, or of this machine's."""
    env = records.read_dict(run.env)
    parsed = tpu.parse_accelerator_type(env.get("TPU_ACCELERATOR_TYPE", ""))
    generation = machine.detect_machine(env).made if parsed is None else parsed[0]
    return None if generation is None else generation.teraflops / generation.devices
