"""Calls in threads, for which callers can limit how long they wait. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

_T = TypeVar("_T")


def start(call: Callable[[], _T]) -> futures.Future[_T]:
    """Run a call in a thread of its own, and return its future.

    A call that hangs does not keep the process from ending, as a thread of an executor would.
    `futures.wait` waits for the call; `result(timeout)` raises `futures.TimeoutError`.
    """
    future: futures.Future[_T] = futures.Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised by `result`
            future.set_exception(error)

    threading.Thread(target=work, name="tpunb-call", daemon=True).start()
    return future
