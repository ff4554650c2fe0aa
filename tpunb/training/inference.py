"""`predict`: a model's outputs for every sample, in order, computed by all ranks."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn

from tpunb.training.dealing import share
from tpunb.training.place import is_first, rank_and_world
from tpunb.training.sharding import Dealt, MapShard, Shard, shard
from tpunb.training.track import track
from tpunb.training.trees import leaves, map_tensors

AHEAD = 8
"""Steps that a rank which fetches no outputs may be ahead of its device."""


def predict(
    model: Callable[..., Any],
    data: Any,
    batch_size: int | None = None,
    *,
    step: Callable[[Any], Any] | None = None,
    bf16: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """The outputs of `model` for every sample of `data`, in order: on rank 0; None elsewhere.

    Call it on every rank. `data` is a dataset, with `batch_size` samples for each rank and
    step, a DataLoader, or what `shard` gives. Every batch is full, so XLA compiles once; what
    fills the last ones is left out of the result.

    A batch is moved to the model's device and given to the model: a dict as keyword arguments,
    a tuple or list as arguments. `step` replaces this where a batch holds more than the model
    takes, or less of its output is wanted: `step=lambda batch: model(batch[0]).argmax(1)`. What
    comes out is a tensor with a row for each sample, or dicts, tuples or dataclasses of such
    tensors; the result is the same of CPU tensors with a row for each sample of `data`. Each
    step's outputs are fetched while the next is computed; devices hold no more of them.

    A Module is in eval mode meanwhile, without gradients. `bf16`: compute with bfloat16
    autocast; what is float comes back as float32. `device`: for what has no parameters.

    Gives None for no samples at all. Raises ValueError for shuffled data, for outputs that are
    not a row for each sample, and for a model that is not on the XLA device of its rank.
    """
    dealt = data if isinstance(data, Shard) else shard(data, batch_size)
    size = _size(dealt)
    place = torch.device(device) if device is not None else _device(model)
    rank, world = rank_and_world()
    if world > 1 and place.type != "xla":
        raise ValueError(
            f"predict: the model is on {place} in rank {rank} of {world}: move it to this "
            "rank's core, model.to(torch_xla.device())"
        )
    call = step or _Call(model)
    shapes = _Shapes(dealt.batch_size)
    results = _Results(size, dealt.batch_size, world, widen=bf16) if is_first() else None
    with _evaluating(model), torch.no_grad(), _precision(place, bf16):
        for number, this in enumerate(_shown(dealt)):
            output = call(map_tensors(lambda tensor: tensor.to(place), this.batch))
            shapes.check(output)
            if world > 1:
                output = _gathered(output)
            if place.type == "xla":
                _run(wait=results is None and number % AHEAD == AHEAD - 1)
            if results is not None:
                results.add(output, this)
    return None if results is None else results.whole()


class _Call:
    """How a model is called with a batch."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        takes = model.forward if isinstance(model, nn.Module) else model
        try:
            self._takes: inspect.Signature | None = inspect.signature(takes)
        except ValueError:  # a function written in C, such as torch.sigmoid
            self._takes = None

    def __call__(self, batch: Any) -> Any:
        named = dict(batch) if isinstance(batch, Mapping) else {}
        parts = [] if named else batch if isinstance(batch, (tuple, list)) else [batch]
        try:
            if self._takes is not None:
                self._takes.bind(*parts, **named)
        except TypeError as error:
            raise TypeError(
                f"predict: a batch is no argument list of the model ({error}): choose from it, "
                "for example step=lambda batch: model(batch[0])"
            ) from None
        return self._model(*parts, **named)


