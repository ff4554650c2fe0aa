"""What a TPU has and rehearsal has not: it is refused by name, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from tpunb.errors import TpunbError


# Not unfinished work: what it refuses has no meaning between CPU processes (SPMD's collectives),
# or no working way in torch_xla either (xm.send and xm.recv, pytorch/xla#8074). The second base
# is what torch raises for an operation that a backend lacks, and libraries catch.
class NotRehearsedError(TpunbError, NotImplementedError):
    """A collective that rehearsal ranks do not have."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        because = f" ({self.why})" if self.why else ""
        return (
            f"{self.what} is not rehearsed on CPU cores{because}. Rehearsed are all collectives "
            "of torch_xla and torch.distributed's on the xla backend, but for xm.send, xm.recv "
            "and those of SPMD. Nothing is replaced on a TPU"
        )


def refusing(name: str, why: str) -> Callable[..., NoReturn]:
    """A stand-in for a collective that is not rehearsed: calling it raises NotRehearsedError."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotRehearsedError(name, why)

    refuse.__name__ = name
    return refuse
