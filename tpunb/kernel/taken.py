"""What a run takes from the kernel: plain values that were changed since the cells made them.

They become assignments in the script, between the prelude and the train cell, so that the script
by itself does the same. All other changes are named in one line, because the run does not have
them.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpunb.kernel.changes import TORCH_SETTERS, ChangedVariable, Changes, PreludeCell
from tpunb.kernel.settings import (
    Part,
    PartKind,
    SettingDifference,
    differences,
    is_plain,
    parts_of,
    top_level,
)
from tpunb.notebook.models import Script
from tpunb.utils.literals import shown, simple
from tpunb.utils.modules import is_own_module

MOST_NOTES = 6
"""Values taken from the kernel that get a line of their own."""
MOST_NAMED = 12
TITLE = '# %% parameters, from the kernel tags=["injected-parameters"]'


@dataclass
class TakenValues:
    """The values that a run takes from the kernel, and the changes that it does not have."""

    statements: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """The variables that the run takes as a whole."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """The values that the statements assign, by name: 'lr', 'config.lr'."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """For each value that is taken, its name and a line about it."""
    left: list[str] = field(default_factory=list)
    """Changes that the run does not have."""
    files: list[str] = field(default_factory=list)
    """Modules whose files were edited since the kernel imported them."""

    def lines(self) -> Iterator[str]:
        """One line for each value that is taken, and one for all changes that are not."""
        yield from (line for _, line in self.notes[:MOST_NOTES])
        if more := [name for name, _ in self.notes[MOST_NOTES:]]:
            yield f"from the kernel as well: {_listed(more)}"
        if self.left:
            yield (
                f"changes in the kernel that this run does not have: {_listed(self.left)}. "
                "To include one, make it in a cell above, return it from a run with --returns, "
                "or pass it to tpunb.launch"
            )
        for file in self.files:
            yield (
                f"{file} was edited since the kernel imported it: the run imports it as it is now, "
                f"the kernel after importlib.reload({Path(file).stem})"
            )

    def fill(self, script: Script) -> Script:
        """Return the script with the assignments in the lines that are reserved for them."""
        if not self.statements:
            return script
        [block] = [block for block in script.blocks if block.role == "parameters"]
        lines = script.text.split("\n")
        lines[block.first - 1 : block.last] = [TITLE, "; ".join(self.statements)]
        return replace(script, text="\n".join(lines))


def take(
    changes: Changes, prelude: Iterable[PreludeCell], names: Iterable[str], running: int | None
) -> TakenValues:
    """Decide what a run takes from the kernel.

    `names`: those that the train cell reads. `running`: the number of the running cell.
    """
    taken = TakenValues(files=list(changes.edited_modules()))
    assigned: dict[int, str] = {}
    for change in changes.since(prelude, names, running):
        if change.kernel.gone:
            taken.left.append(_deleted(change))
        elif not change.name.isidentifier():
            _take_setting(taken, changes, change)
        elif not _is_import(value := changes.value(change.name)):
            plain = not _is_mutable(value) and is_plain(change.name, value)
            alias = None if plain else change.alias or assigned.get(change.kernel.identity)
            if alias is not None and not change.in_place:
                taken.statements.append(f"{change.name} = {alias}")
                taken.names.add(change.name)
                taken.notes.append((change.name, f"{change.name} is {alias}, as in the kernel"))
            elif _take_value(taken, change, value):
                assigned[change.kernel.identity] = change.name
    return taken


def _deleted(change: ChangedVariable) -> str:
    made = None if change.run is None else change.run.cell
    return (
        f"{change.name} (deleted; cell [{made}] defines it)" if made else f"{change.name} (deleted)"
    )


def _is_mutable(value: object) -> bool:
    return any(type(value) is kind for kind in (list, dict, set))


def _is_import(value: Any) -> bool:
    """True for what an import binds: it is the same in each process."""
    if issubclass(type(value), types.ModuleType):
        return not is_own_module(value.__dict__.get("__name__"))
    if any(type(value) is kind for kind in (types.BuiltinFunctionType, types.FunctionType, type)):
        return not is_own_module(getattr(value, "__module__", None))
    return False


def _take_setting(taken: TakenValues, changes: Changes, change: ChangedVariable) -> None:
    """Take over an environment variable, or a setting of torch."""
    [part] = parts_of(change.name, changes.value(change.name))
    if part.taken is None:
        taken.left.append(_left(change, part.path, part))
        return
    module, _, rest = change.name.partition(".")
    if module == "torch":
        setter = TORCH_SETTERS[rest.removesuffix("()")]
        taken.statements.append(f'__import__("torch").{setter}({part.taken})')
    else:
        taken.statements.append(f'__import__("os").{rest} = {part.taken}')
    taken.notes.append((change.name, _note(change, SettingDifference("", None, part, None))))


def _take_value(taken: TakenValues, change: ChangedVariable, value: object) -> bool:
    """Take over a value, or what has changed in it; True if it is assigned as a whole."""
    kernel = parts_of(change.name, value)
    here = () if change.run is None else change.run.parts
    whole = kernel[0]
    apart = bool(here) and here[0].kind is whole.kind is not PartKind.LEAF
    other = apart and whole.taken is None and whole.kind is not PartKind.CLASS
    if apart and (change.in_place or other):
        if not change.in_place:  # other names of the run's object keep their values
            kernel, here = top_level(kernel), top_level(here)
            taken.statements.append(f'{change.name} = __import__("copy").copy({change.name})')
        found = list(differences(kernel, here))
        for difference in found:
            _take_part(taken, change, difference)
        if not found:  # what is no setting has changed: an item of a user's list, a base class
            taken.left.append(_left(change, "", whole))
        return False
    if whole.taken is None:
        if change.run is not None:  # otherwise the conversion knows whether it is needed
            taken.left.append(_left(change, "", whole))
        return False
    difference = SettingDifference("", here[0] if here else None, whole, None)
    _assign(taken, change, difference, in_place=change.in_place and _is_mutable(value))
    taken.names.add(change.name)
    return True


def _take_part(taken: TakenValues, change: ChangedVariable, difference: SettingDifference) -> None:
    kernel, here = difference.kernel, difference.here
    if kernel is None:
        if difference.parent in (PartKind.DICT, PartKind.NAMESPACE, PartKind.OBJECT):
            name = f"{change.name}{difference.path}"
            taken.statements.append(f"del {name}")
            taken.notes.append((name, f"{name}: deleted, as in the kernel"))
        else:
            assert here is not None
            taken.left.append(_left(change, difference.path, here))
    elif kernel.taken is not None:
        _assign(taken, change, difference)
    else:
        taken.left.append(_left(change, difference.path, kernel))


def _assign(
    taken: TakenValues,
    change: ChangedVariable,
    difference: SettingDifference,
    *,
    in_place: bool = False,
) -> None:
    assert difference.kernel is not None
    value, path = difference.kernel.taken, difference.path
    assert value is not None
    if difference.parent is PartKind.FROZEN:
        outer, _, attribute = path.rpartition(".")
        statement = f"object.__setattr__({change.name}{outer}, {attribute!r}, {value})"
    elif in_place and value.startswith("["):
        statement = f"{change.name}[:] = {value}"
    elif in_place:
        statement = f"{change.name}.clear(); {change.name}.update({value})"
    else:
        statement = f"{change.name}{path} = {value}"
    taken.statements.append(statement)
    taken.parameters[_dotted(change.name, path)] = simple(value)
    taken.notes.append((f"{change.name}{path}", _note(change, difference)))


def _note(change: ChangedVariable, difference: SettingDifference) -> str:
    assert difference.kernel is not None
    assert difference.kernel.taken is not None
    line = f"{change.name}{difference.path}: {shown(difference.kernel.taken)} from the kernel"
    if change.run is None:
        return f"{line}; no cell in this run defines it"
    if change.run.cell is None:
        return line
    if difference.here is not None and difference.here.taken is not None:
        return f"{line}; cell [{change.run.cell}] sets {shown(difference.here.taken)}"
    other = "another value" if not change.run.parts or difference.here else "no such value"
    return f"{line}; cell [{change.run.cell}] sets {other}"


def _left(change: ChangedVariable, path: str, part: Part) -> str:
    """Describe a change that the run does not have."""
    name = f"{change.name}{path}"
    if part.secret:
        return f"{name} (what may be a secret is not taken over)"
    if change.run is not None and change.run.because:
        others = ", ".join(change.run.because[:3])
        if others == change.name:
            return f"{name} (cell [{change.kernel.cell}] changed another value)"
        return f"{name} (cell [{change.kernel.cell}] made it with another {others})"
    if change.kernel.cell is not None:
        return f"{name} (cell [{change.kernel.cell}])"
    return f"{name} (since cell [{change.run.cell}])" if change.run else name


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
