"""`Target`: a place that can take a run, and what is decided about the run before it starts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpunb.machine.environment import EnvChange
from tpunb.machine.machine import Machine
from tpunb.places.config import PlaceConfig
from tpunb.places.errors import by_host
from tpunb.places.place import Check, Place, PlacedRun, Say
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Device, Price
from tpunb.utils.text import duration

_SAVES = re.compile(r"\btpunb\.(?:save|load)\b")


@dataclass(frozen=True)
class Estimate:
    """What a run at a place will cost or use, as far as known before it starts."""

    price: Price | None = None
    """Price of an hour, in dollars or in the unit of a quota."""
    unknown: str = ""
    """Why there is no price."""
    longest: float | None = None
    """Seconds after which the place itself ends a run."""
    left: float | None = None
    """Rest of a quota, in the price's unit."""
    until: str = ""
    """When the quota is renewed."""
    notes: tuple[str, ...] = ()
    """Other facts to know before the start."""

    def _seconds(self, timeout: float | None) -> float | None:
        """Longest duration of a run; None if there is no limit."""
        return min((each for each in (timeout, self.longest) if each is not None), default=None)

    def most(self, timeout: float | None) -> float | None:
        """The most that a run with this `--timeout` can cost or use; None if not known."""
        seconds = self._seconds(timeout)
        return None if self.price is None or seconds is None else self.price.cost(seconds)

    def describe(self, timeout: float | None) -> list[str]:
        """Lines for the user."""
        lines = []
        if self.price is not None:
            seconds = self._seconds(timeout)
            limit = "no limit without --timeout"
            if seconds is not None:
                most = self.price.amount(self.price.cost(seconds))
                limit = f"at most {most}, in {duration(seconds)}"
            lines.append(f"{self.price}; {limit}")
        elif self.unknown:
            lines.append(f"the cost is not known: {self.unknown}")
        if self.left is not None and self.price is not None:
            until = f", until {self.until}" if self.until else ""
            lines.append(f"left: {self.price.amount(self.left)}{until}")
        return [*lines, *self.notes]


class Target(ABC):
    """What takes a run: everything that the run depends on before it starts."""

    kernel: Mapping[str, str] = MappingProxyType({})
    """The kernel's environment, as far as a run gets it."""

    @property
    def place_name(self) -> str:
        """The place's name; '' for this machine."""
        return ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts, for people, in order of node rank; () for this machine."""
        return ()

    @property
    def estimate(self) -> Estimate:
        """What a run will cost or use; found out when the place was queried."""
        return Estimate()

    @property
    def price(self) -> Price | None:
        """The price of an hour; None if it is not known."""
        return self.estimate.price

    @property
    def cannot(self) -> Mapping[str, str]:
        """Options of a train cell that this place cannot honour, by field name, with the reason.

        Also 'stop', which is not an option, but a note before the run.
        """
        return MappingProxyType({})

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device of the ranks."""

    @property
    @abstractmethod
    def local_cores(self) -> int:
        """Ranks of each host."""

    @abstractmethod
    def machine(self, here: Machine) -> Machine:
        """One of the hosts as a `Machine`, with facts of `here` where the host's are unknown."""

    def get_ready(self) -> None:  # noqa: B027 (places have nothing to prepare)
        """Prepare for a run whose options are checked, before its notebook is converted.

        Raises TpunbError if that is not possible.
        """

    def environment(self, asked: Mapping[str, str]) -> tuple[dict[str, str], tuple[EnvChange, ...]]:
        """The variables for the ranks, `asked` (`--env`) among them, and what was changed for it.

        At a place: in addition to the hosts' own.
        """
        return dict(asked), ()

    @abstractmethod
    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """The working directory on the hosts, and the entries of `sys.path` that exist there."""

    @abstractmethod
    def resume(self, run: RunDir) -> str:
        """Where the hosts find the checkpoints of an earlier run. Raises TpunbError."""

    @abstractmethod
    def choose_cores(self, wanted: int | str | None) -> int:
        """The number of ranks of all hosts. Raises ValueError, which names the possible ones."""

    def checkpoints(self, run_id: str) -> str | None:
        """Where a run saves checkpoints; None if each host keeps its own."""
        return None

    @abstractmethod
    def notes(self, script: str) -> list[str]:
        """Notes for the user before the run."""


