"""The same text in a terminal, with colours, and everywhere else, without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import ROOT
from tpunb import terminal

LOG = "OSError: [Errno 28] No space left on device\n"
_ENV = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}


def at_terminal(folder: Path, *words: str, term: str = "xterm-256color", **env: str) -> str:
    """What a command of Python's shows at a terminal."""
    ours, theirs = os.openpty()
    given = {**_ENV, "TERM": term, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder), **env}
    shown = b""
    with subprocess.Popen(
        [sys.executable, *words], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=given
    ):
        os.close(theirs)
        try:
            while read := os.read(ours, 65536):
                shown += read
        except OSError:  # nobody is left who could write there
            pass
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("Ready: 8 cores", {"Ready: 8 cores": "bold green"}),
        (
            "First mend this:\n  no\n  → `pip install x`\n\ndevice     TPU\ntime left  9 s",
            {
                "First mend this:": "bold red", "  → ": "bold", "`pip install x`": "cyan",
                "device": "dim", "time left": "dim",
            },
        ),
        ("RunResult succeeded on 4 cores\nbest loss 1", {"RunResult succeeded": "bold green"}),
        (
            "RankFailedError: rank 2 failed\n\n     1  a\n❯    2  b",
            {"RankFailedError: rank 2 failed": "bold red", "❯    2  b": "bold"},
        ),
        ("RunResult stopped (in time) after 9 s", {"RunResult stopped (in time)": "bold yellow"}),
        ("rank 2 failed in cell [7] · 4 ranks", {"rank 2 failed in cell [7]": "bold red"}),
        ("training · 4 of 4 ranks", {}),
        ("20260102-030405-a  lost     4 CPU", {"lost": "bold red"}),
    ],
)  # fmt: skip
def test_what_matters_is_marked(text: str, marked: dict[str, str]) -> None:
    styled = terminal.styled(text)
    assert styled.plain == text
    assert {text[span.start : span.end]: span.style for span in styled.spans} == marked


def test_a_command_has_colours_at_a_terminal_that_shows_them_and_nowhere_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "log").write_text(LOG)
    words = ("-m", "tpunb", "diagnose", "log")
    piped = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env={**_ENV, "PYTHONPATH": str(ROOT)},
        text=True, capture_output=True, check=True,
    ).stdout  # fmt: skip
    assert "\x1b" not in piped
    shown = at_terminal(tmp_path, *words)
    assert plain(shown) == piped
    assert shown.startswith("\x1b[1mA disk is full. [disk-full]\x1b[0m\n")
    assert "\x1b[1m  fix:\x1b[0m" in shown
    assert at_terminal(tmp_path, *words, term="dumb") == piped


@pytest.mark.slow
def test_values_and_errors_have_colours_in_ipython(tmp_path: Path) -> None:
    (tmp_path / "cells.ipy").write_text(
        "from tpunb.models import Snapshot\nfrom tpunb.errors import TpunbError\n"
        "display(Snapshot((), None, None, 'a test', name='digits'))\n"
        "raise TpunbError('do `this`')\n"
    )
    words = ("-m", "IPython", "--no-banner", "--simple-prompt", "cells.ipy")
    shown = at_terminal(tmp_path, *words)
    assert "\x1b[1mSnapshot of digits, from a test: 0 code cells\x1b[0m\n" in shown
    assert "\x1b[1;31mTpunbError: do \x1b[0m\x1b[1;36m`this`\x1b[0m" in shown
