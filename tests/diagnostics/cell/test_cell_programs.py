"""The report of %%tpu_debug on small programs with planted faults, and on clean ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.diagnostics.cell.marks import planted, reported
from tests.diagnostics.cell.programs import CLEAN, FAULTY, NOT_FINITE, PRELUDE, TITLES
from tests.drivers.kernel import Kernel, kernel

pytestmark = pytest.mark.usefixtures("lent")


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("debug"), file=None) as notebook:
        notebook.run(f"%load_ext tpunb\n%tpu_setup --no-warm\n{PRELUDE}").good()
        yield notebook


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_with_its_line(nb: Kernel, name: str) -> None:
    cell = f"%%tpu_debug\n{FAULTY[name]}"
    ran = nb.run(cell).good()
    assert reported(ran, TITLES) == planted(cell) != set(), ran.screen()


@pytest.mark.parametrize("name", NOT_FINITE)
def test_the_first_value_that_is_not_finite_is_found(nb: Kernel, name: str) -> None:
    cell = f"%%tpu_debug --nan\n{NOT_FINITE[name]}"
    ran = nb.run(cell).good()
    found = {one for one in reported(ran, TITLES) if one[0] == "nan"}
    assert found == planted(cell) != set(), ran.screen()


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_program_has_no_findings(nb: Kernel, name: str) -> None:
    ran = nb.run(f"%%tpu_debug\n{CLEAN[name]}").good()
    assert reported(ran, TITLES) == set(), ran.screen()
    assert ("no issues found" in ran.screen()) == (name != "nothing of XLA"), ran.screen()
