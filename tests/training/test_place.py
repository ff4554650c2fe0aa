"""Which rank this is, before and after the XLA runtime is in use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tpunb.training.place import is_first, rank_and_world


def test_outside_of_a_run_there_is_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert rank_and_world() == (0, 1)
    assert is_first()


ASKED = """
import os
from tpunb.training.place import is_first, rank_and_world
assert rank_and_world() == (2, 4) and not is_first()
import torch_xla
import torch_xla.core.xla_model as xm
assert rank_and_world() == (2, 4)
assert not torch_xla._XLAC._xla_runtime_is_initialized(), "the question has started it"
torch_xla.device()
assert rank_and_world() == (0, 1), "XLA's own number is the one of its collectives"
os._exit(0)
"""


@pytest.mark.slow
def test_the_runtime_is_asked_when_it_runs_and_not_started() -> None:
    env = {**os.environ, "PJRT_DEVICE": "CPU", "RANK": "2", "WORLD_SIZE": "4"}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
