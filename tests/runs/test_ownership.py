"""Runs of other users: a folder for runs may be shared, so any user may put one into it."""

from __future__ import annotations

import fcntl
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs.test_listing import made
from tpunb.errors import TpunbError
from tpunb.runs import directory, listing, ownership, returns, state
from tpunb.runs.compare import runs as compare
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunState
from tpunb.utils import files

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def give_away(run: RunDir) -> None:
    for path in [run.path, *run.path.rglob("*")]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def foreign(runs: Path, kind: str) -> RunDir:
    """A run folder that any user may have written."""
    run = made(runs, f"bait-{kind}")
    if kind == "another user's":
        give_away(run)
    elif kind == "writable by other users":
        run.path.chmod(0o777)
    else:
        elsewhere = runs.parent / f"elsewhere-{runs.name}"
        run.path.rename(elsewhere)
        run.path.symlink_to(elsewhere)
    return run


@pytest.mark.parametrize(
    "kind",
    [pytest.param("another user's", marks=as_root), "writable by other users", "a link"],
)
def test_those_that_somebody_else_may_have_written_are_no_runs(tmp_path: Path, kind: str) -> None:
    runs = tmp_path / "runs"
    own = made(runs, "own", state="succeeded")
    bait = foreign(runs, kind)
    with open(bait.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it seems to run, so it would be the latest
        assert [run.id for run in directory.list_runs(runs)] == [own.id]
        with pytest.raises(TpunbError, match=f"last run: run {own.id}"):
            state.find_active(runs, None)
        for find in (state.find_active, directory.find_run):
            with pytest.raises(TpunbError, match=f"run {bait.id} is {kind}"):
                find(runs, bait.id)
        assert [entry.run.id for entry in listing.find_old(runs, None, 0)] == [own.id]
        assert list(compare(runs).index) == [own.id]
        table = listing.format_table(runs)
        assert f"left out: {bait.id}, {kind}" in table
        assert own.id in table
    assert listing.find_old(runs, None, 0) != []
    own_only = tmp_path / "none"
    own_only.mkdir()
    foreign(own_only, kind)
    with pytest.raises(TpunbError, match=f"there are no runs .*left out: .*{kind}"):
        directory.find_run(own_only, None)


def test_a_file_system_that_does_not_keep_modes_says_nothing_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path, "x")
    run.path.chmod(0o777)
    assert ownership.why_refused(run.path) is not None
    # As Windows' disks have it, which no machine of the tests has mounted: all are writable.
    monkeypatch.setattr(
        ownership.tempfile, "mkdtemp", lambda *, prefix, dir: _writable(Path(dir) / prefix)
    )
    ownership._keeps_modes.cache_clear()
    assert ownership.why_refused(run.path) is None
    ownership._keeps_modes.cache_clear()


def _writable(path: Path) -> str:
    path.mkdir()
    path.chmod(0o777)
    return str(path)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


@as_root
def test_what_another_user_put_into_returns_is_not_unpickled(tmp_path: Path) -> None:
    run = made(tmp_path, "x", state="succeeded")
    run.returns.mkdir()
    files.write_json(run.returns / "report.json", {"weights": {"file": "weights.pt"}})
    value = run.returns / "weights.pt"
    value.write_bytes(pickle.dumps(Bomb(tmp_path / "bang"), protocol=2))
    os.chown(value, NOBODY, NOBODY)
    spec, result = run.read_spec(), run.read_result()
    assert result is not None
    spec = replace(spec, returns=("weights",))
    whole = returns.collect_returns(result, spec, attached=True)
    assert "another user's file" in whole.returns_failed["weights"]
    assert not whole.returns
    assert not (tmp_path / "bang").exists()


def test_only_values_of_the_folder_itself_come_back(tmp_path: Path) -> None:
    run = made(tmp_path, "x", state="succeeded")
    run.returns.mkdir()
    outside = tmp_path / "outside.pt"
    outside.write_bytes(pickle.dumps(Bomb(tmp_path / "bang"), protocol=2))
    (run.returns / "b.pt").symlink_to(outside)
    files.write_json(run.returns / "report.json", {"a": {"file": str(outside)}, "b": {}})
    result, spec = run.read_result(), run.read_spec()
    assert result is not None
    spec = replace(spec, returns=("a", "b"))
    whole = returns.collect_returns(result, spec)
    assert set(whole.returns_failed) == {"a", "b"}
    assert not (tmp_path / "bang").exists()


def test_links_in_a_run_folder_are_not_written_to(tmp_path: Path) -> None:
    run = made(tmp_path, "x")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run.requests.symlink_to(victim)
    with pytest.raises(PermissionError, match="not a regular file"):
        state.request_stop(run, "asked")
    run.lock.unlink()
    run.lock.symlink_to(victim)
    assert not run.is_running()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["spec", "result", "lock", "events", "metrics", "log", "env"])
def test_a_fifo_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    other = made(tmp_path, "other", state="succeeded")
    run = made(tmp_path, "x", state="succeeded")
    path: Path = getattr(run, name)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert other.id in listing.format_table(tmp_path)
    assert other.id in compare(tmp_path).index
    listing.find_old(tmp_path, None, 0)
    state.run_state(run)
    if name in ("spec", "result"):
        assert state.run_state(run) in (RunState.LOST, RunState.SUCCEEDED)
