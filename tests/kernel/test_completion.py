"""Tab completion in a shell with the magics (the offers: tests/utils/test_completion.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

from tests.runs.test_listing import made
from tpunb.kernel import completion


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shell = InteractiveShell()
    completion.register_completers(shell, lambda: tmp_path / "runs")
    yield shell
    shell.history_manager.end_session()  # type: ignore[union-attr]
    InteractiveShell.clear_instance()


def offered(shell: InteractiveShell, cell: str) -> set[str]:
    """Return the completions at the end of the cell's first line."""
    with provisionalcompleter():
        found = shell.Completer.completions(cell, len(cell.split("\n")[0]))
        return {one.text for one in found}


def test_completion_of_options_and_run_ids(shell: InteractiveShell, tmp_path: Path) -> None:
    first, second = (made(tmp_path / "runs", name) for name in "ab")
    cell = "%%tpu_train --cores 2 --ret\nprint(1)"
    assert {"--returns", "--retries"} <= offered(shell, cell)
    assert {first.id, second.id} <= offered(shell, "%tpu_stop ")
    completion.unregister_completers(shell)
    assert "--returns" not in offered(shell, cell)
