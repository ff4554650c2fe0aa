"""Gives the train cell the kernel's plain values, and reports other differences from the kernel.

After the prelude has run, and before the train cell, each name that the train cell reads is
compared with the kernel's value. Plain values that differ become assignments in the script,
between the prelude and the train cell, so that the script alone does the same. Values that the
cells have computed from a name's old value are not updated. Differences between values that are
not plain are only reported.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.kernel_values import (
    Difference,
    KernelName,
    KernelValues,
    Part,
    PartKind,
    differences,
    value_parts,
)
from tpunb.utils.files import atomic_write, read_text, write_json
from tpunb.utils.literals import shown, simple
from tpunb.worker.cells import Cells

MOST_NOTES = 6
"""Values taken from the kernel that get a line of their own."""
MOST_NAMED = 12
TITLE = '# %% parameters, from the kernel tags=["injected-parameters"]'
SAME = 1e-6
"""Relative difference of floats up to which values that are not taken count as equal."""


@dataclass
class Taken:
    """The values that are taken from the kernel, and the differences that remain."""

    statements: list[str] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    """The values that the statements assign, by name: 'lr', 'config.lr'."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """For each value that is taken, its name and a line about it."""
    kept: list[str] = field(default_factory=list)
    """Values that differ and stay as the cells make them."""

    def lines(self) -> Iterator[str]:
        """One line for each value that is taken, and one for all remaining differences."""
        yield from (line for _, line in self.notes[:MOST_NOTES])
        if more := [name for name, _ in self.notes[MOST_NOTES:]]:
            yield f"from the kernel as well: {_listed(more)}"
        if self.kept:
            yield f"differs from the kernel, the run keeps the cells' value: {_listed(self.kept)}"


def take_over(run: RunDir, cells: Cells, *, replicate: bool, tell: bool) -> None:
    """Set the kernel's plain values in the script's namespace, where they differ.

    `replicate`: this is a rank that has run the prelude itself. `tell`: this process reports the
    differences, and writes the values into the script and `parameters.json`. Does nothing in a run
    that takes all values from the cells.
    """
    try:
        data = json.loads(read_text(run.kernel_values))
    except FileNotFoundError:
        return
    taken = compare(KernelValues.from_json(data), vars(cells.module), replicate=replicate)
    if taken.statements:
        cells.fill("parameters", [TITLE, "; ".join(taken.statements)])
        if tell:
            atomic_write(run.script, cells.text.encode())
            write_json(run.parameters, taken.parameters)
        for block in cells.of("parameters"):
            cells.execute(block)
    if tell:
        for line in taken.lines():
            run.emit(Note(line))


def compare(values: KernelValues, namespace: dict[str, Any], *, replicate: bool) -> Taken:
    """Compare the kernel's values with those that the prelude has made, name by name."""
    taken = Taken()
    here = {
        entry.name: value_parts(entry.name, namespace[entry.name], values.key)
        for entry in values.names
        if entry.name in namespace
    }
    shared = _shared(values, namespace)
    for entry in values.names:
        if entry.name not in here:
            if entry.plain and (entry.certain or (entry.takes and not replicate)):
                _assign(taken, entry, Difference("", None, entry.parts[0], None))
            continue
        takes = entry.certain if replicate else entry.takes
        found = list(differences(entry.parts, here[entry.name]))
        if found and takes and entry.name in shared:
            # These names share one object in this process, and have two in the kernel: replace the
            # object if it is plain; changing it would change the values of the other names.
            if entry.plain:
                found = [Difference("", here[entry.name][0], entry.parts[0], None)]
            else:
                takes = False
        for difference in found:
            _decide(taken, entry, difference, takes=takes)
    return taken


def _shared(values: KernelValues, namespace: dict[str, Any]) -> set[str]:
    """Names that share one object in this process, and have different values in the kernel."""
    by_object: dict[int, list[KernelName]] = {}
    for entry in values.names:
        if entry.name in namespace and entry.parts[0].kind is not PartKind.LEAF:
            by_object.setdefault(id(namespace[entry.name]), []).append(entry)
    return {
        entry.name
        for entries in by_object.values()
        for entry in entries
        if any(entry.parts != other.parts for other in entries)
    }


