"""Marks in programs, and what the report of %%tpu_debug has found."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.drivers.kernel import Ran


def planted(cell: str) -> set[tuple[str, int]]:
    """The kinds and lines of findings that the report must contain."""
    return {
        (kind, number)
        for number, line in enumerate(cell.splitlines(), 1)
        for kind in line.partition("#!")[2].split()
    }


def reported(ran: Ran, titles: Mapping[str, str]) -> set[tuple[str, int]]:
    """The kinds and lines of the findings that it contains, all of this cell."""
    found = set()
    for report in ran.statuses():
        entries = re.findall(r"^\d+\. (.*)\n   cell \[(\d+)\], line (\d+): ", report, re.MULTILINE)
        assert len(entries) == len(re.findall(r"^\d+\. ", report, re.MULTILINE)), report
        for title, cell, line in entries:
            [kind] = [kind for kind, pattern in titles.items() if re.search(pattern, title)]
            assert int(cell) == ran.number, report
            found.add((kind, int(line)))
    return found
