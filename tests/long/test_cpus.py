"""More of tests/utils/test_cpus.py, which takes longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.utils.test_cpus import PINNED


@pytest.mark.usefixtures("starts_processes")
def test_what_a_thread_was_pinned_to_is_not_what_ranks_get() -> None:
    given = sorted(os.sched_getaffinity(0))
    if len(given) < 2:
        pytest.skip("one processor cannot be a part of the processors")
    env = {**os.environ, "OMP_PROC_BIND": "true"}
    ended = subprocess.run(
        [sys.executable, "-c", PINNED], env=env, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert len(found["thread"]) == 1  # OpenMP does it
    assert found["allowed"] == given
    assert len(found["started"]) >= 2
    assert all(each == given for each in found["started"])
    [told] = found["plan"]
    assert told.startswith(f"processors: all {len(given)} of the kernel's process, although ")
