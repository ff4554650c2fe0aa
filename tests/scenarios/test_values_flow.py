"""What one train cell brought into the kernel is there for later cells and later train cells."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.drivers.kernel import Kernel, Ran, kernel, until
from tests.support import is_kept

LOAD = "%load_ext tpunb\n%tpu_setup --cores 2\nimport os, pathlib, time, torch, tpunb"
MODEL = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
model = Net()
"""
ADD = "%%tpu_train --returns model{}\nmodel.weight.data += {}"
SHOW = "%%tpu_train\nprint('weight', *model.weight.tolist())"


@pytest.fixture(scope="module")
def shared(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("lab")) as made:
        made.run(LOAD, "load").good()
        made.run(MODEL, "model").good()
        yield made


@pytest.fixture
def nb(shared: Kernel) -> Iterator[Kernel]:
    """The kernel with the first two cells; those that a test adds are deleted after it."""
    shared.cells = {"load": LOAD, "model": MODEL}
    shared.run(MODEL, "model").good()
    yield shared
    until(lambda: not shared.working(), "no run goes on")


def cell(nb: Kernel, source: str, name: str) -> Ran:
    """Run a cell of this test: names of cells of another one are other cells."""
    test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].partition(" ")[0]
    return nb.run(dedent(source), f"{test.partition('@')[0][-40:]}-{name}")


def test_returned_model_is_trained_further_by_the_next_train_cell(nb: Kernel) -> None:
    cell(nb, ADD.format(" --out res", 1), "pretrain").good()
    cell(nb, "tpunb.last_run.metrics()\nres.plot", "look").good()
    cell(nb, "before = model.weight.sum().item() + len(res.returns)", "evaluate").good()
    assert "weight 1.0 1.0" in cell(nb, SHOW, "show").good().printed()
    cell(nb, "%%tpu_train --returns model\nmodel.weight.data *= before", "tune").good()
    assert nb.value("model.weight.tolist()") == [3.0, 3.0]
    shown = cell(nb, "%%tpu_train\nprint(*model.weight.tolist(), res.state, before)", "last")
    assert "3.0 3.0 succeeded 3.0" in shown.good().printed()


def test_train_cells_above_neither_run_again_nor_cost_memory(nb: Kernel) -> None:
    kept = []
    for number in range(4):
        ran = cell(nb, f"%%tpu_train\nprint('train', {number})", f"train-{number}").good()
        kept.append(sum(map(is_kept, nb.processes())))
        if number:
            assert "prelude: 2 of 2 cells reused" in ran.printed()
            assert not re.search(r"cells? (\[\d+\] )?runs?\b|kept for the next", ran.printed())
    assert len(set(kept[1:])) == 1, kept


def test_returned_value_of_a_failed_train_cell_is_noted_as_missing(nb: Kernel) -> None:
    ran = cell(nb, ADD.format("\n1 / 0", 1), "one")
    assert "ZeroDivisionError" in ran.red_line
    shown = cell(nb, SHOW, "show").good()
    assert "weight 0.0 0.0" in shown.printed()
    assert f"the train cell reads `model` as it is above cell [{ran.number}]" in shown.printed()
