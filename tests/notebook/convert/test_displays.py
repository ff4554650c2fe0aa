"""Cells that only draw or display are found, and without them the others compute the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.notebook.convert.notebooks import notebook
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.convert.displays import find_display_cells
from tpunb.notebook.models import LeftOut

PRELUDE = """\
import random
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader

table = pd.DataFrame({"a": [1, 2, 3], "b": [4.0, 5.0, 6.0]})
images = torch.rand(4, 8, 8)
losses = []
groups = {"train": DataLoader(images, shuffle=True)}
loader = DataLoader(images, shuffle=True)
once = (x for x in [1, 2, 3])
rows = table.iterrows()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
model = Net().to("cpu")
def show(x):
    print(x)
    return np.random.rand()
"""
TRAIN = "# magic: %%tpu_train --returns answer\nprint(table, model, torch.rand(1))"

DISPLAYS = [
    "table",
    "loader",
    "model.linear.weight.shape",
    "table.head()",
    "table.describe().T",
    "table['a'].value_counts(normalize=True).head(3)",
    "table[table.a > 1].groupby('a').agg({'b': 'mean'})",
    "table.info()",
    "print(table.to_string(), len(loader), sep='\\n')",
    "print(f'{len(images):>8} images, {images.mean().item():.3f}', end='')",
    "print('%d of %d' % (len(table), len(images)))",
    "print('{} {}'.format(model, loader))",
    "print(*losses[-3:])",
    "print(sum(p.numel() for p in model.parameters()) / 1e6)",
    "for name, p in model.named_parameters():\n    print(name, tuple(p.shape), p.dtype)",
    "for i, row in enumerate(images):\n    if i == 1:\n        print(i, row.sum())",
    "with torch.no_grad():\n    print(images.max())",
    "fig, ax = plt.subplots(figsize=(3, 3))\nax.plot(table.a, table.b, label='x')\nax.legend()",
    "f, axes = plt.subplots(1, 4)\nfor a, image in zip(axes.flat, images):\n    a.imshow(image)",
    "plt.hist(losses, bins=3)\nplt.title('losses')\nplt.show()",
    "table.plot(x='a', y='b')",
    "table.plot.scatter(x='a', y='b')\nplt.show()",
    "table['a'].hist()",
    "import pandas as pandas\ncounts = table['a'].value_counts()\ncounts.sort_index()",
    "table = 5\ntable",
]
"""Each leaves what the others read as it is, but the last one, which the train cell reads."""

OTHERS = {
    "an unknown function": "show(table)",
    "one that is given": "table.apply(show)",
    "one in a comprehension": "print([show(x) for x in losses])",
    "random numbers": "print(torch.rand(1))",
    "random numbers of numpy": "print(np.random.rand())",
    "random numbers of Python": "print(random.random())",
    "rows by chance": "table.sample(1)",
    "a shuffled loader": "for x in loader:\n    print(x)",
    "a shuffled loader in a dict": "for x in groups['train']:\n    print(x)",
    "a loader unpacked": "print(*loader)",
    "a search in a loader": "print(3 in loader)",
    "an item of a dataset": "print(loader.dataset[0], loader[0])",
    "the next": "print(next(iter(loader)))",
    "a generator": "print(list(once))",
    "the rows of a table": "for i, row in rows:\n    print(row)",
    "a change in place": "table.drop(columns='b', inplace=True)",
    "a change of mode": "model.eval()",
    "a file": "table.plot()\nplt.savefig('x.png')",
    "a file of a table": "table.to_string('x.txt')",
    "a setting": "plt.style.use('ggplot')\nplt.plot([1])",
    "a seed": "torch.manual_seed(0)",
    "nothing displayed": "unused = 5",
    "imports alone": "import numpy as np",
    "a check": "assert len(table)",
    "a name that the run reads": "table = table.dropna()\ntable.head()",
    "a name that the train cell returns": "answer = table.a.sum()\nanswer",
    "an item": "losses[0] = 1\nlosses",
    "an attribute": "table.x = 1\ntable",
    "a deletion": "del losses\ntable",
    "an unknown module": "import mymodule\ntable",
}


def only_displays(cell: str, *others: str, results: tuple[str, ...] = ()) -> bool:
    cells = [PRELUDE, cell, *others, TRAIN]
    return 1 in find_display_cells(cells, [True] * (len(cells) - 1) + [False], results)


@pytest.mark.parametrize("cell", DISPLAYS[:-1])
def test_left_out(cell: str) -> None:
    assert only_displays(cell)


@pytest.mark.parametrize("cell", OTHERS.values(), ids=OTHERS)
def test_kept(cell: str) -> None:
    assert not only_displays(cell)


@pytest.mark.parametrize(
    ("cell", "below"),
    [
        ("n = table.a.sum()\nprint(n)", "total = n"),
        ("n = table.a.sum()\nprint(n)", "def f():\n    return n"),
        ("n = table.a.sum()\nprint(n)", "chosen = table.query('a > @n')"),
        ("n = table.a.sum()\nprint(n)", "names = globals()"),
        ("for n in range(3):\n    print(n)", "n += 1"),
        ("for n in range(3):\n    print(n)", "for x in losses:\n    n = x\nprint(n, show(n))"),
        ("import json\nprint(json.dumps([1]))", "kept = json.dumps([show(2)])"),
        ("plt.plot([1, 2])", "plt.plot([2, 1])\nplt.savefig('x.png')"),
        ("plt.plot([1, 2])", "def draw():\n    plt.plot([2, 1])"),
        ("print(table.head())", "def print(x):\n    table.clear(x)"),
        ("print(table['a'])", "table = show(table)"),
    ],
)
def test_what_other_cells_do_keeps_a_cell(cell: str, below: str) -> None:
    assert only_displays(cell)
    assert not only_displays(cell, below)


def test_a_name_may_be_used_for_something_else_later() -> None:
    assert only_displays("for n in range(3):\n    print(n)", "for n in losses:\n    show(n)")
    assert only_displays("fig = plt.figure()\nfig.suptitle('x')", "fig = show(3)\nshow(fig)")
    assert only_displays("table.head()", "plt.style.use('ggplot')")


def test_what_a_run_has_left_is_looked_at() -> None:
    for cell in ("result", "result.plot()", "result.metrics().describe()", "result.cores()"):
        assert only_displays(cell, results=("result",))
    assert not only_displays("result.raise_for_failure()", results=("result",))
    assert only_displays("import tpunb\ntpunb.runs()[['state']]")
    assert only_displays("import tpunb\nrun = tpunb.last_run\nprint(run.metrics().loss.mean())")
    assert only_displays("accuracy")  # only the train cell above has made it


def test_after_a_star_import_names_alone_are_certain() -> None:
    star = "from fastai.vision.all import *"
    assert only_displays("model", star)
    assert not only_displays("print(len(table))", star)
    assert not only_displays("table.head()", star)


def test_it_is_said_where_the_cell_was() -> None:
    cells = ["x = 1", "# look\nx\n", "%%tpu_train\nprint(x)"]
    script = convert(notebook(*cells), {})
    (omission,) = script.omissions
    assert (omission.cell, omission.line, omission.text) == (2, 1, "# look")
    assert omission.reason is LeftOut.ONLY_DISPLAYS
    assert f"# cell [2] is left out, {LeftOut.ONLY_DISPLAYS}: # look" in script.text
    assert [block.cell for block in script.blocks] == [None, 0, 2]
    assert not convert(notebook(*cells)).omissions  # by itself it shows what it computes


STEPS = [
    "losses.append(torch.rand(1).item())",
    "table['c'] = np.random.rand(3)\nfor i, row in enumerate(losses):\n    table['c'] += row",
    "torch.manual_seed(len(losses))",
    "counts = table.a.value_counts()\nlosses += counts.tolist()",
    "table = table.assign(a=table.a + random.random())",
    "x = show(losses)\nlosses.append(x)",
    "for x in loader:\n    losses.append(x.sum().item())",
    "images = torch.rand(5, 8, 8)\nf = len(images)",
]


# matplotlib looks for fonts with fc-list, once for each user.
@pytest.mark.usefixtures("starts_processes")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([*DISPLAYS, *STEPS, *OTHERS.values()]), max_size=8))
def test_the_others_compute_the_same_without_them(cells: list[str]) -> None:
    every = [PRELUDE, *cells, TRAIN]
    left_out = find_display_cells(every, [True] * (len(every) - 1) + [False])
    with_all = states_after(every, left_out)
    without = states_after([c for i, c in enumerate(every) if i not in left_out], [])
    assert with_all == without


def states_after(cells: list[str], left_out: list[int]) -> list[Any]:
    """All that a cell which stays can tell, after each of these."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    names: dict[str, Any] = {"display": lambda *values: [repr(value) for value in values]}
    states = []
    for index, cell in enumerate(cells):
        failed = ""
        try:
            exec(cell, names)
        except Exception as error:
            failed = type(error).__name__
        if index not in left_out:
            values = [str(names.get(n)) for n in ("table", "images", "losses", "x", "answer")]
            generators = (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())
            states.append((failed, values, [str(state) for state in generators]))
    return states


@pytest.fixture(autouse=True)
def _drawn_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    monkeypatch.chdir(tmp_path)
