"""The plain values that a train cell reads, found in the namespace that the prelude has made."""

from __future__ import annotations

import pytest

from tests.support import Driver
from tpunb.runs.directory import RunDir
from tpunb.runs.parameters import parameters

ABOVE = """
import argparse, dataclasses, types
lr, epochs = 0.002, 3
name: str = "x"
api_key, long, _hidden, unread = "abc", "x" * 300, 1, 2
hub = "hf_" + "a" * 30
step = total = 7
width = len("abc")
config = dict(depth=2, inner={"a": 1}, layers=[1, 2], token="secret")
args = argparse.Namespace(batch=4)
space = types.SimpleNamespace(decay=0.5, f=len)

class CFG:
    dropout = 0.1
    def_ = [1]

@dataclasses.dataclass
class Options:
    warmup: int = 10
options = Options()

class Net:
    def __init__(self):
        self.width = width
        self.bias = bias

bias = True
net = Net()
factor = 3

def train(loss):
    def inner():
        return lr * factor
    return inner() * loss.scale
scale = 9
"""
TRAIN = """
step = 0
for epoch in range(epochs):
    step += 1
total += 1
print(api_key, long, _hidden, hub, name, config, args, space, CFG, options)
train(type("L", (), {"scale": 2}))
Net()
"""


def test_values_that_the_cell_reads_itself_or_in_functions_and_classes(driver: Driver) -> None:
    seen = driver.run([ABOVE], TRAIN, ranks=1)
    assert seen.result.state == "succeeded", seen.result.failure
    assert seen.result.parameters == {
        "epochs": 3,
        "total": 7,
        "name": "x",
        "config.depth": 2,
        "args.batch": 4,
        "space.decay": 0.5,
        "CFG.dropout": 0.1,
        "options.warmup": 10,
        "lr": 0.002,
        "factor": 3,
        "width": 3,
        "bias": True,
    }
    assert parameters(RunDir(seen.result.dir)) == seen.result.parameters


@pytest.mark.parametrize("replicate", [None, "wanted"])
def test_they_are_those_of_the_run_in_which_the_cell_begins(
    driver: Driver, replicate: str | None
) -> None:
    seen = driver.run(["lr = 1", "lr += 1"], "print(lr); lr = 7", replicate=replicate)
    assert seen.result.parameters == {"lr": 2}
