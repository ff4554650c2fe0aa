"""What can go wrong, at each moment of a run, and how the run is started: the fault matrix.

Every case ends as it should, names the culprit, keeps what was written before, and leaves no
process. After the first of each fault and start the next run on the same launcher works.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent

import pytest

import tpunb
from tests.drivers.kernel import PATIENCE, until
from tests.support import Driver, Seen, left_below, script_of
from tpunb.kernel.background import BackgroundRun
from tpunb.kernel.launcher import Run
from tpunb.runs import returns, state
from tpunb.runs.events import Event, Output
from tpunb.runs.result import Failure
from tpunb.runs.spec import FailureKind, Stop, StopCause

SLEEP = "time.sleep(600)"
TIMEOUT = 8.0
"""Seconds, for runs that are to reach it: in this time a busy machine has started four ranks."""
SILENT = 3.0
"""Seconds, for runs that are to hang: a busy machine's ranks begin, and step, more often."""
GIVEN_UP = "the test waits no longer"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in one rank."""

    act: str
    """One line of Python."""
    moments: str = "import prelude fork first mid collective save return"
    setup: str = "pass"
    """One line that comes before the rank says that it is about to do it."""
    ends: bool = True
    """The run does not succeed with it."""


LOCK = "L = ctypes.PyDLL(None).pthread_mutex_lock; M = ctypes.create_string_buffer(64); L(M)"
FAULTS = {
    "exception": Fault(
        "raise ValueError('odd')", "import prelude first mid collective save return"
    ),
    "sys_exit": Fault("sys.exit(3)", "import prelude first mid collective save return"),
    "os_exit": Fault("os._exit(3)"),
    "SIGKILL": Fault("os.kill(os.getpid(), signal.SIGKILL)"),
    "SIGSEGV": Fault("os.kill(os.getpid(), signal.SIGSEGV)"),
    "SIGABRT": Fault("os.abort()"),
    "hang": Fault(SLEEP, "fork first mid collective save return"),
    # Waits in C for ever, lets no other thread run, and no signal wakes it.
    "hang_in_c": Fault("L(M)", "first mid collective save return", LOCK),
    "SIGSTOP": Fault(
        "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)",
        "fork first mid collective save return",
    ),
    "stop": Fault(SLEEP),
    "stop_ignored": Fault(
        SLEEP, setup="[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]"
    ),
    "stop_in_c": Fault("L(M)", "import prelude fork first mid", LOCK),
    "stop_frozen": Fault("os.kill(os.getpid(), signal.SIGSTOP)", "import prelude fork first mid"),
    "timeout": Fault(SLEEP),
    "full_disk": Fault(
        "open(os.environ['TPUNB_RUN'] + '/fill', 'wb').write(bytes(1 << 23))",
        "import prelude first mid collective save return",
    ),
    "closed_output": Fault(
        "sys.stdout.close(); os.close(2)",
        "import prelude first mid collective save return",
        ends=False,
    ),
    "child": Fault("subprocess.Popen(['sleep', '600'], start_new_session=True)", ends=False),
}
STOPS = ("stop", "stop_ignored", "stop_in_c", "stop_frozen")

HEADER = """
import ctypes, os, signal, subprocess, sys, time, torch, torch_xla, tpunb
import torch_xla.core.xla_model as xm
from collections import OrderedDict
GUILTY = {guilty}
held = open("accel0", "r+b")  # it stands for a chip: released once the run has ended
mine = lambda: os.environ.get("RANK", str(GUILTY)) == str(GUILTY)
"""
READY = "ready = True"
DO = """
{setup}
print("before")
{act}  # FAULT
"""
FORK = """
forks = []
def in_child():
    if len(forks) == GUILTY + 1:
{do8}
os.register_at_fork(before=lambda: forks.append(1), after_in_child=in_child)
"""
FIRST = """
if mine():
{do}
"""
MID = """
weight = torch.ones(3, device="xla", requires_grad=True)
for step in range(3):
    (weight * 2).sum().backward()
    if step == 1 and mine():
{do8}
    torch_xla.sync()
