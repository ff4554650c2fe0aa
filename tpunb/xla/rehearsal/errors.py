"""Errors of rehearsed collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from tpunb.utils.errors import TpunbError


class CollectiveError(TpunbError):
    """A collective between rehearsal ranks failed."""


class MismatchError(CollectiveError):
    """The ranks called different collectives, or the same with different tensors."""


class LaunchMismatchError(MismatchError):
    """The ranks would run different programs with collectives on a TPU."""


class DeadlockError(CollectiveError):
    """Ranks wait for each other in collectives of different groups, forever."""


class PeerLostError(CollectiveError):
    """A rank that must take part has ended or left the train cell."""


class WaitedTooLongError(CollectiveError):
    """A rank that must take part did not come within the time-out."""


def is_of_torch_distributed(error: BaseException) -> bool:
    """Whether torch.distributed raised it: gloo does for a lost peer, and knows its port only."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    module = "" if tb is None else tb.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, RuntimeError) and module.startswith("torch.distributed.")


# Not unfinished work: what it refuses has no meaning between CPU processes (SPMD's collectives),
# or does not work in torch_xla either (xm.send and xm.recv, pytorch/xla#8074). The second base
# is what torch raises for an operation that a backend lacks, and libraries catch.
class NotRehearsedError(TpunbError, NotImplementedError):
    """A collective that exists on a TPU and not in a rehearsal."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        because = f" ({self.why})" if self.why else ""
        return (
            f"{self.what} is not rehearsed on CPU cores{because}. A rehearsal has all collectives "
            "of torch_xla and torch.distributed's xla backend, except xm.send, xm.recv and those "
            "of SPMD. On a TPU nothing is replaced"
        )


def make_refusal(name: str, why: str) -> Callable[..., NoReturn]:
    """A replacement for a collective that raises NotRehearsedError when called."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotRehearsedError(name, why)

    refuse.__name__ = name
    return refuse
