"""`TrainingState`: everything that a training needs to go on as if it had not been stopped."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from tpunb.training import checkpoint, randomness
from tpunb.training.checkpoint_device import settle
from tpunb.training.place import is_first
from tpunb.training.position import Position


class TrainingState:
    """Model, optimizer, scheduler, place in the data, random numbers: one checkpoint.

        batches = Position(loader)
        state = TrainingState(model=model, optimizer=optimizer, batches=batches, best=best)
        step = state.load()            # 0, or the step behind the one that was saved
        for epoch in range(batches.epoch, epochs):
            for x, y in batches:
                ...
                state.save(step)
                step += 1

    Parts are what has `state_dict` and `load_state_dict`, and dicts of data. Rank 0 writes them
    for all ranks; each rank writes its generators of random numbers, and its own buffers of
    modules (BatchNorm's means). `own` names the parts of which every rank has another: shards of
    FSDP or ZeRO.

    On CPU a training that goes on has the same weights, bit for bit, as one that was not
    stopped, with as many ranks as before.
    """

    def __init__(
        self, *, own: Collection[str] = (), to: str | Path | None = None, **parts: Any
    ) -> None:
        """`to`: the place of `tpunb.save` and `tpunb.load`."""
        for name, part in parts.items():
            if not isinstance(part, dict) and not hasattr(part, "load_state_dict"):
                raise TypeError(
                    f"TrainingState: {name} is a {type(part).__name__}, which has no "
                    "load_state_dict: give it as a dict of data, or leave it out"
                )
        if unknown := set(own) - set(parts):
            raise ValueError(f"TrainingState: own={sorted(unknown)} are none of its parts")
        self._parts = parts
        positions = {name for name, part in parts.items() if isinstance(part, Position)}
        self._own = positions.union(own)
        self._to = to

    def save(self, step: int) -> None:
        """Write a checkpoint, as `tpunb.save` does. Call it in all ranks, between two steps."""
        settle()
        states: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        for name, part in self._parts.items():
            if is_first() or name in self._own:
                states[name] = dict(part) if isinstance(part, dict) else part.state_dict()
            elif isinstance(part, nn.Module):
                names = {key for key, _ in part.named_buffers()}
                buffers[name] = {k: v for k, v in part.state_dict().items() if k in names}
        seed = randomness.on_device()
        random = randomness.on_host()
        state = {"parts": states, "buffers": buffers, "random": random, "seed": seed}
        checkpoint.save(state, step, per_rank=True, to=self._to)
        self._seed(seed)

    def load(
        self, from_: str | Path | None = None, *, step: int | None = None, trusted: bool = False
    ) -> int:
        """Go on from the newest checkpoint; the next step, or 0 if there is none.

        Call it in all ranks, just above the loop: what draws random numbers between the two
        makes others of them. The arguments are those of `tpunb.load`.

        Raises CheckpointError as that does: if another number of ranks has saved it, too.
        """
        where = from_ or self._to
        found = checkpoint.load(where, step=step, trusted=trusted)
        if found is None:
            return 0
        shared = found
        if not is_first():
            of_first = checkpoint.load(where, step=found.step, rank=0, trusted=trusted)
            assert of_first is not None  # or it would have raised
            shared = of_first
        for name, part in self._parts.items():
            source = found if name in self._own else shared
            if isinstance(part, dict):
                part.clear()
                part.update(source["parts"][name])
            else:
                part.load_state_dict(source["parts"][name])
            if name in found["buffers"]:
                part.load_state_dict(found["buffers"][name], strict=False)
        randomness.put_on_host(found["random"])
        self._seed(found["seed"])
        return found.step + 1

    def _seed(self, seed: int | None) -> None:
        """The same in a training that goes on and in one that was not stopped."""
        randomness.put_on_device(seed)
        for part in self._parts.values():
            if isinstance(part, Position):
                part.seed_next(seed)
