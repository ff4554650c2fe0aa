"""Which tests run, on which worker, and whether they leave a process behind.

`make test` runs what starts no process, and a scenario for each line of the README's table
(tests/readme.py); `CI=true make test` also runs every other scenario; `make test-long` runs
tests/long. A test that starts a process uses the fixture `starts_processes`, itself or through
another fixture, or it fails: so the choice needs no marks.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.drivers.kernel import ROOT, until
from tests.drivers.lent import LentSupervisor
from tests.drivers.ranks import Ranks, warm
from tests.readme import SCENARIOS
from tests.support import Driver, examples, left_below
from tpunb.machine import environment
from tpunb.training.checkpoint import api

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
    max_examples=examples(100),
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
LEFT = "processes were left behind"
PATIENCE = 60.0
"""Seconds that a process gets to end by itself after its test, on a busy machine."""


LONG = Path(__file__).parent / "long"
"""What repeats, trains or needs a browser: `make test-long`."""
HAS_TORCH_XLA = importlib.util.find_spec("torch_xla") is not None
TORCH_XLA = [Path(__file__).parent / folder for folder in ("training", "backends") if HAS_TORCH_XLA]
"""Folders with tests that import torch_xla in this process: one worker does."""
WARM = ("driver", "lent", "ranks")
"""Fixtures of a process with torch_xla. `ranks` is last, because some parameters have its name."""

# These run in .venv-torchtpu (`make test-torchtpu`): torch_xla needs an older torch.
TORCHTPU = [
    "backends/rehearsal/test_distributed.py",
    "backends/torchtpu",
    "long/test_torchtpu_notebooks.py",
    "long/test_torchtpu_op_db.py",
]
collect_ignore = TORCHTPU if HAS_TORCH_XLA else []

_started = 0
"""How many processes this one has started so far."""
_process_fixtures = {"starts_processes", "ranks", "driver", "_lenders"}
"""Fixtures that may start processes: these of the session, and later those that use them."""
_process_modules: set[Path] = set()


def _count_starts(event: str, _: object) -> None:
    global _started
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        _started += 1


sys.addaudithook(_count_starts)


def _drives_processes(item: pytest.Item) -> bool:
    """Whether a test starts processes: it uses a fixture that says so."""
    return "starts_processes" in item.fixturenames  # type: ignore[attr-defined]


def _named(config: pytest.Config) -> bool:
    """Whether files or tests were named on the command line."""
    return [Path(arg).resolve() for arg in config.args] != [ROOT / "tests"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`tests/long` is collected only if it is named on the command line."""
    return True if collection_path == LONG and not _named(config) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> object:
    """Collect without the collector of garbage: modules and tests live as long as the process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests of this call, and give those with one warm process to one worker.

    `make test` runs the tests that start no process, and those that back the README's table. CI,
    and whoever names files or uses -k or -m, gets all that were collected.
    """
    _process_modules.update(item.path for item in items if _drives_processes(item))
    named = _named(config)
    chosen = named or config.option.keyword or config.option.markexpr
    if not named:
        unknown = SCENARIOS.difference(*map(_short_ids, items))
        if unknown:
            raise pytest.UsageError(f"tests/readme.py names no test: {', '.join(sorted(unknown))}")
    if not chosen and os.environ.get("CI") != "true":
        left_out = {
            item
            for item in items
            if _drives_processes(item) and SCENARIOS.isdisjoint(_short_ids(item))
        }
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=_order)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
        if _drives_processes(item) and LONG not in item.path.parents:
            # A machine that is busy with other things is no reason to refuse a change. The run's
            # last lines name the test and what happened. A process that is left is never chance.
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=LEFT))


def _short_ids(item: pytest.Item) -> set[str]:
    """The test's name below `tests/`, with and without parameters."""
    name = item.nodeid.removeprefix("tests/")
    return {name, name.partition("[")[0]}


def _warm(item: pytest.Item) -> str | None:
    """The warm process that a test uses."""
    names = item.fixturenames if _drives_processes(item) else ()  # type: ignore[attr-defined]
    return next((name for name in WARM if name in names), None)


