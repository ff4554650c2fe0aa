"""Compares the programs of the ranks at each collective, and warns if they differ.

Each core of a TPU compiles its own program. Programs with a collective must be the same on all
cores: torch_xla's own code takes care to "produce the exact same graph in each replica to prevent
hanging" (xm.collective_broadcast), and different layouts around a collective may silently corrupt
data (pytorch/xla#3511, #4359). Work of one rank alone between two collectives (evaluate, save,
print a loss) is not compared, because no other core takes part in it.

The comparison covers the graph that leads to the tensors of a collective: operations, shapes and
types, not data. torch_xla's hash identifies graphs that were seen before. Numbers from Python are
data too, except 0 and 1, which torch_xla writes into the program (XLA_NO_SPECIAL_SCALARS=1 turns
that off). On a TPU, the operations after the last collective of a step are in one program with it;
of these, the optimizer's step is compared, at the next collective.

All-reduces between two torch_xla.sync() must also agree on `pin_layout`. torch_xla ties them to
each other by a token, so that they are in one program, which XLA refuses otherwise ("HloModule has
a mix of layout constrained and unconstrained AllReduce instructions": seen with one replica,
torch_xla 2.8 and 2.9, also with .item() between them).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.debug.metrics as met

from tpunb.backends.rehearsal import errors
from tpunb.backends.rehearsal.call import CodeLine, RankCall, running_line, users_line
from tpunb.backends.xla import counters
from tpunb.backends.xla.rehearsal.tensor_names import TensorNames
from tpunb.utils.text import describe_ranks

SHARE = 0.01
"""Largest share of a rank's time for hashing; above it only every 2nd, 4th, … is hashed."""
ALWAYS = 32
"""The first programs, which are always hashed."""
ROOM = 65536
"""Bytes of the description of a program that a rank sends to the others."""
_MOST_KEPT = 1024
_MOST_WARNINGS = 16
_MOST_NAMED = 100
"""Parameters of a collective whose names are compared, if they differ."""

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_NODE = re.compile(r"^  %\d+ = (\(.*?\)|\S+) ([\w:]+)\((.*)$", re.MULTILINE)
_LAYOUT = re.compile(r"\{[^}]*\}")
_INPUT = "xla::device_data"


@dataclass(frozen=True)
class Outline:
    """A program without its constants: the counts of its inputs, operations and results.

    Constants may differ: torch_xla's own xm.all_gather pads by the rank, and a rank may slice its
    part out of a tensor on the device. Shapes, and so layouts, stay the same.
    """

    operations: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, int] = field(default_factory=dict)
    """The number of inputs of each shape, 'f32[32,784]'."""
    results: Mapping[str, int] = field(default_factory=dict)
    """The number of results of each kind, 'aten::mul f32[32,784]'."""

    def __add__(self, other: Outline) -> Outline:
        """The outline of two programs in a row."""
        mine, theirs = vars(self).values(), vars(other).values()
        return Outline(
            *(Counter(left) + Counter(right) for left, right in zip(mine, theirs, strict=True))
        )

    @classmethod
    def parse(cls, text: str) -> Outline:
        """The outline of a graph, from torch_xla's text of the graph."""
        nodes = [
            (_LAYOUT.sub("", shape), kind)
            for shape, kind, rest in _NODE.findall(text)
            # A root that is an input was computed before, and is not part of the program.
            if kind != _INPUT or "ROOT=" not in rest
        ]
        inputs = Counter(shape for shape, kind in nodes if kind == _INPUT)
        operations = [(kind, shape) for shape, kind in nodes if kind != _INPUT]
        results = Counter(f"{kind} {shape}" for kind, shape in operations)
        return cls(Counter(kind for kind, _ in operations), inputs, results)

    def hash(self) -> int:
        """64 bits, never 0, the same for the same outline."""
        if not self.operations:
            return 1
        return _hash64(json.dumps([sorted(self.results.items()), sorted(self.inputs.items())]))

    def difference(self, other: Outline) -> str:
        """A description of what this outline has in addition to another, and what it is missing."""
        if not self.operations and other.operations:
            return "it had computed these tensors before (torch_xla.sync(), or a value was read)"
        differences = []
        more, less = _beyond(self.inputs, other.inputs), _beyond(other.inputs, self.inputs)
        if more or less:
            differences.append(
                f"reads {more or 'nothing'} where the others read {less or 'nothing'}"
            )
        for own, others in (
            (self.operations, other.operations),
            *([(self.results, other.results)] if not differences else []),
        ):
            if more := _beyond(own, others):
                differences.append(f"has in addition {more}")
            if less := _beyond(others, own):
                differences.append(f"is missing {less}")
            if differences:
                break
        return "; ".join(differences) or "other operations"


