"""Train cells of a script that runs by itself: each runs in its place, in every rank.

In a notebook, a train cell changes neither the random numbers nor the process group of the cells
below it, which get the values that it returned: those of rank 0, on the CPU.
"""

from __future__ import annotations

import datetime
import io
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from tpunb.backends.pickling import pickle_value

_SIZE = 4 << 20
"""Most bytes of a message to torch's store."""
_calls = 0


def random_states() -> list[tuple[Callable[[Any], object], Any]]:
    """Return the functions that set the random generators, each with the present state."""
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if numpy := sys.modules.get("numpy"):
        states.append((numpy.random.set_state, numpy.random.get_state()))
    xm = sys.modules.get("torch_xla.core.xla_model")
    if xm and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        states.append((xm.set_rng_state, xm.get_rng_state()))
    return states


def end_train_cell(
    before: Sequence[tuple[Callable[[Any], object], Any]],
    values: Callable[[], Mapping[str, object]],
) -> SimpleNamespace:
    """End a train cell; return its result, as far as it is not in a run folder.

    `before`: the `random_states` at its beginning. `values`: called in rank 0, whose values all
    ranks get. The next train cell makes its own process group.
    """
    rank, world_size = (int(os.environ.get(*pair)) for pair in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if world_size > 1 and (torch_xla := sys.modules.get("torch_xla")):
        torch_xla.sync(wait=True)  # rank 0's values may depend on collectives of all ranks
    data = pickle_value(dict(values())) if rank == 0 else b""
    if world_size > 1:
        data = _from_rank_0(data, rank, world_size)
    returns = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    for restore, state in before:
        restore(state)
    run = SimpleNamespace(state="succeeded", world_size=world_size, returns=returns)
    run.failure, run.failures, run.result = None, (), run
    run.wait = run.stop = lambda timeout=None: run
    run.raise_for_failure = lambda: None
    vars(sys.modules["tpunb"])["last_run"] = run
    return run


def _from_rank_0(data: bytes, rank: int, world_size: int) -> bytes:
    """Send rank 0's data to the others, through torch's store."""
    global _calls
    _calls += 1
    key = f"train cell {_calls}"
    patience = datetime.timedelta(days=30)
    store, _, _ = next(rendezvous("env://", timeout=patience))
    if rank == 0:
        for at in range(0, len(data), _SIZE):
            store.set(f"{key}/{at}", data[at : at + _SIZE])
        store.set(key, str(len(data)))
    else:
        length = int(store.get(key))
        data = b"".join(store.get(f"{key}/{at}") for at in range(0, length, _SIZE))
    if store.add(f"{key}/got", 1) == world_size:
        for at in range(0, len(data), _SIZE):
            store.delete_key(f"{key}/{at}")
    return data
