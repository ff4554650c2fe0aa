"""Completions of the Tab key, in an option line and in a shell."""

from __future__ import annotations

import pytest

from tpunb import cli
from tpunb.kernel.options import PARSERS
from tpunb.utils.completion import complete

VALUES = {"RUN": lambda: ["20260102-b", "20260101-a"]}
MAGICS = {parser.prog: parser for parser in PARSERS}


@pytest.mark.parametrize(
    ("line", "start", "offered"),
    [
        ("%%tpu_train", "--ret", ["--returns", "--retries"]),
        ("%%tpu_train --cores 2", "--co", ["--cold"]),  # what is given is not offered again
        ("%%tpu_train --env A=b", "--en", ["--env"]),  # what may be repeated is
        ("%%tpu_train --returns", "", []),
        ("%%tpu_train --resume", "", ["20260102-b", "20260101-a"]),
        ("%tpu_logs --level", "", ["warning", "error"]),
        ("tpunb stop", "2", ["20260102-b", "20260101-a"]),
        ("tpunb run in.ipynb out.ipynb", "--c", ["--cores"]),
        ("tpunb lint", "nb", []),  # a file
    ],
)
def test_what_is_offered(line: str, start: str, offered: list[str]) -> None:
    command, *words = line.split()
    parser = MAGICS[command] if command in MAGICS else cli.make_parser()
    assert complete(parser, words, start, VALUES) == offered
