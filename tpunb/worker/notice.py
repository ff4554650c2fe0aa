"""Notices that this machine will be taken away, from the metadata server of Google's machines.

Standard library only: the guard uses it. `instance/preempted` turns TRUE when a spot machine is
preempted, and `instance/maintenance-event` names what will happen to the machine (both: the
documentation of Compute Engine's metadata server). A machine then has 30 seconds.
"""

from __future__ import annotations

import http.client
import os
import threading
from pathlib import Path

INTERVAL = 2.0
"""Seconds between two questions."""
PATIENCE = 1.0
"""Seconds in which the server must answer. It is on the same host."""

_NAME = "metadata.google.internal"
_PRODUCT = Path("/sys/class/dmi/id/product_name")
"""'Google Compute Engine', or 'Google', on Google's machines."""
_PATHS = {
    "instance/preempted": "TRUE",
    "instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE",
}


class Notice:
    """Asks in the background while a run goes on, where a metadata server answers at all."""

    def __init__(self) -> None:
        self.text = ""
        """What the machine was told; empty while nothing is known."""
        self._closed = threading.Event()
        # The variable is the one that Google's own libraries know.
        host = os.environ.get("GCE_METADATA_HOST") or _host()
        if host:
            threading.Thread(
                target=self._ask, args=[host], name="tpunb-notice", daemon=True
            ).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _ask(self, host: str) -> None:
        try:
            while not self.text:
                for path, sign in _PATHS.items():
                    if _get(host, path) == sign:
                        self.text = f"{path} is {sign}"
                if self._closed.wait(INTERVAL):
                    return
        except (OSError, http.client.HTTPException):
            return  # no such server after all: a container without a way to it


def _host() -> str:
    """The metadata server's name on a machine of Google's; '' elsewhere: no name is looked up."""
    try:
        return _NAME if _PRODUCT.read_text().startswith("Google") else ""
    except OSError:
        return ""


def _get(host: str, path: str) -> str:
    """The value of a key; '' where the server does not have it. Raises OSError if none answers."""
    connection = http.client.HTTPConnection(host, timeout=PATIENCE)
    try:
        connection.request(
            "GET", f"/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
        )
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace").strip()
        if answer.getheader("Metadata-Flavor") != "Google":
            raise OSError(f"{host} is not a metadata server")
        return text if answer.status == 200 else ""
    finally:
        connection.close()
