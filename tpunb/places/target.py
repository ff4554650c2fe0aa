"""`Target`: a place that can take a run, and what is decided about the run before it starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tpunb.machine.environment import EnvChange
from tpunb.machine.machine import Machine
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Device, Price
from tpunb.utils.text import duration


@dataclass(frozen=True)
class Estimate:
    """What a run at a place will cost, as far as known before it starts."""

    price: Price | None = None
    """Price of an hour."""
    unknown: str = ""
    """Why there is no price."""

    def most(self, timeout: float | None) -> float | None:
        """The most that a run with this `--timeout` can cost; None if not known."""
        return None if self.price is None or timeout is None else self.price.cost(timeout)

    def describe(self, timeout: float | None) -> list[str]:
        """Lines for the user."""
        if self.price is None:
            return [f"the cost is not known: {self.unknown}"] if self.unknown else []
        if timeout is None:
            return [f"{self.price}; no limit without --timeout"]
        return [f"{self.price}; at most ${self.most(timeout):.2f}, in {duration(timeout)}"]


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
        """What a run will cost; found out when the place was queried."""
        return Estimate()

    @property
    def ask_above(self) -> float | None:
        """The dollars above which a run is confirmed; None: it never is."""
        return None

    @property
    def price(self) -> Price | None:
        """The price of an hour; None if it is not known."""
        return self.estimate.price

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

    def environment(self, asked: Mapping[str, str]) -> tuple[dict[str, str], tuple[EnvChange, ...]]:
        """The variables for the ranks, `asked` (`--env`) among them, and what was changed for it.

        At a place: in addition to the hosts' own.
        """
        return dict(asked), ()

    @abstractmethod
    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """The working directory on the hosts, and the entries of `sys.path` that exist there."""

    def folder(self, path: str) -> str:
        """The hosts' folder for a local one."""
        return path

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
