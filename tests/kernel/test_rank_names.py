"""Names that a train cell assigns in its ranks, and that the kernel does not have."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import ExecutionResult

from tpunb.kernel.pipeline import PreparedNotebook, prepare_file
from tpunb.kernel.rank_names import RankNames, missing_below
from tpunb.notebook.models import Cell, Snapshot


def prepared(train: str, *below: str) -> PreparedNotebook:
    """A notebook with one train cell, [1], and the cells below it."""
    texts = (f"%%tpu_train\n{train}", *below)
    cells = tuple(Cell(n, "code", text, n + 1) for n, text in enumerate(texts))
    return prepare_file(
        Snapshot(cells, 0, "nb.ipynb", "a test"), replicate=False, backend="xla", ranks=2
    )


ASSIGNED = "`w` was assigned in the ranks of cell [1]: `--returns w` brings it"
IMPORTED = "`w` was imported in the ranks of cell [1]: import it in this notebook's cells too"
DEFINED = "`w` was defined in the ranks of cell [1]: define it in a cell above"


@pytest.mark.parametrize(
    ("train", "hint"),
    [
        ("w = 1", ASSIGNED),
        ("a, (w, *b) = 1, (2, 3)", ASSIGNED),
        ("if (w := 1): pass", ASSIGNED),
        ("import w", IMPORTED),
        ("from torch import w", IMPORTED),
        ("def w(): pass", DEFINED),
        ("class w: pass", DEFINED),
        ("print(w)", None),
        ("[w for w in range(3)]", None),
    ],
)
def test_a_name_error_is_explained_by_what_the_train_cell_did_with_the_name(
    train: str, hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    names, ended = RankNames(), ExecutionResult(None)
    names.note_run(prepared(train), brought=())
    names.explain(ended)
    names.explain(None)
    ended.error_in_exec = KeyError("w")
    names.explain(ended)
    assert capsys.readouterr().out == ""
    ended.error_in_exec = NameError("name 'w' is not defined", name="w")
    names.explain(ended)
    assert capsys.readouterr().out == ("" if hint is None else f"{hint}\n")
    names.note_run(prepared(train), brought=["w"])
    names.explain(ended)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("below", "noted"),
    [
        ("print(w)", True),
        ("def show(): return w.sum()", True),
        ("w = 2\nprint(w)", False),
        ("def show():\n    import w\n    w.f()", False),
        ("%timeit w", False),
    ],
)
def test_names_that_cells_below_read_are_noted(below: str, noted: bool) -> None:
    notebook = prepared("w = 1", "x = 2", below)
    line = f"{ASSIGNED} (cell [3] reads it)"
    assert list(missing_below(notebook, (), {})) == [line] * noted
    assert list(missing_below(notebook, ("w",), {})) == []
    assert list(missing_below(notebook, (), {"w": 1})) == []
