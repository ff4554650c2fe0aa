"""Whether the ranks run the same program, compared where they meet in a collective.

Each core of a TPU compiles its own program. Those that hold a collective must be the same on
all cores: torch_xla's own code takes care to "produce the exact same graph in each replica to
prevent hanging" (xm.collective_broadcast), and different layouts around a collective may corrupt
data without a word (pytorch/xla#3511, #4359). What a rank does between two collectives on its
own (evaluate, save, print a loss) is not compared, because no other core takes part in it.

Compared is the graph that leads to the tensors of a collective, by torch_xla's hash of it: the
operations, their order, shapes and types, not the data. Numbers from Python are data as well,
but for 0 and 1, which torch_xla writes into the program (XLA_NO_SPECIAL_SCALARS=1 turns that
off). What follows the last collective of a step, the optimizer most often, is not seen.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_xla
import torch_xla.debug.metrics as met

from tpunb.worker.rehearsal.calls import Call, users_line

SHARE = 0.01
"""Of a rank's time, the most that is spent on hashes: then only every 2nd, 4th, … is taken."""
ALWAYS = 32
"""So many are taken first, whatever they cost."""
ROOM = 8192
"""Bytes in which a rank describes its program to the others."""
_MOST_KEPT = 64
_MOST_TOLD = 16

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_NODE = re.compile(r"^  %\d+ = (\(.*?\)|\S+) ([\w:]+)\(", re.MULTILINE)
_LAYOUT = re.compile(r"\{[^}]*\}")
_INPUT = "xla::device_data"


@dataclass(frozen=True)
class Outline:
    """What a person needs to know of a program: how many of which operations and inputs."""

    operations: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, int] = field(default_factory=dict)
    """'f32[32,784]' and how many of that shape."""

    @classmethod
    def of(cls, text: str) -> Outline:
        """From the text that torch_xla gives of a graph."""
        nodes = [(_LAYOUT.sub("", shape), kind) for shape, kind in _NODE.findall(text)]
        inputs = Counter(shape for shape, kind in nodes if kind == _INPUT)
        return cls(Counter(kind for _, kind in nodes if kind != _INPUT), inputs)

    def difference(self, other: Outline) -> str:
        """What this one has more and less than another, in words."""
        if not self.operations and other.operations:
            return "it had computed these tensors before (torch_xla.sync() or a value was read)"
        more, less = _beyond(self.inputs, other.inputs), _beyond(other.inputs, self.inputs)
        found = []
        if more or less:
            found.append(f"reads {more or 'nothing'} where the others read {less or 'nothing'}")
        if more := _beyond(self.operations, other.operations):
            found.append(f"has in addition {more}")
        if less := _beyond(other.operations, self.operations):
            found.append(f"lacks {less}")
        return "; ".join(found) or "the same operations in another order, or other constants"


def _beyond(one: Mapping[str, int], other: Mapping[str, int], most: int = 4) -> str:
    """'3 × aten::mul, aten::relu': what `one` has and `other` has not."""
    extra = Counter(one) - Counter(other)
    # torch's own operations first: casts and constants only come with them.
    order = sorted(extra.items(), key=lambda item: (not item[0].startswith("aten"), item))
    named = [f"{count} × {name}" if count > 1 else name for name, count in order[:most]]
    left = len(extra) - len(named)
    return ", ".join(named) + (f" and {left} more kinds" if left else "")


class Programs:
    """The programs of one rank, and what it knows about those of the others."""

    def __init__(self) -> None:
        self.calls = 0
        """Collectives so far."""
        self._looks = 0
        self._spent = 0.0
        self._begun = 0.0
        self._period = 1
        self._current = 0
        self._latest = 0
        self._outlines: dict[int, Outline] = {}
        self._same = ""
        self._told: set[tuple[bytes, tuple[int, ...]]] = set()

    def look(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the hash of what computes these tensors. To be called before it is computed."""
        self._current = 0
        if self.calls % self._period or any(t.device.type != "xla" for t in tensors):
            return
        begun = time.perf_counter()
        self._begun = self._begun or begun
        graph = int.from_bytes(_XLAC._get_graph_hash(tensors)[:8], "little") or 1
        ended = time.perf_counter()
        self._current = graph
        self._looks += 1
        self._spent += ended - begun
        if self._looks > ALWAYS:
            every = self._period * self._spent / (ended - self._begun) / SHARE
            self._period = 1 << max(0, int(every).bit_length())
        if graph not in self._outlines:
            # XLA compiles a program that is new, which takes a hundred times as long as this.
            if len(self._outlines) == _MOST_KEPT:
                del self._outlines[next(iter(self._outlines))]
            self._outlines[graph] = Outline.of(_XLAC._get_xla_tensors_text(tensors))

    def take(self) -> int:
        """A collective begins: the hash that was looked at for it, 0 if none was."""
        self.calls += 1
        current, self._current = self._current, 0
        self._latest = current
        return current

    def differ(self, call: Call, graphs: Sequence[int]) -> bool:
        """Whether the ranks' programs differ in a way not told yet. The same on all ranks."""
        looked = [graph for graph in graphs if graph]
        if len(looked) < 2:
            return False
        if len(set(looked)) == 1:
            if len(looked) == len(graphs):
                self._same = f"collective {self.calls} ({_steps()})"
            return False
        pattern = tuple(graphs.index(graph) for graph in graphs)
        known = (call.digest(), pattern)
        if known in self._told or len(self._told) == _MOST_TOLD:
            return False
        self._told.add(known)
        return True

    def described(self) -> bytes:
        """This rank's program and place, for the others, in ROOM bytes."""
        outline = self._outlines.get(self._latest, Outline())
        for most in (None, 40, 0):
            parts = [dict(Counter(part).most_common(most)) for part in vars(outline).values()]
            text = json.dumps([self._latest, users_line()[:500], *parts]).encode()
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
        lines = [f"in {call} the ranks run different programs (a warning, once for each kind):"]
        lines.append(f"  {_ranks(most)}: at {places[most[0]]}")
        for ranks in others:
            lines.append(f"  {_ranks(ranks)}: at {places[ranks[0]]}")
            lines.append(f"      {outlines[ranks[0]].difference(outlines[most[0]])}")
        since = f"they were the same at {self._same}" if self._same else "it is the first compared"
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
