"""`Problem`: something that is wrong with a set-up, and its fix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SetupProblem:
    """A problem to fix, or a fact that is good to know."""

    id: str
    """Stable name, for programs: 'torch-pair'."""
    message: str
    """What is wrong, in one or two sentences."""
    fix: str
    """What to do, with the exact command if there is one."""
    must: bool = True
    """True if runs fail, or do not use the TPU, until it is fixed; False if good to know."""

    def to_json(self) -> dict[str, str]:
        return {"id": self.id, "message": self.message, "fix": self.fix}