class PlaceTarget(Target):
    """A place that can take a run."""

    place: PlaceConfig
    """The place's entry in `places.toml`."""

    @property
    def place_name(self) -> str:
        return self.place.name

    @abstractmethod
    def placed(self, run_id: str, *, detached: bool) -> PlacedRun:
        """Decide where a new run will be. Raises PlaceError if the place cannot take it."""

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """Fields of one of the hosts as a `Machine`: `chips`, `accelerator_type` and others."""

    def machine(self, here: Machine) -> Machine:
        return replace(
            here,
            platform=self.place.kind,
            kind=f"place {self.place.name}",
            device=self.device,
            generation="",
            **{"workers": len(self.hosts), **self.facts},
        )

    def choose_cores(self, wanted: int | str | None) -> int:
        hosts, local = len(self.hosts), self.local_cores
        if wanted in (None, "all"):
            return hosts * local
        cores = int(wanted or 0)
        if cores % hosts or not cores:
            raise ValueError(
                f"{cores} cores: place {self.place.name} has {hosts} hosts with the same number "
                f"of ranks each, so --cores must be a multiple of {hosts}"
            )
        if self.device == "TPU" and cores != hosts * local:
            raise ValueError(
                f"{cores} cores: place {self.place.name} has {hosts * local} chips, which start "
                "together or not at all (--cores all)"
            )
        return cores

    def checkpoints(self, run_id: str) -> str | None:
        return self.place.checkpoints(run_id) or None

    def notes(self, script: str) -> list[str]:
        stop = [self.cannot["stop"]] if "stop" in self.cannot else []
        if self.place.settings.checkpoints or not _SAVES.search(script):
            return stop
        return [*stop, *self.without_checkpoints()]

    @abstractmethod
    def without_checkpoints(self) -> list[str]:
        """Notes about a run whose checkpoints not all hosts can read."""


@dataclass(frozen=True)
class PlaceReport:
    """The report of `tpunb doctor --on` about a place."""

    place: PlaceConfig
    lines: tuple[str, ...]
    """The lines for a terminal, below the first one and above the problems."""
    found: tuple[tuple[str, str], ...]
    """Pairs of a subject (a host's name, …) and a problem that prevents a run."""
    details: Mapping[str, Any]
    """Further fields of the output of `--json`."""
    ready: str = ""
    """The last line, if there is no problem."""

    def problems(self) -> list[tuple[str, str]]:
        """Pairs of a subject and a problem that prevents a run."""
        return list(self.found)

    def to_json(self) -> dict[str, Any]:
        """The output of `--json`."""
        return {
            "place": self.place.name,
            "kind": self.place.kind,
            **self.details,
            "problems": [{"host": host, "message": what} for host, what in self.found],
        }

    def text(self) -> str:
        """Text for a terminal."""
        place = self.place
        last = [f"problem: {line}" for line in by_host(self.found)]
        if not last and self.ready:
            last = [f"ready: %%tpu_train --on {place.name} {self.ready}"]
        return "\n".join([f"place {place.name} ({place.kind}, {place.file})", *self.lines, *last])


@dataclass(frozen=True)
class PlaceKind:
    """The functions of a kind of place (`kinds.find_kind`)."""

    find_target: Callable[[PlaceConfig, Path, Say, Check], PlaceTarget]
    """Query the place for everything that a run from this working directory depends on.

    Raises TpunbError if the place cannot take a run, and Cancelled once the last argument returns
    True.
    """
    run: type[PlacedRun]
    place: type[Place]
    """Its constructor, with a `RunDir` and the run, may raise TpunbError."""
    inspect: Callable[[PlaceConfig], PlaceReport]
    """Make the report of `tpunb doctor --on`. Raises PlaceError."""
