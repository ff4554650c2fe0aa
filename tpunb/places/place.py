"""What a place does for a run: five calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tpunb.places.config import PlaceConfig
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunState
from tpunb.runs.stream import Line, Stop
from tpunb.utils import files, records

_Run = TypeVar("_Run", bound="PlacedRun")


@dataclass(frozen=True)
class PlacedRun:
    """Where a run is: what is needed to find it again from any process.

    Each kind of place has its own, with what it needs besides (`kinds.read_run`).
    """

    place: PlaceConfig
    detached: bool = field(default=False, kw_only=True)
    """The run outlives the kernel, and the connections to its hosts."""
    skews: tuple[float, ...] = field(default=(), kw_only=True)
    """By how many seconds each host's clock is ahead of this one's, where that is known."""

    @property
    def cannot_stop(self) -> str:
        """Why a run there cannot be stopped from here, and what can be done; '' if it can be."""
        return ""

    @property
    def leftover(self) -> str:
        """What may go on there, and cost, if nobody follows it any more; '' for nothing.

        Also how it is ended: a mirror that was killed can say neither.
        """
        return ""

    def write(self, run: RunDir) -> None:
        """Note it in the run's folder here."""
        values = asdict(self) | {"place": self.place.to_json(), "leftover": self.leftover}
        files.write_json(run.place, values)

    @classmethod
    def read(cls: type[_Run], run: RunDir) -> _Run:
        """What is noted there of a run at a place of this kind. Raises ValueError."""
        try:
            data: dict[str, Any] = records.read(run.place)
            place = PlaceConfig.from_json(data.pop("place"))
            data.pop("leftover", None)  # for `state.lost_message`
            types: dict[str, Any] = get_type_hints(cls)
            return cls(place, **{name: records.convert(types[name], data[name]) for name in data})
        except (OSError, KeyError, TypeError) as error:
            raise ValueError(f"not a place's run: {error}") from None


def place_of(run: RunDir) -> PlaceConfig | None:
    """The place of a run; None if it is on this machine. Raises ValueError."""
    try:
        return PlaceConfig.from_json(records.read_dict(run.place)["place"])
    except KeyError:
        return None


@dataclass(frozen=True)
class HostGone:
    """The connection to a host has ended before its last line."""

    reason: str
    final: bool = False
    """The host itself is gone: nothing of the run goes on there."""


@dataclass(frozen=True)
class Restarted:
    """The place has started all hosts again, with empty folders: their files begin anew."""


@dataclass(frozen=True)
class Said:
    """What has come from a host."""

    host: int
    """Its node rank."""
    line: Line | HostGone | Restarted


class Cancelled(Exception):  # noqa: N818 (not an error)
    """Starting was given up because somebody asked for a stop."""


class Place(ABC):
    """One run at a place. Used by one process at a time, the run's mirror."""

    def __init__(self, run: RunDir, placed: PlacedRun) -> None:
        self.run = run
        self.placed = placed

    @abstractmethod
    def start(
        self,
        variables: Mapping[str, str],
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> None:
        """Bring there what the run needs, and start it.

        `variables`: of the ranks' environment; they may be secrets. `say` tells people what is
        being done. Raises TpunbError, and Cancelled once `cancelled` says so: nothing runs then.
        """

    @abstractmethod
    def follow(self, since: Sequence[Mapping[str, int]]) -> Iterator[Said | None]:
        """What the hosts say, until nothing more comes; None whenever nothing has come.

        `since`: of each host, how many bytes of which file are here already.
        """

    @abstractmethod
    def state(self) -> RunState | None:
        """How the run stands there; None if that cannot be found out."""

    @abstractmethod
    def stop(self, request: Stop) -> None:
        """Pass on a request to stop; while it is followed."""

    @abstractmethod
    def fetch(
        self, patterns: Sequence[str], into: Path, hosts: Sequence[int] | None = None
    ) -> list[Path]:
        """Copy the files of the run's folder there that match into a folder here; returns them.

        `hosts`: of these alone, by node rank.
        """

    @abstractmethod
    def let_go(self) -> None:
        """The kernel has ended: a run that is not detached is to end with it."""

    def finish(self, say: Callable[[str], None]) -> None:  # noqa: B027 (most have nothing to do)
        """The run has ended: bring what would be lost there, and give back what was taken for it.

        `say` tells people what could not be brought or given back. Raises nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """End every connection."""
