"""Takes a digest of the parameters that the optimizers of this rank have stepped, at their end.

The ranks' digests show whether all have trained one model (tpunb.runs.trained_models). A step is
only counted. Values are read once: at the end of the train cell, or when the first parameter of a
model ends, whose others can then still be read. No parameter is kept alive.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from tpunb.backends.rehearsal.call import RankCall, running_line
from tpunb.backends.rehearsal.stats import collective_stats
from tpunb.backends.torch.exchanges import PAIRWISE
from tpunb.backends.xla import tensors
from tpunb.runs.trained_models import Digest, SteppedModel
from tpunb.utils import files

MOST_MODELS = 4
"""Models that are compared: the ones that began last."""
MOST_PARAMETERS = 64
"""Parameters of each model that are compared, evenly spaced."""
LARGEST = 1 << 16
"""Numbers of a parameter that is compared: it is copied whole, because XLA would compile a program
to read a part. Of a model without such parameters, the two smallest are."""
SAMPLES = 16
"""Numbers of each parameter that are compared."""
_FEW = 64
"""Numbers in a collective that are more likely metrics than a part of a model."""


class SteppedModels:
    """The models that the optimizers of this rank have stepped."""

    def __init__(self) -> None:
        self._alone = False
        self._models: list[_Model] = []
        self._known: WeakKeyDictionary[Optimizer, _Model | None] = WeakKeyDictionary()
        self._shapes: set[str] = set()
        self._numbers, self._others = 0, False
        """Exchanged since the last step: numbers that may be a model's; whether others."""
        self._with_others = 0
        """Steps after such others."""

    def watch(self, groups: bool) -> None:
        """Watch all optimizers and collectives, for the rest of this process.

        `groups`: whatever this rank exchanges, it needs a process group.
        """
        self._alone = groups
        register_optimizer_step_post_hook(self.stepped)
        collective_stats.watchers.append(self.exchanged)

    def stepped(self, optimizer: Optimizer, args: object, options: object) -> None:
        """A torch.optim hook for the end of an optimizer's step."""
        if torch.compiler.is_compiling():
            return
        try:
            model = self._known[optimizer]
        except KeyError:
            model = self._known[optimizer] = self._begin(optimizer)
        if model is not None:
            model.steps += 1
        self._with_others += self._others
        self._numbers, self._others = 0, False

    def exchanged(self, call: RankCall, size: int) -> None:
        """Note a collective. Without tensors, it has sent Python objects of `size` bytes."""
        self._alone = False
        self._numbers += 0 if call.tensors else size // 4
        self._others |= call.operation.startswith(PAIRWISE)
        for shape, numbers in map(_shape, call.tensors):
            if shape in self._shapes or "," not in shape:
                self._numbers += numbers
            else:
                self._others |= numbers > _FEW

    def _begin(self, optimizer: Optimizer) -> _Model | None:
        for inner in vars(optimizer).values():  # which steps this rank's shards, as ZeRO's does
            if isinstance(inner, Optimizer) and (model := self._known.get(inner)) is not None:
                self._known[inner] = None
                self._models = [each for each in self._models if each is not model]
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        parameters = [p for p in parameters if p.numel()]
        if not parameters or any(map(tensors.is_shard, parameters)):
            return None
        self._alone = self._alone and not _has_group()
        self._shapes.update(str(list(each.shape)) for each in parameters)
        model = _Model(optimizer, parameters, self._alone)
        self._models = [*self._models, model][-MOST_MODELS:]
        return model

    def save(self, path: Path) -> None:
        """Write the models of this rank, after the device's pending work has finished.

        None if the ranks hold parts of a model, or models that they have collected: then they
        exchanged something else than gradients before most steps, or all of a model at the end.
        """
        models = [each for each in self._models if self._numbers < each.size]
        if 2 * self._with_others >= max((each.steps for each in models), default=0):
            models = []
        alone = self._alone and not _has_group()
        with contextlib.suppress(OSError):  # a full disk: the result reports it
            files.write_json(path, [each.digest(alone) for each in models])


stepped_models = SteppedModels()
"""The stepped models of this process."""


class _Model:
    """What one optimizer has stepped."""

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], alone: bool
    ) -> None:
        self.steps = 0
        self.size = sum(each.numel() for each in parameters)
        self._place = str(running_line() or "")
        shapes = [tuple(each.shape) for each in parameters]
        # Ranks that cannot exchange anything, with different rates, are trials.
        rates = [str(group.get("lr")) for group in optimizer.param_groups if alone]
        described = f"{type(optimizer)} {self._place} {shapes} {rates}"
        self._identity = f"{zlib.crc32(described.encode()):08x}"
        small = [each for each in parameters if each.numel() <= LARGEST]
        small = small or sorted(parameters, key=torch.Tensor.numel)[:2]
        compared = small[:: math.ceil(len(small) / MOST_PARAMETERS)]
        self._eps = max(torch.finfo(each.dtype).eps for each in compared)
        self._values: Digest | None = None
        self._parameters = [ref(each, self._read) for each in compared]

    def _read(self, _: object = None) -> None:
        """Read the parameters that are left; of a pending step they are not computed yet."""
        if self._values is None:
            self._values = ()
            left = [each() for each in self._parameters]
            found = [each for each in left if each is not None]
            # A RuntimeError: a buffer was deleted or given away.
            with contextlib.suppress(RuntimeError):
                if tensors.are_computed(found):
                    copy = tensors.CpuCopies(found)
                    self._values = tuple(() if p is None else _sample(copy(p)) for p in left)

    def digest(self, alone: bool) -> SteppedModel:
        self._read()
        # Rounding may add up, like a random walk.
        tolerance = min(max(1e-5, 4 * self._eps * math.sqrt(self.steps)), 0.02)
        values = self._values or ()
        return SteppedModel(self._identity, self._place, alone, tolerance, values)


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@functools.lru_cache(maxsize=512)
def _shape(described: str) -> tuple[str, int]:
    """The shape in 'float32[3, 4]', and its numbers; of what may be pickled, a quarter."""
    match = re.search(r"\[[\d, ]*\]", described)
    shape = match[0] if match else "[]"
    return shape, math.prod(json.loads(shape)) // (4 if "uint8" in described else 1)


def _sample(tensor: torch.Tensor) -> tuple[float, ...]:
    """Some numbers of a tensor on the CPU; 0 for those that are not finite."""
    numbers = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLES)][:SAMPLES]
    return tuple(numbers.real.double().nan_to_num(0.0, 0.0, 0.0).tolist())
