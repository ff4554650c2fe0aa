"""The table of retired names is true of the installed torch_xla."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tpunb.notebook import removed_apis

PROBE = r"""
import importlib, json, os, sys
from tpunb.notebook import removed_apis

os.environ["PJRT_DEVICE"] = "CPU"

def find(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found
    return None

import torch_xla
report = {
    "version": torch_xla.__version__,
    "there": {
        row.old: find(row.old) is not None for row in removed_apis.NAMES + removed_apis.MODULES
    },
    "new": {
        row.new: find(row.new) is not None
        for row in removed_apis.NAMES + removed_apis.MODULES
        if row.new
    },
    "followed": {
        row.old: (name := removed_apis.lookup_name(row.old).new) is None or find(name) is not None
        for row in removed_apis.NAMES + removed_apis.MODULES
    },
}
from tpunb.backends.xla import restored_names
restored_names.restore()
importlib.reload(sys.modules["torch_xla.experimental"])
report["restored"] = {
    row.old: find(row.old) is not None for row in removed_apis.NAMES + removed_apis.MODULES
}
print("REPORT" + json.dumps(report))
"""

BF16 = """
import torch, torch_xla
print("VALUE", (torch.tensor(1.0, device="xla") * 1.001).item())
"""


def run(code: str, **variables: str) -> str:
    environment = {**os.environ, "PJRT_DEVICE": "CPU", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_row_is_there_twice() -> None:
    names = [row.old for row in removed_apis.NAMES + removed_apis.MODULES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("torch_xla_py.xla_model.get_ordinal", "torch_xla.runtime.global_ordinal"),
        ("torch_xla_py.xla_model.optimizer_step", "torch_xla.core.xla_model.optimizer_step"),
        ("torch_xla.experimental.pjrt.global_ordinal", "torch_xla.runtime.global_ordinal"),
        ("torch_xla.experimental.xla_sharding", "torch_xla.distributed.spmd.xla_sharding"),
        ("torch_xla.distributed.xla_dist.ClusterResolver", None),
    ],
)
def test_a_name_is_followed_through_modules_to_a_current_one(name: str, new: str | None) -> None:
    found = removed_apis.lookup_name(name)
    assert found is not None
    assert (found.old, found.new) == (name, new)


@pytest.mark.parametrize(
    "name", ["torch_xla.core.xla_model.optimizer_step", "torch_xla", "my.xla_device"]
)
def test_nothing_is_known_against_current_and_foreign_names(name: str) -> None:
    assert removed_apis.lookup_name(name) is None
