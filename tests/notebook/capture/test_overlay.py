"""What was executed, laid over a document: one row for each rule.

The order of cells with ids is compared with a model in `test_overlay_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tpunb.notebook.capture.history import Execution
from tpunb.notebook.capture.overlay import overlay
from tpunb.notebook.models import Cell, LeftOut

TRAIN = "%%tpu_train\nloop()"


class Case(NamedTuple):
    name: str
    document: list[str | tuple[str, str]]
    """'source' with the id c<position>, or ('markdown', 'source')."""
    executed: list[str | tuple[str, str]]
    """'source' without an id, or (id, source)."""
    cells: list[tuple[str, int | None]]
    """Expected source and number."""
    train: int
    notes: Sequence[str] = ()


CASES = [
    Case(
        "ids: what ran wins over what is on disk",
        ["a = 1", TRAIN],
        [("c0", "a = 2"), ("c1", TRAIN)],
        [("a = 2", 1), (TRAIN, 2)],
        1,
    ),
    Case(
        "ids: code above that never ran is left out, below it stays; text always stays",
        [("markdown", "# Title"), "a = 1", "never = 1", "", TRAIN, "later()"],
        [("c1", "a = 1"), ("c4", TRAIN)],
        [("# Title", None), ("a = 1", 1), (TRAIN, 2), ("later()", None)],
        2,
        ["never ran in this kernel, so left out: cell [ ] (never = 1)"],
    ),
    Case(
        "ids: an unsaved train cell stands after the cell that ran before it",
        ["a = 1", "b = 2"],
        [("c0", "a = 1"), ("c1", "b = 2"), ("t", TRAIN)],
        [("a = 1", 1), ("b = 2", 2), (TRAIN, 3)],
        2,
        ["this cell is not saved yet; assuming it follows cell [2]"],
    ),
    Case(
        "ids: an unsaved train cell that ran before moves with what ran since",
        ["a = 1"],
        [("c0", "a = 1"), ("t", TRAIN), ("n", "n = 1"), ("t", TRAIN)],
        [("a = 1", 1), ("n = 1", 3), (TRAIN, 4)],
        2,
        ["this cell is not saved yet; assuming it follows cell [3]"],
    ),
    Case(
        "ids: an unsaved cell that first ran after the train cell stands below it",
        ["a = 1", TRAIN],
        [("c0", "a = 1"), ("c1", TRAIN), ("n", "a = 2"), ("c0", "a = 1"), ("c1", TRAIN)],
        [("a = 1", 4), (TRAIN, 5), ("a = 2", 3)],
        1,
        ["cell [3] is not saved yet; assuming it is below this one"],
    ),
    Case(
        "before the hook: matched by text, in order",
        ["x()", "a = 1", "x()", "%load_ext tpunb", TRAIN],
        ["x()", "a = 1", "x()", "%load_ext tpunb", ("c4", TRAIN)],
        [("x()", 1), ("a = 1", 2), ("x()", 3), ("%load_ext tpunb", 4), (TRAIN, 5)],
        4,
    ),
    Case(
        "before the hook: ran again since, the later text counts",
        ["rate = 0.25", "%load_ext tpunb", TRAIN],
        ["rate = 0.25", "%load_ext tpunb", ("c0", "rate = 0.5"), ("c2", TRAIN)],
        [("rate = 0.5", 3), ("%load_ext tpunb", 2), (TRAIN, 4)],
        2,
    ),
    Case(
        "before the hook: an older version of a cell that ran later is left out",
        ["import torch, os", "%load_ext tpunb", TRAIN],
        ["improt torch, os", "import torch, os", "%load_ext tpunb", ("c2", TRAIN)],
        [("import torch, os", 2), ("%load_ext tpunb", 3), (TRAIN, 4)],
        2,
    ),
    Case(
        "before the hook: an unsaved edit takes the place of the cell",
        ["import torch", "rate = 0.25", "%load_ext tpunb", TRAIN],
        ["import torch", "rate = 0.5", "%load_ext tpunb", ("c3", TRAIN)],
        [("import torch", 1), ("rate = 0.5", 2), ("%load_ext tpunb", 3), (TRAIN, 4)],
        3,
    ),
    Case(
        "before the hook: an unsaved cell that is like no other stands where it ran",
        ["import torch", "%load_ext tpunb", TRAIN],
        ["import torch", "seed = 1234567", "%load_ext tpunb", ("c2", TRAIN)],
        [("import torch", 1), ("seed = 1234567", 2), ("%load_ext tpunb", 3), (TRAIN, 4)],
        3,
    ),
    Case(
        "no ids: papermill's injected parameters stay where they ran",
        ["rate = 1\nsteps = 2", ("markdown", "text"), "a = 1", TRAIN, "later()"],
        ["rate = 1\nsteps = 2", "# Parameters\nrate = 3\nsteps = 2", "a = 1", TRAIN],
        [
            ("rate = 1\nsteps = 2", 1),
            ("# Parameters\nrate = 3\nsteps = 2", 2),
            ("text", None),
            ("a = 1", 3),
            (TRAIN, 4),
            ("later()", None),
        ],
        4,
    ),
    Case(
        "no ids: a cell that ran again counts once, at the document's place",
        ["a = 1", "b = 2", TRAIN],
        ["a = 1", "b = 2", "a = 1", TRAIN],
        [("a = 1", 3), ("b = 2", 2), (TRAIN, 4)],
        2,
    ),
    Case(
        "ids that the file does not know (nbformat 4.4) are as none",
        ["a = 1", "b = 2", TRAIN],
        [("p", "a = 1"), ("q", "b = 3"), ("p", "a = 1"), ("r", TRAIN)],
        [("a = 1", 3), ("b = 3", 2), (TRAIN, 4)],
        2,
    ),
    Case(
        "no document: the executed cells, as often as they ran",
        [],
        ["a = 1", "step()", "step()", TRAIN],
        [("a = 1", 1), ("step()", 2), ("step()", 3), (TRAIN, 4)],
        3,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_overlay(case: Case) -> None:
    document = tuple(
        Cell(index, "code", what, 77, f"c{index}")
        if isinstance(what, str)
        else Cell(index, "markdown", what[1])
        for index, what in enumerate(case.document)
    )
    executed = [
        Execution(what, number) if isinstance(what, str) else Execution(what[1], number, id=what[0])
        for number, what in enumerate(case.executed, 1)
    ]
    laid = overlay(document, executed)
    assert [(cell.source, cell.number) for cell in laid.cells] == case.cells
    assert laid.train == case.train
    assert laid.notes == tuple(case.notes)
    assert [cell.index for cell in laid.cells] == list(range(len(laid.cells)))


def test_tags_and_ids_come_from_the_file() -> None:
    document = (Cell(0, "code", "a = 1", None, "c0", ("parameters",)), Cell(1, "code", TRAIN))
    laid = overlay(document, [Execution("a = 1", 1), Execution(TRAIN, 2)])
    assert [(cell.id, cell.tags) for cell in laid.cells] == [("c0", ("parameters",)), (None, ())]


@pytest.mark.parametrize(
    ("tagged", "above", "source", "id", "tags"),
    [
        (True, "a = 1", "# Parameters\na = 2\nb = [1]", None, ("injected-parameters",)),
        (False, "", "a = 2", None, ("injected-parameters",)),
        (False, "a = 1", "a = 2", None, ()),  # papermill would put it first
        (True, "c = 1", "a = 2", None, ()),  # below another cell
        (True, "a = 1", "a = f()", None, ()),
        (True, "a = 1", "a = 2", "c9", ()),  # of a front end where a person works
    ],
)
def test_the_cell_that_papermill_injects_is_known_by_its_place(
    tagged: bool, above: str, source: str, id: str | None, tags: tuple[str, ...]
) -> None:
    own = ("parameters",) if tagged else ()
    texts = [("a = 1", own), ("c = 1", ()), (TRAIN, ())]
    document = tuple(Cell(at, "code", *text[:1], tags=text[1]) for at, text in enumerate(texts))
    ran = ["a = 1", "c = 1", TRAIN]
    ran.insert(ran.index(above) + 1 if above else 0, source)
    executed = [
        Execution(text, number, id if text == source else None)
        for number, text in enumerate(ran, 1)
    ]
    [cell] = [cell for cell in overlay(document, executed).cells if cell.source == source]
    assert cell.tags == tags


def test_without_a_document_failed_cells_are_left_out() -> None:
    executed = [
        Execution("improt torch", 1, failed=True),
        Execution("import torch", 2),
        Execution("%%tpu_train\nwrong()", 3, failed=True),
        Execution(TRAIN, 4),
    ]
    laid = overlay((), executed)
    assert [cell.source for cell in laid.cells] == ["import torch", TRAIN]
    assert laid.notes == ("left out after a failure: cell [1]",)
    assert [(cell.source, cell.number, cell.index, why) for cell, why in laid.left_out] == [
        ("improt torch", 1, 0, LeftOut.FAILED),
        ("%%tpu_train\nwrong()", 3, 1, LeftOut.FAILED),
    ]


def test_without_a_document_a_version_that_worked_is_kept() -> None:
    executed = [Execution("a = 1", 1, "p"), Execution("a = b", 2, "p", failed=True)]
    laid = overlay((), [*executed, Execution(TRAIN, 3, "t")])
    assert [(cell.source, cell.number) for cell in laid.cells] == [("a = 1", 1), (TRAIN, 3)]
    assert laid.left_out == ()


def test_cells_that_never_ran_are_kept_beside_the_notebook() -> None:
    sources = ["never = 1", "a = 1", "never = 2", "", TRAIN, "below = 1"]
    document = tuple(Cell(i, "code", source, 9, f"c{i}") for i, source in enumerate(sources))
    laid = overlay(document, [Execution("a = 1", 1, "c1"), Execution(TRAIN, 2, "c4")])
    never = LeftOut.NEVER_RAN
    assert laid.left_out == (
        (Cell(0, "code", "never = 1", None, "c0"), never),
        (Cell(1, "code", "never = 2", None, "c2"), never),
        (Cell(1, "code", "", None, "c3"), never),
    )
    assert [laid.label(cell) for cell, _ in laid.left_out] == [
        "cell [ ] (never = 1)",
        "cell [ ] (never = 2)",
        "cell [ ] ()",
    ]
    assert [laid.label(cell) for cell in laid.cells] == [
        "cell [1]",
        "cell [2]",
        "cell [ ] (below = 1)",
    ]


def ran(source: str, number: int, id: str | None = None, **more: Any) -> Execution:
    """An execution at second `number`."""
    return Execution(source, number, id, time=float(number), **more)


def document(*sources: str) -> tuple[Cell, ...]:
    return tuple(Cell(i, "code", source, None, f"c{i}") for i, source in enumerate(sources))


@pytest.mark.parametrize(
    ("saved", "notes"),
    [(0.5, ()), (1.5, ("cell [1] was edited after it ran; the version you ran is used",))],
)
def test_which_text_is_the_newer_one_is_told_by_time(saved: float, notes: tuple[str, ...]) -> None:
    cells = document("a = 1", TRAIN)
    laid = overlay(cells, [ran("a = 2", 1, "c0"), ran(TRAIN, 2, "c1")], saved=saved)
    assert [cell.source for cell in laid.cells] == ["a = 2", TRAIN]
    assert laid.notes == notes


def test_differences_that_do_not_matter_are_not_told() -> None:
    own = "%%tpu_train\nfirst()"
    cells = document("a = 1", "b = 1", own, "# nothing", "%%tpu_debug\nx", TRAIN, "later = 1")
    executed = [
        ran("\na = 1  \n\n", 1, "c0"),  # blanks
        ran("b = 1", 2, "c1"),
        ran(f"{own} # edited", 3, "c2"),  # a train cell is no part of another's prelude
        ran("later = 2", 4, "c6"),  # below
        ran(f"{TRAIN} # edited", 5, "c5"),  # it was just sent
    ]
    laid = overlay(cells, executed)
    assert laid.notes == ()
    assert [cell.number for cell in laid.cells] == [1, 2, 3, 5, 4]
    assert [laid.label(cell) for cell, _ in laid.left_out] == [
        "cell [ ] (# nothing)",
        "cell [ ] (%%tpu_debug)",
    ]


def test_a_cell_that_was_deleted_is_left_out_once_the_file_says_so() -> None:
    executed = [ran("x = 5", 1, "gone"), ran("a = 1", 2, "c0"), ran(TRAIN, 9, "c1")]
    cells = document("a = 1", TRAIN)
    # It was saved before the cell ran: a new cell, as far as anybody knows.
    laid = overlay(cells, executed, saved=0.5)
    assert [cell.source for cell in laid.cells] == ["x = 5", "a = 1", TRAIN]
    assert laid.notes == ()
    # The front end says it was deleted, or cut and put back elsewhere: its effects are there.
    laid = overlay(cells, executed, saved=0.5, deleted={"gone": 9.0})
    assert [cell.source for cell in laid.cells] == ["x = 5", "a = 1", TRAIN]
    told = "deleted or moved since the notebook was saved, still part of this run: cell [1]"
    assert laid.notes == (told,)
    # It was saved after the cell ran, without it.
    laid = overlay(cells, executed, saved=3.0, deleted={"gone": 9.0})
    assert [cell.source for cell in laid.cells] == ["a = 1", TRAIN]
    assert laid.notes == ("ran and deleted since, so left out: cell [1]",)
    assert [(cell.source, why) for cell, why in laid.left_out] == [("x = 5", "it was deleted")]
    # Its ids are of another kind than the file's, as VS Code's are: nothing is known.
    executed = [replace(run, id=f"vscode-notebook-cell:/{run.id}") for run in executed]
    laid = overlay(cells, executed, saved=3.0)
    assert [cell.source for cell in laid.cells] == ["x = 5", "a = 1", TRAIN]


def test_a_cell_that_was_deleted_and_is_still_in_the_file() -> None:
    cells = document("a = 1", TRAIN)
    executed = [ran("a = 1", 1, "c0"), ran(TRAIN, 5, "c1")]
    (note,) = overlay(cells, executed, saved=0.5, deleted={"c0": 5.0}).notes
    assert note.startswith("deleted or moved since the notebook was saved, still part of")
    # Saved since with it: it was put back.
    assert overlay(cells, executed, saved=6.0, deleted={"c0": 5.0}).notes == ()


def test_in_a_document_cells_that_failed_stay() -> None:
    executed = [ran("check()", 1, "c0", failed=True), ran(TRAIN, 2, "c1")]
    laid = overlay(document("check()", TRAIN), executed)
    assert [cell.source for cell in laid.cells] == ["check()", TRAIN]


def test_what_failed_and_is_in_no_file_is_left_out() -> None:
    """Without ids it may be an older version, or a cell that was deleted."""
    cells = document("import torch", TRAIN)
    executed = [
        ran("print('unlike anything', missing)", 1, failed=True),
        ran("import torch", 2),
        ran(TRAIN, 3),
    ]
    laid = overlay(cells, executed)
    assert [cell.source for cell in laid.cells] == ["import torch", TRAIN]
    assert laid.notes == ("left out after a failure: cell [1]",)


def test_versions_of_a_long_cell_are_known_by_their_likeness() -> None:
    text = "".join(f"value_{i} = compute({i}, scale=3, offset=7)\n" for i in range(40))
    executed = [
        ran(text.replace("value_0", "valeu_0"), 1),
        ran(text, 2),
        ran("%load_ext tpunb", 3),
        ran(TRAIN, 4, "c2"),
    ]
    laid = overlay(document(text, "%load_ext tpunb", TRAIN), executed)
    assert [cell.number for cell in laid.cells] == [2, 3, 4]


def test_a_thousand_cells_in_any_order() -> None:
    texts = [f"value_{i} = {i}\n" * 20 for i in range(1000)]
    cells = document(*texts, TRAIN)
    backwards = [ran(texts[i], 1000 - i) for i in range(999, -1, -1)]
    laid = overlay(cells, [*backwards, ran(TRAIN, 1001)])
    assert [cell.number for cell in laid.cells] == [*range(1000, 0, -1), 1001]
    assert laid.train == 1000
    assert laid.notes == ()


def test_long_notes_are_cut() -> None:
    cells = tuple(Cell(i, "code", f"x{i} = '{'y' * 60}'", None, f"c{i}") for i in range(9))
    document = (*cells, Cell(9, "code", TRAIN, None, "t"))
    (note,) = overlay(document, [Execution(TRAIN, 1, "t")]).notes
    assert note.endswith(" and 4 more")
    assert "cell [ ] (x0 = 'yyy" in note
    assert len(note) < 400
