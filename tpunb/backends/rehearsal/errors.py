"""Errors and warnings of rehearsed collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from tpunb.utils.errors import TpunbError


class CollectiveError(TpunbError):
    """A collective between rehearsal ranks failed."""


class MismatchError(CollectiveError):
    """The ranks called different collectives, or the same one with different tensors."""


class LaunchMismatchError(MismatchError):
    """The ranks would run different programs with collectives on a TPU."""


class DeadlockError(CollectiveError):
    """Ranks wait forever for each other, in collectives of different groups."""


class PeerLostError(CollectiveError):
    """A rank that must take part has ended or left the train cell."""


class WaitedTooLongError(CollectiveError):
    """A rank that must take part did not do so within the time-out."""


class ExchangeFailedError(CollectiveError):
    """An exchange failed on all its ranks, none of which has ended or is elsewhere."""


def print_warning(text: str) -> None:
    """Print a warning to this rank's standard error. One rank does it for all."""
    print(f"tpunb: {text}", file=sys.stderr, flush=True)


_OF_PEERS = tuple(
    f"torch.distributed.{name}"
    for name in ("distributed_c10d", "rendezvous", "_functional_collectives")
)
"""Modules of torch that call gloo, or a store; not FSDP and DTensor, which use them."""


def is_of_torch_distributed(error: BaseException) -> bool:
    """True if a collective raised the error: gloo does for a lost peer, naming only a port."""
    module, tb = "", error.__traceback__
    while tb is not None:
        name = tb.tb_frame.f_globals.get("__name__", "")
        if not name.startswith("tpunb.backends.rehearsal."):  # which is between torch and gloo
            module = name
        tb = tb.tb_next
    raised = isinstance(error, RuntimeError) and not isinstance(error, TpunbError)
    return raised and module in _OF_PEERS


# The refused functions have no meaning between CPU processes (SPMD's
# collectives, XLA's own kernels), or do not work in torch_xla either (xm.send and xm.recv,
# pytorch/xla#8074). The second base class is torch's own for what a backend lacks, which libraries
# catch.
class NotRehearsedError(TpunbError, NotImplementedError):
    """A function that exists on a TPU, but not in a rehearsal."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        because = f" ({self.why})" if self.why else ""
        return f"{self.what} is not rehearsed on CPU cores{because}. On a TPU nothing is replaced"


def make_refusal(name: str, why: str = "") -> Callable[..., NoReturn]:
    """A replacement for a function that raises NotRehearsedError when called."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotRehearsedError(name, why)

    refuse.__name__ = name
    return refuse