def _hash64(text: str) -> int:
    """64 bits, neither 0 nor 1."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 2


def _beyond(counts: Mapping[str, int], others: Mapping[str, int], most: int = 4) -> str:
    """The items of `counts` in excess of `others`: '3 × aten::mul, aten::relu'."""
    extra = Counter(counts) - Counter(others)
    # torch's own operations first: casts and constants only accompany them.
    order = sorted(extra.items(), key=lambda item: (not item[0].startswith("aten"), item))
    named = [f"{count} × {name}" if count > 1 else name for name, count in order[:most]]
    left = len(extra) - len(named)
    return ", ".join(named) + (f" and {left} more kinds" if left else "")


@dataclass(frozen=True)
class NamedTensors:
    """The names that the user's code has for the tensors of a program, if any."""

    computed: Sequence[str] = ()
    """Tensors that the collective exchanges."""
    read: Sequence[str] = ()
    """Tensors from which they are computed."""

    def difference(self, others: NamedTensors) -> str:
        """'takes b.grad, the others a.grad; reads b, the others a'; '' for the same names."""
        words = []
        for verb, own, theirs in (
            ("takes", self.computed, others.computed),
            ("reads", self.read, others.read),
        ):
            more = _listed([name for name in own if name not in theirs])
            less = _listed([name for name in theirs if name not in own])
            if more or less:
                words.append(f"{verb} {more or 'nothing'}, the others {less or 'nothing'}")
        return "; ".join(words)


def _listed(names: Sequence[str], most: int = 6) -> str:
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


class ProgramHashes(NamedTuple):
    """Hashes that ranks compare at a collective. 0: not hashed; 1: no operations."""

    program: int
    """Hash of the program that leads to the collective."""
    step: int
    """Hash of the optimizer steps after the previous collective, up to the end of its program."""
    parameters: int = 0
    """Hash of the names of the parameters or gradients that the collective reduces; 0 for none."""


_PARAMETERS = 2
"""The position of the last hash."""


