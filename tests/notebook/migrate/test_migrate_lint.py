"""After a migration lint finds nothing worse, and no name has lost its definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.migrate.notebooks import notebook
from tpunb.notebook.lint.findings import Finding
from tpunb.notebook.lint.linter import lint
from tpunb.notebook.migrate import migrate
from tpunb.notebook.migrate.report import text_of
from tpunb.notebook.models import Cell, Snapshot

ROOT = Path(__file__).parents[3]
SETUP_OF_2020 = """
import collections, requests, threading
_VersionConfig = collections.namedtuple('_VersionConfig', 'wheels,server')
VERSION = 'torch_xla==nightly'
CONFIG = {'torch_xla==nightly': _VersionConfig('nightly', 'XRT')}[VERSION]
DIST_BUCKET = 'gs://tpu-pytorch/wheels'
def update_server_xrt():
    print('updating')
update = threading.Thread(target=update_server_xrt)
update.start()
!gsutil cp "$DIST_BUCKET/$TORCH_WHEEL" .
update.join()
"""
OLD = [
    ["from torch_xla.core.xla_model import XlaModel, get_log_fn", "m = XlaModel(1)\nget_log_fn()"],
    ["import torch_xla.distributed.xla_dist as xd", "xd.main()"],
    ["from torch_xla.distributed import xla_dist", "def f():\n    xla_dist.main()\nf()"],
    ["from torch_xla.amp import GradScaler, syncfree", "GradScaler().scale(syncfree.SGD([1]))"],
    ["import torch_xla_py.xla_model as xm\nimport torch_xla_py.utils as xu", "xu.f(xm.save)"],
    ["try:\n    from torch_xla.amp import GradScaler as G\nexcept ImportError:\n    G = None", "G"],
    ["VERSION = !curl -s x\n!python env-setup.py --version $VERSION", "print(VERSION)"],
    [SETUP_OF_2020, "print(CONFIG, requests)"],
    ["import os\naddress = 'grpc://' + os.environ['COLAB_TPU_ADDR']", "print(address)"],
    ["import torch_xla.experimental.pjrt as pjrt", "pjrt.world_size()\npjrt.other()"],
]


def findings(made: Mapping[str, Any]) -> list[Finding]:
    code = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    cells = (Cell(at, "code", text_of(cell), at + 1) for at, cell in enumerate(code))
    return lint(Snapshot(tuple(cells), None, None, "a test"))


def undefined(found: list[Finding]) -> list[str]:
    return [finding.message for finding in found if finding.rule == "undefined-name"]


def assert_not_worse(before: Mapping[str, Any]) -> None:
    old = findings(before)
    for train in (False, True):
        new = findings(migrate(before, train=train).notebook)
        assert len(undefined(new)) <= len(undefined(old))
        counts, after = (Counter(f.severity for f in found) for found in (old, new))
        if not train:  # in a train cell the rules look for more
            assert after["error"] <= counts["error"]
            assert after["error"] + after["warning"] <= counts["error"] + counts["warning"]


@pytest.mark.parametrize("sources", OLD, ids=lambda sources: sources[0].strip().split("\n")[0])
def test_pieces_of_old_notebooks(sources: list[str]) -> None:
    assert_not_worse(notebook(*sources))
