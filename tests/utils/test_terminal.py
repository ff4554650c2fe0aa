"""The same text with colours in a terminal, and without them everywhere else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.kernel import ROOT
from tpunb.utils import terminal
from tpunb.utils.terminal import Style, join, paint

LOG = "OSError: [Errno 28] No space left on device\n"
_ENV = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}


def at_terminal(folder: Path, *words: str, term: str = "xterm-256color", **env: str) -> str:
    """Return the output of a Python command at a terminal."""
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


def parts(text: str) -> dict[str, object]:
    """Return the styled parts of a text, as rich prints it."""
    rich_text = terminal.styled(text)
    assert rich_text.plain == text
    return {text[span.start : span.end]: span.style for span in rich_text.spans}


def test_paint_and_join_keep_the_styles_of_parts() -> None:
    line = join(": ", ["cell", paint("error", Style.BAD), "in `x`"])
    text = join("\n", [paint("head", Style.STRONG), line, "end"])
    assert text == "head\ncell: error: in `x`\nend"
    assert parts(text) == {"head": "bold", "error": "bold red", "`x`": "cyan"}
    assert parts(paint(line, Style.BAD, end=len("cell: error"))) == {
        "cell: error": "bold red",
        "`x`": "cyan",
    }
    assert parts(str(paint("head", Style.STRONG)) + "x") == {}


@pytest.mark.usefixtures("starts_processes")
def test_a_command_has_colours_at_a_terminal_that_shows_them_and_nowhere_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "log").write_text(LOG)
    words = ("-m", "tpunb", "diagnose", "log")
    piped = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**_ENV, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    assert "\x1b" not in piped
    shown = at_terminal(tmp_path, *words)
    assert plain(shown) == piped
    assert shown.startswith("\x1b[1mA disk is full. [disk-full]\x1b[0m\n")
    assert "\x1b[1m  fix:\x1b[0m" in shown
    assert at_terminal(tmp_path, *words, term="dumb") == piped


@pytest.mark.usefixtures("starts_processes")
def test_values_and_errors_have_colours_in_ipython(tmp_path: Path) -> None:
    (tmp_path / "cells.ipy").write_text(
        "from tpunb.notebook.models import Snapshot\nfrom tpunb.errors import TpunbError\n"
        "display(Snapshot((), None, None, 'a test', name='digits'))\n"
        "raise TpunbError('do `this`')\n"
    )
    words = ("-m", "IPython", "--no-banner", "--simple-prompt", "cells.ipy")
    shown = at_terminal(tmp_path, *words)
    assert "\x1b[1mSnapshot of digits, from a test: 0 code cells\x1b[0m\n" in shown
    assert "\x1b[1;31mTpunbError: do \x1b[0m\x1b[1;36m`this`\x1b[0m" in shown
