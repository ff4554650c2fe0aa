"""Whether the ranks run the same program, compared where they meet in a collective.

Each core of a TPU compiles its own program. Those that hold a collective must be the same on
all cores: torch_xla's own code takes care to "produce the exact same graph in each replica to
prevent hanging" (xm.collective_broadcast), and different layouts around a collective may corrupt
data without a word (pytorch/xla#3511, #4359). What a rank does between two collectives on its
own (evaluate, save, print a loss) is not compared, because no other core takes part in it.

Compared is the graph that leads to the tensors of a collective: its operations, their shapes and
types, not the data. torch_xla's hash tells which graphs were seen before. Numbers from Python are
data as well, but for 0 and 1, which torch_xla writes into the program (XLA_NO_SPECIAL_SCALARS=1
turns that off). Of what follows the last collective of a step, and is in one program with it on a
TPU, the optimizer's step is compared, at the next collective.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.debug.metrics as met

from tpunb.worker.rehearsal.calls import Call, Where, users_line, where

SHARE = 0.01
"""Of a rank's time, the most that is spent on hashes: then only every 2nd, 4th, … is taken."""
ALWAYS = 32
"""So many are taken first, whatever they cost."""
ROOM = 65536
"""Bytes in which a rank describes its program to the others."""
_MOST_KEPT = 1024
_MOST_TOLD = 16

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_NODE = re.compile(r"^  %\d+ = (\(.*?\)|\S+) ([\w:]+)\((.*)$", re.MULTILINE)
_LAYOUT = re.compile(r"\{[^}]*\}")
_INPUT = "xla::device_data"


@dataclass(frozen=True)
class Outline:
    """A program without its constants: how many inputs, operations and results of which kind.

    Constants may differ: torch_xla's own xm.all_gather pads by the rank, and a rank may cut its
    part out of a tensor on the device. Shapes, and so layouts, stay the same.
    """

    operations: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, int] = field(default_factory=dict)
    """'f32[32,784]' and how many of that shape."""
    results: Mapping[str, int] = field(default_factory=dict)
    """'aten::mul f32[32,784]' and how many of these."""

    def __add__(self, other: Outline) -> Outline:
        """Two programs, one after the other."""
        mine, theirs = vars(self).values(), vars(other).values()
        return Outline(
            *(Counter(one) + Counter(two) for one, two in zip(mine, theirs, strict=True))
        )

    @classmethod
    def of(cls, text: str) -> Outline:
        """From the text that torch_xla gives of a graph."""
        nodes = [
            (_LAYOUT.sub("", shape), kind)
            for shape, kind, rest in _NODE.findall(text)
            # A root that is an input has been computed before: it is no part of the program.
            if kind != _INPUT or "ROOT=" not in rest
        ]
        inputs = Counter(shape for shape, kind in nodes if kind == _INPUT)
        operations = [(kind, shape) for shape, kind in nodes if kind != _INPUT]
        results = Counter(f"{kind} {shape}" for kind, shape in operations)
        return cls(Counter(kind for kind, _ in operations), inputs, results)

    def mark(self) -> int:
        """64 bits, not 0, that are the same for the same outline."""
        if not self.operations:
            return 1
        text = json.dumps([sorted(self.results.items()), sorted(self.inputs.items())])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 2

    def difference(self, other: Outline) -> str:
        """What this one has more and less than another, in words."""
        if not self.operations and other.operations:
            return "it had computed these tensors before (torch_xla.sync() or a value was read)"
        found = []
        more, less = _beyond(self.inputs, other.inputs), _beyond(other.inputs, self.inputs)
        if more or less:
            found.append(f"reads {more or 'nothing'} where the others read {less or 'nothing'}")
        for one, two in (
            (self.operations, other.operations),
            *([(self.results, other.results)] if not found else []),
        ):
            if more := _beyond(one, two):
                found.append(f"has in addition {more}")
            if less := _beyond(two, one):
                found.append(f"lacks {less}")
            if found:
                break
        return "; ".join(found) or "other operations"


def _beyond(one: Mapping[str, int], other: Mapping[str, int], most: int = 4) -> str:
    """'3 × aten::mul, aten::relu': what `one` has and `other` has not."""
    extra = Counter(one) - Counter(other)
    # torch's own operations first: casts and constants only come with them.
    order = sorted(extra.items(), key=lambda item: (not item[0].startswith("aten"), item))
    named = [f"{count} × {name}" if count > 1 else name for name, count in order[:most]]
    left = len(extra) - len(named)
    return ", ".join(named) + (f" and {left} more kinds" if left else "")


class Marks(NamedTuple):
    """What ranks compare at a collective: each 0 where it was not looked at, 1 for nothing."""

    program: int
    """What led to it."""
    step: int
    """The optimizers' steps between the collective before, or its end of the program, and it."""


