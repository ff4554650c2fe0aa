"""Client of the metadata server that describes a Google Cloud machine to itself.

All keys are requested at once, and the answers are waited for `patience` seconds at most: on some
machines the server's name resolves, but no server answers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tpunb.machine import tpu
from tpunb.utils.metadata_server import NAME, metadata_host, read_metadata

QUICK = 0.25
"""Default time-out in seconds. The server is on the same host, and answers in a few ms."""
PATIENCE = 1.0
"""Time-out in seconds for a run, which continues without the answers after it."""
KEYS = tuple(
    "instance/attributes/accelerator-type instance/attributes/agent-worker-number "
    "instance/attributes/cluster-name instance/attributes/tpu-env "
    "instance/attributes/worker-network-endpoints instance/machine-type "
    "instance/network-interfaces/0/ip instance/scheduling/preemptible instance/zone".split()
)
State = Literal["not asked", "answers", "stalls", "refuses", "unknown name", "not Google's"]


@dataclass(frozen=True)
class Metadata:
    """The metadata server's answers."""

    state: State = "not asked"
    values: Mapping[str, str] = field(default_factory=dict)
    """Values, keyed by the last part of their key; without keys that the server lacks (404)."""

    @property
    def tpu_env(self) -> dict[str, str]:
        """The attribute `tpu-env`, parsed from lines of KEY: 'value'; {} without the attribute."""
        pairs = (line.partition(":") for line in self.values.get("tpu-env", "").splitlines())
        return {key.strip(): value.strip().strip("'\"") for key, _, value in pairs if value.strip()}


def read_all(env: Mapping[str, str], root: Path, patience: float = QUICK) -> Metadata:
    """Query the server, and wait up to `patience` seconds for its answers."""
    return MetadataRequest(env, root, tpu.count_chips(root)[0]).answers(patience)


class MetadataRequest:
    """A query of all `KEYS`, made in background threads from its construction on."""

    def __init__(self, env: Mapping[str, str], root: Path, count: int) -> None:
        """Start the query. `count`: TPU chips on the PCI bus.

        On a machine without any sign of Google Cloud nothing is queried, and no name looked up.
        """
        self._host = metadata_host(env, root) or (NAME if count else "")
        self._began = time.monotonic()
        self._values: dict[str, str] = {}
        self._failed: list[Exception] = []
        self._left = len(KEYS) if self._host else 0
        self._done = threading.Condition()
        if self._host:
            for key in KEYS:
                # In a thread: a failing name look-up can take longer than any time-out.
                threading.Thread(
                    target=self._ask, args=[key], name="tpunb-metadata", daemon=True
                ).start()

    def answers(self, patience: float = QUICK) -> Metadata:
        """Wait until `patience` seconds after the start of the query; return the answers so far."""
        if not self._host:
            return Metadata()
        with self._done:
            self._done.wait_for(
                lambda: not self._left or self._failed,
                max(0.0, self._began + patience - time.monotonic()),
            )
            state: State = "stalls" if self._left else "answers"
            return Metadata(_state(self._failed[0]) if self._failed else state, dict(self._values))

    def _ask(self, key: str) -> None:
        value, failed = None, None
        try:
            value = read_metadata(self._host, key, PATIENCE)
        except (OSError, ValueError) as error:
            failed = error
        with self._done:
            if value is not None:
                self._values[key.rpartition("/")[2]] = value
            if failed is not None:
                self._failed.append(failed)
            self._left -= 1
            self._done.notify_all()


def _state(error: Exception) -> State:
    if isinstance(error, TimeoutError):
        return "stalls"
    if isinstance(error, socket.gaierror):
        return "unknown name"
    return "refuses" if isinstance(error, OSError) else "not Google's"
