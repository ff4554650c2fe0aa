"""The report of %%tpu_debug on programs for TorchTPU and for torch on the CPU, in real kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest

from tests.backends.torchtpu.debugged import (
    CLEAN,
    COMPILED,
    FAULTY,
    NOT_FINITE,
    ON_CPU,
    PRELUDE,
    TITLES,
)
from tests.diagnostics.cell.marks import planted, reported
from tests.drivers.kernel import Kernel, kernel

_ALL: Mapping[str, str] = FAULTY | {f"compiled: {name}": cell for name, cell in COMPILED.items()}


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("debug"), file="a.ipynb") as notebook:
        notebook.run("%load_ext tpunb").good()
        notebook.run(PRELUDE).good()
        yield notebook


@pytest.fixture(scope="module")
def cpu(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("cpu"), file="a.ipynb") as notebook:
        prelude = PRELUDE.replace('"tpu"', '"cpu"')
        notebook.run("%load_ext tpunb").good()
        notebook.run(prelude).good()
        yield notebook


@pytest.mark.parametrize("name", _ALL)
def test_a_fault_is_named_with_its_line(nb: Kernel, name: str) -> None:
    cell = f"%%tpu_debug\n{_ALL[name]}"
    ran = nb.run(cell).good()
    assert reported(ran, TITLES) == planted(cell), ran.screen()
    assert "XLA" not in ran.screen().upper().replace("CELL", "")
    assert "TorchTPU, rehearsed on the CPU" in ran.screen()


@pytest.mark.parametrize("name", NOT_FINITE)
def test_the_first_value_that_is_not_finite_is_found(nb: Kernel, name: str) -> None:
    cell = f"%%tpu_debug --nan\n{NOT_FINITE[name]}"
    ran = nb.run(cell).good()
    found = {one for one in reported(ran, TITLES) if one[0] == "nan"}
    assert found == planted(cell) != set(), ran.screen()


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_program_has_no_findings(nb: Kernel, name: str) -> None:
    for option in ("", " --nan"):
        ran = nb.run(f"%%tpu_debug{option}\n{CLEAN[name]}").good()
        assert reported(ran, TITLES) == set(), ran.screen()
        assert ("no issues found" in ran.screen()) == (name != "nothing of torch"), ran.screen()


@pytest.mark.parametrize("name", ON_CPU)
def test_torch_on_the_cpu(cpu: Kernel, name: str) -> None:
    cell = f"%%tpu_debug\n{ON_CPU[name]}"
    ran = cpu.run(cell).good()
    assert reported(ran, TITLES) == planted(cell), ran.screen()
    assert "torch on the CPU" in ran.screen()
    assert not re.search("XLA|TPU,|TorchTPU", ran.screen())
