"""Random sequences of a person's doings: the snapshot equals that of a small reference model.

The model is the notebook in the front end: it knows each cell, whatever its place and text.
`TPUNB_EXAMPLES` says how many sequences are tried.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import examples
from tpunb.notebook.capture.history import Execution
from tpunb.notebook.capture.overlay import overlay
from tpunb.notebook.models import Cell, LeftOut, Snapshot

EXAMPLES = int(os.environ.get("TPUNB_EXAMPLES") or examples(150))
TRAIN = "%%tpu_train\nloop()"
WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "kilo")


@dataclass(frozen=True)
class Own:
    """A cell in the front end."""

    id: str
    text: str
    kind: str = "code"


@dataclass
class Model:
    """The front end, its file and its kernel."""

    cells: list[Own] = field(default_factory=list)
    file: list[Own] = field(default_factory=list)
    saved: float = 0.0
    runs: list[Execution] = field(default_factory=list)
    clock: float = 1.0
    made: int = 0

    def insert(self, at: int, text: str, kind: str = "code") -> None:
        self.made += 1
        self.cells.insert(at, Own(f"c{self.made}", text, kind))

    def edit(self, at: int, text: str) -> None:
        self.cells[at] = replace(self.cells[at], text=text)

    def move(self, at: int, to: int) -> None:
        self.cells.insert(to, self.cells.pop(at))

    def execute(self, at: int) -> None:
        if self.cells[at].kind == "code":
            self.clock += 1
            cell = self.cells[at]
            self.runs.append(Execution(cell.text, len(self.runs) + 1, cell.id, time=self.clock))

    def save(self) -> None:
        self.clock += 1
        self.file, self.saved = list(self.cells), self.clock

    def train(self) -> None:
        """Execute the train cell, which is the one that says so."""
        self.execute(next(at for at, cell in enumerate(self.cells) if cell.text == TRAIN))

    def snapshot(self, ids: bool = True) -> Snapshot:
        document = tuple(
            Cell(at, one.kind, one.text, 99, one.id if ids else None)  # type: ignore[arg-type]
            for at, one in enumerate(self.file)
        )
        runs = self.runs if ids else [replace(run, id=None) for run in self.runs]
        return overlay(document, runs, saved=self.saved)

    def expected(self) -> tuple[list[tuple[str, str, int | None]], int, dict[str, str]]:
        """Id, text and number of each cell in order; where the train cell is; what is left out."""
        last = {str(run.id): run for run in self.runs}
        train = str(self.runs[-1].id)
        filed = [one.id for one in self.file]
        order = list(filed)
        # New cells follow what ran before their first execution, in the order they ran in.
        before = None
        for run in self.runs:
            if run.id not in order and run.id != train:
                _follow(order, str(run.id), before, filed)
            before = before if run.id == train and train not in order else run.id
        if train not in order:
            _follow(order, train, before, filed)
        at = order.index(train)
        known = any(id in filed for id in last)
        texts = {one.id: one for one in self.file}
        cells: list[tuple[str, str, int | None]] = []
        out: dict[str, str] = {}
        for place, id in enumerate(order):
            if id in last:
                gone = id not in filed and known and self.saved > last[id].time
                if gone and id != train:
                    out[id] = "it was deleted"
                else:
                    cells.append((id, last[id].source, last[id].number))
            elif texts[id].kind == "code" and place < at:
                out[id] = LeftOut.NEVER_RAN
            else:
                cells.append((id, texts[id].text, None))
        return cells, [id for id, _, _ in cells].index(train), out


def _follow(order: list[str], id: str, before: str | None, filed: list[str]) -> None:
    at = order.index(before) + 1 if before is not None else 0
    while at < len(order) and order[at] not in filed:
        at += 1
    order.insert(at, id)


@st.composite
def sessions(draw: st.DrawFn, *, equal_texts: bool = True, edits: bool = True) -> Model:
    """A person at work: it ends with the train cell."""
    model = Model()
    number = st.integers(0, 2 if equal_texts else 10**9)

    def text() -> str:
        word = WORDS[draw(st.integers(0, 2))] if equal_texts else WORDS[model.made % 10] * 3
        return f"{word}({model.made if not equal_texts else ''}, {draw(number)})"

    for _ in range(draw(st.integers(1, 4))):
        model.insert(len(model.cells), text(), draw(st.sampled_from(["code", "code", "markdown"])))
    model.insert(draw(st.integers(0, len(model.cells))), TRAIN)
    doings = ["insert", "new", "execute", "execute", "save", "move"] + [
        "edit",
        "delete",
        "train",
    ] * edits
    for what in draw(st.lists(st.sampled_from(doings), min_size=6, max_size=30)):
        at = draw(st.integers(0, len(model.cells) - 1))
        trains = model.cells[at].text == TRAIN
        if what == "insert":
            model.insert(at, text())
        elif what == "new":
            model.insert(at, text())
            model.execute(at)
        elif what == "execute" and not trains:
            model.execute(at)
        elif what == "save":
            model.save()
        elif what == "move":
            model.move(at, draw(st.integers(0, len(model.cells) - 1)))
        elif what == "edit" and not trains:
            model.edit(at, text())
        elif what == "delete" and not trains:
            del model.cells[at]
        elif what == "train":
            model.train()
    return model


some = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def shown(snapshot: Snapshot) -> list[tuple[str | None, str, int | None]]:
    return [(cell.id, cell.source, cell.number) for cell in snapshot.cells]


@some
@given(sessions())
def test_with_ids_the_snapshot_is_what_the_model_says(model: Model) -> None:
    model.train()
    laid = model.snapshot()
    cells, train, out = model.expected()
    if model.file:
        assert shown(laid) == cells
        assert laid.train == train
        assert {cell.id: why for cell, why in laid.left_out} == out
    assert [cell.index for cell in laid.cells] == list(range(len(laid.cells)))
    assert laid.train is not None
    assert laid.cells[laid.train].source == TRAIN


@some
@given(sessions())
def test_saved_the_snapshot_is_the_notebook_on_the_screen(model: Model) -> None:
    """Whatever went before: each cell that ran, at its place, with the text that ran."""
    model.save()
    model.train()
    last = {run.id: run for run in model.runs}
    at = next(place for place, cell in enumerate(model.cells) if cell.text == TRAIN)
    expected = [
        (cell.id, last[cell.id].source, last[cell.id].number)
        if cell.id in last
        else (cell.id, cell.text, None)
        for place, cell in enumerate(model.cells)
        if cell.id in last or cell.kind != "code" or place > at
    ]
    laid = model.snapshot()
    assert shown(laid) == expected
    edited = [
        run.number
        for place, cell in enumerate(model.cells)
        if (run := last.get(cell.id)) and run.source != cell.text and place < at
    ]
    said = [note for note in laid.notes if " edited after " in note]
    assert len(said) == bool(edited)
    assert all(f"[{number}]" in said[0] for number in edited[:5])


@some
@given(sessions())
def test_without_a_file_each_cell_stands_where_it_first_ran(model: Model) -> None:
    model.train()
    model.file = []
    order = list(dict.fromkeys(run.id for run in model.runs[:-1] if run.id != model.runs[-1].id))
    last = {run.id: run for run in model.runs}
    assert shown(model.snapshot()) == [
        (id, last[id].source, last[id].number) for id in [*order, model.runs[-1].id]
    ]


@some
@given(sessions(equal_texts=False, edits=False))
def test_texts_are_enough_where_no_two_are_equal(model: Model) -> None:
    """Without ids, as papermill and nbclient execute, and before %load_ext."""
    model.save()
    model.train()
    with_ids = model.snapshot()
    without = model.snapshot(ids=False)
    assert [(c.source, c.number) for c in without.cells] == [
        (c.source, c.number) for c in with_ids.cells
    ]
    assert without.train == with_ids.train
    assert [(c.source, why) for c, why in without.left_out] == [
        (c.source, why) for c, why in with_ids.left_out
    ]
