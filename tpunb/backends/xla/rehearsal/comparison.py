"""Compares the programs of ranks at each collective, and what they have launched."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tpunb.backends.rehearsal import errors
from tpunb.backends.rehearsal.call import RankCall
from tpunb.backends.rehearsal.errors import LaunchMismatchError
from tpunb.backends.rehearsal.wire import Numbers, Wire
from tpunb.backends.xla.rehearsal import launches as _launches
from tpunb.backends.xla.rehearsal.divergence import ProgramHashes, programs
from tpunb.backends.xla.rehearsal.launches import find_difference, launches


class XlaComparison:
    """The `Comparison` of torch_xla: a collective is a part of a program, which all ranks run."""

    def begin_collective(self) -> Numbers:
        """The launches' hash, the hashes of programs, and the number of launches."""
        return (launches.hash, *programs.begin_collective(), launches.count)

    def compare(
        self, wire: Wire, call: RankCall, members: Sequence[int], numbers: Sequence[Numbers]
    ) -> None:
        """Warn of other programs; raise LaunchMismatchError for launches that certainly differ."""
        if programs.differ(call, members, [ProgramHashes(*row[1:4]) for row in numbers]):
            described = wire.gather_padded(programs.described(), members, call)
            if wire.rank == min(members) and (
                text := programs.describe_difference(call, described)
            ):
                errors.print_warning(text)
        if len({(row[0], row[4]) for row in numbers}) > 1:
            self._compare_launches(wire, call, members)

    def _compare_launches(self, wire: Wire, call: RankCall, members: Sequence[int]) -> None:
        padded = launches.described().encode().ljust(_launches.ROOM)
        described = {
            member: text.decode()
            for member, text in wire.gather_padded(padded, members, call).items()
        }
        difference = find_difference(described, final=False)
        if difference is not None and difference.certain:
            raise LaunchMismatchError(difference.text)
        if len({json.loads(text)[0] for text in described.values()}) == 1:
            launches.agree()
            if difference is not None and wire.rank == min(members):
                errors.print_warning(difference.text)

    def described(self) -> str:
        """The last launches of this rank."""
        return launches.described()

    def compare_departed(self, rank: int, departed: Mapping[int, str]) -> None:
        """Raise LaunchMismatchError if a rank that has left before ran other programs."""
        for other, text in departed.items():
            difference = find_difference({rank: launches.described(), other: text}, final=True)
            if difference is not None and difference.certain:
                raise LaunchMismatchError(difference.text)
            if difference is not None:
                errors.print_warning(difference.text)
