"""More of tests/display/test_formatters.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.kernel import kernel

pytestmark = pytest.mark.usefixtures("lent")


def test_result_card_is_shown_once_in_a_kernel(tmp_path: Path) -> None:
    with kernel(tmp_path) as nb:
        nb.run("%load_ext tpunb", "load").good()
        ran = nb.run("%%tpu_train --cores 1\nimport tpunb\ntpunb.log(step=1, loss=0.5)", "train")
        assert set(ran.good().value or {}) == {"text/plain"}
        later = nb.run("import tpunb\ntpunb.last_run", "show").good()
        assert later.value is not None
        assert "<b>succeeded</b> · digits · 1 rehearsal core" in later.value["text/html"]
        found = nb.run("tpunb.diagnose('No space left on device', 1)", "diagnose").good()
        assert found.value is not None
        assert "<b>Fix:</b>" in found.value["text/html"]
