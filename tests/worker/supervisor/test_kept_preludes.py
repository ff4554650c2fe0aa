"""Copies that a supervisor accepts as kept preludes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpunb.runs.directory import RunDir
from tpunb.runs.protocol import PreludeKept
from tpunb.runs.spec import Block, RunSpec
from tpunb.worker.supervisor.kept_preludes import KeptPreludes


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptPreludes]:
    """Kept preludes after a run with one prelude cell has begun."""
    folder = RunDir(tmp_path)
    folder.script.write_text("a = 1\nb = a\n")
    blocks = (Block("prelude", 1, 1, 0, 1), Block("train", 2, 2, 1, 2))
    spec = RunSpec("id", "run", 1, "CPU", str(tmp_path), (), blocks)
    folder.write_spec(spec)
    preludes = KeptPreludes()
    assert preludes.begin(folder, spec, {}, print) is None
    yield preludes
    preludes.close_sockets()
    for kept in preludes._kept:
        kept.channel.close()


def copy(number: int) -> PreludeKept:
    """This process stands in for a copy, which gets no signals in these tests."""
    return PreludeKept(os.getpid(), number, cells=1, seconds=1.0, modules={}, folders=[])


def test_prelude_copy_announced_after_its_run_is_not_kept(kept: KeptPreludes) -> None:
    first = kept.next_copy
    (theirs,) = kept.make_sockets(1)
    kept.close_sockets()
    kept.add(copy(first))
    assert kept.processes == []
    assert theirs.recv(1) == b""  # by which the copy knows that nobody will ask it
    theirs.close()


def test_prelude_copy_of_an_old_run_is_not_kept_for_the_next(kept: KeptPreludes) -> None:
    late = kept.next_copy
    sockets = kept.make_sockets(1)
    kept.close_sockets()
    sockets += kept.make_sockets(1)
    kept.add(copy(late))
    assert kept.processes == []
    kept.add(copy(late + 1))
    assert len(kept.processes) == 1
    for each in sockets:
        each.close()
