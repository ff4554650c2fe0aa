"""Compares the programs with collectives that the ranks run, and their order.

On a TPU a collective is part of a program. The program runs when torch_xla.sync() is called, or
when a value is read that depends on the collective (`loss.item()`, `print(loss)`, a copy to the
CPU), and all cores must run it: a rank that reads such a value alone waits forever, or takes part
with a program that differs from the others'. In a rehearsal each collective runs when it is called,
so every rank notes the programs that it would launch on a TPU, and the ranks compare their notes.

A note names the last collective in the program: torch_xla's token ties each collective to the one
before, so the program has all collectives since the last torch_xla.sync(). The graph of a value
shows which collective the value depends on: the inputs of the graph are tensors with numbers. A
graph that was computed in between, for a later collective, no longer shows this; then it is known
only for weights, from their optimizer's step, and for losses, from the backward pass. Launches that
are not known are not compared.
"""

from __future__ import annotations

import functools
import json
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.debug.metrics as met

from tpunb.backends.rehearsal.call import running_line
from tpunb.backends.xla import private_names
from tpunb.utils.text import describe_ranks

ROOM = 8192
"""Bytes of the description of a rank's last launches for the others."""
_KEPT = 24
_MOST_RESULTS = 1 << 16
_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]


class LaunchKind(Enum):
    """The cause of a launch, as messages describe it."""

    READ = "reads a value"
    SYNC = "calls torch_xla.sync()"


class Launch(NamedTuple):
    """A program with collectives that one rank would run on a TPU."""

    kind: LaunchKind
    last: int
    """The number of the last collective in it, from 1 on."""
    more: bool
    """True if it certainly computes more than values that were read."""
    line: str


class Launches:
    """The launches of one rank."""

    def __init__(self) -> None:
        self.count = 0
        self.hash = 0
        """Hash of all launches since the ranks last compared them one by one."""
        self._recent: deque[Launch] = deque(maxlen=_KEPT)
        self._number = 0
        """The number of collectives so far; equal on all ranks that took part in the same ones."""
        self._results: dict[int, int] = {}
        """The collective whose result a tensor is, by the tensor's number, since the last sync."""
        self._alive: list[Callable[[], object]] = []
        self._more = False

    @property
    def outstanding(self) -> bool:
        """True if on a TPU a collective may wait for its program to run."""
        return bool(self._results)

    def add_results(self, tensors: Sequence[torch.Tensor], *, in_place: bool = False) -> None:
        """Note the results of a collective. `in_place`: they are in tensors that the user has."""
        if _XLAC._get_use_eager_mode():  # on a TPU it runs at once as well
            return
        self._number += 1
        if len(self._results) > _MOST_RESULTS:
            self._results.clear()  # a loop that never syncs: compare less
            self._alive.clear()
        for tensor in tensors:
            self._results[_XLAC._xla_get_tensor_id(tensor)] = self._number
        self._alive += [lambda: True] if in_place else map(weakref.ref, tensors)

    def forget_results(self, since: int) -> None:
        """Forget collectives after number `since`: they have run in a program of their own."""
        for result in [key for key, number in self._results.items() if number > since]:
            del self._results[result]

    @property
    def number(self) -> int:
        return self._number

    def note_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: object, options: object
    ) -> None:
        """A torch.optim hook: weights depend on the same collective as their gradients."""
        if not self._results or torch.compiler.is_compiling():
            return
        weights = [
            weight
            for group in optimizer.param_groups
            for weight in group["params"]
            if weight.grad is not None and weight.device.type == "xla"
        ]
        if weights and (number := self._depends_on(weights[0].grad)):
            for weight in weights:
                self._results[_XLAC._xla_get_tensor_id(weight)] = number

    def note_backward(self, loss: torch.Tensor) -> None:
        """Note that a backward pass begins at a loss: a later collective will compute the loss."""
        if number := self._depends_on(loss):
            self._results[_XLAC._xla_get_tensor_id(loss)] = number

    def note_computed(self, outputs: int, needed: int) -> None:
        """Note that part of a step was computed for a collective, which needed some outputs."""
        self._more = self._more or outputs > needed

    def note_read(self, tensors: Sequence[torch.Tensor]) -> None:
        numbers = [self._depends_on(tensor) for tensor in tensors]
        if number := max(numbers, default=0):
            self._add(LaunchKind.READ, number, more=False)
            for tensor in tensors:  # computed from now on, on a TPU as well
                self._results.pop(_XLAC._xla_get_tensor_id(tensor), None)
                if not any(_XLAC._check_tensor_need_materialization([tensor])):
                    for result in _inputs(tensor):
                        self._results.pop(result, None)

    def note_sync(self, outputs: int) -> None:
        """Note that torch_xla.sync() has computed pending work, with so many outputs."""
        # Results that no variable holds are in no program.
        if self._results and any(result() is not None for result in self._alive):
            self._add(LaunchKind.SYNC, self._number, more=self._more or outputs > 0)
        self._results.clear()
        self._alive.clear()
        self._more = False

    def _depends_on(self, tensor: torch.Tensor) -> int:
        """The number of the last collective in this tensor's program; 0 if there is none."""
        return max((self._results.get(number, 0) for number in _inputs(tensor)), default=0)

    def _add(self, kind: LaunchKind, last: int, *, more: bool) -> None:
        self.count += 1
        self.hash = zlib.crc32(f"{kind.name} {last}".encode(), self.hash)
        self._recent.append(Launch(kind, last, more, str(running_line() or "")))

    def described(self) -> str:
        """A description of the last launches for the other ranks, in ROOM bytes."""
        rows = [(each.kind.name, each.last, each.more, each.line[:160]) for each in self._recent]
        while len(text := json.dumps([self.count, rows])) > ROOM:
            del rows[0]
        return text

    def agree(self) -> None:
        """Note that the ranks have compared their launches, and have equally many."""
        self.hash = 0


