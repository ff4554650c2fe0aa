"""More of tests/worker/test_recompiles.py, which takes longer."""

from __future__ import annotations

import re

import pytest

from tests.drivers.kernel import Kernel
from tests.worker.test_recompiles import CLEAN, nb, told

pytestmark = pytest.mark.usefixtures("lent")


def test_recompile_notes_of_a_uniform_run_only_mention_reads(
    nb: Kernel,
) -> None:
    quiet = nb.run(CLEAN.format(read="pass")).good()
    assert "ranks" not in quiet.stdout, quiet.stdout
    reading = nb.run(CLEAN.format(read="loss.item()")).good()
    [told] = set(re.findall(r"(?:rank \d|the ranks)[: ](.*)", reading.stdout))
    assert told.startswith(" a number is read from the device at every step"), reading.stdout
