"""`HostsRun`: where a run at a place is, in its run folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

from tpunb.places.config import PlaceConfig
from tpunb.runs.directory import RunDir
from tpunb.utils import files, records


@dataclass(frozen=True)
class HostsRun:
    """Where a run was sent: everything that another process needs to reach its hosts."""

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
    """The first of the ports for the ranks' store on host 0."""
    root: str
    """The local folder from which files are copied."""
    work: str
    """The hosts' folder to which they are copied."""

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