class LaunchMismatch(NamedTuple):
    """The first launches that differ between ranks."""

    certain: bool
    """True if the programs certainly differ."""
    text: str


def find_difference(described: Mapping[int, str], *, final: bool) -> LaunchMismatch | None:
    """The first difference between the launches of ranks, if any. `final`: none will follow.

    Before the end, a rank may still run a program that others have run: it may read the same value
    after the next collective call. So only launches that all ranks have made are compared.
    """
    counts: dict[int, int] = {}
    launches: dict[int, dict[int, Launch]] = {}
    for rank, text in described.items():
        counts[rank], rows = json.loads(text)
        first = counts[rank] - len(rows)
        launches[rank] = {
            first + index: Launch(LaunchKind[kind], last, more, line)
            for index, (kind, last, more, line) in enumerate(rows)
        }
    compared = range(max(counts.values()) if final else min(counts.values()))
    uncertain: LaunchMismatch | None = None
    for index in compared:
        if any(index < count and index not in launches[rank] for rank, count in counts.items()):
            continue  # too long ago
        here = {rank: launches[rank].get(index) for rank in described}
        if len({each and each.last for each in here.values()}) > 1:
            return LaunchMismatch(True, _difference(here))
        kinds = {each and each.kind for each in here.values()}
        if len(kinds) > 1:
            found = LaunchMismatch(
                any(each and each.more for each in here.values()), _difference(here)
            )
            if found.certain:
                return found
            uncertain = uncertain or found
    return uncertain


def _difference(here: Mapping[int, Launch | None]) -> str:
    by_launch: dict[str, list[int]] = {}
    for rank, launch in here.items():
        by_launch.setdefault(_described(launch), []).append(rank)
    return "\n".join(
        [
            "the ranks run different programs that contain a collective:",
            *(f"  {describe_ranks(ranks)}: {text}" for text, ranks in by_launch.items()),
            "On a TPU a collective is part of a program. It runs at torch_xla.sync(), or when a "
            "value that depends on it is read, and every rank must run it: a rank that reads the "
            "value alone, or calls torch_xla.sync() alone, waits forever. Read the value on every "
            "rank, before any condition on the rank (value = loss.item()), or after all ranks have "
            "called torch_xla.sync().",
        ]
    )


def _described(launch: Launch | None) -> str:
    if launch is None:
        return "runs no further program before its end"
    at = f", at {launch.line}" if launch.line else ""
    return f"{launch.kind.value}, which runs everything up to collective {launch.last}{at}"


def _inputs(tensor: torch.Tensor) -> Sequence[int]:
    """The numbers of the tensors from which a tensor will be computed; its own if it has been."""
    numbers: Sequence[int] = _XLAC._get_tensors_xla_device_data_node([tensor])[0]
    return numbers


launches = Launches()
"""The launches of this process. A rank's parent process takes part in no collectives."""


# -- where values are read, and where programs run

_READS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "__complex__")


def watch_launches() -> None:
    """Note every call that would run a program on a TPU, for the rest of this process."""
    for name in _READS:
        _watch(torch.Tensor, name, lambda tensor, *args, **options: [tensor])
    _watch(torch.Tensor, "to", _moved)
    _watch(torch.Tensor, "copy_", _copied)
    _watch(torch.Tensor, "backward", lambda loss, *args, **options: [loss], _note_backward)
    _watch(torch, "_to_cpu", lambda tensors: tensors)
    for name in ("_xla_get_cpu_tensors", "_xla_sync_multi"):
        _watch(_XLAC, name, lambda tensors, *args, **options: tensors)


def _note_backward(losses: Sequence[torch.Tensor]) -> None:
    launches.note_backward(losses[0])


def _note_read(tensors: Sequence[torch.Tensor]) -> None:
    launches.note_read(tensors)


def _watch(
    owner: Any,
    name: str,
    find: Callable[..., Iterable[torch.Tensor]],
    note: Callable[[Sequence[torch.Tensor]], None] = _note_read,
) -> None:
    """Note the XLA tensors that `find` returns before each call of a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*args: Any, **options: Any) -> Any:
        if launches.outstanding and not torch.compiler.is_compiling():
            tensors = [each for each in find(*args, **options) if each.device.type == "xla"]
            if tensors:
                note(tensors)
        return original(*args, **options)

    setattr(owner, name, noted)


def _moved(tensor: torch.Tensor, *args: Any, **options: Any) -> Iterator[torch.Tensor]:
    """For `tensor.to(…)`: the tensor, if its copy is not on the device."""
    for target in (*args[:1], options.get("device"), options.get("other")):
        if isinstance(target, torch.Tensor):
            target = target.device
        if isinstance(target, str | torch.device) and torch.device(target).type != "xla":
            yield tensor


def _copied(
    target: torch.Tensor, source: torch.Tensor, *args: Any, **options: Any
) -> Iterator[torch.Tensor]:
    if target.device.type != "xla":
        yield source


def count_outputs() -> int:
    """The number of tensors computed by XLA's programs, plus those moved to the device."""
    return int(met.counter_value(private_names.CREATE_HANDLE) or 0)
