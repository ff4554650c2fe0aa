import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.notebook.lint.examples import EXAMPLES, IMPORTS, TRAIN, loop
from tests.notebook.lint.notebooks import found, notebook, rules
from tests.support import examples
from tpunb.notebook.lint.findings import SEVERITIES
from tpunb.notebook.lint.linter import UNKNOWN, lint
from tpunb.notebook.models import Snapshot
from tpunb.runs import arguments

OLD = "n = xm.get_log_fn()"


def certain(*sources: str) -> list[str]:
    return [finding.rule for finding in found(*sources) if finding.certain]


def test_findings_come_in_order_of_the_notebook() -> None:
    findings = found("xm.x()", IMPORTS, f"a = 1\n{OLD}", f"%env XLA_USE_BF16=1\n{OLD}")
    assert [(finding.cell, finding.line, finding.rule) for finding in findings] == [
        (3, 2, "retired-name"),
        (4, 1, "bf16-variable"),
        (4, 2, "retired-name"),
    ]


def test_the_json_form_has_six_keys_and_the_text_shows_the_line() -> None:
    (finding,) = found(IMPORTS, "    \n" + OLD)
    assert json.loads(json.dumps(finding.to_json())) == {
        "rule": "retired-name",
        "severity": "error",
        "cell": 2,
        "line": 2,
        "message": "`xla_model.get_log_fn` does not exist in torch_xla 2.9",
        "fix": finding.fix,
    }
    assert str(finding) == (
        "cell [2], line 2: error: `xla_model.get_log_fn` does not exist in torch_xla 2.9 "
        f"[retired-name]\n    {OLD}\n  → {finding.fix}"
    )


@pytest.mark.parametrize(
    "cell",
    [
        OLD + "  # tpunb: ignore",
        OLD + "  # as ever  # tpunb: ignore[not-python, retired-name]",
        "# tpunb: ignore[retired-name]\na = 1\n" + OLD,
        "n = max(  # tpunb: ignore[retired-name]\n    1,\n    xm.get_log_fn(),\n)",
        "n = max(\n    1,\n    xm.get_log_fn(),  # tpunb: ignore[retired-name]\n)",
        f"%matplotlib inline\nif True:\n    {OLD}  # tpunb: ignore",
        "%env XLA_USE_BF16=1  # tpunb: ignore[bf16-variable]",
    ],
)
def test_a_comment_silences(cell: str) -> None:
    assert rules(IMPORTS, cell) == []


@pytest.mark.parametrize(
    "cell",
    [
        OLD + "  # tpunb: ignore[not-python]",
        "text = '# tpunb: ignore'\n" + OLD,
        "a = 1  # tpunb: ignore\n" + OLD,
        "a = 1\n# tpunb: ignore\n" + OLD,
        f"if True:  # tpunb: ignore[retired-name]\n    {OLD}",
        OLD + "  # tpunb ignore",
    ],
)
def test_a_comment_elsewhere_does_not_silence(cell: str) -> None:
    assert rules(IMPORTS, cell) == ["retired-name"]


def test_a_comment_that_names_no_rule_is_a_hint() -> None:
    (finding,) = found("a = 1\nb = 2  # tpunb: ignore[no-such-rule]")
    assert (finding.rule, finding.severity, finding.line) == (UNKNOWN, "hint", 2)
    assert "'no-such-rule'" in finding.message


@pytest.mark.parametrize(
    "cells",
    [
        (IMPORTS, OLD, TRAIN),
        (IMPORTS, f"%%tpu_train\n{OLD}"),
        ("import torch_xla.distributed.xla_dist", "%%tpu_train\nprint(1)"),
        (IMPORTS, f"def f():\n    {OLD}\ndef g():\n    f()", "%%tpu_train\ng()"),
        (IMPORTS, f"%%time\n{OLD}", TRAIN),
    ],
)
def test_certain_failures_are_certain(cells: tuple[str, ...]) -> None:
    assert len(certain(*cells)) == 1


