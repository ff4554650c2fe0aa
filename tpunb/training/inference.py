"""`predict`: compute a model's outputs for every sample on all ranks, in the samples' order."""

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

from tpunb.backends import current
from tpunb.training.collectives import accelerator, gather_rows
from tpunb.training.ranks import is_first, rank_and_world
from tpunb.training.sharding import MapShard, Shard, Step, rank_slice, shard
from tpunb.training.track import track
from tpunb.training.trees import leaves, map_tensors
from tpunb.utils import env_vars

AHEAD = 8
"""Steps that a rank that fetches no outputs may be ahead of its device."""


def predict(
    model: Callable[..., Any],
    data: Any,
    batch_size: int | None = None,
    *,
    step: Callable[[Any], Any] | None = None,
    bf16: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """Return the outputs of `model` for every sample of `data`, in order, on rank 0.

        guesses = predict(model, dataset, 64, step=lambda batch: model(batch[0]).argmax(1))

    Call it on every rank; the other ranks, and rank 0 if `data` is empty, get None.

    `data`: a dataset, with `batch_size` samples for each rank and step; a DataLoader; or the
    result of `shard`. Every batch is full, so XLA compiles once; the padding of the last batches
    is left out of the result.

    A batch is moved to the model's device and passed to the model: a dict as keyword arguments,
    a tuple or list as positional arguments. `step` replaces this call, if a batch holds more than
    the model takes or only part of the output is wanted. The output must be a tensor with a row
    for each sample of the batch, or dicts, tuples, lists or dataclasses of such tensors. The
    result has the same structure, with CPU tensors that have a row for each sample of `data`. The
    outputs of a step are fetched while the next one is computed, so devices hold those of a few
    steps only.

    A Module is put into eval mode for the call; no gradients are computed. `bf16`: compute with
    bfloat16 autocast; floating-point outputs are returned as float32. `device`: the device to
    move batches to, for models without parameters and buffers.

    Raises ValueError for shuffled data, for outputs without a row for each sample, for outputs
    whose shapes change between steps, and with several ranks for a model that is not on the XLA
    device of its rank; TypeError if the model does not accept a batch as its arguments.
    """
    batches = data if isinstance(data, Shard) else shard(data, batch_size)
    size = _size(batches)
    device = torch.device(device) if device is not None else _device(model)
    rank, world = rank_and_world()
    if world > 1 and device.type != "xla" and current.name() == "xla":
        raise ValueError(
            f"predict: the model is on {device} in rank {rank} of {world}: move it to this "
            "rank's core, model.to(torch_xla.device())"
        )
    call = step or _ModelCall(model)
    shapes = _ShapeCheck(batches.batch_size)
    results = _Results(size, batches.batch_size, world, widen=bf16) if is_first() else None
    with _evaluating(model), torch.no_grad(), _precision(device, bf16):
        for number, this in enumerate(_with_progress(batches)):
            output = call(map_tensors(lambda tensor: tensor.to(device), this.batch))
            shapes.check(output)
            if world > 1:
                output = map_tensors(gather_rows, output)
            if device.type == "xla":
                _run(wait=results is None and number % AHEAD == AHEAD - 1)
            if results is not None:
                results.add(output, this)
    return None if results is None else results.finish()


class _ModelCall:
    """Calls a model with the parts of a batch as its arguments."""

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
                f"predict: the model cannot take a batch as its arguments ({error}): select "
                "from it, for example step=lambda batch: model(batch[0])"
            ) from None
        return self._model(*parts, **named)


