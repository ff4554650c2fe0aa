"""What a run folder keeps of a notebook that only the front end has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.notebook.fronts import code, write
from tpunb import rundir
from tpunb.models import Snapshot
from tpunb.session import Session


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell()
    made = Session(shell)
    yield made
    made.close()
    shell.history_manager.end_session()


def test_the_content_where_there_is_no_file(session: Session, tmp_path: Path) -> None:
    sent = write(tmp_path / "sent.ipynb", code("a = 1", id="a")).read_text(encoding="utf-8")
    kept = rundir.create(tmp_path / "runs", "digits")
    session._keep_notebook(Snapshot((), None, None, "the page of Colab", content=sent), kept)
    assert nbformat.read(kept.path / "notebook.ipynb", as_version=4).cells[0].source == "a = 1"

    alone = rundir.create(tmp_path / "runs", "alone")
    session._keep_notebook(Snapshot((), None, None, "executed cells"), alone)
    assert list(alone.path.iterdir()) == []