@pytest.mark.parametrize(
    "cells",
    [
        (IMPORTS, OLD),
        (IMPORTS, f"%%tpu_train\n{OLD}", TRAIN),
        (IMPORTS, f"if old:\n    {OLD}", TRAIN),
        (IMPORTS, f"try:\n    {OLD}\nexcept AttributeError:\n    n = xr.world_size()", TRAIN),
        (IMPORTS, f"with suppress(AttributeError):\n    {OLD}", TRAIN),
        (IMPORTS, f"for _ in range(0):\n    {OLD}", TRAIN),
        (IMPORTS, "n = xm.get_log_fn() if old else 1", TRAIN),
        (IMPORTS, "f = lambda: xm.get_log_fn()", TRAIN),
        (IMPORTS, f"def f():\n    return 1\n    {OLD}", "%%tpu_train\nf()"),
        (IMPORTS, f"@skip\ndef f():\n    {OLD}", "%%tpu_train\nf()"),
        (IMPORTS, f"def f():\n    {OLD}", "def f():\n    pass", "%%tpu_train\nf()"),
        (IMPORTS, "xm.xrt_world_size = xr.world_size", OLD, TRAIN),
        (IMPORTS, "if not hasattr(xm, 'x'):\n    import old", OLD, TRAIN),
        (IMPORTS, "xm = mine", OLD, TRAIN),
        (IMPORTS, "from mine import *", OLD, TRAIN),
        (IMPORTS, "%%tpu_train\nif xm.is_master_ordinal():\n    dist.barrier()"),
        ("from torch_xla.amp import GradScaler", "%%tpu_train\nprint(1)"),
    ],
)
def test_possible_failures_are_not_certain(cells: tuple[str, ...]) -> None:
    assert certain(*cells) == []


def test_only_the_snapshots_own_train_cell_counts_for_certainty() -> None:
    whole = notebook(IMPORTS, f"%%tpu_train\n{OLD}", "%%tpu_train\nprint(1)")
    first = Snapshot(whole.cells[:2], 1, None, "a test")
    assert [finding.certain for finding in lint(whole)] == [False]
    assert [finding.certain for finding in lint(first)] == [True]


@pytest.mark.parametrize("head", ["# tpu: skip", "%%tpu_debug"])
def test_cells_that_only_the_kernel_runs_are_checked_by_kernel_rules(head: str) -> None:
    assert rules(IMPORTS, f"{head}\nmodel.cuda()\n{OLD}", TRAIN) == ["retired-name"]
    assert rules(IMPORTS, TRAIN, f"model.cuda()\n{OLD}") == ["retired-name"]
    tagged = notebook(IMPORTS, f"model.cuda()\n{OLD}", tags=[(1, "tpu-skip")])
    assert [finding.rule for finding in lint(tagged)] == ["retired-name"]


@pytest.mark.usefixtures("starts_processes")
def test_lint_imports_no_library_that_is_slow() -> None:
    code = (
        "import sys; from tpunb.notebook.lint.linter import lint\n"
        "print([n for n in ('torch', 'nbconvert', 'numpy') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "source",
    [
        "x = " + "+".join("1" * 5000),
        "x = " + "(" * 150 + "1" + ")" * 150,
        "x = " + "-" * 3000 + "1",
        "x = a" + ".b" * 3000,
        "if a:\n    pass\n" + "elif a:\n    pass\n" * 2000,
        "\0",
        "\ud800",
        "%%tpu_train",
        "%%bash",
        "match x:\n    case {'a': [1, *rest], **more} if xm.get_ordinal():\n        pass",
        "try:\n    pass\nexcept* ValueError:\n    pass" if sys.version_info >= (3, 11) else "1",
        "del x, y[0]\nglobal z\nprint(*a, **b)\nlambda *a, k=1, **b: (yield)",
        "def f[T](x: T) -> T: ...\ntype A[T] = list[T]",
        "f'{x!r:>{width}}'\nx: int\n(y := 3)\n@d\nclass A(B, metaclass=C): x = 1",
        "\r\nx = 1\r\rn = xm.get_log_fn()\r\n",
        "x = !ls\ny = %env HOME\nprint?",
    ],
)
def test_lint_never_raises_for_a_cell(source: str) -> None:
    for finding in found(IMPORTS, source, loop(), TRAIN):
        assert finding.cell is not None


