"""Calls of launchers: which statements start runs or processes, and one as the train cell."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

import tpunb
from tpunb.errors import ConversionError
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.convert.launch_calls import Launching, starts_processes, with_call
from tpunb.notebook.models import Cell, LaunchCall, LeftOut, Script, Snapshot


def starting(*cells: str) -> list[str]:
    """The statements that start runs."""
    trees = [ast.parse(dedent(cell)) for cell in cells]
    launching = Launching(trees)
    return [ast.unparse(node) for tree in trees for node in launching.statements(tree)]


@pytest.mark.parametrize(
    "statement",
    [
        "tpunb.launch(train)",
        "r = tpunb.launch(train)",
        "for x in rates:\n    tpunb.launch(train, (x,))",
        "found = [t.launch(train, (x,)) for x in rates]",
        "run_it(train)",
        "sweep(0.1)",
        "below()",
        "study.optimize(sweep, n_trials=5)",
        "list(map(lambda x: sweep(x), rates))",
        "shorter(0.1)",
        "half(0.1)",
        "Searcher().go()",
    ],
)
def test_statements_that_start_runs(statement: str) -> None:
    cells = """
        import tpunb
        import tpunb as t
        from tpunb import launch as run_it
        from functools import partial
        def below():
            return sweep(1)
        def sweep(x):
            return tpunb.launch(train, args=(x,))
        class Searcher:
            def go(self):
                return sweep(1)
        shorter = lambda x: sweep(x)
        half = partial(tpunb.launch, train)
    """
    assert starting(cells, statement) == [ast.unparse(ast.parse(statement))]


@pytest.mark.parametrize(
    "statement",
    [
        "torch_xla.launch(train)",
        "def sweep():\n    tpunb.launch(train)",
        "r = tpunb.launch",
        "train(0.1)",
        "print(tpunb.last_run)",
        "result = other.launch(train)",
    ],
)
def test_statements_that_do_not(statement: str) -> None:
    assert starting("import tpunb, torch_xla\ndef train(x): pass", statement) == []


def test_the_result_of_a_launch_starts_nothing() -> None:
    cells = ("r = tpunb.launch(f)", "best = r.returns['value']", "model = build(best)")
    assert starting(*cells) == ["r = tpunb.launch(f)"]


@pytest.mark.parametrize(
    ("cell", "launcher"),
    [
        ("%matplotlib inline\nnotebook_launcher(f, num_processes=2)", "notebook_launcher"),
        ("def main():\n    mp.spawn(f, nprocs=n)\nmain()", "mp.spawn"),
        ("import torch_xla as xla; xla.launch(f)", "xla.launch"),
        ("xmp.spawn(f, (), None)", "xmp.spawn"),
        ("def main():\n    mp.spawn(f, nprocs=n)", ""),
        ("notebook_launcher(f, (), 1); xmp.spawn(f, (), nprocs=1)", ""),
        ("import torch_xla; torch_xla.launch(f, debug_single_process=True)", ""),
        ("tpunb.launch(f)\nlaunch(f)\nother.spawn(f, nprocs=2)\n'mp.spawn(f, nprocs=2)'", ""),
    ],
)
def test_a_cell_that_starts_processes_from_the_kernel(cell: str, launcher: str) -> None:
    above = """
