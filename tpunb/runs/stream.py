"""What `tpunb node --stream` says on its standard output, and hears on its standard input.

    tpunb node  ──> whoever started it    Hello, then Append and Replace as files grow, End
    whoever started it  ──> tpunb node    Start first, then Stop, Alive; a stream that closes, or is
                                          silent for longer than Start allows, is a stop

A line is {"kind": <the class in lower case>, <fields>}; bytes are in base64. Files are named by
their path in the run folder. Each host has a run folder of the same run, in which the folders of
its own ranks are; `place_in_union` says where a file of a host stands in the folder that holds all
of them. Standard library only.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from tpunb.runs.spec import StopCause, StopOrigin
from tpunb.utils import records

MERGED = ("run.log", "events.jsonl", "metrics.jsonl")
"""Files of lines that every host has and that are one in the union. An `Append` to one of them
holds whole lines only, so that those of several hosts can be put in order of `time`."""
SHARED = ("parameters.json",)
"""Every host has the same one."""
RESULT = "result.json"
"""Of the whole run, on every host, once host 0 has written it. A host that was cut off from host 0
has one of its own ranks, which names the host that it has lost."""


SENT = (
    "spec.json script.py notebook.json notebook.ipynb env.json kernel_values.json arguments.pt "
    "arguments.json given"
).split()
"""What of a run folder exists before the run."""
OWN = frozenset(
    (
        *SENT,
        *"variables.json requests.jsonl place.json mirror.json mirror.log".split(),
        *"running.lock stopping synced hosts".split(),
    )
)
"""What a run folder here has for itself: no host writes it."""
FOLDERS = frozenset(["attempts"])
"""Not returns, checkpoints and profiles: they are large, and are fetched at the end."""
GROWING = (".log", ".jsonl", ".txt")
WHOLE = (".json", "/pulse")


@dataclass(frozen=True)
class Hello:
    """First: who this host is, and from where it knows."""

    run: str
    """The run's id."""
    node_rank: int
    nnodes: int
    host: str
    """Its name, as people see it."""
    address: str
    """By which the other hosts reach it."""
    source: str
    """'flags', 'TPU_WORKER_ID and TPU_WORKER_HOSTNAMES', 'the metadata server', …"""
    rendezvous: str
    """HOST:PORT at which host 0 listens; the port that it got where 0 was asked for."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of tpunb, python, torch and torch_xla; '' for what is not installed."""
    chips: int = 0
    """TPU chips of this host."""
    pid: int = 0
    """Of the process that stops the run on this host at SIGTERM."""
    time: float = 0.0
    """This host's clock, for who compares it with others."""


@dataclass(frozen=True)
class Append:
    """A file has grown."""

    file: str
    at: int
    """The offset of the first of these bytes."""
    data: bytes
    time: float
    """When they were read on this host."""


@dataclass(frozen=True)
class Replace:
    """A small file has been written anew."""

    file: str
    data: bytes
    time: float = 0.0


@dataclass(frozen=True)
class End:
    """Last. No process of the run is left on this host, and everything was sent."""

    returncode: int
    message: str = ""
    """Why nothing was started, if nothing was."""


@dataclass(frozen=True)
class Start:
    """The first line to a node that reads its key here (`--key-file -`)."""

    key: str
    """Of the run, in hexadecimal digits: hosts prove to each other that they have it."""
    variables: dict[str, str] = field(default_factory=dict)
    """For the environment of the ranks; they may be secrets, so no file holds them."""
    alive_within: float = 0.0
    """Seconds without a line after which whoever started it is gone: a connection that is cut does
    not close. 0: never."""


@dataclass(frozen=True)
class Alive:
    """Whoever started it is still there."""


@dataclass(frozen=True)
class Stop:
    """Stop the run on all hosts; any host may be told."""

    cause: StopCause = StopCause.USER
    reason: str = ""
    origin: StopOrigin | None = None
    now: bool = False
    """Skip the grace period, or what is left of it."""


Line = Hello | Append | Replace | End | Start | Stop | Alive
_KINDS: Mapping[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Line)}


def encode(line: Line) -> bytes:
    """A line, with its newline."""
    values = {each.name: getattr(line, each.name) for each in fields(line)}
    if isinstance(line, (Append, Replace)):
        values["data"] = base64.b64encode(line.data).decode()
    return (json.dumps({"kind": type(line).__name__.lower(), **values}) + "\n").encode()


def decode(line: bytes | str) -> Line:
    """The inverse. Raises ValueError for what is no such line."""
    data = records.parse(line)
    kind = _KINDS.get(str(data.get("kind"))) if isinstance(data, dict) else None
    if kind is None:
        raise ValueError(f"no line of a node's stream: {line!r:.80}")
    if kind in (Append, Replace):
        try:
            data["data"] = base64.b64decode(data["data"], validate=True)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no data in {line!r:.80}") from error
        if not is_streamed(str(data.get("file"))):
            raise ValueError(f"{data.get('file')!r:.80} is not for a host to write")
    made: Line = records.build(kind, data)
    return made


def is_streamed(file: str) -> bool:
    """Whether a stream has this file: both ends ask, because a host could name any.

    No part of its path begins with a dot, as '..' does and what is still being written.
    """
    parts = file.split("/")
    return (
        file.isprintable()
        and not any(not part or part.startswith(".") for part in parts)
        and parts[0] not in OWN
        and (len(parts) == 1 or parts[0] in FOLDERS)
        and file.endswith((*GROWING, *WHOLE))
    )


def place_in_union(file: str, node_rank: int, ranks: range) -> str:
    """Where a host's file stands in the folder of the whole run.

    The folders of its ranks (`ranks`) have the same name; what all hosts have is merged, or that
    of host 0; anything else, as `supervisor.log`, the prelude's folder and what it says of ranks
    that are not its own, is below `hosts/<node rank>/`.
    """
    parts = file.split("/")
    of_a_rank = parts[0] == "attempts" and len(parts) > 2 and parts[2].isdecimal()
    if int(parts[2]) in ranks if of_a_rank else node_rank == 0 or file in (*MERGED, *SHARED):
        return file
    return f"hosts/{node_rank}/{file}"
