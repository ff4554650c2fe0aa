"""More of tests/notebook/test_removed_apis.py, which takes longer."""

from __future__ import annotations

import json

import pytest

from tests.notebook.test_removed_apis import BF16, PROBE, run
from tpunb.notebook import removed_apis


@pytest.mark.usefixtures("starts_processes")
def test_each_name_is_in_the_state_that_the_table_says() -> None:
    report = json.loads(run(PROBE).rpartition("REPORT")[2])
    assert report["version"].startswith("2.9.")
    for row in removed_apis.NAMES + removed_apis.MODULES:
        assert not report["there"][row.old], row
        assert report["restored"][row.old] == (row.state != "missing"), row
        assert report["followed"][row.old], row
    assert all(report["new"].values()), report["new"]


@pytest.mark.usefixtures("starts_processes")
def test_the_variable_for_bfloat16_still_rounds_what_looks_like_float32() -> None:
    assert run(BF16, XLA_USE_BF16="1").rpartition("VALUE")[2].strip() == "1.0"