def _decide(taken: Taken, entry: KernelName, difference: Difference, *, takes: bool) -> None:
    kernel, here = difference.kernel, difference.here
    if kernel is None:
        removable = difference.parent in (PartKind.DICT, PartKind.NAMESPACE)
        if takes and removable and here is not None:
            _remove(taken, entry, difference, here)
    elif takes and kernel.literal is not None:
        _assign(taken, entry, difference)
    elif not _nearly_equal(kernel, here):
        taken.kept.append(_kept(entry, difference))


def _nearly_equal(kernel: Part, here: Part | None) -> bool:
    """True if both are floats that differ by rounding only, as sums of several threads do."""
    if here is None or kernel.literal is None or here.literal is None:
        return False
    one, other = simple(kernel.literal), simple(here.literal)
    return (
        isinstance(one, float)
        and isinstance(other, float)
        and math.isclose(one, other, rel_tol=SAME)
    )


def _assign(taken: Taken, entry: KernelName, difference: Difference) -> None:
    assert difference.kernel is not None
    value, path = difference.kernel.literal, difference.path
    assert value is not None
    if difference.parent is PartKind.FROZEN:
        outer, _, attribute = path.rpartition(".")
        taken.statements.append(f"object.__setattr__({entry.name}{outer}, {attribute!r}, {value})")
    else:
        taken.statements.append(f"{entry.name}{path} = {value}")
    taken.parameters[_dotted(entry.name, path)] = simple(value)
    line = f"{entry.name}{path}: {shown(value)} from the kernel"
    if entry.cell is None:
        line += "; no cell in this run defines it"
    elif difference.here is not None and difference.here.literal is not None:
        line += f"; cell [{entry.cell}] makes {shown(difference.here.literal)}"
    else:
        other = "no such value" if difference.here is None else "another value"
        line += f"; cell [{entry.cell}] makes {other}"
    taken.notes.append((f"{entry.name}{path}", line + _stale(entry)))


def _remove(taken: Taken, entry: KernelName, difference: Difference, here: Part) -> None:
    name = f"{entry.name}{difference.path}"
    taken.statements.append(f"del {name}")
    makes = "it" if here.literal is None else shown(here.literal)
    line = f"{name}: not in the kernel, so removed; cell [{entry.cell}] makes {makes}"
    taken.notes.append((name, line + _stale(entry)))


def _stale(entry: KernelName) -> str:
    """A clause that names the cells of this run that have used the replaced value; '' if none."""
    if not entry.stale:
        return ""
    cells = ", ".join(f"[{number}]" for number in entry.stale)
    some = f"cells {cells} have" if len(entry.stale) > 1 else f"cell {cells} has"
    return (
        f", which {some} used in this run, unlike in the kernel: assign {entry.name} above "
        f"{'them' if len(entry.stale) > 1 else 'it'} to change that, too"
    )


def _kept(entry: KernelName, difference: Difference) -> str:
    kernel, here = difference.kernel, difference.here
    where = "" if entry.cell is None else f"cell [{entry.cell}]"
    if kernel is not None and kernel.secret is not None:
        where = f"{where}; what may be a secret is not taken over" if where else "a secret"
    elif kernel is not None and kernel.literal is not None:
        where = f"{where}; {shown(kernel.literal, 30)} in the kernel" if where else "in the kernel"
    value = "" if here is None or here.literal is None else f" = {shown(here.literal, 30)}"
    return f"{entry.name}{difference.path}{value} ({where})"


def _dotted(name: str, path: str) -> str:
    """'config.lr' for `config['lr']`."""
    steps = [name]
    node: ast.AST = ast.parse(f"{name}{path}", mode="eval").body
    while isinstance(node, ast.Attribute | ast.Subscript):
        inner = node.attr if isinstance(node, ast.Attribute) else node.slice
        steps.insert(1, str(inner.value) if isinstance(inner, ast.Constant) else str(inner))
        node = node.value
    return ".".join(steps)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
