"""Tab completion in a shell with the magics."""

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


def test_completion_of_options_choices_and_run_ids(shell: InteractiveShell, tmp_path: Path) -> None:
    runs = {made(tmp_path / "runs", name).id for name in "ab"}
    assert {"--returns", "--retries"} <= offered(shell, "%%tpu_train --cores 2 --ret\nprint(1)")
    for line, some, none in (
        ("%%tpu_train --cores 2 --co", {"--cold"}, {"--cores"}),  # it was given
        ("%%tpu_train --env A=b --en", {"--env"}, set()),  # it may be repeated
        ("%tpu_logs --level ", {"warning", "error"}, runs),
        ("%%tpu_train --resume ", runs, {"--cores"}),
        ("%tpu_stop ", runs, set()),
        ("%%tpu_train --returns ", set(), {"--cores", *runs}),
    ):
        found = offered(shell, line)
        assert (some - found, none & found) == (set(), set()), line
    completion.unregister_completers(shell)
    assert "--returns" not in offered(shell, "%%tpu_train --cores 2 --ret\nprint(1)")
