"""Runs of other users: a folder for runs may be shared, so any user may put one into it."""

from __future__ import annotations

import fcntl
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs.test_listing import made
from tpunb.errors import HandoffError, TpunbError
from tpunb.runs import directory, listing, returns, state
from tpunb.runs.arguments import Arguments
from tpunb.runs.compare import runs as compare
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunState, Stop
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
    else:
        elsewhere = runs.parent / f"elsewhere-{runs.name}"
        run.path.rename(elsewhere)
        run.path.symlink_to(elsewhere)
    return run


@pytest.mark.parametrize("kind", [pytest.param("another user's", marks=as_root), "a link"])
def test_run_folders_of_other_users_are_not_listed(tmp_path: Path, kind: str) -> None:
    runs = tmp_path / "runs"
    own = made(runs, "own", state="succeeded")
    runs.chmod(0o1777)
    bait = foreign(runs, kind)
    with open(bait.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it seems to run, so it would be the latest
        assert [run.id for run in directory.list_runs(runs)] == [own.id]
        assert state.find_active(runs, None).id == own.id
        for find in (state.find_active, directory.find_run):
            with pytest.raises(TpunbError, match=f"{bait.id} is {kind}.* so it is not used"):
                find(runs, bait.id)
        assert [entry.run.id for entry in listing.find_old(runs, None, 0)] == [own.id]
        assert list(compare(runs).index) == [own.id]
        table = str(listing.list_runs(runs))
        assert f"left out: {bait.id}, {kind}" in table
        assert own.id in table
    assert listing.find_old(runs, None, 0) != []
    own_only = tmp_path / "none"
    own_only.mkdir()
    foreign(own_only, kind)
    with pytest.raises(TpunbError, match=f"there are no runs .*left out: .*{kind}"):
        directory.find_run(own_only, None)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


@as_root
def test_files_of_another_user_in_an_own_folder_are_not_read(tmp_path: Path) -> None:
    run = made(tmp_path, "x", state="succeeded")
    for path in (run.spec, run.result, run.script):
        path.touch()
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(PermissionError, match="another user's file"):
            files.read_text(path)
    assert state.read_result(run) is None


@as_root
def test_returns_written_by_another_user_are_not_unpickled(tmp_path: Path) -> None:
    run = made(tmp_path, "x", state="succeeded")
    run.returns.mkdir()
    files.write_json(run.returns / "report.json", {"weights": {"file": "weights.pt"}})
    value = run.returns / "weights.pt"
    value.write_bytes(pickle.dumps(Bomb(tmp_path / "bang"), protocol=2))
    os.chown(value, NOBODY, NOBODY)
    spec, result = run.read_spec(), run.read_result()
    assert result is not None
    spec = replace(spec, returns=("weights",))
    whole = returns.collect_returns(result, spec)
    assert "another user's file" in whole.returns_failed["weights"]
    assert not whole.returns
    assert not (tmp_path / "bang").exists()


def test_returns_outside_the_run_folder_are_not_read(tmp_path: Path) -> None:
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
        state.request_stop(run, Stop(reason="asked"))
    run.lock.unlink()
    run.lock.symlink_to(victim)
    assert not run.is_running()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["spec", "result", "lock", "events", "metrics"])
def test_fifo_in_a_run_folder_does_not_block(tmp_path: Path, name: str) -> None:
    other = made(tmp_path, "other", state="succeeded")
    run = made(tmp_path, "x", state="succeeded")
    path: Path = getattr(run, name)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert other.id in str(listing.list_runs(tmp_path))
    assert other.id in compare(tmp_path).index
    listing.find_old(tmp_path, None, 0)
    state.run_state(run)
    if name in ("spec", "result"):
        assert state.run_state(run) in (RunState.LOST, RunState.SUCCEEDED)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can reach, as /tmp is."""
    with tempfile.TemporaryDirectory(prefix="shared-", dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def as_another(attack: Callable[[], object]) -> bool:
    """Run an attack in a process of another user; True if nothing refused it."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            attack()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def lay_bait(folder: Path, bang: Path) -> None:
    """What an attacker puts in the place of a run folder: values that run code when loaded."""
    (folder / "returns").mkdir(parents=True)
    folder.chmod(0o777)
    (folder / "returns" / "report.json").write_text('{"weights": {"file": "weights.pt"}}')
    (folder / "returns" / "weights.pt").write_bytes(pickle.dumps(Bomb(bang), protocol=2))
    (folder / "result.json").write_text("{}")


@pytest.mark.usefixtures("starts_processes")
@as_root
def test_a_runs_folder_in_which_its_owner_can_rename_is_refused(shared: Path) -> None:
    runs = shared / "runs"
    assert as_another(lambda: (runs.mkdir(), runs.chmod(0o1777)))
    with pytest.raises(TpunbError, match=r"runs is another user's \(\w+\).*%tpu_setup --runs DIR"):
        directory.create_run(runs, "x")
    with pytest.raises(TpunbError, match="another user's"):
        listing.choose_folder(str(runs))
    assert list(runs.iterdir()) == []


def test_a_runs_folder_that_is_made_is_not_writable_by_a_group(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = directory.create_run(tmp_path / "new" / "runs", "x")
    finally:
        os.umask(before)
    assert run.path.parent.stat().st_mode & 0o777 == 0o755
    assert run.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("starts_processes")
@as_root
@pytest.mark.parametrize("replaced", ["run", "runs"])
def test_nothing_is_loaded_from_a_folder_that_was_put_in_the_place_of_the_run(
    shared: Path, replaced: str
) -> None:
    runs, bang = shared / "a" / "runs", shared / "bang"
    assert as_another(lambda: runs.parent.mkdir())
    runs.mkdir()  # own; but who owns the folder above can put another one in its place
    runs.chmod(0o777)  # so can everybody in this one
    run = directory.create_run(runs, "x")
    spec = replace(made(shared / "b", "x", state="succeeded").read_spec(), returns=("weights",))
    result = RunDir(next((shared / "b").iterdir())).read_result()
    assert result is not None
    result = replace(result, dir=run.path)
    moved = run.path if replaced == "run" else runs
    assert as_another(lambda: (moved.rename(moved.with_name("away")), lay_bait(run.path, bang)))
    assert run.held is not None
    assert run.held.is_replaced()
    whole = returns.collect_returns(result, spec, run)
    assert "was replaced" in whole.returns_failed["weights"]
    assert run.held is None
    later = returns.collect_returns(result, spec)  # by a process that attaches to it
    assert "another user's" in later.returns_failed["weights"]
    assert not bang.exists()
    with pytest.raises(PermissionError):
        run.read_result()
    assert as_another(lambda: run.arguments.write_bytes(pickle.dumps(Bomb(bang))))
    with pytest.raises(HandoffError, match="another user's"):
        Arguments(run.arguments)["x"]
    assert not bang.exists()


@pytest.mark.parametrize("ended", ["failed", "hung"])
def test_nothing_of_a_failed_run_is_loaded(tmp_path: Path, ended: str) -> None:
    run = made(tmp_path, "x", state=ended)
    lay_bait(run.path / "inside", tmp_path / "bang")
    (run.path / "inside" / "returns").rename(run.returns)
    result, spec = run.read_result(), run.read_spec()
    assert result is not None
    whole = returns.collect_returns(result, replace(spec, returns=("weights",)))
    assert whole.returns_failed == {"weights": "the run failed"}
    assert not (tmp_path / "bang").exists()