EXAMPLE_CELLS = [
    cell for fires, quiet in EXAMPLES.values() for cells in fires + quiet for cell in cells
]
EXAMPLE_LINES = {line for cell in EXAMPLE_CELLS for line in cell.strip("\n").split("\n")}
ODD_LINES = ["", "    ", "!ls \\", "%%time", "%%bash", '"""', "x = (", ")", "\t", "é = '🎉'"]
LINES = st.sampled_from([*sorted(EXAMPLE_LINES), *ODD_LINES, "# tpunb: ignore"])
INDENTED = st.builds(lambda depth, line: "    " * depth + line.strip(), st.integers(0, 3), LINES)
CELLS = st.lists(
    st.one_of(
        st.lists(LINES | INDENTED, max_size=8).map("\n".join),
        st.sampled_from(EXAMPLE_CELLS),
        st.text(max_size=30),
    ),
    max_size=6,
)


@settings(max_examples=examples(150), deadline=None)
@given(CELLS)
def test_random_notebooks_are_linted_and_findings_lie_within_their_cells(cells: list[str]) -> None:
    snapshot = notebook(*cells)
    findings = lint(snapshot)
    for finding in findings:
        assert finding.cell is not None
        text = snapshot.cells[finding.cell - 1].source.replace("\r\n", "\n").replace("\r", "\n")
        lines = text.split("\n")
        assert 1 <= finding.line <= len(lines)
        assert finding.source == lines[finding.line - 1]
        assert finding.severity in SEVERITIES
        assert not (finding.certain and finding.severity != "error")
        assert "\n" not in finding.message + finding.fix
    assert findings == lint(snapshot)


@pytest.mark.parametrize("first", ["x = !ls", "a, x = %env A", "if 1:\n    x = %pwd", "%sql x <<"])
def test_a_magic_may_define_names(first: str) -> None:
    assert lint(notebook(first, "print(x)")) == []


def test_the_arguments_of_a_launch_are_defined() -> None:
    assert lint(notebook("def f(x): pass", f"%%tpu_train\nvalue = f({arguments.NAME}[0])")) == []


def test_names_that_the_kernel_passes_to_the_run_are_defined() -> None:
    cells = notebook("import torch", "%%tpu_train\nprint(torch, x)")
    assert [(f.rule, f.certain) for f in lint(cells)] == [("undefined-name", True)]
    assert lint(cells, {"x"}) == []


@pytest.mark.parametrize(
    ("cells", "sure"),
    [
        (("%%tpu_train\nx",), True),
        (("def f():\n    for _ in range(3):\n        x", "%%tpu_train\nf()"), True),
        (("n = 3", "%%tpu_train\nfor _ in range(n):\n    x"), True),
        (("n = 0", "%%tpu_train\nfor _ in range(n):\n    x"), False),
        (("%%tpu_train\nfor _ in range(3):\n    if _: break\n    x",), False),
        (("%%tpu_train\nfor _ in [1]:\n    x",), False),
        (("%%tpu_train\nif True:\n    x",), False),
        (("print(x)", "%%tpu_train\nx = 1"), False),
    ],
)
def test_an_undefined_name_stops_a_run_that_certainly_reads_it(
    cells: tuple[str, ...], sure: bool
) -> None:
    [finding] = lint(notebook(*cells))
    assert (finding.rule, finding.certain) == ("undefined-name", sure)


RANK_0 = "xm.mesh_reduce('loss', 1, sum)"


