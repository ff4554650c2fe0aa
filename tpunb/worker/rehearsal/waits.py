"""Who waits for whom: ranks that wait for each other in different groups wait for ever.

Ranks in one group compare their calls before each exchange. But where they name different
ranks (pairs of xm.collective_permute that are not the same everywhere), each waits in a group of
its own for one that waits elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Wait:
    """What a rank that has to wait lets the others know."""

    group: str
    members: Sequence[int]
    """The ranks of the group."""
    exchanges: Mapping[str, int]
    """By group, how many exchanges it began, with that in which it waits."""
    call: str
    """The call, as `Call.described`."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Wait:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))

    def lacks(self, other: Wait) -> bool:
        """Whether it waits for the rank that says `other`."""
        return other.exchanges.get(self.group, 0) < self.exchanges[self.group]


def crossed(rank: int, wait: Wait, find: Callable[[int], Wait | None]) -> dict[int, Wait]:
    """The ranks that a waiting rank waits for, if some of them wait for each other; else {}.

    `find` gives what a rank has said, None if it does not wait. It may ask one rank after the
    other: in a circle nobody's wait can have ended before that of the one it waits for.
    """
    said: dict[int, Wait | None] = {rank: wait}
    needs: dict[int, list[int]] = {}
    looked = [rank]
    while looked:
        waiting = looked.pop()
        own, needs[waiting] = said[waiting], []
        assert own is not None
        for member in own.members:
            if member not in said:
                said[member] = find(member)
            other = said[member]
            if other is not None and own.lacks(other):
                needs[waiting].append(member)
                if member not in needs and member not in looked:
                    looked.append(member)
    if not _circle(needs):
        return {}
    return {each: found for each in sorted(needs) if (found := said[each]) is not None}


def _circle(needs: Mapping[int, Sequence[int]]) -> bool:
    """Whether some ranks need each other: taking away who needs nobody does not end it."""
    left = dict(needs)
    while free := [rank for rank, others in left.items() if not left.keys() & set(others)]:
        for rank in free:
            del left[rank]
    return bool(left)
