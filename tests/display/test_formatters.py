"""Results, diagnoses and snapshots in a notebook, in a terminal, and for rich."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from rich.console import Console

from tests.drivers.kernel import kernel
from tpunb.diagnostics.failure import Diagnosis, Evidence, diagnose
from tpunb.display import formatters, status
from tpunb.notebook.models import Cell, Snapshot
from tpunb.runs import listing
from tpunb.runs.directory import RunDir
from tpunb.runs.metrics import Best
from tpunb.runs.result import Causes, RunResult, Summary
from tpunb.runs.spec import FailureKind, RunState

MakeResult = Callable[..., RunResult]

KNOWN = Diagnosis("x", "A <cause>.", "Do it.", (Evidence("line <1>", (0,)),), 1.0, "https://x/?a&b")
CELLS = (Cell(0, "code", "a = 1", 3), Cell(1, "code", "train()", 4), Cell(2, "markdown", "text"))
SNAPSHOT = Snapshot(
    CELLS,
    1,
    "digits.ipynb",
    "JupyterLab",
    ("a note",),
    ((Cell(1, "code", "b = 2"), "it never ran"),),
    "digits",
)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    with pytest.MonkeyPatch.context() as patch:  # no history shared with other processes
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        made = InteractiveShell()
    formatters.register_formatters(made)
    yield made
    formatters.unregister_formatters(made)
    assert html(made, KNOWN) is None
    made.history_manager.end_session()  # type: ignore[union-attr]
    InteractiveShell.clear_instance()


def html(shell: InteractiveShell, value: object) -> str | None:
    formatter: Any = shell.display_formatter
    data, _ = formatter.format(value)
    assert data["text/plain"]
    return data.get("text/html")


def plain(shell: InteractiveShell, value: object) -> str:
    formatter: Any = shell.display_formatter
    return str(formatter.format(value)[0]["text/plain"])


def printed(value: object) -> str:
    """Return the output of rich, without colours."""
    file = io.StringIO()
    Console(file=file, width=200).print(value)
    return file.getvalue()


def test_result_card(shell: InteractiveShell, make_result: MakeResult) -> None:
    curves = {"<loss>": ((0, 4.0), (1, 3.0), (2, 2.0)), "one": ((0, 1.0), (1, 1.0))}
    summary = Summary((Best("<loss>", 2.0, 2),), curves=curves)
    result = make_result(summary=summary, returns={"w": 1})
    card = html(shell, result)
    assert card is not None
    assert "<b>succeeded</b> · digits · 4 rehearsal cores · 12 s · returned: w" in card
    assert 'alt="&lt;loss&gt; 2 from 4 to 2"' in card
    assert card.count("data:image/svg+xml") == 1
    assert "one</span> <b>1</b>" in card
    assert "<div>best &lt;loss&gt; 2 (step 2)</div>" in card
    assert repr(result).startswith("RunResult succeeded on 4 rehearsal cores")
    assert printed(result) == f"{result}\n"


def test_failed_result_card(shell: InteractiveShell, make_result: MakeResult) -> None:
    card = html(shell, make_result("failed", diagnoses=(KNOWN,)))
    assert card is not None
    assert "<b>rank 2 failed in cell [7], line 3: ValueError: no data</b>" in card
    assert card.index("A &lt;cause&gt;.") < card.index("<details><summary>traceback")
    assert html(shell, make_result("hung", failures=())) is not None


def test_the_card_of_a_failure_contains_the_whole_error(
    shell: InteractiveShell, make_result: MakeResult, tmp_path: Path
) -> None:
    """The error below the card is one line."""
    failed = make_result("failed", diagnoses=(KNOWN,))
    assert failed.failure is not None
    others = [replace(failed.failure, rank=0), replace(failed.failure, rank=1, type="KeyError")]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "1.pt").touch()
    failed = replace(failed, failures=(failed.failure, *others))
    card = unescape(html(shell, failed) or "")
    told = [line.strip() for line in failed.explain().splitlines() if line.strip()]
    for line in told[:-1]:  # the last one is the log's path
        words = line.partition(" [x]")[0].removeprefix("fix: ").removeprefix("see ")
        assert words.removeprefix("| rank 0: ") in f"{card} line <1>"
    hang = replace(failed.failure, rank=None, kind=FailureKind.HANG, message="silent:\nrank 1: <x>")
    card = html(shell, make_result("hung", failures=(hang,))) or ""
    assert "<pre" in card
    assert "rank 1: &lt;x&gt;" in card
    assert f"stacks of all ranks: {tmp_path / 'attempts'}" in card


def test_result_below_its_own_card_is_one_line(
    shell: InteractiveShell,
    make_result: MakeResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = [3]
    monkeypatch.setattr(formatters, "_execution_count", lambda: cell[0])
    formatters.note_card(tmp_path)
    assert html(shell, make_result()) is None
    assert plain(shell, make_result()) == repr(make_result())
    assert html(shell, make_result(dir=tmp_path / "other")) is not None
    cell[0] = 4
    assert html(shell, make_result()) is not None
    assert plain(shell, make_result()) == str(make_result())


def test_diagnoses(shell: InteractiveShell) -> None:
    one, two = html(shell, KNOWN), html(shell, Causes([KNOWN, replace(KNOWN, id="y")]))
    assert one is not None
    assert two is not None
    assert "<b>A &lt;cause&gt;.</b> [x]" in one
    assert "rank 0: line &lt;1&gt;" in one
    assert '<a href="https://x/?a&amp;b">' in one
    assert two.startswith(one)
    assert "[y]" in two
    assert repr(KNOWN) == str(KNOWN) == printed(KNOWN).removesuffix("\n")
    found = diagnose("OSError: [Errno 28] No space left on device", 1)
    assert repr(found) == "\n\n".join(map(str, found))
    assert "[disk-full]" in repr(found)
    assert repr(diagnose("all is well", 0)) == "[]"


def test_snapshot_card(shell: InteractiveShell) -> None:
    assert repr(SNAPSHOT).splitlines() == [
        "Snapshot of digits (digits.ipynb), from JupyterLab: 2 code cells",
        "the train cell is cell [4]",
        "left out: cell [ ] (b = 2), it never ran",
        "a note",
    ]
    card = html(shell, SNAPSHOT)
    assert card is not None
    assert "<b>Snapshot of digits" in card
    assert printed(SNAPSHOT) == f"{SNAPSHOT}\n"


def test_table_of_runs(shell: InteractiveShell, tmp_path: Path) -> None:
    def run(name: str, state: RunState, failure: str) -> listing.StoredRun:
        folder = RunDir(tmp_path / name)
        return listing.StoredRun(folder, state, "2 CPU", "3 s", "", failure, 0.0, 3.0)

    runs = [run("first", RunState.FAILED, "<b> & more"), run("second", RunState.RUNNING, "")]
    further = {"best": ["", ""]}
    table = listing.RunTable.of(runs, further, ["and 2 older: --all"])
    shown = html(shell, table)
    assert shown is not None
    heads = re.findall(r"<th[^>]*>(.*?)</th>", shown)
    assert heads == plain(shell, table).splitlines()[0].split()  # one source of columns
    assert heads == ["run", "state", "cores", "time", "failure"]
    assert ">&lt;b&gt; &amp; more</td>" in shown
    assert shown.count(f"solid {status.COLOURS[RunState.FAILED]}") == 1
    assert "<div>and 2 older: --all</div>" in shown
    nothing = html(shell, listing.list_runs(tmp_path))
    assert nothing == f"<div>There are no runs in {tmp_path} yet.</div>"


@pytest.mark.usefixtures("lent")
def test_result_card_is_shown_once_in_a_kernel(tmp_path: Path) -> None:
    with kernel(tmp_path) as nb:
        nb.run("%load_ext tpunb", "load").good()
        ran = nb.run("%%tpu_train --cores 1\nimport tpunb\ntpunb.log(step=1, loss=0.5)", "train")
        assert set(ran.good().value or {}) == {"text/plain"}
        later = nb.run("import tpunb\ntpunb.last_run", "show").good()
        assert later.value is not None
        assert "<b>succeeded</b> · digits · 1 rehearsal core" in later.value["text/html"]
        found = nb.run("tpunb.diagnose('No space left on device', 1)", "diagnose").good()
        assert found.value is not None
        assert "<b>Fix:</b>" in found.value["text/html"]