import tpunb, torch.multiprocessing as mp, torch_xla.distributed.xla_multiprocessing as xmp
from tpunb import launch
from accelerate import notebook_launcher
"""
    assert starts_processes(cell, [above, "not python"]) == launcher


def launched(*cells: str, line: int, call: str = "value = f()") -> tuple[Snapshot, Script]:
    """The run of a call in the last of the cells; there is one more below it."""
    sources = [*map(dedent, cells), "z = 1"]
    made = tuple(Cell(i, "code", source, i + 1, f"id{i}") for i, source in enumerate(sources))
    snapshot = with_call(Snapshot(made, len(cells) - 1, None, "the test"), LaunchCall(line, call))
    return snapshot, convert(snapshot, {})


def parts(script: Script) -> list[tuple[str, int | None, str]]:
    return [
        (block.role, block.number, script.source(block).strip())
        for block in script.blocks
        if block.role != "header"
    ]


def test_what_stands_above_the_call_is_prelude() -> None:
    cell = "def f():\n    pass\nfor x in (1, 2):\n    print(x)\n    tpunb.launch(f)\nafter = 1"
    snapshot, script = launched("import tpunb", cell, line=5)
    assert parts(script) == [
        ("prelude", 1, "import tpunb"),
        ("prelude", 2, "def f():\n    pass"),
        ("train", 2, "value = f()"),
    ]
    [line] = [n for n, text in enumerate(script.text.split("\n"), 1) if text == "value = f()"]
    block, within = script.locate(line) or pytest.fail("no cell")
    assert (block.number, within) == (2, 5)
    assert [cell.index for cell in snapshot.cells] == [0, 1, 2, 3]
    assert snapshot.left_out[-1][1] is LeftOut.BELOW_LAUNCH
    assert snapshot.left_out[-1][0].source.endswith("after = 1")


@pytest.mark.parametrize(
    ("cell", "line", "above"),
    [
        ("tpunb.launch(f)", 1, None),
        ("import tpunb; tpunb.launch(f); x = 1", 1, "import tpunb;"),
        ("ä = 1; tpunb.launch(f)", 1, "ä = 1;"),
        ("%%time\na = 1\ntpunb.launch(f)", 3, "# magic: %%time\na = 1"),
        ("a = 1\n\n\nif a:\n    b = 2\n    tpunb.launch(f,\n      (1,))", 6, "a = 1"),
        ("%cd -q .\ntpunb.launch(f)", 2, "_tpunb_setup_cd('.')"),
        ("a = 1\r\ntpunb.launch(f)\r\n", 2, "a = 1"),
        ("# only text\n\ntpunb.launch(f)", 3, None),
    ],
)
def test_where_a_cell_is_cut(cell: str, line: int, above: str | None) -> None:
    _, script = launched("import tpunb\ndef f(): pass", cell, line=line)
    *prelude, train = parts(script)[1:]
    assert train == ("train", 2, "value = f()")
    if above is not None:
        assert prelude == [("prelude", 2, above)]


def test_an_earlier_call_in_the_same_cell_is_left_out() -> None:
    cell = "a = 1\nr = tpunb.launch(f)\nb = 2\ntpunb.launch(f)"
    _, script = launched("import tpunb\ndef f(): pass", cell, line=4)
    omission, below = script.omissions
    assert below.reason is LeftOut.BELOW
    assert (omission.cell, omission.line, omission.reason) == (2, 2, LeftOut.LAUNCH)
    assert "b = 2" in script.text


def test_calls_in_cells_above_are_left_out_of_any_run() -> None:
    cells = (
        Cell(0, "code", "import tpunb\ndef f(): pass", 1),
        Cell(1, "code", "for x in (1, 2):\n    tpunb.launch(f)\nkept = 1", 2),
        Cell(2, "code", "%%tpu_train\nkept", 3),
    )
    script = convert(Snapshot(cells, 2, None, "the test"), {})
    assert [omission.reason for omission in script.omissions] == [LeftOut.LAUNCH]
    assert (
        "\n# left out (it starts other runs with tpunb.launch): for x in (1, 2):\n" in script.text
    )
    assert "\nkept = 1\n" in script.text
    for alone in (Snapshot(cells, 2, None, "the test"), Snapshot(cells[:2], None, None, "it")):
        text = convert(alone).text
        assert "\n    _tpunb_launch(f)\n" in text
        assert "\ndef _tpunb_launch(" in text


@pytest.mark.parametrize(
    ("above", "call", "words"),
    [
        ("r = tpunb.launch(f)", "value = f(r)", "`r` is defined only in cell .2., which is left "),
        ("pass", "value = late()", "it is at or below the call of tpunb.launch: define it above"),
    ],
)
def test_names_that_a_run_does_not_have(above: str, call: str, words: str) -> None:
    cell = "tpunb.launch(late)\ndef late(): pass"
    with pytest.raises(ConversionError, match=words):
        launched("import tpunb\ndef f(x=1): pass", above, cell, line=1, call=call)


def test_a_cell_that_is_not_python() -> None:
    with pytest.raises(ConversionError, match=r"cell \[1\]"):
        launched("%%time\nx = (\ntpunb.launch(f)", line=3)


def test_what_a_statement_has_left_stands_in_its_place() -> None:
    kernel = {"r": "_tpunb_ended.read_run('there')", "found": "[1]", "x": "2"}
    cells = (
        Cell(0, "code", "import tpunb\nfound = []\ndef f(): pass", 1),
        Cell(1, "code", "for x in (1, 2):\n    r = tpunb.launch(f)\n    found.append(x)", 2),
        Cell(2, "code", "a = 1; m = tpunb.launch(f).returns['value']; b = r", 3),
        Cell(3, "code", "%%tpu_train\nprint(r, found)", 4),
    )
    script = convert(Snapshot(cells, 3, None, "the test"), {}, left=kernel.get)
    assert (
        "\nfrom tpunb.runs import ended as _tpunb_ended; found = [1]; "
        "r = _tpunb_ended.read_run('there')  # left out (" in script.text  # nothing reads `x`
    )
    assert "\na = 1; pass; b = r\n" in script.text
    unread = Cell(3, "code", "%%tpu_train\nprint(found)", 4)
    calls = (*cells[:2], Cell(2, "code", "for x in (1, 2): tpunb.launch(f)", 3), unread)
    script = convert(Snapshot(calls, 3, None, "the test"), {}, left=kernel.get)
    assert [block.cell for block in script.blocks] == [None, 0, 1, 3], "a mere call runs nothing"
    compile(script.text, "script", "exec")
    reader = Snapshot((*cells[:3], replace(cells[3], source="%%tpu_train\nm")), 3, None, "it")
    with pytest.raises(ConversionError, match=r"`m` is defined only in cell \[3\], which is left"):
        convert(reader, {}, left=kernel.get)


def test_what_shares_its_line_is_filled_in_too() -> None:
    cells = (
        Cell(0, "code", "import tpunb\nä = 1; r = tpunb.launch(f); b = r", 1),
        Cell(1, "code", "%%tpu_train\nprint(r)", 2),
    )
    script = convert(Snapshot(cells, 1, None, "it"), {}, left={"r": "5"}.get)
    assert "\nä = 1; from tpunb.runs import ended as _tpunb_ended; r = 5; b = r\n" in script.text


def test_a_change_that_a_run_does_not_have_is_told() -> None:
    cells = (
        Cell(0, "code", "import tpunb\nmodel = make()", 1),
        Cell(1, "code", "model.load_state_dict(tpunb.launch(f).returns['value'])", 2),
        Cell(2, "code", "%%tpu_train\nprint(model)", 3),
    )
    [change] = convert(Snapshot(cells, 2, None, "it"), {}).missing_changes
    assert (change.name, change.cell, change.reader) == ("model", "cell [2]", "the train cell")


def test_a_script_by_itself_calls_the_function_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = (
        Cell(0, "code", "import random\nimport tpunb as t\nrandom.seed(0)", 1),
        Cell(1, "code", "def f(x):\n    return x, random.random()", 2),
        Cell(2, "code", "def both(fn): return [t.launch(fn, (x,), cores=2) for x in 'äb']", 3),
        Cell(3, "code", "'ä'; one, two = both(f); print(one.value, two.state)", 4),
        Cell(4, "code", "print(two.value[1] == one.returns['value'][1])", 5),
    )
    monkeypatch.setenv("TPUNB_RUN", str(tmp_path))  # no device is prepared for it
    text = convert(Snapshot(cells, None, None, "it")).text
    assert "tpunb.launch" not in text.partition("# %% cell 1")[2]
    monkeypatch.setitem(vars(tpunb), "last_run", None)  # which the script sets, as scripts do
    exec(compile(text, "script", "exec"), namespace := {"__name__": "__main__"})
    assert namespace["one"].returns["value"][0] == "ä"  # type: ignore[index, attr-defined]
    assert capsys.readouterr().out == "('ä', 0.8444218515250481) succeeded\nTrue\n"


def test_a_train_cell_of_such_a_script_keeps_its_calls() -> None:
    cells = (Cell(0, "code", "%%tpu_train\ntpunb.launch(f)", 1), Cell(1, "code", "x = 1", 2))
    assert "\ntpunb.launch(f)\n" in convert(Snapshot(cells, 0, None, "it")).text
