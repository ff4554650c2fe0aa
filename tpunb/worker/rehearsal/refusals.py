"""What a TPU has and rehearsal has not: it is refused by name, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from tpunb.errors import TpunbError


class NotRehearsedError(TpunbError, NotImplementedError):
    """A collective that rehearsal ranks do not have, though a TPU has.

    A NotImplementedError as well: torch raises that for an operation which a backend lacks.
    """

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