class ProgramComparison:
    """Compares the programs of one rank with those of the others."""

    def __init__(self) -> None:
        self.calls = 0
        """The number of collectives so far."""
        self._is_open = False
        """True if on a TPU the next operations are in one program with the last collective."""
        self._step_graphs: list[bytes] = []
        self._stepped: CodeLine | None = None
        self._differing = 0
        self._hashed = 0
        self._spent = 0.0
        self._begun = 0.0
        self._period = 1
        self._current = 0
        self._latest = ProgramHashes(0, 0)
        self._hashes: dict[bytes, int] = {}
        self._outlines: dict[int, Outline] = {}
        self._names: dict[int, NamedTensors] = {}
        """By the hash of an outline, like `_outlines`."""
        self._reduced = 0
        self._parameter_hashes: dict[tuple[bytes, int], int] = {}
        """By program and line."""
        self._parameters: dict[int, list[list[str]]] = {0: []}
        self._same = ""
        self._warned: dict[tuple[int, ...], set[tuple[bytes, int, tuple[int, ...]]]] = {}
        """By group of ranks, because only its members have taken part in the same collectives."""

    def hash_program(self, tensors: Sequence[torch.Tensor], *, reduced: bool = False) -> None:
        """Hash the program that computes these tensors. Call it before they are computed.

        `reduced`: each of them is reduced with the one at its position on all other ranks.
        """
        self._current = self._reduced = 0
        if self.calls % self._period or any(t.device.type != "xla" for t in tensors):
            return
        graph = self._hash(tensors)
        self._current = self._outline_hash((graph,), tensors)
        if reduced:
            self._reduced = self._parameters_hash(graph, tensors)

    def _parameters_hash(self, graph: bytes, tensors: Sequence[torch.Tensor]) -> int:
        line = running_line()
        key = graph, line.hash() if line else 0
        if key not in self._parameter_hashes:
            if len(self._parameter_hashes) == _MOST_KEPT:
                self._parameter_hashes.clear()
                self._parameters = {0: []}
            numbers = [_XLAC._xla_get_tensor_id(tensor) for tensor in tensors]
            names = TensorNames().parameters(numbers)
            number = _hash64(json.dumps(names)) if any(names) else 0
            self._parameter_hashes[key] = number
            self._parameters.setdefault(number, names)
        return self._parameter_hashes[key]

    def note_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: object, options: object
    ) -> None:
        """A torch.optim hook for the end of an optimizer's step."""
        if torch.compiler.is_compiling() or not self._is_open or self.calls % self._period:
            return
        groups = optimizer.param_groups
        tensors = [p for group in groups for p in group["params"] if p.device.type == "xla"]
        if tensors:
            self._stepped = running_line()
            self._step_graphs.append(self._hash(tensors))
            self._outline_hash(self._step_graphs, tensors)

    def end_program(self) -> None:
        """Note a torch_xla.sync(): later operations are in another program."""
        self._is_open = False

    def _hash(self, tensors: Sequence[torch.Tensor]) -> bytes:
        begun = time.perf_counter()
        self._begun = self._begun or begun
        graph: bytes = _XLAC._get_graph_hash(tensors)
        ended = time.perf_counter()
        self._hashed += 1
        self._spent += ended - begun
        if self._hashed > ALWAYS:
            every = self._period * self._spent / (ended - self._begun) / SHARE
            self._period = 1 << max(0, int(every).bit_length())
        return graph

    def _outline_hash(self, graphs: Sequence[bytes], tensors: Sequence[torch.Tensor]) -> int:
        """Hash of the outline of programs in a row, the last of which computes these tensors."""
        key = b"".join(graphs)
        if key not in self._hashes:
            # A new graph, which XLA compiles: that takes a hundred times as long as this.
            if len(self._hashes) == _MOST_KEPT:
                self._hashes.clear()
                self._outlines.clear()
                self._names.clear()
            outline = Outline.parse(_XLAC._get_xla_tensors_text(tensors))
            if before := self._hashes.get(b"".join(graphs[:-1])):
                outline = self._outlines[before] + outline
            self._hashes[key] = outline.hash()
            self._outlines[outline.hash()] = outline
            self._names[outline.hash()] = _names(tensors)
        return self._hashes[key]

    def begin_collective(self) -> ProgramHashes:
        """Return the hashes of the program that led to this collective, and of steps before it."""
        hashed = self.calls % self._period == 0 and self.calls > 0
        step = (
            self._hashes.get(b"".join(self._step_graphs), 0) if self._step_graphs else int(hashed)
        )
        self._latest = ProgramHashes(self._current, step, self._reduced)
        self.calls += 1
        self._current = self._reduced = 0
        self._step_graphs.clear()
        self._is_open = True
        return self._latest

    def differ(
        self, call: RankCall, members: Sequence[int], hashes: Sequence[ProgramHashes]
    ) -> bool:
        """True if the programs differ in a new way, without a warning yet. Equal on all members."""
        warned = self._warned.setdefault(tuple(members), set())
        for which, graphs in enumerate(zip(*hashes, strict=True)):
            hashed = [graph for graph in graphs if graph]
            if len(hashed) < 2 or (which == _PARAMETERS and len({h.program for h in hashes}) > 1):
                continue
            if len(set(hashed)) == 1:
                if which == 0 and len(hashed) == len(graphs):
                    self._same = f"collective {self.calls} ({_steps()})"
                continue
            pattern = tuple(graphs.index(graph) for graph in graphs)
            known = (call.digest, which, pattern)
            if known in warned or len(warned) == _MOST_WARNINGS:
                continue
            warned.add(known)
            self._differing = which
            return True
        return False

    def described(self) -> bytes:
        """A description of this rank's program and line for the others, in ROOM bytes."""
        latest = self._latest[self._differing]
        if self._differing == _PARAMETERS:
            parameters = [aliases[:8] for aliases in self._parameters[latest][:_MOST_NAMED]]
            text = json.dumps([users_line()[:500], parameters]).encode()
            return (text if len(text) <= ROOM else b'["", []]').ljust(ROOM)
        outline = self._outlines.get(latest, Outline())
        place = str(self._stepped or "") if self._differing else users_line()
        for most in (None, 40, 0):
            parts = [dict(Counter(part).most_common(most)) for part in vars(outline).values()]
            known = self._names.get(latest, NamedTensors())
            names = [known.computed[:most], known.read[:most]]
            text = json.dumps([latest, place[:500], names, *parts]).encode()
            if len(text) <= ROOM:
                break
        return text.ljust(ROOM)

    def describe_difference(self, call: RankCall, described: Mapping[int, bytes]) -> str:
        """The warning: which ranks differ from the others, where, how, and why it matters.

        '' if they do not: a parameter may have several names.
        """
        if self._differing == _PARAMETERS:
            return _describe_parameters(call, described)
        groups: dict[int, list[int]] = {}
        places, outlines, names = {}, {}, {}
        for rank, text in described.items():
            graph, places[rank], named, *parts = json.loads(text)
            if graph:  # 0: that rank did not hash its program
                groups.setdefault(graph, []).append(rank)
                outlines[rank], names[rank] = Outline(*parts), NamedTensors(*named)
        most, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
        what = "in the optimizer's step before" if self._differing else "in"
        lines = [
            f"{what} {call} the ranks run different programs (a warning, once per difference):"
        ]
        for ranks in (most, *others):
            if self._differing and not outlines[ranks[0]].operations:
                lines.append(f"  {describe_ranks(ranks)}: no step, or one after torch_xla.sync()")
                continue
            lines.append(f"  {describe_ranks(ranks)}: at {places[ranks[0]]}")
            if ranks is not most:
                lines.append(f"      {outlines[ranks[0]].difference(outlines[most[0]])}")
                if words := names[ranks[0]].difference(names[most[0]]):
                    lines.append(f"      by name: {words}")
        if self._differing:
            since = "the step is in one program with the previous collective"
        elif self._same:
            since = f"the programs were the same at {self._same}"
        else:
            since = "it is the first one that was compared"
        lines.append(f"  This is collective {self.calls} ({_steps()}); {since}.")
        lines.append(_WHY)
        return "\n".join(lines)


