"""The parts of the time of a mean step (`--profile`). Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceTime:
    """Times of one device in a trace, in seconds."""

    busy: float
    """Seconds in which a program ran."""
    collectives: float
    """Seconds of `busy` in which an operation exchanged data with other devices."""


@dataclass(frozen=True)
class StepTimes:
    """The times of a step in seconds, averaged over the steps and ranks of a trace."""

    first: int
    last: int
    ranks: tuple[int, ...]
    seconds: float
    input: float
    compiling: float
    collectives: float
    device: DeviceTime | None = None
    """The times of a device, averaged over devices and steps; None without a trace of devices."""

    @property
    def rest(self) -> float:
        """Seconds without any of the waits: the cell's own Python."""
        return max(0.0, self.seconds - self.input - self.compiling - self.collectives)

    def host_parts(self) -> list[tuple[str, float]]:
        """Return the activities of the ranks' Python in a step and their seconds, in order."""
        parts = [
            ("waiting for input", self.input),
            ("compiling", self.compiling),
            ("collectives", self.collectives),
            ("Python", self.rest),
        ]
        return [(name, took) for name, took in parts if took > 0]

    def device_parts(self) -> list[tuple[str, float]]:
        """Return the activities of the devices in a step and their seconds; [] without a trace."""
        if self.device is None:
            return []
        parts = [
            ("device", self.device.busy - self.device.collectives),
            ("collectives", self.device.collectives),
            ("idle", max(0.0, self.seconds - self.device.busy)),
        ]
        return [(name, took) for name, took in parts if took > 0]

    def __str__(self) -> str:
        """Return 'steps 5 to 10: 24.1 ms each: waiting for input 14.0, …; device 9.0, …'."""
        told = [
            ", ".join(f"{name} {1000 * took:.1f}" for name, took in parts)
            for parts in (self.host_parts(), self.device_parts())
            if parts
        ]
        steps = f"steps {self.first} to {self.last}: {1000 * self.seconds:.1f} ms each"
        return f"{steps}: {'; '.join(told)}"
