"""More of tests/notebook/convert/test_convert_same_as_kernel.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.notebook.convert.conftest import ipython
from tests.notebook.convert.shell import Shell
from tests.notebook.convert.test_convert_same_as_kernel import cells, check, folder


@pytest.mark.usefixtures("starts_processes")
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(cells, min_size=1, max_size=6))
def test_the_same_statements_in_the_same_order(
    folder: Path, ipython: Shell, sources: list[str]
) -> None:
    check(sources, folder, ipython)
