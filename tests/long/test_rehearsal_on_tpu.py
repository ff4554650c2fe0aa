"""More of tests/xla/rehearsal/test_rehearsal_on_tpu.py, which takes longer."""

from __future__ import annotations

import pytest

from tests.xla.rehearsal.test_rehearsal_on_tpu import REHEARSAL, TPU, ran


@pytest.mark.usefixtures("starts_processes")
def test_rehearsal_is_detected_by_the_same_check() -> None:
    found = ran("CPU", REHEARSAL)
    different = found["different"]
    assert "torch_xla._XLAC._xla_all_reduce" in different
    assert "torch_xla._XLAC._xla_get_num_processes" in different
    assert "_c10d_functional.all_reduce" in different
    assert found["env"]["PJRT_LOCAL_PROCESS_COUNT"] == "4"


@pytest.mark.usefixtures("starts_processes")
def test_torch_xla_is_untouched_and_each_rank_has_its_own_chip() -> None:
    found = ran("TPU", TPU)
    assert "tpunb.xla.rehearsal.install" in found["modules"]
    assert "torch_xla._XLAC._xla_all_reduce" in found["all"]
    assert "_c10d_functional.all_reduce" in found["all"]
    assert len(found["all"]) > 40
    assert found["different"] == []
    assert found["told"] == [["xla:0", ["xla:0"]]]
    env = found["env"]
    assert env["PJRT_DEVICE"] == "TPU"
    assert (env["PJRT_LOCAL_PROCESS_RANK"], env["PJRT_LOCAL_PROCESS_COUNT"]) == ("1", "4")
    assert env["TPU_VISIBLE_CHIPS"] == "1"
    assert env["TPU_PROCESS_PORT"] == "8477"
    assert "PJRT_NPROC" not in env
