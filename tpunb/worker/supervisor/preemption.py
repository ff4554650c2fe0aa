"""Watches Google's metadata server for the preemption of this machine.

`instance/preempted` turns TRUE when a spot machine is preempted, and `instance/maintenance-event`
names what will happen to the machine (both as documented for Compute Engine's metadata server).
The machine then has 30 seconds left. Standard library only.
"""

from __future__ import annotations

import os
import threading

from tpunb.utils.metadata_server import metadata_host, read_metadata

INTERVAL = 2.0
"""Seconds between two queries."""
TIMEOUT = 1.0
"""Seconds in which the server must answer. It is on the same host."""

_KEYS = {
    "instance/preempted": "TRUE",
    "instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE",
}


class PreemptionWatcher:
    """Polls the metadata server in the background during a run, if there is a server."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.notice = ""
        """The announcement, 'instance/preempted is TRUE'; empty while there is none."""
        self._interval = interval
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if host := metadata_host(os.environ):
            self._thread = threading.Thread(
                target=self._poll, args=[host], name="tpunb-preemption", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _poll(self, host: str) -> None:
        has_answered = False
        while not self.notice:
            try:
                for key, sign in _KEYS.items():
                    if read_metadata(host, key, TIMEOUT) == sign:
                        self.notice = f"{key} is {sign}"
                has_answered = True
            except (OSError, ValueError):
                if not has_answered:
                    return  # the server cannot be reached: a container without a route to it
            if self._closed.wait(self._interval):
                return
