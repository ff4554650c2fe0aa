"""What can go wrong when ranks meet."""

from __future__ import annotations

from tpunb.errors import TpunbError


class CollectiveError(TpunbError):
    """A collective operation between rehearsal ranks did not take place."""


class MismatchError(CollectiveError):
    """The ranks called different collectives, or the same with different tensors."""


class CrossedError(CollectiveError):
    """Ranks wait for each other in collectives of different ranks: nobody will ever come."""


class PeerLostError(CollectiveError):
    """A rank that should take part has ended."""


class WaitedTooLongError(CollectiveError):
    """A rank that should take part did not come within the time-out."""
