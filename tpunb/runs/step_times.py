"""Where the time of a mean step went (`--profile`). Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceTime:
    """Seconds of one device in a trace."""

    busy: float
    """In which a program ran."""
    collectives: float
    """In which an operation of these was one that exchanges data with other devices."""


@dataclass(frozen=True)
class StepTimes:
    """A mean step: seconds, over the steps and ranks of a trace."""

    first: int
    last: int
    ranks: tuple[int, ...]
    seconds: float
    input: float
    compiling: float
    collectives: float
    device: DeviceTime | None = None
    """Of the mean device, in a mean step; None without a trace of devices."""

    @property
    def rest(self) -> float:
        """Neither of the waits: the cell's own Python."""
        return max(0.0, self.seconds - self.input - self.compiling - self.collectives)

    def host_parts(self) -> list[tuple[str, float]]:
        """What the ranks' Python did in a step, in seconds, in order."""
        parts = [
            ("waiting for input", self.input),
            ("compiling", self.compiling),
            ("collectives", self.collectives),
            ("Python", self.rest),
        ]
        return [(name, took) for name, took in parts if took > 0]

    def device_parts(self) -> list[tuple[str, float]]:
        """What the devices did in a step, in seconds; [] if no trace tells."""
        if self.device is None:
            return []
        parts = [
            ("device", self.device.busy - self.device.collectives),
            ("collectives", self.device.collectives),
            ("idle", max(0.0, self.seconds - self.device.busy)),
        ]
        return [(name, took) for name, took in parts if took > 0]

    def __str__(self) -> str:
        """'steps 5 to 10: 24.1 ms each: waiting for input 14.0, Python 10.1; device 9.0, …'."""
        told = [
            ", ".join(f"{name} {1000 * took:.1f}" for name, took in parts)
            for parts in (self.host_parts(), self.device_parts())
            if parts
        ]
        steps = f"steps {self.first} to {self.last}: {1000 * self.seconds:.1f} ms each"
        return f"{steps}: {'; '.join(told)}"
