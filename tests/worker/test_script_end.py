"""The end of a process that runs cells, compared with Python's own."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tpunb.worker import script_end


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("value", [None, 0, 3, 257, -1, True, False, 0.0, "text", (), ""])
def test_exit_code_equals_that_of_python(value: object) -> None:
    code = f"import sys; sys.exit({value!r})"
    ended = subprocess.run([sys.executable, "-S", "-c", code], stderr=subprocess.DEVNULL)
    assert script_end.exit_code(SystemExit(value)) == ended.returncode


@pytest.mark.parametrize("value", [256, 1 << 80])
def test_exit_code_that_wraps_to_0_is_a_failure(value: int) -> None:
    assert script_end.exit_code(SystemExit(value)) == 1


@pytest.mark.usefixtures("starts_processes")
def test_fork_disowns_child_processes_of_its_parent() -> None:
    """Private names of multiprocessing, which `active_children` uses."""
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    known = multiprocessing.process._children
    assert child in known
    before = set(known)
    script_end.disown_children()
    try:
        assert not known
    finally:
        known.update(before)
    child.join()
    child.close()


class Handlers:
    def method(self, number: int, frame: object) -> None:
        sys.exit()


def plain(number: int = 0, frame: object = None) -> None:
    sys.exit()


@pytest.mark.parametrize(
    "handler", [plain, Handlers().method, lambda *_: sys.exit()], ids=["plain", "method", "lambda"]
)
@pytest.mark.parametrize(
    ("number", "named"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "")],
)
def test_exit_in_a_signal_handler_names_the_signal(
    handler: Callable[..., object], number: signal.Signals, named: str
) -> None:
    before = signal.signal(number, handler)
    try:
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(number)
        assert script_end.interrupting_signal(caught.value) == named
        with pytest.raises(SystemExit) as caught:  # called like any function
            handler(number, None)
        assert script_end.interrupting_signal(caught.value) == ""
    finally:
        signal.signal(number, before)
