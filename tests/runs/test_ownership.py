"""Runs of other users: a folder for runs may be shared, so any user may put one into it."""

from __future__ import annotations

import fcntl
import grp
import os
import pickle
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs.test_listing import made
from tpunb.errors import HandoffError, TpunbError
from tpunb.runs import directory, listing, ownership, returns, state
from tpunb.runs.arguments import Arguments
from tpunb.runs.compare import runs as compare
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunState, Stop
from tpunb.utils import files, owners
from tpunb.utils.owners import _Store as Store

NOBODY = 65534
STRANGER = 4_242_424
"""A user without a name here."""
OTHERS = next((group.gr_gid for group in grp.getgrall() if group.gr_name == "users"), NOBODY)
"""A group that is not this user's alone."""
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
def test_run_folders_of_other_users_are_not_listed(tmp_path: Path, kind: str) -> None:
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
        table = str(listing.list_runs(runs))
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
    key = run.path.stat().st_dev, os.geteuid()
    monkeypatch.setattr(owners, "_stores", {key: Store(os.geteuid(), False)})
    assert ownership.why_refused(run.path) is None
    assert ownership.why_replaceable(run.path) is None


@as_root
def test_a_file_system_that_stores_another_owner_for_all_says_nothing_by_him(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path, "x", state="succeeded")
    give_away(run)
    os.chown(tmp_path, NOBODY, NOBODY)
    assert ownership.why_refused(run.path) is not None
    with pytest.raises(PermissionError, match="another user's file"):
        run.read_spec()
    # As a mounted bucket has it: what this user makes is somebody else's there.
    monkeypatch.setattr(
        owners, "_stores", {(run.path.stat().st_dev, os.geteuid()): Store(NOBODY, True)}
    )
    assert ownership.why_refused(run.path) is None
    assert ownership.why_replaceable(tmp_path) is None
    assert run.read_spec().name == "x"
    assert directory.create_run(tmp_path, "own").path.is_dir()
    os.chown(run.path, NOBODY - 1, -1)  # there are real owners too, such as behind root_squash
    refusal = ownership.why_refused(run.path)
    assert refusal is not None
    assert "another user's" in refusal.what


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


@pytest.mark.parametrize("name", ["spec", "result", "lock", "events", "metrics", "log", "env"])
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
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_runs_folder_in_which_its_owner_can_rename_is_refused(shared: Path, mode: int) -> None:
    runs = shared / "runs"
    assert as_another(lambda: (runs.mkdir(), runs.chmod(mode)))
    with pytest.raises(TpunbError, match=r"runs is another user's \(\w+\).*%tpu_setup --runs DIR"):
        directory.create_run(runs, "x")
    with pytest.raises(TpunbError, match="another user's"):
        listing.choose_folder(str(runs))
    assert list(runs.iterdir()) == []


@as_root
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_runs_folder_in_which_all_can_rename_is_refused_with_the_fix(
    tmp_path: Path, mode: int
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    os.chown(runs, -1, OTHERS)
    runs.chmod(mode)
    with pytest.raises(TpunbError, match=r"writable by other users.*`chmod go-w \S+runs`"):
        directory.create_run(runs, "x")
    runs.chmod(mode | 0o1000)  # others can keep their runs in it, and rename only these
    assert directory.create_run(runs, "x").path.is_dir()


def test_a_runs_folder_that_only_the_own_group_can_write_is_used(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o775)  # as the umask of many systems has it, where each user has a group
    own = grp.getgrgid(os.getegid())
    if own.gr_name != pwd.getpwuid(os.geteuid()).pw_name or own.gr_mem not in ([], [own.gr_name]):
        pytest.skip("this user has no group of their own")
    assert directory.create_run(runs, "x").path.is_dir()


def test_a_runs_folder_that_is_made_is_not_writable_by_a_group(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = directory.create_run(tmp_path / "new" / "runs", "x")
    finally:
        os.umask(before)
    assert run.path.parent.stat().st_mode & 0o777 == 0o755
    assert run.path.stat().st_mode & 0o777 == 0o700


@as_root
def test_root_may_use_the_folder_of_the_user_who_became_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    assert directory.create_run(tmp_path, "x").path.is_dir()


@pytest.mark.usefixtures("starts_processes")
@as_root
@pytest.mark.parametrize(
    ("namespace", "owner", "mounted", "used"),
    [
        (["--pid"], STRANGER, True, True),
        ([], STRANGER, True, False),  # a user of this machine, or of a server's disk
        (["--pid"], NOBODY, True, False),  # another account of the container
        (["--pid"], STRANGER, False, False),  # a part of what several users share
    ],
)
def test_root_in_a_container_may_use_the_folder_that_the_host_has_mounted(
    tmp_path: Path, namespace: list[str], owner: int, mounted: bool, used: bool
) -> None:
    made = f"chown {owner}:{owner} . && mkdir -m 775 runs && chown {owner}:{owner} runs"
    code = (
        "from pathlib import Path; from tpunb.runs import directory, ownership\n"
        "run = directory.create_run(Path('runs'), 'x')\n"
        f"import os; os.chown(run.path, {owner}, {owner}); print(ownership.why_refused(run.path))"
    )
    mount = "mount -t tmpfs none . && cd $PWD && " if mounted else ""
    script = f'{mount}{made} && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", *namespace, "--fork", "sh", "-ec", script, sys.executable, code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("this machine allows no namespaces")
    assert done.stdout == "None\n" * used, done.stderr
    assert ("another user's" in done.stderr) is not used


@pytest.mark.usefixtures("starts_processes")
@as_root
def test_nothing_is_loaded_from_a_folder_that_was_put_in_the_place_of_the_run(
    shared: Path,
) -> None:
    runs, away, bang = shared / "a" / "runs", shared / "a" / "away", shared / "bang"
    assert as_another(lambda: runs.parent.mkdir())
    runs.mkdir()  # own; but who owns the folder above can put another one in its place
    run = directory.create_run(runs, "x")
    spec = replace(made(shared / "b", "x", state="succeeded").read_spec(), returns=("weights",))
    result = RunDir(next((shared / "b").iterdir())).read_result()
    assert result is not None
    result = replace(result, dir=run.path)
    assert as_another(lambda: (runs.rename(away), lay_bait(run.path, bang)))
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