class _ShapeCheck:
    """Checks that the outputs of all steps have rows of the same shape."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._first: list[tuple[int, ...]] | None = None

    def check(self, output: Any) -> None:
        for leaf in leaves(output):
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise ValueError(
                    f"predict: the output holds a {type(leaf).__name__}: return only tensors, "
                    "with a row for each sample, as in step=lambda batch: model(**batch).logits"
                )
        shapes = [tuple(leaf.shape) for leaf in leaves(output) if leaf is not None]
        for shape in shapes:
            if shape[:1] != (self._rows,):
                raise ValueError(
                    f"predict: an output has the shape {list(shape)} for a batch of {self._rows} "
                    "samples: return only tensors with a row for each, with step=…"
                )
        self._first = self._first or shapes
        if shapes != self._first:
            raise ValueError(
                f"predict: the outputs of a step have the shapes {shapes}, those of the first had "
                f"{self._first}, and cannot be one result. Return the same shape for all "
                "samples, with step=…"
            )


class _Results:
    """Outputs on the host, each row at its sample's index in the data."""

    def __init__(self, size: int | None, batch_size: int, world: int, widen: bool) -> None:
        self._size = size
        self._batch_size = batch_size
        self._world = world
        self._widen = widen
        self._waiting: tuple[Any, Step] | None = None
        self._whole: Any = None
        self._parts: list[Any] = []

    def add(self, output: Any, step: Step) -> None:
        """Keep the outputs of a step, and fetch those of the previous step."""
        self._fetch()
        self._waiting = output, step

    def _fetch(self) -> None:
        if self._waiting is None:
            return
        (output, step), self._waiting = self._waiting, None
        kept = self._counted(step.count)
        part = map_tensors(lambda tensor: self._to_host(tensor)[kept], output)
        if self._size is None:
            self._parts.append(part)
            return
        if self._whole is None:
            self._whole = map_tensors(self._allocate, part)
        for whole, rows in zip(leaves(self._whole), leaves(part), strict=True):
            if rows is not None:
                whole[step.positions] = rows

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.cpu()
        return value.float() if self._widen and value.is_floating_point() else value

    def _allocate(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._size is not None
        return torch.empty((self._size, *rows.shape[1:]), dtype=rows.dtype)

    def _counted(self, count: int) -> torch.Tensor | slice:
        """Select the rows that are not padding from the concatenated batches of all ranks."""
        if count == self._batch_size * self._world:
            return slice(None)
        slices = (rank_slice(count, rank, self._world) for rank in range(self._world))
        return torch.cat(
            [
                rank * self._batch_size + torch.arange(end - first)
                for rank, (first, end) in enumerate(slices)
            ]
        )

    def finish(self) -> Any:
        """Return all rows in order; None if there are none."""
        self._fetch()
        if not self._parts:
            return self._whole
        columns = zip(*map(leaves, self._parts), strict=True)
        joined = (torch.cat(column) for column in columns if column[0] is not None)
        return map_tensors(lambda _: next(joined), self._parts[0])


def _run(wait: bool) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm

    torch_xla.sync()
    if wait:
        xm.wait_device_ops()


def _with_progress(batches: Shard) -> Iterator[Step]:
    """Iterate over the steps, with progress on the card of a run; in the kernel without a bar."""
    if env_vars.RUN not in os.environ:
        return batches.steps()
    total = len(batches) if isinstance(batches, MapShard) else None
    return track(batches.steps(), total, name="predict")


def _device(model: Callable[..., Any]) -> torch.device:
    if isinstance(model, nn.Module):
        for tensor in chain(model.parameters(), model.buffers()):
            return tensor.device
    if "RANK" in os.environ and "torch_xla" in sys.modules:
        device: torch.device = sys.modules["torch_xla"].device()
        return device
    return (accelerator() if "RANK" in os.environ else None) or torch.device("cpu")


@contextmanager
def _evaluating(model: Callable[..., Any]) -> Iterator[None]:
    """Put all modules into eval mode; restore the mode of each at the end."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


def _precision(device: torch.device, bf16: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def _size(batches: Shard) -> int | None:
    """The number of samples; None for a stream. Raises ValueError if their order is not known."""
    if batches.remainder != "pad":
        raise ValueError(
            f"predict: shard(…, remainder={batches.remainder!r}) does not give each sample once"
        )
    if not isinstance(batches, MapShard):
        return None
    if not batches.is_in_order:
        raise ValueError(
            "predict: a sampler orders the samples, so outputs could not be matched to them: give "
            "predict the dataset, or a DataLoader without shuffle"
        )
    return batches.size