"""
COLLECTIVE = """
one = torch.ones(1, device="xla")
assert xm.all_reduce("sum", one).item() == int(os.environ["WORLD_SIZE"])
def act(*_):
{do}
if mine():
    signal.signal(signal.SIGALRM, act)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
elif os.environ["RANK"] == "0":
    {late}
xm.all_reduce("sum", one).item()
"""
SAVE = """
class Value:
    def __reduce__(self):
        if mine():
{do12}
        return OrderedDict, ()
tpunb.save({{"value": 1}}, 1)
while mine() and tpunb.load() is None:
    time.sleep(0.02)
tpunb.save({{"value": Value()}}, 2, per_rank=True)  # SAVE
"""
RETURN = """
class Value:
    def __reduce__(self):
{do8}
        return OrderedDict, ()
x = Value()
"""
TRAIN = {"first": FIRST, "mid": MID, "collective": COLLECTIVE, "save": SAVE, "return": RETURN}


@dataclass(frozen=True)
class Case:
    """One fault at one moment, in one way to start a run."""

    fault: str
    moment: str
    start: str = "fork"
    """fork or replicate."""
    mode: str = "foreground"
    """foreground or background."""
    ranks: int = 2

    @property
    def id(self) -> str:
        return f"{self.fault}-{self.moment}-{self.start}-{self.mode}-{self.ranks}"

    @property
    def guilty(self) -> int:
        """The rank in which it happens."""
        return 0 if self.moment == "return" else self.ranks // 2

    @property
    def in_runner(self) -> bool:
        """The prelude that runs once is no rank's."""
        return self.moment in ("import", "prelude") and self.start != "replicate"

    @property
    def rank(self) -> int | None:
        return None if self.in_runner else self.guilty

    def sources(self, folder: Path) -> tuple[list[str], str]:
        """The cells above, and the train cell."""
        fault = FAULTS[self.fault]
        do = DO.format(setup=fault.setup, act=fault.act).strip()
        fill = {
            "do": indent(do, " " * 4),
            "do8": indent(do, " " * 8),
            "do12": indent(do, " " * 12),
            "late": SLEEP if fault.ends else "time.sleep(0.5)",
            "guilty": self.guilty,
        }
        first, second = HEADER.format(**fill), READY
        if self.moment == "import":
            (folder / "trouble.py").write_text((first + FIRST).format(**fill))
            second = f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport trouble  # FAULT"
        elif self.moment == "prelude":
            second = FIRST.format(**fill)
        elif self.moment == "fork":
            second = FORK.format(**fill)
        train = TRAIN.get(self.moment, "").format(**fill)
        if fault.ends and self.moment != "return":
            train += f"\n{SLEEP}"  # the others are busy
        return [first, second], train or "print('trained')"


