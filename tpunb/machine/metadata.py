"""Client of the metadata server that describes a Google Cloud machine to itself.

All keys are requested at once, and the answers are waited for `patience` seconds at most: on some
machines the server's name resolves, but no server answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tpunb.machine import tpu
from tpunb.utils.metadata_server import NAME, metadata_host, read_metadata
from tpunb.utils.patience import start

QUICK = 0.25
"""Default time-out in seconds. The server is on the same host, and answers in a few ms."""
PATIENCE = 1.0
"""Time-out in seconds for a run, which continues without the answers after it."""
KEYS = tuple(
    "instance/attributes/accelerator-type instance/attributes/agent-worker-number "
    "instance/attributes/cluster-name instance/attributes/tpu-env "
    "instance/attributes/worker-network-endpoints instance/network-interfaces/0/ip "
    "instance/scheduling/preemptible instance/zone".split()
)


@dataclass(frozen=True)
class Metadata:
    """The metadata server's answers."""

    answers: bool = False
    """False if there is no server, or if it has not answered everything in time."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Values, keyed by the last part of their key; without keys that the server lacks (404)."""

    @property
    def tpu_env(self) -> dict[str, str]:
        """The attribute `tpu-env`, parsed from lines of KEY: 'value'; {} without the attribute."""
        pairs = (line.partition(":") for line in self.values.get("tpu-env", "").splitlines())
        return {key.strip(): value.strip().strip("'\"") for key, _, value in pairs if value.strip()}


def read_all(env: Mapping[str, str], root: Path, patience: float = QUICK) -> Metadata:
    """Query all `KEYS`, and wait up to `patience` seconds for the answers.

    On a machine without any sign of Google Cloud nothing is queried, and no name looked up.
    """
    host = metadata_host(env, root) or (NAME if tpu.count_chips(root)[0] else "")
    if not host:
        return Metadata()
    # In threads: a failing name look-up can take longer than any time-out.
    calls = {key: start(partial(read_metadata, host, key, PATIENCE)) for key in KEYS}
    futures.wait(calls.values(), patience, futures.FIRST_EXCEPTION)
    answered = {key: call for key, call in calls.items() if call.done() and not call.exception()}
    found = {key.rpartition("/")[2]: call.result() for key, call in answered.items()}
    values = {name: value for name, value in found.items() if value is not None}
    return Metadata(len(answered) == len(KEYS), values)
