"""What every test gets: a look at whether it leaves a process behind."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.drivers.kernel import ROOT, until
from tests.drivers.ranks import Ranks, warm
from tests.support import Driver, left_below
from tpunb.kernel.launcher import fingerprint_of
from tpunb.kernel.supervisor import LentSupervisor
from tpunb.machine import environment
from tpunb.training.checkpoint import api
from tpunb.utils import env_vars

# Inherited by every process that a test starts, however deep, own session or not: what
# carries it was started by this test session and by nothing else on the machine.
MARK = "TPUNB_TEST"
os.environ[MARK] = uuid.uuid4().hex
_NEEDLE = f"{MARK}={os.environ[MARK]}\0".encode()

# XLA compiles programs for the CPU as they are written: much of the processor time of trainings
# this small is its optimizing, and none of tpunb. Compiling takes a fifth of the time so.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_multi_thread_eigen=false",
)

# A shell ignores it for what it starts in the background, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As hypothesis does where CI is set: a machine that is busy with other tests needs any time for an
# example, and the same tests give the same answer. `--hypothesis-profile=default`: other examples.
settings.register_profile(
    "tpunb",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tpunb")

# One for the whole session, started by the standard library when it is first needed.
SHARED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_session_roots: list[Callable[[], int]] = []
"""Session fixtures' processes, which may replace them. What else they leave is found as ever."""
PATIENCE = 60.0
"""Seconds that a process gets to end by itself after its test, on a busy machine."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `long`, except in CI or where one is named or `-m` names the mark.

    Files with tests that take long come first, so that no worker is alone with one at the end.
    """
    slow = {item.path for item in items if any(map(item.get_closest_marker, ("long", "slow")))}
    items.sort(key=lambda item: item.path not in slow)
    chosen = "long" in config.option.markexpr or any("::" in str(arg) for arg in config.args)
    if chosen or os.environ.get("CI") == "true":
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name no test by its bytes: those of an archive hold the second, and workers must agree."""
    return argname if isinstance(val, bytes) else None


_marked: dict[tuple[int, bytes], bool] = {}
"""Whether a process carries the mark, which it has from its parent and never loses."""


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
                with open(f"/proc/{pid}/stat", "rb") as file:
                    stat = file.read().rpartition(b")")[2].split()
                if stat[0] in b"ZX" or stat[1] == b"2":  # ended, or a thread of Linux
                    continue
                self.parents[pid] = int(stat[1])
                key = (pid, stat[19])  # when it was started
                if key not in _marked:
                    _marked[key] = _NEEDLE in Path(entry.path, "environ").read_bytes()
                if _marked[key]:
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
        session = {root() for root in _session_roots}
        new = self.pids - before.pids - session
        return {p for p in new if not self.ancestors(p) & (before.pids | session)}


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


@pytest.fixture
def outside_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is in no run and has no checkpoints; its working directory is empty."""
    for name in os.environ:
        if name.startswith(("TPUNB_", "TORCHELASTIC_")) and name != MARK:
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(api, "_processes", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Rehearsal ranks, forked from one process that has imported torch_xla."""
    with warm(tmp_path_factory.mktemp("ranks")) as process:
        _session_roots.append(lambda: process.pid)
        yield process


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Runs hand-made scripts on one supervisor that has imported torch_xla."""
    driver = Driver(tmp_path_factory.mktemp("runs"))
    driver.warm()
    _session_roots.append(lambda: getattr(driver.launcher.supervisor, "pid", 0))
    yield driver
    driver.launcher.close()


@pytest.fixture(scope="session")
def _lenders() -> Iterator[list[LentSupervisor]]:
    lenders: list[LentSupervisor] = []
    _session_roots.append(lambda: lenders[-1].pid if lenders else 0)
    yield lenders
    for lender in lenders:
        lender.close()


@pytest.fixture(scope="module")
def lent(_lenders: list[LentSupervisor]) -> Iterator[None]:
    """Kernels of this file use one supervisor, which has imported torch_xla, as trials do.

    For files that try what a train cell does, and not how its processes begin and end: a kernel
    with a supervisor of its own takes 5 s of a processor for that import.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # as in all kernels of tests
        patch.delenv("PJRT_DEVICE", raising=False)  # a test of this process may have set it
        if not (_lenders and _lenders[-1].alive):
            env = environment.fork_server_environment(
                environment.run_environment(os.environ, "CPU")
            )
            _lenders.append(LentSupervisor(env, fingerprint_of(env)))
        lender = _lenders[-1]
        patch.setenv(env_vars.LENT, str(lender.folder))
        yield
        until(lambda: not left_below(lender.pid), "nothing is left of its runs", PATIENCE)
