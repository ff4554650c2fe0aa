"""The report of %%tpu_debug on small programs with planted faults, and on clean ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.diagnostics.cell.programs import CLEAN, FAULTY, NOT_FINITE, PRELUDE, TITLES
from tests.drivers.kernel import Kernel, Ran, kernel

pytestmark = pytest.mark.usefixtures("lent")


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("debug"), file=None) as notebook:
        notebook.run(f"%load_ext tpunb\n%tpu_setup --no-warm\n{PRELUDE}").good()
        yield notebook


def planted(cell: str) -> set[tuple[str, int]]:
    """The kinds and lines of findings that the report must contain."""
    return {
        (kind, number)
        for number, line in enumerate(cell.splitlines(), 1)
        for kind in line.partition("#!")[2].split()
    }


def reported(ran: Ran) -> set[tuple[str, int]]:
    """The kinds and lines of the findings that it contains, all of this cell."""
    found = set()
    for report in ran.statuses():
        entries = re.findall(r"^\d+\. (.*)\n   cell \[(\d+)\], line (\d+): ", report, re.MULTILINE)
        assert len(entries) == len(re.findall(r"^\d+\. ", report, re.MULTILINE)), report
        for title, cell, line in entries:
            [kind] = [kind for kind, pattern in TITLES.items() if re.search(pattern, title)]
            assert int(cell) == ran.number, report
            found.add((kind, int(line)))
    return found


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_with_its_line(nb: Kernel, name: str) -> None:
    cell = f"%%tpu_debug\n{FAULTY[name]}"
    ran = nb.run(cell).good()
    assert reported(ran) == planted(cell) != set(), ran.screen()


@pytest.mark.parametrize("name", NOT_FINITE)
def test_the_first_value_that_is_not_finite_is_found(nb: Kernel, name: str) -> None:
    cell = f"%%tpu_debug --nan\n{NOT_FINITE[name]}"
    ran = nb.run(cell).good()
    found = {one for one in reported(ran) if one[0] == "nan"}
    assert found == planted(cell) != set(), ran.screen()


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_program_has_no_findings(nb: Kernel, name: str) -> None:
    ran = nb.run(f"%%tpu_debug\n{CLEAN[name]}").good()
    assert reported(ran) == set(), ran.screen()
    assert ("no issues found" in ran.screen()) == (name != "nothing of XLA"), ran.screen()