class _Shapes:
    """That each step gives rows of the same shape, so that they are one result."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._first: list[tuple[int, ...]] | None = None

    def check(self, output: Any) -> None:
        for leaf in leaves(output):
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise ValueError(
                    f"predict: the output holds a {type(leaf).__name__}, which belongs to no "
                    "sample: return tensors with a row for each, for example "
                    "step=lambda batch: model(**batch).logits"
                )
        shapes = [tuple(leaf.shape) for leaf in leaves(output) if leaf is not None]
        for shape in shapes:
            if shape[:1] != (self._rows,):
                raise ValueError(
                    f"predict: an output has the shape {list(shape)} for a batch of {self._rows} "
                    "samples: return only what has a row for each, with step=…"
                )
        self._first = self._first or shapes
        if shapes != self._first:
            raise ValueError(
                f"predict: outputs of one step have the shapes {shapes}, those of the first had "
                f"{self._first}: rows of different shapes are no one result. Return what has the "
                "same for all samples, with step=…"
            )


class _Results:
    """Outputs on the host, each row where its sample is in the data."""

    def __init__(self, size: int | None, batch_size: int, world: int, widen: bool) -> None:
        self._size = size
        self._batch_size = batch_size
        self._world = world
        self._widen = widen
        self._waiting: tuple[Any, Dealt] | None = None
        self._whole: Any = None
        self._parts: list[Any] = []

    def add(self, output: Any, step: Dealt) -> None:
        """Take the outputs of a step, and fetch those of the step before."""
        self._fetch()
        self._waiting = output, step

    def _fetch(self) -> None:
        if self._waiting is None:
            return
        (output, step), self._waiting = self._waiting, None
        kept = self._counted(step.real)
        part = map_tensors(lambda tensor: self._to_host(tensor)[kept], output)
        if self._size is None:
            self._parts.append(part)
            return
        if self._whole is None:
            self._whole = map_tensors(self._room, part)
        for whole, rows in zip(leaves(self._whole), leaves(part), strict=True):
            if rows is not None:
                whole[step.positions] = rows

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.cpu()
        return value.float() if self._widen and value.is_floating_point() else value

    def _room(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._size is not None
        return torch.empty((self._size, *rows.shape[1:]), dtype=rows.dtype)

    def _counted(self, count: int) -> torch.Tensor | slice:
        """Which rows of all ranks' batches, one after the other, count."""
        if count == self._batch_size * self._world:
            return slice(None)
        shares = (share(count, rank, self._world) for rank in range(self._world))
        return torch.cat([
            rank * self._batch_size + torch.arange(end - first)
            for rank, (first, end) in enumerate(shares)
        ])  # fmt: skip

    def whole(self) -> Any:
        """All rows in order; None if there are none."""
        self._fetch()
        if not self._parts:
            return self._whole
        columns = zip(*map(leaves, self._parts), strict=True)
        joined = (torch.cat(column) for column in columns if column[0] is not None)
        return map_tensors(lambda _: next(joined), self._parts[0])


def _gathered(output: Any) -> Any:
    """The outputs of all ranks, one after the other in each tensor."""
    import torch_xla.core.xla_model as xm

    # Not pinned: upstream's pinned way sums zeros, which bool cannot, in a program of its own
    # for each rank. A layout cannot differ where all ranks run the same program. Not as a list:
    # torch_xla crashes where it has one tensor only of a type (2.8, 2.9).
    return map_tensors(lambda tensor: xm.all_gather(tensor, pin_layout=False), output)


def _run(wait: bool) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm

    torch_xla.sync()
    if wait:
        xm.wait_device_ops()


def _shown(dealt: Shard) -> Iterator[Dealt]:
    """The steps; in a run its card says how far they are. In the kernel there is no bar to it."""
    if "TPUNB_RUN" not in os.environ:
        return dealt.dealt()
    total = len(dealt) if isinstance(dealt, MapShard) else None
    return track(dealt.dealt(), total, name="predict")


def _device(model: Callable[..., Any]) -> torch.device:
    if isinstance(model, nn.Module):
        for tensor in chain(model.parameters(), model.buffers()):
            return tensor.device
    if "RANK" in os.environ and "torch_xla" in sys.modules:
        device: torch.device = sys.modules["torch_xla"].device()
        return device
    return torch.device("cpu")


@contextmanager
def _evaluating(model: Callable[..., Any]) -> Iterator[None]:
    """In eval mode; afterwards each part is in the mode that it was in."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    were = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, were, strict=True):
            module.training = training


def _precision(device: torch.device, bf16: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def _size(dealt: Shard) -> int | None:
    """The number of samples, where it is known; raises ValueError where the order is not."""
    if dealt.rest != "pad":
        raise ValueError(f"predict: shard(…, rest={dealt.rest!r}) does not give each sample once")
    if not isinstance(dealt, MapShard):
        return None
    if not dealt.is_in_order:
        raise ValueError(
            "predict: the samples come in an order of a sampler, so nobody could tell whose the "
            "outputs are: give predict the dataset, or a DataLoader without shuffle"
        )
    return dealt.size
