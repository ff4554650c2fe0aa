"""`Place`: the interface to a run at a place, with four calls."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from tpunb.places.config import PlaceConfig
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Stop
from tpunb.runs.stream import Line
from tpunb.utils import files, records

Say = Callable[[str], None]
"""Called with progress messages for people who wait."""
Check = Callable[[], bool]
"""Returns True once the result is no longer wanted."""


@dataclass(frozen=True)
class HostsRun:
    """Where a run was sent: everything that another process needs to find it again."""

    place: PlaceConfig
    hosts: tuple[str, ...]
    """The transport's names of the hosts, in order of node rank."""
    addresses: tuple[str, ...]
    """The addresses at which the hosts reach each other."""
    folders: tuple[str, ...]
    """The run folder on each host."""
    python: str
    """The hosts' interpreter, as a word of a shell."""
    port: int
    """Port of the rendezvous on host 0."""
    root: str
    """The local folder from which files are copied."""
    work: str
    """The hosts' folder to which they are copied."""
    rsync: bool = False
    """Whether rsync is installed on all hosts."""
    detached: bool = field(default=False, kw_only=True)
    """True if the run outlives the kernel, and the connections to its hosts."""
    skews: tuple[float, ...] = field(default=(), kw_only=True)
    """Seconds by which each host's clock is ahead of this machine's; () if unknown."""

    def write(self, run: RunDir) -> None:
        """Write these values into the local run folder."""
        files.write_json(run.place, asdict(self) | {"place": self.place.to_json()})

    @classmethod
    def read(cls, run: RunDir) -> HostsRun:
        """Read what `write` wrote. Raises ValueError."""
        try:
            data: dict[str, Any] = records.read(run.place)
            place = PlaceConfig.from_json(data.pop("place"))
            types = get_type_hints(cls)
            return cls(place, **{name: records.convert(types[name], data[name]) for name in data})
        except (OSError, KeyError, TypeError) as error:
            raise ValueError(f"not a run at a place: {error}") from None


def place_of(run: RunDir) -> PlaceConfig | None:
    """The place of a run; None if it is on this machine. Raises ValueError."""
    try:
        return PlaceConfig.from_json(records.read_dict(run.place)["place"])
    except KeyError:
        return None


@dataclass(frozen=True)
class ConnectionLost:
    """The connection to a host has ended before the host's last line."""

    reason: str


@dataclass(frozen=True)
class HostLine:
    """A line of a host's stream, or what has become of its connection."""

    host: int
    """Its node rank."""
    line: Line | ConnectionLost


class Cancelled(Exception):  # noqa: N818 (not an error)
    """The start was abandoned because a stop was requested."""


class Place(ABC):
    """A run at a place. Used by one process at a time, the run's mirror."""

    def __init__(self, run: RunDir, placed: HostsRun) -> None:
        self.run = run
        self.placed = placed

    @abstractmethod
    def start(self, variables: Mapping[str, str], say: Say, cancelled: Check) -> None:
        """Send what the run needs to the place, and start it.

        `variables`: environment variables for the ranks; they may be secrets. `say` is called with
        progress messages. Raises TpunbError, and Cancelled if `cancelled` returns True: the run
        has then not started.
        """

    @abstractmethod
    def follow(self, since: Sequence[Mapping[str, int]]) -> Iterator[HostLine | None]:
        """Yield the hosts' messages until nothing more can come; None while there is none.

        `since`: for each host, the number of bytes of each file that have been received already.
        """

    @abstractmethod
    def stop(self, request: Stop) -> None:
        """Pass on a stop request to the hosts; only while the run is followed."""

    @abstractmethod
    def fetch(
        self, patterns: Sequence[str], into: Path, hosts: Sequence[int] | None = None
    ) -> list[Path]:
        """Copy matching files of the hosts' run folders into a local folder; return their paths.

        `hosts`: node ranks of the hosts to copy from; None: all.
        """

    @abstractmethod
    def release_lifelines(self) -> None:
        """Let the hosts end a run that is not detached, because the kernel has ended."""

    def note_taken(self) -> None:
        """Note that the place has the run. Before, nothing has confirmed that a tool sent it."""
        with contextlib.suppress(OSError):  # a full disk
            self.run.taken.touch(0o600)

    @abstractmethod
    def close(self) -> None:
        """End every connection."""
