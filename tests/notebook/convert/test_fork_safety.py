"""What reading the prelude shows that forbids a fork."""

from __future__ import annotations

import pytest

from tests.notebook.convert.notebooks import notebook
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.convert.fork_safety import static_reason

FOUND = {
    "loss.backward()": "calls backward()",
    "def step():\n    loss.backward()\nstep()": "calls backward()",
    "def step():\n    loss.backward()\ndef fit():\n    return step()\nhistory = fit()": (
        "calls backward()"
    ),
    "class T:\n    def fit(self):\n        loss.backward()\nT().fit()": "calls backward()",
    "class T:\n    if fast:\n        def fit(self):\n            loss.backward()\nT().fit()": (
        "calls backward()"
    ),
    "@step\ndef f(): ...\ndef step(f):\n    loss.backward()\nstep(f)": "calls backward()",
    "def f(x=loss.backward()): ...": "calls backward()",
    "import torch\ng = torch.autograd.grad(y, x)": "calls torch.autograd.grad()",
    "import torch as t\nt.autograd.backward(y)": "calls backward()",
    "import torch_xla.core.xla_model as xm\nd = xm.xla_device()": "uses an XLA device",
    "import torch_xla\nd = torch_xla.device()": "uses an XLA device",
    "model.to('xla')": "uses an XLA device",
    "x = torch.ones(3, device='xla:0')": "uses an XLA device",
}

NOT_FOUND = [
    "def step():\n    loss.backward()",
    "class F:\n    @staticmethod\n    def backward(ctx): ...",
    "def a():\n    b()\ndef b():\n    a()\na()",
    "import torch_xla.core.xla_model as xm\ndef _mp_fn(i):\n    d = xm.xla_device()",
    "import torch\ntorch.set_num_threads(8)",
    "model.to('cpu'); model.to(device)",
    "device = torch.device('xla')",
    "text = 'loss.backward()'  # loss.backward()",
    "def fit():\n    loss.backward()\nclassifier = SVC().fit(x, y)",
    "class T:\n    def fit(self):\n        loss.backward()\nfit(T())",
    "%time loss.forward()\n!python -c 'loss.backward()'",
]


@pytest.mark.parametrize(("source", "reason"), FOUND.items(), ids=FOUND)
def test_found(source: str, reason: str) -> None:
    script = convert(notebook("x = 1", "markdown: text", source, "%%tpu_train\nmain()"))
    assert static_reason(script) == f"cell [2] {reason}"


@pytest.mark.parametrize("source", NOT_FOUND)
def test_not_found(source: str) -> None:
    script = convert(notebook(source, "%%tpu_train\nloss.backward()"))
    assert static_reason(script) is None


def test_the_first_cell_that_shows_it_is_named() -> None:
    script = convert(
        notebook("def fit():\n    loss.backward()", "x = 1", "fit()", "g.backward()", train=None)
    )
    assert static_reason(script) == "cell [3] calls backward()"


def test_what_is_found_through_several_cells() -> None:
    cells = [
        "from torch.autograd import grad as slope",
        "class Model:\n    def fit(self):\n        return slope(self, self)",
        "def go(model):\n    model.fit()",
        "go(model)",
    ]
    script = convert(notebook(*cells, "print()"))
    assert static_reason(script) == "cell [4] calls torch.autograd.grad()"
