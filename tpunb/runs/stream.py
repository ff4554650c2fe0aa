"""The lines that `tpunb node` writes to standard output and reads from standard input.

    tpunb node  ──> its parent     Hello, then Append and Replace as files grow, End
    its parent  ──> tpunb node     Start first, then Stop, Alive; a stream that closes, or is silent
                                   for longer than Start allows, is a stop

A line is {"kind": <the class in lower case>, <fields>}; bytes are in base64. Files are named by
their path in the run folder. Each host has its own folder of the run, with the folders of its own
ranks; `path_in_union` maps a host's file to its path in the folder of the whole run. Standard
library only.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from tpunb.runs.spec import Stop
from tpunb.utils import records
from tpunb.utils.files import LineBuffer

MERGED = ("run.log", "events.jsonl", "metrics.jsonl")
"""Files of lines that every host has and that are merged into one. An `Append` to one of them
holds whole lines only, so that the lines of several hosts can be sorted by `time`."""
SHARED = ("values.json",)
"""Files that are equal on all hosts."""
PROFILE = "profile"
"""The folder with the trace of the run, a file for each rank."""
_TRACE = re.compile(r"rank-(\d+)\.(?:xplane\.pb|pt\.trace\.json)", re.ASCII)
RESULT = "result.json"
"""The result of the whole run, on every host, once host 0 has written it. A host that was cut off
from host 0 has a result of its own ranks, which names the host that it has lost."""
INPUTS = ("values.json", "values.pt", "given")
"""Entries of a run folder with values that the run's processes read."""
SENT = ("spec.json", "script.py", "notebook.json", "notebook.ipynb", "env.json", *INPUTS)
"""Entries of a run folder that exist before the run."""
OWN = frozenset(
    (
        *SENT,
        *"requests.jsonl place.json mirror.json mirror.log".split(),
        *"running.lock stopping synced hosts".split(),
    )
)
"""Entries of a run folder that belong to its own machine: no host may write them."""
FOLDERS = frozenset(["attempts"])
"""Folders that are streamed. Returns, checkpoints and profiles are large and fetched at the end."""
GROWING = (".log", ".jsonl", ".txt")
WHOLE = (".json", ".png", "/pulse")


@dataclass(frozen=True)
class Hello:
    """The first line: this host takes part in the run."""

    run: str
    """The run's id."""
    node_rank: int
    host: str
    """The host's display name."""


@dataclass(frozen=True)
class Append:
    """A file has grown."""

    file: str
    at: int
    """The offset of the first of these bytes."""
    data: bytes
    time: float
    """The time at which they were read on this host."""


@dataclass(frozen=True)
class Replace:
    """A small file was rewritten."""

    file: str
    data: bytes
    time: float = 0.0


@dataclass(frozen=True)
class End:
    """The last line: no process of the run is left on this host, and everything was sent."""

    returncode: int
    message: str = ""
    """Why nothing was started; '' if something was."""


@dataclass(frozen=True)
class Start:
    """The first line to a node that starts a run."""

    key: str
    """The run's key in hexadecimal digits: hosts prove to each other that they have it."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables for the ranks; they may be secrets, so they are in no file."""
    alive_within: float = 0.0
    """Seconds without a line after which the parent counts as gone (a connection that is cut does
    not close); 0 for never."""
    beat: float = 2.0
    """Seconds between two heartbeats of the hosts' supervisors."""
    lost_after: float = 20.0
    """Seconds without a heartbeat after which a host is lost."""
    patience: float = 300.0
    """Seconds that hosts wait for each other before the run begins."""


@dataclass(frozen=True)
class Alive:
    """The parent is still there."""


Line = Hello | Append | Replace | End | Start | Stop | Alive
_KINDS: Mapping[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Line)}


def encode(line: Line) -> bytes:
    """Return a line of the stream, with its newline."""
    values = {each.name: getattr(line, each.name) for each in fields(line)}
    if isinstance(line, (Append, Replace)):
        values["data"] = base64.b64encode(line.data).decode()
    return (json.dumps({"kind": type(line).__name__.lower(), **values}) + "\n").encode()


def decode(line: bytes | str) -> Line:
    """Parse a line of the stream. Raises ValueError if it is not one."""
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


class StreamReader:
    """Reads a stream from pieces of any length, with other text between its lines.

    If the stream is repeated from its start (a log that is followed again), the merger leaves out
    known data: `Append.at` is the offset of each piece.
    """

    def __init__(self, longest: int) -> None:
        """`longest`: the most bytes of a line of the stream; longer lines are text."""
        self._lines = LineBuffer(longest)

    def feed(self, data: bytes) -> Iterator[Line | str]:
        """Yield the lines that are complete now, those that are not of the stream as text."""
        for line in self._lines.feed(data):
            try:
                yield decode(line)
            except ValueError:
                yield line.decode("utf-8", "replace")


def is_streamed(file: str) -> bool:
    """True if a file is part of the stream. Both ends check this, as a host could send any path.

    No part of the path may begin with a dot, as '..' and unfinished files do.
    """
    parts = file.split("/")
    return (
        file.isprintable()
        and not any(not part or part.startswith(".") for part in parts)
        and parts[0] not in OWN
        and (len(parts) == 1 or parts[0] in FOLDERS)
        and file.endswith((*GROWING, *WHOLE))
    )


def path_in_union(file: str, node_rank: int, ranks: range) -> str:
    """Return the path of a host's file in the folder of the whole run.

    The folders of its ranks (`ranks`) and their parts of a trace keep their paths. Files that all
    hosts have are merged, or taken from host 0. All other files, such as `supervisor.log`, the
    prelude's folder and files of ranks that are not its own, are below `hosts/<node rank>/`.
    """
    rank = _rank_of(file)
    if rank in ranks if rank is not None else node_rank == 0 or file in (*MERGED, *SHARED):
        return file
    return f"hosts/{node_rank}/{file}"


def fetched_path(file: str, node_rank: int, ranks: range) -> str | None:
    """Return the path of a host's file that is fetched, in the folder of the whole run.

    None for files that this folder has, for the whole run.
    """
    place = path_in_union(file, node_rank, ranks)
    own = file.split("/")[0] in OWN or is_streamed(file)
    return None if own and place == file else place


def _rank_of(file: str) -> int | None:
    """Return the rank of a file in a rank's folder or in a trace; None for other files."""
    parts = file.split("/")
    if parts[0] == "attempts" and len(parts) > 2 and parts[2].isdecimal():
        return int(parts[2])
    if parts[0] == PROFILE and (match := _TRACE.fullmatch(parts[-1])):
        return int(match[1])
    return None
