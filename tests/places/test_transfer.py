"""Which files are copied to hosts, and that only changed files are."""

from __future__ import annotations

import io
import shlex
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.drivers.pods import ReachedPod
from tpunb.places import remote, transfer
from tpunb.places.config import PlaceConfig, SshSettings
from tpunb.places.errors import HostsError, PlaceError
from tpunb.places.hosts_target import find_hosts
from tpunb.places.place import HostsRun
from tpunb.places.transfer import chosen_files
from tpunb.places.transport import Transport, make_transport
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a.py", "b.py", "src/c.py", "src/deep/d.py", "src/deep/d.ckpt", "data/e.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        (["*.py"], ["a.py", "b.py"]),
        (["src"], ["src/c.py", "src/deep/d.ckpt", "src/deep/d.py"]),
        (["src/", "- *.ckpt"], ["src/c.py", "src/deep/d.py"]),
        (["src", "- src/deep"], ["src/c.py"]),
        (["src", "- deep/"], ["src/c.py"]),
        (["**/*.csv", "a.py", "a.py"], ["a.py", "data/e.csv"]),
        (["."], ["a.py", "b.py", "data/e.csv", "src/c.py", "src/deep/d.ckpt", "src/deep/d.py"]),
    ],
)
def test_file_rules_choose_files(root: Path, rules: list[str], names: list[str]) -> None:
    assert chosen_files(root, rules) == names


@pytest.mark.parametrize("rule", ["../x", "/etc/passwd", "src/../../x"])
def test_file_rules_outside_the_folder_are_refused(root: Path, rule: str) -> None:
    with pytest.raises(PlaceError, match="only files below"):
        chosen_files(root, [rule])


def test_file_rule_without_a_match_is_an_error(root: Path) -> None:
    with pytest.raises(PlaceError, match=r"no file in .* matches"):
        chosen_files(root, ["*.txt"])


def test_file_rule_that_is_not_a_pattern_is_an_error(root: Path) -> None:
    with pytest.raises(PlaceError, match=r"files = \[''\] is not a pattern"):
        chosen_files(root, [""])


