"""Files that travel: which ones, and that only what has changed does."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.drivers.pods import ReachedPod
from tpunb.places import target, transfer
from tpunb.places.errors import HostsError, PlaceError
from tpunb.places.place import Cancelled
from tpunb.places.transfer import chosen_files
from tpunb.places.transport import make_transport


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
def test_rules(root: Path, rules: list[str], names: list[str]) -> None:
    assert chosen_files(root, rules) == names


@pytest.mark.parametrize("rule", ["../x", "/etc/passwd", "src/../../x"])
def test_nothing_from_elsewhere_travels(root: Path, rule: str) -> None:
    with pytest.raises(PlaceError, match="must be below"):
        chosen_files(root, [rule])


def test_a_rule_that_names_nothing_is_said(root: Path) -> None:
    with pytest.raises(PlaceError, match=r"there is none in"):
        chosen_files(root, ["*.txt"])


def send(pod: ReachedPod, *, cancelled: bool = False, rsync: bool = False) -> list[str]:
    found = target.find_target("pod", pod.project, print, lambda: False)
    placed = replace(found.placed("run", detached=False), rsync=rsync)
    told: list[str] = []
    transport = make_transport(placed.place)
    transfer.send_files(transport, placed, told.append, lambda: cancelled)
    return told


def blocked(pod: ReachedPod) -> str:
    """A folder that no host can make."""
    (pod.folder / "file").write_text("in the way")
    return f"{pod.folder}/file/tpunb"


def there(pod: ReachedPod, name: str) -> list[Path]:
    return sorted(pod.folder.glob(f"homes/*/.tpunb/work/project-*/{name}"))


def test_only_what_has_changed_is_sent(pod: ReachedPod) -> None:
    one, two = pod.project / "one.txt", pod.project / "two.txt"
    one.write_text("one")
    two.write_text("two")
    pod.set_place(files=["*.txt"])
    assert send(pod) == ["copying 2 files, 6 B, to 2 hosts"]
    assert [path.read_text() for path in there(pod, "one.txt")] == ["one", "one"]
    kept = there(pod, "two.txt")
    for path in kept:
        status = path.stat()
        path.write_text("TWO")  # of the same size and time: nobody sees it
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    one.write_text("another")
    send(pod)
    assert [path.read_text() for path in there(pod, "one.txt")] == ["another"] * 2
    assert [path.read_text() for path in kept] == ["TWO"] * 2
    there(pod, "one.txt")[1].unlink()  # one host lacks it
    send(pod)
    assert [path.read_text() for path in there(pod, "one.txt")] == ["another"] * 2


@pytest.mark.skipif(shutil.which("rsync") is None, reason="there is no rsync here")
def test_rsync_brings_what_has_changed_where_both_ends_have_it(pod: ReachedPod) -> None:
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
    with pytest.raises(HostsError, match=r"h0(, h1)?: rsync"):
        send(pod, rsync=True)


def test_a_host_that_cannot_take_them_is_named(pod: ReachedPod) -> None:
    (pod.project / "one.txt").write_text("one")
    pod.set_place(files=["*.txt"], folder=blocked(pod))
    with pytest.raises(HostsError, match=r"h0, h1: .*Not a directory"):
        send(pod)


def test_copying_can_be_left(pod: ReachedPod) -> None:
    (pod.project / "one.txt").write_text("one")
    pod.set_place(files=["*.txt"])
    with pytest.raises(Cancelled):
        send(pod, cancelled=True)
