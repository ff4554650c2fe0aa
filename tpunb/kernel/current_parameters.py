"""A run's parameters: plain values that its cells assign by their text, as the kernel has them.

A run is the notebook from top to bottom, with the current parameters. Where the kernel has another
value than the text, the run has the kernel's from that assignment on, as if it had been typed
there. It replaces the text if the same cell uses the name; otherwise an assignment is put above
the first cell that may use it, so that the cells between need not run again.

The kernel's values are only looked at when a run begins, and only where a text is plain.
"""

from __future__ import annotations

import ast
import os
import re
import types
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from tpunb.notebook.capture.history import Execution
from tpunb.notebook.convert.cells import parse_body
from tpunb.notebook.models import Script
from tpunb.notebook.scopes import (
    ANYTHING,
    KNOWN,
    ParsedCell,
    Scopes,
    Site,
    changed_names,
    changes_object,
    first_name,
    scopes_of,
    words,
)
from tpunb.runs.spec import Block, Role
from tpunb.utils import secrets
from tpunb.utils.literals import literal, literal_of, shown, simple
from tpunb.utils.modules import loaded, own_attributes

MOST_NOTES = 6
"""Values from the kernel that get a line of their own."""
MOST_NAMED = 12
TITLE = '# %% parameters, from the kernel tags=["injected-parameters"]'
_OF_IPYTHON = re.compile(
    r"_{1,3}|_i{1,3}|_i?\d+|In|Out|_ih|_oh|_dh|__\w+__|exit|quit|open|get_ipython"
)
_ENVIRON = "os.environ"
_NOTHING = object()


class PlainNames(Container[str]):
    """The names of plain values in the kernel, which a run may be given."""

    def __init__(self, user_ns: Mapping[str, object]) -> None:
        self._user_ns = user_ns

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or name not in self._user_ns or _OF_IPYTHON.fullmatch(name):
            return False
        return _plain(name, self._user_ns[name]) is not None


def _plain(name: str, value: object) -> str | None:
    """Return a plain value as an expression; None if it is not plain, or may be a secret."""
    text = literal(value)
    named = secrets.is_secret_name(name) and isinstance(value, str | bytes | list | tuple | dict)
    hidden = text is not None and bool(value) and (named or secrets.is_secret_text(text))
    return None if hidden else text


class Assigned(NamedTuple):
    """A plain value in the text of a cell, and what it is assigned to."""

    cell: int
    """The position of its cell among those of the run."""
    name: str
    """The variable: 'lr', 'CFG', 'os.environ'."""
    path: str
    """What comes after the name: '', '.lr', "['lr']"."""
    value: ast.expr
    text: str
    """The value as an expression in any namespace."""
    inside: bool = False
    """True for an argument of a call and an item of a dict: another part of the value's text."""

    @property
    def key(self) -> str:
        return self.name + self.path

    @property
    def parameter(self) -> str:
        """'CFG.lr', also for `CFG['lr']`."""
        return self.name + re.sub(r"\['(.*)'\]", r".\1", self.path)


@dataclass
class Parameters:
    """The parameters of a run, and what has changed in the kernel that it does not have."""

    values: dict[str, Any] = field(default_factory=dict)
    """By name, 'lr' or 'config.lr': numbers, strings, booleans, None; the text of other values."""
    own: set[str] = field(default_factory=set)
    """The names of those that are the text's own."""
    names: set[str] = field(default_factory=set)
    """Variables that only the kernel defines."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """For each value that is the kernel's, what it is assigned to, and a line about it."""
    left: list[str] = field(default_factory=list)
    """A line for each cell beside the run that changes what the run reads."""

    def lines(self) -> Iterator[str]:
        """The lines for the user."""
        yield from (line for _, line in self.notes[:MOST_NOTES])
        if more := [name for name, _ in self.notes[MOST_NOTES:]]:
            yield f"from the kernel as well: {_listed(more)}"
        yield from self.left


