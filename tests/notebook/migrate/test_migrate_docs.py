"""The tables of docs/migrate.md are those of the code."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.notebook.migrate.notebooks import notebook
from tpunb.notebook import removed_apis
from tpunb.notebook.migrate import migrate
from tpunb.notebook.migrate.torchtpu.calls import AMP, AUTOCAST, CALLS, NAMED, VALUES
from tpunb.notebook.migrate.torchtpu.table import BY_HAND, REWRITTEN, Replacement
from tpunb.notebook.removed_apis import PL
from tpunb.notebook.scopes import XM

DOCS = Path(__file__).parents[3] / "docs" / "migrate.md"


@pytest.mark.parametrize("table", ["NAMES", "MODULES", "VARIABLES"])
def test_each_row_of_the_code_is_in_the_docs(table: str) -> None:
    lines = DOCS.read_text().splitlines()
    for row in getattr(removed_apis, table):
        now = f"`{row.new}`" if row.new else row.advice
        assert f"| `{row.old}` | {now} | {row.state} |" in lines


def test_the_docs_have_no_other_rows() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    tables = (removed_apis.NAMES, removed_apis.MODULES, removed_apis.VARIABLES)
    assert len(rows) == sum(map(len, tables)) + len(REWRITTEN) + len(BY_HAND)


HEAD = """\
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
"""
TRAIN = """\
def train(index):
    device = torch_xla.device()
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in pl.MpDeviceLoader(loader, device):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        xm.optimizer_step(optimizer)
    xm.master_print(loss.item())
"""


def test_the_example_for_torchtpu_is_what_a_migration_makes() -> None:
    cells = [HEAD, TRAIN, "torch_xla.launch(train)"]
    diff = migrate(notebook("%load_ext tpunb", *cells), to="torchtpu").diff()
    assert f"```diff\n{diff}```\n" in DOCS.read_text()


def test_the_names_for_torchtpu_are_in_the_docs() -> None:
    lines = DOCS.read_text().splitlines()
    for row in REWRITTEN:
        assert f"| `{row.old}` | {row.new} |" in lines
    for name, what in BY_HAND.items():
        assert f"| `{name}` | {what} |" in lines


def test_the_names_for_torchtpu_are_those_that_are_rewritten() -> None:
    """A call of `torch.autocast` is the current form of torch_xla's own."""
    rewritten = {*CALLS, *NAMED, *VALUES} - {AUTOCAST}
    private = {name for name in rewritten if "._XLAC." in name}
    documented = (
        private
        | {row.old for row in REWRITTEN}
        | {f"{XM}._fetch_gradients", f"{PL}.ParallelLoader"}
    )
    assert rewritten | {f"{AMP}.autocast"} == documented


@pytest.mark.parametrize("row", REWRITTEN, ids=lambda row: row.old)
def test_torch_xla_has_the_names_that_are_rewritten(row: Replacement) -> None:
    module, _, name = row.old.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
