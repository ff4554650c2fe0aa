"""Forks after each library that preludes import, and many forks between mixed work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.preludes import FORKED, REFUSED
from tests.drivers.ranks import Ranks
from tests.worker.test_fork_safety import OFTEN, check_fork, check_refusal

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("library", [name for name in FORKED if name not in OFTEN])
def test_fork_after_a_library_that_survives_it(ranks: Ranks, library: str) -> None:
    check_fork(ranks, library)


@pytest.mark.parametrize("library", [name for name in REFUSED if name not in OFTEN])
def test_fork_refused_after_a_library(ranks: Ranks, library: str) -> None:
    check_refusal(ranks, library)


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.timeout(3600)
def test_many_forks_between_mixed_work() -> None:  # `make bench` makes a thousand
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "tests.drivers.forks", "40"]
    env = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert (told["ends"], told["refused"]) == ({"exit 0": 40}, {}), done.stderr
