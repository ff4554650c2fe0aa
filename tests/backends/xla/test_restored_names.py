"""Removed names of torch_xla that have an exact successor exist again."""

from __future__ import annotations

import pytest

from tests.support import Driver
from tpunb.backends.xla.restored_names import describe_used
from tpunb.runs.events import Note

PRELUDE = """
from torch_xla_py import xla_model as xm
from torch_xla.experimental import pjrt
import torch_xla.experimental.xla_sharding as xs
from torch_xla.core.xla_model import *
"""
TRAIN = """
import sys, torch_xla.core.xla_model as now
assert xm.optimizer_step is now.optimizer_step and xs.Mesh
sum_of_ranks = xm.all_reduce("sum", torch.ones(1, device=xm.xla_device())).item()
print("old", xm.get_ordinal(), xrt_world_size(defval=1), pjrt.world_size(), sum_of_ranks)
pjrt.spawn(lambda index: print("spawned", index), args=())
assert not hasattr(xm, "get_log_fn") and "torch_xla_py.nothing" not in sys.modules
"""


@pytest.mark.timeout(120)
def test_a_notebook_of_2020_runs_unchanged_and_is_told_todays_names(driver: Driver) -> None:
    seen = driver.run([PRELUDE], f"import torch\n{TRAIN}", ranks=2)
    assert seen.result.state == "succeeded", seen.result.failure
    for rank in (0, 1):
        assert {f"[{rank}] old {rank} 2 2 2.0", f"[{rank}] spawned {rank}"} <= {*seen.log}
    notes = [note.text for note in seen.of(Note) if "no longer has" in note.text]
    assert sorted(notes) == sorted(
        f"torch_xla no longer has {old}: write {new}"
        for old, new in {
            "torch_xla_py": "torch_xla",
            "torch_xla_py.xla_model": "torch_xla.core.xla_model",
            "torch_xla.experimental.pjrt": "torch_xla.runtime",
            "torch_xla.experimental.pjrt.spawn": (
                "torch_xla.distributed.xla_multiprocessing.spawn"
            ),
            "torch_xla.experimental.xla_sharding": "torch_xla.distributed.spmd.xla_sharding",
            "torch_xla.core.xla_model.get_ordinal": "torch_xla.runtime.global_ordinal",
            "torch_xla.core.xla_model.xrt_world_size": "torch_xla.runtime.world_size",
        }.items()
    )
    assert describe_used() == []  # in this process nothing was used
