"""`tpunb run`: what follows the runs of a notebook in a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpunb.kernel import papermill
from tpunb.runs import logs


def test_an_interrupt_does_not_wait_for_the_end_of_a_detached_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    following, ended = threading.Event(), threading.Event()

    def follow(*given: object, **options: object) -> Iterator[list[str]]:
        following.set()
        assert ended.wait(60)
        yield ["the last line"]

    monkeypatch.setattr(logs, "follow_lines", follow)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(papermill, "LAST_LINES", 0.0)
    ran = tmp_path / "ran"
    ran.write_text(f"{tmp_path}\n")
    watched = papermill._watched(ran)
    watched.__enter__()
    assert following.wait(60)
    interrupt = KeyboardInterrupt()
    assert not watched.__exit__(KeyboardInterrupt, interrupt, None)
    [watcher] = [thread for thread in threading.enumerate() if thread.name == "tpunb-watch"]
    ran.unlink()  # as `run_notebook` does before the process ends
    ended.set()
    watcher.join()
