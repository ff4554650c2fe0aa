"""What a machine costs, and what time there is on it, as far as they are known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Price:
    """The price of a machine, whoever uses it, and when it was looked up."""

    per_hour: float
    """US dollars, for all of it."""
    what: str
    """'v5litepod-8 in us-west4, on demand'."""
    date: str
    """The day on which it was read: prices change."""
    source: str
    """Where it was read."""

    def cost(self, seconds: float) -> float:
        """US dollars."""
        return self.per_hour * seconds / 3600

    def tell(self, seconds: float) -> str:
        """The cost of some time in words."""
        cost = self.cost(seconds)
        shown = f"about ${cost:.2f}" if cost >= 0.01 else "less than $0.01"
        return f"cost: {shown} ({self})"

    def __str__(self) -> str:
        return f"{self.what}: ${self.per_hour:.2f} an hour, as of {self.date}"


@dataclass(frozen=True)
class Quota:
    """The TPU time that a platform gives in a week."""

    used: float
    """Seconds."""
    allowed: float
    """Seconds."""
    renewed: str
    """When the next week begins: '2026-11-28'; empty if the platform does not say."""

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.allowed - self.used)

    def __str__(self) -> str:
        until = f", until {self.renewed}" if self.renewed else ""
        return f"{self.left / 3600:.1f} of {self.allowed / 3600:.0f} TPU hours of this week{until}"
