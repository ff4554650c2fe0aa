"""How a run ends is told truly: whatever ends a rank before its time, and whatever does not."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.drivers.kernel import until
from tests.support import Driver, fork_server
from tpunb.runs.events import Note, Output
from tpunb.runs.spec import FailureKind

IMPORTS = "import ctypes, multiprocessing, os, resource, signal, sys, time, warnings"
OTHER = "\nif os.environ['RANK'] == '0':\n    time.sleep(600)\n"


@pytest.mark.parametrize(
    ("train", "kind", "words"),
    [
        (f"{OTHER}os._exit(0)", FailureKind.EXIT, "ended before the end of the train cell"),
        # The one that goes on is not the rank.
        (f"{OTHER}if os.fork(): os._exit(0)", FailureKind.EXIT, "rank 1 ended before"),
        (
            f"{OTHER}if not os.fork(): raise ValueError('odd')\ntime.sleep(600)",
            FailureKind.EXCEPTION,
            "rank 1 failed in cell [2], line 3: ValueError: odd",
        ),
        (
            f"{OTHER}os.kill(os.getpid(), signal.SIGINT)",
            FailureKind.EXCEPTION,
            "KeyboardInterrupt: not sent by tpunb",
        ),
        (
            f"{OTHER}signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
            "os.kill(os.getpid(), signal.SIGTERM)",
            FailureKind.EXCEPTION,
            "SystemExit: sys.exit(0) in the handler of SIGTERM",
        ),
        (
            f"{OTHER}os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)",
            FailureKind.LOST,
            "the process that watches the ranks was killed with SIGKILL",
        ),
        (
            f"{OTHER}resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\nfiles = []\n"
            "while True: files.append(os.open('/dev/null', os.O_RDONLY))",
            FailureKind.EXCEPTION,
            "OSError: [Errno 24] Too many open files",
        ),
    ],
    ids="_exit parent child SIGINT SIGTERM watcher descriptors".split(),
)
def test_failure_of_a_rank_that_does_not_reach_the_end_of_the_cell(
    driver: Driver, train: str, kind: FailureKind, words: str
) -> None:
    result = driver.run([IMPORTS], train).result
    assert result.state == "failed"
    assert result.failure is not None
    assert result.failure.kind is kind
    assert words in result.failure.headline()


CALM = [
    IMPORTS,
    "shared = multiprocessing.Manager().dict()",
    """
    class Stream:
        def __init__(self, stream):
            self.stream = stream
        def write(self, text):
            return self.stream.write(text)
        def flush(self):
            raise RuntimeError("odd")
    sys.stdout = Stream(sys.stdout)
    """,
    """
    def reap(*_):
        os.waitpid(-1, os.WNOHANG)
    signal.signal(signal.SIGCHLD, reap)
    warnings.simplefilter("error")
    """,
    "if not os.fork(): pass",
    "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
]


def test_prelude_with_signal_and_warning_settings_is_no_failure(driver: Driver) -> None:
    """None of it is a reason to fail, and the ranks find it as it was left."""
    train = """
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
        try:
            warnings.warn("raised")
        except UserWarning as warning:
            print(warning)
        shared[os.environ["RANK"]] = True
        assert shared
        os.fork()
        """
    seen = driver.run(CALM, train)
    assert seen.result.failures == ()
    assert seen.result.state == "succeeded"
    assert sorted(line for line in seen.log if "prelude" not in line) == [
        "[0] raised",
        "[1] raised",
    ]


def test_sys_exit_succeeds_and_logs_its_line(driver: Driver) -> None:
    seen = driver.run([IMPORTS], "print('first')\nsys.exit()\nprint('never')", ranks=1)
    assert seen.result.state == "succeeded"
    told = "[0 err] cell [2], line 2: sys.exit() has ended the train cell"
    assert sorted(seen.log) == [told, "[0] first"]


def test_sigterm_to_one_rank_stops_the_run_with_time_to_save(driver: Driver) -> None:
    """Its own children end by it, as multiprocessing means it."""
    prelude = """
        def ended():
            child = multiprocessing.Process(target=time.sleep, args=[600])
            child.start()
            child.terminate()
            child.join()
            return child.exitcode
        codes = {ended() for _ in range(50)}
        """
    train = """
        try:
            codes.add(ended())
            if os.environ["RANK"] == "0":
                [os.kill(os.getpid(), signal.SIGTERM) for _ in range(3)]
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(0.2)
            print("saved", codes)
            raise
    """
    seen = driver.run([IMPORTS, prelude], train, retries=1)
    assert (seen.result.state, seen.result.failures) == ("interrupted", ())
    assert seen.result.reason.startswith("SIGTERM to process ")
    assert sorted(seen.log) == ["[0] saved {-15}", "[1] saved {-15}"]


def test_suspended_supervisor_is_noted(driver: Driver) -> None:
    supervisor = driver.supervisor_pid
    run, _ = driver.start(["import time"], "time.sleep(0.1)", ranks=1)
    os.kill(supervisor, signal.SIGSTOP)
    for event in run.events():
        if isinstance(event, Note) and f"kill -CONT {supervisor}" in event.text:
            os.kill(supervisor, signal.SIGCONT)
    assert run.result().state == "succeeded"


def test_earlier_signals_to_the_fork_server_do_not_end_a_run(driver: Driver) -> None:
    server = fork_server(driver.supervisor_pid)
    assert server is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGSTOP):
        os.kill(server.pid, number)
    assert driver.run([], "print('next')", ranks=1).result.state == "succeeded"


TRAINED_APART = """
import torch, torch_xla, torch_xla.runtime as xr

def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(torch_xla.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    for step in range(4):
        optimizer.zero_grad()
        out = model(torch.ones(2, 4, device=torch_xla.device()))
        (out + xr.global_ordinal()).square().sum().backward()
        optimizer.step()
        torch_xla.sync()

main()
"""


def test_ranks_that_trained_different_models(driver: Driver) -> None:
    result = driver.run([], TRAINED_APART).result
    assert result.state == "succeeded"
    assert result.lacks() == ", but the ranks trained different models"
    assert result.different_models is not None
    assert result.different_models.ranks == (0, 1)
    assert result.different_models.place == "cell [1], line 11: optimizer.step()"


def test_supervisor_of_an_idle_run_sleeps_until_something_happens(
    driver: Driver, tmp_path: Path
) -> None:
    driver.warm()
    status = Path(f"/proc/{driver.supervisor_pid}/status")

    def looks() -> int:
        return int(re.findall(r"voluntary_ctxt_switches:\s+(\d+)", status.read_text())[0])

    def rests() -> bool:
        before = looks()
        time.sleep(0.5)
        return looks() - before < 8  # 25 while something happens

    def when_it_rests(_: object) -> None:
        until(rests, "the supervisor sleeps")
        (tmp_path / "go").touch()

    train = f"print('begins', flush=True)\nwhile not os.path.exists({str(tmp_path / 'go')!r}):\n"
    train += "    time.sleep(0.1)\nprint('goes on', flush=True)"
    seen = driver.run(
        [IMPORTS], train, ranks=1, when=lambda e: isinstance(e, Output), then=when_it_rests
    )
    assert seen.log == ["[0] begins", "[0] goes on"]