def _names(tensors: Sequence[torch.Tensor]) -> NamedTensors:
    """The names of a new graph's tensors. XLA compiles such a graph, which takes far longer."""
    names = TensorNames()
    with counters.creating_own_tensors():
        read: Sequence[int] = _XLAC._get_tensors_xla_device_data_node(list(tensors))[0]
    return NamedTensors(
        names.of(_XLAC._xla_get_tensor_id(tensor) for tensor in tensors), names.of(read)
    )


def _describe_parameters(call: RankCall, described: Mapping[int, bytes]) -> str:
    places, names = {}, {}
    for rank, text in described.items():
        place, named = json.loads(text)
        if named:
            places[rank], names[rank] = place, named
    for each in zip(*names.values(), strict=False):  # the same call: as many on each rank
        known = [set(aliases) for aliases in each if aliases]
        if any(known[0].isdisjoint(aliases) for aliases in known[1:]):
            break
    else:
        return ""
    ranks: dict[str, list[int]] = {}
    for rank, aliases in zip(names, each, strict=True):
        name = aliases[0] if aliases else "another tensor"
        ranks.setdefault(f"{name} at {places[rank]}", []).append(rank)
    lines = [f"  {describe_ranks(group)}: {text}" for text, group in ranks.items()]
    return "\n".join(
        [
            f"in {call} the ranks reduce different parameters (a warning, once per difference):",
            *lines,
            "  They are added up as if they were one parameter. Reduce the same parameters, in the "
            "same order,\n  on every rank.",
        ]
    )


_WHY = (
    "  The cores of a TPU must run the same program around a collective, or they may hang or "
    "exchange\n  wrong numbers. Give every rank batches of the same shape (drop_last=True), and do "
    "not compute\n  the inputs of a collective under a condition on the rank. A number that is 0 "
    "or 1 on some ranks\n  only is part of the program too (XLA_NO_SPECIAL_SCALARS=1 makes it "
    "data)."
)


def _steps() -> str:
    count = met.counter_value("MarkStep") or 0
    return f"after {count} step{'' if count == 1 else 's'}"


programs = ProgramComparison()
"""The comparison of this process. A rank's parent process takes part in no collectives."""


_set_token: Any = _XLAC._set_all_reduce_token


class PinLayoutCheck:
    """Compares `pin_layout` of one rank's all-reduces between two torch_xla.sync()."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._first: tuple[bool, str] | None = None
        self._warned = False

    def add(self, call: RankCall, pinned: bool | None) -> None:
        """Add an all-reduce. Rank 0 warns once if it differs from the first of the step.

        `pinned` is None for a program of its own, as torch.compile makes it.
        """
        if self._warned or self._rank > 0 or pinned is None:
            return
        if self._first is None:
            self._first = pinned, f"{call} at {users_line()}"
            return
        before, place = self._first
        if before != pinned:
            self._warned = True
            errors.print_warning(
                f"{call} at {users_line()} has pin_layout={pinned}, but in the same step {place} "
                f"has pin_layout={before}. This works in a rehearsal, but on a TPU XLA refuses the "
                "program ('HloModule has a mix of layout constrained and unconstrained AllReduce "
                "instructions'). The functions of xm pin by default, those of torch.distributed "
                "do not: pass pin_layout=False to the former, or call torch_xla.sync() between "
                "them."
            )

    def set_token(self, device: str, token: Any) -> None:
        """`_XLAC._set_all_reduce_token`: torch_xla.sync() sets None, which ends the program."""
        if token is None:
            self._first = None
            programs.end_program()
        _set_token(device, token)
