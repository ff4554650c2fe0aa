"""Rehearsal: the ranks of a run on CPU cores, which agree on each collective of torch.distributed.

Importing this module replaces nothing. On an accelerator `install_rehearsal` is never called.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping, Sequence

from tpunb.backends.rehearsal import call
from tpunb.backends.rehearsal.agent import Agent
from tpunb.backends.rehearsal.c10d_stores import ProcessGroupStores
from tpunb.backends.rehearsal.distributed import CPU, TensorKind, can_compare, install_collectives
from tpunb.backends.rehearsal.errors import is_of_torch_distributed
from tpunb.backends.rehearsal.waiting import WaitTimes
from tpunb.backends.rehearsal.wire import Comparison, Wire
from tpunb.utils import memory
from tpunb.utils.text import describe_ranks

FOREVER = 1e8
"""Seconds: three years. The supervisor, which knows where all ranks are, ends a run without
activity. Waiting for a rank that is active may be intended, however long it takes."""
_wire: Wire | None = None


def install_rehearsal(
    rank: int,
    world_size: int,
    timeout: float = FOREVER,
    times: WaitTimes | None = None,
    kinds: Sequence[TensorKind] = (CPU,),
) -> None:
    """Make this process rank `rank` of `world_size`, with collectives that the ranks compare.

    Call it once per process, after the import of torch and before the user's code. With torch 2.10
    and earlier only init_process_group is compared, because gloo's calls cannot be read.
    Reads MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RESTART_COUNT, which locate torch elastic's
    store; connects to it at the first collective. `timeout`: seconds that a rank waits for the
    others in a collective, unless its process group was made with a time-out of its own.

    Raises SetupError if torch elastic serves no store.
    """
    agent = Agent.from_environment(rank, world_size)
    wire = connect_ranks(agent, timeout, times)
    ProcessGroupStores(agent, wire).install()
    if not any(kind.is_tpu for kind in kinds):
        call.name_elsewhere("With gloo alone")
    for kind in kinds if can_compare() else ():
        install_collectives(kind).compare_over(wire, world_size)


def connect_ranks(
    agent: Agent,
    timeout: float,
    times: WaitTimes | None = None,
    comparison: Comparison | None = None,
) -> Wire:
    """The wire between the ranks of the run, for all kinds of rehearsals."""
    global _wire
    _wire = Wire(agent, timeout, times, comparison)
    return _wire


def leave_rehearsal() -> None:
    """Announce that this rank has left the train cell: ranks that wait for it then fail."""
    if _wire is not None:
        _wire.leave()


def name_departed(error: BaseException, world_size: int) -> None:
    """Add to an error of torch.distributed which ranks have left the train cell."""
    if _wire is None or not is_of_torch_distributed(error):
        return
    departed: list[int] = []
    with contextlib.suppress(OSError):  # the cell has closed the board's descriptor
        departed = _wire.departed(range(world_size))
    if departed:
        have = "have" if len(departed) > 1 else "has"
        error.args = (
            f"{error}\n{describe_ranks(departed)} {have} returned from the train cell: "
            "does every rank make the same calls of torch.distributed?",
        )


def end_rehearsal() -> None:
    """End the rehearsal. Call it after the exit handlers, which may call collectives, too.

    Raises the first CollectiveError of this rank, even if the user's code has caught it.
    """
    if _wire is not None:
        _wire.end()


def memory_info(local_world_size: int) -> Mapping[str, int]:
    """Bytes: memory of this process, and its share of the machine's. As xm.get_memory_info()."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts kilobytes
    return {
        "bytes_used": used,
        "bytes_limit": memory.total_memory() // local_world_size,
        "peak_bytes_used": max(peak, used),
    }
