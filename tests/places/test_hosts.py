"""Connections to hosts and their messages, with local shells instead of hosts."""

from __future__ import annotations

import shlex
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpunb.places import hosts, remote
from tpunb.places.config import PlaceConfig, SshSettings
from tpunb.places.errors import HostsError
from tpunb.places.hosts import HostsPlace
from tpunb.places.place import ConnectionLost, HostsRun
from tpunb.places.transport import Transport
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.runs.stream import Append, End


class Shells(Transport):
    """A transport whose hosts are local shells; `instead`: other commands for some of them."""

    hosts: tuple[str, ...] = ()

    def __init__(self, count: int) -> None:
        self.hosts = tuple(f"h{number}" for number in range(count))
        self.instead: dict[int, str] = {}

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
def place(run: RunDir, shells: Shells, tmp_path: Path) -> Iterator[HostsPlace]:
    folders = [tmp_path / name for name in shells.hosts]
    for folder in folders:
        folder.mkdir()
    settings = SshSettings(hosts=shells.hosts)
    placed = HostsRun(
        *(PlaceConfig("pod", "ssh", tmp_path / "places.toml", settings), shells.hosts),
        *(("fd00::1", "fd00::2"), tuple(map(str, folders)), shlex.quote(sys.executable)),
        *(8470, "/", "/w"),
    )
    place = HostsPlace(run, placed, shells)
    yield place
    place.close()


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{folder.name} {name}")


@pytest.mark.usefixtures("starts_processes")
def test_fetch_skips_files_the_local_run_folder_has(
    place: HostsPlace, run: RunDir, tmp_path: Path
) -> None:
    whole = "env.json", "script.py", "run.log", "result.json", "place.json", "given/x/spec.json"
    write(run.path, *whole, "attempts/0/0/stdout.log")
    for host in ("h0", "h1"):
        write(tmp_path / host, *whole, "attempts/0/0/stdout.log", "checkpoints/1/.metadata")
    fetched = {path.relative_to(run.path).as_posix() for path in place.fetch(["*"], run.path)}
    there = {f"hosts/1/{name}" for name in whole if name != "run.log"}
    there.add("hosts/1/attempts/0/0/stdout.log")  # of a rank that is on the first host
    assert fetched == {"checkpoints/1/.metadata", "hosts/1/checkpoints/1/.metadata"} | there
    for name in (*whole, "attempts/0/0/stdout.log"):
        assert (run.path / name).read_text() == f"here {name}"
    assert (run.path / "checkpoints/1/.metadata").read_text() == "h0 checkpoints/1/.metadata"


@pytest.mark.usefixtures("starts_processes")
def test_fetch_does_not_write_through_symlinks(
    place: HostsPlace, run: RunDir, tmp_path: Path
) -> None:
    write(tmp_path / "h0", "checkpoints/last")
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints/last").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not a regular file"):
        place.fetch(["checkpoints"], run.path, hosts=[0])
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("said", ["", "hello", f"{remote.ARCHIVE.decode()}no archive"])
def test_fetch_of_an_invalid_archive_names_the_host(
    place: HostsPlace, run: RunDir, shells: Shells, said: str
) -> None:
    shells.instead[0] = f"printf %s {shlex.quote(said)}"
    with pytest.raises(HostsError, match=r"h0: its archive cannot be read"):
        place.fetch(["checkpoints"], run.path, hosts=[0])


@pytest.mark.usefixtures("starts_processes")
def test_fetch_refuses_an_archive_with_outside_paths(
    place: HostsPlace, run: RunDir, shells: Shells, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as made:
        made.addfile(tarfile.TarInfo("../outside"))
    shells.instead[0] = f"printf %s {shlex.quote(remote.ARCHIVE.decode())}; cat {tmp_path}/bad.tar"
    with pytest.raises(HostsError, match=r"\.\./outside is not in the run folder"):
        place.fetch(["checkpoints"], run.path, hosts=[0])
    assert not (tmp_path / "outside").exists()


@pytest.mark.usefixtures("starts_processes")
def test_slow_host_does_not_delay_heartbeats_to_others(
    place: HostsPlace, shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats reach the other hosts while one host still receives its files."""
    monkeypatch.setattr(hosts, "ALIVE", 0.01)
    end = shlex.quote(stream.encode(End(0)).decode())
    shells.instead = {0: "exec sleep 1000", 1: f"read first; read alive; printf %s {end}"}
    for host in range(2):
        place._connect(host, "", b"x" * 1_000_000 * (1 - host) + b"first\n")
    for said in place.follow([{}, {}]):
        if said is not None and isinstance(said.line, End):
            assert said.host == 1
            break
    else:
        pytest.fail("the second host has heard nothing")


@pytest.mark.usefixtures("starts_processes")
def test_endless_line_of_a_host_is_dropped_without_using_memory(
    place: HostsPlace, shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contents of such a line are lost, but not the lines after it."""
    taken: list[int] = []

    def decode(line: bytes) -> stream.Line:
        taken.append(len(line))
        return whole(line)

    whole = stream.decode
    monkeypatch.setattr(stream, "decode", decode)
    monkeypatch.setattr(hosts, "LONGEST", 100_000)
    later = shlex.quote(stream.encode(Append("run.log", 0, b"later\n", 1.0)).decode())
    shells.instead[0] = f"head -c 1000000 /dev/zero; echo; printf %s {later}"
    place._connect(0, "", b"")
    place._connections[1] = place._connections[0]
    lines = []
    for said in place.follow([{}, {}]):
        if said is not None:
            lines.append(said.line)
            if isinstance(said.line, ConnectionLost):
                break
    assert lines[0] == Append("run.log", 0, b"later\n", 1.0)
    assert max(taken) < 500_000
    del place._connections[1]
