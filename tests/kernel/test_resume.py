"""`--resume`: the checkpoints that it names, among run folders in any state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpunb.kernel.resume import find_checkpoints
from tpunb.runs.directory import RunDir, new_run
from tpunb.runs.spec import RunSpec
from tpunb.utils.errors import TpunbError


def saved(runs: Path, snapshot: str) -> RunDir:
    """A run that has saved a checkpoint."""
    with new_run(runs, "n") as run:
        run.write_spec(RunSpec(run.id, "n", 1, "CPU", "/", (), ()))
    run.attempt(0, 0).mkdir(parents=True)
    run.saving(0, 0).write_text("1.0\n")
    run.checkpoints.mkdir()
    run.snapshot.write_text(snapshot)
    return run


@pytest.mark.parametrize("damaged", ["", "{", "[1]", "[" * 100_000, "null", "{}"])
@pytest.mark.parametrize("notebook", ["/nb.ipynb", None])
def test_last_passes_over_runs_with_a_damaged_notebook(
    tmp_path: Path, damaged: str, notebook: str | None
) -> None:
    ours = saved(tmp_path, json.dumps({"path": notebook}))
    saved(tmp_path, damaged)
    assert find_checkpoints("last", tmp_path, notebook) == (str(ours.checkpoints), ours.id)
    with pytest.raises(TpunbError, match="no run of this notebook"):
        find_checkpoints("last", tmp_path, "/other.ipynb")