def test_links_are_copied_as_their_targets(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "large.csv"
    elsewhere.write_text("1,2")
    (root / "data/link.csv").symlink_to(elsewhere)
    (root / "data/hard.csv").hardlink_to(root / "data/e.csv")
    names = chosen_files(root, ["data"])
    packed = transfer.pack({name: root / name for name in names})
    with tarfile.open(fileobj=io.BytesIO(packed)) as made:
        found = {member.name: (member.isreg(), member.size) for member in made.getmembers()}
    assert found == {
        "data/e.csv": (True, 10),
        "data/hard.csv": (True, 10),
        "data/link.csv": (True, 3),
    }


def send(pod: ReachedPod) -> list[str]:
    placed = find_hosts("pod", pod.project, print, lambda: False).placed("run")
    told: list[str] = []
    transport = make_transport(placed.place)
    transfer.send_files(transport, placed, told.append)
    return told


def blocked(pod: ReachedPod) -> str:
    """A folder that no host can create."""
    (pod.folder / "file").write_text("in the way")
    return f"{pod.folder}/file/tpunb"


def there(pod: ReachedPod, name: str) -> list[Path]:
    return sorted(pod.folder.glob(f"homes/*/.tpunb/projects/project-*/{name}"))


def test_changed_files_are_copied(pod: ReachedPod) -> None:
    folder = pod.project / "nested dir"
    folder.mkdir()
    (folder / "one two.dat").write_text("one")
    (pod.project / "left.dat").write_text("left")
    pod.set_place(files=["nested dir", "*.dat", "- left*"])
    assert send(pod) == ["copying 1 file, 3 B, to 2 hosts"]
    assert [path.read_text() for path in there(pod, "nested dir/one two.dat")] == ["one"] * 2
    assert there(pod, "left.dat") == []
    (folder / "one two.dat").write_text("longer")
    send(pod)
    assert [path.read_text() for path in there(pod, "nested dir/one two.dat")] == ["longer"] * 2


def test_copy_failure_names_the_hosts(pod: ReachedPod) -> None:
    (pod.project / "one.txt").write_text("one")
    pod.set_place(files=["*.txt"], folder=blocked(pod))
    with pytest.raises(HostsError, match=r"h0, h1: .*Not a directory"):
        send(pod)


class Shells(Transport):
    """A transport whose hosts are local shells; `instead`: other commands for some of them."""

    hosts: tuple[str, ...] = ()

    def __init__(self, count: int) -> None:
        self.hosts = tuple(f"h{number}" for number in range(count))
        self.instead: dict[int, str] = {}

    def reorder(self, order: Sequence[int]) -> None:
        assert list(order) == [0, 1]

    def command(self, host: int, remote: str) -> list[str]:
        return ["sh", "-c", self.instead.get(host, remote)]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = tmp_path / "here"
    folder.mkdir(mode=0o700)
    spec = RunSpec("id", "pod", 2, "CPU", "/", (), (), hosts=("h0", "h1"), place="pod")
    run = RunDir(folder)
    run.write_spec(spec)
    return run


@pytest.fixture
def shells() -> Shells:
    return Shells(2)


@pytest.fixture
def placed(
    run: RunDir, shells: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HostsRun:
    folders = [tmp_path / name for name in shells.hosts]
    for folder in folders:
        folder.mkdir()
    settings = SshSettings(hosts=shells.hosts)
    placed = HostsRun(
        *(PlaceConfig("pod", "ssh", tmp_path / "places.toml", settings), shells.hosts),
        *(("fd00::1", "fd00::2"), tuple(map(str, folders)), shlex.quote(sys.executable)),
        *(8470, "/", "/w"),
    )
    placed.write(run)
    monkeypatch.setattr(transfer, "make_transport", lambda place: shells)
    return placed


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{folder.name} {name}")


@pytest.mark.usefixtures("starts_processes", "placed")
def test_fetch_skips_files_the_local_run_folder_has(run: RunDir, tmp_path: Path) -> None:
    whole = "env.json", "script.py", "run.log", "result.json", "place.json", "given/x/spec.json"
    placed = run.place.read_bytes()
    write(run.path, *whole, "attempts/0/0/stdout.log")
    run.place.write_bytes(placed)
    for host in ("h0", "h1"):
        write(tmp_path / host, *whole, "attempts/0/0/stdout.log", "checkpoints/1/.metadata")
    fetched = {path.relative_to(run.path).as_posix() for path in transfer.fetch_files(run, ["*"])}
    there = {f"hosts/1/{name}" for name in whole}
    there.add("hosts/1/attempts/0/0/stdout.log")  # of a rank that is on the first host
    assert fetched == {"checkpoints/1/.metadata", "hosts/1/checkpoints/1/.metadata"} | there
    for name in (*whole, "attempts/0/0/stdout.log"):
        if name == "place.json":
            continue
        assert (run.path / name).read_text() == f"here {name}"
    assert (run.path / "checkpoints/1/.metadata").read_text() == "h0 checkpoints/1/.metadata"


@pytest.mark.usefixtures("starts_processes", "placed")
def test_fetch_does_not_write_through_symlinks(run: RunDir, tmp_path: Path) -> None:
    write(tmp_path / "h0", "checkpoints/last")
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints/last").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not a regular file"):
        transfer.fetch_files(run, ["checkpoints"], [0])
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.usefixtures("starts_processes", "placed")
@pytest.mark.parametrize("said", ["", "hello", f"{remote.ARCHIVE.decode()}no archive"])
def test_fetch_of_an_invalid_archive_names_the_host(run: RunDir, shells: Shells, said: str) -> None:
    shells.instead[0] = f"printf %s {shlex.quote(said)}"
    with pytest.raises(HostsError, match=r"h0: its archive cannot be read"):
        transfer.fetch_files(run, ["checkpoints"], [0])


@pytest.mark.usefixtures("starts_processes", "placed")
def test_fetch_refuses_an_archive_with_outside_paths(
    run: RunDir, shells: Shells, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as made:
        made.addfile(tarfile.TarInfo("../outside"))
    shells.instead[0] = f"printf %s {shlex.quote(remote.ARCHIVE.decode())}; cat {tmp_path}/bad.tar"
    with pytest.raises(HostsError, match=r"\.\./outside is not in the run folder"):
        transfer.fetch_files(run, ["checkpoints"], [0])
    assert not (tmp_path / "outside").exists()
