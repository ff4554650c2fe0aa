"""The plan that `--dry-run` shows: what is left out, and why."""

from __future__ import annotations

from tpunb import plan
from tpunb.lint.findings import Finding
from tpunb.models import Cell, Snapshot
from tpunb.platforms.environment import Change
from tpunb.reading import Reading
from tpunb.script.convert import convert

CELLS = (
    Cell(0, "code", "!pip install x\nx = 1", 1),
    Cell(1, "code", "# tpu: skip\ny = 1", 2),
    Cell(2, "code", "%%tpu_train\nprint(x)", 4),
    Cell(3, "code", "z = 1", 3),
)


def test_what_is_left_out_and_why() -> None:
    never, failed = Cell(1, "code", "a = 1\nb = 2"), Cell(1, "code", "1 / 0", 3)
    left_out = ((never, "it never ran in this kernel"), (failed, "it failed"))
    snapshot = Snapshot(CELLS, 2, "nb.ipynb", "the test", ("a note",), left_out)
    changes = [Change("A", "1", "a reason"), Change("B", None, "another")]
    script = convert(snapshot)
    found = Finding("a-rule", "hint", 1, 2, "it is odd", "make it even", source="x = 1")
    text = plan.describe(Reading(snapshot, script, None, (found,)), 2, "CPU", changes)
    assert text.removesuffix(f"\n\n{script.text.rstrip()}").split("\n") == [
        "notebook: nb.ipynb (from the test)",
        "a note",
        "prelude: [1]; train cell: [4]",
        "2 rehearsal cores on CPU; the prelude runs once, then the ranks are forked",
        "left out:",
        "  code cell 2: a = 1  (it never ran in this kernel)",
        "  cell [3]: 1 / 0  (it failed)",
        "  cell [1], line 1: !pip install x  (shell commands run once, in the notebook)",
        "  cell [2], line 1: # tpu: skip  (it begins with '# tpu: skip')",
        "  cell [3], line 1: z = 1  (it is below the train cell)",
        "environment of the ranks, beside the kernel's:",
        "  A = 1  (a reason)",
        "  B removed  (another)",
        "lint:",
        "  cell [1], line 2: hint: it is odd [a-rule]",
        "      x = 1",
        "    → make it even",
    ]


def test_nothing_is_left_out() -> None:
    snapshot = Snapshot((Cell(0, "code", "%%tpu_train\n1", 1),), 0, None, "the test")
    text = plan.describe(Reading(snapshot, convert(snapshot), "it says so", ()), 8, "TPU", [])
    assert "left out:" not in text
    assert "notebook: no file (from the test)\nprelude: none; train cell: [1]\n" in text
    assert "8 TPU cores; every rank runs the prelude: it says so\n" in text
