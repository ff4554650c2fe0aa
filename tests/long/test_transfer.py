"""More of tests/places/test_transfer.py, which takes longer."""

from __future__ import annotations

import os

from tests.drivers.pods import ReachedPod
from tests.places.conftest import _pod, pod
from tests.places.test_transfer import send, there


def test_copy_sends_only_changed_files(pod: ReachedPod) -> None:
    one, two = pod.project / "one.txt", pod.project / "two.txt"
    one.write_text("one")
    two.write_text("two")
    pod.set_place(files=["*.txt"])
    assert send(pod) == ["copying 2 files, 6 B, to 2 hosts"]
    assert [path.read_text() for path in there(pod, "one.txt")] == ["one", "one"]
    kept = there(pod, "two.txt")
    for path in kept:
        status = path.stat()
        path.write_text("TWO")  # same size and time: not noticed
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    one.write_text("another")
    send(pod)
    assert [path.read_text() for path in there(pod, "one.txt")] == ["another"] * 2
    assert [path.read_text() for path in kept] == ["TWO"] * 2
    there(pod, "one.txt")[1].unlink()  # one host lacks it
    send(pod)
    assert [path.read_text() for path in there(pod, "one.txt")] == ["another"] * 2