@pytest.mark.parametrize(
    ("source", "sure"),
    [
        ("if xm.is_master_ordinal():\n    {}", True),
        ("me = xr.global_ordinal()\nif me == 0:\n    print(1)\n    {}", True),
        ("for epoch in range(3):\n    if xr.global_ordinal() == 0:\n        {}", True),
        ("if xr.global_ordinal() < 1:\n    {}", True),
        ("def f(i):\n    if i == 0:\n        {}\ntorch_xla.launch(f)", True),
        ("def f(i):\n    i = min(i, 1)\n    if i == 0:\n        {}\ntorch_xla.launch(f)", False),
        ("if xr.global_ordinal() > 1:\n    {}", False),
        ("if rank == 0:\n    {}", False),  # whatever that is
        ("if xr.global_ordinal() == 3:\n    {}", False),  # no rank may have it
        ("if xm.is_master_ordinal() and more:\n    {}", False),
        ("for batch in loader:\n    if xm.is_master_ordinal():\n        {}", False),
        ("if more:\n    if xm.is_master_ordinal():\n        {}", False),
    ],
)
def test_a_collective_on_some_ranks_stops_a_run_that_certainly_reaches_it(
    source: str, sure: bool
) -> None:
    cells = (IMPORTS, "rank = more = loader = other()", f"%%tpu_train\n{source.format(RANK_0)}")
    [finding] = [f for f in found(*cells) if f.rule == "collective-on-some-ranks"]
    assert finding.certain == sure


def test_findings_about_the_train_cell_are_marked() -> None:
    cells = (
        IMPORTS,
        "m = nn.Linear(2, 2)\nx = xm.get_log_fn()",
        "def f():\n    xm.XlaModel()",
        "%%tpu_train\nf()\nopen('a', 'w')\nSGD(m.parameters())",
        "print(m)",
    )
    snapshot = replace(notebook(*cells), train=3)
    found = [(f.rule, f.own, f.below) for f in lint(snapshot) if f.rule != "undefined-name"]
    assert found == [
        ("retired-name", False, False),
        ("retired-name", True, False),
        ("file-of-all-ranks", True, False),
        ("not-returned", True, True),
    ]
    assert [f.rule for f in lint(snapshot, rules=["not-returned"])] == ["not-returned"]


@pytest.mark.parametrize("head", ["# tpu: skip", "%%tpu_debug", "%%tpu_train"])
def test_a_run_says_nothing_of_cells_that_are_not_part_of_it(head: str) -> None:
    cells = (IMPORTS, f"{head}\n{OLD}\nnowhere", OLD, "%%tpu_train\nprint(1)", OLD)
    snapshot = replace(notebook(*cells), train=3)
    assert {f.cell for f in lint(snapshot)} == {2, 3, 5}
    assert {f.cell for f in lint(snapshot, own=True)} == {3}


def test_the_number_of_ranks_is_that_of_the_run() -> None:
    cell = "%%tpu_train{}\nif xr.global_ordinal() < 4:\n    xm.rendezvous('x')"
    assert rules(IMPORTS, cell.format("")) == ["collective-on-some-ranks"]
    assert rules(IMPORTS, cell.format(" --cores 8")) == ["collective-on-some-ranks"]
    assert rules(IMPORTS, cell.format(" --cores 4")) == []
    assert rules(IMPORTS, cell.format(""), cell.format(" --cores 4")) == [
        "collective-on-some-ranks"
    ]
    for ranks in 4, 8:
        findings = lint(notebook(IMPORTS, cell.format(" --cores 2")), ranks=ranks)
        assert bool(findings) == (ranks == 8)
    spmd = f"import torch_xla.runtime as xr\nxr.use_spmd()\n{cell.partition(chr(10))[2]}"
    assert rules(IMPORTS, f"%%tpu_train\n{spmd}") == []  # one process


def test_nothing_is_found_twice() -> None:
    loader = "loader = DataLoader(train_data, 8, shuffle=True)"
    step = loop("print(loss.item(), y.sum().item(), loss)")
    findings = found(IMPORTS, loader, step, TRAIN, TRAIN)
    seen = [(f.cell, f.line, f.rule) for f in findings]
    assert len(seen) == len(set(seen)) >= 3
