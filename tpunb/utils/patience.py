"""Calls for which nobody has to wait longer than they want to. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

_T = TypeVar("_T")


def start(call: Callable[[], _T]) -> futures.Future[_T]:
    """What a call answers, in a thread of its own.

    One that hangs is left to itself: the thread of an executor would keep the process at its end.
    `futures.wait` waits for it; `result(timeout)` raises `futures.TimeoutError`.
    """
    future: futures.Future[_T] = futures.Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised by `result`
            future.set_exception(error)

    threading.Thread(target=work, name="tpunb-call", daemon=True).start()
    return future
