"""More of tests/xla/rehearsal/test_rehearsal_on_tpu.py, which takes longer."""

from __future__ import annotations

import pytest

from tests.xla.rehearsal.test_rehearsal_on_tpu import REHEARSAL, ran


@pytest.mark.usefixtures("starts_processes")
def test_rehearsal_is_detected_by_the_same_check() -> None:
    found = ran("CPU", REHEARSAL)
    different = found["different"]
    assert "torch_xla._XLAC._xla_all_reduce" in different
    assert "torch_xla._XLAC._xla_get_num_processes" in different
    assert "_c10d_functional.all_reduce" in different
    assert found["env"]["PJRT_LOCAL_PROCESS_COUNT"] == "4"
