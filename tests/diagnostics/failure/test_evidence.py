"""Which lines may be the reason for a failure; harmless lines never are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import diagnosing
from tpunb.diagnostics.failure import Facts, diagnose
from tpunb.diagnostics.failure.evidence import PossibleReasons
from tpunb.diagnostics.failure.log import Log

IGNORED = """\
Exception ignored in: <function _Iter.__del__ at 0x7fcfc2e7a5e0>
Traceback (most recent call last):
  File "torch/utils/data/dataloader.py", line 1324, in __del__
    self._shutdown_workers()
RuntimeError: DataLoader worker (pid 77) exited unexpectedly
"""


def ids(text: str, returncode: int | None = 1, facts: Facts | None = None) -> list[str]:
    return [found.id for found in diagnose(text, returncode, facts=facts)]


def traceback(error: str, frame: str = "train()", prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', f"    {frame}"]
    return "".join(f"{prefix}{line}\n" for line in [*lines, error])


FULL = traceback("OSError: [Errno 28] No space left on device")
PLAIN = traceback("KeyError: 'lr'")


def test_nothing_harmless_is_blamed() -> None:
    """Each plain error alone, and each harmless log above, below and without one; exit status 1."""
    told = diagnosing.measure(Path(), 1)
    assert re.search(r"harmless logs {2,}0 {2,}\d{3,}$", told), told


@pytest.mark.parametrize(
    "log",
    [
        # raised from it
        FULL + "\nDuring handling of the above exception, another exception occurred:\n\n" + PLAIN,
        # in a worker, whose traceback is in the message
        traceback("RuntimeError: Caught OSError in DataLoader worker process 0.")
        + "Original Traceback (most recent call last):\n"
        + '  File "a.py", line 9, in g\n    x()\nOSError: [Errno 28] No space left on device\n',
        # of another rank
        traceback("OSError: [Errno 28] No space left on device", prefix="[2] ")
        + traceback("KeyError: 'lr'", prefix="[0] "),
        # of a process that the last one only reports
        "tar: write error: No space left on device\n"
        + traceback("subprocess.CalledProcessError: Command 'tar' returned 2"),
        # as IPython shows it
        "OSError                      Traceback (most recent call last)\nCell In[3], line 1\n"
        "----> 1 save()\n\nOSError: [Errno 28] No space left on device\n",
        # ranks in between
        "[0] Traceback (most recent call last):\n[1] step 3\n[0]   File 'a.py', line 3, in f\n"
        "[1] KeyError: 'lr'\n[0] OSError: [Errno 28] No space left on device\n",
    ],
)
def test_the_exception_that_ended_a_rank_is_found(log: str) -> None:
    assert ids(log) == ["disk-full"]


@pytest.mark.parametrize(
    "log",
    [
        # handled, and logged
        "ERROR:root:trying another disk\n" + FULL + "step 4\n" + PLAIN,
        # said by a destructor, a logger, a thread
        IGNORED + PLAIN,
        "--- Logging error ---\n" + FULL + PLAIN,
        "Exception in thread Thread-1:\n" + FULL + PLAIN,
        # only in the code that the traceback shows
        traceback("KeyError: 'lr'", frame='raise OSError("No space left on device")'),
        # printed
        "the disk says: No space left on device\n" + PLAIN,
    ],
)
def test_handled_or_mentioned_exceptions_are_not_reasons(log: str) -> None:
    assert ids(log) == []


def test_an_exception_in_a_thread_counts_if_nothing_else_failed() -> None:
    log = "Exception in thread Thread-1:\n" + FULL
    assert ids(log, None) == ["disk-full"]


def test_exceptions_that_the_run_recorded_take_precedence_over_the_log() -> None:
    handled = traceback("OSError: [Errno 28] No space left on device", prefix="[1] ")
    assert ids(handled) == ["disk-full"]
    own = traceback("KeyError: 'lr'", prefix="[0] ")
    assert ids(handled, facts=Facts(exceptions=(own,))) == []
    assert ids(own, facts=Facts(exceptions=(handled,))) == ["disk-full"]


def test_fatal_lines_count_in_addition_to_an_exception() -> None:
    fatal = "F0000 00:00:1.2 7 pjrt_registry.cc:117] PJRT_Api already exists for device type tpu\n"
    assert ids(fatal + PLAIN) == ["runtime-double-init"]


def test_the_exceptions_of_a_log_are_read_with_their_messages() -> None:
    log = Log(traceback("RuntimeError: first\nsecond\n\nthird") + traceback("KeyError: 1\nend"))
    reasons = PossibleReasons(log)
    (one,) = reasons.exceptions
    assert log.lines[one.line : one.end] == ["KeyError: 1"]
    log = Log(traceback("RuntimeError: first\nsecond\n\nthird"))
    (one,) = PossibleReasons(log).exceptions
    assert log.lines[one.line : one.end] == ["RuntimeError: first", "second"]


@pytest.mark.parametrize(
    "above",
    [
        "[0] AttributeError: 'MessageFactory' object has no attribute 'GetPrototype'\n",
        "AttributeError: 'MessageFactory' object has no attribute 'GetPrototype'\n",
        IGNORED,
        "[0] KeyError: 'optional'\n",
    ],
)
def test_an_exception_that_was_only_printed_does_not_hide_how_a_process_ended(above: str) -> None:
    killed = Facts(exits={0: -9, 1: -15})
    assert ids(f"{above}[0] step 3\n", 1, killed)[0] == "process-killed"
    assert ids(f"{above}[0] step 3\n", -9) == ["process-killed"]
    hbm = (
        "[0] E0000 00:00:1.2 7 x.cc:1] RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\n"
    )
    assert ids(f"{above}{hbm}", 1, killed)[0] == "hbm-oom"
    # An exception that did end its rank explains more than the ends of the others.
    own = "Traceback (most recent call last):\n  File 'a.py', line 3, in f\nKeyError: 'lr'\n"
    assert ids(f"{above}{own}", 1, Facts(exits={0: 1, 1: -9})) == []
