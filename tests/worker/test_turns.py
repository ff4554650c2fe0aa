"""Who has a device, among processes that come, go and die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import ROOT
from tpunb.worker import turns
from tpunb.worker.turns import Turn

TAKES = """
import sys
from pathlib import Path
from tpunb.worker.turns import Turn
turn = Turn("chips", {"run": sys.argv[2]}, Path(sys.argv[1]))
print("has" if turn.holder() is None else "waits", flush=True)
sys.stdin.readline()
"""


def test_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    first, second, third = (Turn("chips", {"run": n}, tmp_path) for n in range(3))
    other = Turn("other", {"run": 9}, tmp_path)
    assert first.holder() is None
    assert other.holder() is None
    assert second.holder() == {"run": 0}
    assert third.holder() == {"run": 0}
    second.leave()  # it was called off
    first.leave()
    assert third.holder() is None
    late = Turn("chips", {"run": 3}, tmp_path)
    assert late.holder() == {"run": 2}
    third.leave()
    assert late.holder() is None
    late.leave()
    other.leave()
    assert {path.name for path in tmp_path.iterdir()} == {"chips.lock", "other.lock"}


def test_nobody_waits_for_the_dead(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TAKES, str(tmp_path), "theirs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has\n"
        ours = Turn("chips", {"run": "ours"}, tmp_path)
        assert ours.holder() == {"run": "theirs"}
        process.kill()
        process.wait()
        assert ours.holder() is None
        ours.leave()
    assert [path.name for path in tmp_path.iterdir()] == ["chips.lock"]


def test_many_at_once_have_it_one_after_the_other(tmp_path: Path) -> None:
    """Each says whether it is the first when it comes: exactly one is, and then the next."""
    commands = [[sys.executable, "-c", TAKES, str(tmp_path), str(number)] for number in range(8)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    everyone = [
        subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        for c in commands
    ]
    said = [process.stdout.readline() for process in everyone if process.stdout is not None]
    assert sorted(said) == ["has\n", *["waits\n"] * 7]
    for process in everyone:
        process.communicate("\n")
    ours = Turn("chips", {}, tmp_path)
    assert ours.holder() is None
    ours.leave()


def test_the_place_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = turns.place()
    assert found.stat().st_mode & 0o777 == 0o700
    assert found.stat().st_uid == os.getuid()

    monkeypatch.setattr(turns, "Path", lambda text: tmp_path / Path(text).name)
    assert turns.place() == tmp_path / found.name
    (tmp_path / found.name).chmod(0o755)
    with pytest.raises(PermissionError, match="not a folder that is this user's alone"):
        turns.place()
    (tmp_path / found.name).rmdir()
    (tmp_path / found.name).symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        turns.place()