def _cases() -> list[Case]:
    """Every fault at each moment at which it makes sense, in turns started in each way."""
    made: list[Case] = []
    starts, modes = ("fork", "replicate"), ("foreground", "background")
    for number, (name, fault) in enumerate(FAULTS.items()):
        moments = fault.moments.split()
        for index, moment in enumerate(moments):
            turn = index + number
            # Where ranks run the prelude themselves, nothing of theirs is there at the fork.
            start = "fork" if moment == "fork" else starts[turn % 2]
            mode = modes[turn // 2 % 2]
            made.append(Case(name, moment, start, mode, 4 if turn % 5 == 4 else 2))
            if moment in ("import", "prelude"):
                # The prelude of all ranks and that of each are two things.
                other = modes[1 - turn // 2 % 2]
                made.append(replace(made[-1], start=starts[1 - turn % 2], mode=other))
    return made


CASES = _cases()
FOLLOWED = {(c.fault, c.start): c.id for c in CASES[::-1]}.values()
"""After these the launcher runs something else: what a fault leaves is not its moment's."""


@pytest.fixture(scope="module")
def disk(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A file system of 4 MB; None where it cannot be mounted."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {
        "ranks": case.ranks,
        "grace": 0.3,
        "hang_timeout": SILENT if case.fault in ("hang", "hang_in_c", "SIGSTOP") else 300.0,
        "replicate": "asked for" if case.start == "replicate" else None,
        "returns": ("x",) if case.moment == "return" else (),
    }
    if case.fault == "timeout":
        options["timeout"] = TIMEOUT
    return options


class Watch:
    """A run that tells what it saw, and does what comes from outside at the right moment."""

    def __init__(self, case: Case, run: Run, then: Callable[[], None]) -> None:
        self._case = case
        self._run = run
        self._then: Callable[[], None] | None = then
        self.dir, self.spec, self.result = run.dir, run.spec, run.result
        self.seen: list[Event] = []

    def events(self) -> Iterator[Event | None]:
        for event in self._run.events():
            if event is not None:
                self.seen.append(event)
            if self._then is not None and isinstance(event, Output) and "before" in event.text:
                then, self._then = self._then, None
                if self._case.fault == "stop_frozen":
                    time.sleep(0.05)  # it freezes a moment after it has said so
                then()
            yield event


def _stop(case: Case, run: Run) -> None:
    if case.fault not in STOPS:
        return
    if case.mode == "foreground":
        run.stop(Stop(StopCause.USER, "enough"))
    else:
        state.request_stop(run.dir, Stop(reason="enough"))


def _in_background(watch: Watch) -> None:
    """Follow it as the handle of --bg does, in a thread of its own."""
    handle = BackgroundRun(
        watch,  # type: ignore[arg-type]
        logs=frozenset(range(watch.spec.world_size)),
        notes=(),
        raises=False,
        bind=lambda values: None,
        ended=lambda result: None,
    )
    try:
        assert handle.wait(PATIENCE) is handle.result
    except TimeoutError:  # the other cases shall not wait for this one
        state.request_stop(watch.dir, Stop(reason=GIVEN_UP, now=True))
        handle.wait()
        raise


def _drive(case: Case, driver: Driver, disk: Path | None, folder: Path) -> Seen:
    """Start it, follow it to its end, look that nothing is left."""
    before = driver.folder
    if case.fault == "full_disk" and disk:
        driver.folder = disk
    try:
        prelude, train = case.sources(folder)
        started = time.monotonic()
        run, _ = driver.start(prelude, train, cwd=str(folder), **_options(case))  # type: ignore[arg-type]
    finally:
        driver.folder = before
    assert isinstance(run, Run)
    watch = Watch(case, run, lambda: _stop(case, run))
    if case.mode == "background":
        _in_background(watch)
    else:
        limit = threading.Timer(
            PATIENCE, state.request_stop, (run.dir, Stop(reason=GIVEN_UP, now=True))
        )
        limit.start()
        for _ in watch.events():
            pass
        limit.cancel()
    seen = Seen(run.result(), watch.seen, time.monotonic() - started)
    assert left_below(driver.supervisor_pid) == []
    assert holders(folder / "accel0") == []
    return Seen(returns.collect_returns(seen.result, run.spec), seen.events, seen.seconds)


def holders(path: Path) -> list[str]:
    """Who has a file open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = list((process / "fd").iterdir())
        except OSError:  # it has ended
            continue
        for fd in opened:
            try:
                if os.readlink(fd) == str(path):
                    found.append(str(fd))
            except OSError:  # it has ended, or closed it
                continue
    return found


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_fault(case: Case, driver: Driver, disk: Path | None, tmp_path: Path) -> None:
    if case.fault == "full_disk":
        if disk is None:
            pytest.skip("file systems cannot be mounted here")
        for left in disk.iterdir():
            shutil.rmtree(left)
    (tmp_path / "accel0").touch()
    seen = _drive(case, driver, disk, tmp_path)
    until(lambda: not holders(tmp_path / "accel0"), "nobody holds the device")
    _judge(case, seen, tmp_path)
    if case.id in FOLLOWED:
        following = driver.run(["a = 1"], "print('next', a)", ranks=2)
        assert following.result.state == "succeeded", following.result.explain()
        assert sorted(following.log) == ["[0] next 1", "[1] next 1"]


def _judge(case: Case, seen: Seen, folder: Path) -> None:
    """The outcome, who is to blame, and that nothing is lost."""
    result, fault = seen.result, case.fault
    told = f"{result.state}: {result.explain()}"
    assert result.state == _state(case), told
    assert any(line.partition("] ")[2] == "before" for line in seen.log), seen.log
    failure = result.failure
    if result.state in ("succeeded", "interrupted", "timed_out"):
        assert result.failures == (), told
        if result.state != "succeeded":
            assert result.reason == ("enough" if fault in STOPS else f"--timeout {TIMEOUT:g} s")
    else:
        assert failure is not None
        _blame(case, failure, folder)
    if case.moment == "return" and result.state == "succeeded":
        assert ("x" in result.returns_failed) == (fault == "exception")
        assert fault != "exception" or "ValueError: odd" in result.returns_failed["x"]
    if case.moment == "save":
        newest = tpunb.load(result.dir, rank=0)
        assert newest is not None
        assert newest.step in ((1, 2) if fault not in ("closed_output", "child") else (2,))
    assert not list(result.dir.rglob("*.room"))


def _state(case: Case) -> str:
    if case.fault in STOPS:
        return "interrupted"
    if case.fault in ("hang", "hang_in_c", "SIGSTOP"):
        return "hung"
    if case.fault == "timeout":
        return "timed_out"
    if not FAULTS[case.fault].ends or (case.fault == "exception" and case.moment == "return"):
        return "succeeded"
    return "failed"


def _blame(case: Case, failure: Failure, folder: Path) -> None:
    """The failure names the rank, the cell, the line and the cause."""
    text = f"{failure}"
    fault, moment = case.fault, case.moment
    place = _place(case, folder)
    if failure.kind is FailureKind.HANG:
        if fault == "SIGSTOP":
            assert f"rank {case.guilty}: is stopped (SIGSTOP" in failure.message
        elif moment == "fork":
            assert "has not returned from the fork" in failure.message
        else:
            assert f"cell [{place[0]}], line {place[1]}: " in failure.message, text
        return
    if not (fault == "full_disk" and moment == "save"):  # then it is full for all
        assert failure.rank == case.rank, text
    if fault in ("exception", "full_disk"):
        kind = {"exception": "ValueError", "full_disk": "OSError"}[fault]
        assert failure.type == ("CheckpointError" if moment == "save" else kind), text
        assert ("odd" if fault == "exception" else "No space left") in failure.message, text
    elif fault == "sys_exit":
        assert failure.type == "SystemExit"
        assert failure.message.startswith("sys.exit(3)")
        # None: it was ended before its interpreter had come to an end (the grace is 0.3 s).
        assert failure.exitcode in (3, None) or case.moment in ("import", "prelude")
    elif fault == "os_exit":
        assert (failure.type, failure.exitcode) == ("Exit", 3), text
        assert failure.message.startswith("ended with exit code 3")
        return
    else:
        assert (failure.type, failure.signal) == ("Signal", fault), text
        assert fault in failure.message
        if fault == "SIGKILL" or moment == "fork":
            return
    if not (fault == "full_disk" and moment == "return"):  # the report of all values fails
        assert (failure.cell, failure.line) == place, text


def _place(case: Case, folder: Path) -> tuple[int, int]:
    """Cell and line of the fault, or of the call of the library that reports it."""
    prelude, train = case.sources(folder)
    reported = case.moment == "save" and case.fault in ("exception", "full_disk")
    mark = "# SAVE" if reported else "# FAULT"
    script = script_of(prelude, train)
    line = next(n for n, text in enumerate(script.text.split("\n"), 1) if text.endswith(mark))
    found = script.locate(line)
    assert found is not None
    block, within = found
    assert block.number is not None
    return block.number, within


def test_exception_is_reported_if_standard_error_is_closed(driver: Driver) -> None:
    seen = driver.run(["import sys"], "sys.stderr.close()\nraise ValueError('odd')", ranks=1)
    failure = seen.result.failure
    assert failure is not None
    assert failure.headline() == "rank 0 failed in cell [2], line 2: ValueError: odd"
