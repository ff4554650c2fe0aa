"""What the metadata server of Google's machines says of this one.

All questions are asked at once, and none is waited for longer than `patience`: there are
machines on which the server's name is known and nobody answers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tpunb.platforms import chips

NAME = "metadata.google.internal"
"""The name that torch_xla asks for."""
QUICK = 0.25
"""Seconds. The server is on the same host, and answers in a few thousandths."""
PATIENT = 1.0
"""Seconds that a run waits before it is told to do without."""
KEYS = (
    "instance/attributes/accelerator-type",
    "instance/attributes/agent-worker-number",
    "instance/attributes/cluster-name",
    "instance/attributes/tpu-env",
    "instance/attributes/worker-network-endpoints",
    "instance/machine-type",
    "instance/scheduling/preemptible",
    "instance/zone",
)
State = Literal["not asked", "answers", "stalls", "refuses", "unknown name", "not Google's"]


@dataclass(frozen=True)
class Metadata:
    """What was answered."""

    state: State = "not asked"
    values: Mapping[str, str] = field(default_factory=dict)
    """By the last part of the key; what the server does not have (404) is left out."""

    @property
    def tpu_env(self) -> dict[str, str]:
        """The attribute `tpu-env`: lines of KEY: 'value'. {} where there is none."""
        pairs = (line.partition(":") for line in self.values.get("tpu-env", "").splitlines())
        return {key.strip(): value.strip().strip("'\"") for key, _, value in pairs if value.strip()}


def ask(env: Mapping[str, str], root: Path, patience: float = QUICK) -> Metadata:
    """Ask, and wait `patience` seconds for the answers."""
    return Questions(env, root, chips.on_the_bus(root)[0]).answers(patience)


class Questions:
    """Asked from now on, in the background."""

    def __init__(self, env: Mapping[str, str], root: Path, count: int) -> None:
        """`count`: TPU chips on the PCI bus.

        Nobody is asked on a machine that has nothing of Google's: no name is looked up.
        """
        # The variable is the one that Google's own libraries know.
        self._host = env.get("GCE_METADATA_HOST", "")
        if not self._host and (count or _is_googles(root)):
            self._host = NAME
        self._began = time.monotonic()
        self._values: dict[str, str] = {}
        self._failed: list[Exception] = []
        self._left = len(KEYS) if self._host else 0
        self._done = threading.Condition()
        if self._host:
            for key in KEYS:
                # A name that is looked up in vain can take longer than any time-out.
                threading.Thread(
                    target=self._ask, args=[key], name="tpunb-metadata", daemon=True
                ).start()

    def answers(self, patience: float = QUICK) -> Metadata:
        """What has been answered `patience` seconds after the questions were asked."""
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
            value = get(self._host, key, PATIENT)
        except (OSError, ValueError) as error:
            failed = error
        with self._done:
            if value is not None:
                self._values[key.rpartition("/")[2]] = value
            if failed is not None:
                self._failed.append(failed)
            self._left -= 1
            self._done.notify_all()


def get(host: str, key: str, timeout: float) -> str | None:
    """One value; None where the server does not have it. `timeout`: seconds, for all of it.

    Raises OSError if nobody answers, ValueError if who answers is not a metadata server.
    By hand, because importing http.client takes as long as everything else that doctor does.
    """
    name, _, port = host.partition(":")
    deadline = time.monotonic() + timeout
    with socket.create_connection((name, int(port or 80)), timeout) as connection:
        request = f"GET /computeMetadata/v1/{key} HTTP/1.0\r\nHost: {name}\r\n"
        request += "Metadata-Flavor: Google\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        answer = b""
        while True:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (part := connection.recv(1 << 16)):
                break
            answer += part
    head, _, body = answer.decode("utf-8", "replace").partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    if "metadata-flavor: google" not in (line.lower() for line in lines):
        raise ValueError(f"{host} is not a metadata server")
    return body.strip() if status.split(" ")[1:2] == ["200"] else None


def _is_googles(root: Path) -> bool:
    try:
        return (root / "sys/class/dmi/id/product_name").read_text().startswith("Google")
    except OSError:
        return False


def _state(error: Exception) -> State:
    if isinstance(error, TimeoutError):
        return "stalls"
    if isinstance(error, socket.gaierror):
        return "unknown name"
    return "refuses" if isinstance(error, OSError) else "not Google's"
