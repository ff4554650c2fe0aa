"""Names that a run cannot have: refused where that is certain, and only there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.notebook.convert.notebooks import notebook, run
from tpunb.errors import ConversionError
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.models import Cell, LeftOut, Snapshot

SKIPPED = "# tpu: skip\nimport numpy as np\nx = 1\ndef helper(): ...\nfor k in []: ...\n!ls"
"""The first cell of the notebooks below."""

REFUSED = {
    "read": ("a = x", "x", 1),
    "in a line below": ("a = 1\n\nprint(a, x)", "x", 3),
    "an attribute": ("np.ones(3)", "np", 1),
    "a loop's variable": ("print(k)", "k", 1),
    "changed": ("x += 1", "x", 1),
    "in a loop": ("for i in range(3):\n    while i:\n        i -= x", "x", 3),
    "in try without except": ("try:\n    x\nfinally:\n    pass", "x", 2),
    "in a comprehension": ("[x for i in range(3)]", "x", 1),
    "what a comprehension goes over": ("[x for x in x]", "x", 1),
    "a decorator": ("@helper\ndef f(): ...", "helper", 1),
    "in a function that is called": ("def f(a):\n    return a + x\nf(1)", "x", 2),
    "in a function that another calls": (
        "def f():\n    for i in range(3):\n        g(i)\ndef g(i): print(x)\nlaunch(f, args=())",
        "x",
        4,
    ),
    "in what makes an object": (
        "class A:\n    def __init__(self):\n        self.x = x\nA()",
        "x",
        3,
    ),
    "in main": ("if __name__ == '__main__':\n    print(x)", "x", 2),
    "_": ("a = _ + 1", "_", 1),
    "_3": ("print(_3)", "_3", 1),
    "Out": ("a = Out[3]", "Out", 1),
    "_dh": ("import os\nos.chdir(_dh[0])", "_dh", 2),
    "%%capture": ("%%capture out\nprint(1)\n", "out", 1),
    "%store -r": ("%store -r x1 out\n", "out", 1),
    "%sql": ("%load_ext sql\n%sql out << select 1", "out", 2),
    "%%cython": ("%%cython\ncpdef int out(int n):\n    return n", "out", 1),
    "an unknown magic over Python": ("%%nosuch\nout = 1", "out", 1),
    "files.upload": ("from google.colab import files\nout = files.upload()", "out", 2),
    "a widget": ("import ipywidgets as w\nout = w.IntSlider(3)\ndisplay(out)", "out.value", 1),
}


@pytest.mark.parametrize(("source", "name", "line"), REFUSED.values(), ids=REFUSED)
def test_refused_with_cell_line_name_and_what_to_do(source: str, name: str, line: int) -> None:
    made_here = name.startswith("out")
    cells = [SKIPPED, source, "launch = 1"]
    if made_here:
        cells += [f"print({name})"]
        line = 1
    with pytest.raises(ConversionError, match=re.escape(f"`{name}` is ")) as caught:
        convert(notebook("markdown: text", *cells, "%%tpu_train\nprint(1)"))
    assert (caught.value.cell, caught.value.line) == (4 if made_here else 2, line)
    assert name in caught.value.source
    assert "tpu-skip" in str(caught.value) or "give the value a name" in str(caught.value)


def test_the_message() -> None:
    with pytest.raises(ConversionError) as caught:
        convert(notebook("%%tpu_debug\nx = 1", "%%tpu_train\nprint(x)"))
    assert str(caught.value) == (
        "cell [2], line 2: `x` is defined only in cell [1], which is left out because it runs in "
        "the notebook only: define it in a cell above, without %%tpu_debug, or tag the cells that "
        "need it tpu-skip if runs can do without them\n    print(x)"
    )


def test_the_message_for_a_line_that_is_left_out() -> None:
    with pytest.raises(ConversionError) as caught:
        convert(notebook("%%capture out\nprint(1)", "%%tpu_train\nprint(out)"))
    assert str(caught.value) == (
        "cell [2], line 2: `out` is defined only in `%%capture out` in cell [1], line 1, which a "
        "run does not repeat: define it in plain Python, or tag the cells that need it tpu-skip "
        "if runs can do without them\n    print(out)"
    )


NOT_REFUSED = [
    "x = 2\nprint(x)",
    "try:\n    x\nexcept NameError:\n    x = 1",
    "from contextlib import suppress\nwith suppress(NameError):\n    x",
    "if 'x' in globals():\n    print(x)",
    "def f():\n    return x",
    "def f():\n    if 0:\n        return x\nf()",
    "def f():\n    x = 1\n    return x\nf()",
    "def f():\n    try:\n        return x\n    except NameError:\n        return 1\nf()",
    "[x for x in [1]]",
    "import math as x\nx.pi",
    "exec('x = 1')\nprint(x)",
    "from math import *\nif 0: print(x)",
    "for _ in range(2):\n    pass\nprint(_)",
    "_, b = 1, 2\nprint(_)",
    "from gettext import gettext as _\nprint(_('a'))",
    "Out = In = {3: 1}\nOut[3]",
    "match 1:\n    case _ as k:\n        print(k)",
    "del_ = {'_': 1}['_']",
    "def f():\n    def g():\n        return x\n    x = 1\n    return g()\nf()",
    "if (x := 1):\n    print(x)",
    "def f():\n    global x\n    x = 1\nf()\nprint(x)",
]


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("source", NOT_REFUSED)
def test_not_refused_because_it_works(source: str, tmp_path: Path) -> None:
    script = convert(notebook(SKIPPED, source, "%%tpu_train\nprint('end')"))
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("end\n")


def test_a_result_may_be_called_run() -> None:
    with pytest.raises(ConversionError, match=r"`run` is defined only in cell \[1\],"):
        convert(notebook("%%tpu_train --out run\n1", "a = run", "%%tpu_train\n2"), {})
    shown = convert(notebook("# tpu: skip\nrun = 1", "run = 2", "run", "%%tpu_train\n2"))
    assert "\nrun\n" in shown.text


@pytest.mark.usefixtures("starts_processes")
def test_functions_may_need_what_a_cell_below_makes(tmp_path: Path) -> None:
    cells = ["# tpu: skip\nx = 1", "def f():\n    return x", "x = 2", "%%tpu_train\nprint(f())"]
    assert run(convert(notebook(*cells)), tmp_path).stdout == "2\n"
    with pytest.raises(ConversionError, match=r"`x` is defined only in cell \[1\],"):
        convert(notebook(cells[0], cells[1], "f()", "%%tpu_train"))


REASONS = {
    LeftOut.NEVER_RAN: "run that cell, then the train cell again",
    LeftOut.DELETED: "put that cell back",
    LeftOut.FAILED: "fix that cell and run it, then the train cell again",
}


@pytest.mark.parametrize(("reason", "instead"), REASONS.items())
def test_cells_that_never_ran_or_failed(reason: LeftOut, instead: str) -> None:
    snapshot = notebook("a = 1", "%%tpu_train\nprint(x)")
    left_out = Cell(1, "code", "x = 1", None if reason is LeftOut.NEVER_RAN else 7)
    snapshot = dataclasses.replace(snapshot, left_out=((left_out, reason),))
    with pytest.raises(ConversionError, match=re.escape(reason.value) + f": {instead}") as caught:
        convert(snapshot)
    assert snapshot.label(left_out) in str(caught.value)
    assert (caught.value.cell, caught.value.line) == (2, 2)


def test_other_train_cells_and_cells_below() -> None:
    with pytest.raises(ConversionError, match="has not returned it in this kernel: run it, then"):
        convert(notebook("%%tpu_train --out r\nx = 1", "a = r", "%%tpu_train"), {})
    with pytest.raises(ConversionError, match=r"does not return it: add `--returns x` to cell"):
        convert(notebook("%%tpu_train --out r\nx = 1", "a = x", "%%tpu_train"), {})
    with pytest.raises(ConversionError, match=r"below the train cell: move that cell above"):
        convert(notebook("%%tpu_train\nprint(x)", "x = 1", train=0))
    cells = (Cell(0, "code", "x = 1", 1, None, ("active-ipynb",)), Cell(1, "code", "x", 2))
    with pytest.raises(ConversionError, match=r"tagged active-ipynb: define it in a cell"):
        convert(Snapshot(cells, 1, None, "a test"))


def test_an_import_in_another_train_cell_is_named_before_one_below() -> None:
    first, below = "%%tpu_train\nimport tpunb, os", "import tpunb, sys"
    with pytest.raises(ConversionError) as caught:
        convert(notebook("x = 1", first, "%%tpu_train\ntpunb.log(x=1)", below, train=2), {})
    assert caught.value.reason == (
        "`tpunb` is defined only in cell [2], a train cell, whose imports stay in its ranks: "
        "import it here too, or in a cell above"
    )
    with pytest.raises(
        ConversionError, match=r"`sys` is defined only in cell \[4\], .*: import it"
    ):
        convert(notebook("x = 1", first, "%%tpu_train\nsys.exit()", below, train=2), {})


def test_widgets_that_only_show_or_are_set(tmp_path: Path) -> None:
    for source in (
        "import ipywidgets\na = ipywidgets.IntProgress()\na.value += 1\nprint(a.value)",
        "from ipywidgets import widgets as w\na = w.IntSlider()\na.value = 3\nprint(a.value)",
    ):
        convert(notebook(source, "%%tpu_train\nprint(a.value)"))
