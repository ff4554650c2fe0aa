"""The messages that a run's events cause in the front end; finally in a real kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tpunb.display.front_end import FrontEnd
from tpunb.display.output_budget import FIRST, NEWEST, ROOM
from tpunb.display.run_view import RunView
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Figure, Metric, Note, Output, Phase, RanksStarted
from tpunb.runs.result import RunResult
from tpunb.runs.spec import PhaseKind, RunSpec, RunState

MakeResult = Callable[..., RunResult]


class Notebook:
    """A front end that records its messages, with a fake clock."""

    def __init__(self, *, terminal: bool = False, batch: bool = False) -> None:
        self.now = 10.0
        self.messages: list[tuple[float, str, str]] = []
        self.front = FrontEnd(
            self.write,
            None if terminal else self.publish,
            batch,
            newest=None if terminal else self.newest,
            figure=None if terminal else self.figure,
            room=None if terminal else ROOM,
        )

    def write(self, text: str) -> None:
        self.messages.append((self.now, "stream", text))

    def publish(self, bundle: dict[str, str]) -> None:
        assert set(bundle) == {"text/html", "text/plain"}
        self.messages.append((self.now, "status", bundle["text/plain"]))

    def newest(self, head: str, lines: Sequence[str]) -> None:
        self.messages.append((self.now, "newest", "\n".join([head, *lines])))

    def figure(self, number: int, png: bytes, text: str) -> None:
        self.messages.append((self.now, "figure", f"{number} {png.decode()}"))

    def of(self, kind: str) -> list[str]:
        return [text for _, what, text in self.messages if what == kind]


Open = Callable[..., RunView]


@pytest.fixture
def open_view(tmp_path: Path, make_spec: Callable[..., RunSpec]) -> Open:
    def open_it(notebook: Notebook, *notes: Note) -> RunView:
        return RunView(
            make_spec(),
            RunDir(tmp_path / "digits"),
            logs=frozenset(range(4)),
            front=notebook.front,
            clock=lambda: notebook.now,
            notes=notes,
        )

    return open_it


def train(view: RunView, notebook: Notebook, seconds: int = 10) -> None:
    """Show the output of four ranks that print and log twenty times a second."""
    view.show(Note("a note"))
    view.show(Phase(PhaseKind.TRAINING, "training"))
    view.show(RanksStarted(0, (1, 2, 3, 4)))
    for step in range(seconds * 20):
        notebook.now += 0.05
        for rank in range(4):
            view.show(Output(rank, "stdout", f"step {step}\n"))
            view.show(Output(rank, "stderr", f"\r{step}%"))
            view.show(Metric(rank, step, {"loss": float(rank)}))
        view.tick()
    view.show(Ended(RunState.SUCCEEDED))


def test_a_run_from_end_to_end(open_view: Open, make_result: MakeResult, tmp_path: Path) -> None:
    notebook = Notebook()
    view = open_view(notebook)
    train(view, notebook)
    view.finish(make_result())

    text = "".join(notebook.of("stream"))
    assert text.startswith("a note\n[0-3] step 0\n")
    assert text.endswith("[0-3] step 199\n[0-3] 199%\n")
    assert [line for line in text.splitlines() if " step " in line] == [
        f"[0-3] step {step}" for step in range(200)
    ]
    assert notebook.of("newest") == []
    kinds = [kind for _, kind, _ in notebook.messages]
    assert kinds[0] == "status"
    assert kinds[-1] == "status"
    assert len(notebook.of("status")) <= 2 * 10 + 2
    for start, _, _ in notebook.messages[:-2]:  # the end is shown at once
        assert sum(start <= time < start + 1 for time, _, _ in notebook.messages[:-2]) <= 12
    running = notebook.of("status")[10]
    assert running.startswith("training · 4 of 4 ranks · rehearsal on CPU · ")
    assert " · loss 1.5 · " in running
    assert running.splitlines()[1].startswith("[0-3] ")
    last = notebook.of("status")[-1]
    assert last.startswith("succeeded · 4 ranks · rehearsal on CPU · 12 s · step 199 · loss 1.5 · ")
    assert str(tmp_path / "digits") in last


def test_notes_on_the_run_are_on_its_card(open_view: Open, make_result: MakeResult) -> None:
    notebook = Notebook()
    view = open_view(notebook, Note("a new one"), Note("an old one", minor=True))
    view.show(Note("what is kept", minor=True))
    view.tick()
    [running] = notebook.of("status")
    assert running.endswith("\na new one")
    view.finish(make_result())
    assert notebook.of("status")[-1].endswith("\na new one\nan old one\nwhat is kept")
    assert notebook.of("stream") == []


@pytest.mark.parametrize("batch", [False, True])
def test_log_flood_keeps_first_lines_and_replaces_the_newest(
    open_view: Open, make_result: MakeResult, *, batch: bool
) -> None:
    notebook = Notebook(batch=batch)
    view = open_view(notebook)
    view.show(RanksStarted(0, (1, 2, 3, 4)))
    for number in range(100):
        text = "".join(f"step {number * 250 + n}\n" for n in range(250))
        for rank in range(4):
            view.show(Output(rank, "stdout", text))
            view.show(Output(rank, "stderr", f"of {rank} at {number}\n"))
        notebook.now += 0.05
        view.tick()
    view.finish(make_result("failed"))  # rank 2

    text, words = "".join(notebook.of("stream")).split("last lines of")
    assert len(text.encode()) < ROOM
    assert text.startswith("[0-3] step 0\n[0-3] step 1\n")
    assert text.count("\n") == FIRST
    assert text.count("\n[0-3] step ") == int(text.rstrip().rpartition(" ")[2])  # no gap
    assert words.startswith(" rank 2 on stderr:\n[2] of 2 at 80\n")
    head, *newest = notebook.of("newest")[-1].splitlines()
    assert head.startswith("… the newest of 100,400 lines (")
    assert head.endswith("digits/run.log; search: %tpu_logs):")
    assert NEWEST / 2 < len(newest) <= NEWEST
    assert newest[-4:] == [f"[{rank}] of {rank} at 99" for rank in range(4)]
    assert newest[-5] == "[0-3] step 24999"
    updates = [time for time, kind, _ in notebook.messages if kind == "newest"]
    assert len(updates) <= (5 if batch else 25)


def test_log_flood_shows_the_last_lines_at_the_end(
    open_view: Open, make_result: MakeResult
) -> None:
    notebook = Notebook()
    view = open_view(notebook)
    view.show(Output(0, "stdout", "first\n" * ROOM))
    for _ in range(4):
        notebook.now += 0.5
        view.tick()
    view.show(Output(0, "stdout", "last\n"))
    view.tick()  # it waits for equal lines of other ranks
    assert "last" not in notebook.of("newest")[-1].splitlines()
    view.finish(make_result())
    assert notebook.of("newest")[-1].endswith("\n[0] last")


@pytest.mark.parametrize("terminal", [False, True])
def test_figures_are_shown_below_the_lines_before_them_once_they_are_here(
    open_view: Open, tmp_path: Path, *, terminal: bool
) -> None:
    notebook, run = Notebook(terminal=terminal), RunDir(tmp_path / "digits")
    view = open_view(notebook)
    run.attempt(1, 0).mkdir(parents=True)
    view.tick()
    for number, content in enumerate((b"one", b"again", b""), 1):
        view.show(Output(0, "stdout", f"line {number}\n"))
        if content:
            run.figure(1, 1).write_bytes(content)
        view.show(Figure(1, 1 if content else 2))
        view.tick()
        notebook.now += 0.3
    seen = [
        (kind, text) for _, kind, text in notebook.messages if kind == "figure" or "line" in text
    ]
    if terminal:
        lines = "".join(text for _, kind, text in notebook.messages if kind == "stream")
        assert lines.count(f"figure 1: {run.figure(1, 1)}\n") == 1
        assert "figure 2" not in lines
    else:
        assert seen == [
            ("stream", "[0] line 1\n"),
            ("figure", "1 one"),
            ("stream", "[0] line 2\n"),
            ("figure", "1 again"),
        ]
        run.figure(1, 2).write_bytes(b"late")  # it comes from another machine
        view.tick()
        assert notebook.of("figure")[-1] == "2 late"


def test_an_unchanged_status_is_not_sent_again(open_view: Open) -> None:
    notebook = Notebook()
    view = open_view(notebook)
    for _ in range(200):
        notebook.now += 0.004
        view.tick()
    assert len(notebook.messages) == 1


def test_a_batch_front_end_gets_few_messages(open_view: Open, make_result: MakeResult) -> None:
    notebook = Notebook(batch=True)
    view = open_view(notebook)
    train(view, notebook)
    view.finish(make_result())
    assert len(notebook.of("stream")) <= 7
    assert "".join(notebook.of("stream")).count("[0-3] step ") == 200


def test_a_terminal_gets_a_line_when_the_state_changes_and_now_and_then(
    open_view: Open, make_result: MakeResult
) -> None:
    notebook = Notebook(terminal=True)
    view = open_view(notebook)
    view.tick()
    train(view, notebook, seconds=25)
    view.finish(make_result("failed"))
    lines = "".join(notebook.of("stream")).splitlines()
    status = [line.split(" · ")[0] for line in lines if " · rehearsal on CPU · " in line]
    assert status == [
        "starting",
        "training",
        "training",
        "training",
        "rank 2 failed in cell [7], line 3: ValueError: no data",
    ]


def test_run_folder_below_the_working_directory_is_shown_relative(
    make_spec: Callable[..., RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = Notebook()
    view = RunView(
        make_spec(), RunDir("runs/one"), logs=frozenset(), front=notebook.front, clock=lambda: 0.0
    )
    view.tick()
    assert " · runs/one · updated " in notebook.of("status")[0]
