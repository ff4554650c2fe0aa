"""`--resume`: the checkpoints that it names, among run folders in any state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpunb.kernel.resume import find_checkpoints
from tpunb.machine.machine import Machine
from tpunb.places.local import LocalTarget
from tpunb.runs.directory import RunDir, new_run
from tpunb.runs.spec import RunSpec
from tpunb.utils.errors import TpunbError

HERE = LocalTarget(Machine("local", "CPU", 0, "", 8, 2**34))


def saved(runs: Path, snapshot: str, *, trial: bool = False) -> RunDir:
    """A run that has saved a checkpoint."""
    with new_run(runs, "n") as run:
        run.write_spec(RunSpec(run.id, "n", 1, "CPU", "/", (), (), trial=trial))
    run.attempt(0, 0).mkdir(parents=True)
    run.saving(0, 0).write_text("1.0\n")
    run.checkpoints.mkdir()
    run.snapshot.write_text(snapshot)
    return run


@pytest.mark.parametrize("damaged", ["{", "[1]", "{}"])
@pytest.mark.parametrize("notebook", ["/nb.ipynb", None])
def test_last_passes_over_runs_with_a_damaged_notebook(
    tmp_path: Path, damaged: str, notebook: str | None
) -> None:
    ours = saved(tmp_path, json.dumps({"path": notebook}))
    saved(tmp_path, damaged)
    assert find_checkpoints("last", tmp_path, notebook, HERE) == (str(ours.checkpoints), ours.id)
    with pytest.raises(TpunbError, match="no run of this notebook"):
        find_checkpoints("last", tmp_path, "/other.ipynb", HERE)


def test_last_is_no_trial_of_a_grid_unless_it_is_named(tmp_path: Path) -> None:
    trial = saved(tmp_path, '{"path": "/nb.ipynb"}', trial=True)
    with pytest.raises(TpunbError, match="saved a checkpoint, but trials of --grid have; to "):
        find_checkpoints("last", tmp_path, "/nb.ipynb", HERE)
    ours = saved(tmp_path, '{"path": "/nb.ipynb"}')
    later = saved(tmp_path, '{"path": "/nb.ipynb"}', trial=True)
    assert find_checkpoints("last", tmp_path, "/nb.ipynb", HERE)[1] == ours.id
    for each in (trial, later):
        assert find_checkpoints(each.id, tmp_path, "/nb.ipynb", HERE)[1] == each.id