def with_parameters(
    script: Script,
    user_ns: Mapping[str, object],
    others: Sequence[Execution] = (),
    running: int | None = None,
) -> tuple[Script, Parameters]:
    """Return a run's script with the kernel's parameters, and a description of them.

    `others`: executions of cells that are not part of the run, in order. `running`: the number of
    the cell that starts it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warned about the cells when they ran
        return _ParameterReader(script, user_ns, others, running).read()


class _Assignment(NamedTuple):
    """A place that binds a name, an attribute or an item."""

    cell: ParsedCell
    key: str
    counts: bool = False
    """The value is made from the old one, or in a loop: no cell has set it."""
    inside: bool = False
    """It is an item of a dict, or an argument, in the text of what is assigned to a name."""


def _is_of(key: str, whole: str) -> bool:
    """Whether a key stands for the same as another, or for a part of it."""
    return key == whole or key.startswith((f"{whole}.", f"{whole}["))


class _ParameterReader:
    def __init__(
        self,
        script: Script,
        user_ns: Mapping[str, object],
        others: Sequence[Execution],
        running: int | None,
    ) -> None:
        self._script = script
        self._user_ns = user_ns
        self._running = running
        self._blocks = [block for block in script.blocks if block.role in ("prelude", "train")]
        KNOWN.begin()
        self._scopes = KNOWN.scopes(
            KNOWN.parse(script.source(block).removesuffix("\n"), at, 0, [])
            for at, block in enumerate(self._blocks)
        )
        self._words = [words(script.source(block)) for block in self._blocks]
        self._stores: dict[str, list[_Assignment]] = {}
        """By the name of the variable, also for its attributes and items."""
        for cell in self._scopes.cells:
            for name, stores in _stores_by_name(cell).items():
                self._stores.setdefault(name, []).extend(stores)
        self._elsewhere = [(other, _stores_of(other.source)) for other in others]
        self._edits: list[tuple[int, ast.expr, str]] = []
        """By the line above their cell: expressions, and what replaces them."""
        self._above: dict[int, list[str]] = {}
        """Statements by the cell that they are put above."""

    def read(self) -> tuple[Script, Parameters]:
        found = Parameters()
        for one in _texts(self._scopes, self._blocks):
            stores = self._stores.get(_name(one.key), ())
            own = (store for store in stores if _is_of(store.key, one.key))
            bound = sum(not store.inside or one.path != "" for store in own)
            base = sum(store.key == one.name for store in stores)
            if bound != 1 or (one.path and base != 1 and one.name != _ENVIRON):
                continue  # bound more than once: the cells make it
            text = self._kernels(one)
            if text is None or text == one.text:
                found.own.add(one.parameter)
            else:
                self._put(one, text)
                where = f"cell [{self._blocks[one.cell].number}] sets {shown(one.text)}"
                found.notes.append((one.key, f"{one.key}: {shown(text)} from the kernel; {where}"))
            secret = secrets.is_secret_name(one.parameter) and "'" in one.text
            if not secret and not secrets.is_secret_text(one.text):
                found.values[one.parameter] = simple(text or one.text)
        for name, at in self._undefined():
            text = _plain(name, self._user_ns[name]) or ""
            found.names.add(name)
            found.values[name] = simple(text)
            line = f"{name}: {shown(text)} from the kernel; no cell in this run defines it"
            found.notes.append((name, line))
            self._above.setdefault(at, []).append(f"{name} = {text}")
        found.left += self._left({name for name, _ in found.notes})
        return self._fill(), found

    def _kernels(self, one: Assigned) -> str | None:
        """Return the kernel's value here; None if it is not plain, or no cell has set it."""
        changed = [
            (other, own)
            for other, stores in self._elsewhere
            if (own := [s for s in stores if _is_of(s.key, one.key) or _is_of(one.key, s.key)])
        ]
        last, stores = changed[-1] if changed else (None, [])
        if last and last.number != self._running and any(store.counts for store in stores):
            return None
        holder = os.environ if one.name == _ENVIRON else self._user_ns.get(one.name, _NOTHING)
        if not one.path:
            return _plain(one.name, holder)
        if one.path.startswith("["):
            inside = holder if type(holder) is dict or holder is os.environ else {}
            return _plain(one.path, inside.get(ast.literal_eval(one.path)[0], _NOTHING))
        kind = type(holder)
        spaces = (types.SimpleNamespace, loaded("argparse", "Namespace"))
        # Otherwise the class may have made something else of the argument.
        known = kind in spaces or (is_dataclass(kind) and not hasattr(kind, "__post_init__"))
        if one.inside and not known and not changed:
            return None
        return _plain(one.path, own_attributes(holder).get(one.path[1:], _NOTHING))

    def _put(self, one: Assigned, text: str) -> None:
        """Put a value into the text of its cell, or above the first cell that may use it."""
        own = self._words[one.cell]
        if one.inside or one.name == _ENVIRON or own[one.name] > 1 or own.keys() & ANYTHING:
            self._edits.append((self._blocks[one.cell].first - 1, one.value, text))
            return
        stars = {site.cell.index for site in self._scopes.stars}
        wanted = {one.name, *ANYTHING}
        after = range(one.cell + 1, len(self._blocks) - 1)
        may_use = (at for at in after if self._words[at].keys() & wanted or at in stars)
        at = next(may_use, len(self._blocks) - 1)
        self._above.setdefault(at, []).append(f"{one.key} = {text}")

    def _undefined(self) -> Iterator[tuple[str, int]]:
        """Yield names of plain values that cells read and none binds, with the first such cell."""
        plain = PlainNames(self._user_ns)
        bound = {store.key for stores in self._stores.values() for store in stores}
        for name in sorted(set().union(*self._words) - bound):
            if name in plain and not self._scopes.globals.bindings.get(name):
                sites = [site for site in self._scopes.loads(name) if not site.scope.find(name)]
                if sites:
                    yield name, min(site.cell.index for site in sites)

    def _left(self, taken: set[str]) -> Iterator[str]:
        """Describe changes, by the text of cells beside the run, to what the run reads."""
        prelude = [block.role == "prelude" for block in self._blocks]
        for other, stores in self._elsewhere:
            names = []
            for name in sorted(_changed_by(other.source)):
                made = [s.cell.index for s in self._stores.get(name, ()) if s.key == name]
                above = max((at for at in made if prelude[at]), default=None)
                keys = {s.key for s in stores if _is_of(s.key, name)}
                all_taken = all(any(_is_of(key, one) for one in taken) for key in keys)
                if above is None or (keys and all_taken):
                    continue
                later = (self._blocks[above].number or 0) < (other.number or 0)
                if later and any(
                    site.cell.index > above and site.scope.find(name) is self._scopes.globals
                    for site in self._scopes.loads(name)
                ):
                    names.append(f"`{name}`")
            if names and other.number != self._running:
                yield (
                    f"cell [{other.number}] changes {_listed(names)}, which this run has as the "
                    "cells above make it. To include a change, make it in a cell above, return it "
                    "from a run with --returns, or pass it to tpunb.launch"
                )

    def _fill(self) -> Script:
        """Return the script with the kernel's values."""
        lines, blocks = self._script.text.split("\n"), list(self._script.blocks)
        for above, node, text in sorted(
            self._edits, key=lambda e: (-e[0], -e[1].lineno, -e[1].col_offset)
        ):
            _replace(lines, above, node, text)
        for at in sorted(self._above, reverse=True):
            block = self._blocks[at]
            title = block.first - 2  # the index of its line
            lines[title:title] = [TITLE, "; ".join(self._above[at]), ""]
            index = blocks.index(block)
            role: Role = "prelude" if block.role == "prelude" else "parameters"
            blocks[index:] = [
                Block(role, title + 2, title + 2, number=block.number, values=True),
                *(replace(b, first=b.first + 3, last=b.last + 3) for b in blocks[index:]),
            ]
        return replace(self._script, text="\n".join(lines), blocks=tuple(blocks))


