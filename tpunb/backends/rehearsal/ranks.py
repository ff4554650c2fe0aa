"""Names of ranks in messages: the number, with the host's name in a run over several hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpunb.utils import text

_hosts: Sequence[str] = ()
_ranks_per_host = 1


def name_hosts(hosts: Sequence[str], world_size: int) -> None:
    """In a rank of a run over several hosts with equally many ranks: set the hosts' names.

    `hosts` is in order of node rank.
    """
    global _hosts, _ranks_per_host
    _hosts, _ranks_per_host = hosts, world_size // max(1, len(hosts))


def describe_ranks(ranks: Iterable[int]) -> str:
    """'rank 2', 'ranks 0, 2'; in a run over several hosts 'rank h1/2', 'ranks h0/0, h1/2'."""
    if not _hosts:
        return text.describe_ranks(ranks)
    names = [f"{_hosts[rank // _ranks_per_host]}/{rank}" for rank in sorted(ranks)]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
