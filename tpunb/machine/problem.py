"""One thing that is wrong with a set-up, and its fix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something to fix, or to know."""

    id: str
    """A name that stays, for programs: 'torch-pair'."""
    message: str
    """What is wrong, in one or two sentences."""
    fix: str
    """What to do, with the exact command where there is one."""
    must: bool = True
    """Whether runs fail, or not use the TPU, until it is fixed. False: good to know."""

    def to_json(self) -> dict[str, str]:
        return {"id": self.id, "message": self.message, "fix": self.fix}
