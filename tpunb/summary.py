"""What stays of a run that has ended: what came out best, where the time went, what is odd."""

from __future__ import annotations

from dataclasses import dataclass

from tpunb.best import Best


@dataclass(frozen=True)
class Advice:
    """Something that a person should know about a run that went well, and what to do."""

    message: str
    fix: str


@dataclass(frozen=True)
class Summary:
    """Made from a run's folder by `tpunb.accounts`."""

    best: tuple[Best, ...] = ()
    spent: tuple[tuple[str, float], ...] = ()
    """What took how many seconds."""
    advice: tuple[Advice, ...] = ()

    def lines(self) -> list[str]:
        """As text, a line for each part that there is."""
        found = []
        if self.best:
            found.append(" · ".join(map(str, self.best)))
        if self.spent:
            found.append("time: " + " · ".join(f"{what} {took:.1f} s" for what, took in self.spent))
        return found + [f"note: {one.message} → {one.fix}" for one in self.advice]
