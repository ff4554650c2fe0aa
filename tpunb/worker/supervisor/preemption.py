"""Whether this machine is about to be taken away, from Google's metadata server.

`instance/preempted` turns TRUE when a spot machine is preempted, and
`instance/maintenance-event` names what will happen to the machine (both: the documentation of
Compute Engine's metadata server). A machine then has 30 seconds. Standard library only.
"""

from __future__ import annotations

import os
import threading

from tpunb.utils.metadata_server import metadata_host, read_metadata

INTERVAL = 2.0
"""Seconds between two questions."""
TIMEOUT = 1.0
"""Seconds in which the server must answer. It is on the same host."""

_KEYS = {
    "instance/preempted": "TRUE",
    "instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE",
}


class PreemptionWatcher:
    """Asks in the background while a run goes on, where there is a metadata server."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.notice = ""
        """What the server says; empty while the machine stays."""
        self._interval = interval
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if host := metadata_host(os.environ):
            self._thread = threading.Thread(
                target=self._ask, args=[host], name="tpunb-preemption", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _ask(self, host: str) -> None:
        try:
            while not self.notice:
                for key, sign in _KEYS.items():
                    if read_metadata(host, key, TIMEOUT) == sign:
                        self.notice = f"{key} is {sign}"
                if self._closed.wait(self._interval):
                    return
        except (OSError, ValueError):
            return  # no such server after all: a container without a way to it
