"""More of tests/worker/test_recompiles.py, which takes longer."""

from __future__ import annotations

import re

import pytest

from tests.drivers.kernel import Kernel
from tests.worker.test_recompiles import CLEAN, nb, told

pytestmark = pytest.mark.usefixtures("lent")


def test_a_run_that_does_the_same_at_every_step_is_told_nothing_but_what_it_reads(
    nb: Kernel,
) -> None:
    quiet = nb.run(CLEAN.format(read="pass")).good()
    assert "ranks" not in quiet.stdout, quiet.stdout
    reading = nb.run(CLEAN.format(read="loss.item()")).good()
    [told] = set(re.findall(r"(?:rank \d|the ranks)[: ](.*)", reading.stdout))
    assert told.startswith(" a number is read from the device at every step"), reading.stdout