class Programs:
    """The programs of one rank, and what it knows about those of the others."""

    def __init__(self) -> None:
        self.calls = 0
        """Collectives so far."""
        self._is_open = False
        """Whether on a TPU what comes is in one program with the last collective."""
        self._steps: list[bytes] = []
        self._stepped: Where | None = None
        self._told_of = 0
        self._looks = 0
        self._spent = 0.0
        self._begun = 0.0
        self._period = 1
        self._current = 0
        self._latest = Marks(0, 0)
        self._marks: dict[bytes, int] = {}
        self._outlines: dict[int, Outline] = {}
        self._same = ""
        self._told: dict[tuple[int, ...], set[tuple[bytes, int, tuple[int, ...]]]] = {}
        """For each group of ranks: only its members have all met in the same collectives."""

    def look(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the hash of what computes these tensors. To be called before it is computed."""
        self._current = 0
        if self.calls % self._period or any(t.device.type != "xla" for t in tensors):
            return
        graph = self._hash(tensors)
        self._current = self._mark((graph,), tensors)

    def step(self, optimizer: torch.optim.Optimizer, args: object, options: object) -> None:
        """After an optimizer's step: a hook for torch.optim."""
        if torch.compiler.is_compiling() or not self._is_open or self.calls % self._period:
            return
        groups = optimizer.param_groups
        tensors = [p for group in groups for p in group["params"] if p.device.type == "xla"]
        if tensors:
            self._stepped = where()
            self._steps.append(self._hash(tensors))
            self._mark(self._steps, tensors)

    def end(self) -> None:
        """torch_xla.sync(): what comes is in another program."""
        self._is_open = False

    def _hash(self, tensors: Sequence[torch.Tensor]) -> bytes:
        begun = time.perf_counter()
        self._begun = self._begun or begun
        graph: bytes = _XLAC._get_graph_hash(tensors)
        ended = time.perf_counter()
        self._looks += 1
        self._spent += ended - begun
        if self._looks > ALWAYS:
            every = self._period * self._spent / (ended - self._begun) / SHARE
            self._period = 1 << max(0, int(every).bit_length())
        return graph

    def _mark(self, graphs: Sequence[bytes], tensors: Sequence[torch.Tensor]) -> int:
        """That of some programs, one after the other; the last computes these tensors."""
        key = b"".join(graphs)
        if key not in self._marks:
            # XLA compiles a program that is new, which takes a hundred times as long as this.
            if len(self._marks) == _MOST_KEPT:
                self._marks.clear()
                self._outlines.clear()
            outline = Outline.of(_XLAC._get_xla_tensors_text(tensors))
            if before := self._marks.get(b"".join(graphs[:-1])):
                outline = self._outlines[before] + outline
            self._marks[key] = outline.mark()
            self._outlines[outline.mark()] = outline
        return self._marks[key]

    def take(self) -> Marks:
        """A collective begins: the marks of what led to it, and of the steps before."""
        looked = self.calls % self._period == 0 and self.calls > 0
        step = self._marks.get(b"".join(self._steps), 0) if self._steps else int(looked)
        self._latest = Marks(self._current, step)
        self.calls += 1
        self._current = 0
        self._steps.clear()
        self._is_open = True
        return self._latest

    def differ(self, call: Call, members: Sequence[int], marks: Sequence[Marks]) -> bool:
        """Whether the programs of ranks differ in a way not told yet. The same on all of them."""
        told = self._told.setdefault(tuple(members), set())
        for which, graphs in enumerate(zip(*marks, strict=True)):
            looked = [graph for graph in graphs if graph]
            if len(looked) < 2:
                continue
            if len(set(looked)) == 1:
                if which == 0 and len(looked) == len(graphs):
                    self._same = f"collective {self.calls} ({_steps()})"
                continue
            pattern = tuple(graphs.index(graph) for graph in graphs)
            known = (call.digest, which, pattern)
            if known in told or len(told) == _MOST_TOLD:
                continue
            told.add(known)
            self._told_of = which
            return True
        return False

    def described(self) -> bytes:
        """This rank's program and place, for the others, in ROOM bytes."""
        mark = self._latest[self._told_of]
        outline = self._outlines.get(mark, Outline())
        place = str(self._stepped or "") if self._told_of else users_line()
        for most in (None, 40, 0):
            parts = [dict(Counter(part).most_common(most)) for part in vars(outline).values()]
            text = json.dumps([mark, place[:500], *parts]).encode()
            if len(text) <= ROOM:
                break
        return text.ljust(ROOM)

    def tell(self, call: Call, described: Mapping[int, bytes]) -> str:
        """Which ranks left the others, where, in what, and why it matters."""
        groups: dict[int, list[int]] = {}
        places, outlines = {}, {}
        for rank, text in described.items():
            graph, places[rank], *parts = json.loads(text)
            if graph:  # else that rank did not look
                groups.setdefault(graph, []).append(rank)
                outlines[rank] = Outline(*parts)
        most, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
        what = "in the optimizer's step before" if self._told_of else "in"
        lines = [f"{what} {call} the ranks run different programs (a warning, once for each kind):"]
        for ranks in (most, *others):
            if self._told_of and not outlines[ranks[0]].operations:
                lines.append(f"  {_ranks(ranks)}: no step, or one behind torch_xla.sync()")
                continue
            lines.append(f"  {_ranks(ranks)}: at {places[ranks[0]]}")
            if ranks is not most:
                lines.append(f"      {outlines[ranks[0]].difference(outlines[most[0]])}")
        if self._told_of:
            since = "the step is in one program with the collective before"
        elif self._same:
            since = f"they were the same at {self._same}"
        else:
            since = "it is the first compared"
        lines.append(f"  This is collective {self.calls} ({_steps()}); {since}.")
        lines.append(_WHY)
        return "\n".join(lines)


_WHY = (
    "  The cores of a TPU must run the same program around a collective: otherwise they may hang "
    "or\n  exchange wrong numbers. Give every rank batches of the same shape (drop_last=True), and "
    "let no\n  condition on the rank change what leads to a collective; a number that is 0 or 1 on "
    "some ranks\n  only is part of the program too (XLA_NO_SPECIAL_SCALARS=1 makes it data)."
)


def _steps() -> str:
    count = met.counter_value("MarkStep") or 0
    return f"after {count} step{'' if count == 1 else 's'}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def say(text: str) -> None:
    """On this rank's standard error: one rank says it for all."""
    print(f"tpunb: {text}", file=sys.stderr, flush=True)


mine = Programs()
"""Those of this process. A rank is forked from one that takes part in no collectives."""
