"""Ends a process that runs a script's cells as Python itself ends a process.

Private names, checked on Python 3.10 to 3.13: `threading._shutdown` waits for non-daemon threads,
`atexit._run_exitfuncs` runs the registered exit handlers, and `multiprocessing.process._children`
are the processes that multiprocessing waits for at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Stop, StopCause
from tpunb.utils import env_vars
from tpunb.utils.frame_locals import locals_of
from tpunb.worker import stdio


def exit_code(error: SystemExit) -> int:
    """The exit code of Python after this exception; 1 for codes that are cut to 0, such as 256."""
    if not isinstance(error.code, int):
        return 0 if error.code is None else 1
    return error.code & 0xFF or int(error.code != 0)


def interrupting_signal(error: BaseException) -> str:
    """The signal whose handler has raised an error: 'SIGTERM'; '' if none, and for SIGINT.

    A handler that the user's code calls itself does not count: Python calls a handler with the
    frame that it has interrupted.
    """
    handlers = {_code(signal.getsignal(number)): number for number in signal.Signals}
    tb = error.__traceback__
    while tb is not None:
        frame = tb.tb_frame
        number = handlers.get(frame.f_code)
        if number not in (None, signal.SIGINT):
            values = list(locals_of(frame).values())
            values += [each for value in values if isinstance(value, tuple) for each in value]
            if any(value is frame.f_back for value in values):
                return signal.Signals(number).name
        tb = tb.tb_next
    return ""


def _code(handler: object) -> object:
    return getattr(getattr(handler, "__func__", handler), "__code__", None)


def stop_on_sigterm() -> None:
    """Have SIGTERM stop this process's run, if it has one, with time to save.

    Slurm, systemd and the shutdown of a machine send it to every process. A handler, unlike
    SIG_IGN, is not inherited by the programs that this process starts.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # not one that a cell has set
        signal.signal(signal.SIGTERM, _request_stop)


def _request_stop(number: int, frame: object) -> None:
    # The workers of DataLoaders have got it, too: their end must not be raised while a rank saves.
    if callable(signal.getsignal(signal.SIGCHLD)):
        signal.signal(signal.SIGCHLD, lambda *_: None)
    if (folder := os.environ.get(env_vars.RUN)) and not RunDir(folder).stopping.exists():
        stop = Stop(StopCause.PREEMPTED, f"SIGTERM to process {os.getpid()} of the run")
        with contextlib.suppress(OSError):  # a full disk: the supervisor may have got it, too
            state.request_stop(RunDir(folder), stop)


_fork = threading.local()


def _hold_sigterm() -> None:
    """Before a fork: Python forgets the signals that reach a child before its handlers do."""
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _end_on_sigterm() -> None:
    """In a fork that the user's code makes: multiprocessing ends its processes with it."""
    if signal.getsignal(signal.SIGTERM) is _request_stop:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_sigterm()


os.register_at_fork(
    before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_end_on_sigterm
)


def exit_like_an_interpreter() -> None:
    """Wait for threads and run exit handlers, as at the end of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def disown_children() -> None:
    """After a fork: forget the prelude's child processes (mp.Manager), which are not this one's.

    multiprocessing's own children do the same.
    """
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]


def end_fork(error: BaseException | None, report: Callable[[BaseException], None]) -> NoReturn:
    """End a process that a cell has forked (os.fork) and that has reached the end of the cell.

    The stack above belongs to the process that it was forked from. `error` is the exception that
    has left the cell, if any.
    """
    code = 1
    try:
        disown_children()
        if error is None:
            code = 0
        elif isinstance(error, SystemExit):  # the exit code is for the process that waits for it
            code = exit_code(error)
        else:
            report(error)
        exit_like_an_interpreter()
    finally:
        stdio.flush_output()
        os._exit(code)
