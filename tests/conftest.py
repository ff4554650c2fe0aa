"""What every test gets: a look at whether it leaves a process behind."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Inherited by every process that a test starts, however deep, own session or not: what
# carries it was started by this test session and by nothing else on the machine.
MARK = "TPUNB_TEST"
os.environ[MARK] = uuid.uuid4().hex
_NEEDLE = f"{MARK}={os.environ[MARK]}\0".encode()

# A shell ignores it for what it starts in the background, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As hypothesis does where CI is set: a machine that is busy with other tests needs any time for an
# example, and the same tests give the same answer. `--hypothesis-profile=default`: other examples.
settings.register_profile(
    "tpunb", deadline=None, derandomize=True, database=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("tpunb")

# One for the whole session, started by the standard library when it is first needed.
SHARED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
PATIENCE = 60.0
"""Seconds that a process gets to end by itself after its test, on a busy machine."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what repeats and measures for minutes, except in CI or where it is chosen."""
    chosen = config.option.markexpr or any("::" in str(one) for one in config.args)
    if chosen or os.environ.get("CI") == "true":
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name no test by its bytes: those of an archive hold the second, and workers must agree."""
    return argname if isinstance(val, bytes) else None


class Processes:
    """The processes of this test session at one moment, except this one."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        self.names: dict[int, str] = {}
        marked = set()
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            pid = int(entry.name)
            try:
                # The name, in brackets, may hold spaces: fields count from its end.
                text = Path(entry.path, "stat").read_text(errors="replace")
                stat = text.rpartition(")")[2].split()
                if stat[0] in "ZX":
                    continue
                self.parents[pid] = int(stat[1])
                if _NEEDLE in Path(entry.path, "environ").read_bytes():
                    marked.add(pid)
            except OSError:  # it has just ended, or is another user's
                continue
        me = os.getpid()
        self.pids = {p for p in self.parents if p in marked or me in self.ancestors(p)} - {me}
        for pid in self.pids:
            self.names[pid] = _command(pid)
        self.pids -= {p for p in self.pids if any(name in self.names[p] for name in SHARED)}

    def ancestors(self, pid: int) -> set[int]:
        """The pids above `pid`, as far up as they can be read."""
        found: set[int] = set()
        while (pid := self.parents.get(pid, 0)) and pid not in found:
            found.add(pid)
        return found

    def left_since(self, before: Processes) -> set[int]:
        """Those that are new, except what hangs below a process that was there before.

        A kernel that a module shares among its tests may start a process in one of them and
        keep it: that is looked at when the module is done.
        """
        return {p for p in self.pids - before.pids if not self.ancestors(p) & before.pids}


def _command(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return "(ended)"
    return text.replace("\0", " ")[:200]


def _fail_for_those_left(before: Processes) -> None:
    deadline = time.monotonic() + PATIENCE
    while left := (now := Processes()).left_since(before):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if left:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        listing = "\n".join(f"  {pid}: {now.names[pid]}" for pid in sorted(left))
        pytest.fail(f"processes were left behind (and are killed now):\n{listing}", pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def _no_process_left_by_module() -> Iterator[None]:
    before = Processes()
    yield
    _fail_for_those_left(before)


@pytest.fixture(autouse=True)
def _no_process_left_by_test(_no_process_left_by_module: None) -> Iterator[None]:
    before = Processes()
    yield
    _fail_for_those_left(before)
