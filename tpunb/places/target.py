"""A place that was asked and can take a run: what is decided there before the run starts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from tpunb.machine.machine import Machine
from tpunb.places.config import PlaceConfig
from tpunb.places.place import Place, PlacedRun
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Device, Price
from tpunb.utils.text import duration

_SAVES = re.compile(r"\btpunb\.(?:save|load)\b")


@dataclass(frozen=True)
class Estimate:
    """What a run at a place will cost or use, as far as that is known before it starts."""

    price: Price | None = None
    """Of an hour, in dollars or in what a quota is counted in."""
    unknown: str = ""
    """Why there is no price."""
    longest: float | None = None
    """Seconds after which the place itself ends a run."""
    left: float | None = None
    """What is left of a quota, in the price's unit."""
    until: str = ""
    """When there is more again."""
    notes: tuple[str, ...] = ()
    """What else is to be known before: how long the queue is, …"""
    starts: int = 1
    """How often the place starts the run at most; its `--timeout` begins anew with each."""

    def _seconds(self, timeout: float | None) -> float | None:
        """How long a run can take at most; None if that is not known."""
        whole = None if timeout is None else timeout * self.starts
        return min((each for each in (whole, self.longest) if each is not None), default=None)

    def most(self, timeout: float | None) -> float | None:
        """What a run with this `--timeout` can cost or use at most; None if that is not known."""
        seconds = self._seconds(timeout)
        return None if self.price is None or seconds is None else self.price.cost(seconds)

    def describe(self, timeout: float | None) -> list[str]:
        """Lines for the user."""
        lines = []
        if self.price is not None:
            seconds = self._seconds(timeout)
            limit = "without --timeout there is no limit"
            if seconds is not None:
                most = self.price.amount(self.price.cost(seconds))
                limit = f"at most {most}, in {duration(seconds)}"
            lines.append(f"{self.price}; {limit}")
        elif self.unknown:
            lines.append(f"what this costs is not known: {self.unknown}")
        if self.left is not None and self.price is not None:
            until = f", until {self.until}" if self.until else ""
            lines.append(f"left: {self.price.amount(self.left)}{until}")
        return [*lines, *self.notes]


class Target(ABC):
    """A place as far as a run depends on it before it starts."""

    @property
    def estimate(self) -> Estimate:
        """What a run there will cost or use; found out when the place was asked."""
        return Estimate()

    @property
    def cannot(self) -> Mapping[str, str]:
        """Options of a train cell that this place cannot honour, as fields, with the reason.

        Also 'stop', which is no option: it is said before the run.
        """
        return MappingProxyType({})

    @abstractmethod
    def placed(self, run_id: str, *, detached: bool) -> PlacedRun:
        """Where a new run will be. Raises PlaceError where it cannot be."""

    @property
    @abstractmethod
    def place(self) -> PlaceConfig:
        """As `places.toml` has it."""

    @property
    @abstractmethod
    def hosts(self) -> tuple[str, ...]:
        """Their names, for people, in order of node rank."""

    @property
    @abstractmethod
    def device(self) -> Device:
        """What the ranks run on."""

    @property
    @abstractmethod
    def local_cores(self) -> int:
        """Ranks of each host."""

    @abstractmethod
    def machine(self, here: Machine) -> Machine:
        """One of its hosts, as far as a run depends on it."""

    @abstractmethod
    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """The working directory there, and the entries of `sys.path` that are there as well."""

    @abstractmethod
    def resume(self, run: RunDir) -> str:
        """Where the checkpoints of an earlier run are, for the hosts. Raises TpunbError."""

    def choose_cores(self, wanted: int | str | None) -> int:
        """How many ranks in all. Raises ValueError, which says what is possible."""
        hosts, local = len(self.hosts), self.local_cores
        if wanted in (None, "all"):
            return hosts * local
        cores = int(wanted or 0)
        if cores % hosts or not cores:
            raise ValueError(
                f"{cores} cores: the {hosts} hosts of {self.place.name} have the same number of "
                f"ranks each, so it must be a multiple of {hosts}"
            )
        if self.device == "TPU" and cores != hosts * local:
            raise ValueError(
                f"{cores} cores: place {self.place.name} has {hosts * local} chips, which start "
                "together or not at all (--cores all)"
            )
        return cores

    def checkpoints(self, run_id: str) -> str | None:
        """Where a run saves; None where each host keeps its own."""
        shared = self.place.settings.checkpoints
        return f"{shared.rstrip('/')}/{run_id}" if shared else None

    def notes(self, script: str) -> list[str]:
        """What to know before the run."""
        stop = [self.cannot["stop"]] if "stop" in self.cannot else []
        if self.place.settings.checkpoints or not _SAVES.search(script):
            return stop
        return [*stop, *self.without_checkpoints()]

    @abstractmethod
    def without_checkpoints(self) -> list[str]:
        """What to know of a run that saves where not all hosts find it."""


class PlaceReport(Protocol):
    """What `tpunb doctor --on` finds out about a place."""

    def problems(self) -> list[tuple[str, str]]:
        """What forbids a run, by what it is true of (a host's name, …)."""

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""

    def text(self) -> str:
        """For a terminal."""


Say = Callable[[str], None]
"""Takes what people are to know while they wait."""


@dataclass(frozen=True)
class Kind:
    """What is to be known of a kind of place (`kinds.find_kind`)."""

    find_target: Callable[[PlaceConfig, Path, Say, Callable[[], bool]], Target]
    """Ask the place of `places.toml`, as seen from a working directory, what a run needs to know.

    Raises TpunbError where it cannot take one, and once the last argument says that nobody waits.
    """
    run: type[PlacedRun]
    open_place: Callable[[RunDir, PlacedRun], Place]
    """The five calls, for a run that is or will be there. Raises TpunbError."""
    inspect: Callable[[PlaceConfig], PlaceReport]
    """For `tpunb doctor --on`. Raises PlaceError."""