def _group(item: pytest.Item) -> str:
    """The tests that one worker gets: of a warm process, with torch_xla, or of one file."""
    loads = not set(TORCH_XLA).isdisjoint(item.path.parents)
    return _warm(item) or (
        "torch_xla" if loads else str(item.path.relative_to(item.config.rootpath))
    )


def _order(item: pytest.Item) -> int:
    """The warm processes' tests first: each of these groups takes long, and has one worker."""
    warm = _warm(item)
    return WARM.index(warm) if warm else len(WARM) + (not _drives_processes(item))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> object:
    """Refuse a fixture that starts a process without using `starts_processes`."""
    before = _started
    value = yield
    name = fixturedef.argname
    if not _process_fixtures.isdisjoint(fixturedef.argnames):
        _process_fixtures.add(name)
    # A fixture for one test may leave it to the test to say so.
    said = fixturedef.scope == "function" and _drives_processes(request.node)
    if _started > before and name not in _process_fixtures and not said:
        pytest.fail(f"the fixture `{name}` starts a process: give it `starts_processes`")
    return value


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> object:
    """Refuse a test that starts a process without using `starts_processes`."""
    before = _started
    value = yield
    if _started > before and not _drives_processes(item):
        pytest.fail("this test starts a process: let it use the fixture `starts_processes`")
    return value


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that passed or failed only when they were run again, and both outcomes."""
    first = terminalreporter.stats.get("rerun", [])
    if not first:
        return
    failed = {r.nodeid for kind in ("failed", "error") for r in terminalreporter.getreports(kind)}
    terminalreporter.section("run again")
    for report in first:
        crash = getattr(report.longrepr, "reprcrash", None)
        line = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
        again = "failed again" if report.nodeid in failed else "passed the second time"
        terminalreporter.line(f"{report.nodeid}: {report.when} failed: {line[:200]}; {again}")


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
        pytest.fail(f"{LEFT} (and are killed now):\n{listing}", pytrace=False)


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


@pytest.fixture(scope="session")
def starts_processes() -> None:
    """For each test and each fixture that starts a process.

    The test is left out of `make test`, unless it backs a line of the README, and fails if it
    leaves a process behind.
    """


@pytest.fixture(scope="module", autouse=True)
def _no_process_left_by_module(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path not in _process_modules:
        yield
        return
    before = Processes()
    yield
    _fail_for_those_left(before)


@pytest.fixture(autouse=True)
def _no_process_left_by_test(
    request: pytest.FixtureRequest, _no_process_left_by_module: None
) -> Iterator[None]:
    if not _drives_processes(request.node):
        yield
        return
    before = Processes()
    yield
    _fail_for_those_left(before)


@pytest.fixture(scope="session")
def ranks(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Rehearsal ranks, forked from one process that has imported torch_xla."""
    with warm(tmp_path_factory.mktemp("ranks")) as process:
        _session_roots.append(lambda: process.pid)
        yield process


@pytest.fixture(scope="session")
def driver(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Runs hand-made scripts on one supervisor that has imported torch_xla."""
    driver = Driver(tmp_path_factory.mktemp("runs"))
    driver.warm()
    _session_roots.append(lambda: getattr(driver.launcher.supervisor, "pid", 0))
    yield driver
    driver.launcher.close()


@pytest.fixture(scope="session")
def _lenders(starts_processes: None) -> Iterator[list[LentSupervisor]]:
    lenders: list[LentSupervisor] = []
    _session_roots.append(lambda: lenders[-1].pid if lenders else 0)
    yield lenders
    for lender in lenders:
        lender.close()


@pytest.fixture(scope="module")
def lent(_lenders: list[LentSupervisor]) -> Iterator[None]:
    """Kernels of this file use one supervisor, which has imported torch_xla.

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
            _lenders.append(LentSupervisor(env))
        lender = _lenders[-1]
        patch.setenv("IPYTHONDIR", str(lender.folder))
        yield
        until(lambda: not left_below(lender.pid), "nothing is left of its runs", PATIENCE)
