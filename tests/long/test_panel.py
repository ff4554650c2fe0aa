"""More of tests/kernel/test_panel.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.kernel import kernel
from tests.kernel.test_panel import SHOW, _train

pytestmark = pytest.mark.usefixtures("lent")


def test_panel_leaves_no_widget_in_a_kernel_without_a_front_end(tmp_path: Path) -> None:
    with kernel(tmp_path) as nb:
        assert _train(nb, "import time\ntime.sleep(2 * rank())") == 1
        assert nb.value("len(get_ipython().kernel.comm_manager.comms)") == 0
        nb.run(SHOW, "show").good()
        assert nb.value("most > 20") is True
        assert nb.value("len(get_ipython().kernel.comm_manager.comms)") == 0
