"""Which files are copied to hosts, and that only changed files are."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.drivers.pods import ReachedPod
from tpunb.places import archive, kinds, transfer
from tpunb.places.config import PlaceConfig, SshSettings
from tpunb.places.errors import HostsError, PlaceError
from tpunb.places.place import Cancelled, HostsRun
from tpunb.places.transfer import chosen_files
from tpunb.places.transport import Transport, make_transport


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
    packed = archive.pack({name: root / name for name in names})
    with tarfile.open(fileobj=io.BytesIO(packed)) as made:
        found = {member.name: (member.isreg(), member.size) for member in made.getmembers()}
    assert found == {
        "data/e.csv": (True, 10),
        "data/hard.csv": (True, 10),
        "data/link.csv": (True, 3),
    }


@pytest.mark.usefixtures("starts_processes")
def test_rsync_failure_shows_its_reason(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rsync = tmp_path / "bin/rsync"
    rsync.parent.mkdir()
    rsync.write_text(
        "#!/bin/sh\necho the reason >&2; echo rsync: a >&2; echo rsync: b >&2; exit 12\n"
    )
    rsync.chmod(0o755)
    monkeypatch.setenv("PATH", str(rsync.parent), prepend=":")
    with pytest.raises(HostsError, match="h0: the reason"):
        transfer.send_files(Shell("h0"), going(root, "h0"), print, lambda: False)


def going(root: Path, host: str) -> HostsRun:
    """A run on one host that has rsync."""
    place = PlaceConfig(
        "pod", "ssh", root / "places.toml", SshSettings(hosts=(host,), files=(".",))
    )
    return HostsRun(
        *(place, (host,), ("a",), ("/r",), "python3", 1, str(root), "~/the runs/nets"), rsync=True
    )


class Shell(Transport):
    """A transport of one host that has only a shell for rsync."""

    hosts: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        self.hosts = (name,)

    def command(self, host: int, remote: str) -> list[str]:
        raise AssertionError("rsync is all that is called")

    def shell(self, host: int) -> tuple[list[str], str]:
        return ["ssh", "-T"], self.hosts[host]


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(
    ("name", "target"), [("me@h0", "me@h0:"), ("me@fd00::1", "me@[fd00::1]:"), ("::1", "[::1]:")]
)
def test_rsync_arguments(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, target: str
) -> None:
    rsync = tmp_path / "bin/rsync"
    rsync.parent.mkdir()
    rsync.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/called\ncat >/dev/null\n')
    rsync.chmod(0o755)
    monkeypatch.setenv("PATH", str(rsync.parent), prepend=":")
    transfer.send_files(Shell(name), going(root, name), print, lambda: False)
    words = (tmp_path / "called").read_text().splitlines()
    assert words[-1] == f"{target}the runs/nets/"
    assert """--rsync-path=mkdir -p -m 700 "$HOME"'/the runs/nets' && rsync""" in words
    assert {"--copy-links", "--protect-args"} <= set(words)


def send(pod: ReachedPod, *, cancelled: bool = False, rsync: bool = False) -> list[str]:
    found = kinds.find_target("pod", pod.project, print, lambda: False)
    placed = replace(found.placed("run", detached=False), rsync=rsync)
    told: list[str] = []
    transport = make_transport(placed.place)
    transfer.send_files(transport, placed, told.append, lambda: cancelled)
    return told


def blocked(pod: ReachedPod) -> str:
    """A folder that no host can create."""
    (pod.folder / "file").write_text("in the way")
    return f"{pod.folder}/file/tpunb"


def there(pod: ReachedPod, name: str) -> list[Path]:
    return sorted(pod.folder.glob(f"homes/*/.tpunb/projects/project-*/{name}"))


@pytest.mark.skipif(shutil.which("rsync") is None, reason="there is no rsync here")
def test_rsync_copies_changed_files_if_both_ends_have_it(pod: ReachedPod) -> None:
    folder = pod.project / "nested dir"
    folder.mkdir()
    (folder / "one two.dat").write_text("one")
    (pod.project / "left.dat").write_text("left")
    pod.set_place(files=["nested dir", "*.dat", "- left*"])
    assert shutil.which("rsync") is not None
    for host in pod.names:
        pod.change(host, path=os.environ["PATH"])
    assert send(pod, rsync=True) == ["copying 1 file, 3 B, to 2 hosts"]
    assert [path.read_text() for path in there(pod, "nested dir/one two.dat")] == ["one"] * 2
    assert there(pod, "left.dat") == []
    (folder / "one two.dat").write_text("longer")
    send(pod, rsync=True)
    assert [path.read_text() for path in there(pod, "nested dir/one two.dat")] == ["longer"] * 2
    pod.set_place(files=["nested dir"], folder=blocked(pod))
    with pytest.raises(HostsError, match=r"h0(, h1)?: .*Not a directory"):
        send(pod, rsync=True)


def test_copy_failure_names_the_hosts(pod: ReachedPod) -> None:
    (pod.project / "one.txt").write_text("one")
    pod.set_place(files=["*.txt"], folder=blocked(pod))
    with pytest.raises(HostsError, match=r"h0, h1: .*Not a directory"):
        send(pod)


def test_copy_can_be_cancelled(pod: ReachedPod) -> None:
    (pod.project / "one.txt").write_text("one")
    pod.set_place(files=["*.txt"])
    with pytest.raises(Cancelled):
        send(pod, cancelled=True)
