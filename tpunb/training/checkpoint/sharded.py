"""States of which each rank has a part: models of FSDP2, of tensor parallelism, other DTensors.

Each rank writes the parts that it holds, without waiting for the others. A process that loads
them takes what is its own in the layout that it has itself, from the files that have it: so
there may be another number of ranks than when they were saved.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from tpunb.backends.xla.private_names import FSDP_SHARD
from tpunb.backends.xla.tensors import is_dtensor
from tpunb.utils.errors import CheckpointError
from tpunb.utils.modules import is_a

_MARK = "tpunb.DTensor"
"""The first key of a DTensor in a file, which is a dict; its value is the version of the form."""
_Path = tuple[Any, ...]
"""The keys and indices on the way to a value in a state."""
_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: its shape, and where in the whole tensor it begins."""


def has_dtensors(state: Any) -> bool:
    """Whether nested dicts, lists and tuples have one."""
    return any(is_dtensor(value) for _, value in _leaves(state))


def has_shards_of_rank(state: Any) -> bool:
    """Whether tensors in it belong to this rank, and only to a run with as many ranks.

    They are those of torch_xla's FSDP, and ShardedTensors of torch's first FSDP.
    """
    return any(
        is_a(value, "torch.distributed._shard.sharded_tensor", "ShardedTensor")
        or any(isinstance(key, str) and FSDP_SHARD in key for key in path)
        for path, value in _leaves(state)
    )


def pack(state: Any, path: str) -> Any:
    """Return a state with data in place of its DTensors, which torch.load reads anywhere.

    It holds this rank's part of them; of several ranks that hold the same part, the first has it.
    `path`: where the state will be.

    Raises CheckpointError for a DTensor whose parts are still to be added up.
    """
    packed = {}
    for keys, value in _leaves(state):
        if is_dtensor(value):
            try:
                packed[id(value)] = _pack(value)
            except TypeError as error:
                raise CheckpointError(f"tpunb.save: {_name(keys)} is {error}", path) from error
    return _replaced(state, packed, {}) if packed else state


def _pack(tensor: Any) -> OrderedDict[str, Any]:
    dtensors = _dtensors()
    shape, placements = tuple(tensor.shape), dtensors.placements_of(tensor)
    packed: OrderedDict[str, Any] = OrderedDict({_MARK: 1})
    packed["shape"], packed["stride"] = shape, tuple(tensor.stride())
    packed["dtype"] = tensor.dtype
    packed["mesh"], packed["placements"] = dtensors.mesh_data(tensor.device_mesh), placements
    if dtensors.is_first_replica(tensor):
        packed["part"] = dtensors.local_box(shape, tensor.device_mesh, placements)
        packed["local"] = dtensors.local_tensor(tensor)
    return packed


def unpack(state: Any, others: Iterable[Any], path: str) -> Any:
    """Return a state that was loaded, with its DTensors.

    They are DTensors of this process's mesh, or whole tensors if it has none like theirs.
    `others`: the states of other ranks, which are read until everything is found. `path`: of the
    state's file.

    Raises CheckpointError if they do not have all of a DTensor.
    """
    wanted = {keys: _Wanted(packed) for keys, packed in _leaves(state) if _is_packed(packed)}
    for part in itertools.chain([state], others):
        for keys, packed in _leaves(part) if wanted else ():
            if keys in wanted and _is_packed(packed):
                wanted[keys].take(packed)
        if not any(each.left for each in wanted.values()):
            break
    for keys, each in wanted.items():
        if each.left:
            raise CheckpointError(f"tpunb.load: {path} has not all of {_name(keys)}", path)
    return _replaced(state, {id(each.packed): each.tensor() for each in wanted.values()}, {})


class _Wanted:
    """A DTensor, or the whole tensor, that is put together from the parts of ranks."""

    def __init__(self, packed: Mapping[str, Any]) -> None:
        import torch

        self.packed = packed
        shape = packed["shape"]
        self._mesh = _dtensors().find_mesh(packed["mesh"])
        self._box: _Box = (shape, (0,) * len(shape))
        if self._mesh is not None:
            self._box = _dtensors().local_box(shape, self._mesh, packed["placements"])
        self._local = torch.empty(self._box[0], dtype=packed["dtype"])
        self.left = self._local.numel()
        """The number of its elements that were not found yet."""

    def take(self, packed: Mapping[str, Any]) -> None:
        """Copy what a rank has of it."""
        if "part" not in packed or packed["mesh"] != self.packed["mesh"] or not self.left:
            return
        if packed["part"] == self._box:
            self._local, self.left = packed["local"], 0
            return
        here, there = [], []
        for size, start, others_size, others_start in zip(*self._box, *packed["part"], strict=True):
            first = max(start, others_start)
            last = max(min(start + size, others_start + others_size), first)
            here.append(slice(first - start, last - start))
            there.append(slice(first - others_start, last - others_start))
        part = self._local[tuple(here)]
        part.copy_(packed["local"][tuple(there)])
        self.left -= part.numel()

    def tensor(self) -> Any:
        """The result, on the CPU."""
        if self._mesh is None:
            return self._local
        packed = self.packed
        return _dtensors().make_dtensor(
            self._local, self._mesh, packed["placements"], packed["shape"], packed["stride"]
        )


def _is_packed(value: object) -> bool:
    return type(value) is OrderedDict and _MARK in value


def _leaves(state: Any) -> Iterator[tuple[_Path, Any]]:
    """Yield what nested dicts, lists and tuples hold; each container is searched once."""
    seen: set[int] = set()

    def search(path: _Path, value: Any) -> Iterator[tuple[_Path, Any]]:
        if not isinstance(value, dict | list | tuple) or _is_packed(value):
            yield path, value
        elif id(value) not in seen:
            seen.add(id(value))
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                yield from search((*path, key), each)

    return search((), state)


def _replaced(value: Any, by: Mapping[int, Any], done: dict[int, Any]) -> Any:
    """Return a copy of a structure with other values for those of these identities."""
    if id(value) in by:
        return by[id(value)]
    if isinstance(value, tuple):
        items = [_replaced(each, by, done) for each in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, dict | list):
        return value
    if id(value) not in done:
        twin = done[id(value)] = copy.copy(value)
        for key, each in list(twin.items() if isinstance(twin, dict) else enumerate(twin)):
            twin[key] = _replaced(each, by, done)
    return done[id(value)]


def _name(keys: _Path) -> str:
    """Return "state['model']['weight']"."""
    return "state" + "".join(f"[{key!r}]" for key in keys)


def _dtensors() -> ModuleType:
    """The module of DTensor's private names, which loads torch.distributed.tensor."""
    return importlib.import_module("tpunb.backends.torch.dtensors")
