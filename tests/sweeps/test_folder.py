"""Sweeps in a folder that other users can write to: nothing that they lay there is used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs.test_ownership import as_another, as_root, shared
from tpunb.errors import TpunbError
from tpunb.sweeps import folder as folders
from tpunb.sweeps.folder import SweepKind, SweepSpec, Trial, TrialState
from tpunb.sweeps.study import Study

__all__ = ["shared"]
FOREIGN = r"is another user's \(\w+\), so it is not used: choose a folder of your own .*--runs DIR"


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    notebook = tmp_path / "nb.ipynb"
    cells: list[object] = []
    notebook.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )
    return SweepSpec(str(notebook), SweepKind.GRID, {}, None, None, "", "", "code", "packages")


def lay(folder: Path, spec: SweepSpec) -> None:
    """What an attacker lays in the place of a sweep: a notebook to run, and a best trial."""
    (folder / "trials").mkdir(parents=True)
    folder.chmod(0o777)
    (folder / "sweep.json").write_text(json.dumps({**vars(spec), "kind": "grid"}))
    (folder / "nb.ipynb").write_text("import os; os.system('true')")
    best = Trial(0, {}, TrialState.COMPLETE, value=0.0)
    (folder / "trials" / "0000.json").write_text(json.dumps({**vars(best), "state": "complete"}))


@pytest.mark.usefixtures("starts_processes")
@as_root
@pytest.mark.parametrize("part", ["sweeps", "sweeps/NAME", "sweeps/NAME/trials", "sweeps/done"])
def test_a_part_that_another_user_made_first_is_refused(
    shared: Path, spec: SweepSpec, part: str
) -> None:
    name = f"nb-{spec.digest()}"
    path = shared / part.replace("NAME", name)
    above = path.parent
    if part != "sweeps":
        above.mkdir(parents=True, mode=0o700)
        above.chmod(0o777)  # as it may have been for a moment
        (shared / "sweeps").chmod(0o777)
    assert as_another(lambda: lay(path, spec) if path.name == name else path.mkdir(mode=0o777))
    for own in (shared / "sweeps", above):
        if own != shared and own.exists() and own.owner() == shared.owner():
            own.chmod(0o700)
    with pytest.raises(TpunbError, match=FOREIGN):
        folders.open_sweep(shared, spec, again=False).note_done("key", Trial(0, {}))


@pytest.mark.usefixtures("starts_processes")
@as_root
def test_a_sweep_that_another_user_has_replaced_is_not_continued(
    shared: Path, spec: SweepSpec
) -> None:
    runs, away = shared / "a" / "runs", shared / "a" / "away"
    assert as_another(lambda: runs.parent.mkdir())
    runs.mkdir()  # own; but who owns the folder above can put another one in its place
    sweep = folders.open_sweep(runs, spec, again=False)
    assert as_another(lambda: (runs.rename(away), lay(sweep.path, spec)))
    with pytest.raises(TpunbError, match="another user's"):
        folders.open_sweep(runs, spec, again=False)
    with pytest.raises(TpunbError, match=FOREIGN):
        Study.load(sweep.path)
    assert sweep.read_trials() == {}
    with pytest.raises(TpunbError, match="another user's file"):
        sweep.read_spec()


@pytest.mark.usefixtures("starts_processes")
@as_root
def test_two_users_sweep_in_one_shared_folder(shared: Path, spec: SweepSpec) -> None:
    sweep = folders.open_sweep(shared, spec, again=False)
    sweep.write_trial(Trial(0, {}))
    assert not as_another(lambda: sweep.path.rename(shared / "x"))
    assert not as_another(lambda: sweep.path.parent.rename(shared / "x"))
    assert not as_another(lambda: list(sweep.path.parent.iterdir()))
    assert folders.open_sweep(shared, spec, again=False).path == sweep.path
    sweep.note_done("key", Trial(0, {}))
    found = sweep.find_done("key", Trial(1, {}), spec)
    assert found is None  # it is not complete


def test_the_file_behind_a_link_is_not_emptied(tmp_path: Path, spec: SweepSpec) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    sweep = folders.open_sweep(tmp_path / "runs", spec, again=False)
    (sweep.path / "sweep.lock").symlink_to(victim)
    sweep.runs_file(0).symlink_to(victim)
    with pytest.raises(TpunbError, match="not a regular file"), sweep.locked():
        pass
    assert sweep.runs_of(0) == ()
    sweep.clear(0)
    assert victim.read_text() == "mine"
    sweep.path.rename(tmp_path / "elsewhere")
    sweep.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TpunbError, match="is a link"):
        folders.open_sweep(tmp_path / "runs", replace(spec, again=0), again=False)
