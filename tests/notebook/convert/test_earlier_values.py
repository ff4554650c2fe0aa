"""What earlier train cells bring, in the scripts of later ones and in scripts by themselves."""

from __future__ import annotations

import pytest

from tests.notebook.convert.notebooks import lines_of, notebook
from tpunb.errors import ConversionError
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.convert.earlier_values import TrainLine, train_line
from tpunb.notebook.models import Absent, EarlierRun, EarlierValues, LeftOut

LINES = {
    "%%tpu_train": TrainLine(),
    "# note\n\n%%tpu_train --returns a,b --out r": TrainLine(("a", "b"), "r"),
    "%%tpu_train --returns=a, --cores 2 --out=r\n--out no": TrainLine(("a",), "r"),
    '%%tpu_train --returns "a, b" --bg': TrainLine(("a", "b")),
    "%%tpu_train --returns {names}": TrainLine(unclear=True),
    "%%tpu_train --out $out": TrainLine(unclear=True),
    "%%tpu_train --name 'no end": TrainLine(),
    "x = 1": TrainLine(),
}


@pytest.mark.parametrize(("source", "found"), LINES.items())
def test_the_option_line(source: str, found: TrainLine) -> None:
    assert train_line(source) == found


FIRST = "%%tpu_train --returns a --out r\na = 1"


def test_a_run_has_what_the_kernel_got_where_the_cell_stands() -> None:
    got = {
        0: EarlierValues((EarlierRun("/runs/one", ("a",), "r"), EarlierRun("/runs/two", ("b",))))
    }
    script = convert(notebook(FIRST, "c = a, b, r", "%%tpu_train\nprint(c)"), got)
    assert lines_of(script, 0) == [
        "# another train cell, replaced by its values: %%tpu_train --returns a --out r",
        "from tpunb.runs import ended as _tpunb_ended",
        "_tpunb_run = _tpunb_ended.read_run('/runs/one', 'a')",
        "a = _tpunb_run.returns['a']",
        "r = _tpunb_run",
        "_tpunb_run = _tpunb_ended.read_run('/runs/two', 'b')",
        "b = _tpunb_run.returns['b']",
    ]
    assert [omission.reason for omission in script.omissions] == [LeftOut.TRAIN_CELL]


def test_a_handle() -> None:
    got = {0: EarlierValues((EarlierRun("/runs/one", ("a",), "h", handle=True, raises=False),))}
    script = convert(notebook("%%tpu_train --bg --out h", "%%tpu_train\nprint(h)"), got)
    assert lines_of(script, 0)[2:] == [
        "h = _tpunb_ended.EndedRun('/runs/one', 'a', raises=False)",
        "a = h.result.returns['a']",
    ]


def test_attaching_brings_it_at_its_line() -> None:
    source = "x = 1\nif x:\n    r = %tpu_attach one\nprint(r, a)"
    got = {0: EarlierValues((EarlierRun("/runs/one", ("a",)),))}
    script = convert(notebook(source, "%%tpu_train\nprint(r)"), got)
    assert lines_of(script, 0) == [
        "x = 1",
        "if x:",
        "    from tpunb.runs import ended as _tpunb_ended; "
        "_tpunb_run = _tpunb_ended.read_run('/runs/one', 'a'); "
        "a = _tpunb_run.returns['a']; r = _tpunb_run",
        "print(r, a)",
    ]


def test_a_cell_that_is_skipped_or_below_brings_nothing() -> None:
    got = {0: EarlierValues((EarlierRun("/runs/one", ("a",)),))}
    for cells, place in (
        ((f"# tpu: skip\n{FIRST}", "%%tpu_train\nprint(a)"), 1),
        (("%%tpu_train\nprint(a)", FIRST), 0),
    ):
        with pytest.raises(ConversionError, match="`a` is defined only in cell"):
            convert(notebook(*cells, train=place), {1 - place: got[0]})


ABSENT = Absent("which is still running in the background", "wait for it with `h.wait()`")


def test_why_it_is_not_there() -> None:
    got = {0: EarlierValues(absent={"a": ABSENT})}
    with pytest.raises(ConversionError, match=r"in cell \[1\], which is still running in.*wait"):
        convert(notebook(FIRST, "%%tpu_train\nprint(a)"), got)
    script = convert(notebook("b = a = 0", FIRST, "%%tpu_train\nprint(a, b)"), {1: got[0]})
    assert [str(change) for change in script.missing_changes] == [
        "the train cell reads `a` as it is above cell [2], which is still running in the "
        "background: for its value, wait for it with `h.wait()`"
    ]


ALONE = """
import random, torch
weight = torch.nn.Parameter(torch.zeros(2))
layer = {"tied": weight, "again": weight}
""".strip()


NOT_JUST_LOOKED_AT = [
    "best = min(r.metrics()['loss'])\nprint(best)",
    "history.append(tpunb.last_run.metrics())",
    "if r.duration > 1:\n    history = []",
]


@pytest.mark.parametrize("source", NOT_JUST_LOOKED_AT)
def test_what_a_script_cannot_have_is_refused(source: str) -> None:
    cells = ["history = []", FIRST, source, "%%tpu_train\nprint(history, best)"]
    with pytest.raises(ConversionError, match=r"a script that runs by itself does not have|best"):
        convert(notebook(*cells))
