"""os.closerange in a cell closes the cells' descriptors, and none of tpunb's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import Driver
from tpunb.utils.descriptors import wait_readable

CLOSES = "import os\nos.closerange(3, 1 << 20)\n"
REDUCES = """
import torch, torch_xla
import torch_xla.core.xla_model as xm
x = torch.ones(5_000_000, device=torch_xla.device())  # by gloo
"""


def test_a_run_survives(driver: Driver) -> None:
    """In the prelude, before the first collective and after it."""
    train = f'{CLOSES}{REDUCES}xm.all_reduce("sum", x)\n{CLOSES}'
    seen = driver.run([CLOSES], train + 'print(xm.all_reduce("sum", x)[0].item())')
    assert seen.result.state == "succeeded", seen.log
    assert sorted(seen.log) == ["[0] 2.0", "[1] 2.0"]


def test_a_run_s_failure_is_told(driver: Driver) -> None:
    failure = driver.run([], CLOSES + "1 / 0").result.failure
    assert failure is not None
    assert (failure.type, failure.line) == ("ZeroDivisionError", 3)


ALONE = """
import os
from tpunb.utils import descriptors

def is_open(fd):
    return os.path.exists(f"/proc/self/fd/{fd}")

before = os.open("/dev/null", os.O_RDONLY)
descriptors.keep_own()
users = os.open("/dev/null", os.O_RDONLY)
descriptors.note_users()
with descriptors.opening_own():
    later = os.open("/dev/null", os.O_RDONLY)
os.closerange(3, 1000)
print(is_open(before), is_open(users), is_open(later))
users = os.open("/dev/null", os.O_RDONLY)
descriptors.note_users()
descriptors.keep_own()
if (pid := os.fork()) == 0:
    os.closerange(3, 1000)
    os._exit(int(is_open(before) or is_open(later)))
print(os.waitpid(pid, 0)[1])
os.closerange(later, later)
os.closerange(users, users + 1)
print(is_open(users), is_open(later))
"""


@pytest.mark.usefixtures("starts_processes")
def test_what_is_whose() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.splitlines() == ["True False True", "0", "False True"]


def test_only_what_can_be_read_is_named() -> None:
    (first, last), (other, writer) = os.pipe(), os.pipe()
    try:
        assert wait_readable([first, other], 0.0) == set()
        os.write(writer, b"x")
        assert wait_readable([first, other], None) == {other}
        os.close(last)
        assert wait_readable([first, other], float("inf")) == {first, other}
    finally:
        for fd in (first, other, writer):
            os.close(fd)
