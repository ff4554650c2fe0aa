"""Rules on notebooks of TorchTPU and of plain torch.distributed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.notebook.lint.notebooks import notebook
from tpunb.notebook.lint.findings import Finding
from tpunb.notebook.lint.linter import lint
from tpunb.runs.spec import BackendName

IMPORTS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""
PLAIN = """\
%%tpu_train
dist.init_process_group("{group}")
model = nn.Linear(2, 2){to}
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(train_data, 8, shuffle=True)
for x, y in loader:
    optimizer.zero_grad()
    loss = model(x{to}).sum()
    loss.backward()
    optimizer.step()
    print(loss.item())
torch.save(model.state_dict(), "model.pt")
"""


def found(backend: BackendName, *cells: str) -> list[Finding]:
    return lint(notebook(*cells), {"train_data"}, backend=backend)


@pytest.mark.parametrize(
    ("backend", "group", "to"), [("torchtpu", "tpu_dist", ".to('tpu')"), ("torch", "gloo", "")]
)
def test_ranks_that_train_apart(backend: BackendName, group: str, to: str) -> None:
    slow = {"host-sync-in-step", "last-batch"}  # on a TPU
    findings = found(backend, IMPORTS, PLAIN.format(group=group, to=to))
    assert [finding.rule for finding in findings if finding.rule not in slow] == [
        "no-sampler",
        "no-gradient-reduction",
        "file-of-all-ranks",
    ]
    assert not any("xla" in finding.fix or "xm." in finding.fix for finding in findings)
    together = PLAIN.replace("model = nn", "model = DDP(nn").replace("{to}\nopt", "{to})\nopt")
    together = together.replace("shuffle=True", "sampler=DistributedSampler(train_data)")
    findings = found(backend, IMPORTS, together.format(group=group, to=to))
    rules = [finding.rule for finding in findings if finding.rule not in slow]
    assert rules == ["file-of-all-ranks"]


APART = PLAIN.format(group="tpu_dist", to=".to('tpu')")
TOGETHER = (
    APART.replace("model = nn.Linear(2, 2).to('tpu')", "model = DDP(nn.Linear(2, 2).to('tpu'))")
    .replace("shuffle=True", "sampler=(sampler := DistributedSampler(train_data))")
    .replace("for x, y", "for epoch in range(3):\n  sampler.set_epoch(epoch)\n  for x, y")
    .replace("\n    ", "\n      ")
)
EARLY = """\
%%tpu_train
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model.to(torch.device("tpu"))
"""


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("other", "cell", "rules"),
    [
        (TOGETHER, APART, {"no-sampler", "no-gradient-reduction"}),
        (
            "%%tpu_train\nmodel = nn.Linear(2, 2).to(torch.device('tpu'))",
            EARLY,
            {"optimizer-before-device"},
        ),
        ("def evaluate(model):\n    model = model.to('tpu')", EARLY, {"optimizer-before-device"}),
        ("%%tpu_debug\n" + TOGETHER.partition("\n")[2], APART, {"no-sampler"}),
    ],
    ids=["apart", "moved", "moved-parameter", "debugged"],
)
def test_what_another_cell_does_is_no_evidence(
    other: str, cell: str, rules: set[str], before: bool
) -> None:
    """All rules find in a notebook with two train cells what they find in each of them alone."""
    cells = (IMPORTS, other, cell) if before else (IMPORTS, cell, other)
    number = 3 if before else 2
    both = [f for f in found("torchtpu", *cells) if f.cell == number]
    alone = [f for f in found("torchtpu", IMPORTS, cell) if f.cell == 2]
    assert rules <= {f.rule for f in both}
    key = [(f.rule, f.line, f.message) for f in alone]
    assert [(f.rule, f.line, f.message) for f in both] == key
    run = replace(notebook(*cells), train=number - 1)
    own = lint(run, {"train_data"}, backend="torchtpu", own=True)
    assert [(f.rule, f.line, f.message) for f in own if f.cell == number] == key
    assert all(f.cell == number for f in own)  # the other one is not this run's


def test_a_barrier_of_some_ranks_is_certain_without_torch_xla() -> None:
    cell = "%%tpu_train\nif dist.get_rank() == 0:\n    dist.barrier()"
    assert [f.certain for f in found("torchtpu", IMPORTS, cell)] == [True]
    assert [f.certain for f in found("xla", IMPORTS, cell)] == [False]


TRAINING = """\
%%tpu_train
device = torch.device("tpu")
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model.to(device)
loader = DataLoader(train_data, 8, sampler=DistributedSampler(train_data))
parallel = DDP(model)
for x, y in loader:
    x = x.to(device)
    loss = parallel(x[x > 0]).sum()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def test_what_is_slow_or_silently_wrong_on_any_tpu() -> None:
    """The rules of torch_xla that are as true of TorchTPU, with its fixes."""
    rules = {
        "optimizer-before-device": 4,
        "last-batch": 6,
        "changing-shape": 10,
        "host-sync-in-step": 13,
    }
    findings = {f.rule: f for f in found("torchtpu", IMPORTS, TRAINING)}
    assert {rule: findings[rule].line for rule in rules} == rules
    assert not any("xla" in f.fix or "xm." in f.fix for f in findings.values())
    on_the_cpu = TRAINING.replace('"tpu"', '"cpu"')
    assert not rules.keys() & {f.rule for f in found("torchtpu", IMPORTS, on_the_cpu)}
    assert not rules.keys() & {f.rule for f in found("torch", IMPORTS, TRAINING)}
    collate = "def collate(rows):\n    return tokenizer(rows, padding=True)"
    assert "dynamic-padding" in {f.rule for f in found("torchtpu", IMPORTS, collate)}
    assert "dynamic-padding" not in {f.rule for f in found("torch", IMPORTS, collate)}
