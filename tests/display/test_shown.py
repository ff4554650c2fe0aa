"""Results, diagnoses and snapshots in a notebook, in a terminal, and for rich."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from rich.console import Console

from tests.kernels import kernel
from tpunb.best import Best
from tpunb.diagnosis import Diagnosis, Evidence, diagnose
from tpunb.diagnosis.finding import Causes
from tpunb.display import shown
from tpunb.models import Cell, RunResult, Snapshot
from tpunb.summary import Summary

KNOWN = Diagnosis("x", "A <cause>.", "Do it.", (Evidence("line <1>", (0,)),), 1.0, "https://x/?a&b")
CELLS = (Cell(0, "code", "a = 1", 3), Cell(1, "code", "train()", 4), Cell(2, "markdown", "text"))
SNAPSHOT = Snapshot(
    CELLS, 1, "digits.ipynb", "JupyterLab", ("a note",),
    ((Cell(1, "code", "b = 2"), "it never ran"),), "digits",
)  # fmt: skip


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    with pytest.MonkeyPatch.context() as patch:  # a history that no other process writes
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        made = InteractiveShell()
    shown.register(made)
    yield made
    shown.unregister(made)
    assert html(made, KNOWN) is None
    made.history_manager.end_session()  # type: ignore[union-attr]
    InteractiveShell.clear_instance()


def html(shell: InteractiveShell, value: object) -> str | None:
    formatter: Any = shell.display_formatter
    data, _ = formatter.format(value)
    assert data["text/plain"]
    return data.get("text/html")


def printed(value: object) -> str:
    """What rich prints, without colours."""
    file = io.StringIO()
    Console(file=file, width=200).print(value)
    return file.getvalue()


def test_a_result(
    shell: InteractiveShell, make_result: Callable[..., RunResult], tmp_path: Path
) -> None:
    rows = [{"rank": 0, "attempt": 0, "step": n, "time": n, "<loss>": 4.0 - n} for n in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = make_result(summary=Summary((Best("<loss>", 2.0, 2),)), returns={"w": 1})
    card = html(shell, result)
    assert card is not None
    assert "<b>succeeded</b> · digits · 4 rehearsal cores · 12 s · back in the kernel: w" in card
    assert "&lt;loss&gt;</span> <b>2</b>" in card
    assert "data:image/svg+xml" in card
    assert "<div>best &lt;loss&gt; 2 (step 2)</div>" in card
    assert repr(result).startswith("RunResult succeeded on 4 rehearsal cores")
    assert printed(result) == f"{result}\n"


def test_a_failed_result(shell: InteractiveShell, make_result: Callable[..., RunResult]) -> None:
    card = html(shell, make_result("failed", diagnoses=(KNOWN,)))
    assert card is not None
    assert "<b>rank 2 failed in cell [7], line 3: ValueError: no data</b>" in card
    assert card.index("A &lt;cause&gt;.") < card.index("<details><summary>traceback")
    assert html(shell, make_result("hung", failures=())) is not None


def test_below_its_own_card_text_is_enough(
    shell: InteractiveShell, make_result: Callable[..., RunResult], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cell = [3]
    monkeypatch.setattr(shown, "_cell", lambda: cell[0])
    shown.stands_here(tmp_path)
    assert html(shell, make_result()) is None
    assert html(shell, make_result(dir=tmp_path / "other")) is not None
    cell[0] = 4
    assert html(shell, make_result()) is not None


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


def test_a_snapshot(shell: InteractiveShell) -> None:
    assert repr(SNAPSHOT).splitlines() == [
        "Snapshot of digits (digits.ipynb), from JupyterLab: 2 code cells",
        "the train cell is cell [4]", "left out: code cell 2, it never ran", "a note",
    ]  # fmt: skip
    card = html(shell, SNAPSHOT)
    assert card is not None
    assert "<b>Snapshot of digits" in card
    assert printed(SNAPSHOT) == f"{SNAPSHOT}\n"


@pytest.mark.slow
def test_in_a_kernel_the_card_stands_once(tmp_path: Path) -> None:
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
