"""A run sees what the kernel holds, or a line says what it does not see, in any session.

A session edits cells, executes them in any order and several times, changes values in place above
and below the train cell, and trains now and then. Each value that the train cell reads is then the
kernel's, or is named.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.drivers.edited_notebook import Notebook
from tpunb.kernel.marks import mark

SESSIONS = 200
START = """
import collections, dataclasses, functools, types
import numpy as np, torch
from torch import nn
@dataclasses.dataclass
class Config:
    lr: float = .1
    sizes: list = dataclasses.field(default_factory=list)
class Thing:
    scale = 1
    def get(self):
        return scale * self.scale
def loss(x):
    return x * scale
scale = 1
lr, steps, items, cfg = .1, 3, [1, 2], {'lr': .1, 'f': print, 'inner': {'k': [1]}}
conf, thing, space = Config(), Thing(), types.SimpleNamespace(a=1)
x, table = torch.zeros(3), np.arange(4)
net = nn.Linear(2, 2)
with torch.no_grad():
    net.weight.fill_(1), net.bias.fill_(0)
part, dd = functools.partial(loss, 1), collections.defaultdict(list)
other = items
"""
NAMES = (
    *("lr steps items cfg conf thing space x table net part dd other scale loss Thing".split()),
    *("made new".split()),
)
NAME = st.sampled_from("lr steps items cfg conf other made new".split())
NUMBER = st.sampled_from(["0", "1", "2", "0.5", "'a'", "None", "True"])
STATEMENTS = st.one_of(
    st.builds("{} = {}".format, NAME, NUMBER),
    st.builds("{} = {}".format, NAME, NAME),
    st.builds("{} = [{}, {}]".format, NAME, NAME, NUMBER),
    st.builds("items.append({})".format, NUMBER),
    st.builds("cfg['lr'] = {}".format, NUMBER),
    st.builds("cfg['inner']['k'].append({})".format, NUMBER),
    st.builds("conf.lr = {}".format, NUMBER),
    st.builds("conf.sizes.append({})".format, NUMBER),
    st.builds("conf = Config({})".format, NUMBER),
    st.builds("thing.extra = {}".format, NUMBER),
    st.builds("Thing.scale = {}".format, NUMBER),
    st.builds("space.a = {}".format, NUMBER),
    st.builds("x.add_({})".format, st.sampled_from("012")),
    st.builds("x = torch.full((3,), {})".format, st.sampled_from("012")),
    st.builds("table[{}] = 9".format, st.sampled_from("0123")),
    st.just("table = table + 1"),
    st.just("net.requires_grad_(False)"),
    st.just("net.eval()"),
    st.just("net.bias.data.add_(1)"),
    st.just(
        "net = nn.Linear(2, 2)\nwith torch.no_grad():\n    net.weight.zero_(); net.bias.zero_()"
    ),
    st.builds("dd['k'].append({})".format, NUMBER),
    st.builds("part = functools.partial(loss, {})".format, NUMBER),
    st.builds("def loss(x):\n    return x * scale + {}".format, NUMBER),
    st.builds("class Thing:\n    scale = {}\n    def get(self):\n        return 1".format, NUMBER),
    st.builds("scale = {}".format, st.sampled_from("123")),
    st.just("scale += 1"),
    st.just("made = loss(2)"),
    st.just("made = thing.get()"),
    st.just("new = list(items)"),
    st.just("def change():\n    global scale\n    scale = 7"),
    st.just("change()"),
    st.just("del new"),
    st.sampled_from(
        [
            "pass  # nothing",
            "made = (x.sum().item(), table.sum())",
            "made = lambda v: v * scale",
            "net.weight = nn.Parameter(net.weight * 2)",
            "net.weight.data = torch.zeros(2, 2)",
            "thing = Thing()",
            "if steps: lr = 3",
            "for lr in (1, 'a'): items.append(lr)",
            "items[:] = [5]; other = items",
            "cfg = {**cfg, 'lr': 4}",
            "new = cfg['inner']",
            "new = conf",
            "lr = cfg['lr']; steps = lr",
            "conf.sizes = items",
            "with torch.no_grad(): x[0] = 2",
            "table = table.copy()",
            "x = x.clone()",
            "conf.cb = loss",
            "items.sort(key=str)",
            "cfg.pop('lr', None)",
            "del cfg['f']",
        ]
    ),
)
CELL = st.sampled_from([f"cell {k}" for k in range(6)])
BELOW = ("cell 4", "cell 5")
trained: list[tuple[int, int, int]] = []
"""For each run: values that are the kernel's, values that are named, and silent differences."""


class Session(RuleBasedStateMachine):
    """One person's session."""

    @initialize()
    def start(self) -> None:
        cells = {"start": START} | {f"cell {k}": "" for k in range(6)}
        self.nb = Notebook(f"({', '.join(NAMES)})", cells, frozenset(BELOW))
        assert self.nb.run("start")

    @rule(name=CELL, source=STATEMENTS)
    def edit_and_run(self, name: str, source: str) -> None:
        self.nb.run(name, source)

    @rule(name=CELL)
    def run_again(self, name: str) -> None:
        if name in self.nb.numbers:
            self.nb.run(name)

    @rule()
    def run_all(self) -> None:
        for name in self.nb.above():
            self.nb.run(name)

    @precondition(lambda self: self.nb.ran > 4)
    @rule()
    def train(self) -> None:
        try:
            taken, ranks = self.nb.start()
        except (ArithmeticError, LookupError, TypeError, AttributeError, NameError, RuntimeError):
            return  # the cells do not run in the order in which they stand, and the run says so
        named = {left.partition(" ")[0].partition(".")[0].partition("[")[0] for left in taken.left}
        same = said = 0
        silent = []
        for name in NAMES:
            if name not in ranks:
                continue  # the conversion refuses the run, or it ends with a NameError
            if name in self.nb.kernel and _same(self.nb.kernel[name], ranks[name]):
                same += 1
            elif name in named:
                said += 1
            else:
                silent.append((name, self.nb.kernel.get(name), ranks.get(name), taken))
        trained.append((same, said, len(silent)))
        assert not silent, (silent, self.nb.cells)


def _same(kernel: Any, rank: Any) -> bool:
    return mark(_sorted(kernel)).hash == mark(_sorted(rank)).hash


def _sorted(value: Any) -> Any:
    return sorted(value.items()) if type(value) is dict and {*map(type, value)} == {str} else value


def test_a_run_has_the_kernels_values_or_names_them_in_any_session() -> None:
    machine = Session.TestCase
    machine.settings = settings(max_examples=SESSIONS, stateful_step_count=25, deadline=None)
    machine("runTest").runTest()
    assert len(trained) > SESSIONS
    assert sum(silent for _, _, silent in trained) == 0
    assert sum(same for same, _, _ in trained) > sum(said for _, said, _ in trained)
    sums = [sum(each) for each in zip(*trained, strict=True)]
    print(f"{len(trained)} runs; values the kernel's, named, silent:", *sums)
