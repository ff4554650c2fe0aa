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
            assert "prelude: both cells reused from the previous run" in ran.printed()
            assert not re.search(r"cells? (\[\d+\] )?runs?\b|kept for the next", ran.printed())
    assert len(set(kept[1:])) == 1, kept


def test_returns_option_missing_for_a_later_train_cell_is_explained(nb: Kernel) -> None:
    number = cell(nb, "%%tpu_train\nlosses = [1.0]", "one").good().number
    refused = cell(nb, "%%tpu_train\nprint(losses)", "two")
    assert (
        f"`losses` is defined only in cell [{number}], a train cell that does not return it: "
        f"add `--returns losses` to cell [{number}] and run it again"
    ) in refused.traceback
    cell(nb, "%%tpu_train --returns losses\nlosses = [1.0]", "one").good()
    assert "[1.0]" in cell(nb, "%%tpu_train\nprint(losses)", "two").good().printed()


def test_returned_value_of_a_failed_train_cell_is_noted_as_missing(nb: Kernel) -> None:
    ran = cell(nb, ADD.format("\n1 / 0", 1), "one")
    assert "ZeroDivisionError" in ran.red_line
    shown = cell(nb, SHOW, "show").good()
    assert "weight 0.0 0.0" in shown.printed()
    assert f"the train cell reads `model` as it is above cell [{ran.number}]" in shown.printed()


THREE = [
    "%load_ext tpunb\n%tpu_setup --cores 2",
    """
    import numpy as np, torch, torch_xla, tpunb
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from sklearn.datasets import load_digits
    from torch import nn
    torch.manual_seed(0)
    np.random.seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x))
    rows, test = order[:1200], order[1200:]
    def make(width):
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))
    def fit(net, rows, targets, lr):
        device = torch_xla.device()
        net = net.to(device).train()
        xm.broadcast_master_param(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        rank, ranks = xr.global_ordinal(), xr.world_size()
        for epoch in range(4):
            shuffled = rows[torch.as_tensor(np.random.permutation(len(rows)))]
            for batch in shuffled[torch.randperm(len(rows))].split(100):
                mine = batch.chunk(ranks)[rank]
                optimizer.zero_grad()
                outputs = net(x[mine].to(device))
                nn.functional.cross_entropy(outputs, targets[mine].to(device)).backward()
                xm.optimizer_step(optimizer)
                torch_xla.sync()
        return net
    def accuracy(net):
        net.eval()
        with torch.no_grad():
            return (net(x[test]).argmax(1) == y[test]).float().mean().item()
    """,
    "model = make(64)\nprint(f'untrained {accuracy(model):.6f}')",
    """
    %%tpu_train --returns model,few,large --out pretrained
    large = torch.arange(3 << 20)
    few = rows[y[rows] < 5][:500]
    model = fit(model, few, y, 0.1)
    tpunb.log(step=1, loss=0.5)
    """,
    "tpunb.last_run.metrics()",
    "before = accuracy(model)\nprint(f'pretrained {before:.6f} {len(pretrained.returns)}')",
    """
    %%tpu_train --returns model
    model = fit(model, rows, y, 0.1)
    """,
    """
    after = accuracy(model)
    with torch.no_grad():
        soft = torch.softmax(model(x) / 2, 1)
    print(f'fine-tuned {after:.6f}')
    """,
    """
    %%tpu_train --returns student
    def distil():
        global student
        student = fit(make(16), rows, soft, 0.3)
    torch_xla.launch(lambda index: distil())
    """,
    """
    total = sum(part.double().sum().item() for part in student.parameters())
    numbers = f'{before:.6f} {after:.6f} {accuracy(student):.6f} {total:.9f} {large.sum()}'
    """,
    "%%tpu_train\nprint('END', numbers)",
]


def ends(text: str) -> set[str]:
    """What the ranks have printed at the end."""
    return set(re.findall(r"END ([\d. ]+[\d])", text))