@lru_cache(maxsize=500)
def _stores_of(source: str) -> list[_Assignment]:
    """Return what a cell that is not part of the run binds."""
    return [*_stores(scopes_of(parse_body(source)[0]))]


@lru_cache(maxsize=500)
def _changed_by(source: str) -> frozenset[str]:
    return frozenset(changed_names(parse_body(source)[0]))


def _stores_by_name(cell: ParsedCell) -> dict[str, list[_Assignment]]:
    assert cell.own is not None
    named: dict[str, list[_Assignment]] = cell.own.made.setdefault(_stores, {})
    for store in () if named else _stores(cell.own):
        named.setdefault(_name(store.key), []).append(store)
    return named


def _name(key: str) -> str:
    """Return the variable of a key: 'CFG' for 'CFG.lr'."""
    return re.match(rf"{re.escape(_ENVIRON)}|\w+", key)[0]  # type: ignore[index]


def _key(node: ast.AST) -> str:
    """Return 'lr', 'CFG.lr', "cfg['lr']" or "os.environ['X']"; '' for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        base = ast.unparse(node.value)
        if (isinstance(node.value, ast.Name) or base == _ENVIRON) and type(node.slice.value) is str:
            return f"{base}[{node.slice.value!r}]"
    return ""


def _stores(scopes: Scopes) -> Iterator[_Assignment]:
    """Yield what binds a global name, an attribute or an item of one, also in functions."""
    for scope in scopes.every:
        if scope is not scopes.globals and not isinstance(scope.node, ast.ClassDef):
            continue
        of_class = f"{scope.node.name}." if isinstance(scope.node, ast.ClassDef) else ""
        here = scopes.bindings_here if scope is scopes.globals else scope.bindings
        for name, bindings in here.items():
            for one in bindings:
                counts = one.changes or _counts(Site(one.node, one.frame), scopes)
                yield _Assignment(one.frame.cell, of_class + name, counts)
    sites = [site for site in (*scopes.attributes(), *scopes.subscripts) if not _loads(site.node)]
    calls = (site for site in scopes.calls if changes_object(site.call))
    methods = [Site(site.call.func, site.frame) for site in calls]
    for site in (*sites, *methods):
        key = _key(site.node)
        if key and site.scope.find(first_name(site.node)) in (None, scopes.globals):
            yield _Assignment(site.cell, key, _counts(site, scopes))
    for site in scopes.assigns:
        for target, value in _pairs(site.node) if site.frame.function is None else ():
            if isinstance(target, ast.Name):
                for path, _ in _parts(value):
                    yield _Assignment(site.cell, target.id + path, inside=True)


def _loads(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def _counts(site: Site, scopes: Scopes) -> bool:
    """Whether a store is one of many in a loop, or its value is made from the old one."""
    node, key = site.node, _key(site.node)
    while node in scopes.parents and not isinstance(node, ast.stmt):
        node = scopes.parents[node]
    value = getattr(node, "value", None)
    parts = ast.walk(value) if isinstance(value, ast.AST) and not _loads(site.node) else ()
    counted = isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor)
    return counted or site.loop() is not None or any(_loads(x) and _key(x) == key for x in parts)


def _texts(scopes: Scopes, blocks: Sequence[Block]) -> Iterator[Assigned]:
    """Yield the plain values that cells above the train cell assign by their text."""
    for at, (block, cell) in enumerate(zip(blocks, scopes.cells, strict=True)):
        if block.role != "prelude" or block.values:
            continue
        for node in cell.tree.body:
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    for target, value in _pairs(inner):
                        if isinstance(target, ast.Name) and (text := literal_of(value)):
                            yield Assigned(at, node.name, f".{target.id}", value, text)
            for target, value in _pairs(node):
                if not (key := _key(target)):
                    continue
                name = _name(key)
                if text := literal_of(value):
                    yield Assigned(at, name, key[len(name) :], value, text)
                elif key == name:
                    for path, part in _parts(value):
                        if text := literal_of(part):
                            yield Assigned(at, name, path, part, text, inside=True)


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets and values of an assignment to one name, or to several: `a, b = 1, 2`."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            if len(target.elts) == len(value.elts):
                yield from zip(target.elts, value.elts, strict=True)
        else:
            yield target, value


def _parts(value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the items of a dict, and the arguments of a call, with the path that reaches them."""
    if isinstance(value, ast.Dict):
        for key, item in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and type(key.value) is str:
                yield f"[{key.value!r}]", item
    if isinstance(value, ast.Call):
        is_dict = isinstance(value.func, ast.Name) and value.func.id == "dict"
        for word in value.keywords:
            if word.arg is not None:
                yield f"[{word.arg!r}]" if is_dict else f".{word.arg}", word.value


def _replace(lines: list[str], above: int, node: ast.expr, text: str) -> None:
    """Replace an expression in lines, and keep their number. `above`: the lines above its cell."""
    first, last = above + node.lineno - 1, above + (node.end_lineno or node.lineno) - 1
    head = lines[first].encode()[: node.col_offset].decode()
    tail = lines[last].encode()[node.end_col_offset or 0 :].decode()
    if last > first:  # a line break ends no expression in parentheses
        lines[first], lines[last] = f"{head}({text}", f"){tail}"
        lines[first + 1 : last] = [""] * (last - first - 1)
    else:
        lines[first] = f"{head}{text}{tail}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
